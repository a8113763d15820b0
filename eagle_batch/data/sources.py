"""The input data set: its files, one schema for all of them, and the rows of a group."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self

import pyarrow as pa

from eagle_batch.data import arrow, csvs, invented, jsonl, openai_batch, parquet
from eagle_batch.data.files import TEXT, FoundFile, reading, short_names
from eagle_batch.data.finding import find_files, find_input
from eagle_batch.data.groups import Group, Scan
from eagle_batch.data.lines import Lines
from eagle_batch.errors import DataError
from eagle_batch.pipeline import Pipeline
from eagle_batch.pipeline.fingerprint import InputIdentity


@dataclass(frozen=True, slots=True)
class InputFile:
    """One file of the input, as the plan keeps it."""

    #: Absolute local path, or URL.
    path: str
    #: Base name, or the path below the common folder where two base names are alike.
    name: str
    format: str
    size: int
    tag: str
    groups: tuple[Group, ...]
    #: What separates the cells of a CSV file; null goes by its name.
    delimiter: str | None = None

    @property
    def rows(self) -> int:
        """Rows of the file."""
        return sum(group.rows for group in self.groups)

    @property
    def identity(self) -> InputIdentity:
        """What goes into the fingerprint."""
        return InputIdentity(self.name, self.size, self.rows, self.tag)


@dataclass(frozen=True, slots=True)
class DataSet:
    """The files that are needed and the columns that all of them have."""

    files: tuple[InputFile, ...]
    schema: pa.Schema


def survey(pipeline: Pipeline) -> DataSet:
    """Find the files of the input and learn their columns, without reading what can be left.

    With `input.limit`, files beyond the limit are not opened. Raises DataError with every file that
    cannot be read, and every column on which two files disagree.
    """
    source = pipeline.input
    found = find_input(source)
    scans: list[tuple[FoundFile, Scan]] = []
    problems: list[str] = []
    rows = 0
    for file in found:
        if not source.selects and source.limit is not None and rows >= source.limit:
            break
        try:
            scan = _scan(file, pipeline.output.rows_per_shard, source.delimiter)
        except DataError as error:
            problems.extend(error.problems)
            continue
        rows += sum(group.rows for group in scan.groups)
        scans.append((file, scan))
    if problems:
        raise DataError(problems)
    schema = _agree(scans)
    names, delimiter = short_names([file.path for file, _ in scans]), source.delimiter
    files = tuple(
        InputFile(file.path, name, file.format, file.size, file.tag, scan.groups, delimiter)
        for name, (file, scan) in zip(names, scans, strict=True)
    )
    return DataSet(files, schema)


class GroupReader:
    """Reads groups of the input, one after the other; owns the text file that it has open."""

    def __init__(self, schema: pa.Schema, columns: Sequence[str]) -> None:
        """Read `columns`, in the types that the whole input has."""
        self._wanted = pa.schema([schema.field(name) for name in columns])
        self._lines = Lines()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close what is open."""
        self._lines.close()

    def read(self, file: InputFile, index: int) -> pa.Table:
        """Return one group of a file.

        Raises DataError when the file is gone, damaged or no longer what was planned.
        """
        with reading(file.path):
            table = self._read(file, index)
        if table.num_rows != file.groups[index].rows:
            raise DataError(
                f"{file.path}: group {index} holds {table.num_rows} rows, "
                f"{file.groups[index].rows} were planned; the file changed while the job ran"
            )
        return table

    def _read(self, file: InputFile, index: int) -> pa.Table:
        wanted, group = self._wanted, file.groups[index]
        if file.format == "jsonl":
            return jsonl.read(self._lines, file.path, group, wanted)
        if file.format == "openai_batch":
            return openai_batch.read(self._lines, file.path, group, wanted)
        if file.format == "csv":
            return csvs.read(self._lines, file.path, group, wanted, file.delimiter)
        if file.format == invented.FORMAT:
            return invented.read(group, wanted)
        names = wanted.names or []
        table = (
            parquet.read(file.path, index, names)
            if file.format == "parquet"
            else arrow.read(file.path, index, names)
        )
        columns = [
            column if column.type.equals(field.type) else column.cast(field.type)
            for column, field in zip(table.columns, wanted, strict=True)
        ]
        return pa.Table.from_arrays(columns, schema=wanted)


