"""Parquet, Arrow and JSON lines give back the table that was written; what they cannot is told."""

from __future__ import annotations

import datetime as dt
import decimal
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

from eagle_batch.data.forms import BROKEN, Arrow, Form, JsonLines, Parquet
from eagle_batch.errors import RequestError

FORMS = [
    *(Parquet(each) for each in ("zstd", "snappy", "gzip", "lz4", "none")),
    *(Arrow(each) for each in ("zstd", "lz4", "none")),
    *(JsonLines(each) for each in ("zstd", "gzip", "none")),
]
D = decimal.Decimal
#: Type -> values of it, beside null.
VALUES: dict[pa.DataType, list[Any]] = {
    pa.null(): [],
    pa.bool_(): [True, False],
    pa.int8(): [-128, 127],
    pa.int64(): [-(2**63), 2**63 - 1],
    pa.uint64(): [2**64 - 1],
    pa.float16(): [np.float16(1.5)],
    pa.float32(): [0.1, 3.4e38, -0.0],
    pa.float64(): [0.1, 5e-324, 1.7e308],
    pa.string(): ["", 'é\0 \u2028\r\n"\\ 😀 עברית'],
    pa.large_string(): ["x" * 100_000],
    pa.string_view(): ["", "a longer text than twelve"],
    pa.binary(): [b"", b"\xff\x00"],
    pa.binary(3): [b"abc"],
    pa.large_binary(): [b"\x80"],
    pa.decimal128(10, 2): [D("1.50"), D("-99999999.99")],
    pa.decimal256(50, 3): [D("1" * 47 + ".001")],
    pa.date32(): [dt.date(1, 1, 1), dt.date(9999, 12, 31)],
    pa.date64(): [dt.date(2024, 2, 29)],
    pa.time32("s"): [dt.time(23, 59, 59)],
    pa.time32("ms"): [dt.time(1, 2, 3, 4000)],
    pa.time64("us"): [dt.time(0, 0, 0, 1)],
    pa.time64("ns"): [86_399_999_999_999],
    pa.timestamp("s"): [0, -1],
    pa.timestamp("ns"): [2**62, -(2**62)],
    pa.timestamp("us", "UTC"): [1, 1_700_000_000_000_000],
    pa.timestamp("ns", "Europe/Berlin"): [1_700_000_000_000_000_001],
    pa.timestamp("ms", "+05:30"): [1],
    pa.duration("ns"): [-1, 2**62],
    pa.dictionary(pa.int32(), pa.string()): ["a", "b", "a"],
    pa.dictionary(pa.int8(), pa.int64()): [7, 8],
    pa.list_(pa.int8()): [[], [1, None]],
    pa.large_list(pa.string()): [["a"], []],
    pa.list_(pa.float32(), 2): [[1.5, 2.5]],
    pa.map_(pa.string(), pa.decimal128(5, 1)): [[("a", D("1.5")), ("b", None)], []],
    pa.struct({"a.b": pa.int8(), "when": pa.timestamp("us"), "raw": pa.binary()}): [
        {"a.b": 1, "when": 5, "raw": b"\xff"},
        {"a.b": None, "when": None, "raw": None},
    ],
    pa.struct({"a": pa.list_(pa.struct({"b": pa.binary(), "c": pa.null()}))}): [
        {"a": [{"b": b"1", "c": None}]},
        {"a": None},
    ],
    pa.list_(pa.struct({"t": pa.time64("ns"), "d": pa.dictionary(pa.int32(), pa.string())})): [
        [{"t": 5, "d": "x"}, None, {"t": None, "d": None}],
    ],
}


def column(kind: pa.DataType) -> pa.Array:
    values = [None, *VALUES[kind], None]
    if pa.types.is_dictionary(kind):
        return pa.array(values, kind.value_type).dictionary_encode().cast(kind)
    if pa.types.is_list(kind) and pa.types.is_struct(kind.value_type):
        plain = pa.list_(pa.struct({"t": pa.time64("ns"), "d": pa.string()}))
        return pa.array(values, plain).cast(kind)
    return pa.array(values, kind)


def same(found: pa.Table, wanted: pa.Table) -> bool:
    """Equal types and values; dictionaries may list their values in another order."""
    return found.schema.remove_metadata().equals(wanted.schema) and [
        str(row) for row in found.to_pylist()
    ] == [str(row) for row in wanted.to_pylist()]


