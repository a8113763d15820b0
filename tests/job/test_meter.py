"""Totals, rates and the time series of a run, with a clock in the test's hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from eagle_batch.engine.request import EngineMetrics
from eagle_batch.job.entries import Tally
from eagle_batch.job.meter import MOST_POINTS, Meter
from eagle_batch.job.reports import PumpReport, WorkerInfo
from eagle_batch.job.tasks import Commit, Lease, Share, Task, Withdrawal

INFO = WorkerInfo("host", 1, "cpu")


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def tally(rows: int = 0, errors: int = 0, units: int = 100) -> Tally:
    return Tally(tasks=10, done=rows // 10, failed=0, rows=rows, errors=errors, units=units)


def report(tokens: int, units: int = 1, begun: int = 0) -> PumpReport:
    """`begun` of the tokens are of rows that are not finished."""
    metrics = EngineMetrics(completion_tokens=tokens)
    finished = tokens - begun
    return PumpReport(
        metrics=metrics,
        units=units,
        unit_tokens=finished,
        unit_tokens_squared=finished**2 // max(1, units),
        under_way=8 if begun else 0,
        seconds=1.0,
    )


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_loading_models_does_not_count_as_generating(clock: Clock) -> None:
    meter = Meter("r", clock)
    clock.now = 100.0
    meter.started(0, INFO)
    clock.now = 110.0
    meter.pumped(0, report(500))
    document = meter.document(tally(), "running")
    assert document["tokens_per_s"] == 50.0
    assert (document["seconds"], document["generating_seconds"]) == (110.0, 10.0)


def test_the_speed_shown_is_of_the_last_half_minute(clock: Clock) -> None:
    meter = Meter("r", clock)
    meter.started(0, INFO)
    for second in range(1, 101):
        clock.now = float(second)
        meter.pumped(0, report(10 if second <= 50 else 30))
    assert meter.snapshot(tally()).tokens_per_s == pytest.approx(30.0)


def test_the_time_left_goes_by_tokens(clock: Clock) -> None:
    """20 of 100 rows took 10 tokens each, and 8 others have 40 tokens so far; 760 are left."""
    meter = Meter("r", clock)
    meter.started(0, INFO)
    meter.pumped(0, report(0, units=0))
    clock.now = 4.0
    meter.pumped(0, report(240, units=20, begun=40))
    assert meter.snapshot(tally()).eta_s == pytest.approx((80 * 10 - 40) / (240 / 4))
    assert meter.document(tally(), "running")["eta_s"] == meter.snapshot(tally()).eta_s
    assert meter.document(tally(), "complete")["eta_s"] is None


def test_nothing_is_promised_before_anything_is_known(clock: Clock) -> None:
    assert Meter("r", clock).snapshot(tally()).eta_s is None


def test_rows_of_earlier_runs_count_as_completed(clock: Clock) -> None:
    meter = Meter("r", clock)
    meter.started(0, INFO)
    meter.pumped(0, report(10, units=3))  # of a task that goes on
    shown = meter.snapshot(tally(rows=50, errors=2))
    assert (shown.completed, shown.committed, shown.quarantined) == (55, 52, 2)


def test_rows_that_were_made_twice_do_not_exceed_the_job(clock: Clock) -> None:
    meter = Meter("r", clock)
    meter.started(0, INFO)
    meter.pumped(0, report(10, units=130))
    assert meter.snapshot(tally()).completed == 100


def test_what_a_lost_worker_did_not_commit_is_shown_apart(clock: Clock) -> None:
    """1. each has 3 rows, worker 0 has committed 2 of them. 2. worker 0 is lost."""
    meter = Meter("r", clock)
    for worker, settled in ((0, 2), (1, 0)):
        meter.started(worker, INFO)
        made = replace(report(30, units=3), settled=settled, settled_tokens=settled * 10)
        meter.pumped(worker, made)
    assert meter.snapshot(tally(rows=2)).completed == 2 + 1 + 3
    meter.lost(0)
    shown = meter.snapshot(tally(rows=2))
    assert (shown.workers, shown.completed) == (1, 2 + 3), "its third row is to be made again"
    clock.now = 10.0
    document = meter.document(tally(rows=2), "x")
    assert (document["discarded_rows"], document["discarded_tokens"]) == (1, 10)
    assert (document["tokens_per_s"], document["rows_per_s"]) == (5.0, 0.5)
    assert document["engine"]["completion_tokens"] == 60
    assert [item["tokens"] for item in document["workers"]] == [30, 30]


def test_a_shard_that_another_worker_committed_first_is_shown_apart(clock: Clock) -> None:
    meter = Meter("r", clock)
    for worker, discarded in ((0, 0), (1, 2)):
        meter.started(worker, INFO)
        made = replace(report(20, units=2), settled=2, settled_tokens=20)
        meter.pumped(worker, replace(made, discarded=discarded, discarded_tokens=discarded * 10))
    clock.now = 4.0
    document = meter.document(tally(rows=2), "x")
    assert (document["discarded_rows"], document["discarded_tokens"]) == (2, 20)
    assert (document["completed"], document["tokens_per_s"]) == (2, 5.0)


def test_what_is_not_committed_at_the_end_was_made_for_nothing(clock: Clock) -> None:
    meter = Meter("r", clock)
    meter.started(0, INFO)
    meter.pumped(0, report(40, units=2, begun=20))
    assert meter.document(tally(), "running")["discarded_tokens"] == 0
    meter.end()
    assert meter.document(tally(), "stopped")["discarded_tokens"] == 40


def test_a_long_series_is_thinned_and_keeps_its_ends(clock: Clock) -> None:
    meter = Meter("r", clock)
    meter.started(0, INFO)
    for step in range(5000):
        clock.now = step * 2.0
        meter.pumped(0, report(1))
    series = meter.document(tally(), "running")["series"]
    assert MOST_POINTS / 4 < len(series) <= MOST_POINTS
    assert (series[0]["at"], series[0]["tokens"]) == (0.0, 1)
    assert series[-1]["at"] > 9900
    assert [p["tokens"] for p in series] == sorted(p["tokens"] for p in series)


TASK = Task("part-00000", 0, 0, 8)


def lent(attempt: int, start: int, stop: int, *inner: Share) -> tuple[Lease, Share]:
    task = Task(f"{TASK.key}+{attempt}", 0, start, stop)
    lease = Lease(task, attempt, "r", of=TASK.key, shares=inner)
    units, spent = stop - start, 10 * (stop - start)
    return lease, Share(TASK.key, start, stop, lease.id, "0" * 64, units, spent, spent)


def commit(lease: Lease) -> Commit:
    return Commit(TASK.key, lease.id, 8, 0, 1, "", 1, "")


def test_rows_that_lie_in_shares_count_as_completed_until_the_task_is(clock: Clock) -> None:
    """1. worker 1 makes four rows of a task. 2. the task's worker takes them and commits."""
    meter = Meter("r", clock)
    meter.started(0, INFO)
    meter.started(1, INFO)
    lease, share = lent(2, 4, 8)
    assert meter.lent(1, lease)
    meter.pumped(1, replace(report(40, units=4), settled=4, settled_tokens=40))
    meter.shared(lease, share)
    assert meter.snapshot(tally()).completed == 4
    meter.committed(Lease(TASK, 1, "r", shares=(share,)), commit(Lease(TASK, 1, "r")))
    document = meter.document(tally(rows=8), "x")
    assert (document["completed"], document["discarded_rows"]) == (8, 0)
    [loan] = document["loans"]
    assert (loan["worker"], loan["shard"], loan["start"], loan["stop"]) == (1, TASK.key, 4, 8)
    assert loan["state"] == "used"