def read_columns(patterns: Sequence[str], columns: Sequence[str]) -> Iterator[pa.Table]:
    """Yield some columns of further files, group by group, each in the types of its own file.

    Raises DataError where a file cannot be read or lacks a column.
    """
    for found in find_files(patterns, "auto"):
        scan = _scan(found, 1024, None)
        missing = [name for name in columns if name not in scan.schema.names]
        if missing:
            raise DataError(
                f"{found.path}: has no column {missing[0]!r}; expected one of "
                f"{', '.join(scan.schema.names[:20])}"
            )
        file = InputFile(found.path, found.path, found.format, found.size, found.tag, scan.groups)
        with GroupReader(scan.schema, columns) as reader:
            yield from (reader.read(file, index) for index in range(len(file.groups)))


def read_rows(file: InputFile, index: int, schema: pa.Schema, columns: Sequence[str]) -> pa.Table:
    """Return one group of a file, as `GroupReader` does."""
    with GroupReader(schema, columns) as reader:
        return reader.read(file, index)


def _scan(file: FoundFile, rows_per_shard: int, delimiter: str | None) -> Scan:
    with reading(file.path):
        if file.format == "jsonl":
            scan = jsonl.scan(file.path, rows_per_shard)
        elif file.format == "openai_batch":
            scan = openai_batch.scan(file.path, rows_per_shard)
        elif file.format == "csv":
            scan = csvs.scan(file.path, rows_per_shard, delimiter)
        elif file.format == invented.FORMAT:
            scan = invented.scan(file.path)
        else:
            scan = parquet.scan(file.path) if file.format == "parquet" else arrow.scan(file.path)
        names = [_read_names(field) for field in scan.schema]
    twice = list(dict.fromkeys(name for name in names if names.count(name) > 1))
    if twice:
        raise DataError(f"{file.path}: more than one column is named {twice[0]!r}; rename one")
    return scan


def _read_names(field: pa.Field) -> str:
    """Return the name; a name that is not UTF-8, at any depth, shows here and not later."""
    kind = field.type
    for index in range(kind.num_fields):
        _read_names(kind.field(index))
    return str(field.name)


def _agree(scans: Sequence[tuple[FoundFile, Scan]]) -> pa.Schema:
    """Return the one schema of all files; metadata of the writer is left behind."""
    types: dict[str, pa.DataType] = {}
    first: dict[str, str] = {}
    problems: list[str] = []
    for file, scan in scans:
        for field in scan.schema:
            known = types.get(field.name)
            merged = field.type if known is None else _common_type(known, field.type, file.format)
            if merged is None:
                problems.append(
                    f"{file.path}: column {field.name!r} is {field.type}, but {known} in "
                    f"{first[field.name]}; expected the same type in every file"
                )
                continue
            types[field.name] = merged
            first.setdefault(field.name, file.path)
    problems.extend(_missing_columns(scans, first))
    if problems:
        raise DataError(problems)
    return pa.schema([pa.field(name, kind) for name, kind in types.items()])


def _common_type(known: pa.DataType, other: pa.DataType, kind: str) -> pa.DataType | None:
    """Return the type for both; only types that were inferred from text may be widened."""
    if known.equals(other) or pa.types.is_null(other):
        return known
    if pa.types.is_null(known):
        return other
    if kind == "csv" and (pa.types.is_string(known) or pa.types.is_string(other)):
        return pa.string()  # A cell is text before it is anything else.
    if kind not in TEXT:
        return None
    try:
        both = [pa.schema([("column", known)]), pa.schema([("column", other)])]
        return pa.unify_schemas(both, promote_options="permissive").field(0).type
    except pa.ArrowException:
        return None


def _missing_columns(scans: Sequence[tuple[FoundFile, Scan]], first: dict[str, str]) -> list[str]:
    return [
        f"{file.path}: has no column {name!r}, which {owner} has; "
        "expected the same columns in every file"
        for file, scan in scans
        if file.format != "jsonl"
        for name, owner in first.items()
        if name not in set(scan.schema.names)
    ]
