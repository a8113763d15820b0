"""The input data set: its files, one schema for all of them, and the rows of a group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa

from eagle_batch.data import arrow, jsonl, parquet
from eagle_batch.data.files import FoundFile, find_files, reading, short_names
from eagle_batch.data.groups import Group, Scan
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
    found = find_files(pipeline.input.path, pipeline.input.format)
    scans: list[tuple[FoundFile, Scan]] = []
    problems: list[str] = []
    rows = 0
    for file in found:
        if pipeline.input.limit is not None and rows >= pipeline.input.limit:
            break
        try:
            scan = _scan(file, pipeline.output.rows_per_shard)
        except DataError as error:
            problems.extend(error.problems)
            continue
        rows += sum(group.rows for group in scan.groups)
        scans.append((file, scan))
    if problems:
        raise DataError(problems)
    schema = _agree(scans)
    names = short_names([file.path for file, _ in scans])
    files = tuple(
        InputFile(file.path, name, file.format, file.size, file.tag, scan.groups)
        for name, (file, scan) in zip(names, scans, strict=True)
    )
    return DataSet(files, schema)


def read_rows(file: InputFile, index: int, schema: pa.Schema, columns: Sequence[str]) -> pa.Table:
    """Return one group of a file, with `columns` in the types that the whole input has.

    Raises DataError when the file is gone, damaged or no longer what was planned.
    """
    wanted = pa.schema([schema.field(name) for name in columns])
    with reading(file.path):
        table = _read_group(file, index, wanted)
    if table.num_rows != file.groups[index].rows:
        raise DataError(
            f"{file.path}: group {index} holds {table.num_rows} rows, {file.groups[index].rows} "
            "were planned; the file changed while the job ran"
        )
    return table


def _read_group(file: InputFile, index: int, wanted: pa.Schema) -> pa.Table:
    if file.format == "jsonl":
        return jsonl.read(file.path, file.groups[index], wanted)
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


def _scan(file: FoundFile, rows_per_shard: int) -> Scan:
    with reading(file.path):
        if file.format == "jsonl":
            scan = jsonl.scan(file.path, rows_per_shard)
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
    """Return the type for both; only JSONL, whose types are inferred, may be widened."""
    if known.equals(other) or pa.types.is_null(other):
        return known
    if pa.types.is_null(known):
        return other
    if kind != "jsonl":
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
