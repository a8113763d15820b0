"""Commands that people wait for are quick, and load neither torch nor ray.

What is compared is CPU time, the least of three runs: the wall clock of a busy machine says little.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from eagle_batch.job.objects import data_key
from eagle_batch.job.store import open_store
from tests.job.fake_job import write_job
from tests.job.support import QUICK, identity, ledger, put
from tests.test_architecture import HEAVY

FILES, SHARDS = 100, 10_000
#: CPU seconds in which a server of 2023 starts Python and loads what commands are made of.
USUAL_S = 0.3
CODE = """
import sys
from eagle_batch.cli import main
try:
    main(sys.argv[1:])
finally:
    loaded = {name for name in HEAVY if name in sys.modules}
    assert not loaded, loaded
""".replace("HEAVY", repr(sorted(HEAVY)))


def cpu_seconds(*arguments: str) -> tuple[float, str]:
    """Run a command to its end; return its CPU seconds and what it printed."""
    command = [sys.executable, "-c", CODE, *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout:
        text = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, text
    return usage.ru_utime + usage.ru_stime, text


def least(*arguments: str) -> tuple[float, str]:
    """Return the CPU seconds that a command takes on a machine of usual speed, and its text."""
    runs = [cpu_seconds(*arguments) for _ in range(3)]
    return min(seconds for seconds, _ in runs) / slowness(), runs[0][1]


@functools.cache
def slowness() -> float:
    """Return how many times longer than usual this machine takes to start what commands start."""
    imports = [sys.executable, "-c", "import click, jinja2, pyarrow, pydantic, rich.console"]
    runs = []
    for _ in range(3):
        before = os.times()
        subprocess.run(imports, check=True)
        after = os.times()
        runs.append(after.children_user + after.children_system)
        runs[-1] -= before.children_user + before.children_system
    return max(1.0, min(runs) / USUAL_S)


@pytest.fixture(scope="module")
def hundred_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plan")
    path = write_job(folder, ["a"], input={"path": "rows"})
    (folder / "rows").mkdir()
    for number in range(FILES):
        ids = [f"{number}-{row}" for row in range(50)]
        table = pa.table({"id": ids, "topic": ids, "n": range(50)})
        pq.write_table(table, folder / "rows" / f"{number:03}.parquet")
    return path


@pytest.fixture(scope="module")
def ten_thousand_shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A complete job, of which each data object is there and only the first is more than a name."""
    folder = tmp_path_factory.mktemp("status")
    store = open_store(str(folder), QUICK)
    job = identity(shards=SHARDS)
    book = ledger(store, job)
    book.open({})
    first = put(store, job, job.tasks[0])
    for task in job.tasks:
        (folder / data_key(task.key, job.form)).touch()
        book.record(replace(first, key=task.key))
    book.close()
    return folder


def test_help_takes_less_than_a_third_of_a_second() -> None:
    seconds, text = least("--help")
    assert "submit" in text
    assert seconds < 0.3


def test_a_plan_of_a_hundred_files_takes_less_than_a_second(hundred_files: Path) -> None:
    seconds, text = least("plan", str(hundred_files))
    assert f"{FILES * 50:,} rows in {FILES} files" in text
    assert seconds < 1.0


def test_the_status_of_ten_thousand_shards_takes_less_than_two_seconds(
    ten_thousand_shards: Path,
) -> None:
    seconds, text = least("status", str(ten_thousand_shards))
    assert f"{SHARDS:,} of {SHARDS:,}" in text
    assert seconds < 2.0
