"""The records that pass between driver, workers and ledger: what to make and what was made.

Frozen, free of tensors, cheap to pickle.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Task:
    """One pair of objects to make: a planned shard, or a part of one that was split."""

    #: Name of the objects without folder and suffix: "part-00003", "part-00003.1".
    key: str
    #: Index of the planned shard in the plan.
    shard: int
    #: Rows [start, stop) of the planned shard.
    start: int
    stop: int

    @property
    def rows(self) -> int:
        """Input rows of this task."""
        return self.stop - self.start

    @property
    def is_part(self) -> bool:
        """Whether the planned shard was split and this is one of the pieces."""
        return "." in self.key

    def split(self, ways: int) -> tuple[Task, ...]:
        """Return at most `ways` parts that cover these rows in order, with keys of their own."""
        count = min(ways, self.rows)
        edges = [self.start + self.rows * n // count for n in range(count + 1)]
        return tuple(
            Task(f"{self.key}.{n}", self.shard, edges[n], edges[n + 1]) for n in range(count)
        )


@dataclass(frozen=True, slots=True)
class Share:
    """Rows of a task that another worker made, in an object beside the output.

    It lies there until the run ends; the task's own objects are put together from such rows.
    """

    #: The task's key.
    key: str
    #: Rows [start, stop) of the planned shard.
    start: int
    stop: int
    #: `Lease.id` of the attempt that made it.
    attempt: str
    sha256: str
    #: Rows x samples, and the generated tokens of all of them.
    units: int
    spent: int
    #: Generated tokens of those that are not quarantined.
    tokens: int

    @property
    def name(self) -> str:
        """What its object says it holds; no task has such a name."""
        return f"{self.key}[{self.start}:{self.stop}]"


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to work on a task, once; a report with another attempt number is stale.

    One of an attempt that the worker has already only tells it of more shares.
    """

    task: Task
    #: 1 for the first worker that gets the task in this run.
    attempt: int
    #: Token of the driver's run, so that attempts of two runs never share a name.
    run: str = ""
    #: Whether the store lets one attempt alone create the objects. Where it does not, the last one
    #: wins, and each looks again at what lies there.
    exclusive: bool = True
    #: Key of the task that these rows are a share of; empty where they are a task of their own.
    of: str = ""
    #: Rows among these that others have made.
    shares: tuple[Share, ...] = ()

    @property
    def id(self) -> str:
        """Name of this attempt, unique over all runs; it is written into the objects."""
        return f"{self.run}-{self.attempt}"


@dataclass(frozen=True, slots=True)
class Withdrawal:
    """Tells a worker to leave an attempt alone: its rows lie in the store."""

    key: str
    attempt: int


@dataclass(frozen=True, slots=True)
class NewHead:
    """Tells a worker to draft with the head that lies in the output."""

    #: Which of the job's heads it is, from 1.
    number: int


#: What a worker can be told.
Order = Lease | Withdrawal | NewHead


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a worker is with an attempt."""

    key: str
    attempt: int
    #: First row of the planned shard that it has not begun.
    begun: int
    #: Rows x samples that it has begun and not finished.
    open: int


@dataclass(frozen=True, slots=True)
class Commit:
    """What lies in the store for a task; the line of a commit record."""

    key: str
    #: `Lease.id` of the attempt whose objects are stored.
    attempt: str
    rows: int
    errors: int
    data_bytes: int
    data_sha256: str
    errors_bytes: int
    errors_sha256: str
    #: Generated tokens in the data object.
    tokens: int = 0
    #: Parts of a task that was closed with a zero-row object to be split.
    parts: tuple[Task, ...] = ()
    #: Those of `errors` that were left out on purpose.
    dropped: int = 0

    @property
    def quarantined(self) -> int:
        """Rows that are errors."""
        return self.errors - self.dropped

    @property
    def units(self) -> int:
        """Rows x samples that this pair of objects accounts for."""
        return self.rows + self.errors
