"""Undisturbed runs, which the other tests read and compare with."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.end_to_end.commands import DemoRun, Outcome, eagle_batch

DEMO_ROWS = 24
PROMPTS = 64

PROMPTS_PIPELINE = """
name: prompts
seed: 11
input: {{path: {topics}, id: id, limit: {rows}}}
target: {{model: "demo:smollm2-135m-instruct"}}
speculation: {{head: "demo:smollm2-135m-instruct", depth: 2, width: 2, nodes: 3}}
stages:
  - name: text
    messages: [{{role: user, content: "In one sentence: {{{{ topic }}}}."}}]
    sampling: {{temperature: 0.7, top_p: 0.95, max_tokens: 24}}
engine: {{slots: 4, threads: 1}}
workers: {{count: 2}}
output: {{path: unset, rows_per_shard: 4, token_ids: true}}
"""


@pytest.fixture(scope="session")
def demo_run(
    repository: Path, demo_target: Path, tmp_path_factory: pytest.TempPathFactory
) -> DemoRun:
    """The demo job on a few rows, with short texts."""
    folder = tmp_path_factory.mktemp("demo")
    run = DemoRun(repository / "pipelines" / "synth.yaml", folder / "synth", DEMO_ROWS)
    outcome = run.submit()
    assert outcome.code == 0, outcome.text
    return run


@pytest.fixture(scope="session")
def prompts_pipeline(
    repository: Path, demo_target: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A pipeline of one stage over the tests' own prompts, for two workers."""
    path = tmp_path_factory.mktemp("prompts") / "prompts.yaml"
    topics = repository / "pipelines" / "data" / "topics.parquet"
    path.write_text(PROMPTS_PIPELINE.format(topics=topics, rows=PROMPTS))
    return path


@pytest.fixture(scope="session")
def undisturbed(prompts_pipeline: Path) -> Path:
    """The output of the prompts' pipeline, with nothing in its way."""
    output = prompts_pipeline.parent / "undisturbed"
    outcome: Outcome = eagle_batch(
        "submit", prompts_pipeline, "--output", output, cwd=output.parent
    )
    assert outcome.code == 0, outcome.text
    return output
