"""Files in, rows out: every format gives the same rows, and a bad file is named."""

from __future__ import annotations

import datetime as dt
import decimal
import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.feather
import pyarrow.ipc
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle_batch.data.files import short_names
from eagle_batch.data.finding import find_files
from eagle_batch.data.sources import DataSet, read_rows, survey
from eagle_batch.errors import DataError
from tests.data.support import make_pipeline, topics, write_jsonl

Writer = Callable[[pa.Table, Path], None]


def write_parquet(table: pa.Table, path: Path) -> None:
    pq.write_table(table, path, row_group_size=4)


def write_ipc_file(table: pa.Table, path: Path) -> None:
    with pa.ipc.new_file(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=4)


def write_ipc_stream(table: pa.Table, path: Path) -> None:
    with pa.ipc.new_stream(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=4)


def write_feather(table: pa.Table, path: Path) -> None:
    pa.feather.write_feather(table, str(path), chunksize=4)


def write_lines(table: pa.Table, path: Path) -> None:
    write_jsonl(path, table.to_pylist())


def write_gzip(table: pa.Table, path: Path) -> None:
    half = table.num_rows // 2
    with path.open("wb") as file:  # two members, as `cat a.gz b.gz` makes
        for part in (table.slice(0, half), table.slice(half)):
            lines = "".join(json.dumps(row) + "\n" for row in part.to_pylist())
            file.write(gzip.compress(lines.encode()))


def write_zstd(table: pa.Table, path: Path) -> None:
    lines = "".join(json.dumps(row) + "\n" for row in table.to_pylist())
    with pa.CompressedOutputStream(str(path), "zstd") as file:
        file.write(lines.encode())


WRITERS: dict[str, Writer] = {
    "x.parquet": write_parquet,
    "x.arrow": write_ipc_file,
    "stream.arrow": write_ipc_stream,
    "x.feather": write_feather,
    "x.jsonl": write_lines,
    "x.jsonl.gz": write_gzip,
    "x.jsonl.zst": write_zstd,
}


def surveyed(folder: Path, path: Any, **changes: Any) -> DataSet:
    keys = {key.replace("__", "."): value for key, value in changes.items()}
    return survey(make_pipeline(folder, {"input.path": path, "output.rows_per_shard": 3, **keys}))


def read_all(data: DataSet, columns: list[str] | None = None) -> pa.Table:
    names = data.schema.names if columns is None else columns
    tables = [
        read_rows(file, index, data.schema, names)
        for file in data.files
        for index in range(len(file.groups))
    ]
    return pa.concat_tables(tables)


@pytest.mark.parametrize("name", WRITERS)
def test_every_format_gives_the_same_rows_and_columns(tmp_path: Path, name: str) -> None:
    table = topics(10).append_column("a b.c", pa.array([[n, None] for n in range(10)]))
    WRITERS[name](table, tmp_path / name)
    data = surveyed(tmp_path, name)
    assert data.schema.equals(table.schema)
    assert data.files[0].rows == 10
    assert read_all(data).to_pylist() == table.to_pylist()
    some = read_all(data, ["a b.c", "id"])
    assert some.column_names == ["a b.c", "id"]
    assert some.to_pylist() == table.select(["a b.c", "id"]).to_pylist()


@pytest.mark.parametrize("name", ["x.parquet", "x.arrow", "stream.arrow", "x.feather"])
def test_types_come_through_unchanged(tmp_path: Path, name: str) -> None:
    table = pa.table(
        {
            "large": pa.array(["é", None], pa.large_string()),
            "word": pa.array(["a", "b"]).dictionary_encode(),
            "price": pa.array([decimal.Decimal("1.50"), None], pa.decimal128(9, 2)),
            "at": pa.array([1, 2], pa.timestamp("ns", "Europe/Berlin")),
            "deep": pa.array([[{"x": [1], "y": {"z": "😀"}}], []]),
            "raw": pa.array([b"\xff", b""], pa.binary()),
            "half": pa.array([1.5, 2.5], pa.float16()),
            "nothing": pa.nulls(2),
        }
    )
    WRITERS[name](table, tmp_path / name)
    data = surveyed(tmp_path, name)
    back = read_all(data)
    assert back.schema.equals(table.schema)
    assert back.equals(table)


