"""Arrow IPC, both forms: the file with a footer, and the stream that `datasets` writes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import pyarrow as pa
import pyarrow.ipc

from eagle_batch.data.files import open_source
from eagle_batch.data.groups import Group, Scan

_FILE_MAGIC = b"ARROW1"


def scan(path: str) -> Scan:
    """Return columns and record batches; local files are mapped, so their data is not read."""
    with open_source(path, mapped=True) as source:
        schema = _schema(source)
        return Scan(schema, tuple(Group(batch.num_rows) for batch in _batches(source, [], 0)))


def read(path: str, index: int, columns: Sequence[str]) -> pa.Table:
    """Return the columns of one record batch, checked, and copied out of the mapped file.

    Arrow trusts the offsets in a file: damaged ones would crash the process later, and so would a
    file that is cut short while it is mapped. Raises ArrowInvalid for a damaged batch.
    """
    with open_source(path, mapped=True) as source:
        schema = _schema(source)
        wanted = [schema.get_field_index(name) for name in columns]
        batch = next(_batches(source, wanted, index))
        batch.validate(full=True)
        copy = batch.copy_to(pa.default_cpu_memory_manager())
        return pa.Table.from_batches([copy]).select(list(columns))


def _is_file(source: Any) -> bool:
    source.seek(0)
    magic = bytes(source.read(len(_FILE_MAGIC)))
    source.seek(0)
    return magic == _FILE_MAGIC


def _schema(source: Any) -> pa.Schema:
    opened = pa.ipc.open_file(source) if _is_file(source) else pa.ipc.open_stream(source)
    return opened.schema


def _batches(source: Any, wanted: list[int], start: int) -> Iterator[pa.RecordBatch]:
    """Yield record batches from number `start`; a stream has to be followed from its beginning."""
    options = pa.ipc.IpcReadOptions(included_fields=wanted or None)
    if _is_file(source):
        reader = pa.ipc.open_file(source, options=options)
        return (reader.get_batch(index) for index in range(start, reader.num_record_batches))
    return islice(pa.ipc.open_stream(source, options=options), start, None)
