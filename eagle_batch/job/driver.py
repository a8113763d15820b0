"""The loop of a job: pool <-> coordinator <-> ledger <-> progress. Decides nothing itself.

Imports neither torch nor ray: engines live in workers, workers in a pool that the caller brings.
"""

from __future__ import annotations

import json
import time
import uuid
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from eagle_batch.data.forms import make_form
from eagle_batch.data.rows import RowReader
from eagle_batch.errors import (
    ConfigError,
    InterruptedRunError,
    ModelError,
    StoppedError,
    StoreError,
)
from eagle_batch.job.adapter import Adapter, MakeTrainer
from eagle_batch.job.coordinator import Coordinator
from eagle_batch.job.entries import DRIVER
from eagle_batch.job.events import (
    Assign,
    CloseTask,
    Command,
    Ending,
    EndJob,
    Event,
    Interrupted,
    JobStarted,
    QuarantineTask,
    Renew,
    RoomChanged,
    ShareMade,
    StartWorker,
    Starved,
    StopWorker,
    TaskClosed,
    TaskCommitted,
    TaskFailed,
    Withdraw,
    WorkerDraining,
    WorkerLost,
    WorkerReady,
    WorkerStartFailed,
)
from eagle_batch.job.finish import finish
from eagle_batch.job.interrupts import Interrupts
from eagle_batch.job.job import Job, JobResult, SizedPool, Watcher
from eagle_batch.job.layers import finished_layer, made_layer
from eagle_batch.job.ledger import METRICS, Ledger, Scan, latest, read_records
from eagle_batch.job.logs import Log
from eagle_batch.job.meter import Meter, Snapshot
from eagle_batch.job.objects import Objects
from eagle_batch.job.pace import Paces
from eagle_batch.job.partitions import Partitioner
from eagle_batch.job.reports import (
    Draining,
    Failure,
    Lost,
    NoRoom,
    PoolEvent,
    Pumped,
    Room,
    Started,
    StartFailed,
)
from eagle_batch.job.store import Store, open_store
from eagle_batch.job.tasks import Commit, Lease, Order, Task
from eagle_batch.job.work import lost_rows, no_rows

#: Seconds a worker runs before it reports.
PUMP_S = 1.0
#: Pumps queued for a worker: one runs, one waits, so that it never idles between two.
PUMPS_QUEUED = 2
#: Longest wait for something to happen before the ledger and the view are looked after.
POLL_S = 0.5
#: Seconds between two versions of `_job/metrics.json`.
METRICS_S = 5.0
#: Seconds between two looks at how far workers are, where others have nothing to do.
LOOK_S = 0.5
#: Seconds that running pumps get to return when a job ends early.
DRAIN_S = 20.0


def run_job(
    job: Job,
    make_pool: Callable[[float], SizedPool],
    watcher: Watcher,
    store: Store | None = None,
    make_trainer: MakeTrainer | None = None,
) -> JobResult:
    """Run a job to its end, or what is left of it; `make_pool` gets the job's first start time.

    make_trainer: starts what trains the head of a job that adapts; called with that time too, when
    there is enough to learn from.

    Raises OutputBusyError, LedgerError or StoreError about the output, ConfigError or ModelError
    when no engine can be built, StoppedError when the job gave up, InterruptedRunError on Ctrl-C.
    """
    whole = store or open_store(job.pipeline.output.path)
    layers = job.pipeline.deduplicate is not None
    store = made_layer(whole, layers=layers)
    run = uuid.uuid4().hex[:12]
    form = make_form(job.pipeline.output)
    objects = Objects(store, job.plan.fingerprint, form, job.pipeline.samples)
    ledger = Ledger(store, job.identity, objects, run)
    scan = ledger.open(job.about)
    try:
        adapter = Adapter(job.pipeline, whole, make_trainer, ledger.identity.started)
        result = _run_scanned(job, ledger, scan, make_pool, watcher, adapter)
        if layers:
            result = finish(job, ledger, whole, result, watcher)
        if job.pipeline.output.partition_by:
            commits = latest(read_records(finished_layer(whole) if layers else whole))
            partitioner = Partitioner(whole, job.pipeline.output, tuple(commits.values()))
            partitioner.write(ledger.tend, watcher.say)
    except StoreError as error:
        # Waiting records and the lock are left as a crash would leave them: to write them now is to
        # wait for the same store. A resume adopts the objects and takes over the lock.
        raise StoreError(
            f"{error}\nwhat is committed is kept; run the same command again when the store answers"
        ) from error
    except BaseException:
        ledger.close()
        raise
    ledger.close()
    return result


