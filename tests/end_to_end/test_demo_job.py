"""The demo job, as a newcomer runs it: whole, readable by everything, repeatable."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import duckdb
import pandas as pd
import polars as pl
import pytest

from tests.end_to_end.commands import DemoRun, eagle_batch, read, shards, texts

pytestmark = pytest.mark.slow


def with_pandas(pattern: str) -> list[dict]:
    frame = pd.concat(pd.read_parquet(path) for path in shards(Path(pattern).parent.parent))
    return frame.to_dict("records")


def with_datasets(pattern: str) -> list[dict]:
    import datasets

    return list(datasets.load_dataset("parquet", data_files=pattern, split="train"))


def with_duckdb(pattern: str) -> list[dict]:
    cursor = duckdb.connect().execute(f"select * from '{pattern}'")
    names = [column[0] for column in cursor.description]
    return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]


def with_polars(pattern: str) -> list[dict]:
    return pl.read_parquet(pattern).to_dicts()


def test_verify_proves_the_output_and_status_calls_it_complete(
    demo_run: DemoRun, tmp_path: Path
) -> None:
    proof = eagle_batch("verify", demo_run.output, cwd=tmp_path)
    assert proof.code == 0, proof.text
    status = eagle_batch("status", demo_run.output, cwd=tmp_path)
    assert status.code == 0, status.text
    assert "complete" in status.text


def test_every_input_row_comes_out_once_with_both_texts(demo_run: DemoRun) -> None:
    table = read(demo_run.output)
    assert table.num_rows == demo_run.rows
    assert len(set(table["id"].to_pylist())) == demo_run.rows
    assert {"topic", "field", "level", "angle", "question", "answer"} <= set(table.column_names)
    assert all(text.strip() for name in ("question", "answer") for text in table[name].to_pylist())


def test_speculation_took_part(demo_run: DemoRun) -> None:
    stages = [stage for row in read(demo_run.output)["generation"].to_pylist() for stage in row]
    tokens = sum(stage["completion_tokens"] for stage in stages)
    passes = sum(stage["target_passes"] for stage in stages)
    # How much is drafted is the controller's choice: a batch on a CPU may leave little to gain.
    assert sum(stage["accepted"] for stage in stages) > 0
    assert tokens > 1.02 * passes


def test_spans_cut_each_text_into_drafted_and_supplied_characters(demo_run: DemoRun) -> None:
    drafted = 0
    for row in read(demo_run.output).to_pylist():
        for item, stage in zip(row["spans"], row["generation"], strict=True):
            assert sum(item["characters"]) == len(row[item["stage"]])
            assert len(item["characters"]) == 2 * stage["target_passes"]
            drafted += sum(item["characters"][::2])
    assert drafted > 0


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("reader", [with_pandas, with_datasets, with_duckdb, with_polars])
def test_common_readers_see_the_same_rows(
    reader: Callable[[str], list[dict]],
    demo_run: DemoRun,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))
    rows = reader(str(demo_run.output / "data" / "*.parquet"))
    seen = {(row["id"], row["sample"]): (row["question"], row["answer"]) for row in rows}
    assert len(rows) == demo_run.rows
    assert seen == texts(demo_run.output, "question", "answer")
    passes = {row["id"]: row["generation"][0]["target_passes"] for row in rows}
    expected = read(demo_run.output).select(["id", "generation"]).to_pylist()
    assert passes == {row["id"]: row["generation"][0]["target_passes"] for row in expected}


def test_a_second_submit_finds_the_work_done(demo_run: DemoRun) -> None:
    before = {path: path.stat().st_mtime_ns for path in shards(demo_run.output)}
    outcome = demo_run.submit()
    assert outcome.code == 0, outcome.text
    assert {path: path.stat().st_mtime_ns for path in shards(demo_run.output)} == before


def test_plain_decoding_writes_the_same_text(demo_run: DemoRun, tmp_path: Path) -> None:
    plain = replace(demo_run, output=tmp_path / "plain")
    outcome = plain.submit("speculation.method=none", "speculation.head=null")
    assert outcome.code == 0, outcome.text
    assert texts(plain.output, "question", "answer") == texts(demo_run.output, "question", "answer")


def test_another_seed_is_refused_in_the_same_output(demo_run: DemoRun) -> None:
    outcome = demo_run.submit("seed=1")
    assert outcome.code == 2, outcome.text
    assert "seed" in outcome.text
