"""Structured logs: one JSON object a line, with the ids that a line is about."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from eagle_batch.errors import ConfigError
from eagle_batch.job.logs import Log, logged_to
from tests.job.fake_engine import RAISE
from tests.job.fake_job import load_job, run_in_process, write_job


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def test_a_job_s_lines_tell_which_worker_made_which_shard(tmp_path: Path) -> None:
    """Killed once in the middle; the ids lead from the loss to the shard that was made again."""
    killed: list[int] = []

    def sabotage(worker: int, pumps: int) -> None:
        if pumps == 3 and not killed:
            killed.append(worker)
            raise RuntimeError("the device is gone")

    job = load_job(write_job(tmp_path, [f"t{n}" for n in range(12)]))
    with logged_to(tmp_path / "log" / "driver.jsonl"):
        run_in_process(job, sabotage=sabotage)
    lines = read(tmp_path / "log" / "driver.jsonl")
    assert {line["job"] for line in lines} == {"fake"}
    assert len({line["run"] for line in lines}) == 1
    [lost] = [line for line in lines if line["message"].startswith("worker lost")]
    assert (lost["level"], lost["worker"]) == ("error", killed[0])
    assert "the device is gone" in lost["message"]
    made = [line for line in lines if line["message"] == "shard committed"]
    assert sorted(line["shard"] for line in made) == [f"part-{n:05d}" for n in range(3)]
    again = next(line for line in made if line["shard"] == lost["shards"][0])
    assert again["worker"] != killed[0]
    assert again["attempt"] == 2
    assert lines[-1]["message"] == "run ended: complete"


def test_a_shard_that_fails_is_logged_with_its_traceback(tmp_path: Path) -> None:
    job = load_job(write_job(tmp_path, ["a", RAISE], limits={"shard_attempts": 1}))
    with logged_to(tmp_path / "log"):
        run_in_process(load_job(write_job(tmp_path, ["a", RAISE]), "limits.max_error_rate=1.0"))
    assert job.pipeline.name == "fake"
    assert any("in _misbehave" in line["message"] for line in read(tmp_path / "log"))


def test_text_with_quotes_lines_and_percent_signs_stays_one_line(tmp_path: Path) -> None:
    with logged_to(tmp_path / "log"):
        Log(job='a "b"', worker=3).warning("100 %s\nof ü", shard="part-00001")
    [line] = read(tmp_path / "log")
    assert line.pop("time").endswith("+00:00")
    assert line == {
        "level": "warning",
        "message": "100 %s\nof ü",
        "job": 'a "b"',
        "worker": 3,
        "shard": "part-00001",
    }


def test_where_nobody_asked_nothing_is_printed() -> None:
    code = "from eagle_batch.job.logs import Log; Log(job='a').error('gone')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")


def test_a_log_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(ConfigError, match=r"--log: .*/file/log cannot be written"),
        logged_to(tmp_path / "file" / "log"),
    ):
        pass
