"""The command line: exit codes, messages on the right stream, and what it does not load."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from eagle_batch import cli, demo
from eagle_batch.cli import app
from eagle_batch.data.describe import prepare
from eagle_batch.errors import EagleBatchError, ExitCode, OutputBusyError
from eagle_batch.job import submit
from eagle_batch.job.driver import run_job
from eagle_batch.job.job import Job, JobResult, Watcher
from eagle_batch.pipeline import Pipeline
from tests.job.fake_engine import LONG
from tests.job.fake_job import InProcessPool, load_job, run_in_process, write_job

TOPICS = [f"topic {'x' * n}" for n in range(6)]
COMMANDS = sorted(["demo", "plan", "status", "submit", "validate", "verify"])


def invoke(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli.main, list(map(str, arguments)))


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Let `submit` run its job in this process, with the fake engine; returns what it is given."""
    calls: list[dict[str, Any]] = []

    def run(pipeline: Pipeline, watcher: Watcher, command: list[str], **options: Any) -> JobResult:
        calls.append({"pipeline": pipeline, "command": command, **options})
        plan, prompter = prepare(pipeline)
        job = Job(pipeline, plan, prompter, {"command": command})
        return run_job(job, lambda started: InProcessPool(pipeline, job, started), watcher)

    monkeypatch.setattr(submit, "run_on_ray", run)
    return calls


@pytest.mark.usefixtures("in_process")
def test_a_complete_job_exits_0_and_says_where_the_rows_are(tmp_path: Path) -> None:
    result = invoke("submit", write_job(tmp_path, TOPICS))
    assert result.exit_code == 0, result.output
    assert "complete: 12 of 12 rows, 0 quarantined" in result.stdout
    assert f"{tmp_path}/out/data/*.parquet" in result.stdout
    assert "output tokens/s" in result.stdout


@pytest.mark.usefixtures("in_process")
def test_a_complete_job_submitted_again_says_so_and_exits_0(tmp_path: Path) -> None:
    path = write_job(tmp_path, TOPICS)
    invoke("submit", path)
    result = invoke("submit", path)
    assert result.exit_code == 0, result.output
    assert "complete already; nothing was started" in result.stdout


@pytest.mark.usefixtures("in_process")
def test_quarantined_rows_exit_3_and_are_named_as_a_place(tmp_path: Path) -> None:
    path = write_job(tmp_path, [*TOPICS, LONG], limits={"max_error_rate": 1.0})
    result = invoke("submit", path)
    assert result.exit_code == 3, result.output
    assert "2 quarantined" in result.stdout
    assert f"{tmp_path}/out/errors/*.parquet" in result.stdout


@pytest.mark.usefixtures("in_process")
def test_a_stopped_job_exits_4_with_the_reason_on_stderr(tmp_path: Path) -> None:
    path = write_job(tmp_path, [LONG] * 8)
    result = invoke("submit", path)
    assert result.exit_code == 4, result.output
    assert "above limits.max_error_rate" in result.stderr
    assert "run the same command again" in result.stderr
    assert "Traceback" not in result.output


@pytest.mark.usefixtures("in_process")
def test_an_interrupted_job_exits_130(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_job(tmp_path, TOPICS)
    pump = InProcessPool.pump

    def pump_and_stop(self: InProcessPool, *arguments: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        pump(self, *arguments)

    monkeypatch.setattr(InProcessPool, "pump", pump_and_stop)
    monkeypatch.setattr("os._exit", lambda code: None)  # the second signal
    result = invoke("submit", path)
    assert result.exit_code == 130, result.output
    assert "run the same command again" in result.stderr


def raising(error: BaseException) -> Any:
    def run(*arguments: Any, **options: Any) -> JobResult:
        raise error

    return run


@pytest.mark.parametrize("code", sorted(set(ExitCode) - {ExitCode.COMPLETE, ExitCode.QUARANTINED}))
def test_an_error_for_people_is_one_message_and_its_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: ExitCode
) -> None:
    class SomeError(EagleBatchError):
        exit_code = code

    monkeypatch.setattr(submit, "run_on_ray", raising(SomeError("what, where, what next")))
    result = invoke("submit", write_job(tmp_path, TOPICS))
    assert (result.exit_code, result.stderr) == (code, "Error: what, where, what next\n")


def test_a_busy_output_exits_5(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submit, "run_on_ray", raising(OutputBusyError("held")))
    assert invoke("submit", write_job(tmp_path, TOPICS)).exit_code == 5


def test_ctrl_c_outside_of_the_job_exits_130_without_a_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submit, "run_on_ray", raising(KeyboardInterrupt()))
    result = invoke("submit", write_job(tmp_path, TOPICS))
    assert (result.exit_code, result.stderr) == (130, "Error: interrupted\n")


