"""`status` once, as JSON, and again and again; an honest time left, and never 100 % too early."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from eagle_batch.cli import main
from eagle_batch.cli.status import percent, seconds_left
from eagle_batch.job import status as job_status
from eagle_batch.job.status import JobStatus
from tests.job.fake_job import load_job, run_in_process, write_job

RUNNING = JobStatus(
    output="out",
    name="synth",
    state="running",
    units=100,
    rows=38,
    quarantined=2,
    dropped=0,
    tasks=10,
    tasks_done=4,
    host="here",
    pid=1,
    silent_s=1.0,
    looked=1003.0,
    metrics={
        "updated": 1000.0,
        "tokens_per_s": 10.0,
        "tokens_per_s_now": 12.0,
        "eta_s": 123.0,
        "workers_ready": 3,
        "completed": 44,
        "engine": {"acceptance_length": 2.0, "occupancy": 0.75, "completion_tokens": 400},
    },
)


def test_the_time_left_is_what_the_run_expected_less_the_time_since() -> None:
    assert seconds_left(RUNNING) == pytest.approx(120.0)
    assert seconds_left(replace(RUNNING, looked=5000.0)) == 0.0


@pytest.mark.parametrize(
    "found",
    [
        replace(RUNNING, state="complete"),
        replace(RUNNING, metrics=None),
        replace(RUNNING, metrics={**(RUNNING.metrics or {}), "eta_s": None}),
    ],
)
def test_nothing_is_guessed_before_anything_is_known(found: JobStatus) -> None:
    assert seconds_left(found) is None


def test_it_is_100_percent_only_when_no_shard_is_left() -> None:
    almost = replace(RUNNING, rows=98, quarantined=2, tasks_done=9)
    assert percent(almost) == 99
    assert percent(replace(almost, tasks_done=10)) == 100


def test_watching_ends_with_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: Iterator[JobStatus] = iter([RUNNING, RUNNING, replace(RUNNING, state="complete")])
    monkeypatch.setattr(job_status, "read_status", lambda output: next(looks))
    result = CliRunner().invoke(main, ["status", "out", "--watch", "--interval", "0.1", "--json"])
    assert result.exit_code == 0, result.output
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert [line["state"] for line in lines] == ["running", "running", "complete"]
    assert lines[0]["eta_s"] == pytest.approx(120.0)
    assert (lines[0]["tokens_per_s"], lines[0]["occupancy"]) == (12.0, 0.75)


def test_a_look_at_a_complete_job_ends_at_once(tmp_path: Path) -> None:
    run_in_process(load_job(write_job(tmp_path, ["a"])))
    result = CliRunner().invoke(main, ["status", str(tmp_path / "out"), "--watch"])
    assert result.exit_code == 0
    assert "fake, complete" in result.stdout
    assert "(100 %)" in result.stdout


def lines_of(result: Any) -> list[str]:
    return [line.split()[0] for line in result.stdout.splitlines() if line]


def test_a_running_job_shows_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_status, "read_status", lambda output: RUNNING)
    result = CliRunner().invoke(main, ["status", "out"])
    for text in (
        "40 of 100 committed (40 %), 44 made",
        "about 2m00s",
        "12.0 tokens/s now, 10.0 on average",
        "75% of the slots in use, 2.00 tokens a target pass",
        "3 ready",
    ):
        assert text in result.stdout
    assert lines_of(result)[-1] == "left"
