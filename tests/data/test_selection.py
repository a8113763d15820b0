"""Filter, sample, shuffle and limit: which rows a plan takes, against plain Python."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle_batch.data.describe import check
from eagle_batch.data.plan import Plan, plan
from eagle_batch.data.rows import RowReader
from eagle_batch.data.selection import row_hashes
from eagle_batch.data.templates import compile_stages
from eagle_batch.errors import ConfigError, DataError
from eagle_batch.pipeline import Pipeline
from tests.data.support import make_pipeline

ROWS = 200
GROUP = 30


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    table = pa.table(
        {
            "id": [f"r{n}" for n in range(ROWS)],
            "topic": [f"topic {n}" for n in range(ROWS)],
            "n": pa.array([None if n % 50 == 7 else n for n in range(ROWS)]),
            "a b.c": [n % 3 for n in range(ROWS)],
        }
    )
    pq.write_table(table.slice(0, 120), tmp_path / "1.parquet", row_group_size=GROUP)
    pq.write_table(table.slice(120), tmp_path / "2.parquet", row_group_size=GROUP)
    return tmp_path


def planned(folder: Path, **fields: Any) -> tuple[Pipeline, Plan]:
    changes = {f"input.{name}": value for name, value in fields.items()}
    pipeline = make_pipeline(
        folder, {"input.path": "?.parquet", "output.rows_per_shard": 8, **changes}
    )
    return pipeline, plan(pipeline)


def taken(pipeline: Pipeline, made: Plan) -> list[tuple[str, str]]:
    """Return (id, topic) of every row, shard by shard, as workers read them."""
    reader = RowReader(pipeline, made, compile_stages(pipeline.stages))
    found: list[tuple[str, str]] = []
    for shard in made.shards:
        rows = reader.read(shard)
        halves = [reader.read(shard, 0, 1), reader.read(shard, 1)]  # as a shard that was split
        assert [*halves[0].ids, *halves[1].ids] == list(rows.ids)
        found += zip(rows.ids, rows.table["topic"].to_pylist(), strict=True)
    assert len(found) == made.rows
    return found


def ids(pipeline: Pipeline, made: Plan) -> list[str]:
    return [name for name, _ in taken(pipeline, made)]


def test_a_filter_takes_the_rows_for_which_it_holds_and_counts_the_others(folder: Path) -> None:
    where = "n is not none and n % 2 == 0 and row['a b.c'] != 1"
    pipeline, made = planned(folder, where=where)
    expected = [n for n in range(ROWS) if n % 50 != 7 and n % 2 == 0 and n % 3 != 1]
    assert taken(pipeline, made) == [(f"r{n}", f"topic {n}") for n in expected]
    counts = made.counts
    assert (counts.seen, counts.filtered, counts.unsampled) == (ROWS, ROWS - len(expected), 0)
    assert Plan.from_json(made.to_json()) == made


def test_derived_ids_name_the_place_in_the_file_whatever_was_filtered(folder: Path) -> None:
    pipeline, made = planned(
        folder, id=None, where="topic in ['topic 3', 'topic 150']", columns=["topic"]
    )
    assert ids(pipeline, made) == ["1.parquet:3", "2.parquet:30"]


@pytest.mark.parametrize("sample", [1, 37, 200, 999, 0.3])
def test_a_sample_is_a_part_of_the_rows_by_the_seed(folder: Path, sample: float) -> None:
    pipeline, made = planned(folder, sample=sample)
    found = ids(pipeline, made)
    numbers = [int(name[1:]) for name in found]
    assert numbers == sorted(set(numbers))
    if isinstance(sample, int):
        assert len(found) == min(sample, ROWS)
    else:
        assert 35 <= len(found) <= 85
    assert made.counts.unsampled == ROWS - len(found)
    assert ids(*planned(folder, sample=sample)) == found


def test_a_sample_of_n_rows_is_the_n_smallest_hashes(folder: Path) -> None:
    where = "n is not none"
    found = ids(*planned(folder, sample=20, where=where))
    hashes = {
        f"r{n}": int(row_hashes(0, "sample", name, np.array([n - first]))[0])
        for name, first, rows in (("1.parquet", 0, range(120)), ("2.parquet", 120, range(120, 200)))
        for n in rows
        if n % 50 != 7
    }
    assert set(found) == set(sorted(hashes, key=hashes.__getitem__)[:20])


def test_a_shuffle_is_another_order_of_the_same_rows_and_the_seed_decides(folder: Path) -> None:
    straight = taken(*planned(folder))
    pipeline, made = planned(folder, shuffle=True)
    shuffled = taken(pipeline, made)
    assert shuffled != straight
    assert sorted(shuffled) == sorted(straight)
    assert taken(*planned(folder, shuffle=True)) == shuffled
    other = make_pipeline(folder, {"input.path": "?.parquet", "seed": 1, "input.shuffle": True})
    assert taken(other, plan(other)) != shuffled


def test_filter_sample_shuffle_and_limit_follow_each_other(folder: Path) -> None:
    where, whole = "n is not none", dict[str, Any]()
    for step in ({"where": where}, {"sample": 60}, {"shuffle": True}, {"limit": 25}):
        before = set(ids(*planned(folder, **whole)))
        whole |= step
        pipeline, made = planned(folder, **whole)
        assert set(ids(pipeline, made)) <= before
    assert made.rows == 25
    assert (made.counts.seen, made.counts.filtered) == (ROWS, 4)
    assert (made.counts.unsampled, made.unplanned) == (ROWS - 4 - 60, 35)


@given(seed=st.integers(0, 2**63 - 1), first=st.integers(0, 2**40))
@settings(deadline=None)
def test_hashes_are_those_of_split_mix_64_in_plain_python(seed: int, first: int) -> None:
    import hashlib

    base = int.from_bytes(
        hashlib.blake2b(f"{seed}\x1fsample\x1fx".encode(), digest_size=8).digest(), "little"
    )
    mask, expected = 2**64 - 1, []
    for n in range(first, first + 3):
        x = ((n + 1) * 0x9E3779B97F4A7C15 + base) & mask
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
        expected.append(x ^ (x >> 31))
    found = row_hashes(seed, "sample", "x", np.arange(first, first + 3, dtype=np.int64))
    assert found.tolist() == expected


def test_hashes_fall_evenly() -> None:
    hashes = row_hashes(0, "sample", "x.parquet", np.arange(64_000, dtype=np.int64))
    counts = Counter((hashes >> np.uint64(58)).tolist())
    assert len(counts) == 64
    assert all(850 < count < 1150 for count in counts.values())


def test_ids_need_be_unique_among_the_rows_taken_alone(tmp_path: Path) -> None:
    table = pa.table({"id": ["a", "a", None, "b"], "topic": ["1", "2", "3", "4"]})
    pq.write_table(table, tmp_path / "1.parquet")
    assert ids(*planned(tmp_path, where="topic in ['1', '4']")) == ["a", "b"]
    with pytest.raises(DataError, match="more than one row with the id 'a'"):
        planned(tmp_path, where="topic != '3'")
    with pytest.raises(DataError, match=r"is null, first in .* row 2"):
        planned(tmp_path, where="topic in ['3', '4']")


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("topic ==", "input.where: not a valid expression: "),
        ("tpoic == 'x'", "input.where: found 'tpoic', which is no column; did you mean 'topic'?"),
        ("row['x y'] == 1", "input.where: found 'x y', which is no column"),
        ("n > 1", "1.parquet, row 7: TypeError: "),
        ("topic.__class__.__mro__", "SecurityError"),
        ("n in range(99999999)|list", "OverflowError"),
        ("1 == 1", "input.where: names no column, so that it holds for every row or for none"),
        ("n == 1000", "input.where: 'n == 1000' holds for none of 200 rows"),
    ],
)
def test_a_filter_that_cannot_be_is_told_before_anything_runs(
    folder: Path, where: str, message: str
) -> None:
    pipeline = make_pipeline(folder, {"input.path": "?.parquet", "input.where": where})
    with pytest.raises(ConfigError) as caught:
        check(pipeline)
    assert message in str(caught.value)


def test_an_input_that_changes_what_a_filter_takes_is_noticed(folder: Path) -> None:
    pipeline, made = planned(folder, where="n is not none")
    table = pq.read_table(folder / "2.parquet")
    changed = table.set_column(2, "n", pa.nulls(len(table), pa.int64()))
    pq.write_table(changed, folder / "2.parquet", row_group_size=GROUP)
    with pytest.raises(
        DataError, match=r"input\.where takes 0 rows, 30 were planned; the file changed"
    ):
        taken(pipeline, made)
