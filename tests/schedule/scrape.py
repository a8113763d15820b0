"""A process with a Ray of its own: runs a job and prints what Prometheus would read meanwhile."""

from __future__ import annotations

import sys
import time
import urllib.request
from typing import Any

from eagle_batch.job.driver import run_job
from eagle_batch.job.pool import RayPool
from eagle_batch.job.session import ray_session
from eagle_batch.job.spec import WorkerSpec
from eagle_batch.job.telemetry import PREFIX
from tests.job.fake_engine import build_fake
from tests.job.fake_job import Watch, load_job

PATIENCE_S = 60.0


def scrape() -> str:
    import ray

    (node,) = ray.nodes()
    url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    with urllib.request.urlopen(url, timeout=10) as answer:
        text: str = answer.read().decode()
    return "".join(line for line in text.splitlines(keepends=True) if PREFIX in line)


class WatchedPool(RayPool):
    """Ends its workers only when their last counters were seen: Ray reports them now and then."""

    def __init__(self, rows: str, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._rows = rows

    def close(self) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            text = scrape()
            lines = [line for line in text.splitlines() if f"{PREFIX}rows_total{{" in line]
            if any(line.endswith(f" {self._rows}") for line in lines):
                break
            assert time.monotonic() < deadline, text
            time.sleep(0.2)
        print(text)
        super().close()


def main(path: str, rows: str) -> None:
    job = load_job(path)  # type: ignore[arg-type]
    with ray_session(job.pipeline.workers, 1, lambda text: None) as resources:

        def make_pool(started: float) -> RayPool:
            spec = WorkerSpec(job.pipeline, job.plan, started, "cpu", 1, build_fake)
            return WatchedPool(rows, spec, resources, 60.0)

        run_job(job, make_pool, Watch())


if __name__ == "__main__":
    main(*sys.argv[1:])
