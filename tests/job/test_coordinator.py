"""Races of a job as lists of events; the fixture checks the invariants after every one."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle_batch.job.coordinator import Coordinator
from eagle_batch.job.entries import DRIVER, Rules, State
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
    RoomChanged,
    StartWorker,
    StopWorker,
    TaskClosed,
    TaskCommitted,
    TaskFailed,
    TasksSlow,
    WorkerDraining,
    WorkerLost,
    WorkerReady,
    WorkerStartFailed,
)
from eagle_batch.job.tasks import Lease, Task


class Checked(Coordinator):
    """A coordinator that checks itself after every event."""

    def handle(self, *events: Event) -> list[Command]:
        commands = super().handle(*events)
        self.check_invariants()
        return commands


Make = Callable[..., Checked]


def tasks(count: int, rows: int = 4) -> list[Task]:
    return [Task(f"part-{n:05d}", n, 0, rows) for n in range(count)]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[Checked] = []

    def build(count: int = 3, rows: int = 4, **rules: float) -> Checked:
        settings = {"workers": 1, "max_error_rate": 1.0} | rules
        made.append(Checked(tasks(count, rows), Rules(**settings), {}))  # type: ignore[arg-type]
        return made[-1]

    yield build
    for coordinator in made:
        coordinator.check_invariants()


def lease(number: int, attempt: int = 1, rows: int = 4) -> Lease:
    return Lease(Task(f"part-{number:05d}", number, 0, rows), attempt)


def committed(worker: int, lease: Lease, errors: int = 0) -> TaskCommitted:
    return TaskCommitted(worker, lease.task.key, lease.attempt, lease.task.rows - errors, errors)


def test_a_job_runs_to_its_end(make: Make) -> None:
    job = make(count=3)
    assert job.handle(JobStarted()) == [StartWorker(0)]
    assert job.handle(WorkerReady(0)) == [Assign(0, lease(0)), Assign(0, lease(1))]
    assert job.handle(committed(0, lease(0))) == [Assign(0, lease(2))]
    assert job.handle(committed(0, lease(2)), committed(0, lease(1))) == [EndJob(Ending.COMPLETE)]
    assert job.tally().rows == 12


def test_every_worker_gets_a_first_task_before_any_gets_a_second(make: Make) -> None:
    """Worker 1 still loads its model when worker 0 is ready; one of the three is kept for it."""
    job = make(count=3, workers=2)
    job.handle(JobStarted())
    assert job.handle(WorkerReady(0)) == [Assign(0, lease(0)), Assign(0, lease(1))]
    assert job.handle(WorkerReady(1)) == [Assign(1, lease(2))]


def test_the_last_task_is_kept_for_a_worker_that_has_none(make: Make) -> None:
    job = make(count=2, workers=2)
    job.handle(JobStarted())
    assert job.handle(WorkerReady(0)) == [Assign(0, lease(0))]
    assert job.handle(WorkerReady(1)) == [Assign(1, lease(1))]


def test_no_more_workers_are_started_than_there_are_tasks(make: Make) -> None:
    assert make(count=2, workers=8).handle(JobStarted()) == [StartWorker(0), StartWorker(1)]


def test_a_job_whose_tasks_are_all_stored_ends_at_once() -> None:
    job = Checked(tasks(1), Rules(1), {"part-00000": (3, 1)})
    assert job.handle(JobStarted()) == [EndJob(Ending.COMPLETE)]
    assert (job.rows, job.errors) == (3, 1)


def test_a_duplicate_report_changes_nothing(make: Make) -> None:
    job = make()
    job.handle(JobStarted(), WorkerReady(0))
    job.handle(committed(0, lease(0)))
    assert job.handle(committed(0, lease(0))) == []
    assert job.rows == 4


def test_a_report_of_an_older_attempt_changes_nothing(make: Make) -> None:
    """1. worker 0 fails the task. 2. it gets it again. 3. the first attempt's commit arrives."""
    job = make(count=1)
    job.handle(JobStarted(), WorkerReady(0))
    assert job.handle(TaskFailed(0, "part-00000", 1, "disk")) == [Assign(0, lease(0, 2))]
    assert job.handle(committed(0, lease(0, 1))) == []
    assert job.handle(committed(0, lease(0, 2))) == [EndJob(Ending.COMPLETE)]


def test_a_report_of_a_worker_that_was_given_up_changes_nothing(make: Make) -> None:
    job = make(count=1)
    job.handle(JobStarted(), WorkerReady(0), WorkerLost(0, "hung"), WorkerReady(1))
    assert job.handle(committed(0, lease(0, 1))) == []
    assert job.entries["part-00000"].holder == 1


