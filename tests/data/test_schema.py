"""The declared output schema holds for every table, whatever its rows."""

from __future__ import annotations

import datetime as dt
import decimal
import io
import json
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from eagle_batch.data.plan import plan
from eagle_batch.data.rows import RowReader
from eagle_batch.data.schema import (
    ERROR_SCHEMA,
    ErrorRow,
    Generation,
    OutputRow,
    TokenIds,
    error_table,
    output_schema,
    output_table,
    schema_problems,
)
from eagle_batch.data.templates import compile_stages
from eagle_batch.errors import Reason, RequestError
from tests.data.support import make_pipeline

NOISE = -(2**63)


def generation(stage: str) -> Generation:
    return Generation(stage, 3, 4, "eos", 2, 4, 2, 2.0, NOISE)


def finished(row: int, sample: int = 0) -> OutputRow:
    return OutputRow(
        id=f"r{row}",
        sample=sample,
        row=row,
        texts=(f"q{row}", "😀"),
        generation=(generation("question"), generation("answer")),
        token_ids=(TokenIds("question", (9, 8), (1, 2)), TokenIds("answer", (7,), ())),
    )


def source(**columns: Any) -> pa.Table:
    return pa.table({"id": ["r0", "r1", "r2"], "topic": ["a", "b", "c"], **columns})


def written(table: pa.Table) -> pa.Table:
    sink = io.BytesIO()
    pq.write_table(table, sink)
    return pq.read_table(sink)


def test_the_schema_is_the_documented_one(tmp_path: Path) -> None:
    pipeline = make_pipeline(tmp_path, {"output.token_ids": True})
    schema = output_schema(pipeline, source().schema)
    statistics = (
        "stage: string, prompt_tokens: int32, completion_tokens: int32, finish_reason: string, "
        "target_passes: int32, drafted: int32, accepted: int32, acceptance_length: float, "
        "seed: int64, turn: int32, candidate: int32, attempt: int32, kept: bool, score: float"
    )
    assert [(field.name, str(field.type)) for field in schema] == [
        ("id", "string"),
        ("sample", "int32"),
        ("topic", "string"),
        ("question", "string"),
        ("answer", "string"),
        ("generation", f"list<item: struct<{statistics}>>"),
        ("model", "string"),
        ("head", "string"),
        (
            "token_ids",
            "list<item: struct<stage: string, prompt: list<item: int32>, ids: list<item: int32>>>",
        ),
    ]


@pytest.mark.parametrize("token_ids", [False, True])
@pytest.mark.parametrize("rows", [[], [2], [2, 0, 0]])
def test_every_table_has_the_declared_schema_in_memory_and_in_a_file(
    tmp_path: Path, rows: list[int], token_ids: bool
) -> None:
    pipeline = make_pipeline(
        tmp_path, {"output.token_ids": token_ids, "speculation.method": "none"}
    )
    table = source(empty=pa.nulls(3), nothing=pa.array([None] * 3, pa.string()))
    made = output_table(pipeline, [finished(row) for row in rows], table)
    declared = output_schema(pipeline, table.schema)
    assert made.schema.equals(declared)
    assert written(made).schema.equals(declared)
    assert written(made).equals(made)
    assert made.column("topic").to_pylist() == ["abc"[row] for row in rows]
    assert made.column("id").to_pylist() == [f"r{row}" for row in rows]


def test_a_row_says_how_it_came_about(tmp_path: Path) -> None:
    pipeline = make_pipeline(tmp_path, {"output.token_ids": True})
    row = output_table(pipeline, [finished(1, sample=2)], source()).to_pylist()[0]
    assert row == {
        "id": "r1",
        "sample": 2,
        "topic": "b",
        "question": "q1",
        "answer": "😀",
        "generation": [
            {
                "stage": stage,
                "prompt_tokens": 3,
                "completion_tokens": 4,
                "finish_reason": "eos",
                "target_passes": 2,
                "drafted": 4,
                "accepted": 2,
                "acceptance_length": 2.0,
                "seed": NOISE,
                "turn": 0,
                "candidate": 0,
                "attempt": 0,
                "kept": True,
                "score": None,
            }
            for stage in ("question", "answer")
        ],
        "model": str(tmp_path / "model"),
        "head": None,
        "token_ids": [
            {"stage": "question", "prompt": [9, 8], "ids": [1, 2]},
            {"stage": "answer", "prompt": [7], "ids": []},
        ],
    }


