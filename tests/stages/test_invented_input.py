"""Rows that are made of nothing: so many, named by their number, whatever the job is."""

from __future__ import annotations

from pathlib import Path

import pytest

from eagle_batch.errors import ConfigError
from eagle_batch.job.verify import verify
from eagle_batch.pipeline import parse_pipeline, resolved
from tests.data.support import make_pipeline
from tests.job.fake_job import load_job, run_in_process, write_job
from tests.stages.oracle import Reading
from tests.stages.test_graph import rows, stage


def test_rows_come_out_by_number_and_the_job_can_be_proven(tmp_path: Path) -> None:
    stages = [stage("one", "number {{ id }}")]
    path = write_job(tmp_path, [], stages=stages, samples=2)
    job = load_job(path, "input={rows: 11}")
    run_in_process(job)
    made = {(row["id"], row["sample"]): row["one"] for row in rows(tmp_path)}
    wanted = {
        (str(n), sample): Reading(stages, str(n), sample, {"id": n}).run()["one"]
        for n in range(11)
        for sample in range(2)
    }
    assert made == wanted
    report = verify(str(tmp_path / "out"))
    assert report.ok
    assert report.not_compared == ""


def test_they_can_be_limited_and_sampled_like_any_input(tmp_path: Path) -> None:
    path = write_job(tmp_path, [], stages=[stage("one", "number {{ id }}")])
    job = load_job(path, "input={rows: 1000, where: 'id % 100 == 7', limit: 4}")
    run_in_process(job)
    assert [row["id"] for row in rows(tmp_path)][::2] == ["7", "107", "207", "307"]


def test_the_resolved_pipeline_reads_back_as_itself(tmp_path: Path) -> None:
    pipeline = make_pipeline(tmp_path, {"input": {"rows": 9}, "stages": [stage("one", "x")]})
    assert parse_pipeline(resolved(pipeline), "again") == pipeline
    assert pipeline.input.id == "id"


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ({"rows": 9, "path": "x.parquet"}, "found both; expected exactly one of path and rows"),
        ({"path": "rows://9"}, "found rows://; expected `rows` with their number"),
        ({"rows": 0}, "at least 1"),
        ({}, "is missing"),
    ],
)
def test_what_is_no_such_input_is_refused(
    source: dict[str, object], text: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=text):
        make_pipeline(tmp_path, {"input": source})
