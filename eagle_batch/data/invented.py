"""Input that is made of nothing: so many rows, named 0, 1, 2, ... by their one column, `id`."""

from __future__ import annotations

import pyarrow as pa

from eagle_batch.data.files import FoundFile
from eagle_batch.data.groups import Group, Scan
from eagle_batch.pipeline.locations import ROWS_PREFIX

FORMAT = "rows"
#: Rows of one group, which is what is in memory at once.
GROUP_ROWS = 1 << 20
_SCHEMA = pa.schema([pa.field("id", pa.int64())])


def is_invented(path: str) -> bool:
    """Tell whether a path is that of no file."""
    return path.startswith(ROWS_PREFIX)


def found(path: str) -> FoundFile:
    """Return the file that is none."""
    return FoundFile(path, FORMAT, int(path.removeprefix(ROWS_PREFIX)), "")


def scan(path: str) -> Scan:
    """Return its column and its groups."""
    rows = int(path.removeprefix(ROWS_PREFIX))
    starts = range(0, rows, GROUP_ROWS)
    return Scan(_SCHEMA, tuple(Group(min(GROUP_ROWS, rows - start), start) for start in starts))


def read(group: Group, wanted: pa.Schema) -> pa.Table:
    """Return the rows of one group."""
    numbers = pa.array(range(group.offset, group.offset + group.rows), pa.int64())
    return pa.Table.from_arrays([numbers], schema=_SCHEMA).select(wanted.names)
