"""Whole jobs for tests: an input file, a pipeline without a model, and a pool in this process."""

from __future__ import annotations

import itertools
import sys
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

import eagle_batch.job.job
from eagle_batch.data.describe import prepare
from eagle_batch.engine.request import noise_key
from eagle_batch.job import driver
from eagle_batch.job.driver import run_job
from eagle_batch.job.job import Job, JobResult, SizedPool
from eagle_batch.job.meter import Snapshot
from eagle_batch.job.pace import Paces
from eagle_batch.job.reports import Failure, Lost, PoolEvent, Pumped, Started, StartFailed
from eagle_batch.job.spec import EngineFactory, WorkerSpec
from eagle_batch.job.store import Store, open_store
from eagle_batch.job.tasks import Order
from eagle_batch.job.worker import Worker
from eagle_batch.pipeline import Pipeline, load_pipeline
from tests.job.fake_engine import build_fake, fake_text


def write_job(folder: Path, topics: Sequence[str], **fields: Any) -> Path:
    """Write input and pipeline; returns the pipeline file."""
    folder.mkdir(parents=True, exist_ok=True)
    table = pa.table(
        {"id": [f"row{n}" for n in range(len(topics))], "topic": topics, "n": range(len(topics))}
    )
    pq.write_table(table, folder / "in.parquet")
    document = {
        "name": "fake",
        "seed": 3,
        "input": {"path": "in.parquet", "id": "id"},
        "target": {"model": str(folder)},
        "speculation": {"method": "none"},
        "stages": [
            {"name": "one", "prompt": "ask {{ topic }}", "sampling": {"max_tokens": 3}},
            {"name": "two", "prompt": "{{ one }} of {{ topic }}", "sampling": {"max_tokens": 2}},
        ],
        "samples": 2,
        "engine": {"slots": 4, "threads": 1},
        "workers": {"count": 1, "gpus": 0},
        "output": {"path": str(folder / "out"), "rows_per_shard": 4},
    }
    (folder / "config.json").write_text('{"model_type": "llama"}')
    path = folder / "pipeline.yaml"
    path.write_text(yaml.safe_dump(_merge(document, fields)))
    return path


