"""A worker process that works on the first two shards of a pipeline, whatever happens around it."""

from __future__ import annotations

import sys
from pathlib import Path

from eagle_batch.job.spec import WorkerSpec
from eagle_batch.job.tasks import Lease, Task
from eagle_batch.job.worker import Worker
from tests.job.fake_engine import build_fake
from tests.job.fake_job import load_job

if __name__ == "__main__":
    pipeline = Path(sys.argv[1])
    job = load_job(pipeline)
    worker = Worker(WorkerSpec(job.pipeline, job.plan, 0.0, "cpu", 1, build_fake))
    leases = tuple(Lease(Task(f"part-0000{n}", n, 0, 4), 1, "gone") for n in range(2))
    worker.pump(leases, 0.0)
    (pipeline.parent / "begun").touch()
    committed = worker.pump((), 3600.0).committed
    names = " ".join(sorted(commit.key for _, commit in committed))
    (pipeline.parent / "committed").write_text(names)
