"""One generation of a row: what is asked for, and what is kept of how it went."""

from __future__ import annotations

from dataclasses import dataclass, replace

from eagle_batch.engine.request import Completion, SamplingParams


@dataclass(frozen=True, slots=True)
class Call:
    """One text that a row needs now."""

    #: Index of the stage, and what the generation is called in the output: the stage's name, or
    #: that of a judge below it.
    stage: int
    name: str
    prompt: str
    #: Whether the tokenizer adds its special tokens.
    special: bool
    params: SamplingParams
    #: Turn of the stage's loop, candidate, and times that it was tried before; all from 0.
    turn: int = 0
    candidate: int = 0
    attempt: int = 0
    #: Text that ends the completion: where the chat template would end the user's turn.
    ending: str = ""

    @property
    def noise_name(self) -> str:
        """The stage's part of the address of the noise.

        The first candidate of the first turn has the stage's name alone: a text stays as it is
        when a loop, more candidates or a retry are added.
        """
        place = (self.turn, self.candidate, self.attempt)
        return self.name + "@{}.{}.{}".format(*place) if any(place) else self.name


@dataclass(frozen=True, slots=True)
class Record:
    """A generation that is over."""

    call: Call
    completion: Completion
    #: Address of its noise.
    seed: int
    #: Whether its text is in the output.
    kept: bool = False
    #: What it was chosen by: mean log-probability, share of the votes, or a validator's score.
    score: float | None = None

    def keep(self, score: float | None) -> Record:
        """Return the record of a text that is in the output."""
        return replace(self, kept=True, score=score)
