"""The time left is right within 20 % from a tenth of a job on, however its rows' lengths lie."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from eagle_batch.engine.request import EngineMetrics
from eagle_batch.job.entries import Tally
from eagle_batch.job.lengths import Lengths
from eagle_batch.job.meter import Meter
from eagle_batch.job.reports import PumpReport, WorkerInfo

WORKERS, SLOTS, ROWS_A_SLOT = 2, 8, 200
#: Seconds of a round, in which each row gains a token, and of a pump.
ROUND_S, PUMP_S = 0.05, 1.0

LENGTHS: dict[str, Callable[[random.Random], float]] = {
    "all alike": lambda rng: 128,
    "uniform": lambda rng: rng.uniform(10, 250),
    "exponential, cut": lambda rng: min(512, rng.expovariate(1 / 120)),
    "log-normal": lambda rng: min(1024, rng.lognormvariate(4.5, 0.8)),
    "mostly yes and no": lambda rng: rng.choice([5, 5, 5, 400]),
}


@dataclass
class FakeWorker:
    """Slots that are refilled at once; knows what it reports, and nothing of the meter."""

    todo: deque[int]
    left: list[list[int]] = field(default_factory=list)
    tokens: int = 0
    done: list[int] = field(default_factory=list)

    def round(self) -> None:
        while len(self.left) < SLOTS and self.todo:
            length = self.todo.popleft()
            self.left.append([length, length])
        for row in self.left:
            row[0] -= 1
        self.tokens += len(self.left)
        self.done += [length for left, length in self.left if left == 0]
        self.left = [row for row in self.left if row[0] > 0]

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


def promises(lengths: list[int]) -> tuple[float, list[tuple[float, float | None]]]:
    """Run a job; return how long it took, and (moment, time left that was promised)."""
    now = 0.0
    meter = Meter("r", lambda: now)
    todo = deque(lengths)
    workers = [FakeWorker(todo) for _ in range(WORKERS)]
    for number in range(WORKERS):
        meter.started(number, WorkerInfo("host", number, "cpu"))
    tally = Tally(tasks=1, done=0, failed=0, rows=0, errors=0, units=len(lengths))
    said = []
    while todo or any(worker.left for worker in workers):
        for _ in range(round(PUMP_S / ROUND_S)):
            now += ROUND_S
            for worker in workers:
                worker.round()
        for number, worker in enumerate(workers):
            meter.pumped(number, worker.report())
        said.append((now, meter.snapshot(tally).eta_s))
    return now, said


@pytest.mark.parametrize("kind", LENGTHS)
@pytest.mark.parametrize("seed", [1, 2])
def test_it_is_right_within_a_fifth_from_a_tenth_on(kind: str, seed: int) -> None:
    rng = random.Random(seed)
    count = WORKERS * SLOTS * ROWS_A_SLOT
    end, said = promises([max(1, round(LENGTHS[kind](rng))) for _ in range(count)])
    for share in (0.1, 0.25, 0.5, 0.75):
        at, promised = next(look for look in said if look[0] >= share * end)
        assert promised == pytest.approx(end - at, rel=0.2), f"{share:.0%} of {kind}"


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
