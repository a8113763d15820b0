"""The plan: every row in exactly one shard, ids that name one row each, JSON there and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle_batch.data.groups import Group
from eagle_batch.data.plan import Plan, ShardSpec, lay_out, plan
from eagle_batch.data.rows import RowReader
from eagle_batch.data.sources import InputFile
from eagle_batch.data.templates import compile_stages
from eagle_batch.errors import DataError
from eagle_batch.pipeline import Pipeline
from tests.data.support import make_pipeline, topics, write_jsonl


def file_of(sizes: list[int], name: str = "x") -> InputFile:
    return InputFile(f"/{name}", name, "parquet", 1, "t", tuple(Group(size) for size in sizes))


def planned(folder: Path, ids: pa.Array, **changes: Any) -> tuple[Pipeline, Plan]:
    table = pa.table({"id": ids, "topic": ["t"] * len(ids)})
    pq.write_table(table, folder / "topics.parquet", row_group_size=4)
    keys = {key.replace("__", "."): value for key, value in changes.items()}
    pipeline = make_pipeline(folder, {"output.rows_per_shard": 3, **keys})
    return pipeline, plan(pipeline)


def all_ids(pipeline: Pipeline, made: Plan) -> list[str]:
    reader = RowReader(pipeline, made, compile_stages(pipeline.stages))
    return [name for shard in made.shards for name in reader.read(shard).ids]


@given(
    st.lists(st.lists(st.integers(0, 40), max_size=4), max_size=4),
    st.integers(1, 17),
    st.none() | st.integers(1, 200),
)
@settings(deadline=None)
def test_every_row_up_to_the_limit_is_in_exactly_one_shard(
    sizes: list[list[int]], rows_per_shard: int, limit: int | None
) -> None:
    files = [file_of(groups) for groups in sizes]
    shards = lay_out(files, rows_per_shard, limit)
    covered = [
        (shard.file, shard.row_group, row)
        for shard in shards
        for row in range(shard.start, shard.stop)
    ]
    every = [
        (number, index, row)
        for number, file in enumerate(files)
        for index, group in enumerate(file.groups)
        for row in range(group.rows)
    ]
    assert covered == every[:limit]
    assert all(1 <= shard.rows <= rows_per_shard for shard in shards)
    assert [shard.index for shard in shards] == list(range(len(shards)))
    for shard in shards:
        earlier = sum(group.rows for group in files[shard.file].groups[: shard.row_group])
        assert shard.group_row == earlier


def test_shards_have_keys_that_sort_as_they_count() -> None:
    assert lay_out([file_of([5, 4])], 3) == (
        ShardSpec(0, "part-00000", 0, 0, 0, 3, 0),
        ShardSpec(1, "part-00001", 0, 0, 3, 5, 0),
        ShardSpec(2, "part-00002", 0, 1, 0, 3, 5),
        ShardSpec(3, "part-00003", 0, 1, 3, 4, 5),
    )
    keys = [shard.key for shard in lay_out([file_of([100_001])], 1)]
    assert keys == sorted(keys)
    assert keys[-1] == "part-100000"


def test_a_plan_survives_json_and_keeps_the_schema(tmp_path: Path) -> None:
    _, made = planned(tmp_path, pa.array(["é", "b"]).dictionary_encode())
    again = Plan.from_json(made.to_json())
    assert again == made
    assert again.schema.equals(
        pa.schema([("id", pa.dictionary(pa.int32(), pa.string())), ("topic", pa.string())])
    )


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"files": 3}', '{"files": [], "shards": [{}]}'])
def test_text_that_is_no_plan_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"plan|Expecting"):
        Plan.from_json(text)


def test_planning_twice_gives_the_same_plan(tmp_path: Path) -> None:
    assert planned(tmp_path, pa.array(range(10))) == planned(tmp_path, pa.array(range(10)))


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        (pa.array([3, -1], pa.int64()), ["3", "-1"]),
        (pa.array([2**64 - 1, 0], pa.uint64()), ["18446744073709551615", "0"]),
        (pa.array(["é 😀", ""]), ["é 😀", ""]),
        (pa.array(["a", "b"], pa.large_string()), ["a", "b"]),
        (pa.array(["a", "b"]).dictionary_encode(), ["a", "b"]),
        (pa.array([7, 8]).dictionary_encode(), ["7", "8"]),
    ],
)
def test_ids_become_text(tmp_path: Path, ids: pa.Array, expected: list[str]) -> None:
    pipeline, made = planned(tmp_path, ids)
    assert all_ids(pipeline, made) == expected


def test_derived_ids_are_file_name_and_row_number_in_the_file(tmp_path: Path) -> None:
    pipeline, made = planned(tmp_path, pa.array(range(9)), input__id=None)
    assert all_ids(pipeline, made) == [f"topics.parquet:{row}" for row in range(9)]


def test_derived_ids_hold_the_folder_where_two_files_share_a_name(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        pq.write_table(topics(2), tmp_path / name / "x.parquet")
    pipeline = make_pipeline(
        tmp_path, {"input.path": ["a/x.parquet", "b/x.parquet"], "input.id": None}
    )
    assert all_ids(pipeline, plan(pipeline)) == [
        "a/x.parquet:0",
        "a/x.parquet:1",
        "b/x.parquet:0",
        "b/x.parquet:1",
    ]


def test_repeated_ids_are_refused_across_groups_showing_the_first_five(tmp_path: Path) -> None:
    ids = [f"r{n}" for n in range(7)] + ["single"] + [f"r{n}" for n in range(7)]
    with pytest.raises(DataError) as caught:
        planned(tmp_path, pa.array(ids))
    assert str(caught.value) == (
        "input.id: column 'id' names more than one row with the id "
        "'r0', 'r1', 'r2', 'r3', 'r4' and more; expected unique ids"
    )


def test_ids_are_compared_as_the_text_they_become(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "1.jsonl", [{"id": "1", "topic": "t"}])
    write_jsonl(tmp_path / "2.jsonl", [{"id": "1", "topic": "t"}])
    with pytest.raises(DataError, match="more than one row with the id '1'"):
        plan(make_pipeline(tmp_path, {"input.path": "?.jsonl"}))


def test_a_null_id_names_file_and_row(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        planned(tmp_path, pa.array([0, 1, 2, 3, 4, None, None]))
    assert str(caught.value) == (
        f"input.id: column 'id' is null, first in {tmp_path}/topics.parquet row 5; "
        "expected an id in every row"
    )


def test_ids_beyond_the_limit_do_not_matter(tmp_path: Path) -> None:
    pipeline, made = planned(tmp_path, pa.array([0, 1, 2, 3, 4, None, 0]), input__limit=5)
    assert (made.rows, all_ids(pipeline, made)) == (5, ["0", "1", "2", "3", "4"])


def test_an_id_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    broken = pa.array([b"\xff"]).view(pa.string())
    with pytest.raises(DataError, match="'id' holds an id that is not UTF-8"):
        planned(tmp_path, broken)


def test_a_shard_is_read_in_parts_with_the_same_ids(tmp_path: Path) -> None:
    for changes in ({}, {"input__id": None}):
        pipeline, made = planned(tmp_path, pa.array(range(9)), **changes)
        reader = RowReader(pipeline, made, compile_stages(pipeline.stages))
        for shard in made.shards:
            whole = reader.read(shard)
            parts = [reader.read(shard, row, row + 1) for row in range(shard.rows)]
            assert whole.ids == tuple(name for part in parts for name in part.ids)
            assert whole.table.equals(pa.concat_tables([part.table for part in parts]))


def test_the_fingerprint_follows_the_content_not_the_place(tmp_path: Path) -> None:
    prints = []
    for folder, count in (("a", 3), ("b", 3), ("c", 4)):
        (tmp_path / folder).mkdir()
        changes = {"target.model": "owner/model"}
        pq.write_table(topics(count), tmp_path / folder / "topics.parquet")
        prints.append(plan(make_pipeline(tmp_path / folder, changes)).fingerprint)
    assert prints[0] == prints[1] != prints[2]
