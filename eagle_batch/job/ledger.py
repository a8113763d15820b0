"""Durable progress: what an output holds, what its records say, and what is left to do.

    <output>/data/part-00000.parquet      rows, complete or not there
    <output>/errors/part-00000.parquet    quarantined rows of the same task, put after the data
    <output>/_job/pipeline.json           fingerprint, resolved pipeline, inputs
    <output>/_job/plan.json               the planned shards
    <output>/_job/commits/NNNNNN-<run>.jsonl   commit records, written by drivers only
    <output>/_job/runs/NNNNNN-<run>.json  command, versions and settings of each run
    <output>/_job/lock/NNNNNN.json        who runs now
    <output>/_job/shares/...              rows that workers make for others, until the run ends
    <output>/_job/stamps/...              of JSON lines: what a data object cannot say itself
    <output>/_job/damaged/...             unreadable objects that were moved out of the way

An object without a record (a crash between the two) is adopted after it was checked whole. An
errors object that is missing, or of another attempt, is put again from the data object, which
carries it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from eagle_batch.data.forms import Form, form_of, make_form
from eagle_batch.errors import LedgerError
from eagle_batch.job.lock import Lock
from eagle_batch.job.objects import (
    DATA,
    ERRORS,
    SHARES,
    Objects,
    TornObjectError,
)
from eagle_batch.job.store import Store
from eagle_batch.job.tasks import Commit, Task
from eagle_batch.pipeline.fingerprint import InputIdentity, explain_difference
from eagle_batch.pipeline.result import Output

JOB = "_job"
PIPELINE = f"{JOB}/pipeline.json"
PLAN = f"{JOB}/plan.json"
METRICS = f"{JOB}/metrics.json"
COMMITS = f"{JOB}/commits"
RUNS = f"{JOB}/runs"
DAMAGED = f"{JOB}/damaged"
#: Commit records, and seconds, that wait for the next record object. A resume reads every record
#: object, and adopts, by reading it whole, every data object that a crash left without a record.
FLUSH_RECORDS = 256
FLUSH_S = 30.0


@dataclass(frozen=True, slots=True)
class Identity:
    """What makes this job this job; written once, compared at every resume."""

    fingerprint: str
    #: The pipeline as plain data.
    resolved: dict[str, Any]
    inputs: tuple[InputIdentity, ...]
    #: The planned shards.
    tasks: tuple[Task, ...]
    samples: int
    #: Unix time of the job's first start, which a resumed job keeps.
    started: float = 0.0
    #: Files, row groups and ranges behind the tasks, for the record and for `verify`.
    plan: dict[str, Any] = field(default_factory=dict)
    #: What the target is known by.
    target: str = ""

    @property
    def form(self) -> Form:
        """How the tables of the job are written."""
        return make_form(Output.model_validate(self.resolved["output"]))

    @property
    def units(self) -> int:
        """Rows that must come out or be quarantined."""
        return sum(task.rows for task in self.tasks) * self.samples


@dataclass(frozen=True, slots=True)
class Scan:
    """What a resume found."""

    #: Every task there is: planned shards, and the parts of those that were split.
    tasks: tuple[Task, ...]
    #: What is done, by key; closed tasks included.
    commits: dict[str, Commit]
    #: Keys of complete objects that had no record.
    adopted: tuple[str, ...] = ()
    #: Keys whose recorded objects are gone; they are made again.
    missing: tuple[str, ...] = ()
    #: Keys of unreadable objects that were moved away; they are made again.
    damaged: tuple[str, ...] = ()
    #: Keys whose errors object was put again from the data object.
    restored: tuple[str, ...] = ()

    @property
    def complete(self) -> bool:
        """Whether nothing is left to do."""
        return len(self.commits) == len(self.tasks)


class Ledger:
    """The one writer of commit records; opened by a driver, closed by it."""

    def __init__(
        self,
        store: Store,
        identity: Identity,
        objects: Objects,
        run: str,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.store = store
        self.objects = objects
        #: The job; after `open` with the time of its first start.
        self.identity = identity
        #: Whether the store lets one attempt alone create an object; known after `open`.
        self.exclusive = True
        #: Token of this run.
        self.run = run
        self._clock = clock
        self._lock = Lock(store, run, clock)
        self._waiting: list[str] = []
        self._waiting_since = 0.0
        self._next_record = 0

    def open(self, about: dict[str, Any]) -> Scan:
        """Take the lock, compare the job, note this run, and find out what is done.

        Raises OutputBusyError, or LedgerError when the output is of another job or holds what
        cannot be explained; then nothing was changed.
        """
        self._lock.acquire()
        try:
            self._settle_identity()
            self.store.sweep()
            self.tidy()
            self.exclusive = self.store.is_exclusive()
            self._note_run(about | {"conditional_puts": self.exclusive})
            scan = _Scanner(
                self.store, self.objects, self.identity, self._lock.beat, self.exclusive
            ).scan()
            self._next_record = next_number(self.store.list(COMMITS))
            self._waiting = [json.dumps({"retracted": key}) for key in scan.missing]
            for key in (*scan.adopted, *scan.restored):
                self.record(scan.commits[key])
            self.flush()
        except BaseException:
            self._lock.release()
            raise
        return scan

    def _settle_identity(self) -> None:
        stored = self.store.get(PIPELINE)
        if stored is not None:
            document = json.loads(stored)
            self._compare(document)
            self.identity = replace(self.identity, started=document["started"])
            return
        strangers = [*self.store.list(DATA), *self.store.list(ERRORS)]
        if strangers:
            raise LedgerError(
                f"{self.store.name}: holds {some(strangers)} but no {PIPELINE}; it is not the "
                "output of a job; choose an empty output.path"
            )
        self.identity = replace(self.identity, started=self._clock())
        self.store.put_replace(PLAN, _plan_document(self.identity))
        self.store.put_replace(PIPELINE, _pipeline_document(self.identity))

    def _compare(self, stored: dict[str, Any]) -> None:
        if stored["fingerprint"] == self.identity.fingerprint:
            return
        differences = explain_difference(
            stored["pipeline"],
            self.identity.resolved,
            [InputIdentity(**item) for item in stored["inputs"]],
            self.identity.inputs,
            (stored["target"], self.identity.target),
        )
        lines = "\n".join(f"  {line}" for line in differences)
        raise LedgerError(
            f"{self.store.name}: this output belongs to another job. Its texts would change:\n"
            f"{lines}\nset these back to resume it, or choose another output.path"
        )

    def _note_run(self, about: dict[str, Any]) -> None:
        number = next_number(self.store.list(RUNS))
        body = json.dumps({"run": self.run, "started": self._clock(), **about}, indent=2)
        self.store.put_new(f"{RUNS}/{number:06d}-{self.run}.json", body.encode())

    def record(self, commit: Commit) -> None:
        """Note a commit; it is written with the next batch."""
        if not self._waiting:
            self._waiting_since = self._clock()
        self._waiting.append(json.dumps(asdict(commit)))

    def tend(self) -> None:
        """Write waiting records and beat the lock where it is time. Called all the while.

        Raises OutputBusyError when another driver has taken over.
        """
        self._lock.beat()
        late = self._clock() - self._waiting_since >= FLUSH_S
        if self._waiting and (late or len(self._waiting) >= FLUSH_RECORDS):
            self.flush()

    def flush(self) -> None:
        """Write the waiting commit records as one new object."""
        if not self._waiting:
            return
        lines = "".join(line + "\n" for line in self._waiting)
        key = f"{COMMITS}/{self._next_record:06d}-{self.run}.jsonl"
        if not self.store.put_new(key, lines.encode()):
            raise LedgerError(f"{key}: exists already; another driver writes this output")
        self._next_record += 1
        self._waiting = []

    def tidy(self) -> None:
        """Remove the shares of a run that is over."""
        for key in self.store.list(SHARES):
            self.store.delete(key)

    def close(self) -> None:
        """Write what waits and give the lock back."""
        try:
            self.flush()
        finally:
            self._lock.release()


@dataclass(slots=True)
class _Scanner:
    """One pass over an output; see `Scan`."""

    store: Store
    objects: Objects
    identity: Identity
    #: Called for each task: checking many objects takes longer than a lock lives.
    beat: Callable[[], None]
    exclusive: bool
    adopted: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)
    restored: list[str] = field(default_factory=list)

    def scan(self) -> Scan:
        sizes = self.store.list(DATA) | self.store.list(ERRORS)
        records = latest(read_records(self.store))
        commits: dict[str, Commit] = {}
        tasks = list(self.identity.tasks)
        for task in tasks:  # grows by the parts of closed tasks while we go
            self.beat()
            commit = self._settle(task, sizes, records.get(task.key))
            if commit is not None:
                commits[task.key] = commit
                tasks += commit.parts
        self._refuse_strangers(tasks, sizes)
        return Scan(
            tasks=tuple(tasks),
            commits=commits,
            adopted=tuple(self.adopted),
            missing=tuple(self.missing),
            damaged=tuple(self.damaged),
            restored=tuple(self.restored),
        )

    def _settle(self, task: Task, sizes: dict[str, int], record: Commit | None) -> Commit | None:
        size = sizes.get(self.objects.data_key(task))
        if size is None:
            if record is not None:
                self.missing.append(task.key)
            self._forget_errors(task, sizes)
            return None
        if record is None:
            return self._read(task, sizes, self.adopted)
        if size != record.data_bytes:
            self._refuse_change(task, size, record)
            return self._read(task, sizes, self.adopted)
        if sizes.get(self.objects.errors_key(task)) != record.errors_bytes:
            return self._read(task, sizes, self.restored)
        return record

    def _refuse_change(self, task: Task, size: int, record: Commit) -> None:
        if not self.exclusive:
            return  # A late attempt may have been the last to put; its object is as good.
        raise LedgerError(
            f"{self.store.name}: {self.objects.data_key(task)} has {size} bytes, its record says "
            f"{record.data_bytes}; it was changed after it was committed; put it back, or delete "
            "it to make it again"
        )

    def _forget_errors(self, task: Task, sizes: dict[str, int]) -> None:
        """Remove the errors object of rows that are nowhere: they are made again."""
        if self.objects.errors_key(task) in sizes:
            self.store.delete(self.objects.errors_key(task))

    def _read(self, task: Task, sizes: dict[str, int], into: list[str]) -> Commit | None:
        try:
            commit = self.objects.settle(task, exclusive=self.exclusive)
        except TornObjectError:
            self._move_away(task)
            self._forget_errors(task, sizes)
            self.damaged.append(task.key)
            return None
        except LedgerError as error:
            raise LedgerError(
                f"{self.store.name}: {error}; move it away, or choose another output.path"
            ) from error
        into.append(task.key)
        return commit

    def _move_away(self, task: Task) -> None:
        key = self.objects.data_key(task)
        data = self.store.get(key) or b""
        self.store.put_replace(f"{DAMAGED}/{key.rpartition('/')[2]}", data)
        self.objects.forget(task)

    def _refuse_strangers(self, tasks: Iterable[Task], sizes: dict[str, int]) -> None:
        names = (self.objects.data_key, self.objects.errors_key)
        ours = {name(task) for task in tasks for name in names}
        strangers = sorted(key for key in sizes if form_of(key) is not None and key not in ours)
        if strangers:
            raise LedgerError(
                f"{self.store.name}: holds {some(strangers)}, which this job did not write; move "
                "it away, or choose another output.path"
            )


@dataclass(frozen=True, slots=True)
class Record:
    """One line of a record object: a commit, or the retraction of one whose objects were gone."""

    source: str
    key: str
    commit: Commit | None


def read_records(store: Store) -> list[Record]:
    """Return every record of an output, oldest first.

    Raises LedgerError, naming the object and the line, when one is not a record.
    """
    records: list[Record] = []
    for source in sorted(store.list(COMMITS)):
        lines = (store.get(source) or b"").decode("utf-8", "replace").splitlines()
        for number, line in enumerate(lines, 1):
            records.append(_parse_record(f"{source}:{number}", line))
    return records


def _parse_record(source: str, line: str) -> Record:
    try:
        values = json.loads(line)
        if "retracted" in values:
            return Record(source, values["retracted"], None)
        parts = tuple(Task(**part) for part in values.pop("parts"))
        commit = Commit(**values, parts=parts)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise LedgerError(f"{source}: not a commit record: {error}") from error
    return Record(source, commit.key, commit)


def latest(records: Iterable[Record]) -> dict[str, Commit]:
    """Return the record that counts for each key: the last, unless it was retracted."""
    last = {record.key: record.commit for record in records}
    return {key: commit for key, commit in last.items() if commit is not None}


def next_number(keys: Iterable[str]) -> int:
    """Return the number after the highest of objects that are named NNNNNN-..."""
    numbers = (key.rpartition("/")[2].partition("-")[0] for key in keys)
    return max((int(number) for number in numbers if number.isdigit()), default=-1) + 1


def some(names: list[str]) -> str:
    """Return the first few of many names, for a message."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def read_identity(store: Store) -> Identity:
    """Return what an output says of its job. Raises LedgerError when there is no job in it."""
    pipeline, plan = store.get(PIPELINE), store.get(PLAN)
    if pipeline is None or plan is None:
        raise LedgerError(
            f"{store.name}: no {PIPELINE}; expected the output folder of `eagle-batch submit`"
        )
    try:
        stored, planned = json.loads(pipeline), json.loads(plan)
        return Identity(
            fingerprint=stored["fingerprint"],
            resolved=stored["pipeline"],
            inputs=tuple(InputIdentity(**item) for item in stored["inputs"]),
            tasks=tuple(Task(**item) for item in planned["tasks"]),
            samples=planned["samples"],
            started=stored["started"],
            plan=planned["plan"],
            target=stored["target"],
        )
    except (ValueError, KeyError, TypeError) as error:
        raise LedgerError(f"{store.name}: {PIPELINE} or {PLAN} is damaged: {error}") from error


def _pipeline_document(identity: Identity) -> bytes:
    inputs = [asdict(item) for item in identity.inputs]
    document = {
        "fingerprint": identity.fingerprint,
        "started": identity.started,
        "pipeline": identity.resolved,
        "inputs": inputs,
        "target": identity.target,
    }
    return json.dumps(document, indent=2).encode()


def _plan_document(identity: Identity) -> bytes:
    tasks = [asdict(task) for task in identity.tasks]
    document = {"samples": identity.samples, "tasks": tasks, "plan": identity.plan}
    return json.dumps(document).encode()
