"""Rows that are drawn by the seed, the same on every machine."""

from __future__ import annotations

import random


def drawn(seed: int, rows: int, count: int) -> list[int]:
    """Return `count` different row numbers below `rows`, ascending."""
    return sorted(random.Random(seed).sample(range(rows), count))  # noqa: S311 - no secret
