"""What a watcher saw is kept in the output; a job that never started leaves nothing."""

from __future__ import annotations

import io
import json
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from eagle_batch.errors import StoreError
from eagle_batch.job.store import open_store
from eagle_batch.report.output import TIMELINE, Objects
from eagle_batch.report.progress import JsonView, PlainView
from eagle_batch.report.recorder import MOST_POINTS, Recorder
from tests.report.test_progress import Point


@dataclass
class Clock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now


def recorder(folder: Path, out: io.StringIO, made: list[str], clock: Clock) -> Recorder:
    def finish(store: Objects) -> None:
        made.append(store.name)

    view = PlainView(Console(file=out, width=200))
    return Recorder(view, open_store(str(folder)), finish, clock)


def test_points_and_remarks_are_written_before_the_report_is_made(tmp_path: Path) -> None:
    made: list[str] = []
    clock, out = Clock(), io.StringIO()
    watcher = recorder(tmp_path, out, made, clock)
    watcher.update(replace(Point(), elapsed_s=0.0, workers=0))
    watcher.update(replace(Point(), elapsed_s=0.1, workers=0))
    watcher.update(replace(Point(), elapsed_s=0.2, workers=1))
    clock.now = 103.0
    watcher.say("worker 0 was lost")
    watcher.update(replace(Point(), elapsed_s=4.0, workers=1, tokens=7))
    watcher.close()
    (run,) = json.loads((tmp_path / TIMELINE).read_text())["runs"]
    assert [(point["at"], point["workers"]) for point in run["points"]] == [
        (0, 0),
        (0.2, 1),
        (4, 1),
    ]
    assert run["points"][-1]["tokens"] == 7
    assert run["remarks"] == [{"at": 3.0, "text": "worker 0 was lost"}]
    assert made == [str(tmp_path)]
    assert "worker 0 was lost" in out.getvalue()


def test_a_run_that_never_started_leaves_the_output_alone(tmp_path: Path) -> None:
    made: list[str] = []
    recorder(tmp_path, io.StringIO(), made, Clock()).close()
    assert made == []
    assert list(tmp_path.iterdir()) == []


def test_each_run_adds_to_the_timeline(tmp_path: Path) -> None:
    for _ in range(2):
        watcher = recorder(tmp_path, io.StringIO(), [], Clock())
        watcher.update(Point())
        watcher.close()
    assert len(json.loads((tmp_path / TIMELINE).read_text())["runs"]) == 2


def test_a_long_run_keeps_a_bounded_number_of_points_from_all_of_it(tmp_path: Path) -> None:
    watcher = recorder(tmp_path, io.StringIO(), [], Clock())
    for second in range(5 * MOST_POINTS):
        watcher.update(replace(Point(), elapsed_s=float(second)))
    watcher.close()
    (run,) = json.loads((tmp_path / TIMELINE).read_text())["runs"]
    ats = [point["at"] for point in run["points"]]
    assert MOST_POINTS / 3 < len(ats) <= MOST_POINTS + 1
    assert (ats[0], ats[-1]) == (0, 5 * MOST_POINTS - 1)
    assert ats == sorted(ats)


def test_a_store_that_fails_at_the_end_is_a_line_and_no_failure(tmp_path: Path) -> None:
    def fail(store: Objects) -> None:
        raise StoreError("the bucket is gone")

    out = io.StringIO()
    view = PlainView(Console(file=out, width=200))
    watcher = Recorder(view, open_store(str(tmp_path)), fail)
    watcher.update(Point())
    watcher.close()
    assert "the report could not be written: the bucket is gone" in out.getvalue()


def test_json_lines_are_one_object_each_and_not_too_many() -> None:
    out, clock = io.StringIO(), Clock()
    view = JsonView(Console(file=out, width=40), clock)
    for moment in (0.0, 0.5, 2.5):
        clock.now = 100.0 + moment
        view.update(replace(Point(), completed=1000))
    view.say("worker 1 was lost: [red]")
    view.close()
    events = [json.loads(line) for line in out.getvalue().splitlines()]
    assert [event["event"] for event in events] == ["progress", "progress", "remark"]
    assert (events[0]["percent"], events[0]["committed"], events[0]["eta_s"]) == (99, 400, 70.0)
    assert events[2]["text"] == "worker 1 was lost: [red]"
