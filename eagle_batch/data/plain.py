"""Columns as JSON has them, and back without loss: one object a row, one line an object.

| Arrow | JSON |
|---|---|
| numbers, booleans, text, null | as they are |
| decimal, date, time, timestamp | text, as Arrow prints it |
| duration | a whole number of its unit |
| binary | base64 |
| dictionary | its values |
| struct, list | an object, an array |
| map | an array of objects with `key` and `value` |

Types travel beside it: who reads has the schema. JSON has no number that is not finite.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import pyarrow as pa

#: Turns a Python value into one that JSON has; None where it is one.
Turn = Callable[[Any], Any] | None
_is = pa.types
_BYTES = (_is.is_binary, _is.is_large_binary, _is.is_fixed_size_binary, _is.is_binary_view)
_PRINTED = (_is.is_decimal, _is.is_date, _is.is_time, _is.is_timestamp)
_AS_THEY_ARE = (
    *(_is.is_null, _is.is_boolean, _is.is_integer, _is.is_floating),
    *(_is.is_string, _is.is_large_string, _is.is_string_view),
)
_LISTS = (_is.is_list, _is.is_large_list, _is.is_fixed_size_list)
#: Digits of a time behind its seconds.
_DIGITS = {"s": 0, "ms": 3, "us": 6, "ns": 9}


def to_lines(table: pa.Table) -> bytes:
    """Return a table as JSON lines.

    Raises ValueError or pa.ArrowException where a column's type, or a value, has no place in JSON.
    """
    columns = []
    for column in table.columns:
        turn = _turn(column.type)
        values = _cast(column).to_pylist()
        columns.append(values if turn is None else [turn(value) for value in values])
    names = table.column_names
    rows = zip(*columns, strict=True)
    return "".join(_line(dict(zip(names, row, strict=True))) for row in rows).encode()


def from_lines(data: bytes, schema: pa.Schema) -> pa.Table:
    """Return what `to_lines` wrote of a table of this schema.

    Raises ValueError, KeyError, TypeError or pa.ArrowException for any other bytes.
    """
    rows = [json.loads(line) for line in data.split(b"\n") if line]
    columns = [_array([row[field.name] for row in rows], field.type) for field in schema]
    return pa.Table.from_arrays(columns, schema=schema)


def json_type(kind: pa.DataType) -> pa.DataType:
    """Return the type of a column for a reader of the lines alone.

    Raises ValueError for one that JSON has nothing for.
    """
    plain = _plain(kind)
    if _is.is_struct(plain):
        return pa.struct([(field.name, json_type(field.type)) for field in plain])
    if _is.is_map(plain):
        pair = [("key", json_type(plain.key_type)), ("value", json_type(plain.item_type))]
        return pa.list_(pa.struct(pair))
    if _any(_LISTS, plain):
        return pa.list_(json_type(plain.value_type))
    is_text = _any((*_BYTES, _is.is_large_string, _is.is_string_view), plain)
    return pa.string() if is_text else plain


def _cast(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return a column as its plain type; a copy of its rows, for Arrow miscasts nested slices."""
    kind = _plain(column.type)
    if kind == column.type:
        return column
    return column.take(pa.array(range(len(column)), pa.int64())).cast(kind)


def _line(row: dict[str, Any]) -> str:
    return json.dumps(row, ensure_ascii=False, allow_nan=False, separators=(",", ":")) + "\n"


def _any(tests: Sequence[Callable[[pa.DataType], bool]], kind: pa.DataType) -> bool:
    return any(test(kind) for test in tests)


def _plain(kind: pa.DataType) -> pa.DataType:
    """Return the type whose Python values `_turn` makes those of JSON."""
    if _is.is_struct(kind) and kind.num_fields:
        return pa.struct([field.with_type(_plain(field.type)) for field in kind])
    if _is.is_map(kind):
        return pa.map_(_plain(kind.key_type), _plain(kind.item_type))
    if _is.is_dictionary(kind):
        return _plain(kind.value_type)
    return _plain_list(kind) if _any(_LISTS, kind) else _plain_leaf(kind)


def _plain_list(kind: pa.DataType) -> pa.DataType:
    inner = kind.value_field.with_type(_plain(kind.value_type))
    if _is.is_fixed_size_list(kind):
        return pa.list_(inner, kind.list_size)
    return pa.large_list(inner) if _is.is_large_list(kind) else pa.list_(inner)


