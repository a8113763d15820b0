"""The rows that workers make for others: who makes which, and how far everybody is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from eagle_batch.job.entries import Entry, WorkerState, span_of
from eagle_batch.job.events import Looked, Renew, ShareMade, TaskFailed, Withdraw
from eagle_batch.job.sharing import Run, Span
from eagle_batch.job.tasks import Lease, Progress, Task, Withdrawal


@dataclass(frozen=True, slots=True)
class Loan:
    """Rows of a task that a worker makes for another."""

    #: Those rows; its key names the attempt.
    task: Task
    entry: Entry
    worker: int
    attempt: int
    #: Token of the driver's run.
    run: str

    @property
    def span(self) -> Span:
        """Where the rows lie."""
        return span_of(self.task)

    @property
    def lease(self) -> Lease:
        """The right to make them, with what others have made of them meanwhile."""
        made = tuple(share for share in self.entry.shares if self.span.holds(span_of(share)))
        return Lease(self.task, self.attempt, self.run, of=self.entry.task.key, shares=made)


class Loans:
    """Those that are under way, by the keys of their leases."""

    def __init__(self, run: str, samples: int) -> None:
        """Begin with none; rows count as many units as there are samples."""
        self._run = run
        self._samples = samples
        self._loans: dict[str, Loan] = {}
        #: The same by the keys of their tasks: there may be a thousand of them.
        self._of: dict[str, list[Loan]] = {}
        #: How many there were.
        self.given = 0

    def __contains__(self, key: str) -> bool:
        """Whether a lease is of rows that were lent."""
        return key in self._loans

    def __iter__(self) -> Iterator[Loan]:
        """Go through all of them."""
        return iter(tuple(self._loans.values()))

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._loans)

    def lend(self, worker: int, entry: Entry, span: Span) -> Loan:
        """Lend a worker rows of a task."""
        entry.attempt += 1
        task = Task(f"{entry.task.key}+{entry.attempt}", entry.task.shard, *span)
        loan = Loan(task, entry, worker, entry.attempt, self._run)
        self._loans[task.key] = loan
        self._of.setdefault(entry.task.key, []).append(loan)
        self.given += 1
        return loan

    def current(self, event: ShareMade | TaskFailed) -> Loan | None:
        """Return what a report is of; None where it is stale, or of no loan."""
        loan = self._loans.get(event.key)
        current = loan is not None and (loan.worker, loan.attempt) == (event.worker, event.attempt)
        return loan if current else None

    def end(self, key: str) -> Loan | None:
        """Take a loan out of the list."""
        loan = self._loans.pop(key, None)
        if loan is not None:
            self._of[loan.entry.task.key].remove(loan)
        return loan

    def useless(self) -> list[Withdraw]:
        """Return what ends the loans of tasks that are over, and of rows that others made."""
        return [
            Withdraw(loan.worker, Withdrawal(loan.task.key, loan.attempt))
            for loan in self
            if loan.entry.over or loan.entry.shares_cover(loan.span)
        ]

    def around(self, entry: Entry, span: Span) -> list[Renew]:
        """Return what tells those who make the same rows, among others, of a share."""
        loans = self._of.get(entry.task.key, ())
        return [Renew(loan.worker, loan.lease) for loan in loans if loan.span.holds(span)]

    def runs(
        self, workers: Mapping[int, WorkerState], entries: Mapping[str, Entry], event: Looked
    ) -> list[tuple[Entry, Run]]:
        """Return what each worker has in hand that rows may be taken of, with the task."""
        known = {(each.key, each.attempt): each for each in event.progress}
        found: list[tuple[Entry, Run]] = []
        for number, worker in workers.items():
            ahead, pace = 0.0, event.paces.get(number, event.usual)
            for key in worker.holding:
                loan = self._loans.get(key)
                entry = entries[key] if loan is None else loan.entry
                attempt = entry.holders[number] if loan is None else loan.attempt
                at = known.get((key, attempt), Progress(key, attempt, 0, 0))
                span = span_of(entry.task if loan is None else loan.task)
                taken = self._taken(entry, span, loan)
                run = Run(span, at.begun, at.open / self._samples, ahead, pace, taken)
                ahead = run.left
                if entry.may_be_shared:
                    found.append((entry, run))
        return found

    def _taken(self, entry: Entry, span: Span, own: Loan | None) -> tuple[Span, ...]:
        """Return the rows within a span that others than `own` make, or have made."""
        spans = [span_of(share) for share in entry.shares]
        loans = self._of.get(entry.task.key, ())
        spans += [loan.span for loan in loans if loan is not own]
        return tuple(other for other in spans if span.holds(other))
