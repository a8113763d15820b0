"""Races of a job as lists of events; the fixture checks the invariants after every one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle_batch.job.coordinator import Coordinator
from eagle_batch.job.entries import DRIVER, Rules, State, WorkerState, span_of
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
    StartWorker,
    StopWorker,
    TaskClosed,
    TaskCommitted,
    TaskFailed,
    Withdraw,
    WorkerDraining,
    WorkerLost,
    WorkerReady,
    WorkerStartFailed,
)
from eagle_batch.job.sharing import Pace, Span, covers
from eagle_batch.job.tasks import Lease, Progress, Share, Task, Withdrawal


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


#: A row takes ten seconds.
USUAL = Pace(10.0, 0.0)


def look(*progress: Progress, **paces: Pace) -> Looked:
    """Workers' paces are named `w0`, `w1`."""
    return Looked(progress, {int(name[1:]): pace for name, pace in paces.items()}, USUAL)


def lent(number: int, attempt: int, start: int, stop: int, *shares: Share) -> Lease:
    """The lease of rows of another worker's task."""
    key = f"part-{number:05d}"
    task = Task(f"{key}+{attempt}", number, start, stop)
    return Lease(task, attempt, of=key, shares=shares)


def share(number: int, attempt: int, start: int, stop: int) -> Share:
    key, units = f"part-{number:05d}", stop - start
    return Share(key, start, stop, f"-{attempt}", "0" * 64, units, units, units)


def made(worker: int, loan: Lease) -> ShareMade:
    """What a worker reports of rows that were lent to it."""
    task = loan.task
    [number, attempt] = map(int, task.key.removeprefix("part-").split("+"))
    return ShareMade(worker, task.key, loan.attempt, share(number, attempt, task.start, task.stop))


def with_shares(lease: Lease, *shares: Share) -> Lease:
    return replace(lease, shares=shares)


def lending(make: Make) -> Checked:
    """Two workers, two tasks; worker 1 is done and takes the second half of the other task."""
    job = make(count=2, rows=8, workers=2)
    job.handle(JobStarted(), WorkerReady(0), WorkerReady(1))
    assert not job.has_idle_workers()
    assert job.handle(look()) == []
    assert job.handle(committed(1, lease(1, rows=8))) == []
    assert job.has_idle_workers()
    assert job.handle(look()) == [Assign(1, lent(0, 2, 4, 8))]
    return job


def test_a_worker_without_work_takes_rows_from_the_end_of_another_s_task(make: Make) -> None:
    job = lending(make)
    assert not job.has_idle_workers()
    assert job.entries["part-00000"].holders == {0: 1}, "it goes on with all of them"
    assert job.tally().hedges == 1
    assert job.handle(look()) == []


def test_rows_that_are_begun_are_left_to_who_has_begun_them(make: Make) -> None:
    """Of eight rows one is finished and five are under way: of seven the helper gets two."""
    job = make(count=2, rows=8, workers=2)
    job.handle(JobStarted(), WorkerReady(0), WorkerReady(1), committed(1, lease(1, rows=8)))
    at = Progress("part-00000", 1, begun=6, open=5)
    assert job.handle(look(at)) == [Assign(1, lent(0, 2, 6, 8))]


def test_a_task_that_is_done_soon_is_left_to_its_worker_and_the_other_workers_end(
    make: Make,
) -> None:
    job = make(count=3, rows=8, workers=3, share_s=60.0)
    job.handle(JobStarted(), *(WorkerReady(n) for n in range(3)))
    assert job.handle(committed(1, lease(1, rows=8)), committed(2, lease(2, rows=8))) == []
    at = Progress("part-00000", 1, begun=3, open=0)
    assert job.handle(look(at)) == [StopWorker(2)], "one stays, in case that it falls silent"


def test_the_rows_are_divided_among_all_workers_without_work(make: Make) -> None:
    job = make(count=4, rows=8, workers=4)
    job.handle(JobStarted(), *(WorkerReady(n) for n in range(4)))
    job.handle(*(committed(n, lease(n, rows=8)) for n in (1, 2, 3)))
    assert job.handle(look()) == [
        Assign(1, lent(0, 2, 6, 8)),
        Assign(2, lent(0, 3, 4, 6)),
        Assign(3, lent(0, 4, 2, 4)),
    ]


def test_each_worker_takes_rows_of_the_task_whose_end_is_farthest_away(make: Make) -> None:
    job = make(count=4, rows=8, workers=4)
    job.handle(JobStarted(), *(WorkerReady(n) for n in range(4)))
    job.handle(committed(2, lease(2, rows=8)), committed(3, lease(3, rows=8)))
    at = Progress("part-00000", 1, begun=4, open=0)
    assert job.handle(look(at)) == [Assign(2, lent(0, 2, 6, 8)), Assign(3, lent(1, 2, 4, 8))]


