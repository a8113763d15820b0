"""What a pass of the target costs by the number of its tokens, measured before the first row.

A round verifies rows * (1 + nodes) tokens. Whether so many cost little more than one (memory-bound:
a single row on any device) or as much as their number (compute-bound: a large batch) decides which
drafts are worth a trial at all; a trial of a hopeless one on a full batch would cost more than the
controller could win back on a short job.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from eagle_batch.models.cache import Cache, causal_visibility
from eagle_batch.models.target import Target

#: A size that takes longer than this, and than so many passes over one token, is the last one.
_PATIENCE_S, _DEAR = 0.1, 3.0
#: Passes of a size at least and at most, and the seconds after which they are enough.
_LEAST_TIMES, _TIMES, _SIZE_S = 2, 6, 0.06


@dataclass(frozen=True, slots=True)
class PassTable:
    """Seconds of a pass by its tokens, in rising order of tokens; linear between and beyond."""

    points: Sequence[tuple[int, float]]

    def ratio(self, tokens: int, reference: int) -> float:
        """Return how many passes over `reference` tokens one over `tokens` tokens costs."""
        return self.seconds(tokens) / self.seconds(reference)

    def seconds(self, tokens: int) -> float:
        """Return what a pass over so many tokens takes."""
        sizes = [size for size, _ in self.points]
        place = bisect_left(sizes, tokens)
        if place == 0:
            return self.points[0][1]
        if place == len(sizes):
            # Beyond what was measured every token costs, as it does where the device is full.
            return self.points[-1][1] * tokens / sizes[-1]
        (a, low), (b, high) = self.points[place - 1 : place + 1]
        return low + (high - low) * (tokens - a) / (b - a)


@torch.inference_mode()
def measure_rows(target: Target, rows: int, context: int) -> float:
    """Return the seconds of a pass over one token of each row, with so many keys before it.

    Allocates slots for the rows while it runs.
    """
    cache = target.new_cache(rows, context + 2)
    return min(_time_pass(target, cache, rows, 1, before=context) for _ in range(3))


@torch.inference_mode()
def measure_passes(target: Target, cache: Cache, most_tokens: int) -> PassTable:
    """Time passes of 1, 4, 8, 16, ... tokens, up to `most_tokens` or until one takes long.

    The cache must hold no rows: what stands in its slots is overwritten.
    """
    sizes = [1, *(4 << power for power in range(most_tokens.bit_length()))]
    points: list[tuple[int, float]] = []
    for size in sizes:
        rows = min(size, cache.shape.slots)
        tokens = -(-size // rows)
        if tokens > cache.shape.capacity // 2:
            break
        seconds = _least_seconds(target, cache, rows, tokens)
        points.append((rows * tokens, seconds))
        if size >= most_tokens or seconds > max(_PATIENCE_S, _DEAR * points[0][1]):
            break
    # A smaller pass is never dearer: what says so is a disturbance, which only ever slows.
    least = list(accumulate((seconds for _, seconds in reversed(points)), min))
    return PassTable([(size, s) for (size, _), s in zip(points, reversed(least), strict=True)])


def _least_seconds(target: Target, cache: Cache, rows: int, tokens: int) -> float:
    """Return what the fastest of some passes takes: of more where they are short."""
    found: list[float] = []
    while len(found) < _LEAST_TIMES or (len(found) < _TIMES and sum(found) < _SIZE_S):
        found.append(_time_pass(target, cache, rows, tokens))
    return min(found)


def _time_pass(target: Target, cache: Cache, rows: int, tokens: int, before: int = 0) -> float:
    device = target.device
    place_BN = torch.arange(before, before + tokens, device=device).expand(rows, tokens)
    base_B = torch.full((rows,), before, device=device)
    visible = causal_visibility(rows, tokens, device)
    tokens_BN = place_BN % target.shape.vocab
    _finish(device)
    start = time.perf_counter()
    step = cache.step(
        0, place_BN, base_B, visible, place_BN, max(before + tokens, min(32, cache.shape.capacity))
    )
    target.logits(target.forward(tokens_BN, place_BN, step).hidden_BNH)
    _finish(device)
    return time.perf_counter() - start


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
