"""The view of a running job on a terminal: a bar, and the numbers that matter, in place."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from eagle_batch.report.progress import STARTING, Snapshot, duration, is_starting, percent

#: Pictures a second.
RATE = 4


class LiveView:
    """Shows the last snapshot in place; what is said stays above it."""

    def __init__(self, console: Console) -> None:
        self._remarks = 0
        self._live = Live(Text("starting workers ..."), console=console, refresh_per_second=RATE)
        self._live.start()

    def update(self, snapshot: Snapshot) -> None:
        """Show how far the job is."""
        self._live.update(picture(snapshot, self._remarks))

    def say(self, text: str) -> None:
        """Print a line above the picture."""
        self._remarks += 1
        self._live.console.print(text, markup=False, highlight=False)

    def close(self) -> None:
        """Leave the last picture as it is."""
        self._live.stop()


def picture(snapshot: Snapshot, remarks: int = 0) -> RenderableType:
    """Return the view of one moment, for 80 columns."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", width=8)
    table.add_column()
    for name, value in _lines(snapshot, remarks):
        table.add_row(name, value)
    return Group(_bar(snapshot), table)


def shown_done(snapshot: Snapshot) -> int:
    """Return how far the bar is: rows in memory move it too, but never to its end."""
    if snapshot.committed >= snapshot.units:
        return snapshot.units
    return min(snapshot.completed, snapshot.units - 1)


def _bar(snapshot: Snapshot) -> Table:
    row = Table.grid(padding=(0, 2))
    row.add_column(width=44)
    row.add_column(justify="right", width=5)
    row.add_column()
    bar = ProgressBar(total=max(1, snapshot.units), completed=shown_done(snapshot), width=44)
    left = ""
    if snapshot.committed < snapshot.units:
        known = snapshot.eta_s is not None
        left = f"about {duration(snapshot.eta_s or 0)} left" if known else "time left not known yet"
    row.add_row(bar, f"{percent(snapshot)} %", left)
    return row


def _lines(snapshot: Snapshot, remarks: int) -> Iterator[tuple[str, Text]]:
    rows = f"{snapshot.completed:,} of {snapshot.units:,}, {snapshot.committed:,} committed"
    yield "rows", _with_failures(rows, snapshot.quarantined, "quarantined")
    average = f"{snapshot.average_tokens_per_s:,.0f} on average"
    speed = f"{snapshot.tokens_per_s:,.0f} tokens/s now, {average}"
    yield "speed", Text(speed)
    batch = f"{snapshot.occupancy:.0%} of the slots in use, "
    yield "batch", Text(f"{batch}{snapshot.acceptance_length:.2f} tokens a target pass")
    workers = f"{snapshot.workers:,} ready, {duration(snapshot.elapsed_s)} elapsed"
    yield "workers", _with_failures(workers, remarks, "remarks" if remarks != 1 else "remark")
    if is_starting(snapshot):
        yield "", Text(STARTING, style="dim")


def _with_failures(text: str, count: int, what: str) -> Text:
    line = Text(text)
    if count:
        line.append(f", {count:,} {what}", style="yellow")
    return line
