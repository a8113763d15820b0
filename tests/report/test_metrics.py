"""The final table is made of the document that a job wrote."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from eagle_batch.report.metrics import JobMetrics, metrics_table
from tests.job.fake_job import load_job, run_in_process, write_job


@pytest.fixture
def metrics(tmp_path: Path) -> JobMetrics:
    result = run_in_process(load_job(write_job(tmp_path, ["a", "bb", "ccc"])))
    assert result.metrics is not None
    return JobMetrics.from_document(result.metrics)


def test_the_document_of_a_job_is_read(metrics: JobMetrics) -> None:
    assert (metrics.state, metrics.rows, metrics.units, metrics.tokens) == ("complete", 6, 6, 30)
    assert metrics.acceptance_at == (0.5,)
    assert metrics.tokens_per_s == pytest.approx(30 / metrics.generating_seconds, rel=0.05)


def test_the_table_shows_speed_acceptance_and_where_the_time_went(metrics: JobMetrics) -> None:
    out = io.StringIO()
    Console(file=out, width=100).print(metrics_table(metrics))
    text = out.getvalue()
    for part in ("6 of 6", "output tokens/s", "50%", "draft 33%, verify 67%", "rows/s"):
        assert part in text


def test_another_document_is_refused() -> None:
    with pytest.raises(KeyError):
        JobMetrics.from_document({"state": "complete"})