def test_the_second_task_of_a_worker_is_taken_before_the_rest_of_its_first(make: Make) -> None:
    """Worker 0 holds two tasks when nothing waits any more; the other one is done."""
    job = make(count=3, rows=8, workers=2)
    job.handle(JobStarted(), WorkerReady(0), WorkerReady(1))
    assert job.entries["part-00001"].holders == {0: 1}
    job.handle(committed(1, lease(2, rows=8)))
    assert job.handle(look()) == [Assign(1, lent(1, 2, 0, 8))]


def test_who_has_the_same_rows_is_told_that_they_are_made(make: Make) -> None:
    """1. worker 1 takes rows 4 to 7. 2. worker 2 takes 6 and 7 of those and makes them."""
    job = make(count=3, rows=8, workers=3)
    job.handle(JobStarted(), *(WorkerReady(n) for n in range(3)))
    job.handle(committed(1, lease(1, rows=8)))
    nearly = Progress("part-00000", 1, begun=7, open=0)
    assert job.handle(look(nearly)) == [Assign(1, lent(2, 2, 4, 8))]
    job.handle(committed(0, lease(0, rows=8)))
    at = Progress("part-00002", 1, begun=4, open=4)
    assert job.handle(look(at)) == [Assign(0, lent(2, 3, 6, 8))]
    known = share(2, 3, 6, 8)
    assert job.handle(made(0, lent(2, 3, 6, 8))) == [
        Renew(2, with_shares(lease(2, rows=8), known)),
        Renew(1, lent(2, 2, 4, 8, known)),
    ]


def test_who_makes_rows_that_others_have_made_by_now_is_told_to_leave_them(make: Make) -> None:
    """As above, but worker 1 is through with all of its rows before worker 0 is with two."""
    job = make(count=3, rows=8, workers=3)
    job.handle(JobStarted(), *(WorkerReady(n) for n in range(3)))
    nearly = Progress("part-00000", 1, begun=7, open=0)
    job.handle(committed(1, lease(1, rows=8)), look(nearly))
    at = Progress("part-00002", 1, begun=4, open=4)
    assert job.handle(committed(0, lease(0, rows=8)), look(at)) == [Assign(0, lent(2, 3, 6, 8))]
    assert job.handle(made(1, lent(2, 2, 4, 8))) == [
        Renew(2, with_shares(lease(2, rows=8), share(2, 2, 4, 8))),
        Withdraw(0, Withdrawal("part-00002+3", 3)),
    ]


def covered(make: Make) -> tuple[Checked, Lease]:
    """Worker 0 hangs; worker 1 makes all of its rows and is leased the whole to put together."""
    job = lending(make)
    first = share(0, 2, 4, 8)
    assert job.handle(made(1, lent(0, 2, 4, 8))) == [Renew(0, with_shares(lease(0, rows=8), first))]
    at = Progress("part-00000", 1, begun=4, open=4)
    hung = look(at, w0=Pace(10.0, 0.0, silent_s=200.0))
    assert job.handle(look(at)) == [], "they are under way"
    assert job.handle(hung) == [Assign(1, lent(0, 3, 0, 4))]
    shares = (first, share(0, 3, 0, 4))
    whole = with_shares(lease(0, 4, rows=8), *shares)
    assert job.handle(made(1, lent(0, 3, 0, 4))) == [
        Renew(0, with_shares(lease(0, rows=8), *shares)),
        Assign(1, whole),
    ]
    return job, whole


def test_rows_that_a_silent_worker_has_begun_are_made_again_and_all_are_put_together(
    make: Make,
) -> None:
    job, whole = covered(make)
    assert job.entries["part-00000"].holders == {0: 1, 1: 4}
    assert job.handle(look()) == [], "nothing is left to take"
    beaten = Withdraw(0, Withdrawal("part-00000", 1))
    assert job.handle(committed(1, whole)) == [beaten, EndJob(Ending.COMPLETE)]
    assert job.handle(committed(0, lease(0, rows=8))) == []
    assert job.rows == 16


def test_where_its_own_worker_commits_first_the_others_are_told_to_leave_it(make: Make) -> None:
    job = make(count=3, rows=8, workers=3)
    job.handle(JobStarted(), *(WorkerReady(n) for n in range(3)))
    job.handle(committed(2, lease(2, rows=8)))
    assert job.handle(look()) == [Assign(2, lent(0, 2, 4, 8))]
    assert job.handle(committed(0, lease(0, rows=8))) == [
        Withdraw(2, Withdrawal("part-00000+2", 2))
    ]
    assert job.handle(made(2, lent(0, 2, 4, 8))) == [], "too late"


