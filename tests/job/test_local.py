"""Rows made in this process are those of a job; estimates are arithmetic over a sample."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow.parquet as pq
import pytest
import yaml
from click.testing import CliRunner

from eagle_batch.bench.estimate import RESAMPLES, estimate, interval
from eagle_batch.cli import main
from eagle_batch.engine.request import EngineSpec
from eagle_batch.engine.testing import save_tiny_target
from eagle_batch.job.local import LocalWorker, first_rows, rows_at
from eagle_batch.pipeline.draws import drawn
from tests.job.fake_engine import FakeEngine, build_fake
from tests.job.fake_job import expected_rows, load_job, run_in_process, write_job

TOPICS = [f"topic {n}" for n in range(11)]


def shown(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: row[name] for name in ("id", "sample", "topic", "one", "two")} for row in rows]


def test_a_local_worker_makes_the_rows_of_a_job_with_one_engine_and_leaves_nothing(
    tmp_path: Path,
) -> None:
    job = load_job(write_job(tmp_path, TOPICS))
    built: list[EngineSpec] = []

    def build(spec: EngineSpec) -> FakeEngine:
        built.append(spec)
        return build_fake(spec)

    worker = LocalWorker(build)
    made = worker.make(job.pipeline, job.plan, first_rows(job.plan, 3))
    assert shown(made.rows.to_pylist()) == expected_rows(TOPICS)[:6]
    again = worker.make(job.pipeline, job.plan, rows_at(job.plan, [1, 4, 10]))
    assert [row["id"] for row in again.rows.to_pylist()[::2]] == ["row1", "row4", "row10"]
    assert len(built) == 1
    assert not (tmp_path / "out").exists()
    memory = fsspec.filesystem("memory")
    assert [path for path in memory.ls("/") if "eagle-batch-" in str(path)] == []
    run_in_process(job)
    assert worker.engine is not None
    for row in pq.read_table(tmp_path / "out" / "data").to_pylist()[:4]:
        prompts = {item["stage"]: item["seed"] for item in row["generation"]}
        assert bytes(worker.engine.prompts[prompts["one"]][1:]).decode() == f"ask {row['topic']}"


def test_more_rows_than_there_are_is_all_of_them(tmp_path: Path) -> None:
    job = load_job(write_job(tmp_path, TOPICS))
    assert len(first_rows(job.plan, 99)) == 11
    assert drawn(5, 11, 11) == list(range(11))
    assert drawn(5, 10**12, 3) == drawn(5, 10**12, 3) != drawn(6, 10**12, 3)


def test_an_estimate_scales_the_sample_and_brackets_the_mean() -> None:
    found = estimate(1000, [10, 20, 30, 40], [5, 5, 5, 5], 50.0, workers=4, price_per_hour=2.0)
    assert found.tokens.value == 25_000
    assert found.prompt_tokens == type(found.tokens)(5000, 5000, 5000)
    assert 10_000 < found.tokens.low < 25_000 < found.tokens.high < 40_000
    assert found.worker_hours.value == pytest.approx(25_000 / 50 / 3600)
    assert found.hours.value == pytest.approx(found.worker_hours.value / 4)
    assert found.cost is not None
    assert found.cost.high == pytest.approx(found.tokens.high / 50 / 3600 * 2)
    whole = estimate(4, [10, 20, 30, 40], [5] * 4, 50.0, workers=1, price_per_hour=None)
    assert (whole.tokens.low, whole.tokens.high, whole.cost) == (100, 100, None)


def test_a_bootstrap_interval_holds_the_true_mean_about_as_often_as_it_says() -> None:
    random = np.random.default_rng(7)
    inside = 0
    for _ in range(200):
        found = interval(random.exponential(100.0, 50).tolist())
        inside += found.low <= 100.0 <= found.high
    assert 175 <= inside <= 199
    assert RESAMPLES >= 1000


@pytest.fixture
def pipeline(tmp_path: Path) -> Path:
    """A job on a tiny target; one of its rows is quarantined."""
    path = write_job(tmp_path, ["a", "b", "x" * 500, "d"])
    save_tiny_target(tmp_path / "model")
    document = yaml.safe_load(path.read_text())
    document["target"] = {"model": str(tmp_path / "model"), "context": 128}
    path.write_text(yaml.safe_dump(document))
    return path


def run(*arguments: str | Path) -> str:
    outcome = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert outcome.exit_code == 0, outcome.output
    return outcome.stdout


def test_preview_shows_prompts_beside_texts_and_writes_nothing(pipeline: Path) -> None:
    text = run("preview", pipeline, "-n", "3", "--device", "cpu")
    assert "row0  sample 0" in text
    assert "row1  sample 1" in text
    assert "ask a" in text
    assert " of a" in text  # the second stage's prompt, which holds the first one's text
    assert "row row2, sample 0: quarantined in one:" in text
    assert "prompt_too_long" in text
    assert not (pipeline.parent / "out").exists()


def test_estimate_says_what_the_job_then_takes(pipeline: Path) -> None:
    options = ("-n", "4", "--price-per-hour", "3", "--workers", "2", "--device", "cpu")
    found = json.loads(run("estimate", pipeline, *options, "--json").splitlines()[-1])
    assert (found["rows"], found["sampled"], found["quarantined"]) == (4, 4, 2)
    assert found["cost"]["value"] == pytest.approx(found["worker_hours"]["value"] * 3)
    text = run("estimate", pipeline, *options)
    assert "hours on 2 workers" in text
    assert "The sample is the whole input." in text
    assert "25% of the sample was quarantined, first for: prompt_too_long." in text
    assert not (pipeline.parent / "out").exists()
