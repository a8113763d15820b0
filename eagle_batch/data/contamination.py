"""Runs of words that must not be in a text: those of given files, such as a benchmark's."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

import pyarrow as pa

from eagle_batch.data.files import FoundFile, short_names
from eagle_batch.data.finding import find_files
from eagle_batch.data.sources import read_columns
from eagle_batch.data.words import runs, words
from eagle_batch.errors import ConfigError, DataError
from eagle_batch.pipeline import Decontaminate
from eagle_batch.pipeline.fingerprint import InputIdentity


class Contamination:
    """An index of all runs of words in the given files; eight bytes a run."""

    def __init__(self, section: Decontaminate) -> None:
        """Read the files; raises ConfigError where they cannot be, or have no such column."""
        self._length = section.ngram
        self._known: set[int] = set()
        for text in _texts(section):
            self._known.update(map(_number, runs(words(text), self._length)))

    def __len__(self) -> int:
        return len(self._known)

    def find(self, text: str) -> str | None:
        """Return the first run of words of a text that is known; None where there is none."""
        found = runs(words(text), self._length)
        return next((run for run in found if _number(run) in self._known), None)


def given_files(patterns: Sequence[str]) -> tuple[FoundFile, ...]:
    """Return the files that `against` names; raises ConfigError for a pattern that has none."""
    try:
        return tuple(find_files(patterns, "auto")) if patterns else ()
    except DataError as error:
        raise ConfigError(_ours(error)) from error


def identities(section: Decontaminate | None) -> tuple[InputIdentity, ...]:
    """Return what tells whether the given files are still the same."""
    if section is None:
        return ()
    files = given_files(section.against)
    names = short_names([file.path for file in files])
    return tuple(
        InputIdentity(f"decontaminate.against/{name}", file.size, 0, file.tag)
        for name, file in zip(names, files, strict=True)
    )


def _texts(section: Decontaminate) -> Iterator[str]:
    try:
        for table in read_columns(section.against, [section.column]):
            column = table.column(section.column)
            if not (pa.types.is_string(column.type) or pa.types.is_large_string(column.type)):
                raise ConfigError(
                    f"decontaminate.column: {section.column!r} is {column.type}; expected text"
                )
            yield from (text for text in column.to_pylist() if text is not None)
    except DataError as error:
        raise ConfigError(_ours(error)) from error


def _ours(error: DataError) -> list[str]:
    lines = (problem.removeprefix("input.path: ") for problem in error.problems)
    return [f"decontaminate.against: {line}" for line in lines]


def _number(run: str) -> int:
    return int.from_bytes(hashlib.blake2b(run.encode(), digest_size=8).digest(), "little")
