"""A driver with many rows and simulated workers; prints what it cost as JSON.

Everything of the driver is real: plan, coordinator, ledger on a disk, meter. A worker takes a fixed
number of pumps for a shard and reports a commit; it writes no object.
"""

from __future__ import annotations

import json
import sys
import time
from collections import defaultdict, deque
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.parquet as pq

from eagle_batch.data.describe import prepare
from eagle_batch.engine.request import EngineMetrics
from eagle_batch.job.driver import run_job
from eagle_batch.job.job import Job
from eagle_batch.job.reports import PoolEvent, Pumped, PumpReport, Started, WorkerInfo
from eagle_batch.job.tasks import Commit, Lease, Order
from eagle_batch.pipeline import load_pipeline
from tests.job.fake_job import Watch, write_job

#: Pumps that a shard takes.
LATENCY = 3


class SimulatedPool:
    """Workers that need no processor."""

    def __init__(self, size: int, samples: int) -> None:
        self.size = size
        self.memory: list[int] = []
        self._samples = samples
        self._events: list[PoolEvent] = []
        self._queued: dict[int, int] = defaultdict(int)
        self._held: dict[int, deque[list[int | Lease]]] = defaultdict(deque)
        self._new: dict[int, list[Lease]] = defaultdict(list)

    def start(self, worker: int) -> None:
        self._events.append(Started(worker, WorkerInfo("host", worker, "cpu")))

    def pump(self, worker: int, orders: tuple[Order, ...], seconds: float) -> None:
        self._new[worker] += [order for order in orders if isinstance(order, Lease)]
        self._queued[worker] += 1

    def pending(self, worker: int) -> int:
        return self._queued[worker]

    def poll(self, timeout: float) -> list[PoolEvent]:
        self.memory.append(psutil.Process().memory_info().rss)
        events, self._events = self._events, []
        for worker, count in self._queued.items():
            events += [Pumped(worker, self._work(worker)) for _ in range(count)]
        self._queued.clear()
        return events

    def _work(self, worker: int) -> PumpReport:
        held = self._held[worker]
        held += [[LATENCY, lease] for lease in self._new.pop(worker, ())]
        done: list[tuple[Lease, Commit]] = []
        for item in list(held):
            left, lease = item
            assert isinstance(left, int)
            item[0] = left - 1
            if left == 1 and isinstance(lease, Lease):
                held.remove(item)
                done.append((lease, self._commit(lease)))
        units = sum(commit.rows for _, commit in done)
        metrics = EngineMetrics(
            rows=units, completion_tokens=100 * units, accepted_at=(3, 2, 1), drafted_at=(4, 4, 4)
        )
        return PumpReport(tuple(done), metrics=metrics, units=units, unit_tokens=100 * units)

    def _commit(self, lease: Lease) -> Commit:
        rows = lease.task.rows * self._samples
        return Commit(lease.task.key, lease.id, rows, 0, 9999, "0" * 64, 999, "1" * 64, 100 * rows)

    def stop(self, worker: int) -> None:
        self._held.pop(worker, None)

    def close(self) -> None:
        pass


class Forgetful(Watch):
    """A view that keeps nothing."""

    def update(self, snapshot: object) -> None:
        pass


def main(folder: Path, rows: int, rows_per_shard: int, workers: int) -> None:
    begun = time.monotonic()
    path = write_job(folder, ["x"], samples=1, output={"rows_per_shard": rows_per_shard})
    table = pa.table({"id": pa.array(range(rows)), "topic": pa.repeat("a topic", rows)})
    pq.write_table(table.append_column("n", pa.array(range(rows))), folder / "in.parquet")
    del table
    written = time.monotonic()
    pipeline = load_pipeline(path)
    job = Job(pipeline, *prepare(pipeline), {})
    planned = time.monotonic()
    pools: list[SimulatedPool] = []

    def make_pool(started: float) -> SimulatedPool:
        pools.append(SimulatedPool(workers, 1))
        return pools[0]

    result = run_job(job, make_pool, Forgetful())
    memory = pools[0].memory
    numbers = {
        "rows": result.rows,
        "write_s": written - begun,
        "plan_s": planned - written,
        "run_s": time.monotonic() - planned,
        "tasks": len(job.plan.shards),
        "records": len(list((folder / "out/_job/commits").iterdir())),
        "first_mb": memory[len(memory) // 10] / 2**20,
        "peak_mb": max(memory) / 2**20,
    }
    print(json.dumps(numbers))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
