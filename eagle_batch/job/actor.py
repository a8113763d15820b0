"""What runs in a worker's process: a `Worker` behind an edge where exceptions become records."""

from __future__ import annotations

import os
import socket
from typing import Any

import pyarrow as pa

from eagle_batch.job.logs import Log, log_to_stderr
from eagle_batch.job.reports import Failure, Place, PumpReport, WorkerInfo
from eagle_batch.job.spec import WorkerSpec
from eagle_batch.job.tasks import Lease, NewHead, Order
from eagle_batch.job.telemetry import Telemetry


class WorkerActor:
    """A worker behind Ray: every exception becomes a record, which survives any pickling."""

    def __init__(self, spec: WorkerSpec, number: int) -> None:
        self._spec = spec
        self._worker: Any = None
        self._telemetry = Telemetry(spec.pipeline.name)
        log_to_stderr()
        self._log = Log(job=spec.pipeline.name, worker=number)

    def where(self) -> Place:
        """Say on which node this process is; it answers as soon as there is a process."""
        import ray

        return Place(ray.get_runtime_context().get_node_id(), socket.gethostname(), os.getpid())

    def start(self) -> WorkerInfo | Failure:
        """Build the engine."""
        if self._spec.threads is not None:
            # Read by the libraries that torch loads, which happens after this line.
            os.environ["OMP_NUM_THREADS"] = str(self._spec.threads)
        from eagle_batch.job.worker import Worker

        self._log.info("building the engine", device=self._spec.device)
        try:
            self._worker = Worker(self._spec)
        except Exception as error:  # noqa: BLE001 - the worker's edge
            return self._failed(error)
        # What pyarrow imports at its first use, pandas among it, is no work on a row.
        pa.array(["x"])
        info: WorkerInfo = self._worker.info()
        self._log.info("ready")
        return info

    def pump(self, orders: tuple[Order, ...], seconds: float) -> PumpReport | Failure:
        """Turn the worker's pump; after a Failure its engine is not to be used again."""
        for order in orders:
            self._note(order)
        try:
            report: PumpReport = self._worker.pump(orders, seconds)
        except Exception as error:  # noqa: BLE001 - the worker's edge
            return self._failed(error)
        self._tell(report)
        self._telemetry.count(report)
        return report

    def _note(self, order: Order) -> None:
        if isinstance(order, Lease):
            made = sum(share.stop - share.start for share in order.shares)
            self._log.info("shard taken", **_ids(order), rows=order.task.rows, made_by_others=made)
        elif isinstance(order, NewHead):
            self._log.info("new head", head=order.number)
        else:
            self._log.info("shard withdrawn", shard=order.key, attempt=order.attempt)

    def _tell(self, report: PumpReport) -> None:
        for lease, commit in report.committed:
            numbers = {"rows": commit.rows, "errors": commit.errors}
            self._log.info("shard committed", **_ids(lease), **numbers)
        for lease, share in report.shares:
            self._log.info("share of a shard made", **_ids(lease), units=share.units)
        for lease, failure in report.failed:
            self._log.warning(f"shard failed: {failure.message}", **_ids(lease))
        for notice in report.notices:
            self._log.warning(notice)

    def _failed(self, error: Exception) -> Failure:
        failure = Failure.of(error)
        self._log.error(failure.message, traceback=failure.traceback)
        return failure


def _ids(lease: Lease) -> dict[str, Any]:
    return {"run": lease.run, "shard": lease.task.key, "attempt": lease.attempt}
