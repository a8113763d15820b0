"""How many rows to decode together: as many as the memory holds and the device rewards.

A pass over one row costs nearly as much as one over a few, until the device has enough to compute;
from there on more rows make each of them slower and nothing faster. So the number is doubled while
the rows fit and the tokens a second still grow.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

#: The least number that is looked at, and the greatest.
_FIRST, _MOST = 8, 1024
#: By how much twice the rows must make more tokens a second.
_WORTH = 0.1
#: Share of the free memory that rows may fill: what a pass needs beside them has no other place.
#: Others live on a host too.
SHARES = {"cuda": 0.85, "cpu": 0.5}
#: Slots where nobody knows how much memory is free.
UNKNOWN = 16


@dataclass(frozen=True, slots=True)
class Sizing:
    """A number of slots, and why it is this one, for people."""

    slots: int
    why: str


def settle(free: int | None, share: float, slot: int, seconds: Callable[[int], float]) -> Sizing:
    """Return how many slots to have.

    free: bytes that the device can still give; None where nobody knows. share: how much of them
    rows may fill. slot: bytes that each row needs. seconds: rows -> what a pass over them takes.
    """
    if free is None:
        return Sizing(UNKNOWN, "it is not known how much memory is free")
    fits = max(1, int(free * share) // slot)
    memory = f"{fits} rows of {_megabytes(slot)} fit into {share:.0%} of {_megabytes(free)} free"
    slots = min(_FIRST, fits)
    rate = slots / seconds(slots)
    while slots < min(fits, _MOST):
        more = min(2 * slots, fits, _MOST)
        found = more / seconds(more)
        if found < rate * (1 + _WORTH * (more / slots - 1)):
            gain = found / rate - 1
            return Sizing(slots, f"{more} would make {gain:+.0%} tokens a second; {memory}")
        slots, rate = more, found
    return Sizing(slots, memory)


def _megabytes(size: int) -> str:
    return f"{size / 2**20:,.0f} MiB"
