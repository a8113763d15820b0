"""Whether `by/` holds the rows of `data/`, each once and in the right folder; for `verify`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import pyarrow as pa

from eagle_batch.data.forms import Form
from eagle_batch.data.partitions import PARTITIONS, partitions
from eagle_batch.errors import LedgerError
from eagle_batch.job.objects import read_table, sha256
from eagle_batch.job.partitions import (
    Part,
    Record,
    Span,
    folder_of,
    read_partition_records,
    record_key,
    rows_of,
    spans,
)
from eagle_batch.job.store import Store
from eagle_batch.job.tasks import Commit

#: What is wrong: its kind, the object, and a sentence.
Problem = tuple[str, str, str]
_AGAIN = "run the job again with output.partition_by to make it"


@dataclass(slots=True)
class PartitionProof:
    """One look at the partitions of an output, some shards at a time."""

    store: Store
    form: Form
    #: Of the objects in `data/`.
    commits: Sequence[Commit]
    rows: int = 0
    objects: int = 0
    folders: set[str] = field(default_factory=set)

    def problems(self) -> Iterator[Problem]:
        """Yield all that is wrong; nothing where a job was never partitioned."""
        try:
            records = read_partition_records(self.store)
        except LedgerError as error:
            where, _, text = str(error).partition(": ")
            yield "damaged", where, text
            return
        listed = self.store.list(PARTITIONS)
        if not records and not listed:
            return
        for span in spans(self.commits):
            key = record_key(span.name)
            record = records.pop(key, None)
            if record is None:
                yield "unfinished", f"{PARTITIONS}/", f"{key} is not there; {_AGAIN}"
            elif record.shards != span.shards:
                yield "mismatch", key, f"data/ holds other shards than it tells of; {_AGAIN}"
            else:
                yield from self._span(span, record)
            for part in () if record is None else record.parts:
                listed.pop(part.key, None)
        for key, record in records.items():
            stale = f"what it tells of in {PARTITIONS}/ is stale"
            yield "foreign", key, f"the shards are not taken together so; {stale}; {_AGAIN}"
            for part in record.parts:
                listed.pop(part.key, None)
        for key in sorted(listed):
            yield "foreign", key, "this job did not write it"

    def said(self) -> str:
        """Return one line of what was found; empty where nothing was."""
        if not self.objects:
            return ""
        count = f"{len(self.folders):,} partitions, {self.objects:,} objects"
        return f"{PARTITIONS}/: {self.rows:,} rows in {count}"

    def _span(self, span: Span, record: Record) -> Iterator[Problem]:
        try:
            wanted = partitions(rows_of(self.store, self.form, span), record.columns)
        except LedgerError:
            return  # The shard is not whole, which is a finding already.
        parts = {folder_of(part.key): part for part in record.parts}
        for folder in wanted.keys() - parts.keys():
            yield "lost", record_key(span.name), f"nothing is in {folder}; {_AGAIN}"
        for folder, part in parts.items():
            yield from self._part(part, wanted.get(folder))
            self.folders.add(folder)

    def _part(self, part: Part, wanted: pa.Table | None) -> Iterator[Problem]:
        data = self.store.get(part.key)
        if data is None:
            yield "missing", part.key, f"is gone; {_AGAIN}"
            return
        self.objects += 1
        if wanted is None or sha256(data) != part.sha256:
            yield "mismatch", part.key, "is not as it was written; delete it, and then " + _AGAIN
            return
        rows = read_table(self.form, part.key, data, wanted.schema)
        self.rows += rows.num_rows
        if not same_rows(rows, wanted):
            yield (
                "mismatch",
                part.key,
                "holds other rows than data/ says; delete it, and then " + _AGAIN,
            )


def same_rows(found: pa.Table, wanted: pa.Table) -> bool:
    """Tell whether tables are equal; of dictionaries, which differ by file, the values count."""
    return bool(_spelled_out(found).equals(_spelled_out(wanted)))


def _spelled_out(table: pa.Table) -> pa.Table:
    kinds = [
        each.with_type(each.type.value_type) if pa.types.is_dictionary(each.type) else each
        for each in table.schema
    ]
    return table.cast(pa.schema(kinds, table.schema.metadata)).replace_schema_metadata(None)
