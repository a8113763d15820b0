"""A pipeline on Ray: checked, planned, and run by a driver in this process."""

from __future__ import annotations

from contextlib import ExitStack

from eagle_batch.data.describe import prepare
from eagle_batch.errors import ConfigError
from eagle_batch.job.about import about_run
from eagle_batch.job.driver import Job, JobResult, SizedPool, Watcher, run_job
from eagle_batch.job.spec import EngineFactory, WorkerSpec, build_real_engine
from eagle_batch.pipeline import Pipeline


def run_on_ray(
    pipeline: Pipeline,
    watcher: Watcher,
    command: list[str],
    *,
    dashboard: bool = False,
    build: EngineFactory = build_real_engine,
) -> JobResult:
    """Run a pipeline, or what is left of it, on Ray actors; Ray starts only if there is work.

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

        def make_pool(started: float) -> SizedPool:
            from eagle_batch.job.pool import RayPool
            from eagle_batch.job.session import ray_session

            threads = pipeline.engine.threads
            session = ray_session(pipeline.workers, threads, watcher.say, dashboard=dashboard)
            resources = stack.enter_context(session)
            spec = WorkerSpec(pipeline, plan, started, resources.device, resources.threads, build)
            return RayPool(spec, resources, pipeline.limits.stall_seconds)

        return run_job(job, make_pool, watcher)
