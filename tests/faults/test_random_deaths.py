"""The driver dies at random operations of its store, and each time the same command goes on."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from eagle_batch.job.job import Job
from eagle_batch.job.verify import verify
from tests.faults.dying import Death, DyingStore, bury
from tests.job.fake_engine import LONG
from tests.job.fake_job import (
    expected_rows,
    load_job,
    read_errors,
    read_rows,
    run_in_process,
    write_job,
)

BAD = {7, 31}
TOPICS = [LONG if n in BAD else f"topic {'x' * (n % 7)}" for n in range(64)]


def job_in(folder: Path) -> Job:
    path = write_job(folder, TOPICS, output={"rows_per_shard": 1}, limits={"max_error_rate": 0.9})
    return load_job(path)


def live_for(job: Job, operations: int, *, after: bool) -> bool:
    """Run until the store dies at its Nth operation; tell whether the job was done before."""
    output = Path(job.pipeline.output.path)
    store = DyingStore(output, lambda number, *_: number == operations, after=after)
    try:
        run_in_process(job, store=store)
    except Death:
        bury(output)
        return False
    return True


@pytest.mark.parametrize("times", [12, pytest.param(50, marks=pytest.mark.exhaustive)])
def test_random_deaths_of_the_driver_lose_and_double_no_row(tmp_path: Path, times: int) -> None:
    chance = random.Random(1)
    job = job_in(tmp_path)
    deaths = 0
    committed: dict[Path, bytes] = {}
    while deaths < times:
        # Few operations a life: most of them are the resume itself.
        done = live_for(job, chance.randrange(12), after=chance.random() < 0.5)
        now = {path: path.read_bytes() for path in (tmp_path / "out/data").glob("*.parquet")}
        assert committed.items() <= now.items(), "what was committed stays as it was"
        committed = now
        if done:
            break
        deaths += 1
    run_in_process(job)
    good = [row for row in expected_rows(TOPICS) if int(row["id"][3:]) not in BAD]
    assert read_rows(tmp_path / "out") == good
    assert {(e["id"], e["sample"]) for e in read_errors(tmp_path / "out")} == {
        (f"row{n}", sample) for n in BAD for sample in range(2)
    }
    report = verify(str(tmp_path / "out"))
    assert report.ok, report.findings
    assert deaths == times