def _merge(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in changes.items():
        old = merged.get(key)
        both = isinstance(value, dict) and isinstance(old, dict)
        merged[key] = _merge(old, value) if both else value  # type: ignore[arg-type]
    return merged


def load_job(path: Path, *overrides: str) -> Job:
    pipeline = load_pipeline(path, overrides)
    plan, prompter = prepare(pipeline)
    return Job(pipeline, plan, prompter, {"command": ["test"]})


def expected_rows(topics: Sequence[str], seed: int = 3, samples: int = 2) -> list[dict[str, Any]]:
    """What an undisturbed run writes, computed without any of the code under test."""
    rows = []
    for n, topic in enumerate(topics):
        for sample in range(samples):
            name = f"row{n}"
            one = fake_text(f"ask {topic}".encode(), noise_key(seed, name, sample, "one"), 3)
            prompt = f"{one} of {topic}".encode()
            two = fake_text(prompt, noise_key(seed, name, sample, "two"), 2)
            rows.append({"id": name, "sample": sample, "topic": topic, "one": one, "two": two})
    return rows


def read_rows(output: str | Path) -> list[dict[str, Any]]:
    """The rows of an output, shard by shard, in the order they lie there."""
    columns = ["id", "sample", "topic", "one", "two"]
    files = sorted(Path(output, "data").glob("*.parquet"))
    return [row for file in files for row in pq.read_table(file, columns=columns).to_pylist()]


def read_errors(output: str | Path) -> list[dict[str, Any]]:
    files = sorted(Path(output, "errors").glob("*.parquet"))
    return [row for file in files for row in pq.read_table(file).to_pylist()]


class CrashError(Exception):
    """A worker of the in-process pool dies."""


@dataclass
class Watch:
    """Keeps what a user would see."""

    lines: list[str] = field(default_factory=list)
    snapshots: list[Snapshot] = field(default_factory=list)

    def update(self, snapshot: Snapshot) -> None:
        self.snapshots.append(snapshot)

    def say(self, text: str) -> None:
        self.lines.append(text)


#: Called before each pump with (worker, its pump count); may raise CrashError or anything else.
Sabotage = Callable[[int, int], None]


class InProcessPool:
    """Workers in this process, pumped when polled; a killed one loses its memory like a process."""

    def __init__(
        self,
        pipeline: Pipeline,
        job: Job,
        started: float,
        *,
        size: int = 1,
        build: EngineFactory = build_fake,
        store: Store | None = None,
        sabotage: Sabotage | None = None,
        seconds: float = 0.0,
    ) -> None:
        self.spec = WorkerSpec(pipeline, job.plan, started, "cpu", 1, build)
        self.store = store or open_store(pipeline.output.path)
        self.workers: dict[int, Worker] = {}
        self.size = size
        self.seconds = seconds
        self.closed = False
        self._sabotage = sabotage
        self._queue: deque[tuple[int, tuple[Order, ...] | None]] = deque()
        self._pumps: dict[int, int] = defaultdict(int)

    def start(self, worker: int) -> None:
        self._queue.append((worker, None))

    def stop(self, worker: int) -> None:
        self._queue = deque(item for item in self._queue if item[0] != worker)
        self.workers.pop(worker, None)

    def pump(self, worker: int, orders: tuple[Order, ...], seconds: float) -> None:
        assert seconds > 0
        self._queue.append((worker, orders))

    def pending(self, worker: int) -> int:
        return sum(owner == worker for owner, _ in self._queue)

    def poll(self, timeout: float) -> list[PoolEvent]:
        if not self._queue:
            return []
        worker, orders = self._queue.popleft()
        if orders is None:
            return [self._start(worker)]
        try:
            self._pumps[worker] += 1
            if self._sabotage is not None:
                self._sabotage(worker, self._pumps[worker])
            return [Pumped(worker, self.workers[worker].pump(orders, self.seconds))]
        except Exception as error:  # noqa: BLE001 - as an actor does
            self._queue = deque(item for item in self._queue if item[0] != worker)
            del self.workers[worker]
            return [Lost(worker, Failure.of(error))]

    def _start(self, worker: int) -> PoolEvent:
        try:
            self.workers[worker] = Worker(self.spec, self.store)
        except Exception as error:  # noqa: BLE001 - as an actor does
            return StartFailed(worker, Failure.of(error))
        return Started(worker, self.workers[worker].info())

    def close(self) -> None:
        self.closed = True


class SlowFirst(InProcessPool):
    """Worker 0 is pumped so many times more seldom than the others, or stands after some pumps."""

    def __init__(
        self, job: Job, started: float, *, every: int = 1, stands: int = 0, **options: Any
    ) -> None:
        super().__init__(job.pipeline, job, started, **options)
        self.every = every
        self.stands = stands
        self._turns = 0

    def poll(self, timeout: float) -> list[PoolEvent]:
        for _ in range(len(self._queue)):
            if not self._waits():
                return super().poll(timeout)
            self._queue.rotate(-1)
        return []

    def _waits(self) -> bool:
        worker, orders = self._queue[0]
        if worker != 0 or orders is None:
            return False
        self._turns += 1
        return self._turns % self.every != 0 or 0 < self.stands <= self._pumps[0]


def share_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let rows be shared however little is left to do, by a clock that each look at it moves on."""
    clock = itertools.count().__next__
    monkeypatch.setattr(eagle_batch.job.job, "SHARE_S", 0.0)
    monkeypatch.setattr(driver, "LOOK_S", 0.0)
    monkeypatch.setattr(driver, "Paces", partial(Paces, clock=clock))
    monkeypatch.setattr(sys.modules[__name__], "Worker", partial(Worker, clock=clock))


def run_in_process(job: Job, watch: Watch | None = None, **options: Any) -> JobResult:
    """Run a job to its end with an in-process pool."""
    store = options.get("store")

    def make_pool(started: float) -> SizedPool:
        return InProcessPool(job.pipeline, job, started, **options)

    return run_job(job, make_pool, watch or Watch(), store)
