"""The entries of `stages`: each one generation over each row, or several to choose from."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, JsonValue

from eagle_batch.pipeline.base import Section
from eagle_batch.pipeline.problems import Rule
from eagle_batch.pipeline.prompt import Messages, prompt_rules
from eagle_batch.pipeline.quality import SCORING, Validator, Vote
from eagle_batch.pipeline.sampling import Sampling
from eagle_batch.pipeline.structured import Structured


class Repeat(Section):
    """A loop over this stage, or over the stages from an earlier one to this."""

    first: str | None = Field(
        default=None, description="Stage where the loop begins; null repeats this stage alone."
    )
    at_most: int = Field(default=3, ge=1, le=100, description="Most turns.")
    until: str | None = Field(
        default=None,
        min_length=1,
        description="Jinja expression that ends the loop after a turn; null takes every turn.",
    )


class Stage(Section):
    """One generation over each row; its text becomes a column."""

    _sections = ("sampling",)

    name: str = Field(
        pattern=r"^[a-z][a-z0-9_]*$",
        max_length=64,
        description="Output column of the stage: a-z, 0-9 and _, starting with a letter.",
    )
    when: str | None = Field(
        default=None,
        min_length=1,
        description="Jinja expression; where it is false, the stage is left out and its text null.",
    )
    messages: Messages = Field(
        default=None,
        description="Chat messages, put through the model's chat template; or one expression of a "
        "whole conversation, short for [{turns: ...}].",
    )
    prefill: str | None = Field(
        default=None,
        min_length=1,
        description="Jinja template of how the assistant's answer begins; the text goes on from "
        "there and does not repeat it.",
    )
    template_options: dict[str, JsonValue] = Field(
        default_factory=dict,
        description="What the model's chat template is told beside the messages, such as tools or "
        "enable_thinking.",
    )
    prompt: str | None = Field(
        default=None, description="Raw text as the prompt, instead of messages."
    )
    magpie: bool = Field(
        default=False,
        description="The text is what a user would say: the prompt ends where the chat template "
        "begins the user's turn, behind the messages if there are any.",
    )
    sampling: Sampling = Field(default=Sampling(), description="How the text is sampled.")
    structured: Structured | None = Field(
        default=None, description="What the whole text must match; null for free text."
    )
    samples: int = Field(
        default=1, ge=1, le=1024, description="Candidates of the text, from which `keep` chooses."
    )
    keep: Literal["best", "vote", "score", "all"] | None = Field(
        default=None,
        description="best keeps the candidate of the highest mean log-probability, vote the first "
        "of the largest group, score that with the highest score of a validator, all makes the "
        "column a list.",
    )
    vote: Vote | None = Field(default=None, description="What candidates vote with.")
    validators: Annotated[tuple[Validator, ...], Field(strict=False)] = Field(
        default=(), description="What a text must be like, in this order."
    )
    retry: int = Field(
        default=0, ge=0, le=100, description="Times that a text that fails is sampled anew."
    )
    otherwise: Literal["quarantine", "drop"] = Field(
        default="quarantine",
        description="What becomes of a row whose text fails to the end: an error, or a row that is "
        "left out and counted.",
    )
    repeat: Repeat | None = Field(default=None, description="Go through stages again.")

    def _rules(self) -> list[tuple[bool, Rule]]:
        return [
            *prompt_rules(self.messages, self.prompt, open_turn=self.magpie),
            *self._structure_rules(),
            (
                self.magpie and self.prompt is not None,
                (("magpie", "prompt"), "found both; a raw prompt has no user's turn; remove one"),
            ),
            *self._chat_rules(),
            *self._choice_rules(),
            (
                self.retry > 0 and not self.validators,
                (("retry",), "found it without validators; expected validators to fail"),
            ),
            (
                self.retry > 0 and self.sampling.is_greedy,
                (
                    ("retry", "sampling.temperature"),
                    "found temperature 0, which makes the same text again; raise it",
                ),
            ),
        ]

    def _chat_rules(self) -> list[tuple[bool, Rule]]:
        chat = [name for name in ("prefill", "template_options") if getattr(self, name)]
        return [
            (
                bool(chat) and self.prompt is not None,
                (("prompt", *chat), "a raw prompt has no chat template; remove the others"),
            ),
            (
                self.magpie and self.prefill is not None,
                (("magpie", "prefill"), "found both; a user's turn has no answer to begin"),
            ),
        ]

    def _structure_rules(self) -> list[tuple[bool, Rule]]:
        unread = [
            name
            for name in ("ignore_eos", "min_tokens", "stop", "stop_token_ids")
            if self.structured is not None and getattr(self.sampling, name)
        ]
        text = "a structured text ends where its grammar does; remove the others"
        return [(bool(unread), (("structured", *(f"sampling.{name}" for name in unread)), text))]

    def _choice_rules(self) -> list[tuple[bool, Rule]]:
        scored = any(validator.kind in SCORING for validator in self.validators)
        return [
            (
                self.samples > 1 and self.keep is None,
                (("keep",), "is missing; expected best, vote, score or all, for several samples"),
            ),
            (
                self.keep not in {None, "all"} and self.samples == 1,
                (("keep", "samples"), f"found {self.keep!r} and 1; expected several samples"),
            ),
            (
                (self.keep == "vote") != (self.vote is not None),
                (
                    ("vote", "keep"),
                    "found one of them; expected `vote` with keep: vote, or neither",
                ),
            ),
            (
                self.keep == "score" and not scored,
                (
                    ("keep", "validators"),
                    f"found no validator with a score; expected one of {', '.join(SCORING)}",
                ),
            ),
        ]
