"""A node of a Ray cluster is killed; its shards are made on the others."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from eagle_batch.job.verify import verify
from tests.job.fake_job import expected_rows, read_rows, write_job

# By default `tests/schedule/test_nodes.py` kills a node, under the Jobs API.
pytestmark = pytest.mark.exhaustive

TOPICS = [f"topic {'x' * (n % 7)}" for n in range(16)]


def test_a_node_that_is_killed_costs_no_row(tmp_path: Path, repository: Path) -> None:
    pipeline = write_job(tmp_path, TOPICS)
    # A cluster belongs to its process, and this one may hold another.
    with tempfile.TemporaryDirectory(prefix="eb-", dir="/tmp", ignore_cleanup_errors=True) as short:
        settings = {
            "RAY_TMPDIR": short,
            "RAY_AUTH_MODE": "disabled",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        }
        done = subprocess.run(
            [sys.executable, "-m", "tests.faults.node_child", str(pipeline)],
            cwd=repository,
            env={n: v for n, v in os.environ.items() if not n.startswith("RAY_")} | settings,
            capture_output=True,
            text=True,
            check=False,
            timeout=240,
        )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "killed a node" in done.stdout
    assert "was lost, its shards go back" in done.stdout
    assert read_rows(tmp_path / "out") == expected_rows(TOPICS)
    assert verify(str(tmp_path / "out")).ok
