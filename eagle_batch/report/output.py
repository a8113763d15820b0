"""What an output says of its job: the records in `_job/` and the objects, as plain values.

Everything is read through a store, so a folder and a bucket are the same. Nothing is written here.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import pyarrow as pa

from eagle_batch.data.forms import BROKEN, Form, form_of, stamp_key
from eagle_batch.data.partitions import PARTITION_RECORDS
from eagle_batch.data.schema import ERROR_SCHEMA
from eagle_batch.errors import LedgerError

T = TypeVar("T")

#: Objects of a kind that are read; of more, so many at even distances.
MOST_OBJECTS = 500

#: Where the parts of a job's record lie.
PIPELINE = "_job/pipeline.json"
PLAN = "_job/plan.json"
METRICS = "_job/metrics.json"
TIMELINE = "_job/timeline.json"
COMMITS = "_job/commits"
#: Records of the objects that are left when duplicates are taken out.
FINISHED = "_job/finished"
RUNS = "_job/runs"
ERRORS = "errors"


class Objects(Protocol):
    """The part of a store that reports use."""

    @property
    def name(self) -> str:
        """The root as it may be shown to people."""

    def get(self, key: str) -> bytes | None:
        """Return an object's bytes, None where there is none."""

    def list(self, prefix: str) -> dict[str, int]:
        """Return the size in bytes of every object below a folder, by key."""

    def put_replace(self, key: str, data: bytes) -> None:
        """Store an object whole, replacing what is there."""


@dataclass(frozen=True, slots=True)
class OutputFacts:
    """The record of a job, without its rows."""

    output: str
    fingerprint: str
    #: The pipeline as plain data.
    pipeline: dict[str, Any]
    #: Rows x samples that must come out or be quarantined; rows and quarantined by the records.
    units: int
    rows: int
    quarantined: int
    #: Rows that were left out on purpose.
    dropped: int
    #: Command, versions and settings of each run, oldest first.
    runs: tuple[dict[str, Any], ...]
    #: The document of `_job/metrics.json`; None before the first.
    metrics: dict[str, Any] | None
    #: What the last run's watcher saw: points and remarks; see `recorder`.
    timeline: dict[str, Any] | None
    #: Keys of the data objects, and of the errors objects that hold rows.
    data_keys: tuple[str, ...]
    error_keys: tuple[str, ...]
    #: Columns by which the rows are partitioned in `by/`.
    partitioned: tuple[str, ...] = ()

    @property
    def stages(self) -> tuple[str, ...]:
        """Names of the stages, which are columns."""
        return tuple(stage["name"] for stage in self.pipeline["stages"])

    @property
    def complete(self) -> bool:
        """Whether every row came out or is quarantined, by the commit records."""
        return self.rows + self.quarantined + self.dropped == self.units


def read_facts(store: Objects) -> OutputFacts:
    """Read a job's record; raises LedgerError where there is no job."""
    pipeline, plan = _json(store, PIPELINE), _json(store, PLAN)
    if pipeline is None or plan is None:
        raise LedgerError(
            f"{store.name}: no {PIPELINE}; expected the output folder of `eagle-batch submit`"
        )
    commits = _commits(store, FINISHED) or _commits(store, COMMITS)
    errors = sorted(key for key in store.list(ERRORS) if form_of(key) is not None)
    timeline = _json(store, TIMELINE)
    return OutputFacts(
        output=store.name,
        fingerprint=pipeline["fingerprint"],
        pipeline=pipeline["pipeline"],
        units=sum(task["stop"] - task["start"] for task in plan["tasks"]) * plan["samples"],
        rows=sum(commit["rows"] for commit in commits.values()),
        quarantined=sum(commit["errors"] - commit.get("dropped", 0) for commit in commits.values()),
        dropped=sum(commit.get("dropped", 0) for commit in commits.values()),
        runs=tuple(_runs(store)),
        metrics=_json(store, METRICS),
        timeline=timeline["runs"][-1] if timeline and timeline["runs"] else None,
        data_keys=data_keys(store),
        error_keys=tuple(key for key in errors if _may_hold_errors(key, commits)),
        partitioned=_partitioned(store),
    )


def data_keys(store: Objects) -> tuple[str, ...]:
    """Return the keys of the data objects in the order of the input."""
    return tuple(sorted(key for key in store.list("data") if form_of(key) is not None))


def read_table(store: Objects, key: str) -> pa.Table:
    """Return the rows of one object; raises LedgerError where it is not whole."""
    data, form = store.get(key), form_of(key)
    assert form is not None
    if data is None:
        raise LedgerError(f"{store.name}: {key} is gone; `eagle-batch verify` tells more")
    try:
        return form.read(data, _schema(store, form, key, data))
    except BROKEN as error:
        raise LedgerError(
            f"{store.name}: {key} is not a whole {form.name} file; `eagle-batch verify` tells more"
        ) from error


def _schema(store: Objects, form: Form, key: str, data: bytes) -> pa.Schema | None:
    """Return the columns of an object that does not know them."""
    if form.stamp is None:
        return None
    if key.startswith(f"{ERRORS}/"):
        return ERROR_SCHEMA
    stamp = store.get(stamp_key(key, data))
    return None if stamp is None else form.stamp.read(stamp).schema.remove_metadata()


@dataclass(frozen=True, slots=True)
class Failures:
    """Why rows are quarantined."""

    #: Reason -> rows, and one such row as an example.
    counts: Counter[str]
    examples: dict[str, dict[str, Any]]
    #: Objects that were read, of those that hold such rows.
    read: int
    objects: int


def read_failures(store: Objects, facts: OutputFacts) -> Failures:
    """Count the quarantined rows by reason."""
    counts: Counter[str] = Counter()
    examples: dict[str, dict[str, Any]] = {}
    keys = spread(facts.error_keys, MOST_OBJECTS)
    for key in keys:
        for row in read_table(store, key).to_pylist():
            counts[row["reason"]] += 1
            examples.setdefault(row["reason"], row)
    return Failures(counts, examples, len(keys), len(facts.error_keys))


def spread(items: Sequence[T], most: int) -> list[T]:
    """Return at most so many items, at even distances."""
    if len(items) <= most:
        return list(items)
    return [items[index * len(items) // most] for index in range(most)]


def _json(store: Objects, key: str) -> dict[str, Any] | None:
    data = store.get(key)
    try:
        return None if data is None else dict(json.loads(data))
    except ValueError as error:
        raise LedgerError(f"{store.name}: {key} is damaged: {error}") from error


def _partitioned(store: Objects) -> tuple[str, ...]:
    records = (_json(store, key) for key in sorted(store.list(PARTITION_RECORDS))[:1])
    return tuple(name for record in records if record for name in record["columns"])


def _runs(store: Objects) -> Iterator[dict[str, Any]]:
    for key in sorted(store.list(RUNS)):
        document = _json(store, key)
        if document is not None:
            yield document


def _commits(store: Objects, folder: str) -> dict[str, dict[str, Any]]:
    """Return the record that counts for each key: the last, unless it was retracted."""
    commits: dict[str, dict[str, Any]] = {}
    for source in sorted(store.list(folder)):
        for line in (store.get(source) or b"").splitlines():
            record = json.loads(line)
            if "retracted" in record:
                commits.pop(record["retracted"], None)
            else:
                commits[record["key"]] = record
    return commits


def _may_hold_errors(key: str, commits: dict[str, dict[str, Any]]) -> bool:
    form = form_of(key)
    name = key.rpartition("/")[2].removesuffix(form.ending if form else "")
    return name not in commits or commits[name]["errors"] > 0