@pytest.mark.parametrize("kind", VALUES, ids=str)
def test_every_type_comes_back_from_every_form(kind: pa.DataType) -> None:
    table = pa.table({"x": column(kind)})
    for form in FORMS:
        assert form.problem(table.schema) is None, form.name
        for part in (table, table.slice(1, 1), table.slice(0, 0)):
            form.check_row(part)
            assert same(form.read(form.write(part), part.schema), part), form.ending


def test_several_chunks_with_dictionaries_of_their_own_become_one_table() -> None:
    kind = pa.dictionary(pa.int32(), pa.string())
    chunks = [pa.array(values).cast(kind) for values in (["a", "b"], ["c", "a"], [])]
    table = pa.table({"x": pa.chunked_array(chunks, kind)})
    for form in FORMS:
        assert same(form.read(form.write(table), table.schema), table), form.ending


@pytest.mark.parametrize("form", [form for form in FORMS if form.stamp is None])
def test_what_is_said_and_carried_is_there_and_in_no_reader_s_way(
    form: Form, tmp_path: Path
) -> None:
    table = pa.table({"x": ["a", "b"] * 50, "n": range(100)})
    for size in (0, 1, 7, 8, 1000):
        data = form.write(table, {"name": "value"}, bytes([7]) * size)
        assert form.carried(data, size) == bytes([7]) * size
        found = form.read(data)
        assert found.schema.metadata[b"name"] == b"value"
        assert same(found, table)
        path = tmp_path / f"x{form.ending}"
        path.write_bytes(data)
        read = pl.read_ipc if isinstance(form, Arrow) else pl.read_parquet
        assert read(path).to_arrow()["x"].to_pylist() == table["x"].to_pylist()
        if isinstance(form, Arrow):
            assert pa.ipc.open_stream(data[8:]).read_all()["n"].to_pylist() == list(range(100))
            assert pd.read_feather(path)["n"].tolist() == list(range(100))


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.ending)
def test_an_object_that_was_cut_is_not_read_as_a_whole_one(form: Form) -> None:
    table = pa.table({"x": ["some text"] * 50})
    data = form.write(table)
    for cut in (0, 5, len(data) // 2, len(data) - 1):
        try:
            found = form.read(data[:cut], table.schema)
        except BROKEN:
            continue
        # Lines may be whole; the checksum of their stamp tells.
        assert form.stamp is not None
        assert found.num_rows < table.num_rows or cut == len(data) - 1


def test_lines_are_json_that_anyone_reads() -> None:
    """The names in the docstring of `data/plain.py`, spelled out."""
    table = pa.table(
        {
            "full name": ["é"],
            "price": pa.array([D("1.50")], pa.decimal128(5, 2)),
            "day": [dt.date(2024, 5, 6)],
            "at": pa.array([1], pa.timestamp("ms", "UTC")),
            "time": pa.array([1], pa.time32("s")),
            "took": pa.array([5], pa.duration("s")),
            "raw": [b"abc"],
            "nested": [{"a": [1, None]}],
            "map": pa.array([[("k", b"v")]], pa.map_(pa.string(), pa.binary())),
        }
    )
    [line] = JsonLines("none").write(table).decode().splitlines()
    assert json.loads(line) == {
        "full name": "é",
        "price": "1.50",
        "day": "2024-05-06",
        "at": "1970-01-01 00:00:00.001Z",
        "time": "00:00:01",
        "took": 5,
        "raw": "YWJj",
        "nested": {"a": [1, None]},
        "map": [{"key": "k", "value": "dg=="}],
    }


@pytest.mark.parametrize(
    "kind",
    [pa.month_day_nano_interval(), pa.run_end_encoded(pa.int32(), pa.string()), pa.uuid()],
    ids=str,
)
def test_a_type_that_json_lines_cannot_give_back_is_told_beforehand(kind: pa.DataType) -> None:
    assert JsonLines().problem(pa.schema({"x": kind}))


@pytest.mark.parametrize(
    "values",
    [
        pa.array([math.nan]),
        pa.array([[{"a": math.inf}]]),
        pa.array([2**62], pa.timestamp("us")),
        pa.array([b"\xff"], pa.binary()).view(pa.string()),
    ],
    ids=lambda values: str(values.type),
)
def test_a_value_that_json_lacks_is_told_with_its_column(values: pa.Array) -> None:
    row = pa.table({"fine": [1], "odd one": values})
    with pytest.raises(RequestError, match="column 'odd one' has a value that JSON has not"):
        JsonLines().check_row(row)
    Parquet().check_row(row)
    Arrow().check_row(row)
