"""Views of a running job: plain lines, JSON lines, and the choice between them and `live`."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Protocol

from rich.console import Console

#: Seconds between two plain lines.
PLAIN_EVERY_S = 10.0
#: Seconds between two JSON lines.
JSON_EVERY_S = 2.0
#: What is said before the first token.
STARTING = "workers start and load the model"
#: What a JSON line tells of a snapshot.
NUMBERS = (
    "units",
    "committed",
    "quarantined",
    "completed",
    "workers",
    "tokens",
    "tokens_per_s",
    "average_tokens_per_s",
    "acceptance_length",
    "occupancy",
    "elapsed_s",
    "eta_s",
)


class Snapshot(Protocol):
    """What a view shows; the job's own record has these fields."""

    @property
    def units(self) -> int:
        """Rows x samples of the job."""

    @property
    def committed(self) -> int:
        """Those in committed shards."""

    @property
    def quarantined(self) -> int:
        """Those of the committed in the error table."""

    @property
    def completed(self) -> int:
        """Those that are committed or wait in a worker's memory."""

    @property
    def workers(self) -> int:
        """Workers that are ready."""

    @property
    def tokens(self) -> int:
        """Tokens that this run generated."""

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens for each second, lately."""

    @property
    def average_tokens_per_s(self) -> float:
        """Generated tokens for each second since the first worker was ready."""

    @property
    def acceptance_length(self) -> float:
        """Tokens a row gains in one pass of the target."""

    @property
    def occupancy(self) -> float:
        """Share of the engines' slots that held a row, over the whole run."""

    @property
    def elapsed_s(self) -> float:
        """Seconds since the run began."""

    @property
    def eta_s(self) -> float | None:
        """Seconds that are left; None while unknown."""


class View(Protocol):
    """Somebody who watches a job."""

    def update(self, snapshot: Snapshot) -> None:
        """Show how far the job is; called often."""

    def say(self, text: str) -> None:
        """Show one line that stays."""

    def close(self) -> None:
        """Show nothing more."""


def make_view(console: Console, *, plain: bool) -> View:
    """Return a live view where the console is a terminal, else one of plain lines."""
    if plain or not console.is_terminal:
        return PlainView(console)
    from eagle_batch.report.live import LiveView

    return LiveView(console)


class PlainView:
    """A line every ten seconds."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._last = clock()

    def update(self, snapshot: Snapshot) -> None:
        """Print a line if it is time."""
        if self._clock() - self._last >= PLAIN_EVERY_S:
            self._last = self._clock()
            self.say(describe(snapshot))

    def say(self, text: str) -> None:
        """Print a line."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Do nothing: lines stay."""


class JsonView:
    """One JSON object a line, for programs: `event` is progress or remark."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._last: float | None = None

    def update(self, snapshot: Snapshot) -> None:
        """Print the numbers if it is time."""
        if self._last is None or self._clock() - self._last >= JSON_EVERY_S:
            self._last = self._clock()
            numbers = {name: getattr(snapshot, name) for name in NUMBERS}
            self.emit("progress", percent=percent(snapshot), **numbers)

    def say(self, text: str) -> None:
        """Print a remark."""
        self.emit("remark", text=text)

    def emit(self, event: str, **values: object) -> None:
        """Print one event."""
        line = json.dumps({"event": event, **values})
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Do nothing: lines stay."""


def describe(snapshot: Snapshot) -> str:
    """Return one line on how far a job is; 100 % only when the last shard is committed."""
    rows = f"{percent(snapshot)}% {snapshot.completed:,}/{snapshot.units:,} rows"
    if is_starting(snapshot):
        return f"{rows}, {STARTING}, {duration(snapshot.elapsed_s)} elapsed"
    parts = [
        rows,
        f"{snapshot.committed:,} committed",
        f"{snapshot.tokens_per_s:,.0f} tokens/s",
        f"{snapshot.acceptance_length:.2f} tokens/pass",
        f"{snapshot.occupancy:.0%} of slots",
        counted(snapshot.workers, "worker"),
    ]
    if snapshot.quarantined:
        parts.append(f"{snapshot.quarantined:,} quarantined")
    parts.append(f"{duration(snapshot.elapsed_s)} elapsed")
    if snapshot.eta_s is not None and snapshot.committed < snapshot.units:
        parts.append(f"about {duration(snapshot.eta_s)} left")
    return ", ".join(parts)


def is_starting(snapshot: Snapshot) -> bool:
    """Tell whether nothing is generated yet: numbers of speed would alarm, and mean nothing."""
    return snapshot.tokens == 0 and snapshot.completed < snapshot.units


def percent(snapshot: Snapshot) -> int:
    """Return the share that is done; 100 only when the last shard is committed."""
    if snapshot.committed >= snapshot.units:
        return 100
    return min(99, 100 * snapshot.completed // max(1, snapshot.units))


def counted(count: int, word: str) -> str:
    """Return a number with its word, which has an "s" unless there is one."""
    return f"{count:,} {word}" + ("s" if count != 1 else "")


def duration(seconds: float) -> str:
    """Return seconds as people say them: 48s, 3m10s, 2h05m."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02}m"
