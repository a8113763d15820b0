"""Typed columns for structured texts: from a JSON schema to an Arrow type, from a text to a value.

A schema whose values have one shape becomes nested Parquet columns. One that leaves the shape open
(further properties, unions of different types, recursion) stays a column of JSON text.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from eagle_batch.pipeline import Stage
from eagle_batch.pipeline.structured import closed

_SCALARS = {
    "string": pa.string(),
    "integer": pa.int64(),
    "number": pa.float64(),
    "boolean": pa.bool_(),
}
_OF_PYTHON = {str: "string", bool: "boolean", int: "integer", float: "number"}


class NoColumnTypeError(ValueError):
    """A schema has no column type; the message says which part and why."""


def column_type(stage: Stage) -> pa.DataType:
    """Return the type of a stage's column: of its text, or a list where it keeps several."""
    kind = text_type(stage)
    return pa.list_(kind) if stage.keep == "all" else kind


def text_type(stage: Stage) -> pa.DataType:
    """Return the type of one text of a stage; text wherever no other type fits."""
    try:
        return _declared_type(stage)
    except NoColumnTypeError:
        return pa.string()


def untyped_reason(stage: Stage) -> str | None:
    """Return why a stage with a schema has a column of text; None where it has not."""
    try:
        _declared_type(stage)
    except NoColumnTypeError as error:
        return str(error)
    return None


def column_values(stage: Stage, texts: Sequence[str | list[str] | None]) -> pa.Array:
    """Return a stage's texts as its column; null where the stage was left out.

    Raises ValueError or pa.ArrowException where a text does not hold a value of the type.
    """
    is_text = pa.types.is_string(text_type(stage)) and not _is_string_schema(stage)
    values = list(texts) if is_text else [_value(text) for text in texts]
    return pa.array(values, column_type(stage))


def _value(text: str | list[str] | None) -> Any:
    if text is None:
        return None
    return [_loads(each) for each in text] if isinstance(text, list) else _loads(text)


def _loads(text: str) -> Any:
    return json.loads(text, parse_float=_finite)


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is too large for a number of 64 bits")
    return number


def value_problem(stage: Stage, text: str) -> str | None:
    """Return why a text, which its grammar permits, has no place in the stage's column."""
    try:
        column_values(stage, [[text] if stage.keep == "all" else text])
    except (ValueError, OverflowError, pa.ArrowException) as error:
        return " ".join(str(error).split())
    return None


def _is_string_schema(stage: Stage) -> bool:
    """Whether the schema says that the whole text is one JSON string."""
    return (
        stage.structured is not None
        and stage.structured.json_schema is not None
        and untyped_reason(stage) is None
    )


def _declared_type(stage: Stage) -> pa.DataType:
    if stage.structured is None or stage.structured.json_schema is None:
        return pa.string()
    schema = closed(stage.structured.json_schema)
    return _Mapping(schema).type_of(schema, "$")


class _Mapping:
    """Maps the parts of one schema; `where` is a JSON path for messages."""

    def __init__(self, root: dict[str, Any]) -> None:
        self._root = root
        self._open: list[str] = []

    def type_of(self, schema: Any, where: str) -> pa.DataType:
        if not isinstance(schema, dict):
            raise NoColumnTypeError(f"{where} allows anything")
        if "$ref" in schema:
            return self._referred(schema["$ref"], where)
        for key in ("const", "enum"):
            if key in schema:
                values = schema[key] if key == "enum" else [schema[key]]
                return self._one_type([self._of_value(v, where) for v in values], where)
        for key in ("anyOf", "oneOf"):
            if key in schema:
                return self._one_type(
                    [
                        self._nullable(part, f"{where}.{key}[{i}]")
                        for i, part in enumerate(schema[key])
                    ],
                    where,
                )
        kinds = schema.get("type")
        if isinstance(kinds, list):
            parts = [self._nullable({**schema, "type": kind}, where) for kind in kinds]
            return self._one_type(parts, where)
        return self._of_kind(schema, kinds, where)

    def _of_kind(self, schema: dict[str, Any], kind: Any, where: str) -> pa.DataType:
        if kind in _SCALARS:
            return _SCALARS[kind]
        if kind == "array" and "items" in schema and "prefixItems" not in schema:
            return pa.list_(self.type_of(schema["items"], f"{where}[]"))
        if kind == "object":
            return self._struct(schema, where)
        raise NoColumnTypeError(f"{where} has no single type")

    def _struct(self, schema: dict[str, Any], where: str) -> pa.DataType:
        properties = schema.get("properties") or {}
        if not properties or schema.get("additionalProperties") is not False:
            raise NoColumnTypeError(f"{where} has properties that the schema does not name")
        return pa.struct(
            [
                pa.field(name, self.type_of(part, f"{where}.{name}"))
                for name, part in properties.items()
            ]
        )

    def _referred(self, reference: str, where: str) -> pa.DataType:
        if reference in self._open:
            raise NoColumnTypeError(f"{where} holds itself ({reference})")
        part: Any = self._root
        for escaped in reference.removeprefix("#").strip("/").split("/"):
            name = escaped.replace("~1", "/").replace("~0", "~")
            part = part.get(name) if isinstance(part, dict) else None
        self._open.append(reference)
        found = self.type_of(part, where)
        self._open.pop()
        return found

    def _nullable(self, part: Any, where: str) -> pa.DataType | None:
        """Return the type of one branch, None for null, which every column can hold."""
        if isinstance(part, dict) and part.get("type") == "null":
            return None
        return self.type_of(part, where)

    def _of_value(self, value: Any, where: str) -> pa.DataType | None:
        if value is None:
            return None
        if type(value) not in _OF_PYTHON:
            raise NoColumnTypeError(f"{where} names a value that is a list or an object")
        return _SCALARS[_OF_PYTHON[type(value)]]

    def _one_type(self, found: list[pa.DataType | None], where: str) -> pa.DataType:
        kinds = list(dict.fromkeys(kind for kind in found if kind is not None))
        if kinds and all(kind in (pa.int64(), pa.float64()) for kind in kinds):
            return pa.float64() if pa.float64() in kinds else pa.int64()
        if len(kinds) != 1:
            raise NoColumnTypeError(f"{where} has no single type")
        return kinds[0]
