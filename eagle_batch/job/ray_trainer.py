"""The trainer of a job's head as a Ray actor, beside the workers and with a budget of its own."""

from __future__ import annotations

import contextlib
import os
from typing import Any

from eagle_batch.job.adapting import Round
from eagle_batch.job.logs import Log, log_to_stderr
from eagle_batch.job.reports import Failure
from eagle_batch.job.spec import WorkerSpec
from eagle_batch.training.learnt import Learnt


class TrainerActor:
    """A `TrainingJob` behind Ray: every exception becomes a record, which survives any pickling."""

    def __init__(self, spec: WorkerSpec) -> None:
        self._spec = spec
        self._job: Any = None
        log_to_stderr()
        self._log = Log(job=spec.pipeline.name)

    def round(self, work: Round) -> Learnt | Failure:
        """Learn; the first round loads the target."""
        if self._spec.threads is not None:
            # Read by the libraries that torch loads, which happens after this line.
            os.environ["OMP_NUM_THREADS"] = str(self._spec.threads)
        from eagle_batch.job.heads import TrainingJob

        try:
            if self._job is None:
                self._job = TrainingJob(self._spec)
            found: Learnt = self._job.round(work)
        except Exception as error:  # noqa: BLE001 - the trainer's edge
            failure = Failure.of(error)
            self._log.error(failure.message, traceback=failure.traceback)
            return failure
        self._log.info("round over", tokens=found.tokens, after=found.after, used=found.used)
        return found


class RayTrainer:
    """See `eagle_batch.job.reports.HeadTrainer`."""

    def __init__(self, spec: WorkerSpec, *, cpus: int, gpus: float) -> None:
        """Ask Ray for the process; it comes when the cluster has room."""
        import ray

        self._actor = (
            ray.remote(TrainerActor)
            .options(num_cpus=cpus, num_gpus=gpus, max_restarts=0, max_task_retries=0)
            .remote(spec)
        )
        self._call: Any = None

    def begin(self, work: Round) -> None:
        """Queue a round."""
        self._call = self._actor.round.remote(work)

    def poll(self) -> Learnt | Failure | None:
        """Return what the round came to."""
        import ray

        if self._call is None or not ray.wait([self._call], timeout=0)[0]:
            return None
        call, self._call = self._call, None
        try:
            found: Learnt | Failure = ray.get(call)
        except ray.exceptions.RayError as error:
            text = " ".join(str(error).split())[:300]
            return Failure(f"its process is gone: {text}")
        return found

    def close(self) -> None:
        """End the process at once."""
        import ray

        with contextlib.suppress(ray.exceptions.RayError):
            ray.kill(self._actor, no_restart=True)
