"""A pipeline on Ray: checked, planned, and run by a driver in this process."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path

from eagle_batch.data.describe import prepare
from eagle_batch.data.plan import Plan
from eagle_batch.errors import ConfigError
from eagle_batch.job.about import about_run
from eagle_batch.job.adapter import MakeTrainer
from eagle_batch.job.driver import run_job
from eagle_batch.job.job import Job, JobResult, SizedPool, Watcher
from eagle_batch.job.logs import logged_to
from eagle_batch.job.reports import HeadTrainer
from eagle_batch.job.spec import EngineFactory, WorkerSpec, build_real_engine
from eagle_batch.pipeline import Pipeline
from eagle_batch.pipeline.modules import folders


def run_on_ray(
    pipeline: Pipeline,
    watcher: Watcher,
    command: list[str],
    *,
    dashboard: bool = False,
    log: Path | None = None,
    build: EngineFactory = build_real_engine,
) -> JobResult:
    """Run a pipeline, or what is left of it, on Ray actors; Ray starts only if there is work.

    `log` is a file for the driver's structured lines.

    Raises ConfigError for a wrong pipeline or input, and what `run_job` raises.
    """
    if pipeline.output.path.startswith("memory://"):
        raise ConfigError(
            f"output.path: {pipeline.output.path}: memory ends with its process, and workers are "
            "processes of their own; name a folder or a bucket"
        )
    plan, prompter = prepare(pipeline)
    job = Job(pipeline, plan, prompter, about_run(pipeline, command))
    with ExitStack() as stack:
        if log is not None:
            stack.enter_context(logged_to(log))

        def make_pool(started: float) -> SizedPool:
            from eagle_batch.job.nodes import log_folder
            from eagle_batch.job.pool import RayPool
            from eagle_batch.job.session import ray_session

            threads = pipeline.engine.threads
            session = ray_session(
                pipeline.workers,
                threads,
                watcher.say,
                dashboard=dashboard,
                beside=_beside(pipeline),
            )
            resources = stack.enter_context(session)
            folder = log_folder() if os.environ.get("RAY_ADDRESS") else None
            if folder is not None:
                stack.enter_context(logged_to(folder / f"eagle-batch-driver-{os.getpid()}.log"))
            spec = WorkerSpec(
                pipeline,
                plan,
                started,
                resources.device,
                resources.threads,
                build,
                folders(pipeline),
            )
            return RayPool(spec, resources, pipeline.limits.stall_seconds)

        make_trainer = _trainer_maker(pipeline, plan, build)
        return run_job(job, make_pool, watcher, make_trainer=make_trainer)


def _trainer_maker(pipeline: Pipeline, plan: Plan, build: EngineFactory) -> MakeTrainer | None:
    """Return what starts the trainer of a job that adapts."""
    budget = pipeline.speculation.adapt
    if budget is None:
        return None

    def make(started: float) -> HeadTrainer:
        from eagle_batch.job.ray_trainer import RayTrainer

        device = "cuda" if budget.gpus else "cpu"
        spec = WorkerSpec(pipeline, plan, started, device, budget.cpus, build)
        return RayTrainer(spec, cpus=budget.cpus, gpus=budget.gpus)

    return make


def _beside(pipeline: Pipeline) -> dict[str, float]:
    """Return what the trainer takes of the cluster, by Ray's names."""
    budget = pipeline.speculation.adapt
    return {} if budget is None else {"CPU": float(budget.cpus), "GPU": budget.gpus}
