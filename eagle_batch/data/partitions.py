"""Rows in folders by the values of columns, as Hive names them: `by/topic=stars/`.

A folder stands for its columns, which its files lack. Values are written as Arrow prints them,
in the percent-encoding of URLs, a dot at the end too; readers that know of Hive's folders decode
it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

import pyarrow as pa

from eagle_batch.errors import ConfigError
from eagle_batch.pipeline.problems import suggestion

#: Where the folders lie in an output, and where what is to be in them is noted.
PARTITIONS = "by"
PARTITION_RECORDS = "_job/partitions"
#: The folder of nulls, by which every reader knows them.
NULL = "__HIVE_DEFAULT_PARTITION__"
#: Most bytes of a folder's name, by the file systems of today.
LONGEST = 255
#: What to do where the values do not fit.
KEPT = (
    "choose other columns, or none: the rows are whole in data/, and the same command goes on there"
)
_SHOWN = 40
_is = pa.types
#: Types whose values are told from each other by how they are printed, and read back from that.
_NAMED = (
    *(_is.is_string, _is.is_large_string, _is.is_string_view),
    *(_is.is_boolean, _is.is_integer, _is.is_date, _is.is_timestamp),
)


def column_problems(columns: Sequence[str], schema: pa.Schema) -> list[str]:
    """Return one line for each column that rows of this schema cannot be partitioned by."""
    fit = [field.name for field in schema if _is_named(field.type)]
    lines = []
    for name in dict.fromkeys(columns):
        if name not in schema.names:
            found = f"{name!r}, which is no column; {suggestion(name, fit)}"
        elif name not in fit:
            found = f"{name!r}, a column of {schema.field(name).type}; "
        elif columns.count(name) > 1:
            found = f"{name!r} twice; "
        else:
            continue
        lines.append(
            f"output.partition_by: found {found}expected columns of text, whole numbers, "
            f"booleans, dates or times, each once: of {', '.join(fit)}"
        )
    return lines


def partitions(table: pa.Table, columns: Sequence[str]) -> dict[str, pa.Table]:
    """Return the rows of each folder, without the columns it stands for, in their order.

    Raises ConfigError where a value cannot be the name of a folder.
    """
    places: dict[str, list[int]] = {}
    for place, folder in enumerate(folders(table, columns)):
        places.setdefault(folder, []).append(place)
    rest = table.unify_dictionaries().drop_columns(list(columns))
    return {name: rest.take(pa.array(places[name], pa.int64())) for name in sorted(places)}


def folders(table: pa.Table, columns: Sequence[str]) -> list[str]:
    """Return the folder of each row; raises ConfigError where a value cannot be its name."""
    levels = [_level(table, name) for name in columns]
    return ["/".join(names) for names in zip(*levels, strict=True)]


def _level(table: pa.Table, column: str) -> list[str]:
    names: dict[str | None, str] = {}
    values = _plain(table[column]).cast(pa.string()).to_pylist()
    for place, value in enumerate(values):
        if value not in names:
            names[value] = _folder(column, value)
            problem = _problem(value, names[value])
            if problem:
                found = f"found {_shown(value)} in row {table['id'][place].as_py()!r}: {problem}"
                raise ConfigError(f"output.partition_by: column {column!r}: {found}; {KEPT}")
    return [names[value] for value in values]


def _problem(value: str | None, name: str) -> str:
    if len(name) > LONGEST:
        return f"the name of its folder has {len(name):,} bytes; expected at most {LONGEST}"
    return "that is how the folder of nulls is named" if value == NULL else ""


def _folder(column: str, value: str | None) -> str:
    name = f"{_quoted(column)}={NULL if value is None else _quoted(value)}"
    # Azure and Windows refuse a folder whose name ends with a dot, or leave the dot out.
    return f"{name[:-1]}%2E" if name.endswith(".") else name


def _shown(value: str | None) -> str:
    text = value or ""
    return repr(text) if len(text) <= _SHOWN else f"{text[:_SHOWN]!r}..."


def _quoted(text: str) -> str:
    return quote(text, safe="")


def _is_named(kind: pa.DataType) -> bool:
    inner = kind.value_type if _is.is_dictionary(kind) else kind
    return any(test(inner) for test in _NAMED)


def _plain(column: Any) -> Any:
    return column.cast(column.type.value_type) if _is.is_dictionary(column.type) else column
