"""A driver process is killed at random moments of one job; each time another one goes on.

The processes are forks of one that has imported everything, so that a life takes a moment; what is
killed is real, and so are the disk, the lock and the resume.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import time
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import pytest

from eagle_batch import read
from eagle_batch.job.store import LocalStore
from eagle_batch.job.verify import verify
from tests.job.fake_engine import LONG
from tests.job.fake_job import (
    expected_rows,
    load_job,
    read_errors,
    read_rows,
    run_in_process,
    write_job,
)
from tests.job.support import QUICK

#: Rows, of which each is a shard, for fifty deaths; and those that are quarantined.
ROWS = 400
BAD = {7, 131}
TOPICS = [LONG if n in BAD else f"topic {'x' * (n % 7)}" for n in range(ROWS)]
#: Shards that a life makes at most before its last moment, in seconds, begins; with none it ends
#: within the resume.
MOST_SHARDS = 4
LONGEST_S = 0.2
PATIENCE_S = 60.0


def write(folder: Path, rows: int) -> Path:
    topics = TOPICS[:rows]
    return write_job(folder, topics, output={"rows_per_shard": 1}, limits={"max_error_rate": 0.9})


def live(pipeline: Path, planned: Event) -> None:
    """Run the job, or what is left of it; called in a process of its own."""
    os.environ["FAKE_STEP_S"] = "0.02"
    job = load_job(pipeline)
    planned.set()
    run_in_process(job)


def kill_again_and_again(pipeline: Path, times: int, chance: random.Random) -> list[int]:
    """Kill so many drivers; returns how many shards lay there after each death."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    data = pipeline.parent / "out/data"
    committed: dict[Path, bytes] = {}
    counts = []
    for _ in range(times):
        planned = context.Event()
        process = context.Process(target=live, args=(pipeline, planned))
        process.start()
        assert planned.wait(PATIENCE_S)
        wait_for(data, len(committed) + chance.randrange(MOST_SHARDS))
        time.sleep(chance.random() * LONGEST_S)
        assert process.is_alive(), "the job was to take longer"
        process.kill()
        process.join()
        assert process.exitcode == -9
        now = {path: path.read_bytes() for path in data.glob("*.parquet")}
        assert committed.items() <= now.items(), "what was committed stays as it was"
        committed = now
        counts.append(len(now))
    return counts


def wait_for(data: Path, shards: int, form: str = "parquet") -> None:
    end = time.monotonic() + PATIENCE_S
    while len(list(data.glob(f"part-*.{form}"))) < shards:
        assert time.monotonic() < end
        time.sleep(0.002)


def check(folder: Path, times: int, rows: int) -> None:
    pipeline = write(folder, rows)
    counts = kill_again_and_again(pipeline, times, random.Random(times))
    assert counts == sorted(counts)
    assert counts[-1] < rows, "the last death was to find work to do"
    assert len(set(counts)) > 1, "none of them got anything done"
    undisturbed = load_job(write(folder / "undisturbed", rows))
    run_in_process(undisturbed)
    run_in_process(load_job(pipeline))
    whole = undisturbed.pipeline.output.path
    assert read_rows(folder / "out") == read_rows(whole)
    good = [row for row in expected_rows(TOPICS[:rows]) if int(row["id"][3:]) not in BAD]
    assert read_rows(whole) == good
    assert without_attempts(folder / "out") == without_attempts(whole)
    report = verify(str(folder / "out"))
    assert report.ok, report.findings


def without_attempts(output: str | Path) -> list[dict[str, object]]:
    return [{k: v for k, v in row.items() if k != "attempt"} for row in read_errors(output)]


def test_a_driver_that_is_killed_again_and_again_loses_and_doubles_no_row(tmp_path: Path) -> None:
    check(tmp_path, 4, 40)


class Slow(LocalStore):
    """After so many objects of the last layer it takes its time, so that a death comes there."""

    def __init__(self, root: str, left: int) -> None:
        super().__init__(root, QUICK, lambda s: None)
        self.left = left

    def _create(self, key: str, data: bytes) -> None:
        super()._create(key, data)
        self.left -= key.startswith("data/")
        if self.left == 0:
            time.sleep(PATIENCE_S)


def live_to_the_last_pass(pipeline: Path, shards: int) -> None:
    run_in_process(load_job(pipeline), store=Slow(str(pipeline.parent / "out"), shards))


@pytest.mark.parametrize("form", ["parquet", "jsonl"])
def test_a_driver_that_is_killed_while_it_takes_out_duplicates_loses_and_doubles_no_row(
    tmp_path: Path, form: str
) -> None:
    """Each life gets three shards further; the last one ends undisturbed."""
    output = {"rows_per_shard": 2, "format": form, "compression": "none"}
    fields: dict[str, Any] = {"deduplicate": {"column": "topic"}, "output": output, "samples": 1}
    topics = [f"topic {n % 9}" for n in range(24)]
    pipeline = write_job(tmp_path, topics, **fields)
    data = tmp_path / "out" / "data"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    kept: dict[Path, bytes] = {}
    for shards in (3, 6, 9):
        process = context.Process(target=live_to_the_last_pass, args=(pipeline, 3))
        process.start()
        wait_for(data, shards, form)
        process.kill()
        process.join()
        assert process.exitcode == -9
        now = {path: path.read_bytes() for path in data.glob(f"part-*.{form}")}
        assert kept.items() <= now.items()
        assert len(now) == shards, "of 12"
        kept = now
    run_in_process(load_job(pipeline))
    rows = read(str(tmp_path / "out")).to_arrow()["id"].to_pylist()
    assert rows == [f"row{n}" for n in range(9)]
    report = verify(str(tmp_path / "out"))
    assert report.ok, report.findings
    assert report.dropped == 15


@pytest.mark.exhaustive
def test_fifty_killed_drivers_lose_and_double_no_row(tmp_path: Path) -> None:
    check(tmp_path, 50, ROWS)