def _plain_leaf(kind: pa.DataType) -> pa.DataType:
    if _any(_PRINTED, kind):
        return pa.string()
    if _is.is_duration(kind):
        return pa.int64()
    if not _any((*_BYTES, *_AS_THEY_ARE), kind):
        raise ValueError(f"JSON has nothing for {kind}")
    return kind


def _turn(kind: pa.DataType) -> Turn:
    turn: Turn = None
    if _is.is_struct(kind):
        turn = _struct_turn({field.name: _turn(field.type) for field in kind})
    elif _is.is_map(kind):
        turn = _map_turn(_turn(kind.key_type), _turn(kind.item_type))
    elif _any(_LISTS, kind):
        turn = _list_turn(_turn(kind.value_type))
    elif _any(_BYTES, kind):
        turn = _base64
    return None if turn is None else _nulls_kept(turn)


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _struct_turn(turns: dict[str, Turn]) -> Turn:
    if not any(turns.values()):
        return None
    return lambda row: {name: _apply(turn, row[name]) for name, turn in turns.items()}


def _list_turn(turn: Turn) -> Turn:
    return None if turn is None else lambda items: [turn(item) for item in items]


def _map_turn(key: Turn, value: Turn) -> Turn:
    return lambda pairs: [{"key": _apply(key, k), "value": _apply(value, v)} for k, v in pairs]


def _apply(turn: Turn, value: Any) -> Any:
    return value if turn is None else turn(value)


def _nulls_kept(turn: Callable[[Any], Any]) -> Turn:
    return lambda value: None if value is None else turn(value)


def _array(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """Return values of JSON as an array; each level for itself, so that a null is one."""
    nulls = pa.array([value is None for value in values], pa.bool_())
    if _is.is_struct(kind):
        names = [field.name for field in kind]
        rows = [value or dict.fromkeys(names) for value in values]
        inner = [_array([row[field.name] for row in rows], field.type) for field in kind]
        return pa.StructArray.from_arrays(inner, fields=list(kind), mask=nulls)
    if _is.is_fixed_size_list(kind):
        lists = [value or [None] * kind.list_size for value in values]
        flat = _array([item for items in lists for item in items], kind.value_type)
        return pa.FixedSizeListArray.from_arrays(flat, type=kind, mask=nulls)
    if _is.is_map(kind) or _any(_LISTS, kind):
        return _lists(values, kind, nulls)
    return _leaves(values, kind)


def _leaves(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    if _is.is_dictionary(kind):
        return _array(values, kind.value_type).dictionary_encode().cast(kind)
    if _any(_BYTES, kind):
        return pa.array([None if v is None else base64.b64decode(v) for v in values], kind)
    if _is.is_time(kind):
        counts = pa.int32() if _is.is_time32(kind) else pa.int64()
        return pa.array([_ticks(value, _DIGITS[kind.unit]) for value in values], counts).cast(kind)
    return pa.array(values, _plain(kind)).cast(kind)


def _lists(values: Sequence[Any], kind: pa.DataType, nulls: pa.Array) -> pa.Array:
    lists = [value or [] for value in values]
    flat = [item for items in lists for item in items]
    ends = list(accumulate(map(len, lists), initial=0))
    if _is.is_map(kind):
        keys = _array([item["key"] for item in flat], kind.key_type)
        items = _array([item["value"] for item in flat], kind.item_type)
        return pa.MapArray.from_arrays(ends, keys, items, type=kind, mask=nulls)
    array = pa.LargeListArray if _is.is_large_list(kind) else pa.ListArray
    return array.from_arrays(ends, _array(flat, kind.value_type), type=kind, mask=nulls)


def _ticks(text: str | None, digits: int) -> int | None:
    """Read HH:MM:SS.fff as units since midnight, of which a second has 10**digits."""
    if text is None:
        return None
    hours, minutes, seconds = text.split(":")
    whole, _, fraction = seconds.partition(".")
    rest = int(fraction.ljust(digits, "0") or 0)
    seconds_of_day = int(hours) * 3600 + int(minutes) * 60 + int(whole)
    return seconds_of_day * int(10**digits) + rest
