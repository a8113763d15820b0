"""The entries of `stages`: each one generation over each row."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from eagle_batch.pipeline.base import Section
from eagle_batch.pipeline.problems import Rule
from eagle_batch.pipeline.prompt import Message, prompt_rules
from eagle_batch.pipeline.sampling import Sampling
from eagle_batch.pipeline.structured import Structured


class Stage(Section):
    """One generation over each row; its text becomes a column."""

    _sections = ("sampling",)

    name: str = Field(
        pattern=r"^[a-z][a-z0-9_]*$",
        max_length=64,
        description="Output column of the stage: a-z, 0-9 and _, starting with a letter.",
    )
    messages: Annotated[tuple[Message, ...], Field(min_length=1, strict=False)] | None = Field(
        default=None, description="Chat messages, put through the model's chat template."
    )
    prompt: str | None = Field(
        default=None, description="Raw text as the prompt, instead of messages."
    )
    sampling: Sampling = Field(default=Sampling(), description="How the text is sampled.")
    structured: Structured | None = Field(
        default=None, description="What the whole text must match; null for free text."
    )

    def _rules(self) -> list[tuple[bool, Rule]]:
        unread = [
            name
            for name in ("ignore_eos", "min_tokens", "stop", "stop_token_ids")
            if self.structured is not None and getattr(self.sampling, name)
        ]
        return [
            *prompt_rules(self.messages, self.prompt),
            (
                bool(unread),
                (
                    ("structured", *(f"sampling.{name}" for name in unread)),
                    "a structured text ends where its grammar does; remove the others",
                ),
            ),
        ]
