"""`eagle-batch jobs`, as it is typed."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from eagle_batch import cli
from eagle_batch.data.describe import prepare
from eagle_batch.job import submit
from eagle_batch.job.driver import run_job
from eagle_batch.job.job import Job, JobResult, Watcher
from eagle_batch.pipeline import Pipeline
from tests.job.fake_job import InProcessPool
from tests.schedule.jobs import write_file

TICK = "2027-03-01T04:30:00+00:00"


def jobs(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli.main, ["jobs", *map(str, arguments)])


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[Pipeline]:
    """Let jobs run in this process, with the fake engine; returns what was run."""
    calls: list[Pipeline] = []

    def run(pipeline: Pipeline, watcher: Watcher, command: list[str], **_: Any) -> JobResult:
        calls.append(pipeline)
        plan, prompter = prepare(pipeline)
        job = Job(pipeline, plan, prompter, {"command": command})
        return run_job(job, lambda started: InProcessPool(pipeline, job, started), watcher)

    monkeypatch.setattr(submit, "run_on_ray", run)
    return calls


def test_a_tick_is_run_once_and_says_so(tmp_path: Path, runs: list[Pipeline]) -> None:
    path = write_file(tmp_path)
    first = jobs("run", path, "--tick", TICK)
    assert first.exit_code == 0, first.output
    assert "nightly: tick 20270301T043000Z is complete: 4 rows, 0 quarantined" in first.stdout
    assert len(list((tmp_path / "out" / "2027-03-01" / "data").glob("*.parquet"))) == 1
    assert (tmp_path / "out" / "2027-03-01" / "report.html").is_file()
    again = jobs("run", path, "--at", "2027-03-01T23:59:59Z")
    assert again.exit_code == 0
    assert "is complete already; nothing was started" in again.stdout
    assert len(runs) == 1


def test_sigterm_interrupts_a_tick_that_nothing_else_guards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def terminated(*_: Any, **__: Any) -> JobResult:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(10)
        raise AssertionError("nothing came")

    monkeypatch.setattr(submit, "run_on_ray", terminated)
    before = signal.getsignal(signal.SIGTERM)
    assert jobs("run", write_file(tmp_path), "--tick", TICK).exit_code == 130
    assert signal.getsignal(signal.SIGTERM) is before


def test_the_last_tick_is_run_unless_another_is_named(tmp_path: Path, runs: list[Pipeline]) -> None:
    path = write_file(tmp_path, schedule={"cron": "0 0 1 1 *"})
    assert jobs("run", path).exit_code == 0
    assert runs[0].output.path.endswith("-01-01")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--tick", "2027-03-01T04:31:00Z"], "when nightly is not due; its neighbours are"),
        (["--tick", "noon"], "--tick: found 'noon'"),
        (["--tick", TICK, "--at", "now"], "found both"),
    ],
)
def test_a_wrong_time_exits_2(
    options: list[str], said: str, tmp_path: Path, runs: list[Pipeline]
) -> None:
    result = jobs("run", write_file(tmp_path), *options)
    assert (result.exit_code, runs) == (2, [])
    assert said in result.stderr


def test_a_failed_run_exits_with_its_code_and_is_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_file(tmp_path, retries=0)
    (tmp_path / "pipeline" / "in.parquet").unlink()
    result = jobs("run", path)
    assert result.exit_code == 2
    assert "in.parquet" in result.stderr
    listed = jobs("list", "--folder", tmp_path)
    assert ": failed: input.path" in listed.stdout


def test_the_list_shows_the_next_and_the_last_tick(tmp_path: Path, runs: list[Pipeline]) -> None:
    path = write_file(tmp_path, schedule={"cron": "30 2 * * *", "timezone": "Europe/Berlin"})
    assert ": not run\n" in jobs("list", "--folder", tmp_path).stdout
    jobs("run", path)
    listed = jobs("list", "--folder", tmp_path).stdout
    assert "30 2 * * *  Europe/Berlin" in listed
    assert "complete, 4 rows, 0 quarantined" in listed
    assert "note  schedule.cron" in listed


def test_next_shows_ticks_and_outputs(tmp_path: Path) -> None:
    write_file(tmp_path)
    lines = jobs("next", "nightly", "--folder", tmp_path, "--count", "3").stdout.splitlines()
    assert len(lines) == 3
    assert all("04:30 UTC" in line and f"{tmp_path}/out/20" in line for line in lines)


def test_a_folder_s_wrong_files_are_all_named(tmp_path: Path) -> None:
    write_file(tmp_path)
    (tmp_path / "twin.yaml").write_text((tmp_path / "nightly.yaml").read_text())
    (tmp_path / "wrong.yaml").write_text("name: x\n")
    result = jobs("list", "--folder", tmp_path)
    assert result.exit_code == 2
    assert "wrong.yaml: pipeline: is missing" in result.stderr
    assert "twin.yaml: name: found 'nightly', which" in result.stderr
    assert jobs("list", "--folder", tmp_path / "none").exit_code == 2


@pytest.mark.parametrize(
    ("target", "name"),
    [
        ("cronjob", "nightly-cronjob.yaml"),
        ("kuberay", "nightly-raycronjob.yaml"),
        ("cron", "nightly.crontab"),
        ("systemd", "eagle-batch-nightly.timer"),
        ("airflow", "nightly_dag.py"),
    ],
)
def test_manifests_are_printed_or_written(target: str, name: str, tmp_path: Path) -> None:
    change = {"output.path": "o/{{ run.date }}", "workers.count": 2, "workers.gpus": 1}
    path = write_file(tmp_path, set=change)
    printed = jobs("emit", path, "--to", target, "--job-file", "/mnt/j.yaml")
    assert printed.exit_code == 0, printed.output
    assert "jobs run /mnt/j.yaml" in printed.stdout
    written = jobs("emit", path, "--to", target, "--job-file", "/mnt/j.yaml", "--write", tmp_path)
    assert str(tmp_path / name) in written.stdout
    assert (tmp_path / name).read_text() in printed.stdout


def test_the_daemon_runs_what_is_due_and_ends(tmp_path: Path) -> None:
    result = jobs("daemon", write_file(tmp_path, schedule={"cron": "0 0 1 1 *"}), "--once")
    assert (result.exit_code, result.stdout) == (0, "looking after nightly\n")
