"""Parquet: row groups by their footer, columns by their exact names."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
import pyarrow.parquet as pq

from eagle_batch.data.files import open_source
from eagle_batch.data.groups import Group, Scan


def scan(path: str) -> Scan:
    """Return columns and row groups; reads the footer only."""
    with open_source(path) as source, pq.ParquetFile(source) as file:
        meta = file.metadata
        groups = tuple(
            Group(meta.row_group(index).num_rows) for index in range(file.num_row_groups)
        )
        return Scan(file.schema_arrow, groups)


def read(path: str, index: int, columns: Sequence[str]) -> pa.Table:
    """Return the columns of one row group.

    Parquet addresses columns by dotted paths, so that "a.b" may also fetch a field of a struct "a";
    what was fetched too much is left out again.
    """
    with open_source(path) as source, pq.ParquetFile(source) as file:
        return file.read_row_group(index, columns=list(columns)).select(list(columns))