PASSED = {
    "large": pa.array(["é", None, "x"], pa.large_string()),
    "word": pa.array(["a", None, "a"]).dictionary_encode(),
    "price": pa.array([decimal.Decimal("1.50"), None, decimal.Decimal("-2.25")]),
    "wide": pa.array([decimal.Decimal(10**40), None, None], pa.decimal256(60, 2)),
    "at": pa.array([1, None, 3], pa.timestamp("ns", "Europe/Berlin")),
    "day": pa.array([dt.date(2024, 1, 1), None, None]),
    "time": pa.array([1, None, 2], pa.time64("ns")),
    "took": pa.array([1, None, 2], pa.duration("ns")),
    "deep": pa.array([[{"x": [1, None], "y": {"z": "😀"}}], None, []]),
    "map": pa.array([[("k", 1)], None, []], pa.map_(pa.string(), pa.int64())),
    "fixed": pa.array([[1.0, 2.0], None, [3.0, 4.0]], pa.list_(pa.float32(), 2)),
    "raw": pa.array([b"\xff", None, b""]),
    "small": pa.array([1, None, 2], pa.uint8()),
    "big": pa.array([2**64 - 1, None, 0], pa.uint64()),
    "half": pa.array([1.5, None, 2.5], pa.float16()),
    "flag": pa.array([True, None, False]),
    "nothing": pa.nulls(3),
}


@pytest.mark.parametrize("name", PASSED)
def test_source_columns_pass_through_with_type_and_value(tmp_path: Path, name: str) -> None:
    pipeline = make_pipeline(tmp_path)
    table = source(**{name: PASSED[name]})
    assert schema_problems(pipeline, table.schema) == []
    made = written(output_table(pipeline, [finished(row) for row in (2, 0, 1)], table))
    column = made.column(name).combine_chunks()
    assert column.type.equals(PASSED[name].type)
    assert column.equals(PASSED[name].take(pa.array([2, 0, 1]))) or (
        column.to_pylist() == PASSED[name].take(pa.array([2, 0, 1])).to_pylist()
    )


def test_text_that_is_not_utf8_passes_through_as_it_is(tmp_path: Path) -> None:
    broken = pa.array([b"\xff", b"ok", b"x"]).view(pa.string())
    made = output_table(make_pipeline(tmp_path), [finished(0)], source(raw=broken))
    assert made.column("raw").combine_chunks().view(pa.binary()).to_pylist() == [b"\xff"]


def test_awkward_column_names_pass_through(tmp_path: Path) -> None:
    names = ["a.b", "with space", "", "😀", "Ünïcode", 'quote"', "ID", "row", "a" * 1000]
    table = source(**{name: pa.array([1, 2, 3]) for name in names})
    pipeline = make_pipeline(tmp_path)
    assert schema_problems(pipeline, table.schema) == []
    made = written(output_table(pipeline, [finished(1)], table))
    assert all(made.column(name).to_pylist() == [2] for name in names)


def test_two_thousand_columns_pass_through(tmp_path: Path) -> None:
    table = source(**{f"c{n}": pa.array([n] * 3) for n in range(2000)})
    pipeline = make_pipeline(tmp_path)
    assert schema_problems(pipeline, table.schema) == []
    assert output_table(pipeline, [finished(1)], table).column("c1999").to_pylist() == [1999]


def test_an_id_column_of_another_name_stays_beside_the_id(tmp_path: Path) -> None:
    table = pa.table({"key": [7], "topic": ["a"]})
    pipeline = make_pipeline(tmp_path, {"input.id": "key"})
    assert output_schema(pipeline, table.schema).names[:4] == ["id", "sample", "key", "topic"]


@pytest.mark.parametrize(
    ("columns", "changes", "messages"),
    [
        (["id", "topic", "model"], {}, ["input.columns: the input has a column 'model'"]),
        (["id", "topic", "token_ids"], {}, ["input.columns: the input has a column 'token_ids'"]),
        (["id", "topic", "model"], {"input.columns": ["topic"]}, []),
        (["id", "topic"], {"input.id": None}, ["(or set input.id: id, if it names the rows)"]),
        (["id", "topic"], {"input.id": "topic"}, ["has a column 'id'"]),
        (["id", "topic", "answer"], {}, ["stages.1.name: found 'answer', which is a column"]),
        (["id", "topic", "answer"], {"input.columns": ["topic"]}, ["stages.1.name"]),
        (["id", "topic"], {"input.columns": ["topik"]}, ["did you mean 'topic'? expected one of"]),
        (["id", "topic"], {"input.columns": ["topic", "topic"]}, ["'topic' is named twice"]),
        (["id", "topic"], {"input.columns": []}, []),
    ],
)
def test_collisions_are_found_before_the_run(
    tmp_path: Path, columns: list[str], changes: dict[str, Any], messages: list[str]
) -> None:
    schema = pa.schema([(name, pa.string()) for name in columns])
    lines = schema_problems(make_pipeline(tmp_path, changes), schema)
    assert len(lines) == len(messages)
    assert all(message in line for line, message in zip(lines, messages, strict=True))


