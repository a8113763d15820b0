"""The time left is right within 20 % from a tenth of a job on, however its rows' lengths lie."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import fmean

import pytest

from eagle_batch.engine.request import EngineMetrics
from eagle_batch.job.entries import Tally
from eagle_batch.job.lengths import Lengths
from eagle_batch.job.meter import Meter
from eagle_batch.job.reports import PumpReport, WorkerInfo

WORKERS, SLOTS, ROWS_A_SLOT = 2, 8, 200
#: Seconds between two looks at the workers, and of a pump.
TICK_S, PUMP_S = 0.05, 1.0
#: Shares of a job's time at which its promise is looked at.
SHARES = (0.1, 0.25, 0.5, 0.75)

LENGTHS: dict[str, Callable[[random.Random], float]] = {
    "all alike": lambda rng: 128,
    "uniform": lambda rng: rng.uniform(10, 250),
    "exponential, cut": lambda rng: min(512, rng.expovariate(1 / 120)),
    "log-normal": lambda rng: min(1024, rng.lognormvariate(4.5, 0.8)),
    "three stages": lambda rng: sum(rng.uniform(5, top) for top in (30, 120, 300)),
}
#: So unlike that a tenth of a job must have many rows to tell of the others.
LENGTHS_APART = (5, 5, 5, 400)


def far_apart(rng: random.Random) -> float:
    return rng.choice(LENGTHS_APART)


@dataclass(frozen=True)
class Manner:
    """How a job runs: what a round costs, what a row gains in it, when each worker is ready."""

    #: Seconds of a round by its rows, the rows that were just let in, and the time since the start.
    round_s: Callable[[int, int, float], float] = lambda rows, new, now: 0.05
    gain: Callable[[random.Random], int] = lambda rng: 1
    ready_at: tuple[float, ...] = (0.0,) * WORKERS


MANNERS = {
    "a round is a round": Manner(),
    "drafts are accepted": Manner(gain=lambda rng: 1 + min(4, int(rng.expovariate(1.1)))),
    "rounds of fewer rows are sooner": Manner(lambda rows, new, now: 0.02 + 0.004 * rows),
    "prompts take their time": Manner(lambda rows, new, now: 0.05 + 0.15 * new),
    "drafts are tried at first": Manner(lambda rows, new, now: 0.1 if now < 30 else 0.05),
    "the second worker comes later": Manner(ready_at=(0.0, 40.0)),
}


@dataclass
class FakeWorker:
    """Slots that are refilled at once; knows what it reports, and nothing of the meter."""

    todo: deque[int]
    manner: Manner
    rng: random.Random
    free_at: float
    left: list[list[int]] = field(default_factory=list)
    tokens: int = 0
    done: list[int] = field(default_factory=list)

    def work(self, now: float) -> None:
        """Do all rounds that begin until now."""
        while self.free_at <= now and (self.left or self.todo):
            self.free_at += self.round()

    def round(self) -> float:
        new = min(SLOTS - len(self.left), len(self.todo))
        self.left += [[length, length] for length in (self.todo.popleft() for _ in range(new))]
        seconds = self.manner.round_s(len(self.left), new, self.free_at)
        for row in self.left:
            gained = min(row[0], self.manner.gain(self.rng))
            row[0] -= gained
            self.tokens += gained
        self.done += [length for left, length in self.left if left == 0]
        self.left = [row for row in self.left if row[0] > 0]
        return seconds

    def report(self) -> PumpReport:
        report = PumpReport(
            metrics=EngineMetrics(completion_tokens=self.tokens),
            units=len(self.done),
            unit_tokens=sum(self.done),
            unit_tokens_squared=sum(length**2 for length in self.done),
            under_way=len(self.left),
            seconds=PUMP_S,
        )
        self.tokens, self.done = 0, []
        return report


def promises(
    lengths: list[int], manner: Manner, rng: random.Random
) -> tuple[float, list[tuple[float, float | None]]]:
    """Run a job; return how long it took, and (moment, time left that was promised)."""
    now = 0.0
    meter = Meter("r", lambda: now)
    todo = deque(lengths)
    workers = [FakeWorker(todo, manner, rng, ready) for ready in manner.ready_at]
    started: set[int] = set()
    tally = Tally(tasks=1, done=0, failed=0, rows=0, errors=0, units=len(lengths))
    said = []
    while todo or any(worker.left for worker in workers):
        for _ in range(round(PUMP_S / TICK_S)):
            now += TICK_S
            for worker in workers:
                worker.work(now)
        for number, worker in enumerate(workers):
            if manner.ready_at[number] >= now:
                continue
            if number not in started:
                meter.started(number, WorkerInfo("host", number, "cpu"))
                started.add(number)
            meter.pumped(number, worker.report())
        said.append((now, meter.snapshot(tally).eta_s))
    return now, said


@pytest.mark.parametrize("manner", MANNERS)
@pytest.mark.parametrize("kind", LENGTHS)
def test_it_is_right_within_a_fifth_from_a_tenth_on(kind: str, manner: str) -> None:
    holds(LENGTHS[kind], MANNERS[manner], random.Random(f"{kind}, {manner}"), ROWS_A_SLOT)


def test_texts_of_mostly_yes_and_no_take_more_rows() -> None:
    holds(far_apart, Manner(), random.Random(1), 3 * ROWS_A_SLOT)


@pytest.mark.exhaustive
@pytest.mark.parametrize("length", [far_apart, LENGTHS["log-normal"]], ids=["far", "log"])
def test_what_is_wrong_is_chance_and_not_a_lean_to_one_side(
    length: Callable[[random.Random], float],
) -> None:
    """Short rows end first: their mean alone would promise far too early an end."""
    errors: list[float] = []
    for seed in range(40):
        end, said = job(length, Manner(), random.Random(seed), ROWS_A_SLOT)
        at, promised = next(look for look in said if look[0] >= SHARES[0] * end)
        assert promised is not None
        errors.append(promised / (end - at) - 1)
    assert abs(fmean(errors)) < 0.06


@pytest.mark.parametrize("kind", ["all alike", "uniform", "three stages"])
@pytest.mark.parametrize("seed", [1, 2])
def test_few_rows_are_enough_where_they_are_not_too_unlike(kind: str, seed: int) -> None:
    """Of lengths that lie far apart, the mean of 60 rows is no better known than that."""
    holds(LENGTHS[kind], Manner(), random.Random(seed), 40)


def job(
    length: Callable[[random.Random], float], manner: Manner, rng: random.Random, rows_a_slot: int
) -> tuple[float, list[tuple[float, float | None]]]:
    count = WORKERS * SLOTS * rows_a_slot
    return promises([max(1, round(length(rng))) for _ in range(count)], manner, rng)


def holds(
    length: Callable[[random.Random], float], manner: Manner, rng: random.Random, rows_a_slot: int
) -> None:
    end, said = job(length, manner, rng, rows_a_slot)
    for share in SHARES:
        at, promised = next(look for look in said if look[0] >= share * end)
        assert promised == pytest.approx(end - at, rel=0.2), f"after {share:.0%}"


def test_rows_that_are_all_alike_leave_no_doubt() -> None:
    ten = Lengths(units=10, tokens=1000, squares=100_000)
    assert ten.spread == 0
    assert ten.tokens_left(waiting=5, under_way=4, begun=150) == 5 * 100 + 4 * 100 - 150


def test_what_is_under_way_is_never_taken_for_less_than_nothing() -> None:
    unlike = Lengths(units=4, tokens=40, squares=1200)
    assert unlike.spread == pytest.approx(2.0)
    assert unlike.tokens_left(waiting=0, under_way=1, begun=500) == 500
    assert unlike.tokens_left(waiting=0, under_way=9, begun=0) > 0
    assert Lengths(1, 0, 0).tokens_left(3, 0, 0) == 0