def test_a_column_whose_name_is_a_path_is_not_taken_for_a_field_of_a_struct(tmp_path: Path) -> None:
    table = pa.table({"a.b": [1], "a": [{"b": 2, "c": 3}], "": ["empty name"]})
    write_parquet(table, tmp_path / "x.parquet")
    data = surveyed(tmp_path, "x.parquet")
    for names in (["a.b"], ["a"], ["a", "a.b"], [""]):
        assert read_all(data, names).equals(table.select(names))


def test_two_thousand_columns_are_read_by_name(tmp_path: Path) -> None:
    table = pa.table({f"column {n}": [n] for n in range(2000)})
    write_parquet(table, tmp_path / "x.parquet")
    assert read_all(surveyed(tmp_path, "x.parquet"), ["column 1999"]).to_pylist() == [
        {"column 1999": 1999}
    ]


JSON_ROWS = st.lists(
    st.fixed_dictionaries(
        {},
        optional={
            "text": st.none() | st.text(st.characters(codec="utf-8")),
            "n": st.none() | st.integers(-(2**63), 2**63 - 1),
            "x": st.none() | st.floats(allow_nan=False, allow_infinity=False),
            "b": st.none() | st.booleans(),
            "l": st.none() | st.lists(st.none() | st.text(st.characters(codec="utf-8"))),
            "s": st.none()
            | st.fixed_dictionaries(
                {"k": st.none() | st.integers(-5, 5)}, optional={"é": st.text("ab")}
            ),
        },
    ),
    max_size=12,
)


@given(rows=JSON_ROWS, ascii_only=st.booleans())
@settings(deadline=None)
def test_json_lines_come_back_as_they_were_written(
    tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, Any]], ascii_only: bool
) -> None:
    """The oracle is Arrow's own conversion from Python objects."""
    folder = tmp_path_factory.mktemp("jsonl")
    lines = [json.dumps(row, ensure_ascii=ascii_only) for row in rows]
    (folder / "x.jsonl").write_text("\n".join(lines), encoding="utf-8", newline="")
    data = surveyed(folder, "x.jsonl")
    expected = pa.Table.from_pylist(rows, schema=data.schema)
    assert data.files[0].rows == len(rows) if data.files else rows == []
    if rows:
        assert read_all(data).equals(expected)
    assert set(data.schema.names) == {name for row in rows for name in row}


def test_json_lines_are_read_in_blocks_of_whole_shards(tmp_path: Path) -> None:
    rows = [{"id": n, "text": "é" * (n % 50)} for n in range(5000)]
    write_jsonl(tmp_path / "x.jsonl", rows)
    data = surveyed(tmp_path, "x.jsonl", output__rows_per_shard=100)
    sizes = [group.rows for group in data.files[0].groups]
    assert sizes == [1100, 1100, 1100, 1100, 600]
    assert read_all(data).to_pylist() == rows
    last = read_rows(data.files[0], 4, data.schema, ["id"])
    assert last.column(0).to_pylist() == list(range(4400, 5000))


@pytest.mark.parametrize("name", ["x.jsonl", "x.jsonl.gz", "x.jsonl.zst"])
@pytest.mark.parametrize("store", ["local", "memory"])
def test_a_block_in_the_middle_is_read_alone(tmp_path: Path, name: str, store: str) -> None:
    table = topics(3000)
    WRITERS[name](table, tmp_path / name)
    path = name
    if store == "memory":
        path = f"memory://blocks/{name}"
        fsspec.filesystem("memory").pipe_file(f"/blocks/{name}", (tmp_path / name).read_bytes())
    data = surveyed(tmp_path, path, output__rows_per_shard=1024)
    middle = read_rows(data.files[0], 1, data.schema, ["topic", "id"])
    assert middle.equals(table.slice(1024, 1024).select(["topic", "id"]))


