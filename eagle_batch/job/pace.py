"""How far workers are and how fast, from what they report: for whoever shares their rows."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from eagle_batch.job.events import Looked
from eagle_batch.job.reports import PumpReport
from eagle_batch.job.sharing import Pace
from eagle_batch.job.tasks import Progress

#: Seconds of work after which what came before counts half: a worker may become slow.
HALF_S = 60.0


@dataclass(slots=True)
class _Speed:
    """Units and the seconds that they took one worker, older ones less."""

    units: float = 0.0
    seconds: float = 0.0

    def add(self, units: int, seconds: float) -> None:
        keep = 0.5 ** (seconds / HALF_S)
        self.units = self.units * keep + units
        self.seconds = self.seconds * keep + seconds


@dataclass(slots=True)
class _Seen:
    """One worker."""

    #: When it last read or wrote a token, or was given something.
    heard: float
    speed: _Speed = field(default_factory=_Speed)
    slots: int = 1
    progress: tuple[Progress, ...] = ()


class Paces:
    """What is known of the workers that are there."""

    def __init__(self, samples: int, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin with none; a row counts as many units as there are samples."""
        self._samples = samples
        self._clock = clock
        self._workers: dict[int, _Seen] = {}
        #: Of all workers, those that are gone too.
        self._units, self._seconds = 0, 0.0

    def given(self, worker: int) -> None:
        """Note that a worker was given something to do."""
        seen = self._workers.setdefault(worker, _Seen(self._clock()))
        if not seen.progress:
            seen.heard = self._clock()

    def pumped(self, worker: int, report: PumpReport) -> None:
        """Take in what a worker did."""
        seen = self._workers.setdefault(worker, _Seen(self._clock()))
        if report.units or report.metrics.completion_tokens or report.metrics.prompt_tokens:
            seen.heard = self._clock()
        seen.speed.add(report.units, report.seconds)
        self._units += report.units
        self._seconds += report.seconds
        seen.slots = max(1, report.slots)
        seen.progress = report.progress

    def lost(self, worker: int) -> None:
        """Forget a worker that is gone."""
        self._workers.pop(worker, None)

    def look(self) -> Looked | None:
        """Return how far the workers are, None as long as none has finished a row."""
        if not self._units:
            return None
        unit_s = self._seconds / self._units
        slots = max((seen.slots for seen in self._workers.values()), default=1)
        usual = Pace(unit_s * self._samples, unit_s * slots)
        return Looked(
            progress=tuple(each for seen in self._workers.values() for each in seen.progress),
            paces={worker: self._pace(seen, usual) for worker, seen in self._workers.items()},
            usual=usual,
        )

    def _pace(self, seen: _Seen, usual: Pace) -> Pace:
        """Return a worker's pace: the usual one at first, then more and more its own."""
        units = seen.speed.units + seen.slots
        seconds = seen.speed.seconds + usual.whole_s
        return Pace(seconds / units * self._samples, usual.whole_s, self._clock() - seen.heard)
