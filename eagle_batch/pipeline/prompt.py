"""What is put to the model: chat messages, or raw text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from eagle_batch.pipeline.base import Section
from eagle_batch.pipeline.problems import Rule


class Message(Section):
    """One chat message of a prompt."""

    role: Literal["system", "developer", "user", "assistant", "tool"] = Field(
        description="Who speaks."
    )
    content: str = Field(description="Jinja template of the text, over the row's columns.")


def prompt_rules(
    messages: Sequence[Message] | None, prompt: str | None, *, open_turn: bool = False
) -> list[tuple[bool, Rule]]:
    """Return the rule that there is one kind of prompt; an open turn may stand alone."""
    found = "both" if messages is not None else "neither"
    enough = open_turn and prompt is None
    return [
        (
            (messages is None) == (prompt is None) and not enough,
            (
                ("messages", "prompt"),
                f"found {found}; expected exactly one of messages and prompt",
            ),
        )
    ]
