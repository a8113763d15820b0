"""Whatever is killed in the middle, the finished data set is the one of an undisturbed run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.end_to_end.commands import RunningJob, eagle_batch, shards, texts
from tests.end_to_end.conftest import PROMPTS

pytestmark = pytest.mark.slow


def start(pipeline: Path, folder: Path) -> RunningJob:
    output = folder / "output"
    return RunningJob(pipeline, "--output", output, output=output, log=folder / "log.txt")


def assert_equal_to(undisturbed: Path, output: Path) -> None:
    proof = eagle_batch("verify", output, cwd=output.parent)
    assert proof.code == 0, proof.text
    expected = texts(undisturbed, "text", "token_ids")
    assert len(expected) == PROMPTS
    assert texts(output, "text", "token_ids") == expected


def test_a_killed_actor_costs_no_row_and_changes_no_text(
    prompts_pipeline: Path, undisturbed: Path, tmp_path: Path
) -> None:
    with start(prompts_pipeline, tmp_path) as job:
        job.wait_for_shards(2)
        actors = job.actors()
        assert len(actors) == 2
        actors[0].kill()
        assert len(shards(job.output)) < PROMPTS // 4, "it was killed too late to matter"
        outcome = job.finish()
    assert outcome.code == 0, outcome.text
    assert "was lost" in outcome.text
    assert_equal_to(undisturbed, job.output)


def test_a_killed_driver_s_job_is_resumed_by_the_same_command(
    prompts_pipeline: Path, undisturbed: Path, tmp_path: Path
) -> None:
    with start(prompts_pipeline, tmp_path) as job:
        job.wait_for_shards(3)
        job.kill_driver()
    done = {path: path.stat().st_mtime_ns for path in shards(job.output)}
    assert 3 <= len(done) < PROMPTS // 4

    outcome = eagle_batch("submit", prompts_pipeline, "--output", job.output, cwd=tmp_path)
    assert outcome.code == 0, outcome.text
    after = {path: path.stat().st_mtime_ns for path in shards(job.output)}
    assert {path: after[path] for path in done} == done
    assert_equal_to(undisturbed, job.output)
