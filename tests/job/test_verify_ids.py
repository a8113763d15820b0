"""Ids are proved too: output ids and error ids are the input's ids, each sample once."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from eagle_batch.data.forms import Parquet
from eagle_batch.job.objects import Objects, find
from eagle_batch.job.row_ids import SeenRows
from eagle_batch.job.store import Store, open_store
from eagle_batch.job.tasks import Task
from eagle_batch.job.verify import VerifyReport, verify
from tests.job.fake_engine import LONG
from tests.job.fake_job import load_job, run_in_process, write_job

TOPICS = [LONG if n == 5 else f"topic {n}" for n in range(12)]
ONE = "data/part-00001.parquet"


@pytest.fixture
def output(tmp_path: Path) -> Store:
    """A complete job whose row 5 is quarantined."""
    run_in_process(load_job(write_job(tmp_path, TOPICS, limits={"max_error_rate": 0.9})))
    return open_store(str(tmp_path / "out"))


def forge(store: Store, key: str, change: Callable[[pa.Table], pa.Table]) -> None:
    """Change rows and put everything right that speaks of them: footer, checksums, record."""
    lies = find(store, Parquet(), key)
    assert lies is not None
    assert lies.errors is not None
    store.put_replace(key, Parquet().write(change(lies.table), lies.footer.said(), lies.errors))
    job = json.loads(store.get("_job/pipeline.json") or b"")
    commit = Objects(store, job["fingerprint"], Parquet(), 2).settle(Task("part-00001", 1, 0, 4))
    [records] = store.list("_job/commits")
    lines = [json.loads(line) for line in (store.get(records) or b"").splitlines()]
    lines = [asdict(commit) if line["key"] == "part-00001" else line for line in lines]
    store.put_replace(records, "\n".join(map(json.dumps, lines)).encode())


def rename(table: pa.Table, old: str, new: str) -> pa.Table:
    ids = [new if name == old else name for name in table.column("id").to_pylist()]
    return table.set_column(0, table.schema.field(0), [pa.array(ids)])


def found(report: VerifyReport) -> list[tuple[str, str]]:
    return [(finding.kind, finding.where) for finding in report.findings]


def test_a_whole_output_is_compared_with_its_input(output: Store) -> None:
    report = verify(output)
    assert (report.ok, report.not_compared, report.findings) == (True, "", ())
    assert (report.rows_in, report.rows_out, report.quarantined) == (24, 22, 2)


def test_a_row_that_became_another_is_found_though_every_count_and_checksum_agrees(
    output: Store,
) -> None:
    forge(output, ONE, lambda table: rename(table, "row6", "row99"))
    report = verify(output)
    assert found(report) == [("lost", ONE), ("invented", ONE)]
    assert "id 'row6', sample 0, id 'row6', sample 1: neither" in report.findings[0].message
    assert "id 'row99', sample 0" in report.findings[1].message


def test_a_row_in_output_and_errors_is_found(output: Store) -> None:
    forge(output, ONE, lambda table: rename(table, "row6", "row5"))
    assert found(verify(output)) == [("lost", ONE), ("duplicate", ONE)]


def test_derived_ids_are_proved_without_reading_the_input_s_rows(tmp_path: Path) -> None:
    path = write_job(tmp_path, TOPICS[:4])
    document = yaml.safe_load(path.read_text())
    document["input"] |= {"id": None, "columns": ["topic", "n"]}
    path.write_text(yaml.safe_dump(document))
    run_in_process(load_job(path))
    store = open_store(str(tmp_path / "out"))
    assert verify(store).ok
    [key] = store.list("data")
    lies = find(store, Parquet(), key)
    assert lies is not None
    renamed = rename(lies.table, "in.parquet:2", "in.parquet:9")
    store.put_replace(key, Parquet().write(renamed, lies.footer.said()))
    assert {("lost", key), ("invented", key)} <= set(found(verify(store)))


@pytest.mark.parametrize(
    ("harm", "why"),
    [
        (lambda path: path.unlink(), "no file has this name"),
        (
            lambda path: pq.write_table(pq.read_table(path).slice(1), path),
            "changed since the job was planned",
        ),
    ],
)
def test_an_input_that_is_gone_or_another_is_said_and_the_rest_is_proved(
    output: Store, tmp_path: Path, harm: Callable[[Path], Any], why: str
) -> None:
    harm(tmp_path / "in.parquet")
    report = verify(output)
    assert report.ok
    assert why in report.not_compared
    forge(output, ONE, lambda table: rename(table, "row6", "row0"))
    report = verify(output)
    assert found(report) == [("duplicate", ONE)] * 2
    assert "id 'row0', sample 0 is also in data/part-00000.parquet" in report.findings[0].message


def test_many_rows_are_remembered_in_a_few_bytes_each() -> None:
    seen = SeenRows()
    tracemalloc.start()
    try:
        for shard in range(10):
            rows = ((f"row{shard * 5000 + n // 2}", n % 2) for n in range(10000))
            seen.add(f"data/{shard}", rows)
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 10 * 100_000
    assert list(seen.duplicates(lambda key: [])) == []


@pytest.fixture
def selected(tmp_path: Path) -> Store:
    """A complete job over a filtered, sampled, shuffled and limited input."""
    path = write_job(tmp_path, [f"topic {n}" for n in range(40)])
    table = pq.read_table(tmp_path / "in.parquet")
    pq.write_table(table, tmp_path / "in.parquet", row_group_size=10)
    document = yaml.safe_load(path.read_text())
    document["input"] |= {
        "where": "n % 4 != 1 and n < 29",
        "sample": 15,
        "shuffle": True,
        "limit": 9,
    }
    path.write_text(yaml.safe_dump(document))
    run_in_process(load_job(path))
    return open_store(str(tmp_path / "out"))


def test_a_selection_is_proved_from_the_input(selected: Store) -> None:
    report = verify(selected)
    assert (report.ok, report.not_compared, report.rows_in) == (True, "", 18)
    assert report.account == (
        "40 rows in the input: 9 planned, 18 dropped by input.where, 7 left out by input.sample, "
        "6 beyond input.limit"
    )


@pytest.mark.parametrize("group", range(4))
def test_a_plan_that_hides_rows_behind_a_filter_is_found(selected: Store, group: int) -> None:
    """Also in a group that gives no rows at all, which no shard would look at."""
    document = json.loads(selected.get("_job/plan.json") or b"")
    [file] = document["plan"]["files"]
    file["groups"][group]["chosen"] += 1
    document["plan"]["counts"]["unsampled"] -= 1
    selected.put_replace("_job/plan.json", json.dumps(document).encode())
    assert ("mismatch", "_job/plan.json") in found(verify(selected))
