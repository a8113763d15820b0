"""Throughput grows with the actors, and a job is nearly as fast as its bare engine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow


def measure(repository: Path, *arguments: str) -> dict[str, float]:
    """Run the benchmark in a process of its own, since it starts a Ray."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.bench.scaling", *arguments],
        cwd=repository,
        env=os.environ | {"PYTHONPATH": str(repository), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    print(done.stdout)
    return found


def test_four_actors_do_more_than_twice_the_work_of_one(repository: Path) -> None:
    """Far below what is measured, so that a busy machine does not fail it."""
    assert measure(repository, "actors", "1,4", "1", "0.1")["4"] > 0.5


@pytest.mark.exhaustive
def test_32_actors_are_at_least_95_per_cent_efficient(repository: Path) -> None:
    assert measure(repository, "actors", "1,8,32", "6")["32"] >= 0.95


@pytest.mark.exhaustive
def test_a_job_has_at_least_97_per_cent_of_its_bare_engine_s_speed(repository: Path) -> None:
    found = measure(repository, "job")
    assert found["job"] >= 0.97 * min(found["bare_before"], found["bare_after"]), found
