"""What is put to the model: chat messages, or raw text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from eagle_batch.pipeline.base import Section
from eagle_batch.pipeline.problems import Rule


class Message(Section):
    """One chat message of a prompt, or a place where a row's own conversation stands."""

    role: Literal["system", "developer", "user", "assistant", "tool"] | None = Field(
        default=None, description="Who speaks; required, unless there are turns."
    )
    content: str | None = Field(
        default=None,
        description="Jinja template of the text, over the row's columns; required as role is.",
    )
    turns: str | None = Field(
        default=None,
        min_length=1,
        description="Jinja expression of a list of messages, such as a column with role and "
        "content in each; instead of role and content.",
    )

    def _rules(self) -> list[tuple[bool, Rule]]:
        given = [name for name in ("role", "content") if getattr(self, name) is not None]
        if self.turns is not None:
            text = "found it beside turns, which bring their own; remove one"
            return [(bool(given), (tuple(given), text))]
        missing = tuple(name for name in ("role", "content") if name not in given)
        return [(bool(missing), (missing, "is missing; expected role and content, or turns"))]


def as_messages(value: object) -> object:
    """Take an expression in place of the messages as a conversation of the row."""
    return ({"turns": value},) if isinstance(value, str) else value


#: The messages of a stage or a judge; one expression is short for `[{turns: ...}]`.
Messages = Annotated[
    Annotated[tuple[Message, ...], Field(min_length=1, strict=False)] | None,
    BeforeValidator(as_messages),
]


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
