"""One worker in this process, over rows of a plan: for previews, estimates and programs.

It is the worker of a job, with a store in memory: the same prompts, the same noise, the same texts.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import fsspec
import pyarrow as pa

from eagle_batch.data.forms import Form, make_form
from eagle_batch.data.plan import Plan
from eagle_batch.data.schema import ERROR_SCHEMA
from eagle_batch.engine.request import Completion, EngineMetrics, EngineSpec, Request
from eagle_batch.errors import EagleBatchError, StoppedError
from eagle_batch.job.layers import made_layer
from eagle_batch.job.objects import Found, data_key, find
from eagle_batch.job.reports import PumpReport
from eagle_batch.job.spec import EngineFactory, EngineLike, Tokenizer, WorkerSpec
from eagle_batch.job.store import Store, open_store
from eagle_batch.job.tasks import Lease, Task
from eagle_batch.job.worker import Worker
from eagle_batch.pipeline import Pipeline

#: Seconds between two looks at how far the work is.
LOOK_S = 0.25


class Engine:
    """An engine that is built once, and remembers which prompt was at each address of noise."""

    def __init__(self, engine: EngineLike) -> None:
        self._engine = engine
        #: Address of the noise -> prompt, of every request so far.
        self.prompts: dict[int, tuple[int, ...]] = {}

    @property
    def tokenizer(self) -> Tokenizer:
        """The target's tokenizer."""
        return self._engine.tokenizer

    @property
    def slots(self) -> int:
        """Rows that are decoded together at most."""
        return self._engine.slots

    @property
    def sizing(self) -> str:
        """Why there are so many slots, for people."""
        return self._engine.sizing

    @property
    def waiting(self) -> int:
        """Requests that have no slot yet."""
        return self._engine.waiting

    @property
    def has_work(self) -> bool:
        """Whether `step` would do anything."""
        return self._engine.has_work

    def add(self, request: Request) -> None:
        """Queue a request; raises RequestError when the row can never run."""
        self._engine.add(request)
        self.prompts[request.noise_key] = request.prompt_ids

    def step(self) -> list[Completion]:
        """Do one piece of work; return what finished."""
        return self._engine.step()

    def metrics(self) -> EngineMetrics:
        """Return the counters since the engine was built."""
        return self._engine.metrics()

    def use_head(self, name: str) -> None:
        """Draft with another head from now on."""
        self._engine.use_head(name)

    def prompt(self, address: int) -> str:
        """Return the text of a prompt as the model saw it, special tokens included."""
        return self.tokenizer.decode(
            list(self.prompts[address]),
            skip_special_tokens=False,
            clean_up_tokenization_spaces=False,
        )


@dataclass(frozen=True, slots=True)
class Made:
    """What came of some rows."""

    #: The output's columns, and the error table's, in the order of the tasks.
    rows: pa.Table
    errors: pa.Table
    metrics: EngineMetrics
    #: Tokens a second, and for how long they were counted: while there was work for every slot,
    #: or all the time where that was never so.
    tokens_per_s: float
    full: bool


class LocalWorker:
    """Makes rows with one engine, which it builds at first use and keeps."""

    def __init__(
        self, build: EngineFactory, device: str = "cpu", threads: int | None = None
    ) -> None:
        self._build = build
        self._device = device
        self._threads = threads
        self.engine: Engine | None = None

    def make(self, pipeline: Pipeline, plan: Plan, tasks: Sequence[Task]) -> Made:
        """Make the rows of some tasks.

        Raises what building an engine raises, and StoppedError where the input cannot be read.
        """
        with _memory() as store:
            spec = WorkerSpec(
                pipeline, plan, time.time(), self._device, self._threads, self._engine_of
            )
            worker = Worker(spec, store)
            form = make_form(pipeline.output)
            speed = _pump(worker, tasks, pipeline.samples)
            made = made_layer(store, layers=pipeline.deduplicate is not None)
            found = [_found(made, form, task) for task in tasks]
            rows = [each.table.replace_schema_metadata(None) for each in found]
            errors = [_errors(form, each) for each in found]
        return Made(
            pa.concat_tables(rows), pa.concat_tables(errors), speed.metrics, speed.rate, speed.full
        )

    def _engine_of(self, spec: EngineSpec) -> EngineLike:
        """Give every worker the one engine; a smaller one replaces it where memory was short."""
        if self.engine is None or (not spec.fit_slots and self.engine.slots > spec.slots):
            self.engine = Engine(self._build(spec))
        return self.engine


def first_rows(plan: Plan, count: int) -> list[Task]:
    """Return a task for each of the plan's first rows."""
    places = ((shard, row) for shard in plan.shards for row in range(shard.rows))
    return [
        Task(f"row-{number}", shard.index, row, row + 1)
        for number, (shard, row) in zip(range(count), places, strict=False)
    ]


def rows_at(plan: Plan, numbers: Sequence[int]) -> list[Task]:
    """Return a task for each of the plan's rows with these numbers, which ascend."""
    tasks: list[Task] = []
    wanted, first = list(numbers), 0
    for shard in plan.shards:
        while wanted and wanted[0] < first + shard.rows:
            row = wanted.pop(0) - first
            tasks.append(Task(f"row-{len(tasks)}", shard.index, row, row + 1))
        first += shard.rows
    return tasks


@dataclass(slots=True)
class _Speed:
    """Counts tokens and seconds while every slot has work."""

    units: int
    metrics: EngineMetrics = EngineMetrics()  # noqa: RUF009 - frozen
    seconds: float = 0.0
    full_tokens: int = 0
    full_seconds: float = 0.0
    done: int = 0

    def add(self, report: PumpReport) -> None:
        """Take in one turn of the pump."""
        self.metrics = self.metrics + report.metrics
        self.seconds += report.seconds
        self.done += report.units
        if self.units - self.done >= report.slots:
            self.full_tokens += report.metrics.round_tokens
            self.full_seconds += report.seconds

    @property
    def full(self) -> bool:
        """Whether every slot had work for long enough to tell."""
        return self.full_tokens > 0 and self.full_seconds >= LOOK_S

    @property
    def rate(self) -> float:
        """Tokens a second."""
        if self.full:
            return self.full_tokens / self.full_seconds
        return self.metrics.round_tokens / max(self.seconds, 1e-9)


def _pump(worker: Worker, tasks: Sequence[Task], samples: int) -> _Speed:
    speed = _Speed(sum(task.rows for task in tasks) * samples)
    leases = tuple(Lease(task, 1) for task in tasks)
    left = len(tasks)
    while left:
        report = worker.pump(leases, LOOK_S)
        for lease, failure in report.failed:
            error = failure.error
            if isinstance(error, EagleBatchError):
                raise error
            raise StoppedError(f"{lease.task.key}: {failure.message}")
        left -= len(report.committed)
        leases = ()
        speed.add(report)
    return speed


def _found(store: Store, form: Form, task: Task) -> Found:
    found = find(store, form, data_key(task.key, form))
    assert found is not None, "it was committed"
    return found


def _errors(form: Form, found: Found) -> pa.Table:
    table = form.read(found.errors or b"", ERROR_SCHEMA)
    return table.replace_schema_metadata(None)


@contextmanager
def _memory() -> Iterator[Store]:
    root = f"memory://eagle-batch-{uuid.uuid4().hex}"
    try:
        yield open_store(root)
    finally:
        fs = fsspec.filesystem("memory")
        path = root.removeprefix("memory:/")
        if fs.exists(path):
            fs.rm(path, recursive=True)
