"""JSON lines: one object a line, read in blocks whose byte offsets are known."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO, cast

import pyarrow as pa
import pyarrow.json as pa_json

from eagle_batch.data.files import compression_of, open_source
from eagle_batch.data.groups import Group, Scan
from eagle_batch.data.shapes import Shape, ShapeError
from eagle_batch.errors import DataError

#: Rows of a block, rounded up to whole shards.
BLOCK_ROWS = 1024
_MOST_PROBLEMS = 5
_BOM = b"\xef\xbb\xbf"


def scan(path: str, rows_per_shard: int) -> Scan:
    """Read a file once: columns and types, and where each block of rows begins.

    Raises DataError with the first lines that are no JSON objects or do not fit the others.
    """
    block = rows_per_shard * -(-BLOCK_ROWS // rows_per_shard)
    shape, groups, problems = Shape(), list[Group](), list[str]()
    rows = start = 0
    for number, offset, line in _lines(path):
        if rows == block:
            groups.append(Group(rows, start))
            rows = 0
        start = offset if rows == 0 else start
        rows += 1
        try:
            shape.add(_parse(line))
        except ValueError as error:
            problems.append(f"{path}: line {number}: {error}")
        if len(problems) == _MOST_PROBLEMS:
            break
    if problems:
        raise DataError(problems)
    fields = [pa.field(name, inner.to_type()) for name, inner in shape.fields.items()]
    return Scan(pa.schema(fields), (*groups, Group(rows, start)) if rows else tuple(groups))


def read(path: str, group: Group, schema: pa.Schema) -> pa.Table:
    """Return one block as a table of exactly the columns of `schema`."""
    lines: list[bytes] = []
    for _, _, line in _lines(path, group.offset):
        lines.append(line)
        if len(lines) == group.rows:
            break
    data = b"\n".join(lines) + b"\n"
    table = pa_json.read_json(
        pa.BufferReader(data),
        read_options=pa_json.ReadOptions(use_threads=False, block_size=len(data) + 1),
        parse_options=pa_json.ParseOptions(
            explicit_schema=schema, unexpected_field_behavior="ignore"
        ),
    )
    return table.select(schema.names)


def _lines(path: str, offset: int = 0) -> Iterator[tuple[int, int, bytes]]:
    """Yield (line number from here, byte offset, line) of each line that is not blank."""
    with _open(path) as file:
        _skip(file, offset)
        position = offset
        for number, raw in enumerate(file, start=1):
            line = raw.removeprefix(_BOM) if position == 0 else raw
            if not line.isspace() and line:
                yield number, position, line.strip()
            position += len(raw)


@contextmanager
def _open(path: str) -> Iterator[BinaryIO]:
    codec = compression_of(path)
    with open_source(path) as source:
        file = pa.CompressedInputStream(source, codec) if codec else source
        # Arrow's own files count as binary files for everything that is done here.
        yield cast("BinaryIO", io.BufferedReader(file, 1 << 20))


def _skip(file: BinaryIO, offset: int) -> None:
    if offset and file.seekable():
        file.seek(offset)
        return
    while offset:
        offset -= len(file.read(min(offset, 1 << 20)))


def _parse(line: bytes) -> dict[str, Any]:
    try:
        value = json.loads(
            line.decode(), object_pairs_hook=_unique_keys, parse_constant=_refuse_constant
        )
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start} is not UTF-8") from error
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} (column {error.colno})") from error
    if not isinstance(value, dict):
        kind = "a list" if isinstance(value, list) else repr(value)[:40]
        raise ShapeError(f"found {kind}; expected one JSON object on each line")
    if b"\\u" in line:
        _refuse_surrogates(value)
    return value


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ShapeError(f"the key {twice!r} is written twice")
    return value


def _refuse_constant(name: str) -> None:
    raise ShapeError(f"found {name}, which JSON does not have; expected a number or null")


def _refuse_surrogates(value: dict[str, Any]) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ShapeError(
            "text holds half of a character (a lone \\ud800-\\udfff escape)"
        ) from error
