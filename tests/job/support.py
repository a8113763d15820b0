"""A small job for tests: planned shards of numbered rows and the objects that belong to them."""

from __future__ import annotations

from dataclasses import replace

import pyarrow as pa

from eagle_batch.job.ledger import Identity, Ledger
from eagle_batch.job.objects import Objects
from eagle_batch.job.store import LocalStore, Retry, Store
from eagle_batch.job.tasks import Commit, Lease, Task
from eagle_batch.pipeline.fingerprint import InputIdentity

DATA = pa.schema({"id": pa.string(), "sample": pa.int32(), "text": pa.string()})
ERRORS = pa.schema(
    {"id": pa.string(), "sample": pa.int32(), "reason": pa.string(), "attempt": pa.int32()}
)
QUICK = Retry(tries=2, pause_s=0.0)
FINGERPRINT = "f" * 64


def identity(shards: int = 3, rows: int = 4, samples: int = 1, **changes: object) -> Identity:
    """A job of so many shards; `output` is its section."""
    output = {"path": "out"} | changes.pop("output", {})  # type: ignore[operator]
    job = Identity(
        fingerprint=FINGERPRINT,
        resolved={"name": "t", "seed": 0, "target": {"model": "m"}, "output": output},
        inputs=(InputIdentity("in.parquet", 1, shards * rows, "tag"),),
        tasks=tuple(Task(f"part-{n:05d}", n, 0, rows) for n in range(shards)),
        samples=samples,
    )
    return replace(job, **changes)  # type: ignore[arg-type]


class Dying(LocalStore):
    """A store that ends its process before the put of that number below some folders."""

    def __init__(self, root: str, left: int, folders: tuple[str, ...]) -> None:
        super().__init__(root, QUICK, lambda s: None)
        self.left = left
        self.folders = folders

    def _create(self, key: str, data: bytes) -> None:
        self._count(key)
        super()._create(key, data)

    def _replace(self, key: str, data: bytes) -> None:
        self._count(key)
        super()._replace(key, data)

    def _count(self, key: str) -> None:
        if key.startswith(self.folders):
            if self.left == 0:
                raise KeyboardInterrupt
            self.left -= 1


def objects(store: Store, job: Identity) -> Objects:
    """The writer of that job's objects."""
    return Objects(store, job.fingerprint, job.form, job.samples)


def ledger(store: Store, job: Identity, run: str = "run1", now: float = 1000.0) -> Ledger:
    """A ledger whose clock stands still."""
    return Ledger(store, job, objects(store, job), run, clock=lambda: now)


def rows(task: Task, samples: int = 1, bad: tuple[int, ...] = ()) -> pa.Table:
    """The rows that a task makes."""
    pairs = [(n, s) for n in range(task.start, task.stop) if n not in bad for s in range(samples)]
    return pa.table(
        {
            "id": [f"{task.shard}:{n}" for n, _ in pairs],
            "sample": [s for _, s in pairs],
            "text": [f"text {task.shard}:{n}:{s}" for n, s in pairs],
        },
        schema=DATA,
    )


def errors(task: Task, samples: int = 1, bad: tuple[int, ...] = (), attempt: int = 1) -> pa.Table:
    """The quarantined rows of a task."""
    pairs = [(n, s) for n in bad for s in range(samples)]
    return pa.table(
        {
            "id": [f"{task.shard}:{n}" for n, _ in pairs],
            "sample": [s for _, s in pairs],
            "reason": ["empty_prompt" for _ in pairs],
            "attempt": [attempt for _ in pairs],
        },
        schema=ERRORS,
    )


def put(
    store: Store,
    job: Identity,
    task: Task,
    *,
    attempt: int = 1,
    run: str = "run1",
    bad: tuple[int, ...] = (),
) -> Commit:
    """Put the pair of objects of a task as a worker does."""
    lease = Lease(task, attempt, run)
    made = rows(task, job.samples, bad)
    return objects(store, job).put(
        lease, made, errors(task, job.samples, bad, attempt), tokens=len(made) * 3
    )


def put_all(store: Store, job: Identity, run: str = "run1") -> None:
    """Run the whole job and close its ledger."""
    book = ledger(store, job, run)
    scan = book.open({})
    for task in scan.tasks:
        if task.key not in scan.commits:
            book.record(put(store, job, task, run=run))
    book.close()
