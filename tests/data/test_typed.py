"""From a JSON schema to the type of a column, and from texts to its values."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pyarrow as pa
import pytest

from eagle_batch.data.typed import column_type, column_values, untyped_reason, value_problem
from eagle_batch.pipeline import Message, Stage
from eagle_batch.pipeline.structured import Structured, closed


def stage(schema: dict[str, Any]) -> Stage:
    messages = (Message(role="user", content="x"),)
    return Stage(name="s", messages=messages, structured=Structured(json_schema=schema))


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": ["integer", "null"]},
        "home": {"$ref": "#/$defs/place"},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}},
        "score": {"anyOf": [{"type": "integer"}, {"type": "number"}, {"type": "null"}]},
        "ok": {"const": True},
    },
    "required": ["name"],
    "$defs": {
        "place": {"type": "object", "properties": {"city": {"type": "string", "format": "date"}}}
    },
}


def test_a_schema_of_one_shape_becomes_nested_columns() -> None:
    assert column_type(stage(PERSON)) == pa.struct(
        [
            ("name", pa.string()),
            ("age", pa.int64()),
            ("home", pa.struct([("city", pa.string())])),
            ("tags", pa.list_(pa.string())),
            ("score", pa.float64()),
            ("ok", pa.bool_()),
        ]
    )
    values: list[dict[str, Any]] = [
        {"name": "é", "age": 3, "home": {"city": "2024-01-01"}, "tags": ["a"], "score": 2},
        {"name": "x", "age": None, "tags": [], "ok": True},
    ]
    for value in values:
        jsonschema.validate(value, PERSON)
    whole = column_values(stage(PERSON), [json.dumps(value) for value in values]).to_pylist()
    blank: dict[str, Any] = dict.fromkeys(("name", "age", "home", "tags", "score", "ok"))
    assert whole == [blank | value for value in values]


@pytest.mark.parametrize(
    ("schema", "kind"),
    [
        ({"type": "string"}, pa.string()),
        ({"type": "array", "items": {"type": "number"}}, pa.list_(pa.float64())),
        ({"enum": [1, 2, None]}, pa.int64()),
        ({"type": "boolean"}, pa.bool_()),
    ],
)
def test_a_schema_need_not_be_an_object(schema: dict[str, Any], kind: pa.DataType) -> None:
    assert column_type(stage(schema)) == kind
    assert untyped_reason(stage(schema)) is None


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"type": "object"}, r"\$ has properties that the schema does not name"),
        (
            {
                "type": "object",
                "properties": {
                    "x": {
                        "type": "object",
                        "properties": {"y": {"type": "string"}},
                        "additionalProperties": True,
                    }
                },
            },
            r"\$.x has properties",
        ),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, r"\$ has no single type"),
        ({"type": "array"}, r"\$ has no single type"),
        ({"type": "array", "items": {"enum": [[1]]}}, r"\$\[\] names a value"),
        (
            {
                "$ref": "#/$defs/n",
                "$defs": {"n": {"type": "object", "properties": {"n": {"$ref": "#/$defs/n"}}}},
            },
            r"\$.n holds itself",
        ),
    ],
)
def test_an_open_schema_stays_text_and_says_why(schema: dict[str, Any], reason: str) -> None:
    assert column_type(stage(schema)) == pa.string()
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(untyped_reason(stage(schema)))
    assert column_values(stage(schema), ['{"a": 1}']).to_pylist() == ['{"a": 1}']


def test_a_value_that_its_column_cannot_hold_is_named() -> None:
    number = stage({"type": "integer"})
    assert value_problem(number, "12") is None
    assert "too large" in (value_problem(number, "1" + "0" * 30) or "")
    assert column_values(stage({"type": "string"}), ['"a\\n"']).to_pylist() == ["a\n"]


def test_objects_that_list_properties_are_closed_and_others_are_left_open() -> None:
    inner = {"type": "object", "properties": {"a": {}}}
    opened = {**inner, "additionalProperties": {"type": "string"}}
    schema = {"anyOf": [inner, opened], "allOf": [inner], "items": {"type": "object"}}
    assert closed(schema) == {
        "anyOf": [{**inner, "additionalProperties": False}, opened],
        "allOf": [inner],
        "items": {"type": "object"},
    }
