"""Which files `input.path` names: files, folders, globs, saved data sets, those of the hub."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import fsspec

from eagle_batch.data import hub, invented, saved
from eagle_batch.data.files import (
    EXPECTED,
    FoundFile,
    describe_file,
    format_of,
    is_web,
    plain_path,
    reading,
)
from eagle_batch.errors import DataError
from eagle_batch.pipeline import Input


@dataclass(frozen=True, slots=True)
class Choice:
    """Which part of a data set is meant, where it has several."""

    config: str | None = None
    split: str | None = None
    revision: str | None = None


WHOLE = Choice()


def find_input(source: Input) -> tuple[FoundFile, ...]:
    """Return the files of a whole section `input`; see `find_files`.

    Raises DataError also for a split, configuration or revision that nothing in the path has.
    """
    choice = Choice(source.config, source.split, source.revision)
    used: set[str] = set()
    found = find_files(source.path, source.format, choice, used)
    _refuse_unused(choice, used)
    return found


def find_files(
    patterns: Sequence[str], wanted: str, choice: Choice = WHOLE, used: set[str] | None = None
) -> tuple[FoundFile, ...]:
    """Return the files of `input.path` in a fixed order: pattern by pattern, each one sorted.

    A file that several patterns name is taken once. The names of the fields of `choice` that
    mattered are added to `used`. Raises DataError with every pattern that names nothing and every
    file whose format is unknown.
    """
    problems: list[str] = []
    found: dict[str, FoundFile] = {}
    used = set() if used is None else used
    for pattern in patterns:
        try:
            for file in _find(pattern, wanted, choice, used):
                found.setdefault(file.path, file)
        except DataError as error:
            problems.extend(f"input.path: {problem}" for problem in error.problems)
    if problems:
        raise DataError(problems)
    return tuple(found.values())


def _refuse_unused(choice: Choice, used: set[str]) -> None:
    """A split that nothing in the path has would otherwise be ignored without a word."""
    what = {
        "config": "a data set of the hub",
        "split": "a data set of the hub or a folder saved by datasets",
        "revision": "a data set of the hub",
    }
    problems = [
        f"input.{name}: found {getattr(choice, name)!r}, but input.path names no such data set; "
        f"expected {kind}, or no input.{name}"
        for name, kind in what.items()
        if getattr(choice, name) is not None and name not in used
    ]
    if problems:
        raise DataError(problems)


def _find(pattern: str, wanted: str, choice: Choice, used: set[str]) -> list[FoundFile]:
    if invented.is_invented(pattern):
        return [invented.found(pattern)]
    with reading(pattern):
        if hub.is_data_set(pattern):
            used |= {"config", "split", "revision"}
            return hub.find(pattern, wanted, choice.config, choice.split, choice.revision)
        fs, path = fsspec.core.url_to_fs(pattern)
        folder = not is_web(pattern) and fs.isdir(path)
        if folder and (part := saved.part_of(fs, path, choice.split)) is not None:
            used |= {"split"} if part.chosen else set()
            return [describe_file(fs, info, pattern, "arrow") for info in part.files]
        infos, hint = _infos(fs, path, pattern, folder=folder)
        if not infos:
            raise DataError(f"{pattern}: {hint}; expected {EXPECTED}")
        infos.sort(key=lambda info: str(info["name"]))
        return [describe_file(fs, info, pattern, wanted) for info in infos]


def _infos(fs: Any, path: str, pattern: str, *, folder: bool) -> tuple[list[dict[str, Any]], str]:
    """Return what a pattern names, and what to say where that is nothing."""
    if folder:
        found = known_files(fs.find(path, detail=True), path)
        return found, "the folder holds no .parquet, .arrow, .jsonl or .csv file"
    if is_web(pattern):
        if "*" in plain_path(pattern):
            raise DataError(f"{pattern}: a web server lists no files; name each of them")
        return [fs.info(path)], ""
    if fs.exists(path):
        return [fs.info(path)], ""
    glob = any(character in path for character in "*?[")
    entries = fs.glob(path, detail=True) if glob else {}
    found = [info for info in entries.values() if info["type"] != "directory"]
    return found, "no file has this name" + (" pattern" if glob else "")


def known_files(entries: dict[str, dict[str, Any]], folder: str) -> list[dict[str, Any]]:
    """Keep the data files of a folder.

    Names that start with `_` or `.` are by custom not data, and `.json` is seldom JSON lines.
    """
    kept = []
    for name, info in entries.items():
        inner = PurePosixPath(name.removeprefix(folder)).parts
        known = format_of(name) is not None and not name.lower().endswith(".json")
        if known and not any(part.startswith(("_", ".")) for part in inner):
            kept.append(info)
    return kept