def test_a_column_that_parquet_cannot_hold_is_named(tmp_path: Path) -> None:
    schema = pa.schema(
        [
            ("id", pa.string()),
            ("ok", pa.int64()),
            ("bad", pa.struct([])),
            ("b", pa.list_(pa.struct([]))),
        ]
    )
    lines = schema_problems(make_pipeline(tmp_path), schema)
    assert [line.split(" of type")[0] for line in lines] == [
        "input.columns: column 'bad'",
        "input.columns: column 'b'",
    ]
    assert schema_problems(make_pipeline(tmp_path, {"input.columns": ["ok"]}), schema) == []


def test_the_error_table_has_its_schema_with_and_without_rows() -> None:
    assert error_table([]).schema.equals(ERROR_SCHEMA)
    row = ErrorRow("r", 1, "question", Reason.TEMPLATE_ERROR, "why", 2, "{}")
    table = error_table([row])
    assert table.schema.equals(ERROR_SCHEMA)
    assert table.to_pylist() == [
        {
            "id": "r",
            "sample": 1,
            "stage": "question",
            "reason": "template_error",
            "message": "why",
            "attempt": 2,
            "row": "{}",
        }
    ]


def reader_of(folder: Path, table: pa.Table, prompt: str, **changes: Any) -> Any:
    pq.write_table(table, folder / "topics.parquet")
    stages = [{"name": "s", "prompt": prompt}]
    keys = {key.replace("__", "."): value for key, value in changes.items()}
    pipeline = make_pipeline(folder, {"stages": stages, **keys})
    made = plan(pipeline)
    return RowReader(pipeline, made, compile_stages(pipeline.stages)).read(made.shards[0])


def test_rows_hold_what_is_passed_through_or_used_and_no_more(tmp_path: Path) -> None:
    table = source(used=[1, 2, 3], left=[4, 5, 6], passed=[7, 8, 9])
    rows = reader_of(tmp_path, table, "{{ used }}", input__columns=["passed"])
    assert rows.table.column_names == ["id", "used", "passed"]
    assert rows.values(1) == {"used": 2}
    assert rows.ids == ("r0", "r1", "r2")


def test_a_value_that_is_not_utf8_spoils_its_row_and_no_other(tmp_path: Path) -> None:
    table = source(raw=pa.array([b"\xff", b"ok", b"x"]).view(pa.string()))
    rows = reader_of(tmp_path, table, "{{ raw }}")
    with pytest.raises(RequestError) as caught:
        rows.values(0)
    assert caught.value.reason is Reason.INVALID_TEXT
    assert "column 'raw'" in caught.value.message
    assert rows.values(1) == {"raw": "ok"}
    assert json.loads(rows.row_json(0))["raw"].startswith("<column 'raw'")


def test_times_finer_than_microseconds_are_cut_for_templates_only(tmp_path: Path) -> None:
    at = pa.array([1_700_000_000_123_456_789] * 3, pa.timestamp("ns", "UTC"))
    rows = reader_of(
        tmp_path, source(at=at, took=pa.array([1001] * 3, pa.duration("ns"))), "{{ at }} {{ took }}"
    )
    values = rows.values(0)
    assert str(values["at"]) == "2023-11-14 22:13:20.123456+00:00"
    assert values["took"] == dt.timedelta(microseconds=1)
    assert rows.table.column("at").to_pylist()[0].value % 1000 == 789 or "pandas" not in sys.modules


def test_the_row_of_an_error_is_json(tmp_path: Path) -> None:
    table = source(
        d=[dt.date(2024, 1, 2), None, None],
        n=[[{"é": b"\xff"}], [], None],
        x=[float("nan"), 1.0, None],
    )
    rows = reader_of(tmp_path, table, "{{ topic }}")
    assert json.loads(rows.row_json(0))["topic"] == "a"
    assert json.loads(rows.row_json(0))["d"] == "2024-01-02"
    assert json.loads(rows.row_json(2)) == {
        "id": "r2",
        "topic": "c",
        "d": None,
        "n": None,
        "x": None,
    }