def _run_scanned(
    job: Job,
    ledger: Ledger,
    scan: Scan,
    make_pool: Callable[[float], SizedPool],
    watcher: Watcher,
    adapter: Adapter,
) -> JobResult:
    _tell(watcher, scan, exclusive=ledger.exclusive)
    if scan.complete:
        return _already_complete(ledger.store, job, scan)
    pool = make_pool(ledger.identity.started)
    # After the pool: Ray takes SIGTERM for itself when it starts.
    with Interrupts() as interrupts:
        try:
            result = _Run(job, ledger, scan, pool, watcher, adapter, interrupts).run()
        finally:
            adapter.close()
            pool.close()
    ledger.tidy()
    return result


def _tell(watcher: Watcher, scan: Scan, *, exclusive: bool) -> None:
    if not exclusive and not scan.complete:
        watcher.say(
            "the store has no conditional put: workers make no rows of each other's shards, and no "
            "shard is split while a lost worker may still write it"
        )
    if scan.commits and not scan.complete:
        watcher.say(f"resuming: {len(scan.commits)} of {len(scan.tasks)} shards are committed")
    for keys, text in (
        (scan.adopted, "had no commit record yet and were checked and adopted"),
        (scan.missing, "were committed and are gone; they are made again"),
        (scan.damaged, "were unreadable, moved to _job/damaged and are made again"),
        (scan.restored, "had lost their errors object, which was put again"),
    ):
        if keys:
            watcher.say(f"{len(keys)} shards {text}: {', '.join(keys[:5])}")


def _already_complete(store: Store, job: Job, scan: Scan) -> JobResult:
    rows = sum(commit.rows for commit in scan.commits.values())
    errors = sum(commit.quarantined for commit in scan.commits.values())
    dropped = sum(commit.dropped for commit in scan.commits.values())
    return JobResult(store.name, job.identity.units, rows, errors, True, None, dropped)


