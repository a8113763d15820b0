"""Crashes at every point of the commit protocol; each resume gives exactly the undisturbed rows."""

from __future__ import annotations

from pathlib import Path

import pytest

from eagle_batch.data.forms import Parquet
from eagle_batch.job.job import Job
from eagle_batch.job.ledger import latest, read_records
from eagle_batch.job.objects import Objects
from eagle_batch.job.reports import PoolEvent, Pumped
from eagle_batch.job.store import open_store
from eagle_batch.job.tasks import Lease, Task
from eagle_batch.job.verify import verify
from eagle_batch.job.worker import Worker
from tests.faults.dying import Death, DyingStore, When, at, bury
from tests.faults.exact import assert_exact
from tests.job.fake_engine import LONG, RAISE
from tests.job.fake_job import (
    InProcessPool,
    Watch,
    expected_rows,
    load_job,
    read_errors,
    read_rows,
    run_in_process,
    write_job,
)
from tests.job.support import QUICK

TOPICS = [f"topic {'x' * (n % 5)}" for n in range(11)]
BAD = 4
WITH_A_BAD_ROW = [*TOPICS[:BAD], LONG, *TOPICS[BAD + 1 :]]


def job_in(folder: Path, topics: list[str] = WITH_A_BAD_ROW) -> Job:
    return load_job(write_job(folder, topics, limits={"max_error_rate": 0.9}))


def die(job: Job, when: When, *, after: bool = False) -> DyingStore:
    """Run until the store dies; fails if it does not."""
    output = Path(job.pipeline.output.path)
    store = DyingStore(output, when, after=after)
    with pytest.raises(Death):
        run_in_process(job, store=store)
    bury(output)
    return store


def assert_resumes(job: Job, watch: Watch | None = None) -> None:
    run_in_process(job, watch)
    assert_exact(job.pipeline.output.path, WITH_A_BAD_ROW)


def test_a_crash_before_the_write_leaves_the_shard_to_be_made(tmp_path: Path) -> None:
    job = job_in(tmp_path)
    die(job, at("create", "data/part-00001.parquet"))
    assert not (tmp_path / "out/data/part-00001.parquet").exists()
    assert_resumes(job)


def test_a_crash_between_data_and_errors_is_adopted_with_its_errors(tmp_path: Path) -> None:
    job = job_in(tmp_path)
    die(job, at("replace", "errors/part-00001.parquet"))
    before = (tmp_path / "out/data/part-00001.parquet").read_bytes()
    assert not (tmp_path / "out/errors/part-00001.parquet").exists()
    watch = Watch()
    assert_resumes(job, watch)
    assert (tmp_path / "out/data/part-00001.parquet").read_bytes() == before
    assert any("checked and adopted" in line for line in watch.lines)


def test_a_crash_after_the_write_and_before_the_record_is_adopted(tmp_path: Path) -> None:
    job = job_in(tmp_path)
    die(job, at("create", "data/part-00001.parquet"), after=True)
    before = (tmp_path / "out/data/part-00001.parquet").read_bytes()
    watch = Watch()
    assert_resumes(job, watch)
    assert (tmp_path / "out/data/part-00001.parquet").read_bytes() == before
    assert any("checked and adopted" in line for line in watch.lines)


def test_half_an_object_under_a_temporary_name_is_invisible_and_swept(tmp_path: Path) -> None:
    job = job_in(tmp_path)
    die(job, at("create", "data/part-00002.parquet"))
    half = tmp_path / "out/data/.part-00002.parquet.0a1b.tmp"
    half.write_bytes(b"PAR1 and then the power went")
    assert list((tmp_path / "out").glob("data/*.parquet")) != []
    assert_resumes(job)
    assert not half.exists()


def test_half_an_object_under_its_own_name_is_moved_away_and_made_again(tmp_path: Path) -> None:
    """A disk that lied about fsync, or a store that published a truncated upload."""
    job = job_in(tmp_path)
    die(job, at("create", "data/part-00001.parquet"), after=True)
    path = tmp_path / "out/data/part-00001.parquet"
    torn = path.read_bytes()[:200]
    path.write_bytes(torn)
    watch = Watch()
    assert_resumes(job, watch)
    assert (tmp_path / "out/_job/damaged/part-00001.parquet").read_bytes() == torn
    assert any("unreadable" in line for line in watch.lines)


