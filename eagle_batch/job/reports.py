"""What a worker and its pool tell the driver, and the protocol of a pool of workers."""

from __future__ import annotations

import traceback
from dataclasses import dataclass, field
from typing import Protocol

from eagle_batch.engine.request import EngineMetrics
from eagle_batch.errors import EagleBatchError
from eagle_batch.job.adapting import Round, Text
from eagle_batch.job.tasks import Commit, Lease, Order, Progress, Share
from eagle_batch.training.learnt import Learnt

#: Lines of a worker's traceback that are kept: the end says what went wrong.
TRACEBACK_LINES = 25


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a worker could not start, broke or could not finish a task."""

    message: str
    #: End of the worker's own traceback; empty where the process is gone.
    traceback: str = ""
    #: The error itself where it is the user's to mend, such as a head that does not fit.
    error: EagleBatchError | None = None

    @classmethod
    def of(cls, error: Exception) -> Failure:
        """Describe an exception where it is caught, so that it survives any pickling."""
        lines = "".join(traceback.format_exception(error)).splitlines()
        known = error if isinstance(error, EagleBatchError) else None
        message = str(error) if known is not None else f"{type(error).__name__}: {error}"
        return cls(message, "\n".join(lines[-TRACEBACK_LINES:]), known)


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """Where a worker runs."""

    host: str
    pid: int
    device: str


@dataclass(frozen=True, slots=True)
class Place:
    """A process of a worker: Ray's name of its node, the host and the process id."""

    node: str
    host: str
    pid: int


@dataclass(frozen=True, slots=True)
class PumpReport:
    """What happened in one pump."""

    #: Tasks whose objects lie in the store now; each lease with the shares that went into them.
    committed: tuple[tuple[Lease, Commit], ...] = ()
    #: Tasks that could not be made, and why; the worker is well.
    failed: tuple[tuple[Lease, Failure], ...] = ()
    #: Rows that were made for other workers and lie in the store now.
    shares: tuple[tuple[Lease, Share], ...] = ()
    #: How far the attempts are that go on.
    progress: tuple[Progress, ...] = ()
    #: Counters of the engine since the last report.
    metrics: EngineMetrics = field(default_factory=EngineMetrics)
    #: Rows x samples that were completed or quarantined, committed or not.
    units: int = 0
    #: Generated tokens of those, and the sum of their squares: it tells how unlike they are.
    unit_tokens: int = 0
    unit_tokens_squared: int = 0
    #: Units of the tasks that ended, and the generated tokens of those.
    settled: int = 0
    settled_tokens: int = 0
    #: How much of that came to nothing: another attempt was first, or the task failed.
    discarded: int = 0
    discarded_tokens: int = 0
    #: Units that have begun and are not finished.
    under_way: int = 0
    seconds: float = 0.0
    #: Slots of the engine, now: fewer than the pipeline's where the memory was too small.
    slots: int = 0
    #: Requests that have no slot yet.
    waiting: int = 0
    #: What the worker has to tell the user.
    notices: tuple[str, ...] = ()
    #: (validator, whether it passed) and the texts of which that was said.
    checked: tuple[tuple[tuple[str, bool], int], ...] = ()
    #: Finished completions, where a head is to learn from them.
    texts: tuple[Text, ...] = ()


@dataclass(frozen=True, slots=True)
class Started:
    """A worker is ready."""

    worker: int
    info: WorkerInfo


@dataclass(frozen=True, slots=True)
class StartFailed:
    """A worker could not start."""

    worker: int
    failure: Failure


@dataclass(frozen=True, slots=True)
class Lost:
    """A worker is gone: dead, hung, or broken by an exception."""

    worker: int
    failure: Failure
    #: Whether its node went away as announced, which is no task's fault.
    announced: bool = False
    #: Whether it may go on all the same: it hung, or its node fell silent.
    maybe_alive: bool = False


@dataclass(frozen=True, slots=True)
class Draining:
    """The worker's node will go away; seconds are None where there is no deadline."""

    worker: int
    seconds: float | None


@dataclass(frozen=True, slots=True)
class Room:
    """The cluster has room for so many workers in all, where their number follows that."""

    workers: int


@dataclass(frozen=True, slots=True)
class NoRoom:
    """Workers wait for room; `final` when fewer than the least number do so for too long."""

    text: str
    final: bool


@dataclass(frozen=True, slots=True)
class Pumped:
    """A pump returned."""

    worker: int
    report: PumpReport


PoolEvent = Started | StartFailed | Lost | Draining | Room | NoRoom | Pumped


class Pool(Protocol):
    """Workers that can be started, pumped and listened to; nothing here blocks but `poll`."""

    def start(self, worker: int) -> None:
        """Begin to start a worker; Started or StartFailed follows."""

    def stop(self, worker: int) -> None:
        """End a worker that has nothing to do; no event follows."""

    def pump(self, worker: int, orders: tuple[Order, ...], seconds: float) -> None:
        """Queue a pump that first takes in orders; Pumped or Lost follows."""

    def pending(self, worker: int) -> int:
        """Return how many pumps of a worker were queued and have not returned."""

    def poll(self, timeout: float) -> list[PoolEvent]:
        """Wait until something happened, or for `timeout` seconds, and return what did."""

    def close(self) -> None:
        """End all workers at once."""


class HeadTrainer(Protocol):
    """A process that trains a head; nothing here blocks."""

    def begin(self, work: Round) -> None:
        """Queue a round; `poll` tells of its end."""

    def poll(self) -> Learnt | Failure | None:
        """Return what the round came to, None while it runs; after a Failure it is of no use."""

    def close(self) -> None:
        """End the process, whatever it does."""