class _Run:
    """One run of one job, from the first worker to the last commit."""

    def __init__(
        self,
        job: Job,
        ledger: Ledger,
        scan: Scan,
        pool: SizedPool,
        watcher: Watcher,
        adapter: Adapter,
        interrupts: Interrupts,
    ) -> None:
        done = {key: (c.rows, c.quarantined, c.dropped) for key, c in scan.commits.items()}
        self._job = job
        self._ledger = ledger
        self._pool = pool
        self._watcher = watcher
        self._adapter = adapter
        self._log = Log(job=job.pipeline.name, run=ledger.run)
        self._interrupts = interrupts
        rules = job.rules(pool.size, exclusive=ledger.exclusive)
        self._coordinator = Coordinator(scan.tasks, rules, done, ledger.run)
        self._meter = Meter(ledger.run)
        self._commits = dict(scan.commits)
        self._outbox: dict[int, list[Order]] = defaultdict(list)
        self._paces = Paces(job.pipeline.samples)
        self._looked_at = 0.0
        self._reader = RowReader(job.pipeline, job.plan, job.prompter.stages)
        self._earlier_runs = _earlier_runs(ledger.store)
        self._metrics_at = 0.0

    def run(self) -> JobResult:
        """Loop until the coordinator ends the job."""
        self._feed(JobStarted())
        while self._coordinator.ended is None:
            for event in self._pool.poll(POLL_S):
                self._take(event)
            if self._interrupts.requested:
                self._feed(Interrupted())
            self._look_around()
            snapshot = self._meter.snapshot(self._coordinator.tally())
            self._adapt(snapshot)
            self._keep_pumping()
            self._ledger.tend()
            self._publish(snapshot)
        return self._finish(self._coordinator.ended)

    # -- what happened -----------------------------------------------------------------------

    def _take(self, event: PoolEvent) -> None:
        match event:
            case Started(worker, info):
                self._meter.started(worker, info)
                self._log.info("worker ready", worker=worker, host=info.host, pid=info.pid)
                self._feed(WorkerReady(worker))
            case StartFailed(worker, failure):
                self._start_failed(worker, failure)
            case Lost():
                self._lost(event)
            case Draining(worker, seconds):
                self._draining(worker, seconds)
            case Room(workers):
                self._feed(RoomChanged(workers))
            case NoRoom(text, final):
                self._log.warning(text)
                self._watcher.say(text)
                if final:
                    self._feed(Starved(text))
            case Pumped():
                self._pumped(event)

    def _start_failed(self, worker: int, failure: Failure) -> None:
        if isinstance(failure.error, ConfigError | ModelError):
            raise failure.error  # the next start would fail likewise
        self._watcher.say(f"worker {worker} failed to start: {failure.message}")
        self._log.error(f"worker failed to start: {_reason(failure)}", worker=worker)
        self._feed(WorkerStartFailed(worker, _reason(failure)))

    def _lost(self, event: Lost) -> None:
        worker, failure = event.worker, event.failure
        self._meter.lost(worker)
        state = self._coordinator.workers.get(worker)
        held = tuple(state.holding) if state is not None else ()
        self._paces.lost(worker)
        self._outbox.pop(worker, None)
        self._watcher.say(f"worker {worker} was lost, its shards go back: {_reason(failure)}")
        self._log.error(f"worker lost: {_reason(failure)}", worker=worker, shards=held)
        self._feed(WorkerLost(worker, _reason(failure), event.announced, event.maybe_alive))

    def _draining(self, worker: int, seconds: float | None) -> None:
        left = "" if seconds is None else f" in {seconds:.0f} s"
        text = f"the node of worker {worker} goes away{left}: it finishes what it holds"
        self._watcher.say(text)
        self._log.warning(text, worker=worker)
        self._feed(WorkerDraining(worker))

    def _pumped(self, event: Pumped) -> None:
        self._meter.pumped(event.worker, event.report)
        self._paces.pumped(event.worker, event.report)
        self._adapter.take(event.report.texts)
        for notice in event.report.notices:
            self._watcher.say(f"worker {event.worker}: {notice}")
        for lease, commit in event.report.committed:
            self._record(commit)
            self._meter.committed(lease, commit)
            ids = {"worker": event.worker, "shard": commit.key, "attempt": lease.attempt}
            self._log.info("shard committed", **ids, rows=commit.rows, errors=commit.errors)
            self._feed(_committed(event.worker, lease, commit))
        for lease, share in event.report.shares:
            self._meter.shared(lease, share)
            ids = {"worker": event.worker, "shard": share.key, "attempt": lease.attempt}
            self._log.info("share of a shard made", **ids, start=share.start, stop=share.stop)
            self._feed(ShareMade(event.worker, lease.task.key, lease.attempt, share))
        for lease, failure in event.report.failed:
            self._watcher.say(
                f"{lease.task.key} failed on worker {event.worker}: {failure.message}"
            )
            task = lease.task
            ids = {"worker": event.worker, "shard": task.key, "attempt": lease.attempt}
            self._log.error(f"shard failed: {_reason(failure)}", **ids)
            self._feed(TaskFailed(event.worker, task.key, lease.attempt, _reason(failure)))

    def _record(self, commit: Commit) -> None:
        """Note what lies in the store, whoever put it, once."""
        if commit.key not in self._commits:
            self._commits[commit.key] = commit
            self._ledger.record(commit)

    def _look_around(self) -> None:
        """Where workers have nothing to do, tell the coordinator how far the others are."""
        now = time.monotonic()
        if now - self._looked_at < LOOK_S or not self._coordinator.has_idle_workers():
            return
        self._looked_at = now
        look = self._paces.look()
        if look is not None:
            self._feed(look)

    # -- what is to be done ------------------------------------------------------------------

    def _feed(self, event: Event) -> None:
        for command in self._coordinator.handle(event):
            self._perform(command)

    def _perform(self, command: Command) -> None:
        match command:
            case StartWorker(worker):
                self._pool.start(worker)
            case StopWorker(worker):
                self._meter.released(worker)
                self._paces.lost(worker)
                self._outbox.pop(worker, None)
                self._log.info("worker released", worker=worker)
                self._pool.stop(worker)
            case Assign(worker, lease):
                self._outbox[worker].append(lease)
                self._paces.given(worker)
                if lease.of:
                    self._lent(worker, lease)
            case Renew(worker, lease):
                self._outbox[worker].append(lease)
            case Withdraw(worker, attempt):
                self._outbox[worker].append(attempt)
                self._meter.withdrawn(attempt)
            case CloseTask(lease, parts):
                self._close_task(lease, parts)
            case QuarantineTask(lease, reason):
                self._quarantine_task(lease, reason)
            case EndJob():
                pass

    def _lent(self, worker: int, lease: Lease) -> None:
        """Tell of rows that a worker without work makes for another; the user once."""
        task = lease.task
        if self._meter.lent(worker, lease):
            text = f"no shard waits: idle workers make rows of the last ones, {lease.of} first"
            self._watcher.say(text)
        ids = {"worker": worker, "shard": lease.of, "attempt": lease.attempt}
        self._log.info("rows of another's shard given", **ids, start=task.start, stop=task.stop)

    def _keep_pumping(self) -> None:
        """Give every worker that holds a lease something to run now and something to run next."""
        for number, worker in self._coordinator.workers.items():
            while self._pool.pending(number) < PUMPS_QUEUED:
                # One that holds nothing any more may have to be told so.
                if not (worker.holding or number in self._outbox):
                    break
                orders = (*self._adapter.news(number), *self._outbox.pop(number, ()))
                self._pool.pump(number, orders, PUMP_S)

    def _adapt(self, snapshot: Snapshot) -> None:
        """Let the head learn; every worker hears of a better one with its next pump."""
        for event in self._adapter.tend(snapshot.elapsed_s, snapshot.eta_s):
            self._log.info(event.text, head=event.version)
            self._watcher.say(event.text)

    def _close_task(self, lease: Lease, parts: tuple[Task, ...]) -> None:
        """Put the zero-row object, unless a late worker was first; then its rows are kept."""
        rows, errors = no_rows(self._job.pipeline, self._job.plan.schema)
        commit = self._ledger.objects.put(lease, rows, errors, parts=parts)
        self._record(commit)
        if commit.parts:
            self._watcher.say(f"{lease.task.key} keeps losing its workers: split in {len(parts)}")
            self._feed(TaskClosed(lease.task.key, lease.attempt))
        else:
            self._feed(_committed(DRIVER, lease, commit))

    def _quarantine_task(self, lease: Lease, reason: str) -> None:
        task = lease.task
        rows = self._reader.read(self._job.plan.shards[task.shard], task.start, task.stop)
        text = f"the worker was lost whenever this row ran alone: {reason}"
        work = lost_rows(self._job.pipeline, lease, rows, text)
        commit = self._ledger.objects.put(lease, *work.tables())
        self._record(commit)
        self._watcher.say(f"row {rows.ids[0]} loses every worker: quarantined")
        self._feed(_committed(DRIVER, lease, commit))

    # -- what is shown and kept --------------------------------------------------------------

    def _publish(self, snapshot: Snapshot) -> None:
        self._watcher.update(snapshot)
        if time.monotonic() - self._metrics_at >= METRICS_S:
            self._metrics_at = time.monotonic()
            self._write_metrics("running")

    def _write_metrics(self, state: str) -> dict[str, Any]:
        document = self._meter.document(self._coordinator.tally(), state)
        document["adaptation"] = self._adapter.document()
        body = json.dumps(document | {"earlier_runs": self._earlier_runs})
        self._ledger.store.put_replace(METRICS, body.encode())
        return document

    def _finish(self, end: EndJob) -> JobResult:
        self._log.info(f"run ended: {end.ending.value}", reason=end.reason)
        if end.ending is not Ending.COMPLETE:
            self._drain()
        if not self._ledger.exclusive:
            self._look_again()
        self._ledger.flush()
        self._meter.end()
        metrics = self._write_metrics(end.ending.value)
        self._watcher.update(self._meter.snapshot(self._coordinator.tally()))
        if end.ending is Ending.INTERRUPTED:
            raise InterruptedRunError(self._kept("interrupted"))
        if end.ending is not Ending.COMPLETE:
            raise StoppedError(self._kept(end.reason))
        tally = self._coordinator.tally()
        name = self._ledger.store.name
        return JobResult(name, tally.units, tally.rows, tally.errors, False, metrics, tally.dropped)

    def _look_again(self) -> None:
        """Record what lies there where two attempts may have put, and the last one has won."""
        for task in self._coordinator.tried_again():
            commit = self._ledger.objects.settle(task, exclusive=False)
            if commit != self._commits[task.key]:
                self._commits[task.key] = commit
                self._ledger.record(commit)

    def _drain(self) -> None:
        """Let running pumps return, so that a shard that is being committed is recorded too."""
        deadline = time.monotonic() + DRAIN_S
        workers = [n for n, worker in self._coordinator.workers.items() if worker.holding]
        while time.monotonic() < deadline and any(map(self._pool.pending, workers)):
            for event in self._pool.poll(POLL_S):
                if isinstance(event, Pumped):
                    for _, commit in event.report.committed:
                        self._record(commit)
            self._ledger.tend()

    def _kept(self, reason: str) -> str:
        units = sum(commit.units for commit in self._commits.values())
        return (
            f"{self._ledger.store.name}: {reason}\n"
            f"{units} of {self._job.identity.units} rows are committed and kept; "
            "run the same command again to make the rest"
        )


def _committed(worker: int, lease: Lease, commit: Commit) -> TaskCommitted:
    counts = commit.rows, commit.quarantined, commit.dropped
    return TaskCommitted(worker, lease.task.key, lease.attempt, *counts)


def _reason(failure: Failure) -> str:
    return failure.message + (f"\n{failure.traceback}" if failure.traceback else "")


def _earlier_runs(store: Store) -> list[dict[str, Any]]:
    """Return the totals of the runs before, which the new metrics document carries on."""
    stored = store.get(METRICS)
    if stored is None:
        return []
    document: dict[str, Any] = json.loads(stored)
    earlier: list[dict[str, Any]] = document.pop("earlier_runs", [])
    return [*earlier, {k: v for k, v in document.items() if k not in ("series", "workers")}]
