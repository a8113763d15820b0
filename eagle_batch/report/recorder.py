"""A view that also remembers what it saw, and leaves report and data set card when the job ends.

What it saw goes to `_job/timeline.json`, so that the report can be made anew from the output alone.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from eagle_batch.errors import LedgerError, StoreError
from eagle_batch.report.output import TIMELINE, Objects
from eagle_batch.report.progress import Snapshot, View

#: Seconds between two points, at first; past so many points every second one goes.
POINT_S = 1.0
MOST_POINTS = 600
#: Remarks that are kept of one run, and runs that are kept.
MOST_REMARKS = 200
MOST_RUNS = 20


@dataclass(frozen=True, slots=True)
class Point:
    """How far a job was at one moment."""

    at: float
    completed: int
    committed: int
    quarantined: int
    workers: int
    tokens: int
    acceptance_length: float
    occupancy: float


class Recorder:
    """Passes everything on to a view; writes nothing for a job that never started."""

    def __init__(
        self,
        view: View,
        store: Objects,
        finish: Callable[[Objects], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Watch for `view`; `finish` makes report and card once the timeline is written."""
        self._view = view
        self._store = store
        self._finish = finish
        self._clock = clock
        self._started = time.time()
        self._begun = clock()
        self._points: list[Point] = []
        self._last: Point | None = None
        self._remarks: list[dict[str, Any]] = []
        self._distance = POINT_S

    def update(self, snapshot: Snapshot) -> None:
        """Pass on, and keep a point where it is time."""
        self._view.update(snapshot)
        self._last = _point(snapshot)
        far = not self._points or self._last.at - self._points[-1].at >= self._distance
        if far or self._last.workers != self._points[-1].workers:
            self._points.append(self._last)
        if len(self._points) > MOST_POINTS:
            self._points = self._points[::2]
            self._distance *= 2

    def say(self, text: str) -> None:
        """Pass on, and keep the line."""
        self._view.say(text)
        if len(self._remarks) < MOST_REMARKS:
            self._remarks.append({"at": self._clock() - self._begun, "text": text})

    def close(self) -> None:
        """Close the view, then write the timeline and what is made of it."""
        self._view.close()
        if self._last is None:
            return
        try:
            self._write()
            self._finish(self._store)
        except (StoreError, LedgerError) as error:
            self._view.say(f"the report could not be written: {error}")

    def _write(self) -> None:
        stored = self._store.get(TIMELINE)
        earlier = [] if stored is None else json.loads(stored)["runs"]
        points = self._points + [point for point in [self._last] if point not in self._points]
        run = {
            "started": self._started,
            "points": [asdict(point) for point in points if point is not None],
            "remarks": self._remarks,
        }
        body = json.dumps({"runs": [*earlier, run][-MOST_RUNS:]})
        self._store.put_replace(TIMELINE, body.encode())


def _point(snapshot: Snapshot) -> Point:
    return Point(
        at=snapshot.elapsed_s,
        completed=snapshot.completed,
        committed=snapshot.committed,
        quarantined=snapshot.quarantined,
        workers=snapshot.workers,
        tokens=snapshot.tokens,
        acceptance_length=snapshot.acceptance_length,
        occupancy=snapshot.occupancy,
    )
