"""Adds up what workers report: totals, rates and a time series, for `_job/metrics.json`.

Rates are taken from the first token's worker on: loading models is not generating.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from eagle_batch.engine.request import EngineMetrics
from eagle_batch.job.entries import Tally
from eagle_batch.job.lengths import Lengths
from eagle_batch.job.lent import Lent, Made
from eagle_batch.job.reports import PumpReport, WorkerInfo
from eagle_batch.job.tasks import Commit, Lease, Share, Withdrawal

#: Seconds between two points of the time series, at first.
SAMPLE_S = 1.0
#: Points that are kept; then every two become one and the distance doubles.
MOST_POINTS = 600
#: Seconds over which the shown speed is averaged.
WINDOW_S = 30.0
#: Seconds between two points of that window; a thousand workers report more often.
RECENT_S = 0.25


@dataclass(frozen=True, slots=True)
class Snapshot:
    """How far a job is, for whoever watches it."""

    #: Rows x samples: planned, committed, quarantined among the committed, completed in memory too.
    units: int
    committed: int
    quarantined: int
    completed: int
    tasks: int
    tasks_done: int
    workers: int
    #: Generated tokens of this run; tokens for each second over the last half minute, and since
    #: the first worker was ready.
    tokens: int
    tokens_per_s: float
    average_tokens_per_s: float
    acceptance_length: float
    occupancy: float
    elapsed_s: float
    #: Seconds that are left by the tokens that are left; None before anything is known.
    eta_s: float | None
    #: Those of the committed that were left out on purpose.
    dropped: int = 0


@dataclass(slots=True)
class _WorkerTotals:
    info: WorkerInfo
    #: Seconds of the run at which it was ready, gone for any reason, and lost.
    ready_at: float
    ended_at: float | None = None
    lost_at: float | None = None
    metrics: EngineMetrics = field(default_factory=EngineMetrics)
    units: int = 0
    unit_tokens: int = 0
    #: Of the tasks that ended; what is beyond that lies in no object yet.
    settled: int = 0
    settled_tokens: int = 0
    under_way: int = 0
    pump_s: float = 0.0
    slots: int = 0
    #: What the worker told the user, such as that it ran out of memory.
    notices: list[str] = field(default_factory=list)

    @property
    def open(self) -> int:
        """Finished units of tasks that have not ended."""
        return self.units - self.settled

    @property
    def open_tokens(self) -> int:
        """Generated tokens of tasks that have not ended."""
        return max(0, self.metrics.completion_tokens - self.settled_tokens)


@dataclass(frozen=True, slots=True)
class _Point:
    """Counters at one moment; differences of two tell of the time between."""

    at: float
    tokens: int
    units: int
    row_passes: int = 0
    slot_passes: int = 0
    round_tokens: int = 0
    #: Passes of the target by the shape of their draft.
    passes: dict[str, int] = field(default_factory=dict)


class Meter:
    """The one owner of a run's numbers."""

    def __init__(self, run: str, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin at zero."""
        self._run = run
        self._clock = clock
        self._begun = clock()
        self._generating: float | None = None
        self._workers: dict[int, _WorkerTotals] = {}
        self._alive: set[int] = set()
        self._series: list[_Point] = []
        self._distance = SAMPLE_S
        self._recent: deque[_Point] = deque()
        # Kept beside the workers' own numbers: adding those up for each report takes too long.
        self._total = EngineMetrics()
        self._units = self._unit_tokens = self._unit_tokens_squared = 0
        self._checked: Counter[tuple[str, bool]] = Counter()
        #: What was made for nothing: by workers that were lost, or beside another worker.
        self._discarded = self._discarded_tokens = 0
        self._lent = Lent()
        self.started_unix = time.time()

    def started(self, worker: int, info: WorkerInfo) -> None:
        """Note a worker that is ready."""
        self._workers[worker] = _WorkerTotals(info, self._clock() - self._begun)
        self._alive.add(worker)
        if self._generating is None:
            self._generating = self._clock()

    def lost(self, worker: int) -> None:
        """Note that a worker died."""
        if worker in self._alive:
            self._workers[worker].lost_at = self._clock() - self._begun
        self.released(worker)

    def released(self, worker: int) -> None:
        """Note a worker that is gone; what it generated and did not commit was for nothing."""
        if worker in self._alive:
            totals = self._workers[worker]
            totals.ended_at = self._clock() - self._begun
            self._discarded += totals.open
            self._discarded_tokens += totals.open_tokens
        self._lent.lost(worker, self._clock() - self._begun)
        self._alive.discard(worker)

    def pumped(self, worker: int, report: PumpReport) -> None:
        """Add what a worker did."""
        totals = self._workers[worker]
        totals.metrics = totals.metrics + report.metrics
        totals.units += report.units
        self._total = self._total + report.metrics
        self._units += report.units
        totals.unit_tokens += report.unit_tokens
        self._unit_tokens += report.unit_tokens
        self._unit_tokens_squared += report.unit_tokens_squared
        totals.settled += report.settled
        totals.settled_tokens += report.settled_tokens
        self._discarded += report.discarded
        self._discarded_tokens += report.discarded_tokens
        totals.under_way = report.under_way
        totals.pump_s += report.seconds
        totals.slots = report.slots
        totals.notices += report.notices
        self._checked.update(dict(report.checked))
        self._sample()

    def lent(self, worker: int, lease: Lease) -> bool:
        """Note that a worker makes rows for another; return whether it is the first one."""
        return self._lent.lend(worker, lease, self._clock() - self._begun)

    def shared(self, lease: Lease, share: Share) -> None:
        """Note that such rows are made."""
        self._write_off(self._lent.made(lease, share, self._clock() - self._begun))

    def withdrawn(self, attempt: Withdrawal) -> None:
        """Note that what a worker has in hand is of no use any more."""
        self._lent.withdrawn(attempt, self._clock() - self._begun)

    def committed(self, lease: Lease, commit: Commit) -> None:
        """Note that a task is done, and what rows of other workers are in it."""
        self._write_off(self._lent.committed(lease, commit))

    def _write_off(self, made: Made) -> None:
        self._discarded += made.units
        self._discarded_tokens += made.tokens

    def _sample(self) -> None:
        now = self._clock() - self._begun
        point = self._point(now)
        if len(self._recent) > 1 and now - self._recent[-2].at < RECENT_S:
            self._recent.pop()
        self._recent.append(point)
        while now - self._recent[0].at > WINDOW_S:
            self._recent.popleft()
        if not self._series or point.at - self._series[-1].at >= self._distance:
            self._series.append(point)
        if len(self._series) > MOST_POINTS:
            self._series = self._series[::2]
            self._distance *= 2

    def _point(self, at: float) -> _Point:
        total = self._total
        passes = dict(total.passes_by_shape)
        gained = total.row_passes, total.slot_passes, total.round_tokens
        return _Point(at, total.completion_tokens, self._units, *gained, passes)

    def total(self) -> EngineMetrics:
        """Return the counters of all workers of this run."""
        return self._total

    def _speed(self) -> float:
        """Return tokens per second over the last half minute."""
        if len(self._recent) < 2:
            return 0.0
        first, last = self._recent[0], self._recent[-1]
        return (last.tokens - first.tokens) / max(last.at - first.at, 1e-9)

    def _generating_s(self) -> float:
        return self._clock() - self._generating if self._generating is not None else 0.0

    def _average(self) -> float:
        """Return tokens per second since the first worker was ready, discarded ones left out."""
        return self._per_second(self._total.completion_tokens - self._discarded_tokens)

    def _per_second(self, count: int) -> float:
        seconds = self._generating_s()
        return count / seconds if seconds else 0.0

    def end(self) -> None:
        """Take what living workers did not commit as made for nothing: the run is over."""
        for worker in tuple(self._alive):
            self.released(worker)
        self._write_off(self._lent.end())

    def snapshot(self, tally: Tally) -> Snapshot:
        """Return how far the job is."""
        total = self.total()
        committed = tally.rows + tally.errors + tally.dropped
        # Two workers may make the same rows, so more may be open than was asked for.
        opened = (
            sum(self._workers[worker].open for worker in self._alive) + self._lent.waiting.units
        )
        completed = min(committed + opened, tally.units)
        return Snapshot(
            units=tally.units,
            committed=committed,
            quarantined=tally.errors,
            completed=completed,
            tasks=tally.tasks,
            tasks_done=tally.done,
            workers=len(self._alive),
            tokens=total.completion_tokens,
            tokens_per_s=self._speed(),
            average_tokens_per_s=self._average(),
            acceptance_length=total.acceptance_length,
            occupancy=total.occupancy,
            elapsed_s=self._clock() - self._begun,
            eta_s=self._eta(tally.units - completed),
            dropped=tally.dropped,
        )

    def _eta(self, units_left: int) -> float | None:
        """Estimate the seconds left: the tokens left, at the speed of the last half minute."""
        speed = self._speed()
        if not self._units or speed <= 0:
            return None
        alive = [self._workers[worker] for worker in self._alive]
        begun = sum(item.metrics.completion_tokens - item.unit_tokens for item in alive)
        under_way = min(units_left, sum(item.under_way for item in alive))
        lengths = Lengths(self._units, self._unit_tokens, self._unit_tokens_squared)
        return lengths.tokens_left(units_left - under_way, under_way, begun) / speed

    def document(self, tally: Tally, state: str) -> dict[str, Any]:
        """Return everything as plain data; `state` is "running" or how the job ended."""
        now = self._clock()
        generating = self._generating_s()
        total, shown = self.total(), self.snapshot(tally)
        return {
            "run": self._run,
            "state": state,
            "started": self.started_unix,
            "updated": time.time(),
            "seconds": now - self._begun,
            "generating_seconds": generating,
            "units": tally.units,
            "rows": tally.rows,
            "quarantined": tally.errors,
            "dropped": tally.dropped,
            "validators": _validators(self._checked),
            "tasks": tally.tasks,
            "tasks_done": tally.done,
            "hedges": tally.hedges,
            "loans": self._lent.document(),
            "rows_this_run": self._units,
            "discarded_rows": self._discarded,
            "discarded_tokens": self._discarded_tokens,
            "tokens_per_s": self._average(),
            "tokens_per_s_now": shown.tokens_per_s,
            "eta_s": shown.eta_s if state == "running" else None,
            "completed": shown.completed,
            "workers_ready": shown.workers,
            "rows_per_s": self._per_second(self._units - self._discarded),
            "engine": _engine_document(total),
            "workers": [_worker_document(n, item) for n, item in self._workers.items()],
            "series": [asdict(point) for point in self._series],
        }


def _validators(checked: Counter[tuple[str, bool]]) -> dict[str, dict[str, int]]:
    """Return of each validator how many texts it passed and how many it refused."""
    names = dict.fromkeys(name for name, _ in checked)
    return {name: {"passed": checked[name, True], "failed": checked[name, False]} for name in names}


def _engine_document(total: EngineMetrics) -> dict[str, Any]:
    phases = {name: getattr(total, f"{name}_s") for name in ("prefill", "draft", "verify", "host")}
    busy = sum(phases.values())
    pairs = zip(total.accepted_at, total.drafted_at, strict=True)
    return {
        **asdict(total),
        "acceptance_length": total.acceptance_length,
        "occupancy": total.occupancy,
        "acceptance_at": [accepted / drafted if drafted else 0.0 for accepted, drafted in pairs],
        "time_share": {name: value / busy if busy else 0.0 for name, value in phases.items()},
    }


def _worker_document(number: int, totals: _WorkerTotals) -> dict[str, Any]:
    tokens = totals.metrics.completion_tokens
    return {
        "worker": number,
        **asdict(totals.info),
        "rows": totals.units,
        "tokens": tokens,
        "pump_seconds": totals.pump_s,
        "ready_at": totals.ready_at,
        "ended_at": totals.ended_at,
        "lost_at": totals.lost_at,
        "slots": totals.slots,
        "notices": list(totals.notices),
        "tokens_per_s": tokens / totals.pump_s if totals.pump_s else 0.0,
    }