def test_blank_lines_windows_line_ends_and_a_byte_order_mark_are_no_rows(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_bytes(
        b'\xef\xbb\xbf{"a": 1}\r\n\r\n   \n{"a": "\\u2028\\n"}\r\n'.replace(b'"\\u2028\\n"', b"2")
    )
    assert read_all(surveyed(tmp_path, "x.jsonl")).to_pylist() == [{"a": 1}, {"a": 2}]


def test_a_line_separator_inside_text_does_not_end_the_line(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "x.jsonl", [{"a": "one\u2028two\u0085three"}])
    assert read_all(surveyed(tmp_path, "x.jsonl")).to_pylist() == [{"a": "one\u2028two\u0085three"}]


def test_dates_in_json_stay_text(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "x.jsonl", [{"a": "2024-01-01T00:00:00Z"}])
    assert read_all(surveyed(tmp_path, "x.jsonl")).to_pylist() == [{"a": "2024-01-01T00:00:00Z"}]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"a": }', "line 2: not JSON"),
        (b'{"a": 1', "line 2: not JSON"),
        (b"[1]", "line 2: found a list; expected one JSON object on each line"),
        (b"5", "line 2: found 5; expected one JSON object"),
        (b'{"a": "x"}', "line 2: 'a': found text where earlier rows hold whole number"),
        (b'{"a": {"b": 1}}', "line 2: 'a': found object where earlier rows hold whole number"),
        (b'{"a": NaN}', "line 2: found NaN, which JSON does not have"),
        (b'{"a": 1e999}', "line 2: 'a': the number is too large"),
        (b'{"a": 9223372036854775808}', "line 2: 'a': the whole number does not fit 64 bits"),
        (b'{"a": 1, "a": 2}', "line 2: the key 'a' is written twice"),
        (b'{"b": "\\ud83d"}', "line 2: text holds half of a character"),
        (b'{"b": "\xff"}', "line 2: byte 7 is not UTF-8"),
        (b'{"b": ' + b"[" * 5000 + b"]" * 5000 + b"}", "line 2: nested too deeply"),
        (b'{"b": ' + b"[" * 50 + b"]" * 50 + b"}", "line 2: 'b': nested more than 32 levels"),
        (b'{"a": ' + b"9" * 5000 + b"}", "line 2: "),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: bytes, message: str) -> None:
    (tmp_path / "x.jsonl").write_bytes(b'{"a": 1}\n' + line + b'\n{"a": 3}\n')
    with pytest.raises(DataError) as caught:
        surveyed(tmp_path, "x.jsonl")
    assert f"{tmp_path}/x.jsonl: {message}" in str(caught.value)


