"""What a format tells about a file: its columns and its groups of rows."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa


@dataclass(frozen=True, slots=True)
class Group:
    """Rows that are read together: a row group, a record batch or a block of lines."""

    rows: int
    #: Byte where the block begins; only text needs it.
    offset: int = 0
    #: Rows that the job takes of them; None takes all.
    chosen: int | None = None

    @property
    def taken(self) -> int:
        """Rows that the job takes."""
        return self.rows if self.chosen is None else self.chosen


@dataclass(frozen=True, slots=True)
class Scan:
    """Columns and groups of one file."""

    schema: pa.Schema
    groups: tuple[Group, ...]
