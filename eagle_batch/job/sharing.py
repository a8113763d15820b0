"""How workers without work divide the rows of slow tasks: arithmetic, without state or clock.

A run is what one worker has in hand: a task, or a share of one. It goes from its first row to its
last, so that others take rows from its end:

    start ........ begun ............ |----taken----| stop
    in its hands   not begun, free     made by others

With n helpers each of the n + 1 gets the same number of rows. Where nothing is free, those that it
has begun are made again, if that is quicker by far than to wait: its worker hangs, or is very slow.
Runs lie within each other or apart, since each is cut out of the free rows of another.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace
from typing import NamedTuple


class Span(NamedTuple):
    """Rows [start, stop) of a planned shard."""

    start: int
    stop: int

    @property
    def rows(self) -> int:
        """How many there are."""
        return self.stop - self.start

    def holds(self, other: Span) -> bool:
        """Whether the other lies within."""
        return self.start <= other.start and other.stop <= self.stop


@dataclass(frozen=True, slots=True)
class Pace:
    """How long rows take."""

    #: Seconds for each row while many are made together.
    row_s: float
    #: Seconds from a row's beginning to its end.
    whole_s: float
    #: Seconds since anything was heard of the worker's rows.
    silent_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Run:
    """Rows in the hands of one worker."""

    span: Span
    #: First row that it has not begun, and how many of those before are not finished.
    begun: int
    open: float
    #: Rows that the worker makes before.
    ahead: float
    pace: Pace
    #: Rows that others make, or have made.
    taken: tuple[Span, ...] = ()

    @property
    def free(self) -> list[Span]:
        """Rows that nobody has begun."""
        return without(Span(max(self.begun, self.span.start), self.span.stop), self.taken)

    @property
    def held(self) -> list[Span]:
        """Rows that only this worker has begun."""
        return without(Span(self.span.start, self.begun), self.taken)

    @property
    def left(self) -> float:
        """Rows that are not finished, those before them too."""
        return self.ahead + self.open + total(self.free)

    @property
    def left_s(self) -> float:
        """Seconds until it is done; one that falls silent may stay so for as long again."""
        if not (self.free or self.held):
            return 0.0
        silent = self.pace.silent_s - self.pace.whole_s
        return max(self.left * self.pace.row_s, silent)


def without(span: Span, taken: Iterable[Span]) -> list[Span]:
    """Return what is left of a span, in order."""
    left, at = [], span.start
    for other in sorted(taken):
        if other.start > at:
            left.append(Span(at, min(other.start, span.stop)))
        at = max(at, other.stop)
    left.append(Span(at, span.stop))
    return [each for each in left if each.rows > 0]


def total(spans: Iterable[Span]) -> int:
    """Return how many rows there are in spans that lie apart."""
    return sum(span.rows for span in spans)


def covers(spans: Iterable[Span], whole: Span) -> bool:
    """Tell whether the spans leave nothing out."""
    return not without(whole, spans)


def divide(
    runs: Sequence[Run], helpers: int, usual: Pace, least_s: float
) -> list[tuple[int, Span]]:
    """Return for each helper that is wanted the number of a run and the rows it takes from that.

    `least_s` is the work that each must find, in seconds of the run's own worker; `usual` the pace
    of workers in general.
    """
    some = {n: run for n, run in enumerate(runs) if _is_worth_it(run, helpers, usual)}
    left_s = {n: run.left_s for n, run in some.items()}
    wanted = dict.fromkeys(some, 0)
    # The run that would take longest is first.
    longest = [(-seconds, n) for n, seconds in left_s.items()]
    heapify(longest)
    while longest and helpers:
        _, n = longest[0]
        if left_s[n] / (wanted[n] + 2) < least_s:
            heappop(longest)
            continue
        helpers -= 1
        wanted[n] += 1
        heapreplace(longest, (-left_s[n] / (wanted[n] + 1), n))
    return [(n, span) for n, count in wanted.items() if count for span in _cut(some[n], count)]


def _is_worth_it(run: Run, helpers: int, usual: Pace) -> bool:
    """Tell whether rows are free, or are made again in less than half of the time that is left."""
    again_s = total(run.held) / max(1, helpers) * usual.row_s + usual.whole_s
    return bool(run.free) or (bool(run.held) and 2 * again_s < run.left_s)


def _cut(run: Run, helpers: int) -> list[Span]:
    """Return spans of about the same size, the last rows first."""
    spans = run.free or run.held
    fair = int(run.left / (helpers + 1)) if run.free else total(spans)
    size = max(1, min(fair, -(-total(spans) // helpers)))
    cuts: list[Span] = []
    while spans and len(cuts) < helpers:
        last = spans.pop()
        start = max(last.start, last.stop - size)
        cuts.append(Span(start, last.stop))
        if start > last.start:
            spans.append(Span(last.start, start))
    return cuts
