"""What the coordinator keeps: the rules of a job, each task's history, each worker's leases."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from eagle_batch.job.tasks import Task

#: The holder of a lease that the driver itself works on; workers count from 0.
DRIVER = -1


class State(StrEnum):
    """Where a task is."""

    PENDING = "pending"
    LEASED = "leased"
    DONE = "done"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Rules:
    """The limits of the pipeline, as far as the coordinator applies them."""

    #: Workers that run at first.
    workers: int
    #: Fewest workers, whatever room there is.
    fewest: int = 1
    #: Most workers: more are started while tasks wait; None starts no more than at first.
    most: int | None = None
    #: Rows made of each input row.
    samples: int = 1
    #: Starts of workers that may fail in a row before the job ends.
    worker_attempts: int = 3
    #: Times that a task may fail before it is given up, and workers it may lose before it is split.
    shard_attempts: int = 3
    #: Share of quarantined units above which the job stops early.
    max_error_rate: float = 0.1
    #: Whether workers without work take on slow tasks of others at the end of the job.
    hedge: bool = True
    #: Whether the store lets one attempt alone create a task's objects. Where it does not, a task
    #: is neither hedged, nor split while an earlier attempt may be alive.
    exclusive: bool = True


@dataclass(slots=True)
class Entry:
    """A task and its history."""

    task: Task
    state: State = State.PENDING
    #: Number of the last lease that was given; 0 before the first.
    attempt: int = 0
    #: Attempt of each holder while leased: workers, at most two of them, or DRIVER.
    holders: dict[int, int] = field(default_factory=dict)
    #: Whether a second worker was given it; once is enough.
    hedged: bool = False
    #: Whether an attempt that is over may still write: nobody saw its process end.
    haunted: bool = False
    failures: int = 0
    losses: int = 0
    #: Reason of the last failure or loss.
    reason: str = ""

    @property
    def holder(self) -> int | None:
        """Who got the task first, of those that work on it."""
        return next(iter(self.holders), None)

    @property
    def suspect(self) -> bool:
        """Whether it must run alone on its worker."""
        return self.losses > 0 or self.task.is_part

    @property
    def may_be_hedged(self) -> bool:
        """Whether a second worker may be given it."""
        running = self.state is State.LEASED and DRIVER not in self.holders
        return running and not (self.hedged or self.suspect or self.failures)


@dataclass(slots=True)
class WorkerState:
    """A worker that was asked for and is not known to be gone."""

    ready: bool = False
    #: Whether its node will go away: it gets nothing new, and another worker takes its place.
    draining: bool = False
    #: Keys it holds leases of, in the order they were given.
    holding: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Tally:
    """Counts of the job so far."""

    tasks: int
    done: int
    failed: int
    rows: int
    errors: int
    units: int
    #: Times that a task was given to a second worker at the end of the job.
    hedges: int = 0
    #: Rows that were left out on purpose.
    dropped: int = 0
