"""JSON lines: one object a line, read in blocks whose byte offsets are known."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pyarrow.json as pa_json

from eagle_batch.data.groups import Group, Scan
from eagle_batch.data.lines import Lines
from eagle_batch.data.shapes import Shape, ShapeError
from eagle_batch.errors import DataError

#: Rows of a block, rounded up to whole shards.
BLOCK_ROWS = 1024
_MOST_PROBLEMS = 5


def scan(path: str, rows_per_shard: int) -> Scan:
    """Read a file once: columns and types, and where each block of rows begins.

    Raises DataError with the first lines that are no JSON objects or do not fit the others.
    """
    shape = Shape()
    groups = scan_lines(path, rows_per_shard, lambda line: shape.add(parse(line)))
    fields = [pa.field(name, inner.to_type()) for name, inner in shape.fields.items()]
    return Scan(pa.schema(fields), groups)


def scan_lines(path: str, rows_per_shard: int, look: Callable[[bytes], None]) -> tuple[Group, ...]:
    """Show every line to `look` and return the blocks.

    Raises DataError with the first lines at which `look` raised ValueError.
    """
    most = block_rows(rows_per_shard)
    groups, problems = list[Group](), list[str]()
    rows = start = 0
    with Lines() as lines:
        for number, offset, line in rows_since(lines, path):
            if rows == most:
                groups.append(Group(rows, start))
                rows = 0
            start = offset if rows == 0 else start
            rows += 1
            try:
                look(line)
            except ValueError as error:
                problems.append(f"{path}: line {number}: {error}")
            if len(problems) == _MOST_PROBLEMS:
                break
    if problems:
        raise DataError(problems)
    return (*groups, Group(rows, start)) if rows else tuple(groups)


def block_rows(rows_per_shard: int) -> int:
    """Return the rows of a block: whole shards, and at least so many that reading pays."""
    return rows_per_shard * -(-BLOCK_ROWS // rows_per_shard)


def read(lines: Lines, path: str, group: Group, schema: pa.Schema) -> pa.Table:
    """Return one block as a table of exactly the columns of `schema`."""
    data = b"\n".join(block(lines, path, group)) + b"\n"
    table = pa_json.read_json(
        pa.BufferReader(data),
        read_options=pa_json.ReadOptions(use_threads=False, block_size=len(data) + 1),
        parse_options=pa_json.ParseOptions(
            explicit_schema=schema, unexpected_field_behavior="ignore"
        ),
    )
    return table.select(schema.names)


def block(lines: Lines, path: str, group: Group) -> list[bytes]:
    """Return the lines of one block."""
    found: list[bytes] = []
    for _, _, line in rows_since(lines, path, group.offset):
        found.append(line)
        if len(found) == group.rows:
            break
    return found


def rows_since(lines: Lines, path: str, offset: int = 0) -> Iterator[tuple[int, int, bytes]]:
    """Yield (line number from here, byte offset, line) of each line that is not blank."""
    for number, (position, raw) in enumerate(lines.since(path, offset), start=1):
        if raw and not raw.isspace():
            yield number, position, raw.strip()


def parse(line: bytes) -> dict[str, Any]:
    """Return the object of a line; raises ValueError where there is none that a row can hold."""
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
