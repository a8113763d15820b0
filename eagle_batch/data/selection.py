"""Which rows of the input a job takes, and in which order: `where`, `sample` and `shuffle`.

All of it follows from the rows, their places and the seed, and is computed again wherever a group
is read: by workers, by a resume and by `verify`. The plan keeps counts and one threshold, never a
list of rows, and no more than one group is held at a time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from eagle_batch.data.groups import Group
from eagle_batch.data.sources import GroupReader, InputFile
from eagle_batch.data.where import RowFilter
from eagle_batch.errors import DataError

Rows = npt.NDArray[np.int64]
Hashes = npt.NDArray[np.uint64]
_WHOLE_RANGE = 2**64


@dataclass(frozen=True, slots=True)
class Selection:
    """What decides about a row, and about its place in its group."""

    where: str | None = None
    #: A sampled row has a hash below this; None takes every row.
    sample_below: int | None = None
    shuffle: bool = False
    seed: int = 0

    @property
    def is_all(self) -> bool:
        """Whether every row is taken, in the order of the input."""
        return self.where is None and self.sample_below is None and not self.shuffle

    def order(self, name: str, first: int, kept: Rows) -> Rows:
        """Return the rows of a group that are taken, in the order in which they are.

        `kept` are the rows for which `where` holds; `first` is the number, in the file, of the
        group's first row.
        """
        if self.sample_below is not None and self.sample_below < _WHOLE_RANGE:
            below = row_hashes(self.seed, "sample", name, first + kept)
            kept = kept[below < np.uint64(self.sample_below)]
        if self.shuffle:
            kept = kept[np.argsort(row_hashes(self.seed, "shuffle", name, first + kept))]
        return kept


@dataclass(frozen=True, slots=True)
class Counts:
    """What became of the rows that are not in the plan."""

    #: Rows of all files that were opened.
    seen: int
    #: Rows for which `input.where` does not hold, and those that `input.sample` left out.
    filtered: int = 0
    unsampled: int = 0


def row_hashes(seed: int, salt: str, name: str, numbers: Rows) -> Hashes:
    """Return a 64-bit hash of each row of a file, equal on every machine and for every group size.

    Args:
        seed: Of the job.
        salt: What the hash decides about.
        name: Of the file.
        numbers: [N] numbers of rows in the file.

    The mixing is that of SplitMix64 (Steele, Lea and Flood, 2014), a bijection: two rows of a file
    never have the same hash.
    """
    text = "\x1f".join((str(seed), salt, name)).encode("utf-8", "surrogatepass")
    base = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
    x = (numbers.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    x = x + np.uint64(base)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class SelectionError(DataError):
    """A group gives another number of rows than the plan says."""


class SelectedReader:
    """Reads the rows of a group that are taken; keeps the last group."""

    def __init__(self, selection: Selection, schema: pa.Schema, columns: Sequence[str]) -> None:
        """Read `columns`, and whatever `where` needs beside them."""
        self._selection = selection
        self._filter = None if selection.where is None else RowFilter(selection.where)
        used = self._filter.columns(schema.names) if self._filter else ()
        self._used = used
        self._columns = list(columns)
        wanted = [name for name in schema.names if name in {*columns, *used}]
        self._reader = GroupReader(schema, wanted)
        self._needs_rows = bool(wanted)
        self._held: tuple[str, int] | None = None
        self._table: pa.Table | None = None
        self._rows: Rows = np.zeros(0, np.int64)
        self._starts_of = ""
        self._starts: Rows = np.zeros(0, np.int64)

    def group(self, file: InputFile, index: int) -> tuple[pa.Table | None, Rows]:
        """Return the rows that are taken, and their numbers in the group.

        The table is None where no column is asked for. Raises DataError as `GroupReader.read` does,
        and where the number of rows is not the planned one.
        """
        if self._held != (file.path, index):
            self._held = self._table = None  # Two groups at once may be more than memory holds.
            self._table, self._rows = self._read(file, index)
            self._held = (file.path, index)
        return self._table, self._rows

    def _read(self, file: InputFile, index: int) -> tuple[pa.Table | None, Rows]:
        table = self._reader.read(file, index) if self._needs_rows else None
        rows = self._order(file, index, table)
        planned = file.groups[index].taken
        if len(rows) != planned:
            raise SelectionError(
                f"{file.path}: group {index}: input.where takes {len(rows)} rows, {planned} were "
                "planned; the file changed while the job ran"
            )
        if table is None or self._selection.is_all:
            return table, rows
        return table.select(self._columns).take(pa.array(rows)), rows

    def _order(self, file: InputFile, index: int, table: pa.Table | None) -> Rows:
        kept = self._kept(file, index, table)
        return self._selection.order(file.name, self._first_row(file, index), kept)

    def kept(self, file: InputFile, index: int) -> Rows:
        """Return the rows of a group for which `where` holds."""
        return self._kept(file, index, self._reader.read(file, index) if self._filter else None)

    def _kept(self, file: InputFile, index: int, table: pa.Table | None) -> Rows:
        if self._filter is None or table is None:
            return np.arange(file.groups[index].rows, dtype=np.int64)
        mask = self._filter.mask(table, self._used, file.path, self._first_row(file, index))
        return np.flatnonzero(mask).astype(np.int64)

    def _first_row(self, file: InputFile, index: int) -> int:
        if self._starts_of != file.path:
            self._starts = first_rows(file.groups)
            self._starts_of = file.path
        return int(self._starts[index])


def first_rows(groups: Sequence[Group]) -> Rows:
    """Return the number, in its file, of each group's first row."""
    sizes = np.array([0, *(group.rows for group in groups)], np.int64)
    return sizes.cumsum()[:-1]
