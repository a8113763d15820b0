"""What became of the rows that workers made for others: for the metrics and the report."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from eagle_batch.job.tasks import Commit, Lease, Share, Withdrawal

#: Loans that the metrics tell of one by one; the first ones of a run.
MOST_LISTED = 500


@dataclass(slots=True)
class _Loan:
    worker: int
    shard: str
    #: Rows [start, stop) of the shard.
    start: int
    stop: int
    #: Seconds of the run at which it was given and ended; None while it is under way.
    begun_at: float
    ended_at: float | None = None
    #: "under way", "made", "withdrawn" or "lost" with its worker; then "used" or "unused".
    state: str = "under way"


@dataclass(frozen=True, slots=True)
class Made:
    """What a worker generated for a share, without what others had made of it."""

    units: int = 0
    tokens: int = 0

    def __add__(self, other: Made) -> Made:
        """Return both together."""
        return Made(self.units + other.units, self.tokens + other.tokens)


class Lent:
    """Every loan of a run, and the shares that no commit has settled yet."""

    def __init__(self) -> None:
        self._loans: dict[str, _Loan] = {}
        #: Of each task that rows were lent of the shares, each with its lease, which says what
        #: other shares went into it; None once the task is committed.
        self._shares: dict[str, dict[Share, Lease] | None] = {}

    def lend(self, worker: int, lease: Lease, at: float) -> bool:
        """Note a loan; return whether it is the first one."""
        task = lease.task
        if len(self._loans) < MOST_LISTED:
            self._loans[task.key] = _Loan(worker, lease.of, task.start, task.stop, at)
        first = not self._shares
        self._shares.setdefault(lease.of, {})
        return first

    def made(self, lease: Lease, share: Share, at: float) -> Made:
        """Note a share; return what was made for nothing: all of it, where it is late."""
        self._end(lease.task.key, "made", at)
        known = self._shares.get(share.key)
        if known is None:
            return _own(share, lease)
        known[share] = lease
        return Made()

    def committed(self, lease: Lease, commit: Commit) -> Made:
        """Note that a task is done; return what was made for nothing."""
        known = self._shares.get(lease.task.key)
        if known is None:
            return Made()
        self._shares[lease.task.key] = None
        # Who lost the race does not know what the winner took.
        used = _all_of(lease, known) if commit.attempt == lease.id else set()
        for share, loan_lease in known.items():
            loan = self._loans.get(loan_lease.task.key)
            if loan is not None:
                loan.state = "used" if share in used else "unused"
        return _sum({share: of for share, of in known.items() if share not in used})

    def withdrawn(self, attempt: Withdrawal, at: float) -> None:
        """Note that the rows are of no use any more."""
        self._end(attempt.key, "withdrawn", at)

    def lost(self, worker: int, at: float) -> None:
        """Note that a worker is gone."""
        for key, loan in self._loans.items():
            if loan.worker == worker:
                self._end(key, "lost", at)

    def end(self) -> Made:
        """The run is over: return what lies in shares of tasks that were not committed."""
        left = self.waiting
        self._shares = dict.fromkeys(self._shares)
        return left

    def _end(self, key: str, state: str, at: float) -> None:
        loan = self._loans.get(key)
        if loan is not None and loan.ended_at is None:
            loan.state, loan.ended_at = state, at

    @property
    def waiting(self) -> Made:
        """What lies in shares of tasks that are not committed."""
        return sum((_sum(known or {}) for known in self._shares.values()), Made())

    def document(self) -> list[dict[str, Any]]:
        """Return the loans as plain data."""
        return [asdict(loan) for loan in self._loans.values()]


def _own(share: Share, lease: Lease) -> Made:
    inner = lease.shares
    units = share.units - sum(each.units for each in inner)
    return Made(units, share.spent - sum(each.spent for each in inner))


def _sum(shares: dict[Share, Lease]) -> Made:
    return sum((_own(share, lease) for share, lease in shares.items()), Made())


def _all_of(lease: Lease, known: dict[Share, Lease]) -> set[Share]:
    """Return the shares that went into what was made under a lease, by way of others too."""
    inner = (_all_of(known[share], known) for share in lease.shares if share in known)
    return set(lease.shares).union(*inner)
