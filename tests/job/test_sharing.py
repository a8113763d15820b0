"""How slow tasks are divided: the arithmetic, and what it gains, by a clock that is simulated."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle_batch.job.coordinator import Coordinator
from eagle_batch.job.entries import Rules
from eagle_batch.job.events import (
    Assign,
    Ending,
    Event,
    JobStarted,
    Looked,
    Renew,
    ShareMade,
    StartWorker,
    StopWorker,
    TaskCommitted,
    Withdraw,
    WorkerReady,
)
from eagle_batch.job.sharing import Pace, Run, Span, covers, divide, without
from eagle_batch.job.tasks import Lease, Progress, Share, Task

SPANS = st.builds(
    lambda start, rows: Span(start, start + rows), st.integers(0, 30), st.integers(0, 9)
)


@given(whole=SPANS, taken=st.lists(SPANS, max_size=5))
def test_what_is_left_of_a_span_is_what_nobody_took(whole: Span, taken: list[Span]) -> None:
    left = without(whole, taken)
    rows = {row for span in left for row in range(*span)}
    assert rows == set(range(*whole)) - {row for span in taken for row in range(*span)}
    assert sum(span.rows for span in left) == len(rows), "they lie apart"
    assert covers(taken, whole) == (not rows)


@given(
    begun=st.lists(st.integers(0, 40), min_size=1, max_size=4),
    helpers=st.integers(0, 6),
    taken=st.lists(SPANS, max_size=2),
    silent=st.sampled_from([0.0, 1e6]),
    least=st.sampled_from([0.0, 5.0, 50.0]),
)
def test_helpers_take_rows_that_lie_apart_and_that_nobody_else_has(
    begun: list[int], helpers: int, taken: list[Span], silent: float, least: float
) -> None:
    pace = Pace(1.0, 1.0, silent)
    inside = tuple(span for span in taken if span.stop <= 40)
    runs = [Run(Span(0, 40), at, min(at, 4), 0.0, pace, inside) for at in begun]
    cuts = divide(runs, helpers, Pace(1.0, 1.0), least)
    assert len(cuts) <= helpers
    for number, run in enumerate(runs):
        spans = [span for n, span in cuts if n == number]
        rows = [row for span in spans for row in range(*span)]
        assert len(rows) == len(set(rows))
        assert all(span.rows > 0 and run.span.holds(span) for span in spans)
        assert not set(rows) & {row for span in inside for row in range(*span)}
        assert silent or all(row >= run.begun for row in rows), "rows under way are left alone"


def test_a_helper_must_find_as_much_work_as_it_is_worth() -> None:
    run = Run(Span(0, 100), 0, 0, 0.0, Pace(0.5, 1.0))
    counts = {least: len(divide([run], 8, Pace(0.5, 1.0), least)) for least in (1, 10, 25, 26)}
    assert counts == {1: 8, 10: 4, 25: 1, 26: 0}, "of 50 seconds, which all divide among them"


def test_helpers_go_where_the_end_is_farthest_away() -> None:
    """Of 80, 40 and 19 seconds the last is too short for two: its worker is left alone."""
    runs = [Run(Span(0, rows), 0, 0, 0.0, Pace(1.0, 1.0)) for rows in (19, 40, 80)]
    counts = [
        [n for n, _ in divide(runs, helpers, Pace(1.0, 1.0), 10.0)] for helpers in (1, 2, 3, 99)
    ]
    assert counts == [[2], [1, 2], [1, 2, 2], [1] * 3 + [2] * 7]


@dataclass
class Holding:
    """A lease in a worker's hands: the rows that it has made of it."""

    lease: Lease
    made: set[int] = field(default_factory=set)

    def next_row(self) -> int | None:
        known = {row for share in self.lease.shares for row in range(share.start, share.stop)}
        rows = range(self.lease.task.start, self.lease.task.stop)
        return next((row for row in rows if row not in self.made and row not in known), None)

    def progress(self) -> Progress:
        row, task = self.next_row(), self.lease.task
        return Progress(task.key, self.lease.attempt, task.stop if row is None else row, 0)

    def covered(self) -> set[int]:
        known = {row for share in self.lease.shares for row in range(share.start, share.stop)}
        return self.made | known


