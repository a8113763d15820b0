"""What a round of training beside a job came to: a record that job and trainer share."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Learnt:
    """What one round came to."""

    #: Tokens of completions that the head learnt from so far.
    tokens: int
    steps: int
    seconds: float
    #: Expected tokens a pass on texts held out, of the head in use (None without one) and of the
    #: one after this round.
    before: float | None
    after: float
    #: Whether the latter is a gain, to be used from now on.
    used: bool
