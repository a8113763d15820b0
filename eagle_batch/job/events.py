"""What may happen to a job (events) and what is then to be done (commands).

The coordinator turns the first into the second; the driver performs the second and reports back.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from eagle_batch.job.sharing import Pace
from eagle_batch.job.tasks import Lease, Progress, Share, Task, Withdrawal


class Ending(StrEnum):
    """How a job ends."""

    COMPLETE = "complete"
    ERROR_RATE = "error_rate"
    FAILED_SHARDS = "failed_shards"
    WORKER_START = "worker_start"
    LOST_WORKERS = "lost_workers"
    NO_ROOM = "no_room"
    INTERRUPTED = "interrupted"


@dataclass(frozen=True, slots=True)
class JobStarted:
    """The ledger is scanned; work may begin."""


@dataclass(frozen=True, slots=True)
class WorkerReady:
    """A worker has built its engine and waits for leases."""

    worker: int


@dataclass(frozen=True, slots=True)
class WorkerStartFailed:
    """A worker could not be started or could not build its engine."""

    worker: int
    reason: str


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """A worker died, hung or reported that its engine broke; its leases are void."""

    worker: int
    reason: str
    #: Whether its node went away as announced, which is no task's fault.
    announced: bool = False
    #: Whether it may go on all the same, because nobody saw its process end.
    maybe_alive: bool = False


@dataclass(frozen=True, slots=True)
class WorkerDraining:
    """A worker's node will go away: it may finish what it holds and gets nothing new."""

    worker: int


@dataclass(frozen=True, slots=True)
class RoomChanged:
    """The cluster has room for so many workers, whose number is to follow that."""

    workers: int


@dataclass(frozen=True, slots=True)
class Starved:
    """The cluster had no room for the least number of workers for too long."""

    reason: str


@dataclass(frozen=True, slots=True)
class TaskCommitted:
    """Both objects of a task lie in the store."""

    worker: int
    key: str
    attempt: int
    rows: int
    #: Rows that are quarantined, and those left out on purpose.
    errors: int
    dropped: int = 0


@dataclass(frozen=True, slots=True)
class TaskFailed:
    """A worker could not finish a task, and is well itself."""

    worker: int
    key: str
    attempt: int
    reason: str


@dataclass(frozen=True, slots=True)
class TaskClosed:
    """The zero-row object of a task that is to be split lies in the store."""

    key: str
    attempt: int


@dataclass(frozen=True, slots=True)
class ShareMade:
    """Rows that a worker made for another lie in the store."""

    worker: int
    #: Key and attempt of the lease of these rows.
    key: str
    attempt: int
    share: Share


@dataclass(frozen=True, slots=True)
class Looked:
    """Workers have nothing to do; this is how far the others are, and how fast."""

    #: As far as they have reported.
    progress: tuple[Progress, ...]
    paces: dict[int, Pace]
    #: Of a worker in general.
    usual: Pace


@dataclass(frozen=True, slots=True)
class Interrupted:
    """The user asked the job to stop."""


Event = (
    JobStarted
    | WorkerReady
    | WorkerStartFailed
    | WorkerLost
    | WorkerDraining
    | RoomChanged
    | Starved
    | TaskCommitted
    | TaskFailed
    | TaskClosed
    | ShareMade
    | Looked
    | Interrupted
)


@dataclass(frozen=True, slots=True)
class StartWorker:
    """Start a worker under this number; numbers are never used twice."""

    worker: int


@dataclass(frozen=True, slots=True)
class StopWorker:
    """End a worker that holds nothing, so that others can have what it takes."""

    worker: int


@dataclass(frozen=True, slots=True)
class Assign:
    """Hand a lease to a worker."""

    worker: int
    lease: Lease


@dataclass(frozen=True, slots=True)
class Renew:
    """Tell a worker that others have made rows of a lease it has."""

    worker: int
    lease: Lease


@dataclass(frozen=True, slots=True)
class Withdraw:
    """Tell a worker to leave an attempt alone."""

    worker: int
    attempt: Withdrawal


@dataclass(frozen=True, slots=True)
class CloseTask:
    """Put a zero-row object at the task's key, then report TaskClosed.

    Where a late worker was first, report its objects as TaskCommitted instead.
    """

    lease: Lease
    parts: tuple[Task, ...]


@dataclass(frozen=True, slots=True)
class QuarantineTask:
    """Write every row of the task to its errors object, then report TaskCommitted."""

    lease: Lease
    reason: str


@dataclass(frozen=True, slots=True)
class EndJob:
    """Nothing more will be done; `reason` is for people and empty for a complete job."""

    ending: Ending
    reason: str = ""


Command = StartWorker | StopWorker | Assign | Renew | Withdraw | CloseTask | QuarantineTask | EndJob
