"""Stages cost next to nothing: four of them against one stage of as many tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from eagle_batch.engine.request import Completion, EngineSpec, Request
from eagle_batch.job.spec import WorkerSpec
from eagle_batch.job.tasks import Lease, Task
from eagle_batch.job.worker import Worker
from tests.bench.stages import Setup, compare, some_rows
from tests.job.fake_engine import FakeEngine
from tests.job.fake_job import load_job, write_job

ROWS, SLOTS, TOKENS = 500, 16, 32


class Counting(FakeEngine):
    """An engine whose time is its steps, one token a row each: a slot that is empty wastes them."""

    steps = 0

    def __init__(self, spec: EngineSpec) -> None:
        super().__init__(spec)
        self._left: dict[str, int] = {}

    def add(self, request: Request) -> None:
        super().add(request)
        self._left[request.id] = request.params.max_tokens

    def step(self) -> list[Completion]:
        type(self).steps += 1
        while self._waiting and len(self._active) < self.slots:
            self._active.append((self._waiting.popleft(), 0))
        done = []
        for request, _ in self._active:
            self._left[request.id] -= 1
            if not self._left[request.id]:
                done.append(request)
        self._active = [pair for pair in self._active if self._left[pair[0].id]]
        return [_finished(request) for request in done]


def _finished(request: Request) -> Completion:
    tokens = request.params.max_tokens
    return Completion(request.id, tuple(range(tokens)), "text", "length", 1, tokens, 0, 0)


def steps(folder: Path, stages: list[dict[str, Any]]) -> int:
    """Return the engine's steps for all rows, given to the worker as a job gives them."""
    path = write_job(
        folder,
        [f"topic {n}" for n in range(ROWS)],
        stages=stages,
        samples=1,
        engine={"slots": SLOTS},
        output={"rows_per_shard": 50},
    )
    job = load_job(path)
    Counting.steps = 0
    worker = Worker(WorkerSpec(job.pipeline, job.plan, 0.0, "cpu", 1, Counting))
    waiting = [Lease(Task(s.key, s.index, 0, s.rows), 1) for s in job.plan.shards]
    held = 0
    while waiting or held:
        taken, waiting = waiting[: 2 - held], waiting[2 - held :]
        held += len(taken) - len(worker.pump(tuple(taken), 0.0).committed)
    return Counting.steps


def test_four_stages_are_as_fast_as_one_of_as_many_tokens(tmp_path: Path) -> None:
    def stage(name: str, prompt: str, tokens: int, **more: Any) -> dict[str, Any]:
        return {"name": name, "prompt": prompt, "sampling": {"max_tokens": tokens}, **more}

    four = [
        stage("question", "{{ topic }}", TOKENS),
        stage("answer", "{{ question }}", 3 * TOKENS, when="n >= 0"),
        stage("critique", "{{ answer }}", TOKENS, validators=[{"regex": "text"}]),
        stage("rewrite", "{{ critique }}", 3 * TOKENS, repeat={"at_most": 1}),
    ]
    one = [stage("all", "{{ topic }}", 8 * TOKENS)]
    least = ROWS * 8 * TOKENS / SLOTS
    made, plain = steps(tmp_path / "four", four), steps(tmp_path / "one", one)
    assert plain >= least
    assert plain / made >= 0.95


@pytest.mark.exhaustive
def test_stages_of_a_conversation_cost_little_on_the_demo_target(demo_target: Path) -> None:
    """Few rows of short texts, so that new turns weigh more than in a job."""
    assert demo_target.is_dir()
    setup = Setup(slots=4, tokens=(32, 96, 64, 96), method="none", threads=1)
    staged, plain = compare(some_rows(6), "conversation", setup)
    prompts, reused = staged.metrics.prompt_tokens, staged.metrics.cached_prompt_tokens
    turns = prompts - reused
    assert reused > 0.7 * prompts
    assert turns < 6 * 4 * 45, "more than the new turns was computed"
    # Far below what is measured, so that a busy machine does not fail it.
    assert plain.busy / staged.busy > 0.7