@pytest.mark.parametrize("worker", [0, 1])
def test_a_task_that_two_put_together_survives_the_loss_of_either(make: Make, worker: int) -> None:
    job, _ = covered(make)
    assert job.handle(WorkerLost(worker, "killed")) == []
    entry = job.entries["part-00000"]
    assert (entry.holder, entry.losses) == (1 - worker, 0)


def test_shares_stay_of_use_when_the_task_s_own_worker_is_lost(make: Make) -> None:
    job = lending(make)
    job.handle(made(1, lent(0, 2, 4, 8)))
    known = share(0, 2, 4, 8)
    assert job.handle(WorkerLost(0, "killed")) == [Assign(1, with_shares(lease(0, 3, 8), known))]


def test_rows_under_way_elsewhere_go_on_when_the_task_s_own_worker_is_lost(make: Make) -> None:
    """1. worker 0 is lost while worker 1 makes the second half. 2. its successor begins anew.
    3. it is told of the second half."""
    job = lending(make)
    assert job.handle(WorkerLost(0, "killed")) == [StartWorker(2)]
    assert job.handle(WorkerReady(2)) == [Assign(2, lease(0, 3, rows=8))]
    known = share(0, 2, 4, 8)
    assert job.handle(made(1, lent(0, 2, 4, 8))) == [
        Renew(2, with_shares(lease(0, 3, rows=8), known))
    ]
    assert job.handle(committed(2, lease(0, 3, rows=8))) == [EndJob(Ending.COMPLETE)]


def test_rows_of_a_lost_worker_are_not_lent_again_for_they_may_have_killed_it(make: Make) -> None:
    job = lending(make)
    assert job.handle(WorkerLost(1, "killed")) == []
    entry = job.entries["part-00000"]
    assert (entry.holders, entry.losses) == ({0: 1}, 0)
    job.workers[5] = WorkerState(ready=True)
    assert job.handle(look()) == []


def test_rows_of_a_worker_whose_node_went_away_are_lent_again(make: Make) -> None:
    job = lending(make)
    job.handle(WorkerDraining(1), WorkerLost(1, "its time is over", announced=True))
    job.workers[5] = WorkerState(ready=True)
    assert job.handle(look()) == [Assign(5, lent(0, 3, 4, 8))]


def test_rows_that_could_not_be_made_elsewhere_stay_with_their_worker(make: Make) -> None:
    job = lending(make)
    assert job.handle(TaskFailed(1, "part-00000+2", 2, "disk")) == []
    assert job.handle(look()) == []
    assert job.handle(committed(0, lease(0, 1, rows=8))) == [EndJob(Ending.COMPLETE)]


def test_a_report_of_a_loan_that_is_over_changes_nothing(make: Make) -> None:
    job = lending(make)
    twice = made(1, lent(0, 2, 4, 8))
    job.handle(twice)
    assert job.handle(twice) == []
    assert job.handle(TaskFailed(1, "part-00000+2", 2, "late")) == []
    assert not job.entries["part-00000"].avoided


def test_no_rows_of_a_suspect_are_lent(make: Make) -> None:
    suspects = make(count=2, workers=2, rows=8)
    suspects.handle(JobStarted(), WorkerReady(0), WorkerReady(1), WorkerLost(0, "boom"))
    suspects.handle(WorkerReady(2))
    assert suspects.entries["part-00000"].holders == {2: 2}
    assert suspects.handle(committed(1, lease(1, rows=8)), look()) == []


def test_what_is_pending_goes_before_what_is_slow(make: Make) -> None:
    job = make(count=4, workers=2, rows=8)
    job.handle(JobStarted(), WorkerReady(0), WorkerLost(0, "boom"), WorkerReady(1))
    assert not job.has_idle_workers()
    assert job.handle(look()) == []


def test_where_the_last_writer_wins_no_rows_are_lent(make: Make) -> None:
    job = make(count=2, rows=8, workers=2, exclusive=False)
    commands = job.handle(JobStarted(), WorkerReady(0), WorkerReady(1))
    assert [c.lease.exclusive for c in commands if isinstance(c, Assign)] == [False, False]
    first = Lease(Task("part-00001", 1, 0, 8), 1, exclusive=False)
    assert job.handle(committed(1, first), look()) == []


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


