"""Which of several candidates is kept; pure, and the same whatever order they came in."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

#: Mean log-probabilities closer than this are alike: a batch's rounding must not choose.
ALIKE = 1e-4


def mean_logprob(logprobs: Sequence[float]) -> float:
    """Return the mean log-probability of a text's tokens."""
    return sum(logprobs) / max(1, len(logprobs))


def highest(scores: Sequence[float], alike: float = 0.0) -> int:
    """Return the first place whose score is the highest, or as good as it."""
    best = max(scores)
    return next(place for place, score in enumerate(scores) if score >= best - alike)


def majority(votes: Sequence[str | None]) -> tuple[int, float] | None:
    """Return the first place of the most frequent vote, and its share of all the votes.

    Of votes that are equally frequent, the one that came first wins; None abstains. Returns None
    where all abstain.
    """
    cast = [vote for vote in votes if vote is not None]
    if not cast:
        return None
    winner = max(dict.fromkeys(cast), key=cast.count)
    return votes.index(winner), cast.count(winner) / len(votes)


def find_vote(pattern: str, text: str) -> str | None:
    """Return the last find of a pattern in a text, its first group if it has one."""
    found = list(re.finditer(pattern, text))
    if not found:
        return None
    last = found[-1]
    return last[1] if last.re.groups else last[0]


def vote_of(value: object) -> str:
    """Return the form in which values of an expression are compared: 1 and 1.0 are one vote."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return json.dumps(value, sort_keys=True, default=str)
