"""What the coordinator keeps: the rules of a job, each task's history, each worker's leases."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from eagle_batch.job.sharing import Span, covers
from eagle_batch.job.tasks import Share, Task

#: The holder of a lease that the driver itself works on; workers count from 0.
DRIVER = -1
#: Tasks a worker holds at once, so that its batch never drains between two of them.
IN_FLIGHT = 2
#: To read rows, to begin them and to put them together again takes seconds.
SHARE_S = 10.0


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
    #: Seconds of work that a worker without any must find in another's task to take rows of it at
    #: the end of the job; None leaves each task to its worker.
    share_s: float | None = SHARE_S
    #: Whether the store lets one attempt alone create a task's objects. Where it does not, a task
    #: is neither shared, nor split while an earlier attempt may be alive.
    exclusive: bool = True

    @property
    def shares(self) -> bool:
        """Whether workers take rows of each other's tasks."""
        return self.share_s is not None and self.exclusive


@dataclass(slots=True)
class Entry:
    """A task and its history."""

    task: Task
    state: State = State.PENDING
    #: Number of the last lease that was given; 0 before the first.
    attempt: int = 0
    #: Attempt of each holder while leased: DRIVER, or a worker and, beside it, one that puts the
    #: shares together.
    holders: dict[int, int] = field(default_factory=dict)
    #: Rows that others made.
    shares: list[Share] = field(default_factory=list)
    #: Whether a worker that made rows of it failed or was lost; then nobody else does.
    avoided: bool = False
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
    def may_be_shared(self) -> bool:
        """Whether other workers may be given rows of it."""
        running = self.state is State.LEASED and DRIVER not in self.holders
        return running and not (self.avoided or self.suspect or self.failures)

    @property
    def over(self) -> bool:
        """Whether nothing more is to be done for it."""
        return self.state in (State.DONE, State.FAILED)

    @property
    def covered(self) -> bool:
        """Whether every row is in a share."""
        return self.shares_cover(span_of(self.task))

    def shares_cover(self, span: Span) -> bool:
        """Whether each of some rows is in a share."""
        return bool(self.shares) and covers(map(span_of, self.shares), span)


def span_of(rows: Task | Share) -> Span:
    """Return where the rows of a task or a share lie in the planned shard."""
    return Span(rows.start, rows.stop)


@dataclass(slots=True)
class WorkerState:
    """A worker that was asked for and is not known to be gone."""

    ready: bool = False
    #: Whether its node will go away: it gets nothing new, and another worker takes its place.
    draining: bool = False
    #: Keys it holds leases of, tasks and shares of them, in the order they were given.
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
    #: Times that a worker was given rows of another's task at the end of the job.
    hedges: int = 0
    #: Rows that were left out on purpose.
    dropped: int = 0
