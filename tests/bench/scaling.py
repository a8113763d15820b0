"""How throughput grows with the number of actors, and what a job costs beside its bare engine.

    python -m tests.bench.scaling actors 1,8,32    an engine of fixed latency, shards for each
    python -m tests.bench.scaling job              the demo target: a job's tokens/s by the mean
                                                   of its bare engine's before and after it

The first starts the clock when all actors are ready and gives each the same number of shards, so
that an efficiency of 1 means that the time does not grow. Alone on the machine, please.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from eagle_batch.data.describe import prepare
from eagle_batch.engine.build import build_engine
from eagle_batch.engine.request import Request, SamplingParams
from eagle_batch.job.driver import run_job
from eagle_batch.job.job import Job
from eagle_batch.job.pool import RayPool
from eagle_batch.job.reports import Started
from eagle_batch.job.resources import Resources
from eagle_batch.job.session import ray_session
from eagle_batch.job.spec import WorkerSpec, build_real_engine, pipeline_engine_spec
from eagle_batch.pipeline import Pipeline, Workers, load_pipeline
from tests.job.fake_engine import build_fake
from tests.job.fake_job import Watch, load_job, write_job

#: Seconds of one step of the engine of fixed latency: four seconds a shard.
STEP_S = "0.25"
ROWS_A_SHARD = 16
#: Of the job that is compared with its bare engine: about a minute on two cores.
ROWS = 96


class TogetherPool(RayPool):
    """Keeps the first workers back until all of them are ready."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.begun = 0.0
        self._early: list[Any] = []

    def poll(self, timeout: float) -> list[Any]:
        events = super().poll(timeout)
        if self.begun:
            return events
        self._early += events
        if sum(isinstance(event, Started) for event in self._early) < self.size:
            return []
        self.begun = time.monotonic()
        events, self._early = self._early, []
        return events


def seconds_of(actors: int, shards: int, folder: Path) -> float:
    """Return the seconds that so many actors take for so many shards each."""
    topics = ["a topic"] * (actors * shards * ROWS_A_SHARD)
    job = load_job(write_job(folder, topics, output={"rows_per_shard": ROWS_A_SHARD}))
    pools: list[TogetherPool] = []

    def make_pool(started: float) -> TogetherPool:
        spec = WorkerSpec(job.pipeline, job.plan, started, "cpu", 1, build_fake)
        pools.append(TogetherPool(spec, Resources(actors, 0.01, 0.0, "cpu", 1), 60.0))
        return pools[0]

    run_job(job, make_pool, Watch())
    return time.monotonic() - pools[0].begun


def measure_actors(counts: list[int], shards: int, step_s: str) -> dict[int, float]:
    """Return the efficiency by the number of actors, the first being the measure."""
    os.environ["FAKE_STEP_S"] = step_s
    found: dict[int, float] = {}
    with (
        tempfile.TemporaryDirectory() as folder,
        ray_session(Workers(count=max(counts), cpus=0.01, gpus=0), 1, lambda text: None),
    ):
        for count in counts:
            found[count] = seconds_of(count, shards, Path(folder) / str(count))
            print(f"{count} actors: {found[count]:.2f} s for {shards} shards each", flush=True)
    return {count: found[counts[0]] / seconds for count, seconds in found.items()}


def measure_job() -> dict[str, float]:
    """Return tokens/s of a job on one actor and of its engine alone, before and after it."""
    with tempfile.TemporaryDirectory() as folder:
        pipeline = load_pipeline(demo_pipeline(Path(folder)))
        bare(pipeline, rows=8)  # compiles what is missing and warms the processor up
        before = bare(pipeline)
        job = in_job(pipeline)
        after = bare(pipeline)
    return {"bare_before": before, "job": job, "bare_after": after}


def demo_pipeline(folder: Path) -> Path:
    path = write_job(
        folder,
        [f"number {n}" for n in range(ROWS)],
        target={"model": "demo:smollm2-135m-instruct", "context": 256},
        speculation={
            "method": "eagle",
            "head": "demo:smollm2-135m-instruct",
            "depth": 3,
            "nodes": 5,
        },
        samples=1,
        engine={"slots": 8},
        output={"rows_per_shard": 8},
    )
    document = load_pipeline(path).model_dump(mode="json")
    document["stages"] = [
        {
            "name": "one",
            "messages": [{"role": "user", "content": "Tell me of {{ topic }}."}],
            "sampling": {"max_tokens": 64, "ignore_eos": True},
        }
    ]
    path.write_text(json.dumps(document))
    return path


def bare(pipeline: Pipeline, rows: int = ROWS) -> float:
    engine = build_engine(pipeline_engine_spec(pipeline, device="cpu", threads=1))
    begun = time.monotonic()
    for n in range(rows):
        turn = [{"role": "user", "content": f"Tell me of number {n}."}]
        text = engine.tokenizer.apply_chat_template(
            turn, add_generation_prompt=True, tokenize=False
        )
        ids = tuple(engine.tokenizer.encode(text, add_special_tokens=False))
        engine.add(Request(str(n), ids, SamplingParams(max_tokens=64, ignore_eos=True)))
    while engine.has_work:
        engine.step()
    return engine.metrics().completion_tokens / (time.monotonic() - begun)


def in_job(pipeline: Pipeline) -> float:
    plan, prompter = prepare(pipeline)
    job = Job(pipeline, plan, prompter, {})
    with ray_session(pipeline.workers, 1, lambda text: None) as resources:

        def make_pool(started: float) -> RayPool:
            spec = WorkerSpec(pipeline, plan, started, "cpu", 1, build_real_engine)
            return RayPool(spec, resources, 600.0)

        metrics = run_job(job, make_pool, Watch()).metrics
    assert metrics is not None
    return float(metrics["tokens_per_s"])


def main(what: str, counts: str = "1,8,32", shards: str = "6", step_s: str = STEP_S) -> None:
    if what == "job":
        found: dict[Any, float] = dict(measure_job())
        found["share"] = 2 * found["job"] / (found["bare_before"] + found["bare_after"])
    else:
        numbers = [int(text) for text in counts.split(",")]
        found = dict(measure_actors(numbers, int(shards), step_s))
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
