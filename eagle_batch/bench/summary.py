"""What a benchmark says: the headline, where drafting stops to pay, and one sentence of advice."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from eagle_batch.bench.measure import PLAIN, Measurement

#: Differences below this are noise of the machine.
NOISE = 0.03


@dataclass(frozen=True, slots=True)
class BreakEven:
    """The batch from which on drafting does not pay, by interpolation between measured ones."""

    #: Rows in the batch; None where no crossing was measured.
    batch: float | None
    #: Whether drafting pays at the smallest and at the largest batch that was measured.
    pays_at_first: bool
    pays_at_last: bool


@dataclass(frozen=True, slots=True)
class Summary:
    """What the numbers come to."""

    #: The measurement with the most tokens a second, and its ratio to plain decoding.
    best: Measurement
    best_ratio: float
    #: Best ratio of a draft at each batch, by batch; empty without drafts.
    ratios: dict[int, float]
    break_even: BreakEven | None
    device: str

    @property
    def tokens_an_hour(self) -> float:
        """Tokens by the hour of a worker, which is a GPU on GPUs."""
        return 3600 * self.best.tokens_per_second

    @property
    def hour(self) -> str:
        """What is paid by the hour."""
        return "GPU-hour" if self.device.startswith("cuda") else "worker-hour"

    @property
    def headline(self) -> str:
        """The number that money is counted in."""
        name, batch = self.best.shape.name, self.best.batch
        return f"{self.tokens_an_hour:,.0f} tokens a {self.hour} (batch {batch}, {name})"

    @property
    def advice(self) -> str:
        """One sentence on what to set."""
        if not self.ratios:
            return "Plain decoding was measured alone: name a head to see what drafting would gain."
        return f"{self._setting()}; {self._where_it_pays()}."

    def _setting(self) -> str:
        batch, speed = self.best.batch, f"{self.best.tokens_per_second:,.1f} tokens/s"
        if self.best.shape == PLAIN:
            return f"engine.slots: {batch} without drafts makes the most ({speed})"
        name, ratio = self.best.shape.name, f"{self.best_ratio:.2f} times plain decoding"
        if self.best_ratio < 1 + NOISE:
            ratio = "no more than noise above plain decoding"
        return f"engine.slots: {batch} with {name} makes the most ({speed}, {ratio})"

    def _where_it_pays(self) -> str:
        assert self.break_even is not None
        first, last = min(self.ratios), max(self.ratios)
        top = max(self.ratios, key=lambda batch: self.ratios[batch])
        if self.break_even.batch is not None:
            rows = f"{self.break_even.batch:.2g} rows"
            side = "up to" if self.break_even.pays_at_first else "from"
            best = f"most at batch {top} ({self.ratios[top]:.2f} times)"
            return f"drafting pays {side} about {rows}, {best}"
        if self.break_even.pays_at_last:
            return f"drafting pays at every batch from {first} to {last}, most at {top}"
        return "drafting pays at no batch measured, so decode plainly or train a better head"


def summarise(measurements: Sequence[Measurement], device: str) -> Summary:
    """Return what measurements come to; each batch has one of plain decoding."""
    best = max(measurements, key=lambda m: m.tokens_per_second)
    ratios = best_ratios(measurements)
    # What is chosen while running falls back to plain decoding, and hides where drafts stop to pay.
    fixed = best_ratios([m for m in measurements if m.shape.tree != "auto"])
    return Summary(
        best=best,
        best_ratio=1.0 if best.shape == PLAIN else ratios[best.batch],
        ratios=ratios,
        break_even=break_even(fixed or ratios) if ratios else None,
        device=device,
    )


def best_ratios(measurements: Sequence[Measurement]) -> dict[int, float]:
    """Return the best ratio of a draft to plain decoding, by batch; empty without drafts."""
    plain = {m.batch: m.tokens_per_second for m in measurements if m.shape == PLAIN}
    ratios: dict[int, float] = {}
    for m in measurements:
        if m.shape != PLAIN:
            ratio = m.tokens_per_second / plain[m.batch]
            ratios[m.batch] = max(ratio, ratios.get(m.batch, 0.0))
    return ratios


def break_even(ratios: dict[int, float]) -> BreakEven:
    """Find the batch at which the ratio crosses 1, straight between log batches."""
    batches = sorted(ratios)
    crossing = None
    for low, high in pairwise(batches):
        a, b = ratios[low] - 1, ratios[high] - 1
        if (a > 0) != (b > 0):
            share = a / (a - b)
            crossing = math.exp(math.log(low) + share * (math.log(high) - math.log(low)))
    return BreakEven(crossing, ratios[batches[0]] > 1, ratios[batches[-1]] > 1)
