"""What a watcher sees: one line, never 100 % too early; a line now and then, or a live bar."""

from __future__ import annotations

import io
from dataclasses import dataclass, replace

import pytest
from rich.console import Console

from eagle_batch.report.live import LiveView
from eagle_batch.report.progress import PlainView, describe, duration, make_view


@dataclass(frozen=True)
class Point:
    units: int = 1000
    committed: int = 400
    quarantined: int = 0
    completed: int = 500
    workers: int = 2
    tokens: int = 80_000
    tokens_per_s: float = 1234.4
    average_tokens_per_s: float = 1231.0
    acceptance_length: float = 2.345
    occupancy: float = 0.75
    elapsed_s: float = 65.0
    eta_s: float | None = 70.0


def test_a_line_says_how_far_and_how_fast() -> None:
    assert describe(Point()) == (
        "50% 500/1,000 rows, 400 committed, 1,234 tokens/s, 2.35 tokens/pass, 75% of slots, "
        "2 workers, 1m05s elapsed, about 1m10s left"
    )


def test_before_the_first_token_a_line_says_what_is_waited_for() -> None:
    start = replace(Point(), completed=0, committed=0, workers=0, tokens=0, elapsed_s=21.0)
    wanted = "0% 0/1,000 rows, workers start and load the model, 21s elapsed"
    assert describe(start) == describe(replace(start, workers=1)) == wanted
    # A resume that finds all of the work done generates nothing.
    assert "start" not in describe(replace(start, completed=1000, committed=1000))


def test_quarantined_rows_are_mentioned_when_there_are_any() -> None:
    assert "7 quarantined" in describe(replace(Point(), quarantined=7))


@pytest.mark.parametrize(
    ("completed", "committed", "percent"),
    [(1000, 968, "99%"), (999, 968, "99%"), (1000, 1000, "100%"), (0, 0, "0%")],
)
def test_it_is_100_percent_only_after_the_last_commit(
    completed: int, committed: int, percent: str
) -> None:
    line = describe(replace(Point(), completed=completed, committed=committed))
    assert line.startswith(percent + " ")


def test_a_finished_job_has_no_time_left() -> None:
    assert "left" not in describe(replace(Point(), completed=1000, committed=1000))


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0s"), (59.4, "59s"), (59.6, "1m00s"), (7500, "2h05m")]
)
def test_durations_are_said_as_people_say_them(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_a_plain_view_prints_a_line_every_ten_seconds() -> None:
    now = [0.0]
    out = io.StringIO()
    view = PlainView(Console(file=out, width=200), clock=lambda: now[0])
    for second in range(25):
        now[0] = float(second)
        view.update(Point())
    view.close()
    assert out.getvalue().splitlines() == [describe(Point())] * 2


def test_a_plain_line_is_not_broken_by_a_narrow_console() -> None:
    out = io.StringIO()
    PlainView(Console(file=out, width=20)).say("a long line [with brackets] that stays whole")
    assert out.getvalue() == "a long line [with brackets] that stays whole\n"


@pytest.mark.parametrize(
    ("terminal", "plain", "kind"),
    [(True, False, LiveView), (True, True, PlainView), (False, False, PlainView)],
)
def test_the_live_view_is_for_terminals(terminal: bool, plain: bool, kind: type) -> None:
    view = make_view(Console(file=io.StringIO(), force_terminal=terminal), plain=plain)
    view.close()
    assert isinstance(view, kind)