def test_a_bug_is_a_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submit, "run_on_ray", raising(KeyError("ours")))
    result = invoke("submit", write_job(tmp_path, TOPICS))
    assert isinstance(result.exception, KeyError)


def test_options_reach_the_pipeline(tmp_path: Path, in_process: list[dict[str, Any]]) -> None:
    path = write_job(tmp_path, TOPICS)
    other = tmp_path / "other"
    log = tmp_path / "log"
    options = ("--set", "samples=1", "--output", other, "--dashboard", "--log", log)
    result = invoke("submit", path, *options)
    assert result.exit_code == 0, result.output
    assert in_process[0]["pipeline"].samples == 1
    assert in_process[0]["pipeline"].output.path == str(other)
    assert in_process[0]["dashboard"] is True
    assert in_process[0]["log"] == log
    assert len(list((other / "data").glob("*.parquet"))) == 2


@pytest.mark.usefixtures("in_process")
def test_output_without_a_terminal_has_no_control_characters(tmp_path: Path) -> None:
    result = invoke("submit", write_job(tmp_path, TOPICS))
    assert "\x1b" not in result.stdout


def test_memory_is_refused_as_an_output_of_several_processes(tmp_path: Path) -> None:
    result = invoke("submit", write_job(tmp_path, TOPICS), "--output", "memory://x")
    assert result.exit_code == 2
    assert "output.path: memory://x" in result.stderr


@pytest.mark.parametrize("command", ["submit", "plan", "validate"])
def test_a_wrong_pipeline_exits_2_with_every_problem(tmp_path: Path, command: str) -> None:
    path = write_job(tmp_path, TOPICS, samples=0, seed="x", engine={"slotz": 1})
    result = invoke(command, path)
    assert result.exit_code == 2
    for key in ("samples", "seed", "engine.slotz"):
        assert key in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize("command", ["submit", "plan", "validate"])
def test_a_missing_pipeline_file_exits_2(tmp_path: Path, command: str) -> None:
    result = invoke(command, tmp_path / "none.yaml")
    assert result.exit_code == 2
    assert "none.yaml" in result.stderr


def test_a_valid_pipeline_is_called_valid(tmp_path: Path) -> None:
    path = write_job(tmp_path, TOPICS)
    result = invoke("validate", path)
    assert (result.exit_code, result.stdout) == (0, f"{path}: valid\n")


def test_plan_tells_what_would_run_and_writes_nothing(tmp_path: Path) -> None:
    path = write_job(tmp_path, TOPICS)
    result = invoke("plan", path)
    assert result.exit_code == 0, result.output
    for part in ("6 rows in 1 files", "12 (2 for each", "2 of at most 4 rows", "one -> two"):
        assert part in result.stdout
    assert "data/part-00000.parquet ... data/part-00001.parquet" in result.stdout
    assert "first prompt  \nask topic" in result.stdout
    assert result.stdout.rstrip().endswith("<one> of topic")
    assert not (tmp_path / "out").exists()


def test_status_and_verify_of_a_complete_job(tmp_path: Path) -> None:
    run_in_process(load_job(write_job(tmp_path, TOPICS)))
    status = invoke("status", tmp_path / "out")
    assert status.exit_code == 0, status.output
    assert "fake, complete" in status.stdout
    assert "12 of 12 committed (100 %)" in status.stdout
    verify = invoke("verify", tmp_path / "out")
    assert verify.exit_code == 0, verify.output
    assert "whole: 12 in = 12 out + 0 quarantined; 4 objects" in verify.stdout


