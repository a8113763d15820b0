"""How fast workers are, from their reports, with a clock in the test's hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from eagle_batch.engine.request import EngineMetrics
from eagle_batch.job.pace import Paces
from eagle_batch.job.reports import PumpReport
from eagle_batch.job.tasks import Progress
from tests.job.test_meter import Clock

AT = Progress("part-00000", 1, begun=9, open=4)


def report(units: int, seconds: float, *progress: Progress) -> PumpReport:
    return PumpReport(units=units, seconds=seconds, slots=4, progress=progress)


def test_nothing_is_known_before_a_row_is_finished() -> None:
    paces = Paces(samples=2, clock=Clock())
    paces.given(0)
    paces.pumped(0, report(0, 1.0, AT))
    assert paces.look() is None


def test_rows_count_as_many_units_as_there_are_samples() -> None:
    paces = Paces(samples=2, clock=Clock())
    paces.pumped(0, report(4, 2.0, AT))
    look = paces.look()
    assert look is not None
    assert look.progress == (AT,)
    assert look.usual.row_s == 1.0
    assert look.usual.whole_s == 2.0, "four at once, half a second for each"


def test_a_worker_is_taken_to_be_as_fast_as_others_until_its_own_pace_is_known() -> None:
    paces = Paces(samples=1, clock=Clock())
    paces.pumped(0, report(1000, 100.0))
    paces.pumped(1, report(0, 0.4))
    look = paces.look()
    assert look is not None
    assert look.paces[1].row_s == pytest.approx(0.2, rel=0.05)
    for _ in range(200):
        paces.pumped(1, report(1, 1.0))
    look = paces.look()
    assert look is not None
    assert look.paces[1].row_s == pytest.approx(1.0, rel=0.1)


def test_a_worker_that_becomes_slow_is_known_to_be_after_some_minutes() -> None:
    paces = Paces(samples=1, clock=Clock())
    for _ in range(1000):
        paces.pumped(0, report(10, 1.0))
    for _ in range(300):
        paces.pumped(0, report(1, 1.0))
    look = paces.look()
    assert look is not None
    assert 0.7 < look.paces[0].row_s < 1.1


def test_a_worker_with_a_long_row_is_not_silent() -> None:
    clock = Clock()
    paces = Paces(samples=1, clock=clock)
    paces.pumped(0, report(1, 1.0, AT))
    clock.now = 30.0
    paces.pumped(0, replace(report(0, 1.0, AT), metrics=EngineMetrics(completion_tokens=5)))
    look = paces.look()
    assert look is not None
    assert look.paces[0].silent_s == 0.0


def test_a_worker_is_silent_since_it_did_something_or_was_given_something() -> None:
    clock = Clock()
    paces = Paces(samples=1, clock=clock)
    clock.now = 5.0
    paces.pumped(0, report(1, 1.0, AT))
    clock.now = 30.0
    paces.pumped(0, report(0, 1.0, AT))
    paces.given(0)
    look = paces.look()
    assert look is not None
    assert look.paces[0].silent_s == 25.0, "it had something in hand already"
    paces.pumped(0, report(0, 1.0))
    clock.now = 40.0
    paces.given(0)
    look = paces.look()
    assert look is not None
    assert look.paces[0].silent_s == 0.0
    paces.lost(0)
    look = paces.look()
    assert look is not None
    assert (look.progress, look.paces) == ((), {})
