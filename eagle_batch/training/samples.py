"""Training rows: token ids of prompts and of the target's own completions, from Parquet files."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from eagle_batch.errors import DataError

PROMPT, COMPLETION = "prompt_token_ids", "completion_token_ids"


@dataclass(frozen=True, slots=True)
class Sample:
    """One text of the target: prompt and completion, an end-of-sequence token included."""

    tokens: tuple[int, ...]
    prompt_length: int


def find_files(patterns: Sequence[str], base: Path) -> list[Path]:
    """Return the Parquet files that paths, folders and globs name, relative to `base`, sorted.

    Raises DataError where one of them names nothing.
    """
    files: set[Path] = set()
    for pattern in patterns:
        found = sorted(_expand(pattern, base))
        if not found:
            raise DataError(f"data.paths: {pattern!r} names no Parquet file (looked in {base})")
        files.update(found)
    return sorted(files)


def _expand(pattern: str, base: Path) -> Iterable[Path]:
    path = base / Path(pattern).expanduser()
    if path.is_dir():
        return path.glob("*.parquet")
    if path.is_file():
        return (path,)
    root = Path(path.anchor)
    return (p for p in root.glob(str(path.relative_to(root))) if p.is_file())


def read_samples(path: Path, max_length: int) -> list[Sample]:
    """Read one file; texts are cut at `max_length`, and rows without a completion are left out.

    Raises DataError where the token columns are missing.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        schema = pq.read_schema(path)
        missing = {PROMPT, COMPLETION} - set(schema.names)
        if missing:
            raise DataError(
                f"{path}: has no column {sorted(missing)}; a training file needs {PROMPT} and "
                f"{COMPLETION} (lists of token ids), found {schema.names}"
            )
        table = pq.read_table(path, columns=[PROMPT, COMPLETION])
    except (pa.ArrowInvalid, OSError) as error:
        raise DataError(f"{path}: not a readable Parquet file: {error}") from error
    return list(_samples(table.column(PROMPT), table.column(COMPLETION), max_length))


def _samples(prompts: Iterable, completions: Iterable, max_length: int) -> Iterator[Sample]:  # type: ignore[type-arg]
    for prompt, completion in zip(prompts, completions, strict=True):
        head, tail = prompt.as_py() or [], completion.as_py() or []
        tokens = (*head, *tail)[:max_length]
        if head and len(tokens) > len(head) + 1:
            yield Sample(tokens, len(head))


def is_held_out(sample: Sample, share: float) -> bool:
    """Whether a row belongs to validation: decided by its prompt alone.

    So it stays on its side when data is added, and all answers to one prompt are on the same side.
    """
    prompt = np.asarray(sample.tokens[: sample.prompt_length], dtype="<i4").tobytes()
    return zlib.crc32(prompt) < share * 2**32
