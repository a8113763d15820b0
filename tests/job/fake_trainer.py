"""A trainer that learns nothing and takes no time: each round leaves a numbered head, or fails."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from eagle_batch.job.adapting import WEIGHTS, Round
from eagle_batch.job.reports import Failure
from eagle_batch.training.learnt import Learnt


class FakeTrainer:
    """Each round ends as its script says: a gain, no gain, or the reason of a failure."""

    def __init__(self, output: Path, script: Sequence[float | str] = (1.5, 2.0, 2.5)) -> None:
        self.output = output
        self.rounds: list[Round] = []
        self.closed = False
        self._script = list(script)
        self._best: float | None = None
        self._due: Learnt | Failure | None = None

    def begin(self, work: Round) -> None:
        assert self._due is None, "a round at a time"
        self.rounds.append(work)
        end = self._script.pop(0) if self._script else 1.0
        if isinstance(end, str):
            self._due = Failure(end)
            return
        tokens = sum(text.completion_tokens for each in self.rounds for text in each.texts)
        used = end > (self._best or 1.0)
        self._due = Learnt(tokens, 10, 0.0, self._best, end, used)
        if used:
            self._best = end
            place = self.output / WEIGHTS
            place.parent.mkdir(exist_ok=True)
            place.write_text(f"head of {end}")

    def poll(self) -> Learnt | Failure | None:
        due, self._due = self._due, None
        return due

    def close(self) -> None:
        self.closed = True