def test_at_most_five_bad_lines_are_listed(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text("oops\n" * 100)
    with pytest.raises(DataError) as caught:
        surveyed(tmp_path, "x.jsonl")
    assert len(caught.value.problems) == 5


def test_globs_lists_and_folders_name_files_in_a_fixed_order_and_once(tmp_path: Path) -> None:
    for name in ("b/2.parquet", "b/10.parquet", "a/1.parquet", "a/notes.txt", "b/_tmp.parquet"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        write_parquet(topics(), path) if path.suffix == ".parquet" else path.write_text("x")

    def found(*patterns: str) -> list[str]:
        names = [f"{tmp_path}/{pattern}" for pattern in patterns]
        return [
            Path(file.path).relative_to(tmp_path).as_posix() for file in find_files(names, "auto")
        ]

    assert found("b/*.parquet") == ["b/10.parquet", "b/2.parquet", "b/_tmp.parquet"]
    assert found("b", "a") == ["b/10.parquet", "b/2.parquet", "a/1.parquet"]
    assert found("**/1*.parquet") == ["a/1.parquet", "b/10.parquet"]
    assert found("b/2.parquet", "b/*.parquet")[0] == "b/2.parquet"
    assert len(found("b/2.parquet", "b/*.parquet")) == 3


def test_a_name_with_glob_characters_is_found_as_it_is(tmp_path: Path) -> None:
    write_parquet(topics(), tmp_path / "run[1]*.parquet")
    assert surveyed(tmp_path, "run[1]*.parquet").files[0].rows == 3


def test_names_are_base_names_unless_two_are_alike() -> None:
    assert short_names(["/x/a.parquet", "/y/b.parquet"]) == ("a.parquet", "b.parquet")
    assert short_names(["/r/x/a.parquet", "/r/y/a.parquet"]) == ("x/a.parquet", "y/a.parquet")
    assert short_names(["s3://b/x/a", "s3://b/a"]) == ("x/a", "a")
    assert short_names(["/x/only.parquet"]) == ("only.parquet",)


def test_a_store_is_read_through_fsspec(tmp_path: Path) -> None:
    fs = fsspec.filesystem("memory")
    write_parquet(topics(), tmp_path / "x.parquet")
    write_gzip(topics(), tmp_path / "y.jsonl.gz")
    for name in ("x.parquet", "y.jsonl.gz"):
        fs.pipe_file(f"/sources/{name}", (tmp_path / name).read_bytes())
    data = surveyed(tmp_path, ["memory://sources/*.parquet", "memory://sources/y.jsonl.gz"])
    assert [file.path for file in data.files] == [
        "memory:///sources/x.parquet",
        "memory:///sources/y.jsonl.gz",
    ]
    assert read_all(data).to_pylist() == topics().to_pylist() * 2


def test_files_agree_on_columns_whatever_their_order_and_a_null_column_fits(tmp_path: Path) -> None:
    write_parquet(pa.table({"a": [1], "b": pa.nulls(1)}), tmp_path / "1.parquet")
    write_parquet(pa.table({"b": ["x"], "a": [2]}), tmp_path / "2.parquet")
    data = surveyed(tmp_path, "?.parquet")
    assert data.schema == pa.schema([("a", pa.int64()), ("b", pa.string())])
    assert read_all(data).to_pylist() == [{"a": 1, "b": None}, {"a": 2, "b": "x"}]


def test_inferred_types_of_json_files_widen(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "1.jsonl", [{"a": 1, "s": {"x": 1}}])
    write_jsonl(tmp_path / "2.jsonl", [{"a": 2.5, "b": "new", "s": {"y": "z"}}])
    data = surveyed(tmp_path, "?.jsonl")
    assert read_all(data).to_pylist() == [
        {"a": 1.0, "b": None, "s": {"x": 1, "y": None}},
        {"a": 2.5, "b": "new", "s": {"x": None, "y": "z"}},
    ]


def test_a_disagreement_names_both_files_and_the_column(tmp_path: Path) -> None:
    write_parquet(pa.table({"a": [1], "b": [1]}), tmp_path / "1.parquet")
    write_parquet(pa.table({"a": ["x"]}), tmp_path / "2.parquet")
    with pytest.raises(DataError) as caught:
        surveyed(tmp_path, "?.parquet")
    one, two = f"{tmp_path}/1.parquet", f"{tmp_path}/2.parquet"
    assert caught.value.problems == (
        f"{two}: column 'a' is string, but int64 in {one}; expected the same type in every file",
        f"{two}: has no column 'b', which {one} has; expected the same columns in every file",
    )


def test_files_beyond_the_limit_are_not_opened(tmp_path: Path) -> None:
    write_parquet(topics(3), tmp_path / "1.parquet")
    (tmp_path / "2.parquet").write_text("not a parquet file")
    assert len(surveyed(tmp_path, "?.parquet", input__limit=3).files) == 1
    with pytest.raises(DataError, match=r"2\.parquet"):
        surveyed(tmp_path, "?.parquet", input__limit=4)


def test_a_file_that_changed_after_planning_is_refused(tmp_path: Path) -> None:
    write_parquet(topics(3), tmp_path / "1.parquet")
    data = surveyed(tmp_path, "1.parquet")
    write_parquet(topics(2), tmp_path / "1.parquet")
    with pytest.raises(DataError, match="3 were planned; the file changed"):
        read_all(data)
    (tmp_path / "1.parquet").unlink()
    with pytest.raises(DataError, match=r"1\.parquet: no such file"):
        read_all(data)


@pytest.mark.parametrize("name", ["x.arrow", "stream.arrow"])
def test_rows_outlive_a_file_that_is_cut_short(tmp_path: Path, name: str) -> None:
    """Rows that lay in a mapped file would take the whole process down with a bus error."""
    table = pa.table({"id": range(4), "word": pa.array(["a", "b"] * 2).dictionary_encode()})
    WRITERS[name](table, tmp_path / name)
    rows = read_all(surveyed(tmp_path, name))
    os.truncate(tmp_path / name, 0)
    assert rows.equals(table)


def test_the_tag_of_a_small_file_is_its_content_not_its_time(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"a": 1}\n')
    first = find_files([str(path)], "auto")[0].tag
    path.touch()
    later = dt.datetime(2001, 1, 1, tzinfo=dt.UTC).timestamp()
    os.utime(path, (later, later))
    assert find_files([str(path)], "auto")[0].tag == first
    path.write_text('{"a": 2}\n')
    assert find_files([str(path)], "auto")[0].tag != first