def test_the_tasks_of_a_lost_worker_run_again_each_alone(make: Make) -> None:
    """1. worker 0 dies with two tasks. 2. its successor gets the fresh ones first, in company.
    3. then each suspect, alone."""
    job = make(count=4)
    job.handle(JobStarted(), WorkerReady(0))
    assert job.handle(WorkerLost(0, "killed")) == [StartWorker(1)]
    assert job.handle(WorkerReady(1)) == [Assign(1, lease(2)), Assign(1, lease(3))]
    assert job.handle(committed(1, lease(2))) == []
    assert job.handle(committed(1, lease(3))) == [Assign(1, lease(0, 2))]
    assert job.handle(committed(1, lease(0, 2))) == [Assign(1, lease(1, 2))]
    assert job.handle(committed(1, lease(1, 2))) == [EndJob(Ending.COMPLETE)]


def test_a_task_is_condemned_only_for_a_loss_while_it_was_alone(make: Make) -> None:
    """One lost worker is allowed; two tasks share the first one, and only one of them is guilty."""
    job = make(count=2, shard_attempts=1)
    job.handle(JobStarted(), WorkerReady(0))
    assert job.handle(WorkerLost(0, "boom")) == [StartWorker(1)]
    assert job.handle(WorkerReady(1)) == [Assign(1, lease(0, 2))]
    assert job.handle(committed(1, lease(0, 2))) == [Assign(1, lease(1, 2))]
    [close, start] = job.handle(WorkerLost(1, "boom"))
    assert isinstance(close, CloseTask)
    assert close.lease.task.key == "part-00001"
    assert start == StartWorker(2)


def test_losses_and_failures_are_counted_apart(make: Make) -> None:
    job = make(count=1, shard_attempts=3)
    job.handle(JobStarted(), WorkerReady(0))
    job.handle(TaskFailed(0, "part-00000", 1, "disk"), TaskFailed(0, "part-00000", 2, "disk"))
    job.handle(TaskFailed(0, "part-00000", 2, "stale"))  # its attempt is over
    job.handle(WorkerLost(0, "killed"), WorkerReady(1))
    job.handle(WorkerLost(1, "killed"), WorkerReady(2))
    entry = job.entries["part-00000"]
    assert (entry.failures, entry.losses, entry.state) == (2, 2, State.LEASED)


def test_a_task_whose_work_fails_too_often_is_given_up_and_the_others_are_made(make: Make) -> None:
    job = make(count=2, shard_attempts=2)
    job.handle(JobStarted(), WorkerReady(0))
    job.handle(TaskFailed(0, "part-00000", 1, "a"))
    assert job.handle(TaskFailed(0, "part-00000", 2, "no space left")) == []
    [end] = job.handle(committed(0, lease(1)))
    assert isinstance(end, EndJob)
    assert end.ending is Ending.FAILED_SHARDS
    assert "no space left" in end.reason
    assert "part-00000" in end.reason


def test_a_task_that_kills_workers_is_closed_then_split_until_the_row_is_alone(make: Make) -> None:
    """The poisoned row is row 2 of 4; with two lost workers allowed the task is split."""
    job = make(count=1, rows=4, shard_attempts=2)
    job.handle(JobStarted(), WorkerReady(0), WorkerLost(0, "boom"), WorkerReady(1))
    parent = Lease(Task("part-00000", 0, 0, 4), 3)
    parts = tuple(Task(f"part-00000.{n}", 0, n, n + 1) for n in range(4))
    assert job.handle(WorkerLost(1, "boom"))[0] == CloseTask(parent, parts)
    assert job.entries["part-00000"].holder == DRIVER
    job.handle(WorkerReady(2))
    assert job.handle(TaskClosed("part-00000", 3)) == [Assign(2, Lease(parts[0], 1))]
    assert job.handle(committed(2, Lease(parts[0], 1))) == [Assign(2, Lease(parts[1], 1))]
    assert job.handle(committed(2, Lease(parts[1], 1))) == [Assign(2, Lease(parts[2], 1))]
    job.handle(WorkerLost(2, "boom"), WorkerReady(3))
    assert job.handle(committed(3, Lease(parts[3], 1))) == [Assign(3, Lease(parts[2], 2))]
    poisoned = Lease(parts[2], 3)
    assert job.handle(WorkerLost(3, "boom"))[0] == QuarantineTask(poisoned, "boom")
    assert job.handle(TaskCommitted(DRIVER, "part-00000.2", 3, 0, 1)) == [EndJob(Ending.COMPLETE)]
    assert (job.rows, job.errors) == (3, 1)


