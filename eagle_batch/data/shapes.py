"""The type of JSON values that arrive one by one: what column holds them all."""

from __future__ import annotations

import math

import pyarrow as pa

#: Nesting beyond this is a mistake or an attack, and Parquet readers give up on it.
MAX_DEPTH = 32


class ShapeError(ValueError):
    """A value does not fit the ones before it, or no column can hold it."""


class Shape:
    """What was seen so far at one place of the rows: nothing, a scalar, a list or a struct."""

    __slots__ = ("fields", "item", "kind")

    def __init__(self) -> None:
        self.kind = ""
        self.item: Shape | None = None
        self.fields: dict[str, Shape] = {}

    def add(self, value: object, depth: int = 0) -> None:
        """Widen the shape by one value; whole numbers give way to fractions, null fits all."""
        if value is None:
            return
        kind = _kind(value)
        if kind != self.kind:
            self.kind = _wider(self.kind, kind)
        if isinstance(value, list):
            self._add_items(value, depth + 1)
        elif isinstance(value, dict):
            self._add_fields(value, depth + 1)

    def to_type(self) -> pa.DataType:
        """Return the Arrow type that holds all the values."""
        if self.kind == "list":
            return pa.list_(self.item.to_type() if self.item else pa.null())
        if self.kind == "object":
            return pa.struct([(name, shape.to_type()) for name, shape in self.fields.items()])
        return _SCALARS[self.kind]

    def _add_items(self, values: list[object], depth: int) -> None:
        _check_depth(depth)
        if self.item is None:
            self.item = Shape()
        for value in values:
            self.item.add(value, depth)

    def _add_fields(self, values: dict[str, object], depth: int) -> None:
        _check_depth(depth)
        for name, value in values.items():
            shape = self.fields.get(name)
            if shape is None:
                shape = self.fields[name] = Shape()
            try:
                shape.add(value, depth)
            except ShapeError as error:
                raise ShapeError(f"{name!r}: {error}") from error


_SCALARS = {
    "": pa.null(),
    "true/false": pa.bool_(),
    "whole number": pa.int64(),
    "number": pa.float64(),
    "text": pa.string(),
}
_KINDS = {
    bool: "true/false",
    int: "whole number",
    float: "number",
    str: "text",
    list: "list",
    dict: "object",
}


def _kind(value: object) -> str:
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ShapeError("the whole number does not fit 64 bits; write it as text")
    if isinstance(value, float) and not math.isfinite(value):
        raise ShapeError("the number is too large; write it as text")
    return _KINDS[type(value)]


def _wider(old: str, new: str) -> str:
    if not old:
        return new
    if {old, new} == {"whole number", "number"}:
        return "number"
    raise ShapeError(f"found {new} where earlier rows hold {old}")


def _check_depth(depth: int) -> None:
    if depth > MAX_DEPTH:
        raise ShapeError(f"nested more than {MAX_DEPTH} levels deep")
