r"""Who works on what: a pure state machine, events in, commands out, no clock and no I/O.

    pending --Assign--> leased --TaskCommitted--> done
       ^                  |  \--TaskFailed, too often--> failed
       |                  |
       +--TaskFailed------+   (a failure of the work)
       +--WorkerLost------+   (a loss of the worker; counted apart)

A task that has lost a worker is a suspect: it runs alone on its worker, so that the next loss is
its own. One that goes on killing workers is leased to the driver, which closes its key; its parts
are new tasks. A single row that kills workers is leased to the driver to be quarantined.

When nothing is pending, workers without work are lent rows of the tasks that take longest. What
they make lies beside the output as shares. The task's own worker goes on all the while, and is told
of each share; when the shares cover a task, the one who made the last of them is leased the whole
of it, to put them together. Whoever commits first is right, because only one can create the task's
objects; the others are told to leave it alone.

How many workers there are is up to `Staff`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping

from eagle_batch.job.entries import (
    DRIVER,
    IN_FLIGHT,
    Entry,
    Rules,
    State,
    Tally,
    WorkerState,
    span_of,
)
from eagle_batch.job.events import (
    Assign,
    CloseTask,
    Command,
    Ending,
    EndJob,
    Event,
    Interrupted,
    JobStarted,
    Looked,
    QuarantineTask,
    Renew,
    RoomChanged,
    ShareMade,
    Starved,
    TaskClosed,
    TaskCommitted,
    TaskFailed,
    Withdraw,
    WorkerDraining,
    WorkerLost,
    WorkerReady,
    WorkerStartFailed,
)
from eagle_batch.job.lending import Loans
from eagle_batch.job.sharing import Span, divide
from eagle_batch.job.staff import Staff
from eagle_batch.job.tasks import Lease, Task, Withdrawal

#: Parts of a split: few rounds of dying workers until the row that kills them is alone.
SPLIT_WAYS = 8
#: Finished units before the share of errors among them means something.
RATE_SAMPLE = 100


class Coordinator:
    """The one owner of every task's progress in memory."""

    def __init__(
        self,
        tasks: Iterable[Task],
        rules: Rules,
        done: Mapping[str, tuple[int, ...]],
        run: str = "",
    ) -> None:
        """Take the tasks to account for; `done` gives (rows, errors, dropped) of those stored.

        Tasks that were split in an earlier run come with their parts, their own key done with
        (0, 0).
        """
        self.rules = rules
        self.run = run
        self.entries = {task.key: Entry(task) for task in tasks}
        self._staff = Staff(rules)
        self.workers = self._staff.workers
        self._loans = Loans(run, rules.samples)
        self.ended: EndJob | None = None
        self.rows = 0
        self.errors = 0
        #: Rows that were left out on purpose.
        self.dropped = 0
        self._over = {State.DONE: 0, State.FAILED: 0}
        self.lost_in_a_row = 0
        self._units = sum(e.task.rows for e in self.entries.values() if not e.task.is_part)
        self._units *= rules.samples
        self._start_failures = 0
        for key, counts in done.items():
            self._finish(self.entries[key], State.DONE, *counts)
        waiting = [e for e in self.entries.values() if e.state is State.PENDING]
        self._fresh = deque(e.task.key for e in waiting if not e.suspect)
        self._suspects = deque(e.task.key for e in waiting if e.suspect)

    # -- the one mutator ---------------------------------------------------------------------

    def handle(self, *events: Event) -> list[Command]:
        """Take in what happened and return what is to be done now, in this order."""
        return [command for event in events for command in self._handle(event)]

    def _handle(self, event: Event) -> list[Command]:
        if self.ended is not None:
            return []
        commands = self._dispatch(event)
        if self.ended is None:
            commands += self._end_if_over()
        if self.ended is None:
            commands += self._withdraw_loans() + self._start_workers() + self._hand_out()
            waiting = bool(self._fresh or self._suspects)
            looked = isinstance(event, Looked)
            commands += self._staff.release(self._unfinished, waiting=waiting, looked=looked)
        return commands

    def _dispatch(self, event: Event) -> list[Command]:  # noqa: C901, PLR0911, PLR0912 - a line an event
        match event:
            case JobStarted():
                return []
            case WorkerReady():
                return self._on_ready(event)
            case WorkerStartFailed():
                return self._on_start_failed(event)
            case WorkerLost():
                return self._on_lost(event)
            case WorkerDraining():
                return self._on_draining(event)
            case RoomChanged():
                return self._on_room(event)
            case Starved():
                return self._end(Ending.NO_ROOM, event.reason)
            case TaskCommitted():
                return self._on_committed(event)
            case TaskFailed():
                return self._on_failed(event)
            case TaskClosed():
                return self._on_closed(event)
            case ShareMade():
                return self._on_share(event)
            case Looked():
                return self._on_looked(event)
            case Interrupted():
                return self._end(Ending.INTERRUPTED, "interrupted")

    # -- workers -----------------------------------------------------------------------------

    def _on_ready(self, event: WorkerReady) -> list[Command]:
        worker = self.workers.get(event.worker)
        if worker is not None:
            worker.ready = True
            self._start_failures = 0
        return []

    def _on_start_failed(self, event: WorkerStartFailed) -> list[Command]:
        if self.workers.pop(event.worker, None) is None:
            return []
        self._start_failures += 1
        if self._start_failures < self.rules.worker_attempts:
            return []
        text = f"{self._start_failures} workers in a row failed to start"
        return self._end(Ending.WORKER_START, f"{text}; {event.reason}")

    def _on_lost(self, event: WorkerLost) -> list[Command]:
        worker = self.workers.pop(event.worker, None)
        if worker is None:
            return []
        commands: list[Command] = []
        alone = len(worker.holding) == 1
        for key in worker.holding:
            loan = self._loans.end(key)
            if loan is not None:
                loan.entry.avoided |= not event.announced
                continue
            entry = self.entries[key]
            entry.haunted |= event.maybe_alive
            del entry.holders[event.worker]
            # Another worker may yet finish it; if it does not, the loss of that one is counted.
            if entry.holders:
                continue
            if event.announced:
                self._put_back(entry)
            else:
                commands += self._lose(entry, event.reason, alone=alone)
        if event.announced:
            return commands
        self.lost_in_a_row += 1
        if self.lost_in_a_row > self._bearable_losses():
            text = f"{self.lost_in_a_row} workers were lost and no shard was finished meanwhile"
            return self._end(Ending.LOST_WORKERS, f"{text}; {event.reason}")
        return commands

    def _bearable_losses(self) -> int:
        # A poisoned row alone in a job loses shard_attempts, then a few more while it is cut out;
        # at the end of a job each loss may take a second worker along.
        return (
            3 * max(self._staff.wanted, self.rules.workers) - 1 + 2 * self.rules.shard_attempts + 4
        )

    def _on_draining(self, event: WorkerDraining) -> list[Command]:
        worker = self.workers.get(event.worker)
        if worker is not None:
            worker.draining = True
        return []

    def _on_room(self, event: RoomChanged) -> list[Command]:
        self._staff.follow(event.workers)
        return []

    def _lose(self, entry: Entry, reason: str, *, alone: bool) -> list[Command]:
        entry.losses += 1
        entry.reason = reason
        # A task that had company may be innocent, however often; as a suspect it has none.
        if not alone or entry.losses < self._bearable(entry.task):
            self._put_back(entry)
            return []
        if entry.task.rows > 1 and entry.haunted and not self.rules.exclusive:
            entry.reason = (
                "it loses its workers, and is not split: the store has no conditional put, and one "
                f"of them may still write it; {reason}"
            )
            self._finish(entry, State.FAILED, 0, 0)
            return []
        lease = self._lease(entry, DRIVER)
        if entry.task.rows == 1:
            return [QuarantineTask(lease, reason)]
        return [CloseTask(lease, entry.task.split(SPLIT_WAYS))]

    def _bearable(self, task: Task) -> int:
        """Return the lost workers that condemn a task; a part is guilty until cleared."""
        if not task.is_part:
            return self.rules.shard_attempts
        return 1 if task.rows > 1 else min(2, self.rules.shard_attempts)

    # -- tasks -------------------------------------------------------------------------------

    def _current(self, key: str, worker: int, attempt: int) -> Entry | None:
        """Return the entry if the report is of its current lease; stale reports change nothing."""
        entry = self.entries.get(key)
        if entry is None or entry.state is not State.LEASED:
            return None
        return entry if entry.holders.get(worker) == attempt else None

    def _on_committed(self, event: TaskCommitted) -> list[Command]:
        entry = self._current(event.key, event.worker, event.attempt)
        if entry is None:
            return []
        beaten = [
            Withdraw(worker, Withdrawal(event.key, attempt))
            for worker, attempt in entry.holders.items()
            if worker != event.worker
        ]
        self._release(entry)
        self._finish(entry, State.DONE, event.rows, event.errors, event.dropped)
        self.lost_in_a_row = 0
        return self._stop_if_too_many_errors() or [*beaten]

    def _on_failed(self, event: TaskFailed) -> list[Command]:
        loan = self._loans.current(event)
        if loan is not None:
            self._end_loan(event.worker, event.key)
            loan.entry.avoided = True
            return []
        entry = self._current(event.key, event.worker, event.attempt)
        if entry is None:
            return []
        self._release(entry, event.worker)
        entry.failures += 1
        entry.reason = event.reason
        if entry.holders:
            return []
        if entry.failures >= self.rules.shard_attempts:
            self._finish(entry, State.FAILED, 0, 0)
            return []
        self._put_back(entry)
        return []

    def _on_closed(self, event: TaskClosed) -> list[Command]:
        entry = self._current(event.key, DRIVER, event.attempt)
        if entry is None:
            return []
        self._release(entry)
        self._finish(entry, State.DONE, 0, 0)
        for part in entry.task.split(SPLIT_WAYS):
            self.entries[part.key] = Entry(part)
            self._suspects.append(part.key)
        return []

    def _put_back(self, entry: Entry) -> None:
        entry.state = State.PENDING
        (self._suspects if entry.suspect else self._fresh).append(entry.task.key)

    def _release(self, entry: Entry, *holders: int) -> None:
        """Take the task from these holders, or from all of them."""
        for holder in holders or tuple(entry.holders):
            del entry.holders[holder]
            if holder != DRIVER:
                self.workers[holder].holding.remove(entry.task.key)

    def _finish(self, entry: Entry, state: State, rows: int, errors: int, dropped: int = 0) -> None:
        entry.state = state
        self._over[state] += 1
        self.rows += rows
        self.errors += errors
        self.dropped += dropped

    @property
    def _unfinished(self) -> int:
        return len(self.entries) - sum(self._over.values())

    # -- rows that workers make for others ---------------------------------------------------

    def has_idle_workers(self) -> bool:
        """Whether it is of use to look how far the others are."""
        waiting = self._fresh or self._suspects
        return self.rules.shares and not waiting and bool(self._staff.idle())

    def _on_looked(self, event: Looked) -> list[Command]:
        """Lend rows of the tasks that take longest to workers that have nothing to do."""
        if not self.has_idle_workers() or self.rules.share_s is None:
            return []
        idle, runs = self._staff.idle(), self._loans.runs(self.workers, self.entries, event)
        lent = divide([run for _, run in runs], len(idle), event.usual, self.rules.share_s)
        pairs = zip(idle, lent, strict=False)
        return [self._lend(worker, runs[n][0], span) for worker, (n, span) in pairs]

    def _lend(self, worker: int, entry: Entry, span: Span) -> Assign:
        loan = self._loans.lend(worker, entry, span)
        self.workers[worker].holding.append(loan.task.key)
        return Assign(worker, loan.lease)

    def _on_share(self, event: ShareMade) -> list[Command]:
        """Tell all who have these rows too that they are made; lease a task whose rows all are."""
        loan = self._loans.current(event)
        if loan is None:
            return []
        self._end_loan(event.worker, event.key)
        entry = loan.entry
        entry.shares.append(event.share)
        if entry.state is not State.LEASED or DRIVER in entry.holders:
            return []
        commands: list[Command] = [
            Renew(worker, self._lease_of(entry, attempt))
            for worker, attempt in entry.holders.items()
        ]
        if not entry.covered:
            commands += self._loans.around(entry, loan.span)
        elif not entry.suspect:
            commands.append(self._assign(event.worker, entry))
        return commands

    def _end_loan(self, worker: int, key: str) -> None:
        self._loans.end(key)
        self.workers[worker].holding.remove(key)

    def _withdraw_loans(self) -> list[Command]:
        """End loans that are of no use any more."""
        useless = self._loans.useless()
        for command in useless:
            self._end_loan(command.worker, command.attempt.key)
        return [*useless]

    # -- what follows from the state ---------------------------------------------------------

    def _stop_if_too_many_errors(self) -> list[Command]:
        rate, finished = self.rules.max_error_rate, self.rows + self.errors + self.dropped
        too_many = self.errors > rate * self._units or (
            finished >= RATE_SAMPLE and self.errors > rate * finished
        )
        if not too_many or self._unfinished == 0:
            return []
        text = f"{self.errors} of {finished} finished rows are quarantined"
        return self._end(Ending.ERROR_RATE, f"{text}, above limits.max_error_rate ({rate})")

    def _end_if_over(self) -> list[Command]:
        if self._unfinished:
            return []
        failed = [e for e in self.entries.values() if e.state is State.FAILED]
        if not failed:
            return self._end(Ending.COMPLETE, "")
        names = ", ".join(e.task.key for e in failed[:5]) + (", ..." if len(failed) > 5 else "")
        text = f"{len(failed)} shards failed {self.rules.shard_attempts} times each ({names})"
        return self._end(Ending.FAILED_SHARDS, f"{text}; the last error was: {failed[-1].reason}")

    def _end(self, ending: Ending, reason: str) -> list[Command]:
        self.ended = EndJob(ending, reason)
        return [self.ended]

    def _start_workers(self) -> list[Command]:
        work = self._unfinished + len(self._loans)
        return [*self._staff.start(work, waiting=bool(self._fresh))]

    def _hand_out(self) -> list[Command]:
        """Lease pending tasks, first one to every worker, then a second."""
        commands: list[Command] = []
        without = sum(not (w.holding or w.draining) for w in self.workers.values())
        for load in range(IN_FLIGHT):
            if not self._fresh and not self._suspects:
                break
            for number, worker in self.workers.items():
                if not worker.ready or worker.draining or len(worker.holding) != load:
                    continue
                key = self._next_for(worker, without)
                if key is not None:
                    without -= not worker.holding
                    commands.append(self._assign(number, self.entries[key]))
        return commands

    def _next_for(self, worker: WorkerState, without: int) -> str | None:
        """Take the next task for a worker; a second one only where nobody is left without any."""
        if any(key in self.entries and self.entries[key].suspect for key in worker.holding):
            return None
        if self._fresh and (not worker.holding or len(self._fresh) > without):
            return self._fresh.popleft()
        if self._suspects and not worker.holding:
            return self._suspects.popleft()
        return None

    def _assign(self, number: int, entry: Entry) -> Assign:
        self.workers[number].holding.append(entry.task.key)
        return Assign(number, self._lease(entry, number))

    def _lease(self, entry: Entry, holder: int) -> Lease:
        entry.state = State.LEASED
        entry.attempt += 1
        entry.holders[holder] = entry.attempt
        return self._lease_of(entry, entry.attempt)

    def _lease_of(self, entry: Entry, attempt: int) -> Lease:
        shares = tuple(entry.shares)
        return Lease(entry.task, attempt, self.run, self.rules.exclusive, shares=shares)

    # -- looking in --------------------------------------------------------------------------

    def tried_again(self) -> list[Task]:
        """Return the finished tasks that had more than one attempt."""
        entries = self.entries.values()
        return [e.task for e in entries if e.state is State.DONE and e.attempt > 1]

    def tally(self) -> Tally:
        """Return the counts of the job so far; parts and closed tasks count as tasks."""
        return Tally(
            tasks=len(self.entries),
            done=self._over[State.DONE],
            failed=self._over[State.FAILED],
            rows=self.rows,
            errors=self.errors,
            dropped=self.dropped,
            units=self._units,
            hedges=self._loans.given,
        )

    def check_invariants(self) -> None:
        """Assert what must hold between any two events; for tests."""
        pending = {k for k, e in self.entries.items() if e.state is State.PENDING}
        queued = [*self._fresh, *self._suspects]
        assert sorted(queued) == sorted(pending), "each pending task waits in one queue, once"
        assert not any(self.entries[key].suspect for key in self._fresh)
        for number, worker in self.workers.items():
            self._check_worker(number, worker)
        held = {key for worker in self.workers.values() for key in worker.holding}
        for key, entry in self.entries.items():
            leased = entry.state is State.LEASED
            assert leased == bool(entry.holders), f"{key}: leased without a holder"
            assert not leased or entry.holder == DRIVER or key in held, f"{key}: holder is gone"
            assert len(entry.holders) <= 1 or DRIVER not in entry.holders, f"{key}: driver + worker"
            assert len(entry.holders) <= 2, f"{key}: more than one puts the shares together"
            assert not entry.shares or self.rules.shares
        for loan in self._loans:
            key = loan.task.key
            assert key in self.workers[loan.worker].holding, f"{key}: lent to nobody"
            assert self.ended or not loan.entry.over, f"{key}: of a task that is over"
            assert span_of(loan.entry.task).holds(loan.span), f"{key}: rows of another task"
        states = [entry.state for entry in self.entries.values()]
        for state, number in self._over.items():
            assert states.count(state) == number, f"the count of {state} tasks drifted"
        assert self.rows + self.errors + self.dropped <= self._units, (
            "more rows came out than went in"
        )

    def _check_worker(self, number: int, worker: WorkerState) -> None:
        assert len(worker.holding) <= IN_FLIGHT, f"worker {number} holds too much"
        assert worker.ready or not worker.holding, f"worker {number} holds before it is ready"
        for key in worker.holding:
            if key in self._loans:
                continue
            entry = self.entries[key]
            assert number in entry.holders, f"{key}: held without a lease"
            assert not entry.suspect or len(worker.holding) == 1, f"{key}: a suspect has company"