def test_a_late_parent_that_won_its_key_is_done_and_not_split(make: Make) -> None:
    job = make(count=1, shard_attempts=1)
    job.handle(JobStarted(), WorkerReady(0), WorkerLost(0, "cut off"))
    assert job.handle(TaskCommitted(DRIVER, "part-00000", 2, 4, 0)) == [EndJob(Ending.COMPLETE)]


SLOW = TasksSlow(("part-00000", "part-00001"))


def hedging(make: Make) -> Checked:
    """Two workers, two tasks; worker 1 is done and takes on the task of worker 0 as well."""
    job = make(count=2, workers=2)
    job.handle(JobStarted(), WorkerReady(0), WorkerReady(1))
    assert job.handle(SLOW) == []
    assert job.handle(committed(1, lease(1))) == []
    assert job.handle(SLOW) == [Assign(1, lease(0, 2))]
    return job


def test_a_worker_without_work_takes_on_the_slow_task_of_another_at_the_end(make: Make) -> None:
    job = hedging(make)
    assert job.entries["part-00000"].holders == {0: 1, 1: 2}
    assert job.tally().hedges == 1
    assert job.handle(SLOW) == []


@pytest.mark.parametrize(("worker", "attempt"), [(0, 1), (1, 2)])
def test_whoever_of_two_commits_first_ends_the_task(make: Make, worker: int, attempt: int) -> None:
    job = hedging(make)
    assert job.handle(committed(worker, lease(0, attempt))) == [EndJob(Ending.COMPLETE)]
    assert job.handle(committed(1 - worker, lease(0, 3 - attempt))) == []
    assert job.rows == 8


@pytest.mark.parametrize("worker", [0, 1])
def test_a_hedged_task_survives_the_loss_of_either_worker_unsuspected(
    make: Make, worker: int
) -> None:
    job = hedging(make)
    assert job.handle(WorkerLost(worker, "killed")) == []
    entry = job.entries["part-00000"]
    assert (entry.holder, entry.losses) == (1 - worker, 0)
    assert job.handle(WorkerLost(1 - worker, "killed")) == [StartWorker(2)]
    assert (entry.state, entry.losses) == (State.PENDING, 1)


def test_a_hedged_task_that_fails_on_one_worker_goes_on_on_the_other(make: Make) -> None:
    job = hedging(make)
    assert job.handle(TaskFailed(1, "part-00000", 2, "disk")) == []
    assert job.handle(committed(0, lease(0, 1))) == [EndJob(Ending.COMPLETE)]


def test_no_task_is_given_to_three_and_no_suspect_to_two(make: Make) -> None:
    job = make(count=3, workers=3)
    job.handle(JobStarted(), WorkerReady(0), WorkerReady(1), WorkerReady(2))
    job.handle(committed(2, lease(2)), committed(1, lease(1)))
    assert job.handle(SLOW, SLOW) == [Assign(1, lease(0, 2))]
    suspects = make(count=2, workers=2)
    suspects.handle(JobStarted(), WorkerReady(0), WorkerReady(1), WorkerLost(0, "boom"))
    suspects.handle(WorkerReady(2))
    assert suspects.entries["part-00000"].holders == {2: 2}
    assert suspects.handle(committed(1, lease(1)), SLOW) == []


def test_what_is_pending_goes_before_what_is_slow(make: Make) -> None:
    job = make(count=4, workers=2)
    job.handle(JobStarted(), WorkerReady(0), WorkerLost(0, "boom"), WorkerReady(1))
    assert job.handle(SLOW) == []


def test_where_the_last_writer_wins_no_task_is_given_to_two(make: Make) -> None:
    job = make(count=2, workers=2, exclusive=False)
    commands = job.handle(JobStarted(), WorkerReady(0), WorkerReady(1))
    assert [c.lease.exclusive for c in commands if isinstance(c, Assign)] == [False, False]
    first = Lease(Task("part-00001", 1, 0, 4), 1, exclusive=False)
    assert job.handle(committed(1, first), SLOW) == []


def test_where_the_last_writer_wins_a_task_is_not_split_while_a_lost_worker_may_write(
    make: Make,
) -> None:
    """The late parent would put its rows beside those of the parts."""
    job = make(count=2, shard_attempts=1, exclusive=False)
    job.handle(JobStarted(), WorkerReady(0), WorkerLost(0, "no answer", maybe_alive=True))
    job.handle(WorkerReady(1), WorkerLost(1, "no answer", maybe_alive=True), WorkerReady(2))
    [end] = job.handle(committed(2, lease(1, 2)))
    assert isinstance(end, EndJob)
    assert end.ending is Ending.FAILED_SHARDS
    assert "not split: the store has no conditional put" in end.reason
    assert "no answer" in end.reason