def test_status_of_a_job_whose_driver_died(tmp_path: Path) -> None:
    run_in_process(load_job(write_job(tmp_path, TOPICS)))
    (tmp_path / "out/data/part-00001.parquet").unlink()
    assert "fake, stopped" in invoke("status", tmp_path / "out").stdout


def test_status_of_a_running_job_names_its_process(tmp_path: Path) -> None:
    seen: list[str] = []

    def look(worker: int, pump: int) -> None:
        seen.append(invoke("status", tmp_path / "out").stdout)

    run_in_process(load_job(write_job(tmp_path, TOPICS)), sabotage=look)
    assert "fake, running" in seen[0]
    assert f"process {os.getpid()} on " in seen[0]


def test_verify_of_a_damaged_output_exits_4_and_names_the_object(tmp_path: Path) -> None:
    run_in_process(load_job(write_job(tmp_path, TOPICS)))
    (tmp_path / "out/data/part-00001.parquet").unlink()
    result = invoke("verify", tmp_path / "out")
    assert result.exit_code == 4
    assert "missing: data/part-00001.parquet: was committed and is gone" in result.stdout
    assert "NOT whole" in result.stdout


@pytest.mark.parametrize("command", ["status", "verify"])
def test_a_folder_without_a_job_exits_2(tmp_path: Path, command: str) -> None:
    result = invoke(command, tmp_path)
    assert result.exit_code == 2
    assert "no _job/pipeline.json" in result.stderr


def test_demo_fetch_prints_the_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(demo, "fetch", lambda name: tmp_path / name)
    result = invoke("demo", "fetch")
    assert result.stdout == f"demo:{demo.DEFAULT} is in {tmp_path / demo.DEFAULT}\n"


@pytest.mark.parametrize("command", [[], *([name] for name in COMMANDS), ["demo", "fetch"]])
def test_every_command_has_help(command: list[str]) -> None:
    result = invoke(*command, "--help")
    assert result.exit_code == 0
    assert "Usage: main" in result.output
    if not command:
        assert all(f"\n  {name} " in result.output for name in COMMANDS)


def test_commands_of_absent_modules_are_not_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "LAZY", {"ghosts": ("eagle_batch.cli_ghosts", "ghosts")})
    assert "ghosts" not in invoke("--help").output
    assert invoke("ghosts").exit_code == 2


def test_commands_of_modules_that_exist_are_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "LAZY", {"lent": ("eagle_batch.cli.app", "demo")})
    assert "\n  lent " in invoke("--help").output
    assert "fetch" in invoke("lent", "--help").output


def loaded_by(*arguments: str | Path) -> dict[str, Any]:
    """Run a command in a fresh process; returns its heavy modules and seconds of processor time."""
    script = (
        "import json, sys, time\n"
        "from eagle_batch.cli import main\n"
        f"main({list(map(str, arguments))!r}, standalone_mode=False)\n"
        "heavy = [m for m in ('torch', 'ray', 'transformers', 'datasets') if m in sys.modules]\n"
        "print(json.dumps({'heavy': heavy, 'seconds': time.process_time()}))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


@pytest.mark.parametrize("command", ["plan", "validate", "status", "verify"])
def test_looking_loads_neither_torch_nor_ray(tmp_path: Path, command: str) -> None:
    path = write_job(tmp_path, TOPICS)
    run_in_process(load_job(path))
    target = path if command in ("plan", "validate") else tmp_path / "out"
    assert loaded_by(command, target)["heavy"] == []


def test_help_is_instant() -> None:
    """In processor time, which a busy machine does not stretch."""
    found = loaded_by("--help")
    assert found["heavy"] == []
    assert found["seconds"] < 0.3


def test_python_m_runs_the_same_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "eagle_batch", "--version"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith("eagle-batch, version 0.")