class Tail:
    """Workers that make so many rows a second, one after the other; a second is a step."""

    def __init__(self, rows: list[int], speeds: list[float]) -> None:
        tasks = [Task(f"part-{n:05d}", n, 0, count) for n, count in enumerate(rows)]
        self.job = Coordinator(tasks, Rules(len(speeds)), {})
        self.speeds = speeds
        self.holding: dict[int, list[Holding]] = {n: [] for n in range(len(speeds))}
        self.budget = dict.fromkeys(range(len(speeds)), 0.0)
        self.rows_made = 0
        self.seconds = 0
        self.rows = dict(zip((task.key for task in tasks), rows, strict=True))
        self.tell(JobStarted(), *(WorkerReady(n) for n in range(len(speeds))))

    def tell(self, *events: Event) -> None:
        for command in self.job.handle(*events):
            match command:
                case Assign(worker, lease):
                    self.holding[worker].append(Holding(lease))
                case Renew(worker, lease):
                    for each in self.holding[worker]:
                        if each.lease.task == lease.task:
                            each.lease = lease
                case Withdraw(worker, attempt):
                    kept = [h for h in self.holding[worker] if h.lease.task.key != attempt.key]
                    self.holding[worker] = kept
                case StopWorker(worker):
                    del self.holding[worker]
                case StartWorker() | _:
                    pass

    def run(self) -> int:
        """Run to the end; returns the seconds."""
        while self.job.ended is None:
            assert self.seconds < 10_000
            self.seconds += 1
            for worker in list(self.holding):
                self.work(worker)
            if self.job.has_idle_workers():
                self.tell(self.look())
        assert self.job.ended.ending is Ending.COMPLETE
        return self.seconds

    def work(self, worker: int) -> None:
        self.budget[worker] += self.speeds[worker]
        for each in list(self.holding[worker]):
            while (row := each.next_row()) is not None and self.budget[worker] >= 1:
                self.budget[worker] -= 1
                self.rows_made += 1
                each.made.add(row)
            if each.next_row() is None:
                self.holding[worker].remove(each)
                self.report(worker, each)
        self.budget[worker] %= 1

    def report(self, worker: int, done: Holding) -> None:
        lease, task = done.lease, done.lease.task
        assert done.covered() == set(range(task.start, task.stop))
        if lease.of:
            share = Share(lease.of, task.start, task.stop, lease.id, "", task.rows, 0, 0)
            self.tell(ShareMade(worker, task.key, lease.attempt, share))
        else:
            self.tell(TaskCommitted(worker, task.key, lease.attempt, self.rows[task.key], 0))

    def look(self) -> Looked:
        progress = tuple(h.progress() for holding in self.holding.values() for h in holding)
        paces = {n: Pace(1 / self.speeds[n], 1.0) for n in self.holding}
        return Looked(progress, paces, Pace(1.0, 1.0))


@pytest.mark.parametrize("workers", [2, 4, 8, 16])
def test_one_long_task_takes_n_workers_an_nth_of_the_time(workers: int) -> None:
    """All have a task of one row, but for one that has 1,600; each makes a row a second."""
    tail = Tail([1600] + [1] * (workers - 1), [1.0] * workers)
    seconds = tail.run()
    assert 1600 / workers <= seconds < 1.1 * 1600 / workers + 15
    assert tail.rows_made < 1.1 * 1600 + workers, "hardly a row is made twice"


def test_one_slow_worker_holds_up_the_end_no_longer_than_its_part() -> None:
    """Worker 0 makes a row in twenty seconds, three others one a second: 3.05 rows a second."""
    seconds = Tail([600, 1, 1, 1], [0.05, 1.0, 1.0, 1.0]).run()
    assert seconds < 1.25 * 600 / 3.05 + 15


def test_tasks_of_all_sizes_end_together() -> None:
    """Five workers, 5 to 3,125 rows: 3,905 rows in all, which take five of them 781 seconds."""
    assert Tail([3125, 625, 125, 25, 5], [1.0] * 5).run() < 1.1 * 781 + 15


def test_a_last_task_that_has_not_begun_is_divided_like_any_other() -> None:
    """Three tasks of 400 rows and two workers: 600 seconds, not 800."""
    assert Tail([400, 400, 400], [1.0, 1.0]).run() < 1.1 * 600 + 15