@pytest.mark.parametrize(("exclusive", "maybe_alive"), [(False, False), (True, True)])
def test_a_task_is_split_where_nobody_can_write_it_any_more_or_the_late_one_loses(
    make: Make, exclusive: bool, maybe_alive: bool
) -> None:
    job = make(count=1, shard_attempts=1, exclusive=exclusive)
    commands = job.handle(
        JobStarted(), WorkerReady(0), WorkerLost(0, "killed", maybe_alive=maybe_alive)
    )
    assert any(isinstance(command, CloseTask) for command in commands)


def test_hedging_can_be_turned_off(make: Make) -> None:
    job = make(count=2, workers=2, hedge=False)
    job.handle(JobStarted(), WorkerReady(0), WorkerReady(1))
    assert job.handle(committed(1, lease(1)), SLOW) == []


def test_three_workers_that_fail_to_start_end_the_job_with_their_reason(make: Make) -> None:
    job = make()
    assert job.handle(JobStarted()) == [StartWorker(0)]
    assert job.handle(WorkerStartFailed(0, "no memory")) == [StartWorker(1)]
    assert job.handle(WorkerStartFailed(1, "no memory")) == [StartWorker(2)]
    [end] = job.handle(WorkerStartFailed(2, "no memory"))
    assert isinstance(end, EndJob)
    assert end.ending is Ending.WORKER_START
    assert "no memory" in end.reason


def test_a_worker_that_starts_resets_the_count_of_failed_starts(make: Make) -> None:
    job = make(workers=2)
    job.handle(JobStarted(), WorkerStartFailed(0, "x"), WorkerStartFailed(1, "x"))
    job.handle(WorkerReady(2), WorkerStartFailed(3, "x"), WorkerStartFailed(4, "x"))
    assert job.ended is None


def test_workers_that_die_without_a_task_being_finished_end_the_job(make: Make) -> None:
    job = make(count=50, shard_attempts=3)
    job.handle(JobStarted())
    for number in range(13):
        job.handle(WorkerReady(number), WorkerLost(number, "driver mismatch"))
    assert job.ended is not None
    assert job.ended.ending is Ending.LOST_WORKERS
    assert "driver mismatch" in job.ended.reason


def test_too_many_quarantined_rows_stop_the_job_early(make: Make) -> None:
    job = make(count=4, rows=100, max_error_rate=0.1)
    job.handle(JobStarted(), WorkerReady(0))
    job.handle(committed(0, lease(0, rows=100), errors=10))
    assert job.ended is None
    [end] = job.handle(committed(0, lease(1, rows=100), errors=11))
    assert isinstance(end, EndJob)
    assert end.ending is Ending.ERROR_RATE
    assert "21 of 200" in end.reason


def test_a_few_bad_rows_at_the_start_do_not_stop_a_job_that_may_still_be_good(make: Make) -> None:
    job = make(count=25, rows=4, max_error_rate=0.1)
    job.handle(JobStarted(), WorkerReady(0))
    job.handle(committed(0, lease(0), errors=4))
    assert job.ended is None


def test_an_interrupted_job_hands_out_nothing_more(make: Make) -> None:
    job = make()
    job.handle(JobStarted(), WorkerReady(0))
    assert job.handle(Interrupted()) == [EndJob(Ending.INTERRUPTED, "interrupted")]
    assert job.handle(WorkerLost(0, "x"), committed(0, lease(1))) == []


def test_splitting_covers_the_rows_in_order() -> None:
    task = Task("part-00007", 7, 10, 41)
    parts = task.split(8)
    assert [part.start for part in parts[1:]] == [part.stop for part in parts[:-1]]
    assert (parts[0].start, parts[-1].stop, len(parts)) == (10, 41, 8)
    assert all(part.is_part and part.shard == 7 and part.rows >= 3 for part in parts)


