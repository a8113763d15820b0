"""Input files, on a local disk or in any store that fsspec knows: formats, identity, opening."""

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

#: Suffixes by format.
SUFFIXES = {
    ".parquet": "parquet",
    ".pq": "parquet",
    ".arrow": "arrow",
    ".ipc": "arrow",
    ".feather": "arrow",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".csv": "csv",
    ".tsv": "csv",
}
#: Formats of text, which may be compressed on top.
TEXT = ("jsonl", "csv")
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2"}
EXPECTED = "Parquet, Arrow, JSONL or CSV files"

#: Files up to this size are told apart by their content, larger ones by their time of change.
HASHED_SIZE = 4 << 20
_CHECKSUM_KEYS = ("ETag", "etag", "md5Hash", "crc32c", "content_md5", "blob_id")
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
    return COMPRESSIONS.get(PurePosixPath(plain_path(path)).suffix.lower())


def without_compression(path: str) -> str:
    """Return a path, or a URL without its query, with no .gz, .zst or .bz2 at its end."""
    path = plain_path(path)
    pure = PurePosixPath(path)
    return path[: -len(pure.suffix)] if pure.suffix.lower() in COMPRESSIONS else path


def plain_path(path: str) -> str:
    """Return a web address without its query, and any other path as it is."""
    return path.partition("?")[0] if is_web(path) else path


def is_web(path: str) -> bool:
    """Tell whether a path is a file on a web server, which has no folders to list."""
    return path.startswith(("http://", "https://"))


def format_of(path: str) -> str | None:
    """Return the format that a file's name tells, or None."""
    inner = without_compression(path)
    kind = SUFFIXES.get(PurePosixPath(inner).suffix.lower())
    return kind if inner == plain_path(path) or kind in TEXT else None


def describe_file(fs: Any, info: dict[str, Any], pattern: str, wanted: str) -> FoundFile:
    """Return a file that was found; raises DataError where its name does not tell its format."""
    local = not is_url(pattern)
    path = str(info["name"]) if local else fs.unstrip_protocol(info["name"])
    if info["type"] != "file":
        raise DataError(f"{path}: is not a regular file; expected {EXPECTED}")
    kind = format_of(path) if wanted == "auto" else wanted
    if kind is None:
        raise DataError(
            f"{path}: its name does not tell the format; expected one of "
            f"{', '.join(SUFFIXES)} (JSONL and CSV also .gz, .zst, .bz2), or set input.format"
        )
    size = int(info["size"] or 0)
    with reading(path):
        return FoundFile(path, kind, size, _tag(fs, info, size))


def _tag(fs: Any, info: dict[str, Any], size: int) -> str:
    if info.get("lfs"):
        return f"sha256:{info['lfs']['sha256']}"
    for key in _CHECKSUM_KEYS:
        if info.get(key):
            return f"{key.lower()}:{str(info[key]).strip(chr(34))}"
    if size <= HASHED_SIZE:
        content: bytes = fs.cat_file(info["name"])
        return "blake2b:" + hashlib.blake2b(content, digest_size=16).hexdigest()
    changed = next((info[key] for key in _CHANGE_KEYS if info.get(key)), "unknown")
    return f"changed:{changed}"
