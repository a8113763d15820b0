"""How many tokens are left, by the units that are finished and those that are under way.

Short units are finished first, so the mean of the finished ones is too low at first, the more so
the less alike they are. Renewal theory (Cox, Renewal Theory, 1962, chapter 5) mends it: places that
are refilled at once hold units that have (1 + c) / 2 times the mean so far, and as much before
them, where c is the squared coefficient of variation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Lengths:
    """Finished units: how many, the sum of their tokens, the sum of the squares."""

    units: int
    tokens: int
    squares: int

    @property
    def spread(self) -> float:
        """Squared coefficient of variation."""
        if not self.tokens:
            return 0.0
        return max(0.0, self.squares * self.units / self.tokens**2 - 1)

    def tokens_left(self, waiting: int, under_way: int, begun: int) -> float:
        """Return the tokens of units that wait or are under way; the latter have `begun` so far."""
        mean = self._mean(begun)
        # Units that are all alike end when they have the mean. The less alike they are, the more
        # those that have gone far have still before them.
        alike = max(0.0, under_way * mean - begun)
        weight = min(1.0, self.spread)
        active = weight * begun + (1 - weight) * alike
        return waiting * mean + active + self._drain(under_way, mean)

    def _drain(self, under_way: int, mean: float) -> float:
        """Return what empty places cost while the last units drain, as tokens that are not made.

        The longest of n exponential rests is their harmonic number times the mean rest. How much
        faster the rows get as the batch empties depends on the device: half of it is counted.
        """
        harmonic = math.log(under_way) + 0.577 if under_way > 1 else 1.0
        rest = mean * (1 + self.spread) / 2
        return 0.5 * min(1.0, self.spread) * under_way * rest * (harmonic - 1)

    def _mean(self, begun: int) -> float:
        """Return the mean of all units, from the finished ones and what the others have so far."""
        return (self.tokens + begun * 2 * self.spread / (1 + self.spread)) / self.units
