"""Planning a selection: how many rows of each group are taken, and where a sample ends."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from eagle_batch.data.selection import (
    Counts,
    Hashes,
    Rows,
    SelectedReader,
    Selection,
    first_rows,
    row_hashes,
)
from eagle_batch.data.sources import DataSet, InputFile
from eagle_batch.pipeline import Pipeline


@dataclass(frozen=True, slots=True)
class Chosen:
    """An input of which it is known how many rows each group gives."""

    data: DataSet
    selection: Selection
    counts: Counts


def choose(pipeline: Pipeline, data: DataSet) -> Chosen:
    """Apply `input.where` and `input.sample`; reads what `where` needs, one group at a time.

    Raises DataError where the expression cannot be evaluated for a row.
    """
    source = pipeline.input
    seen = sum(file.rows for file in data.files)
    selection = Selection(source.where, None, source.shuffle, pipeline.seed)
    if source.where is None and source.sample is None:
        return Chosen(data, selection, Counts(seen))
    sample = source.sample
    most = sample if isinstance(sample, int) else None
    below = int(sample * 2**64) if isinstance(sample, float) else None
    smallest = _Smallest(most, below)
    kept = 0
    for hashes in _kept_hashes(pipeline, data, selection):
        kept += len(hashes)
        smallest.add(hashes)
    counts, below = smallest.finish()
    taken = iter(counts)
    files = tuple(_with_counts(file, taken) for file in data.files)
    left = Counts(seen, seen - kept, kept - sum(counts))
    return Chosen(replace(data, files=files), replace(selection, sample_below=below), left)


@dataclass(slots=True)
class _Smallest:
    """Counts the sampled rows of each group; holds no more hashes than twice the sample."""

    #: Rows of the sample, or the hash that its rows are below; None of both takes every row.
    most: int | None
    below: int | None
    counts: list[int] = field(default_factory=list)
    held: Hashes = field(default_factory=lambda: np.zeros(0, np.uint64))
    #: Group of each hash that is held.
    owners: Rows = field(default_factory=lambda: np.zeros(0, np.int64))

    def add(self, hashes: Hashes) -> None:
        """Take in the hashes of the next group."""
        number = len(self.counts)
        self.counts.append(self._below(hashes))
        if self.most is None:
            return
        self.held = np.concatenate([self.held, hashes])
        self.owners = np.concatenate([self.owners, np.full(len(hashes), number, np.int64)])
        if len(self.held) > 2 * self.most:
            self._shrink(self.most)

    def finish(self) -> tuple[list[int], int | None]:
        """Return the rows of each group, and the hash that all of them are below."""
        if self.most is None or sum(self.counts) <= self.most:
            return self.counts, self.below
        self._shrink(self.most)
        counts = np.bincount(self.owners, minlength=len(self.counts))
        return [int(count) for count in counts], int(self.held.max()) + 1

    def _below(self, hashes: Hashes) -> int:
        return len(hashes) if self.below is None else int((hashes < np.uint64(self.below)).sum())

    def _shrink(self, most: int) -> None:
        places = np.argpartition(self.held, most - 1)[:most]
        self.held, self.owners = self.held[places], self.owners[places]


def _kept_hashes(pipeline: Pipeline, data: DataSet, selection: Selection) -> Iterator[Hashes]:
    """Yield, for each group, the sampling hashes of the rows for which `where` holds."""
    reader = SelectedReader(selection, data.schema, [])
    for file in data.files:
        starts = first_rows(file.groups)
        for index in range(len(file.groups)):
            rows = starts[index] + reader.kept(file, index)
            yield row_hashes(pipeline.seed, "sample", file.name, rows)


def _with_counts(file: InputFile, taken: Iterator[int]) -> InputFile:
    groups = tuple(replace(group, chosen=next(taken)) for group in file.groups)
    return replace(file, groups=groups)
