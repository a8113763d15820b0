"""CSV and TSV: records in blocks whose byte offsets are known, columns typed by what they print.

A column holds numbers only where every cell is written as that number prints: `007`, `1.50` and
dates stay the text they are, so that no prompt says anything else than the file.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath

import pyarrow as pa
import pyarrow.csv as pa_csv

from eagle_batch.data.files import without_compression
from eagle_batch.data.groups import Group, Scan
from eagle_batch.data.jsonl import block_rows
from eagle_batch.data.lines import Lines
from eagle_batch.errors import DataError

WHOLE = r"^(0|-?[1-9][0-9]{0,17})$"
#: At most 15 digits, which every 64-bit float keeps, and no digit that would not be printed.
FRACTION = r"^-?(0|[1-9][0-9]{0,8})\.([0-9]{0,5}[1-9]|0)$"
_MOST_PROBLEMS = 5


@dataclass(slots=True)
class _Column:
    """What the cells of a column have in common so far."""

    whole: bool = True
    number: bool = True
    seen: bool = False

    def look(self, cells: pa.ChunkedArray) -> None:
        # Not at the top: a plan of other formats would load it for nothing.
        import pyarrow.compute as pc

        filled = cells.filter(pc.not_equal(cells, ""))
        if not len(filled) or not self.number:
            self.seen = self.seen or bool(len(filled))
            return
        self.seen = True
        whole = pc.match_substring_regex(filled, WHOLE)
        fraction = pc.match_substring_regex(filled, FRACTION)
        self.whole = self.whole and bool(pc.all(whole).as_py())
        self.number = bool(pc.all(pc.or_(whole, fraction)).as_py())

    def to_type(self) -> pa.DataType:
        if not self.seen or not self.number:
            return pa.string()
        return pa.int64() if self.whole else pa.float64()


@dataclass(slots=True)
class _Block:
    """Records that are read together."""

    offset: int = 0
    records: list[bytes] = field(default_factory=list)
    #: Line of the file where each record begins.
    numbers: list[int] = field(default_factory=list)


def scan(path: str, rows_per_shard: int, delimiter: str | None) -> Scan:
    """Read a file once: columns and types, and where each block of records begins.

    Raises DataError with the first records that have more or fewer cells than the header.
    """
    mark = delimiter or delimiter_of(path)
    with Lines() as lines:
        records = _records(lines, path, 0)
        names = _header(path, records, mark)
        columns = [_Column() for _ in names]
        groups: list[Group] = []
        for block in _blocks(records, block_rows(rows_per_shard)):
            table = _table(path, block, names, mark, dict.fromkeys(names, pa.string()))
            for column, cells in zip(columns, table.columns, strict=True):
                column.look(cells)
            groups.append(Group(table.num_rows, block.offset))
    fields = [pa.field(name, c.to_type()) for name, c in zip(names, columns, strict=True)]
    return Scan(pa.schema(fields), tuple(groups))


def read(
    lines: Lines, path: str, group: Group, schema: pa.Schema, delimiter: str | None
) -> pa.Table:
    """Return one block as a table of exactly the columns of `schema`."""
    mark = delimiter or delimiter_of(path)
    with Lines() as top:
        names = _header(path, _records(top, path, 0), mark)
    block = next(_blocks(_records(lines, path, group.offset), group.rows), _Block())
    types = {name: schema.field(name).type for name in schema.names}
    return _table(path, block, names, mark, types, schema.names)


def delimiter_of(path: str) -> str:
    """Return what separates the cells, by the file's name."""
    name = PurePosixPath(without_compression(path))
    return "\t" if name.suffix.lower() == ".tsv" else ","


def _records(lines: Lines, path: str, offset: int) -> Iterator[tuple[int, int, bytes]]:
    """Yield (line number from here, byte offset, record); a quoted cell may go over lines."""
    held: list[bytes] = []
    quotes = first = start = 0
    for number, (position, raw) in enumerate(lines.since(path, offset), start=1):
        if not held:
            if raw.isspace() or not raw:
                continue
            first, start = number, position
        held.append(raw)
        quotes += raw.count(b'"')
        if quotes % 2 == 0:
            yield first, start, b"".join(held)
            held, quotes = [], 0
    if held:
        raise DataError(f"{path}: line {first}: a quoted cell begins here and does not end")


def _header(path: str, records: Iterator[tuple[int, int, bytes]], mark: str) -> list[str]:
    found = next(records, None)
    if found is None:
        return []
    try:
        return next(csv.reader([found[2].decode()], delimiter=mark, strict=True))
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(
            f"{path}: line {found[0]}: not a header of column names: {error}"
        ) from error


def _blocks(records: Iterator[tuple[int, int, bytes]], most: int) -> Iterator[_Block]:
    block = _Block()
    for number, offset, record in records:
        if not block.records:
            block.offset = offset
        block.records.append(record if record.endswith(b"\n") else record + b"\n")
        block.numbers.append(number)
        if len(block.records) == most:
            yield block
            block = _Block()
    if block.records:
        yield block


def _table(
    path: str,
    block: _Block,
    names: Sequence[str],
    mark: str,
    types: dict[str, pa.DataType],
    wanted: Sequence[str] = (),
) -> pa.Table:
    problems: list[str] = []

    def refuse(row: pa_csv.InvalidRow) -> str:
        if len(problems) < _MOST_PROBLEMS:
            line = block.numbers[row.number - 1]
            problems.append(
                f"{path}: line {line}: found {row.actual_columns} cells; expected "
                f"{row.expected_columns}, as the header has"
            )
        return "skip"

    data = b"".join(block.records)
    table = pa_csv.read_csv(
        pa.BufferReader(data),
        read_options=pa_csv.ReadOptions(
            column_names=list(names), use_threads=False, block_size=len(data) + 1
        ),
        parse_options=pa_csv.ParseOptions(
            delimiter=mark, newlines_in_values=True, invalid_row_handler=refuse
        ),
        convert_options=pa_csv.ConvertOptions(
            column_types=types,
            null_values=[""],
            strings_can_be_null=False,
            include_columns=list(wanted),
        ),
    )
    if problems:
        raise DataError(problems)
    return table
