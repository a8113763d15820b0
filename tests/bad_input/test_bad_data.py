"""Damaged input files: one error that names the file, whatever the damage."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eagle_batch.data.describe import describe
from eagle_batch.errors import ConfigError
from tests.data.support import make_pipeline, topics


def parquet_bytes() -> bytes:
    sink = io.BytesIO()
    pq.write_table(topics(50), sink)
    return sink.getvalue()


def ipc_bytes(opened: Callable[..., pa.ipc.RecordBatchStreamWriter]) -> bytes:
    sink = io.BytesIO()
    with opened(sink, topics(1).schema) as writer:
        writer.write_table(topics(50), max_chunksize=10)
    return sink.getvalue()


GOOD = {
    "x.parquet": parquet_bytes(),
    "x.arrow": ipc_bytes(pa.ipc.new_file),
    "stream.arrow": ipc_bytes(pa.ipc.new_stream),
    "x.jsonl": b'{"id": 1, "topic": "a"}\n{"id": 2, "topic": "b"}\n',
}


def told(folder: Path, name: str, content: bytes) -> str:
    (folder / name).write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        describe(make_pipeline(folder, {"input.path": name}))
    return str(caught.value)


@pytest.mark.parametrize("name", GOOD)
def test_an_empty_file_is_told(tmp_path: Path, name: str) -> None:
    assert f"{tmp_path}/{name}" in told(tmp_path, name, b"")


@pytest.mark.parametrize("name", ["x.parquet", "x.arrow", "stream.arrow"])
def test_a_truncated_file_is_told(tmp_path: Path, name: str) -> None:
    text = told(tmp_path, name, GOOD[name][: len(GOOD[name]) * 2 // 3])
    assert f"{tmp_path}/{name}: cannot be read: " in text


@pytest.mark.parametrize("name", ["x.parquet", "x.arrow", "stream.arrow", "x.jsonl"])
def test_another_format_under_this_name_is_told(tmp_path: Path, name: str) -> None:
    for other, content in GOOD.items():
        if {other, name} != {"x.arrow", "stream.arrow"} and other != name:
            assert f"{tmp_path}/{name}: " in told(tmp_path, name, content)


@pytest.mark.parametrize("name", ["x.jsonl.gz", "x.jsonl.zst", "x.jsonl.bz2"])
def test_a_file_that_is_not_compressed_as_named_is_told(tmp_path: Path, name: str) -> None:
    assert f"{tmp_path}/{name}: cannot be read: " in told(tmp_path, name, GOOD["x.jsonl"])


@pytest.mark.parametrize("name", ["x.parquet", "x.arrow", "stream.arrow"])
def test_a_file_without_rows_is_told(tmp_path: Path, name: str) -> None:
    empty = topics(0)
    if name == "x.parquet":
        pq.write_table(empty, tmp_path / name)
    else:
        opened = pa.ipc.new_file if name == "x.arrow" else pa.ipc.new_stream
        with opened(tmp_path / name, empty.schema) as writer:
            writer.write_table(empty)
    text = told(tmp_path, name, (tmp_path / name).read_bytes())
    assert text == f"input.path: {tmp_path}/{name}: holds no rows; expected at least one"


def test_columns_of_the_same_name_are_told(tmp_path: Path) -> None:
    table = pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["id", "id"])
    pq.write_table(table, tmp_path / "x.parquet")
    text = told(tmp_path, "x.parquet", (tmp_path / "x.parquet").read_bytes())
    assert "x.parquet: more than one column is named 'id'" in text


@pytest.mark.parametrize(
    "kind",
    [pa.float64(), pa.bool_(), pa.binary(), pa.list_(pa.int64()), pa.timestamp("s"), pa.null()],
)
def test_an_id_column_of_another_type_is_told(tmp_path: Path, kind: pa.DataType) -> None:
    table = pa.table({"id": pa.nulls(2, kind), "topic": ["a", "b"]})
    pq.write_table(table, tmp_path / "x.parquet")
    text = told(tmp_path, "x.parquet", (tmp_path / "x.parquet").read_bytes())
    assert text.startswith("input.id: column 'id' is ")
    assert text.endswith("; expected whole numbers or text, or null to derive ids")


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.jsonl")
    with pytest.raises(ConfigError, match="is not a regular file"):
        describe(make_pipeline(tmp_path, {"input.path": "x.jsonl"}))


@given(st.sampled_from(sorted(GOOD)), st.data())
@settings(
    deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_any_damage_is_survived_or_told(tmp_path: Path, name: str, data: st.DataObject) -> None:
    content = bytearray(GOOD[name])
    place = data.draw(st.integers(0, len(content) - 1))
    junk = data.draw(st.binary(min_size=1, max_size=8))
    content[place : place + len(junk)] = junk
    (tmp_path / name).write_bytes(content)
    with suppress(ConfigError):
        describe(make_pipeline(tmp_path, {"input.path": name}))
