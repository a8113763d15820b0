"""Emitted DAGs in a real Airflow, which has an environment of its own.

python -m venv .airflow && .airflow/bin/pip install apache-airflow
EAGLE_BATCH_AIRFLOW_PYTHON=.airflow/bin/python pytest tests/schedule/test_airflow.py
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from eagle_batch.schedule.cron import ticks
from eagle_batch.schedule.emit.airflow import airflow_dag
from eagle_batch.schedule.emit.command import Place
from tests.job.fake_job import expected_rows, read_rows
from tests.schedule.jobs import make_job, utc, write_file

VARIABLE = "EAGLE_BATCH_AIRFLOW_PYTHON"
PYTHON = os.environ.get(VARIABLE)
SCRIPT = Path(__file__).parent / "airflow_child.py"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(PYTHON is None, reason=f"{VARIABLE} names no Python that has Airflow"),
]
#: Times at which all schedulers agree, and the clocks change between them.
SCHEDULES = ["30 4 * * *", "0 9-17/4 * * 1-5", "0 0 13 * 5", "0 12 29 2 *", "*/20 4 1 1,7 *"]
START, COUNT = utc("2027-03-20T00:00"), 12

Ask = Callable[..., Any]


@pytest.fixture
def ask(tmp_path: Path) -> Ask:
    """Asks Airflow about the DAGs below `tmp_path/dags`."""
    environment = os.environ | {
        "AIRFLOW_HOME": str(tmp_path / "airflow"),
        "AIRFLOW__CORE__DAGS_FOLDER": str(tmp_path / "dags"),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
    }

    def run(*command: str) -> str:
        done = subprocess.run(
            [str(PYTHON), *command],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=240,
        )
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
        return done.stdout

    def ask(*arguments: str) -> Any:
        said = run(str(SCRIPT), str(tmp_path / "dags"), *arguments)
        return json.loads(said.splitlines()[-1])

    run("-m", "airflow", "db", "migrate")
    return ask


def test_airflow_means_the_same_times(ask: Ask, tmp_path: Path) -> None:
    expected = {}
    (tmp_path / "dags").mkdir()
    for number, cron in enumerate(SCHEDULES):
        job = make_job(
            tmp_path,
            name=f"job{number}",
            schedule={"cron": cron, "timezone": "Europe/Berlin"},
            set={"output.path": "o/{{ run.utc }}"},
        )
        ours = islice(ticks(job.schedule, START, utc("2099-01-01T00:00")), COUNT)
        expected[f"eagle-batch-{job.name}"] = [tick.isoformat() for tick in ours]
        for name, text in airflow_dag(job, Place(job_file=str(job.path))).items():
            (tmp_path / "dags" / name).write_text(text)
    found = ask("ticks", START.isoformat(), str(COUNT))
    assert found == {"errors": {}, "ticks": expected}


def emit(folder: Path, repository: Path) -> Path:
    """Emit a job of the fake engine by the command; returns the folder of its outputs."""
    path = write_file(folder, schedule={"cron": "30 4 * * *", "timezone": "Europe/Berlin"})
    program = f"env PYTHONPATH='{repository}' {sys.executable} -m tests.schedule.fake_cli"
    options = ["--to", "airflow", "--write", str(folder / "dags"), "--command", program]
    subprocess.run(
        [sys.executable, "-m", "eagle_batch", "jobs", "emit", str(path), *options],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(repository)},
        check=True,
    )
    return folder / "out"


def test_airflow_runs_the_tick_of_a_date_and_of_a_trigger_without_one(
    ask: Ask, repository: Path, tmp_path: Path
) -> None:
    output = emit(tmp_path, repository)
    assert ask("run", "eagle-batch-nightly", "2027-03-28T02:30:00+00:00") == "success"
    assert read_rows(output / "2027-03-28") == expected_rows(["a", "b"])
    assert ask("trigger", "eagle-batch-nightly", "2027-03-30T02:29:59+00:00") == "success"
    assert read_rows(output / "2027-03-29") == expected_rows(["a", "b"])
    records = [path.parent.name for path in output.glob("_schedule/nightly/*/finished.json")]
    assert sorted(records) == ["20270328T023000Z", "20270329T023000Z"]


def test_a_task_fails_where_its_job_does(ask: Ask, repository: Path, tmp_path: Path) -> None:
    emit(tmp_path, repository)
    (tmp_path / "pipeline" / "in.parquet").unlink()
    assert ask("run", "eagle-batch-nightly", "2027-03-28T02:30:00+00:00") == "failed"