@pytest.mark.parametrize("early", [False, True])
def test_a_share_that_nobody_took_was_made_for_nothing(clock: Clock, early: bool) -> None:
    meter = Meter("r", clock)
    meter.started(1, INFO)
    lease, share = lent(2, 4, 8)
    meter.lent(1, lease)
    whole = Lease(TASK, 1, "r")
    if early:
        meter.shared(lease, share)
        meter.committed(whole, commit(whole))
    else:
        meter.committed(whole, commit(whole))
        meter.shared(lease, share)
    document = meter.document(tally(rows=8), "x")
    assert (document["discarded_rows"], document["discarded_tokens"]) == (4, 40)
    assert document["completed"] == 8


def test_a_share_within_another_is_counted_once(clock: Clock) -> None:
    """Worker 2 makes rows 6 and 7 of those that were lent to worker 1; nobody takes any."""
    meter = Meter("r", clock)
    meter.started(1, INFO)
    meter.started(2, INFO)
    small, inner = lent(3, 6, 8)
    large, outer = lent(2, 4, 8, inner)
    assert meter.lent(1, large)
    assert not meter.lent(2, small), "the second"
    meter.shared(small, inner)
    meter.shared(large, outer)
    assert meter.snapshot(tally()).completed == 4
    meter.end()
    assert meter.document(tally(), "stopped")["discarded_tokens"] == 40


def test_a_share_within_another_may_be_used_where_the_other_is_not(clock: Clock) -> None:
    """Worker 0 takes rows 6 and 7 from worker 2, and has made the others when worker 1 has."""
    meter = Meter("r", clock)
    small, inner = lent(3, 6, 8)
    large, outer = lent(2, 4, 8, inner)
    meter.lent(1, large)
    meter.lent(2, small)
    meter.shared(small, inner)
    meter.shared(large, outer)
    meter.committed(Lease(TASK, 1, "r", shares=(inner,)), commit(Lease(TASK, 1, "r")))
    document = meter.document(tally(rows=8), "x")
    assert (document["discarded_rows"], document["discarded_tokens"]) == (2, 20)
    assert [loan["state"] for loan in document["loans"]] == ["unused", "used"]


def test_a_loan_is_withdrawn_or_lost_with_its_worker(clock: Clock) -> None:
    meter = Meter("r", clock)
    meter.started(1, INFO)
    meter.started(2, INFO)
    meter.lent(1, lent(2, 4, 8)[0])
    meter.lent(2, lent(3, 2, 4)[0])
    clock.now = 3.0
    meter.withdrawn(Withdrawal(f"{TASK.key}+2", 2))
    meter.lost(1)
    meter.lost(2)
    found = [(each["state"], each["ended_at"]) for each in meter.document(tally(), "x")["loans"]]
    assert found == [("withdrawn", 3.0), ("lost", 3.0)]


def test_workers_that_were_let_go_are_not_among_the_lost(clock: Clock) -> None:
    """The report marked every worker of a finished job as lost."""
    meter = Meter("r", clock)
    for worker in range(3):
        meter.started(worker, INFO)
    for now, gone in ((1.0, meter.lost), (2.0, meter.released)):
        clock.now = now
        gone(int(now) - 1)
    clock.now = 3.0
    meter.end()
    found = [
        (each["ended_at"], each["lost_at"]) for each in meter.document(tally(), "x")["workers"]
    ]
    assert found == [(1.0, 1.0), (2.0, None), (3.0, None)]
