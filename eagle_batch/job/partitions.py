"""Partitions: the rows of a complete job once more, in folders by the values of columns.

`data/` stays what it is, and all that proves the job is about it. What lies below `by/` follows
from it alone, some shards at a time:

    _job/partitions/part-00000.json       which shards, and every object that is made of them
    by/topic=stars/part-00000.parquet     their rows with that value; named after the first of them

The record is put before its objects, so that every object there is of ours has a record, whenever a
process dies. What a record tells of is done when all of its objects lie there. Else, or where the
shards are no longer those it tells of, they are deleted and made again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property

import pyarrow as pa

from eagle_batch.data.forms import Form, form_of, make_form
from eagle_batch.data.partitions import (
    KEPT,
    PARTITION_RECORDS,
    PARTITIONS,
    folders,
    partitions,
)
from eagle_batch.errors import ConfigError, LedgerError
from eagle_batch.job.ledger import some
from eagle_batch.job.objects import data_key, find, sha256
from eagle_batch.job.store import Store
from eagle_batch.job.tasks import Commit
from eagle_batch.pipeline.result import Output

#: Most bytes of the shards that are taken together: few small files, and little to hold.
SPAN_BYTES = 32 << 20
#: Most folders. Each is a file at least; more are a mistake in the column.
MOST_FOLDERS = 1000


@dataclass(frozen=True, slots=True)
class Part:
    """One object below `by/`."""

    key: str
    rows: int
    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Record:
    """What is made of some shards."""

    columns: tuple[str, ...]
    #: Key of each shard -> checksum of its data object.
    shards: dict[str, str]
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Span:
    """Shards that are taken together, one after another."""

    commits: tuple[Commit, ...]

    @property
    def name(self) -> str:
        """What its objects are called."""
        return self.commits[0].key

    @cached_property
    def shards(self) -> dict[str, str]:
        """Key of each shard -> checksum of its data object."""
        return {commit.key: commit.data_sha256 for commit in self.commits}


def spans(commits: Sequence[Commit]) -> list[Span]:
    """Return the shards in the order of the input, as they are taken together."""
    found: list[list[Commit]] = []
    size = 0
    for commit in sorted(commits, key=lambda commit: commit.key):
        size += commit.data_bytes
        if not found or size > SPAN_BYTES:
            found.append([])
            size = commit.data_bytes
        found[-1].append(commit)
    return [Span(tuple(taken)) for taken in found]


def record_key(name: str) -> str:
    """Return where the record of a span lies."""
    return f"{PARTITION_RECORDS}/{name}.json"


def _no_lock() -> None:
    """Tend nothing: who only reads holds no lock."""


def read_partition_records(store: Store, tend: Callable[[], None] = _no_lock) -> dict[str, Record]:
    """Return the records of an output by their keys; raises LedgerError where one is damaged."""
    found = {}
    for key in sorted(store.list(PARTITION_RECORDS)):
        tend()
        try:
            values = json.loads(store.get(key) or b"")
            parts = tuple(Part(**part) for part in values["parts"])
            found[key] = Record(tuple(values["columns"]), dict(values["shards"]), parts)
        except (ValueError, KeyError, TypeError) as error:
            raise LedgerError(f"{key}: damaged: {error}; delete it and {PARTITIONS}/") from error
    return found


def rows_of(store: Store, form: Form, span: Span, tend: Callable[[], None] = _no_lock) -> pa.Table:
    """Return the rows of some shards; raises LedgerError where they are not those committed."""
    tables = []
    for commit in span.commits:
        tend()
        key = data_key(commit.key, form)
        found = find(store, form, key)
        if found is None or sha256(found.data) != commit.data_sha256:
            raise LedgerError(f"{store.name}: {key} is gone or was changed; see `verify`")
        tables.append(found.table.replace_schema_metadata(None))
    return pa.concat_tables(tables)


class Partitioner:
    """Writes what lies below `by/`; only the holder of the output's lock may."""

    def __init__(self, store: Store, output: Output, commits: Sequence[Commit]) -> None:
        """`commits` are those of `data/`; `output` is the section of the pipeline."""
        self._store = store
        self._form = make_form(output)
        self._columns = output.partition_by
        self._spans = spans(commits)

    def write(self, tend: Callable[[], None], say: Callable[[str], None]) -> None:
        """Write what is missing; `tend` is called all the while, `say` when there is work.

        Raises ConfigError where a value cannot be the name of a folder, or where there are too many
        of them: before anything is put. LedgerError for objects that this job did not write.
        """
        records = read_partition_records(self._store, tend)
        sizes = self._store.list(PARTITIONS)
        self._refuse_strangers(records, sizes)
        spans_done = (span for span in self._spans if self._is_done(span, records, sizes))
        done = {record_key(span.name) for span in spans_done}
        left = [span for span in self._spans if record_key(span.name) not in done]
        if not left and len(done) == len(records):
            return
        say(f"writing partitions by {', '.join(self._columns)}")
        self._check_values(left, [records[key] for key in done], tend)
        for key, record in records.items():
            if key not in done:
                self._forget(key, record, tend)
        for span in left:
            self._put(span, tend)

    def _refuse_strangers(self, records: dict[str, Record], sizes: dict[str, int]) -> None:
        ours = {part.key for record in records.values() for part in record.parts}
        strangers = sorted(set(filter(form_of, sizes)) - ours)
        if strangers:
            raise LedgerError(
                f"{self._store.name}: holds {some(strangers)}, which this job did not write; move "
                f"it away: {PARTITIONS}/ is where output.partition_by writes"
            )

    def _is_done(self, span: Span, records: dict[str, Record], sizes: dict[str, int]) -> bool:
        record = records.get(record_key(span.name))
        if record is None or (record.columns, record.shards) != (self._columns, span.shards):
            return False
        return all(sizes.get(part.key) == part.bytes for part in record.parts)

    def _check_values(
        self, left: Sequence[Span], done: Sequence[Record], tend: Callable[[], None]
    ) -> None:
        """Look at every value once before anything is put."""
        names = {folder_of(part.key) for record in done for part in record.parts}
        for span in left:
            for commit in span.commits:
                rows = rows_of(self._store, self._form, Span((commit,)), tend)
                names |= set(folders(rows, self._columns))
                if len(names) > MOST_FOLDERS:
                    raise ConfigError(_too_many(names, self._columns, commit.key))

    def _forget(self, key: str, record: Record, tend: Callable[[], None]) -> None:
        for each in (*(part.key for part in record.parts), key):
            tend()
            self._store.delete(each)

    def _put(self, span: Span, tend: Callable[[], None]) -> None:
        objects = dict(self._objects(span, tend))
        parts = [
            asdict(Part(key, rows, len(data), sha256(data)))
            for key, (rows, data) in objects.items()
        ]
        record = {"columns": self._columns, "shards": span.shards, "parts": parts}
        self._put_new(record_key(span.name), json.dumps(record).encode())
        for key, (_, data) in objects.items():
            tend()
            self._put_new(key, data)

    def _objects(
        self, span: Span, tend: Callable[[], None]
    ) -> Iterator[tuple[str, tuple[int, bytes]]]:
        rows = rows_of(self._store, self._form, span, tend)
        for folder, table in partitions(rows, self._columns).items():
            tend()
            key = f"{PARTITIONS}/{folder}/{span.name}{self._form.ending}"
            yield key, (table.num_rows, self._form.write(table))

    def _put_new(self, key: str, data: bytes) -> None:
        if not self._store.put_new(key, data):
            raise LedgerError(f"{key}: exists already; another driver writes this output")


def folder_of(key: str) -> str:
    """Return the folder of an object, below `by/`."""
    return key.removeprefix(f"{PARTITIONS}/").rpartition("/")[0]


def _too_many(names: set[str], columns: Sequence[str], last: str) -> str:
    levels = zip(*(name.split("/") for name in names), strict=True)
    counts = [f"{name!r} {len(set(level)):,}" for name, level in zip(columns, levels, strict=True)]
    return (
        f"output.partition_by: up to {last}, the columns have so many values: {', '.join(counts)}; "
        f"expected at most {MOST_FOLDERS:,} folders; {KEPT}"
    )
