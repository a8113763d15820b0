"""The live view has every number in 80 columns, and its bar is never full too early."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from eagle_batch.report.live import LiveView, picture, shown_done
from tests.report.test_progress import Point


def text_of(point: Point, remarks: int = 0) -> str:
    out = io.StringIO()
    Console(file=out, width=80).print(picture(point, remarks))
    return out.getvalue()


def test_every_number_is_there_on_80_columns() -> None:
    text = text_of(replace(Point(), quarantined=7), remarks=1)
    for part in (
        "50 %  about 1m10s left",
        "500 of 1,000, 400 committed, 7 quarantined",
        "1,234 tokens/s now, 1,231 on average",
        "75% of the slots in use, 2.35 tokens a target pass",
        "2 ready, 1m05s elapsed, 1 remark",
    ):
        assert part in text
    assert len(text.splitlines()) == 5


def test_before_the_first_token_it_says_what_is_waited_for() -> None:
    text = text_of(replace(Point(), completed=0, committed=0, tokens=0, workers=0))
    assert "workers start and load the model" in text
    assert "workers start" not in text_of(Point())


def test_no_time_is_promised_before_one_is_known() -> None:
    assert "not known yet" in text_of(replace(Point(), eta_s=None, tokens=0, elapsed_s=0.0))
    assert "left" not in text_of(replace(Point(), completed=1000, committed=1000, eta_s=None))


@pytest.mark.parametrize(
    ("completed", "committed", "shown"), [(1000, 968, 999), (1000, 1000, 1000), (10, 0, 10)]
)
def test_the_bar_is_not_full_before_the_last_commit(
    completed: int, committed: int, shown: int
) -> None:
    assert shown_done(replace(Point(), completed=completed, committed=committed)) == shown


def test_what_is_said_stays_above_the_picture() -> None:
    out = io.StringIO()
    view = LiveView(Console(file=out, force_terminal=True, width=80))
    view.update(Point())
    view.say("worker 0 was lost [for ever]")
    view.update(replace(Point(), completed=1000, committed=1000))
    view.close()
    assert out.getvalue().index("[for ever]") < out.getvalue().rindex("1,000 of 1,000")
    assert "1 remark" in out.getvalue()


def test_the_picture_in_the_docs_is_this_view(repository: Path) -> None:
    drawing = (repository / "docs" / "terminal.svg").read_text("utf-8").replace("&#160;", " ")
    for word in ("tokens/s now", "committed", "slots in use", "a target pass", "left"):
        assert word in drawing
    assert "http" not in drawing.replace("http://www.w3.org", "")
