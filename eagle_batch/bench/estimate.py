"""What a whole job will take, from what a sample of its rows took.

Tokens, hours and costs are means over the sample, times the rows of the plan. The interval is a
bootstrap over rows (Efron, 1979): it says how far the sample may be off because rows differ. It
knows nothing of slower machines, busier stores or workers that are lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

RESAMPLES = 2000
#: Share of the resamples between the two ends of an interval.
CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Interval:
    """A value and the two ends between which it lies."""

    value: float
    low: float
    high: float

    def times(self, factor: float) -> Interval:
        """Return the interval of a multiple."""
        return Interval(self.value * factor, self.low * factor, self.high * factor)


@dataclass(frozen=True, slots=True)
class Estimate:
    """A job in numbers."""

    #: Input rows of the plan, and of the sample.
    rows: int
    sampled: int
    #: Generated tokens and prompt tokens of the whole job.
    tokens: Interval
    prompt_tokens: Interval
    #: Generated tokens that one worker makes in a second.
    tokens_per_s: float
    worker_hours: Interval
    workers: int
    hours: Interval
    #: In the currency of the price; None without one.
    cost: Interval | None


def estimate(
    rows: int,
    tokens: Sequence[int],
    prompt_tokens: Sequence[int],
    tokens_per_s: float,
    workers: int,
    price_per_hour: float | None,
) -> Estimate:
    """Return the estimate for a job.

    Args:
        rows: Input rows of the whole job.
        tokens: [N] generated tokens of each sampled input row, all stages and samples together.
        prompt_tokens: [N] the same of prompts.
        tokens_per_s: Of one worker.
        workers: That run beside each other.
        price_per_hour: Of one worker.
    """
    if len(tokens) >= rows:  # The sample is the whole: nothing is left to chance.
        totals = Interval(*[float(sum(tokens))] * 3)
        prompts = Interval(*[float(sum(prompt_tokens))] * 3)
    else:
        totals = interval(tokens).times(rows)
        prompts = interval(prompt_tokens).times(rows)
    worker_hours = totals.times(1 / (3600 * max(tokens_per_s, 1e-9)))
    return Estimate(
        rows=rows,
        sampled=len(tokens),
        tokens=totals,
        prompt_tokens=prompts,
        tokens_per_s=tokens_per_s,
        worker_hours=worker_hours,
        workers=workers,
        hours=worker_hours.times(1 / workers),
        cost=None if price_per_hour is None else worker_hours.times(price_per_hour),
    )


def interval(values: Sequence[float], seed: int = 0) -> Interval:
    """Return the mean of some values with its bootstrap interval; the same for the same values."""
    found: npt.NDArray[np.float64] = np.asarray(values, np.float64)
    picks = np.random.default_rng(seed).integers(0, len(found), (RESAMPLES, len(found)))
    means = found[picks].mean(axis=1)
    edge = (1 - CONFIDENCE) / 2
    low, high = np.quantile(means, [edge, 1 - edge])
    return Interval(float(found.mean()), float(low), float(high))
