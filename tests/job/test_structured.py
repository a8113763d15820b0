"""A job with structured output, on a tiny real engine: typed columns, and rows that do not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from eagle_batch.data.describe import check
from eagle_batch.data.plan import make_plan
from eagle_batch.data.sources import survey
from eagle_batch.engine.testing import save_tiny_target
from eagle_batch.job.spec import WorkerSpec, build_real_engine
from eagle_batch.job.tasks import Lease, Task
from eagle_batch.job.worker import Worker
from eagle_batch.pipeline import load_pipeline

PERSON = {
    "type": "object",
    "properties": {
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 2},
    },
    "required": ["age", "tags"],
}


def stage(name: str, structured: dict[str, Any] | None, **sampling: Any) -> dict[str, Any]:
    return {
        "name": name,
        "prompt": "{{ id }}: ",
        "structured": structured,
        "sampling": {"temperature": 1.0, "max_tokens": 64} | sampling,
    }


def run(folder: Path, *stages: dict[str, Any]) -> tuple[pa.Table, list[dict[str, Any]]]:
    save_tiny_target(folder / "model")
    pq.write_table(pa.table({"id": ["a", "b", "c"]}), folder / "rows.parquet")
    data = {
        "name": "people",
        "input": {"path": "rows.parquet", "id": "id"},
        "target": {"model": "./model", "context": 256},
        "stages": list(stages),
        "output": {"path": str(folder / "out")},
    }
    (folder / "p.yaml").write_text(yaml.safe_dump(data))
    pipeline = load_pipeline(folder / "p.yaml")
    assert check(pipeline) == ()
    plan = make_plan(pipeline, survey(pipeline))
    worker = Worker(WorkerSpec(pipeline, plan, 0.0, "cpu", 1, build_real_engine))
    report = worker.pump((Lease(Task("part-00000", 0, 0, 3), 1, "run"),), 300.0)
    assert len(report.committed) == 1
    errors = pq.read_table(folder / "out/errors/part-00000.parquet").to_pylist()
    return pq.read_table(folder / "out/data/part-00000.parquet"), errors


def test_a_schema_becomes_nested_columns_and_other_structures_stay_text(tmp_path: Path) -> None:
    rows, errors = run(
        tmp_path,
        stage("person", {"json_schema": PERSON}),
        stage("mood", {"choice": ["good", "bad"]}),
        stage("code", {"regex": "[A-Z]{2}-[0-9]{3}"}, bad_words=["7"]),
    )
    assert errors == []
    kind = pa.struct([("age", pa.int64()), ("tags", pa.list_(pa.string()))])
    assert rows.schema.field("person").type == kind
    for row in rows.to_pylist():
        assert 0 <= row["person"]["age"] <= 99
        assert set(row["person"]["tags"]) <= {"red", "green"}
        assert row["mood"] in {"good", "bad"}
        assert row["code"][2] == "-"
        assert "7" not in row["code"]


def test_a_text_that_does_not_fit_its_structure_is_its_rows_fault(tmp_path: Path) -> None:
    rows, errors = run(tmp_path, stage("code", {"regex": "[A-Z]{20}"}, max_tokens=9))
    assert rows.num_rows == 0
    assert [(row["id"], row["stage"], row["reason"]) for row in errors] == [
        (id_, "code", "incomplete_structure") for id_ in "abc"
    ]
    assert errors[0]["message"] == "the text ended by length after 9 tokens, inside its structure"


def test_rows_that_may_say_nothing_are_quarantined(tmp_path: Path) -> None:
    _, errors = run(tmp_path, stage("code", {"choice": ["ab"]}, bad_words=["b"]))
    assert {row["reason"] for row in errors} == {"nothing_allowed"}
    assert len(errors) == 3