def test_a_crash_at_every_operation_of_the_store_resumes_to_the_same_rows(
    tmp_path: Path,
) -> None:
    whole = DyingStore(tmp_path / "count/out", lambda *_: False)
    run_in_process(job_in(tmp_path / "count"), store=whole)
    assert len(whole.log) > 12
    for number in range(len(whole.log)):
        for after in (False, True):
            folder = tmp_path / f"{number}-{after}"
            job = job_in(folder)
            die(job, lambda now, verb, key, stop=number: now == stop, after=after)  # type: ignore[misc]
            assert_resumes(job)


def test_a_crash_in_each_step_of_a_split_resumes_to_the_same_rows(tmp_path: Path) -> None:
    """A row breaks every engine; its shard is closed, split, and the row quarantined."""
    topics = [*TOPICS[:2], RAISE, *TOPICS[3:5]]

    def job_of(folder: Path) -> Job:
        path = write_job(folder, topics, output={"rows_per_shard": 5}, samples=1)
        return load_job(path, "limits.max_error_rate=1.0", "limits.shard_attempts=1")

    whole = DyingStore(tmp_path / "count/out", lambda *_: False)
    run_in_process(job_of(tmp_path / "count"), store=whole)
    steps = [(verb, key) for verb, key in whole.log if key.endswith(".parquet")]
    assert ("create", "data/part-00000.2.parquet") in steps
    assert ("replace", "errors/part-00000.2.parquet") in steps
    for number, (verb, key) in enumerate(steps):
        for after in (False, True):
            folder = tmp_path / f"{number}-{after}"
            job = job_of(folder)
            die(job, at(verb, key), after=after)
            run_in_process(job)
            rows = sorted(read_rows(folder / "out"), key=lambda row: row["id"])
            wanted = expected_rows(topics, samples=1)
            assert rows == [row for row in wanted if row["id"] != "row2"]
            assert [e["id"] for e in read_errors(folder / "out")] == ["row2"]
            assert verify(str(folder / "out")).ok


class Stuttering(InProcessPool):
    """Delivers every report twice, the second time after the next one."""

    def __init__(self, job: Job, started: float) -> None:
        super().__init__(job.pipeline, job, started)
        self._again: list[PoolEvent] = []

    def poll(self, timeout: float) -> list[PoolEvent]:
        events = super().poll(timeout)
        late, self._again = self._again, [e for e in events if isinstance(e, Pumped)]
        return [*events, *late]


def test_a_duplicate_report_is_recorded_once(tmp_path: Path) -> None:
    from eagle_batch.job.driver import run_job

    job = job_in(tmp_path)
    run_job(job, lambda started: Stuttering(job, started), Watch())
    records = read_records(open_store(str(tmp_path / "out"), QUICK))
    assert sorted(record.key for record in records) == [f"part-0000{n}" for n in range(3)]
    assert_resumes(job)


def test_a_stale_attempt_that_comes_back_to_life_changes_nothing(tmp_path: Path) -> None:
    """1. a worker gets a shard and is cut off. 2. the job is finished without it. 3. it comes back
    and commits its shard."""
    job = job_in(tmp_path)
    pool = InProcessPool(job.pipeline, job, 0.0)
    zombie = Worker(pool.spec)
    zombie.pump((Lease(Task("part-00001", 1, 0, 4), 1, "gone"),), 0.0)
    run_in_process(job)
    before = {path: path.read_bytes() for path in (tmp_path / "out").rglob("*.parquet")}
    [(_, commit)] = zombie.pump((), 60.0).committed
    assert {path: path.read_bytes() for path in (tmp_path / "out").rglob("*.parquet")} == before
    recorded = latest(read_records(open_store(str(tmp_path / "out"), QUICK)))
    assert commit == recorded["part-00001"]
    assert_resumes(job)


def test_a_late_parent_of_a_split_shard_loses_to_its_closed_key(tmp_path: Path) -> None:
    """1. a worker gets a shard and is cut off. 2. the shard is closed to be split. 3. the worker
    comes back with all of the shard's rows."""
    job = job_in(tmp_path)
    pool = InProcessPool(job.pipeline, job, 0.0)
    zombie = Worker(pool.spec)
    parent = Task("part-00000", 0, 0, 4)
    zombie.pump((Lease(parent, 1, "gone"),), 0.0)
    from eagle_batch.job.work import no_rows

    writer = Objects(open_store(str(tmp_path / "out"), QUICK), job.plan.fingerprint, Parquet(), 2)
    tables = no_rows(job.pipeline, job.plan.schema)
    closed = writer.put(Lease(parent, 2, "run"), *tables, parts=parent.split(8))
    [(_, commit)] = zombie.pump((), 60.0).committed
    assert commit == closed
    assert read_rows(tmp_path / "out") == []
