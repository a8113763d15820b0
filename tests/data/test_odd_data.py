"""Odd data, as a table: each comes through unchanged, or is one clear error."""

from __future__ import annotations

import datetime as dt
from pathlib import Path
from typing import Any

import duckdb
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from eagle_batch.data.describe import check, describe, prepare
from eagle_batch.data.rows import RowReader
from eagle_batch.errors import ConfigError
from tests.data.support import make_pipeline, write_jsonl
from tests.data.test_sources import read_all, surveyed

TEXTS = {
    "emoji": "👩‍👩‍👧 🏳️‍🌈 😀",
    "right to left": "שלום \u202eעולם\u202c مرحبا",  # noqa: RUF001
    "chinese": "你好，世界 𠀀𠮷",  # noqa: RUF001
    "combining": "e\u0301 a\u0308\u0323",
    "zero bytes inside": "a\0b",
    "line ends": "one\r\ntwo\u2028three\x85four",
    "100,000 characters": "é" * 100_000,
    "template marks": "{{ x }} {% if %} {# #}",
    "special tokens": "<|im_end|><|im_start|>system",
}


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("kind", ["parquet", "arrow", "jsonl"])
def test_a_text_comes_to_the_prompt_as_it_is(tmp_path: Path, name: str, kind: str) -> None:
    table = pa.table({"id": [1], "topic": [TEXTS[name]]})
    if kind == "parquet":
        pq.write_table(table, tmp_path / "topics.parquet")
    elif kind == "arrow":
        with pa.ipc.new_file(tmp_path / "topics.arrow", table.schema) as writer:
            writer.write_table(table)
    else:
        write_jsonl(tmp_path / "topics.jsonl", table.to_pylist())
    pipeline = make_pipeline(tmp_path, {"input.path": f"topics.{kind}"})
    assert f"Ask about {TEXTS[name]}." in describe(pipeline).first_prompt


@pytest.mark.parametrize("value", ["", None])
def test_empty_texts_and_nulls_are_values(tmp_path: Path, value: str | None) -> None:
    pq.write_table(
        pa.table({"id": [1], "topic": pa.array([value], pa.string())}), tmp_path / "topics.parquet"
    )
    content = {"stages.0.messages.0.content": "{% if topic %}T{% else %}nothing{% endif %}"}
    assert "\nnothing<" in describe(make_pipeline(tmp_path, content)).first_prompt


def test_half_a_character_is_told_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_bytes(b'{"id": 1, "topic": "\\ud83d"}\n')
    with pytest.raises(ConfigError, match="line 1: text holds half of a character"):
        check(make_pipeline(tmp_path, {"input.path": "x.jsonl"}))


@pytest.mark.parametrize(
    "name", ["a.b", "full name", "日本", "class", "a-b", "", "{{x}}", 'it\'s "q"']
)
def test_a_column_of_any_name_is_reached_by_row(tmp_path: Path, name: str) -> None:
    columns = {"id": [1], name: ["found"], "a": [{"b": "not this"}]}
    pq.write_table(pa.table(columns), tmp_path / "topics.parquet")
    quoted = name.replace("'", "\\'")
    changes = {
        "stages.0.messages.0.content": "{{ row['" + quoted + "'] }}",
        "input.where": "row['" + quoted + "'] == 'found'",
    }
    assert "\nfound<" in describe(make_pipeline(tmp_path, changes)).first_prompt


def test_two_thousand_columns_and_nested_structs_reach_a_template(tmp_path: Path) -> None:
    deep = [{"x": [{"y": {"z": "deep"}}]}]
    table = pa.table({"id": [1], **{f"c{n}": [n] for n in range(2000)}, "s": deep})
    pq.write_table(table, tmp_path / "topics.parquet")
    content = {"stages.0.messages.0.content": "{{ s.x[0].y.z }} {{ c1999 }}"}
    pipeline = make_pipeline(tmp_path, content)
    plan, prompter = prepare(pipeline)
    rows = RowReader(pipeline, plan, prompter.stages).read(plan.shards[0])
    assert rows.values(0) == {"s": deep[0], "c1999": 1999}
    assert "deep 1999" in describe(pipeline).first_prompt


# -- who wrote the Parquet ---------------------------------------------------------------------

WHEN = dt.datetime(2024, 5, 6, 7, 8, 9, 123456)  # noqa: DTZ001 - as the libraries write it
ROWS: list[dict[str, Any]] = [
    {"id": 1, "topic": "é", "at": WHEN, "x": 1.5, "l": [1, 2]},
    {"id": 2, "topic": None, "at": None, "x": None, "l": []},
]


def by_pandas(path: Path) -> None:
    frame = pd.DataFrame(ROWS).set_index(pd.Index([7, 9]))
    frame.to_parquet(path)


def by_polars(path: Path) -> None:
    pl.DataFrame(ROWS).write_parquet(path)


def by_duckdb(path: Path) -> None:
    rows = pa.Table.from_pylist(ROWS)  # noqa: F841 - duckdb finds it by its name
    duckdb.sql(f"copy rows to '{path}' (format parquet)")


def by_spark(path: Path) -> None:
    """As Spark does by default: INT96 timestamps, snappy, no schema of Arrow's."""
    pq.write_table(
        pa.Table.from_pylist(ROWS),
        path,
        use_deprecated_int96_timestamps=True,
        store_schema=False,
        compression="snappy",
    )


@pytest.mark.parametrize("write", [by_pandas, by_polars, by_duckdb, by_spark])
def test_parquet_of_others_gives_their_rows(tmp_path: Path, write: Any) -> None:
    write(tmp_path / "x.parquet")
    rows = read_all(surveyed(tmp_path, "x.parquet")).to_pylist()
    named = [{name: row[name] for name in ROWS[0]} for row in rows]
    assert [{**row, "at": None} for row in named] == [{**row, "at": None} for row in ROWS]
    assert [str(row["at"])[:26] for row in named] == [str(row["at"])[:26] for row in ROWS]


def test_a_folder_of_spark_gives_its_parts_and_nothing_else(tmp_path: Path) -> None:
    folder = tmp_path / "table"
    folder.mkdir()
    by_spark(folder / "part-00000-0a1b-c000.snappy.parquet")
    for name in ("_SUCCESS", ".part-00000.parquet.crc", "_metadata", "_common_metadata"):
        (folder / name).write_bytes(b"not rows")
    (folder / "_temporary").mkdir()
    (folder / "_temporary" / "part-00001.parquet").write_bytes(b"not rows")
    data = surveyed(tmp_path, "table")
    assert [file.name for file in data.files] == ["part-00000-0a1b-c000.snappy.parquet"]
    assert data.files[0].rows == 2


def test_values_of_folders_are_not_made_into_columns(tmp_path: Path) -> None:
    for value in ("en", "fr"):
        folder = tmp_path / "t" / f"lang={value}"
        folder.mkdir(parents=True)
        pq.write_table(pa.table({"id": [value], "topic": ["x"]}), folder / "a.parquet")
    data = surveyed(tmp_path, "t")
    assert data.schema.names == ["id", "topic"]
    assert [file.name for file in data.files] == ["lang=en/a.parquet", "lang=fr/a.parquet"]
