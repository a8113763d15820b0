"""Training rows: token ids of prompts and of the target's own completions, from Parquet files."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from eagle_batch.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa

PROMPT, COMPLETION = "prompt_token_ids", "completion_token_ids"
#: Column of a job's output.
OF_A_JOB = "token_ids"


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


def read_samples(path: Path, max_length: int, stages: Sequence[str] | None = None) -> list[Sample]:
    """Read one file; texts are cut at `max_length`, and rows without a completion are left out.

    The file has a column of prompts and one of completions, or is the output of a job with
    `output.token_ids`, each stage of which gives a sample, or each of the given ones.
    Raises DataError where it is neither.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        names = pq.read_schema(path).names
        pairs = stages is None and {PROMPT, COMPLETION} <= set(names)
        columns = [PROMPT, COMPLETION] if pairs else [OF_A_JOB]
        if not set(columns) <= set(names):
            raise DataError(
                f"{path}: found the columns {names}; a training file needs {PROMPT} and "
                f"{COMPLETION} (lists of token ids), or {OF_A_JOB}, which a job writes with "
                "`output.token_ids: true`"
            )
        table = pq.read_table(path, columns=columns)
    except (pa.ArrowInvalid, OSError) as error:
        raise _unreadable(path, error) from error
    return list(_samples(_texts(table, stages), max_length))


def check_stages(files: Sequence[Path], stages: Sequence[str]) -> None:
    """Raise DataError where one of the stages wrote none of the texts of a job's files."""
    found: set[str] = set()
    found.update(*map(_stages, files))
    missing = [stage for stage in stages if stage not in found]
    if missing:
        raise DataError(
            f"stages: {', '.join(missing)}: found no such text in {files[0].parent}; its stages "
            f"are {', '.join(sorted(found)) or 'none: it is not the output of a job'}"
        )


def _stages(path: Path) -> set[str]:
    """Return the stages that wrote the texts of a file, none where it is not a job's."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(path)
        if OF_A_JOB not in file.schema_arrow.names:
            return set()
        rows = file.read([f"{OF_A_JOB}.list.element.stage"]).column(OF_A_JOB).to_pylist()
    except (pa.ArrowInvalid, OSError) as error:
        raise _unreadable(path, error) from error
    return {text["stage"] for row in rows for text in row or []}


def _unreadable(path: Path, error: Exception) -> DataError:
    return DataError(f"{path}: not a readable Parquet file: {error}")


def _texts(
    table: pa.Table, stages: Sequence[str] | None
) -> Iterator[tuple[list[int] | None, list[int] | None]]:
    """Yield the prompt and the completion of each text."""
    if OF_A_JOB in table.column_names:
        for row in table.column(OF_A_JOB):
            for text in row.as_py() or []:
                if stages is None or text["stage"] in stages:
                    yield text.get("prompt"), text["ids"]
        return
    for prompt, completion in zip(table.column(PROMPT), table.column(COMPLETION), strict=True):
        yield prompt.as_py(), completion.as_py()


def _samples(
    texts: Iterable[tuple[list[int] | None, list[int] | None]], max_length: int
) -> Iterator[Sample]:
    for prompt, completion in texts:
        head, tail = prompt or [], completion or []
        tokens = (*head, *tail)[:max_length]
        if head and len(tokens) > len(head) + 1:
            yield Sample(tokens, len(head))


def is_held_out(sample: Sample, share: float) -> bool:
    """Whether a row belongs to validation: decided by its prompt alone.

    So it stays on its side when data is added, and all answers to one prompt are on the same side.
    """
    prompt = np.asarray(sample.tokens[: sample.prompt_length], dtype="<i4").tobytes()
    return zlib.crc32(prompt) < share * 2**32