def test_lending_can_be_turned_off(make: Make) -> None:
    job = make(count=2, rows=8, workers=2, share_s=None)
    job.handle(JobStarted(), WorkerReady(0), WorkerReady(1))
    assert job.handle(committed(1, lease(1, rows=8)), look()) == []


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
        #: What lies in the store, and whether it is an output or shares: by name, put once each.
        self.stored: set[str] = set()
        self.shares: set[Share] = set()
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
                    self.check_shares(given)
                    self.leases.append((worker, given))
                case Renew(worker, given):
                    self.check_shares(given)
                    self.renew(worker, given)
                case Withdraw(worker, Withdrawal(key, attempt)):
                    gone = (worker, key, attempt)
                    self.leases = [
                        (n, each)
                        for n, each in self.leases
                        if (n, each.task.key, each.attempt) != gone
                    ]
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

    def check_shares(self, given: Lease) -> None:
        """Shares that a worker is told of lie there, are of its task and of its rows."""
        assert set(given.shares) <= self.shares
        assert not given.shares or self.job.rules.shares
        for each in given.shares:
            assert each.key == (given.of or given.task.key)
            assert span_of(given.task).holds(span_of(each))

    def renew(self, worker: int, given: Lease) -> None:
        """A worker that has the attempt, or had it a moment ago, is told of more shares."""
        for place, (holder, known) in enumerate(self.leases):
            if (holder, known.task, known.attempt) == (worker, given.task, given.attempt):
                assert set(known.shares) <= set(given.shares)
                self.leases[place] = worker, given

    def poison(self, given: Lease) -> bool:
        """Whether it has a row to make that kills workers."""
        rows = (Span(n, n + 1) for n in range(given.task.start, given.task.stop))
        left = (row for row in rows if not covers(map(span_of, given.shares), row))
        return any(given.task.shard * 8 + row.start in self.poisoned for row in left)

    def look(self, number: int) -> Looked:
        """Workers are somewhere in their tasks, and one of them may hang."""
        at = tuple(
            Progress(given.task.key, given.attempt, min(given.task.start + number % 5, 8), 1)
            for _, given in self.leases
        )
        silent = {number % 4: Pace(10.0, 0.0, silent_s=1000.0)}
        return Looked(at, silent if number % 2 else {}, USUAL)

    def choose(self, number: int, fate: int) -> None:
        """Let one thing happen; commits are likeliest, so that runs end."""
        if self.driver:
            self.drive(self.driver.pop(0))
        elif self.starting:
            worker = self.starting.pop(number % len(self.starting))
            self.tell(WorkerReady(worker))
        elif fate == 3:
            self.tell(self.look(number))
        elif fate == 4:
            self.tell(RoomChanged(number % 4))
        elif fate == 5:
            self.tell(WorkerDraining(number % 8))
        elif fate == 0 and self.history:
            self.tell(self.history[number % len(self.history)])
        elif self.leases:
            # Often those are quicker who make rows for others.
            lent = [each for each in self.leases if each[1].of] if fate > 9 else []
            possible = lent or self.leases
            self.work(*possible[number % len(possible)], fate)

    def drive(self, command: Command) -> None:
        if isinstance(command, CloseTask):
            self.tell(TaskClosed(command.lease.task.key, command.lease.attempt))
        elif isinstance(command, QuarantineTask):
            task = command.lease.task
            self.tell(TaskCommitted(DRIVER, task.key, command.lease.attempt, 0, task.rows))

    def work(self, worker: int, given: Lease, fate: int) -> None:
        mine = [item for item in self.leases if item[0] == worker]
        poisoned = any(self.poison(item[1]) for item in mine)
        if fate in {1, 6} or poisoned:
            self.leases = [item for item in self.leases if item[0] != worker]
            announced, alive = fate == 6 and not poisoned, worker % 2 == 1
            self.haunted |= {item[1].task.key for item in mine if alive}
            self.tell(WorkerLost(worker, "killed", announced, maybe_alive=alive))
            return
        self.leases.remove((worker, given))
        if fate == 2:
            self.tell(TaskFailed(worker, given.task.key, given.attempt, "disk"))
        elif given.of:
            report = made(worker, given)
            self.shares.add(report.share)
            self.tell(report)
        else:
            # Whoever is second finds the objects of the first, and reports those.
            self.stored.add(given.task.key)
            self.tell(committed(worker, given))


#: A look at the workers is as likely as a commit: most of what may happen to rows that are lent
#: needs several of them.
FATES = st.one_of(st.integers(0, 16), st.just(3))


@settings(max_examples=300, deadline=None)
@given(
    shards=st.integers(1, 6),
    workers=st.integers(1, 3),
    poisoned=st.sets(st.integers(0, 47), max_size=2),
    # A list without a least size has five items on average.
    choices=st.sampled_from([0, 30]).flatmap(
        lambda least: st.lists(
            st.tuples(st.integers(0, 50), FATES), min_size=least, max_size=least + 60
        )
    ),
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
    done = {key for key, entry in job.entries.items() if entry.state is State.DONE}
    assert cluster.stored <= done, "what lies in the store is known"
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
