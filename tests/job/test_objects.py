"""A task's two objects: put in order, won by one attempt, read back whole or refused by name."""

from __future__ import annotations

from pathlib import Path

import duckdb
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from eagle_batch.data.forms import Parquet
from eagle_batch.errors import LedgerError
from eagle_batch.job.objects import Objects, TornObjectError, sha256
from eagle_batch.job.store import Store, open_store
from eagle_batch.job.tasks import Lease, Task
from tests.job.support import QUICK, errors, identity, objects, put, rows

TASK = Task("part-00000", 0, 0, 4)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(str(tmp_path), QUICK)


def test_the_commit_describes_the_bytes_that_lie_there(store: Store) -> None:
    commit = put(store, identity(), TASK, bad=(2,))
    data, wrong = store.get("data/part-00000.parquet"), store.get("errors/part-00000.parquet")
    assert data is not None
    assert wrong is not None
    assert (commit.rows, commit.errors, commit.tokens) == (3, 1, 9)
    assert (commit.data_sha256, commit.data_bytes) == (sha256(data), len(data))
    assert (commit.errors_sha256, commit.errors_bytes) == (sha256(wrong), len(wrong))
    assert objects(store, identity()).settle(TASK) == commit


def test_the_metadata_of_the_data_object_states_both_counts(store: Store) -> None:
    put(store, identity(), TASK, bad=(2,))
    metadata = pq.read_schema(Path(store.root) / "data/part-00000.parquet").metadata
    stated = {name: metadata[f"eagle_batch.{name}".encode()] for name in ("rows", "errors")}
    assert stated == {"rows": b"3", "errors": b"1"}


def test_of_two_attempts_the_first_wins_and_the_second_reports_the_first(store: Store) -> None:
    first = put(store, identity(), TASK, attempt=1)
    assert put(store, identity(), TASK, attempt=2) == first


def test_the_data_object_carries_the_errors_object_where_no_reader_looks(store: Store) -> None:
    put(store, identity(), TASK, bad=(2,))
    path = Path(store.root) / "data/part-00000.parquet"
    errors = store.get("errors/part-00000.parquet")
    assert errors is not None
    assert errors in path.read_bytes()
    ids = ["0:0", "0:1", "0:3"]
    assert pq.read_table(path)["id"].to_pylist() == ids
    found = duckdb.sql(f"select id from '{path}' order by id")
    assert found is not None
    assert [row[0] for row in found.fetchall()] == ids
    assert pl.read_parquet(path)["id"].to_list() == ids
    assert pl.scan_parquet(path).select("id").collect()["id"].to_list() == ids
    assert pd.read_parquet(path)["id"].tolist() == ids


def test_whoever_finds_the_errors_object_missing_puts_it(store: Store) -> None:
    """The crash came after the data object and before the errors object."""
    first = put(store, identity(), TASK, attempt=1, bad=(1,))
    before = store.get("errors/part-00000.parquet")
    store.delete("errors/part-00000.parquet")
    assert put(store, identity(), TASK, attempt=2, bad=(3,)) == first
    assert store.get("errors/part-00000.parquet") == before


def test_a_data_object_whose_carried_errors_were_changed_is_refused(store: Store) -> None:
    put(store, identity(), TASK, bad=(1,))
    data = bytearray(store.get("data/part-00000.parquet") or b"")
    data[20] ^= 1
    store.put_replace("data/part-00000.parquet", bytes(data))
    with pytest.raises(LedgerError, match="the errors object that it carries was changed"):
        objects(store, identity()).settle(TASK)


def test_a_late_attempt_does_not_touch_the_errors_under_a_committed_object(store: Store) -> None:
    first = put(store, identity(), TASK, attempt=1, bad=(1,))
    assert put(store, identity(), TASK, attempt=2, bad=(3,)) == first
    assert objects(store, identity()).settle(TASK) == first


def test_the_late_parent_of_a_split_loses_the_race_and_its_rows_are_not_stored(
    store: Store,
) -> None:
    job = identity()
    lease = Lease(TASK, 2, "run1")
    closed = objects(store, job).put(
        lease, rows(TASK).slice(0, 0), errors(TASK), parts=TASK.split(2)
    )
    assert put(store, job, TASK, attempt=1) == closed
    assert closed.rows == 0
    assert closed.parts == TASK.split(2)


@pytest.mark.parametrize("cut", [0, 3, 100, -1])
def test_a_torn_object_is_called_torn(store: Store, cut: int) -> None:
    put(store, identity(), TASK)
    path = Path(store.root) / "data/part-00000.parquet"
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(TornObjectError, match=r"data/part-00000.parquet: not a whole Parquet"):
        objects(store, identity()).settle(TASK)


def test_a_parquet_file_of_another_program_is_refused(store: Store) -> None:
    put(store, identity(), TASK)
    pq.write_table(pa.table({"id": ["a"]}), Path(store.root) / "data/part-00000.parquet")
    with pytest.raises(LedgerError, match="not written by eagle-batch"):
        objects(store, identity()).settle(TASK)


@pytest.mark.parametrize(
    ("fingerprint", "task", "text"),
    [
        ("0" * 64, TASK, "written by another job"),
        ("f" * 64, Task("part-00000", 0, 0, 5), r"accounts for 4 \+ 0 rows, not 5"),
    ],
)
def test_an_object_that_does_not_fit_is_refused_with_the_reason(
    store: Store, fingerprint: str, task: Task, text: str
) -> None:
    put(store, identity(), TASK)
    with pytest.raises(LedgerError, match=text):
        Objects(store, fingerprint, Parquet(), 1).settle(task)


def test_an_object_under_another_key_is_refused(store: Store) -> None:
    put(store, identity(), TASK)
    data = store.get("data/part-00000.parquet")
    assert data is not None
    store.put_new("data/part-00001.parquet", data)
    with pytest.raises(LedgerError, match=r"part-00001.parquet: belongs to part-00000"):
        objects(store, identity()).settle(Task("part-00001", 1, 0, 4))


def test_compression_none_is_understood(store: Store) -> None:
    plain = Objects(store, "f" * 64, Parquet("none"), 1)
    assert plain.put(Lease(TASK, 1, "r"), rows(TASK), errors(TASK)).rows == 4
