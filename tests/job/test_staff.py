"""How many workers there are: as many as wait for work, as the cluster has room for, no longer."""

from __future__ import annotations

from eagle_batch.job.coordinator import Coordinator
from eagle_batch.job.entries import Rules
from eagle_batch.job.events import (
    Assign,
    Command,
    Ending,
    EndJob,
    Event,
    JobStarted,
    Looked,
    RoomChanged,
    StartWorker,
    Starved,
    StopWorker,
    TaskCommitted,
    WorkerDraining,
    WorkerLost,
    WorkerReady,
)
from eagle_batch.job.sharing import Pace
from eagle_batch.job.tasks import Lease, Progress, Task


class Job(Coordinator):
    """A coordinator of tasks of four rows that checks itself after every event."""

    def __init__(self, count: int, **rules: int) -> None:
        tasks = [Task(f"part-{n:05d}", n, 0, 4) for n in range(count)]
        super().__init__(tasks, Rules(**rules), {})  # type: ignore[arg-type]
        self.handle(JobStarted())

    def handle(self, *events: Event) -> list[Command]:
        commands = super().handle(*events)
        self.check_invariants()
        return commands

    def commit(self, number: int) -> list[Command]:
        entry = self.entries[f"part-{number:05d}"]
        (worker, attempt) = next(iter(entry.holders.items()))
        return self.handle(TaskCommitted(worker, entry.task.key, attempt, 4, 0))


def lease(number: int, attempt: int = 1) -> Lease:
    return Lease(Task(f"part-{number:05d}", number, 0, 4), attempt)


def test_workers_are_added_while_tasks_wait_up_to_the_most() -> None:
    job = Job(40, workers=1, most=5)
    assert job.handle(WorkerReady(0))[2:] == [], "what it holds and what waits decide next time"
    assert job.handle(JobStarted()) == [StartWorker(1)]
    assert job.handle(JobStarted()) == [], "the second one has not begun"
    job.handle(WorkerReady(1))
    assert job.handle(JobStarted()) == [StartWorker(2), StartWorker(3)]
    job.handle(WorkerReady(2), WorkerReady(3))
    assert job.handle(JobStarted()) == [StartWorker(4)]
    job.handle(WorkerReady(4))
    assert job.handle(JobStarted()) == []


def test_no_worker_is_added_where_none_waits_for_it() -> None:
    job = Job(2, workers=1, most=8)
    job.handle(WorkerReady(0))
    assert job.handle(JobStarted()) == []


def test_workers_are_ended_at_the_tail_when_nothing_is_left_to_share() -> None:
    """Four of four workers at work; three finish: one stays for the task that may fall silent."""
    job = Job(4, workers=4)
    job.handle(*(WorkerReady(n) for n in range(4)))
    assert [*job.commit(1), *job.commit(2), *job.commit(3)] == [], "first one looks around"
    nearly = Progress("part-00000", 1, begun=4, open=1)
    look = Looked((nearly,), {}, Pace(1.0, 1.0))
    assert job.handle(look) == [StopWorker(3), StopWorker(2)]
    assert job.handle(look) == []
    assert job.commit(0) == [EndJob(Ending.COMPLETE)]


def test_workers_are_ended_at_once_where_nothing_is_ever_shared() -> None:
    job = Job(4, workers=4, exclusive=False)
    job.handle(*(WorkerReady(n) for n in range(4)))
    assert [*job.commit(1), *job.commit(2)] == [], "two are at work, two are kept"
    assert job.commit(3) == [StopWorker(3), StopWorker(2)]


def test_workers_that_wait_for_room_are_withdrawn_when_the_work_is_done_without_them() -> None:
    job = Job(4, workers=4)
    job.handle(WorkerReady(0))
    commands = [*job.commit(0), *job.commit(1), *job.commit(2)]
    stopped = [command for command in commands if isinstance(command, StopWorker)]
    assert [each.worker for each in stopped] == [3, 2], "one may yet come in time to help"


def test_the_number_follows_the_room_there_is() -> None:
    job = Job(40, workers=2)
    job.handle(WorkerReady(0), WorkerReady(1))
    assert job.handle(RoomChanged(4)) == [StartWorker(2), StartWorker(3)]
    assert job.handle(RoomChanged(3)) == [StopWorker(2)], "it would wait for ever"
    assert job.handle(RoomChanged(0)) == [StopWorker(3)], "those at work are lost by themselves"
    assert job.handle(WorkerLost(1, "its node is gone")) == []
    assert job.handle(WorkerLost(0, "its node is gone")) == [StartWorker(4)], "one is the least"


def test_where_a_cluster_is_asked_to_grow_a_node_that_left_is_asked_for_again() -> None:
    job = Job(40, workers=2, most=4)
    job.handle(WorkerReady(0), WorkerReady(1), RoomChanged(1))
    assert job.handle(WorkerLost(1, "its node is gone")) == [StartWorker(4)]


def test_a_worker_whose_node_goes_away_finishes_what_it_holds_and_is_replaced() -> None:
    job = Job(6, workers=1)
    job.handle(WorkerReady(0))
    assert job.handle(WorkerDraining(0)) == [StartWorker(1)]
    assert job.commit(0) == []
    assert job.commit(1) == [StopWorker(0)]
    assert job.handle(WorkerReady(1)) == [Assign(1, lease(2)), Assign(1, lease(3))]


def test_a_worker_that_has_not_begun_is_moved_at_once() -> None:
    assert Job(6, workers=1).handle(WorkerDraining(0)) == [StartWorker(1), StopWorker(0)]


def test_an_announced_end_is_no_task_s_fault() -> None:
    """However often it happens: no suspect, no split, no end of the job."""
    job = Job(2, workers=1, shard_attempts=1)
    for worker in range(0, 80, 2):
        job.handle(WorkerReady(worker))
        assert job.handle(WorkerDraining(worker)) == [StartWorker(worker + 1)]
        job.handle(WorkerReady(worker + 1))
        job.handle(WorkerLost(worker, "its time is over", announced=True))
        job.handle(WorkerDraining(worker + 1))
        job.handle(WorkerLost(worker + 1, "its time is over", announced=True))
    assert job.ended is None
    assert all(entry.losses == 0 for entry in job.entries.values())


def test_a_cluster_without_room_ends_the_job_with_what_it_lacks() -> None:
    end = EndJob(Ending.NO_ROOM, "each asks for 1 GPU; the cluster has 8 CPU")
    assert Job(2, workers=1).handle(Starved(end.reason)) == [end]
