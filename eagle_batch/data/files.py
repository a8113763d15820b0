"""Finding and opening input files, on a local disk or in any store that fsspec knows."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import takewhile
from pathlib import PurePosixPath
from typing import Any

import fsspec
import pyarrow as pa

from eagle_batch.errors import DataError, EagleBatchError
from eagle_batch.pipeline.locations import is_url

#: Suffixes by format; JSONL may be compressed on top.
SUFFIXES = {
    ".parquet": "parquet",
    ".pq": "parquet",
    ".arrow": "arrow",
    ".ipc": "arrow",
    ".feather": "arrow",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
}
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2"}

#: Files up to this size are told apart by their content, larger ones by their time of change.
HASHED_SIZE = 4 << 20
_CHECKSUM_KEYS = ("ETag", "etag", "md5Hash", "crc32c", "content_md5")
_CHANGE_KEYS = ("LastModified", "last_modified", "mtime", "updated", "created")


@dataclass(frozen=True, slots=True)
class FoundFile:
    """A file of the input, before it was read."""

    #: Absolute local path, or URL.
    path: str
    format: str
    size: int
    tag: str


@contextmanager
def reading(path: str) -> Iterator[None]:
    """Turn whatever a library raises in the block into a DataError that names the file."""
    try:
        yield
    except EagleBatchError:
        raise
    except FileNotFoundError as error:
        raise DataError(f"{path}: no such file or folder") from error
    except Exception as error:
        text = " ".join(str(error).split()) or type(error).__name__
        raise DataError(f"{path}: cannot be read: {text}") from error


def find_files(patterns: Sequence[str], wanted: str) -> tuple[FoundFile, ...]:
    """Return the files of `input.path` in a fixed order: pattern by pattern, each one sorted.

    A file that several patterns name is taken once. Raises DataError with every pattern that names
    nothing and every file whose format is unknown.
    """
    problems: list[str] = []
    found: dict[str, FoundFile] = {}
    for pattern in patterns:
        try:
            for file in _find(pattern, wanted):
                found.setdefault(file.path, file)
        except DataError as error:
            problems.extend(f"input.path: {problem}" for problem in error.problems)
    if problems:
        raise DataError(problems)
    return tuple(found.values())


@contextmanager
def open_source(path: str, *, mapped: bool = False) -> Iterator[Any]:
    """Open a file for random access; a local one as an Arrow file, mapped if asked."""
    if is_url(path):
        with fsspec.open(path, "rb") as file:
            yield file
    else:
        with pa.memory_map(path) if mapped else pa.OSFile(path) as file:
            yield file


def short_names(paths: Sequence[str]) -> tuple[str, ...]:
    """Return base names, or the paths below the common folder where two names are alike."""
    bases = tuple(PurePosixPath(path).name for path in paths)
    if len(set(bases)) == len(bases):
        return bases
    parts = [PurePosixPath(path).parts for path in paths]
    together = (len(set(level)) == 1 for level in zip(*parts, strict=False))
    common = len(list(takewhile(bool, together)))
    return tuple("/".join(path[common:]) for path in parts)


def compression_of(path: str) -> str | None:
    """Return the codec that a file's last suffix names, or None."""
    return COMPRESSIONS.get(PurePosixPath(path).suffix.lower())


def _find(pattern: str, wanted: str) -> list[FoundFile]:
    with reading(pattern):
        fs, path = fsspec.core.url_to_fs(pattern)
        if fs.isdir(path):
            infos = _known_files(fs.find(path, detail=True), path)
            hint = "the folder holds no .parquet, .arrow or .jsonl file"
        elif fs.exists(path):
            infos, hint = [fs.info(path)], ""
        else:
            infos = _files_only(fs.glob(path, detail=True)) if _is_glob(path) else []
            hint = "no file has this name" + (" pattern" if _is_glob(path) else "")
        if not infos:
            raise DataError(f"{pattern}: {hint}; expected Parquet, Arrow or JSONL files")
        infos.sort(key=lambda info: str(info["name"]))
        return [_describe(fs, info, pattern, wanted) for info in infos]


def _is_glob(path: str) -> bool:
    return any(character in path for character in "*?[")


def _files_only(entries: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    return [info for info in entries.values() if info["type"] != "directory"]


def _known_files(entries: dict[str, dict[str, Any]], folder: str) -> list[dict[str, Any]]:
    """Keep the data files of a folder.

    Names that start with `_` or `.` are by custom not data, and `.json` is seldom JSON lines.
    """
    kept = []
    for name, info in entries.items():
        inner = PurePosixPath(name.removeprefix(folder)).parts
        known = _format_of(name) is not None and not name.lower().endswith(".json")
        if known and not any(part.startswith(("_", ".")) for part in inner):
            kept.append(info)
    return kept


def _format_of(path: str) -> str | None:
    pure = PurePosixPath(path)
    if pure.suffix.lower() in COMPRESSIONS:
        inner = SUFFIXES.get(PurePosixPath(pure.stem).suffix.lower())
        return inner if inner == "jsonl" else None
    return SUFFIXES.get(pure.suffix.lower())


def _describe(fs: Any, info: dict[str, Any], pattern: str, wanted: str) -> FoundFile:
    local = not is_url(pattern)
    path = str(info["name"]) if local else fs.unstrip_protocol(info["name"])
    if info["type"] != "file":
        raise DataError(f"{path}: is not a regular file; expected Parquet, Arrow or JSONL files")
    kind = _format_of(path) if wanted == "auto" else wanted
    if kind is None:
        raise DataError(
            f"{path}: its name does not tell the format; expected one of "
            f"{', '.join(SUFFIXES)} (JSONL also .gz, .zst, .bz2), or set input.format"
        )
    size = int(info["size"] or 0)
    with reading(path):
        return FoundFile(path, kind, size, _tag(fs, info, size))


def _tag(fs: Any, info: dict[str, Any], size: int) -> str:
    for key in _CHECKSUM_KEYS:
        if info.get(key):
            return f"{key.lower()}:{str(info[key]).strip(chr(34))}"
    if size <= HASHED_SIZE:
        content: bytes = fs.cat_file(info["name"])
        return "blake2b:" + hashlib.blake2b(content, digest_size=16).hexdigest()
    changed = next((info[key] for key in _CHANGE_KEYS if info.get(key)), "unknown")
    return f"changed:{changed}"
