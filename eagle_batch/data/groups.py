"""What a format tells about a file: its columns and its groups of rows."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa


@dataclass(frozen=True, slots=True)
class Group:
    """Rows that are read together: a row group, a record batch or a block of lines."""

    rows: int
    #: Byte where the block begins; only JSONL needs it.
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Scan:
    """Columns and groups of one file."""

    schema: pa.Schema
    groups: tuple[Group, ...]
