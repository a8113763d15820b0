"""The pipelines that show stages at work, on the demo target: short, whole, and proven."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from eagle_batch.engine.request import EngineSpec
from eagle_batch.job.job import JobResult
from eagle_batch.job.spec import EngineLike, build_real_engine
from eagle_batch.job.verify import verify
from tests.job.fake_job import load_job, read_errors, run_in_process

pytestmark = pytest.mark.slow


@functools.cache
def build(spec: EngineSpec) -> EngineLike:
    """One engine for all of them: they name the same target, head and slots."""
    return build_real_engine(spec)


def run(repository: Path, folder: Path, name: str, *overrides: str) -> JobResult:
    path = repository / "pipelines" / f"{name}.yaml"
    job = load_job(path, f"output.path={folder / 'out'}", "engine.threads=1", *overrides)
    result = run_in_process(job, build=build)
    report = verify(str(folder / "out"))
    assert report.findings == ()
    assert report.ok
    return result


def rows(folder: Path) -> list[dict[str, Any]]:
    files = sorted((folder / "out/data").glob("*.parquet"))
    return [row for file in files for row in pq.read_table(file).to_pylist()]


def test_magpie_invents_questions_and_answers_them(
    repository: Path, tmp_path: Path, demo_target: Path
) -> None:
    result = run(
        repository,
        tmp_path,
        "magpie",
        "input.rows=4",
        "stages.0.sampling.max_tokens=20",
        "stages.1.sampling.max_tokens=6",
    )
    made = rows(tmp_path)
    assert result.rows == len(made)
    assert result.rows + result.dropped == 4
    assert made, read_errors(tmp_path / "out")
    for row in made:
        assert 12 <= len(row["question"]) <= 240
        assert "<|im" not in row["question"]
        kept = [item["stage"] for item in row["generation"] if item["kept"]]
        assert kept == ["question", "answer"]


def test_distill_math_keeps_what_most_candidates_say(
    repository: Path, tmp_path: Path, demo_target: Path
) -> None:
    limits = ("input.limit=2", "stages.0.sampling.max_tokens=24")
    result = run(repository, tmp_path, "distill_math", *limits)
    made = rows(tmp_path)
    assert made
    assert result.rows + result.dropped == 2
    for row in made:
        items = row["generation"]
        assert {item["candidate"] for item in items} == {0, 1, 2, 3}
        [kept] = [item for item in items if item["kept"]]
        assert 0.25 <= kept["score"] <= 1
        assert row["solution"]


def test_qa_from_docs_writes_typed_columns(
    repository: Path, tmp_path: Path, demo_target: Path
) -> None:
    result = run(repository, tmp_path, "qa_from_docs", "input.limit=2", "stages.0.retry=1")
    made = rows(tmp_path)
    assert result.rows == len(made)
    for row in made:
        assert set(row["qa"]) == {"question", "answer", "level"}
        assert row["qa"]["level"] in {"easy", "medium", "hard"}
        assert "?" in row["qa"]["question"] + row["qa"]["answer"]


def test_requests_of_a_batch_are_answered_with_their_own_sampling(
    repository: Path, tmp_path: Path, demo_target: Path
) -> None:
    result = run(repository, tmp_path, "openai_batch")
    assert (result.rows, result.quarantined) == (4, 0)
    made = {row["id"]: row for row in rows(tmp_path)}
    limits = {"capital": 24, "rain": 40, "poem": 32, "more": 12}
    tokens = {name: row["generation"][0]["completion_tokens"] for name, row in made.items()}
    assert all(1 <= tokens[name] <= most for name, most in limits.items())
    assert "Paris" in made["capital"]["response"]
    assert "\n\n" not in made["poem"]["response"]


def test_documents_are_rephrased_but_for_those_that_are_too_short(
    repository: Path, tmp_path: Path, demo_target: Path
) -> None:
    result = run(repository, tmp_path, "rephrase", "stages.1.sampling.max_tokens=12")
    made = rows(tmp_path)
    assert (result.rows, result.quarantined) == (4, 0)
    assert "https://example.org/short" not in {row["id"] for row in made}
    assert verify(str(tmp_path / "out")).account == (
        "5 rows in the input: 4 planned, 1 dropped by input.where"
    )
    begun = [f"# {row['title'].strip()}" for row in made]
    texts = [row["textbook"] for row in made]
    assert any(texts)
    assert not any(text.startswith(start) for text, start in zip(texts, begun, strict=True))


@pytest.mark.exhaustive
def test_the_best_of_several_is_the_same_with_and_without_a_draft(
    repository: Path, tmp_path: Path, demo_target: Path
) -> None:
    """Log-probabilities differ in their last digits between batches; the choice must not."""
    best = ("stages.0.keep=best", "stages.0.vote=null", "stages.0.sampling.max_tokens=24")
    plain = ("speculation.method=none", "speculation.head=null", "engine.slots=3")
    run(repository, tmp_path / "drafted", "distill_math", "input.limit=3", *best)
    run(repository, tmp_path / "plain", "distill_math", "input.limit=3", *best, *plain)
    texts = [[row["solution"] for row in rows(tmp_path / name)] for name in ("drafted", "plain")]
    assert texts[0] == texts[1]
    assert texts[0]
