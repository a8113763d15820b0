"""A job on three Ray nodes of this machine, one of which is killed while its worker works."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import ray
from ray.cluster_utils import Cluster

from eagle_batch.job.driver import run_job
from eagle_batch.job.pool import RayPool
from eagle_batch.job.reports import Pumped
from eagle_batch.job.resources import Resources
from eagle_batch.job.spec import WorkerSpec
from tests.job.fake_engine import build_slow
from tests.job.fake_job import Watch, load_job

#: A dead node is noticed in two seconds instead of fourteen.
QUICK = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 1000,
    "health_check_failure_threshold": 2,
}


class DoomedPool(RayPool):
    """Kills a node when its worker has reported a row."""

    def __init__(self, *arguments: Any, nodes: list[Any]) -> None:
        super().__init__(*arguments)
        self.nodes = nodes

    def poll(self, timeout: float) -> list[Any]:
        events = super().poll(timeout)
        if self.nodes and any(isinstance(e, Pumped) and e.report.units for e in events):
            raylet = self.nodes.pop().all_processes["raylet"][0].process
            os.kill(raylet.pid, signal.SIGKILL)
            # Else it stays a zombie, and its workers take it for alive.
            raylet.wait()
            print("killed a node", flush=True)
        return events


def main(pipeline: Path) -> None:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "_system_config": QUICK})
    nodes = [cluster.add_node(num_cpus=1) for _ in range(2)]
    ray.init(address=cluster.address, logging_level="ERROR", log_to_driver=False)
    job = load_job(pipeline)
    watch = Watch()

    def make_pool(started: float) -> RayPool:
        spec = WorkerSpec(job.pipeline, job.plan, started, "cpu", 1, build_slow)
        return DoomedPool(spec, Resources(2, 1.0, 0.0, "cpu", 1), 60.0, nodes=nodes[1:])

    run_job(job, make_pool, watch)
    print("\n".join(watch.lines))
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