class Simulation:
    """A cluster that does anything at any time; the store's truth is kept beside it."""

    def __init__(self, job: Checked, poisoned: set[int]) -> None:
        self.job = job
        self.poisoned = poisoned
        self.starting: list[int] = []
        self.leases: list[tuple[int, Lease]] = []
        self.driver: list[Command] = []
        self.history: list[Event] = []
        #: Tasks that a worker may still write though it was given up.
        self.haunted: set[str] = set()
        self.tell(JobStarted())

    def tell(self, event: Event) -> None:
        self.history.append(event)
        for command in self.job.handle(event):
            match command:
                case StartWorker(worker):
                    self.starting.append(worker)
                case Assign(worker, given):
                    assert given.exclusive is self.job.rules.exclusive
                    holders = [each for each in self.leases if each[1].task.key == given.task.key]
                    assert self.job.rules.exclusive or not holders, "given to two at once"
                    self.leases.append((worker, given))
                case StopWorker(worker):
                    # What it may still work on, another one was quicker with.
                    self.leases = [each for each in self.leases if each[0] != worker]
                    self.starting = [each for each in self.starting if each != worker]
                case CloseTask(given):
                    assert self.job.rules.exclusive or given.task.key not in self.haunted
                    self.driver.append(command)
                case QuarantineTask():
                    self.driver.append(command)
                case EndJob():
                    pass

    def poison(self, task: Task) -> bool:
        return any(task.shard * 8 + row in self.poisoned for row in range(task.start, task.stop))

    def choose(self, number: int, fate: int) -> None:
        """Let one thing happen; commits are likeliest, so that runs end."""
        if self.driver:
            self.drive(self.driver.pop(0))
        elif self.starting:
            worker = self.starting.pop(number % len(self.starting))
            self.tell(WorkerReady(worker))
        elif fate == 3:
            self.tell(TasksSlow(tuple(given.task.key for _, given in self.leases)))
        elif fate == 4:
            self.tell(RoomChanged(number % 4))
        elif fate == 5:
            self.tell(WorkerDraining(number % 8))
        elif fate == 0 and self.history:
            self.tell(self.history[number % len(self.history)])
        elif self.leases:
            self.work(*self.leases[number % len(self.leases)], fate)

    def drive(self, command: Command) -> None:
        if isinstance(command, CloseTask):
            self.tell(TaskClosed(command.lease.task.key, command.lease.attempt))
        elif isinstance(command, QuarantineTask):
            task = command.lease.task
            self.tell(TaskCommitted(DRIVER, task.key, command.lease.attempt, 0, task.rows))

    def work(self, worker: int, given: Lease, fate: int) -> None:
        mine = [item for item in self.leases if item[0] == worker]
        poisoned = any(self.poison(item[1].task) for item in mine)
        if fate in {1, 6} or poisoned:
            self.leases = [item for item in self.leases if item[0] != worker]
            announced, alive = fate == 6 and not poisoned, worker % 2 == 1
            self.haunted |= {item[1].task.key for item in mine if alive}
            self.tell(WorkerLost(worker, "killed", announced, maybe_alive=alive))
            return
        self.leases.remove((worker, given))
        if fate == 2:
            self.tell(TaskFailed(worker, given.task.key, given.attempt, "disk"))
        else:
            self.tell(committed(worker, given))


@settings(max_examples=200, deadline=None)
@given(
    shards=st.integers(1, 6),
    workers=st.integers(1, 3),
    poisoned=st.sets(st.integers(0, 47), max_size=2),
    choices=st.lists(st.tuples(st.integers(0, 50), st.integers(0, 16)), max_size=60),
    most=st.one_of(st.none(), st.integers(3, 6)),
    exclusive=st.booleans(),
)
def test_whatever_happens_each_row_is_accounted_for_exactly_once(
    shards: int,
    workers: int,
    poisoned: set[int],
    choices: list[tuple[int, int]],
    most: int | None,
    exclusive: bool,
) -> None:
    rules = Rules(workers, most=most, shard_attempts=2, max_error_rate=1.0, exclusive=exclusive)
    job = Checked(tasks(shards, rows=8), rules, {})
    cluster = Simulation(job, poisoned)
    for number, fate in choices:
        cluster.choose(number, fate)
    for number in range(2000):
        if job.ended is not None:
            break
        cluster.choose(number, 9)
    assert job.ended is not None, "the job never ends"
    if job.ended.ending in (Ending.LOST_WORKERS, Ending.FAILED_SHARDS):
        return
    assert job.ended.ending is Ending.COMPLETE
    assert_covered_once(job, shards, poisoned)


def assert_covered_once(job: Checked, shards: int, poisoned: set[int]) -> None:
    leaves = [e.task for e in job.entries.values() if f"{e.task.key}.0" not in job.entries]
    rows = sorted(task.shard * 8 + row for task in leaves for row in range(task.start, task.stop))
    assert rows == list(range(shards * 8))
    # A healthy row is quarantined only after its workers were killed by chance, again and again.
    assert job.rows + job.errors == shards * 8
    assert job.errors >= len({row for row in poisoned if row < shards * 8})
