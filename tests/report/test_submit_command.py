"""`submit` leaves report and data set card however the job ended, and speaks JSON on request."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from eagle_batch.cli import main
from eagle_batch.data.describe import prepare
from eagle_batch.job import submit
from eagle_batch.job.driver import run_job
from eagle_batch.job.job import Job, JobResult, Watcher
from eagle_batch.pipeline import Pipeline
from tests.job.fake_engine import LONG
from tests.job.fake_job import InProcessPool, write_job


def run_here(
    pipeline: Pipeline,
    watcher: Watcher,
    command: list[str],
    *,
    dashboard: bool = False,
    log: Path | None = None,
) -> JobResult:
    plan, prompter = prepare(pipeline)
    job = Job(pipeline, plan, prompter, {"command": command})
    return run_job(job, lambda started: InProcessPool(pipeline, job, started), watcher)


@pytest.fixture(autouse=True)
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submit, "run_on_ray", run_here)


def submitted(path: Path, *options: str) -> Result:
    return CliRunner().invoke(main, ["submit", str(path), *options])


def test_a_complete_job_has_a_report_and_a_card_and_says_where(tmp_path: Path) -> None:
    result = submitted(write_job(tmp_path, ["a", "b"]))
    assert result.exit_code == 0, result.output
    assert f"report:      {tmp_path}/out/report.html" in result.stdout
    assert "4" in (tmp_path / "out/report.html").read_text("utf-8")
    assert (tmp_path / "out/README.md").read_text("utf-8").startswith("---\nconfigs:")


def test_a_stopped_job_has_a_report_that_says_so(tmp_path: Path) -> None:
    result = submitted(write_job(tmp_path, [LONG] * 8))
    assert result.exit_code == 4, result.output
    report = (tmp_path / "out/report.html").read_text("utf-8")
    assert 'state bad">error rate' in report
    assert "prompt_too_long" in report


def test_a_complete_job_submitted_again_keeps_its_report(tmp_path: Path) -> None:
    path = write_job(tmp_path, ["a"])
    submitted(path)
    before = (tmp_path / "out/report.html").read_bytes()
    assert submitted(path).exit_code == 0
    assert (tmp_path / "out/report.html").read_bytes() == before


def test_json_lines_end_with_the_result(tmp_path: Path) -> None:
    result = submitted(write_job(tmp_path, ["a", "b"]), "--json")
    assert result.exit_code == 0, result.output
    events = [json.loads(line) for line in result.stdout.splitlines()]
    assert {event["event"] for event in events[:-1]} == {"progress"}
    assert events[-1] == {
        "event": "result",
        "output": f"{tmp_path}/out",
        "units": 4,
        "rows": 4,
        "quarantined": 0,
        "dropped": 0,
        "already_complete": False,
    }
