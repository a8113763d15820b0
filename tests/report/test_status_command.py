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

SERIES = [{"at": 10.0 * n, "tokens": 100 * n, "units": 5 * n} for n in range(9)]
RUNNING = JobStatus(
    output="out",
    name="synth",
    state="running",
    units=100,
    rows=38,
    quarantined=2,
    tasks=10,
    tasks_done=4,
    host="here",
    pid=1,
    silent_s=1.0,
    metrics={
        "tokens_per_s": 10.0,
        "engine": {"acceptance_length": 2.0},
        "rows_this_run": 40,
        "series": SERIES,
    },
)


def test_the_time_left_is_that_of_the_rows_left() -> None:
    # 5 rows in 10 seconds; 60 rows are left.
    assert seconds_left(RUNNING) == pytest.approx(120.0)


def test_rows_in_memory_and_of_earlier_runs_are_not_made_again() -> None:
    document = {**RUNNING.metrics, "rows_this_run": 50, "earlier_runs": [{"rows_this_run": 30}]}  # type: ignore[dict-item]
    assert seconds_left(replace(RUNNING, metrics=document)) == pytest.approx(40.0)


@pytest.mark.parametrize(
    "found",
    [
        replace(RUNNING, state="complete"),
        replace(RUNNING, metrics=None),
        replace(RUNNING, metrics={**(RUNNING.metrics or {}), "series": SERIES[:1]}),
        replace(RUNNING, metrics={**(RUNNING.metrics or {}), "rows_this_run": 0}),
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
    assert "about 2m00s" in result.stdout
    assert lines_of(result)[-1] == "left"
