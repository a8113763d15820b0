"""Crashes and races while workers without work make rows of another's shard.

Worker 0 is slow with the first of two shards, or stands still; worker 1 is soon through with the
other one, and takes rows of the first. Whatever happens, the rows are those of an undisturbed run.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eagle_batch.data.forms import Parquet
from eagle_batch.job.driver import run_job
from eagle_batch.job.job import Job, JobResult
from eagle_batch.job.objects import SHARES, Objects, share_key
from eagle_batch.job.spec import WorkerSpec
from eagle_batch.job.status import read_status
from eagle_batch.job.store import LocalStore, Store, open_store
from eagle_batch.job.tasks import Lease, Share, Task
from eagle_batch.job.verify import verify
from eagle_batch.job.worker import Worker
from tests.faults import exact
from tests.faults.dying import Death, DyingStore, When, at, bury
from tests.job.fake_engine import LONG, build_fake
from tests.job.fake_job import (
    CrashError,
    SlowFirst,
    Watch,
    expected_rows,
    load_job,
    read_rows,
    run_in_process,
    share_at_once,
    write_job,
)
from tests.job.support import QUICK

ROWS, BAD = 24, 9
TOPICS = [LONG if n == BAD else f"topic {'x' * (n % 5)}" for n in range(ROWS)]
GOOD_ROWS = exact.good_rows(TOPICS)
SHARED = "data/part-00000.parquet"
#: Turns in which worker 0 is passed over, for one that it gets; it may stand still instead.
SLOW = 7


@pytest.fixture(autouse=True)
def sharing(monkeypatch: pytest.MonkeyPatch) -> None:
    share_at_once(monkeypatch)


def job_in(folder: Path) -> Job:
    output = {"rows_per_shard": ROWS // 2}
    return load_job(write_job(folder, TOPICS, output=output, limits={"max_error_rate": 0.9}))


def run_slow(
    job: Job, store: Store | None = None, *, every: int = SLOW, stands: int = 0
) -> tuple[JobResult, SlowFirst]:
    """Run with a slow worker 0; a worker that has to stand still is never pumped again."""
    made: list[SlowFirst] = []

    def make_pool(started: float) -> SlowFirst:
        made.append(SlowFirst(job, started, every=every, stands=stands, size=2, store=store))
        return made[0]

    return run_job(job, make_pool, Watch(), store), made[0]


def die(job: Job, when: When, *, after: bool, stands: int = 0) -> None:
    """Run until the store dies, and the driver with all its workers; fails if it does not."""
    output = Path(job.pipeline.output.path)
    with pytest.raises(Death):
        run_slow(job, DyingStore(output, when, after=after), stands=stands)
    bury(output)


def shares_in(job: Job) -> list[Path]:
    return sorted(Path(job.pipeline.output.path, SHARES).glob("*"))


def assert_exact(job: Job) -> None:
    exact.assert_exact(job.pipeline.output.path, TOPICS)
    assert shares_in(job) == []


def at_share(number: int) -> When:
    """The moment when so many shares have been put, or will have been."""
    count = [0]

    def when(_: int, verb: str, key: str) -> bool:
        count[0] += key.startswith(SHARES) and verb == "replace"
        return count[0] == number

    return when


def at_operation(number: int) -> When:
    return lambda now, *_: now == number


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("number", [1, 2])
def test_a_share_is_written_and_the_driver_dies(tmp_path: Path, number: int, after: bool) -> None:
    job = job_in(tmp_path)
    die(job, at_share(number), after=after)
    assert len(shares_in(job)) == number - 1 + after
    assert read_rows(tmp_path / "out") == GOOD_ROWS[ROWS - 2 :], "the other shard, and no share"
    run_in_process(job)
    assert_exact(job)


def test_verify_and_status_do_not_take_a_share_for_output(tmp_path: Path) -> None:
    job = job_in(tmp_path)
    die(job, at_share(2), after=True)
    assert len(shares_in(job)) == 2
    report = verify(str(tmp_path / "out"))
    assert {finding.kind for finding in report.findings} == {"unfinished", "record_missing"}
    status = read_status(str(tmp_path / "out"))
    assert (status.tasks, status.tasks_done, status.state) == (2, 1, "stopped")
    run_in_process(job)
    assert_exact(job)


@pytest.mark.parametrize("after", [False, True])
def test_the_driver_dies_while_shares_are_put_together(tmp_path: Path, after: bool) -> None:
    """Worker 0 stands still, so that worker 1 makes every row and puts them together."""
    job = job_in(tmp_path)
    die(job, at("create", SHARED), after=after, stands=2)
    assert shares_in(job) != []
    run_in_process(job)
    assert_exact(job)


class Tripping(LocalStore):
    """Worker 1 dies at its put of the shared shard, once, or right after it."""

    def __init__(self, root: Path, *, after: bool) -> None:
        super().__init__(str(root), QUICK, lambda seconds: None)
        self.after = after
        self.tripped = 0

    def _create(self, key: str, data: bytes) -> None:
        first = key == SHARED and not self.tripped
        if not first or self.after:
            super()._create(key, data)
        if first:
            self.tripped += 1
            raise CrashError("the machine is gone")


@pytest.mark.parametrize("after", [False, True])
def test_who_puts_shares_together_dies(tmp_path: Path, after: bool) -> None:
    """Worker 0, which stood still, wakes up then, and commits the shard, or finds it done."""
    job = job_in(tmp_path)
    store = Tripping(tmp_path / "out", after=after)
    pools: list[SlowFirst] = []

    class Waking(SlowFirst):
        def _waits(self) -> bool:
            if store.tripped:
                self.stands = 0
            return super()._waits()

    def make_pool(started: float) -> SlowFirst:
        pools.append(Waking(job, started, stands=2, size=2, store=store))
        return pools[0]

    result = run_job(job, make_pool, Watch(), store)
    assert store.tripped == 1
    assert 1 not in pools[0].workers
    assert result.metrics is not None
    assert result.metrics["hedges"] >= 2
    assert_exact(job)


@pytest.mark.parametrize("after", [False, True])
def test_a_worker_dies_while_it_makes_rows_for_another(tmp_path: Path, after: bool) -> None:
    """Before its share is put, or right after, so that nobody hears of it."""

    class Lossy(LocalStore):
        lost = False

        def _replace(self, key: str, data: bytes) -> None:
            first = key.startswith(SHARES) and not self.lost
            if not first or after:
                super()._replace(key, data)
            if first:
                self.lost = True
                raise CrashError("the machine is gone")

    job = job_in(tmp_path)
    store = Lossy(str(tmp_path / "out"), QUICK, lambda seconds: None)
    result, _ = run_slow(job, store)
    assert store.lost
    assert result.metrics is not None
    assert [loan["state"] for loan in result.metrics["loans"]][:1] == ["lost"]
    assert_exact(job)


def test_the_worker_of_a_shard_and_who_puts_it_together_race(tmp_path: Path) -> None:
    """Whoever is first, there is one copy of every row; each of them is first at some pace."""
    winners = set()
    for every in (2, 3, 4, 6, 9, 14, 25):
        job = job_in(tmp_path / str(every))
        result, _ = run_slow(job, every=every)
        assert_exact(job)
        assert result.metrics is not None
        assert result.metrics["hedges"] > 0
        winners.add(winner(job) == 1)
    assert winners == {True, False}


def winner(job: Job) -> int:
    """Which attempt at the shared shard put it; its own worker has the first one."""
    records = Path(job.pipeline.output.path, "_job/commits").glob("*.jsonl")
    lines = [json.loads(line) for file in records for line in file.read_text().splitlines()]
    [attempt] = [line["attempt"] for line in lines if line["key"] == "part-00000"]
    return int(attempt.rpartition("-")[2])


def test_a_zombie_whose_rows_others_made_adds_no_row(tmp_path: Path) -> None:
    """1. worker 0 stands still. 2. the job is finished without it. 3. it goes on to its end."""
    job = job_in(tmp_path)
    _, pool = run_slow(job, stands=2)
    before = {path: path.read_bytes() for path in (tmp_path / "out").rglob("*.parquet")}
    report = pool.workers[0].pump((), 60.0)
    assert [lease.task.key for lease, _ in report.committed] == ["part-00000"]
    assert report.discarded > 0
    assert {path: path.read_bytes() for path in (tmp_path / "out").rglob("*.parquet")} == before
    assert_exact(job)


def test_a_zombie_that_makes_rows_for_others_adds_no_row_and_its_share_is_swept(
    tmp_path: Path,
) -> None:
    """1. a worker of an earlier run is cut off with rows of a shard. 2. the job is finished.
    3. the worker puts its share. 4. the same command again."""
    job = job_in(tmp_path)
    zombie = worker_of(job)
    task = Task("part-00000+2", 0, 6, 12)
    zombie.pump((Lease(task, 2, "gone", of="part-00000"),), 0.0)
    run_in_process(job)
    [(_, share)] = zombie.pump((), 60.0).shares
    assert shares_in(job) == [tmp_path / "out" / share_key(share)]
    report = verify(str(tmp_path / "out"))
    assert report.ok, report.findings
    bury(tmp_path / "out")
    assert run_in_process(job).already_complete
    assert_exact(job)


def test_a_crash_at_every_operation_on_a_shared_shard_resumes_to_the_same_rows(
    tmp_path: Path,
) -> None:
    whole = DyingStore(tmp_path / "count/out", lambda *_: False)
    run_slow(job_in(tmp_path / "count"), whole)
    steps = [
        n for n, (_, key) in enumerate(whole.log) if key.startswith(SHARES) or "00000.p" in key
    ]
    assert len(steps) >= 6, "shares are put and deleted, and two objects put"
    for number in steps:
        job = job_in(tmp_path / str(number))
        die(job, at_operation(number), after=True)
        run_in_process(job)
        assert_exact(job)


def worker_of(job: Job) -> Worker:
    return Worker(WorkerSpec(job.pipeline, job.plan, 0.0, "cpu", 1, build_fake))


def made_share(job: Job, start: int, stop: int, run: str = "run") -> Share:
    """A share of the first shard, made by a worker of this job."""
    lease = Lease(Task("part-00000+2", 0, start, stop), 2, run, of="part-00000")
    [(_, share)] = worker_of(job).pump((lease,), 60.0).shares
    return share


def change(store: Store, share: Share, job: Job) -> None:
    data = store.get(share_key(share)) or b""
    store.put_replace(share_key(share), data[:-9] + b"x" + data[-8:])


def remove(store: Store, share: Share, job: Job) -> None:
    store.delete(share_key(share))


def forge(store: Store, share: Share, job: Job) -> None:
    """The rows of another job at the same place."""
    writer = Objects(store, "0" * 64, Parquet(), 2)
    rows, errors = Objects(store, job.plan.fingerprint, Parquet(), 2).read_share(share)
    lease = Lease(Task("part-00000+2", 0, share.start, share.stop), 2, "run", of="part-00000")
    rows, errors = (table.replace_schema_metadata(None) for table in (rows, errors))
    writer.put_share(lease, rows, errors, share.tokens, share.spent)


@pytest.mark.parametrize(
    ("harm", "said"),
    [(change, "was changed"), (remove, "missing"), (forge, "was changed")],
)
def test_a_share_that_is_not_what_was_put_there_is_not_used(
    tmp_path: Path, harm: Callable[[Store, Share, Job], None], said: str
) -> None:
    job = job_in(tmp_path)
    share = made_share(job, 6, 12)
    harm(open_store(str(tmp_path / "out"), QUICK), share, job)
    report = worker_of(job).pump((Lease(Task("part-00000", 0, 0, 12), 1, shares=(share,)),), 60.0)
    assert any(said in notice for notice in report.notices)
    [(lease, _)] = report.committed
    assert lease.shares == ()
    assert read_rows(tmp_path / "out") == GOOD_ROWS[: ROWS - 2]


def test_a_share_of_another_job_is_refused_even_by_its_own_checksum(tmp_path: Path) -> None:
    """Whatever led to it: the fingerprint in the object decides."""
    old = job_in(tmp_path / "old")
    share = made_share(old, 6, 12)
    path = tmp_path / "old" / "pipeline.yaml"
    new = load_job(path, "seed=4", f"output.path={tmp_path / 'new'}")
    there = open_store(str(tmp_path / "new"), QUICK)
    store = open_store(old.pipeline.output.path, QUICK)
    there.put_replace(share_key(share), store.get(share_key(share)) or b"")
    report = worker_of(new).pump((Lease(Task("part-00000", 0, 0, 12), 1, shares=(share,)),), 60.0)
    assert any("written by another job" in notice for notice in report.notices)
    rows = expected_rows(TOPICS, seed=4)[:ROWS]
    assert read_rows(tmp_path / "new") == [row for row in rows if row["id"] != f"row{BAD}"]


def test_shares_of_an_earlier_run_are_swept_and_never_used(tmp_path: Path) -> None:
    """Both shards are to be made, so that there are two workers again, which share rows again."""
    job = job_in(tmp_path)
    die(job, at_share(2), after=True)
    (tmp_path / "out/data/part-00001.parquet").unlink()
    left = shares_in(job)
    assert len(left) == 2
    store = Listing(str(tmp_path / "out"), QUICK, lambda seconds: None)
    run_slow(job, store)
    read = {key for key in store.read if key.startswith(SHARES)}
    assert len(read) >= 2
    assert not read & {f"{SHARES}/{path.name}" for path in left}
    assert_exact(job)


class Listing(LocalStore):
    """Keeps the keys of what is read."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.read: set[str] = set()

    def _read(self, key: str) -> bytes:
        self.read.add(key)
        return super()._read(key)
