"""What a text must be like: the validators of a stage, and what becomes of a text that fails."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from eagle_batch.pipeline.base import Section, Strings, as_list
from eagle_batch.pipeline.problems import Rule
from eagle_batch.pipeline.prompt import Messages, prompt_rules
from eagle_batch.pipeline.sampling import Sampling

#: What a validator can be; each item of `validators` has exactly one of these.
KINDS = ("regex", "length", "json_schema", "language", "expression", "python", "judge")
#: Those that may give a number instead of yes or no.
SCORING = ("expression", "python", "judge")


class Length(Section):
    """Bounds of a text's length; those that are left out do not bind."""

    min_characters: int | None = Field(default=None, ge=0, description="Fewest characters.")
    max_characters: int | None = Field(default=None, ge=0, description="Most characters.")
    min_tokens: int | None = Field(default=None, ge=0, description="Fewest generated tokens.")
    max_tokens: int | None = Field(default=None, ge=0, description="Most generated tokens.")

    def _rules(self) -> list[tuple[bool, Rule]]:
        return [
            (
                not self.model_dump(exclude_none=True),
                (("min_characters",), "found no bound; expected at least one of the four"),
            ),
            _order("characters", self.min_characters, self.max_characters),
            _order("tokens", self.min_tokens, self.max_tokens),
        ]


def _order(what: str, low: int | None, high: int | None) -> tuple[bool, Rule]:
    keys = (f"min_{what}", f"max_{what}")
    broken = low is not None and high is not None and low > high
    return broken, (keys, f"found {low} and {high}; expected min <= max")


class Judge(Section):
    """A generation that reads the text and answers with a number."""

    _sections = ("sampling",)

    messages: Messages = Field(
        default=None,
        description="Chat messages; they see what the stage sees, and its text by its name.",
    )
    prompt: str | None = Field(
        default=None, description="Raw text as the prompt, instead of messages."
    )
    sampling: Sampling = Field(
        default=Sampling(), description="How the verdict is sampled, as in a stage."
    )
    score: str = Field(
        default=r"(-?\d+(?:\.\d+)?)",
        min_length=1,
        description="Regular expression that finds the number, in its first group if it has one.",
    )

    def _rules(self) -> list[tuple[bool, Rule]]:
        return [*prompt_rules(self.messages, self.prompt), regex_rule("score", self.score)]


class Validator(Section):
    """One thing that is asked of a text; the first that says no ends it."""

    regex: str | None = Field(
        default=None, min_length=1, description="Expression that must be found in the text."
    )
    length: Length | None = Field(default=None, description="Bounds of the length.")
    json_schema: dict[str, Any] | None = Field(
        default=None, description="The text is JSON that fits this schema; {} takes any JSON."
    )
    language: Annotated[Strings, BeforeValidator(as_list)] | None = Field(
        default=None, description="Language of the text as an ISO 639-1 code, or a list of them."
    )
    expression: str | None = Field(
        default=None,
        min_length=1,
        description="Jinja expression over what the stage sees, and its text by its name; "
        "true or false, or a score.",
    )
    python: str | None = Field(
        default=None,
        pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*$",
        description="'package.module:function', called with the text and the row as a dict; it "
        "returns true or false, a score, or a text that says what is wrong.",
    )
    judge: Judge | None = Field(default=None, description="A generation that scores the text.")
    at_least: float | None = Field(
        default=None, description="Lowest score that passes; null passes every score."
    )

    @property
    def kind(self) -> str:
        """Which of KINDS it is."""
        return next(kind for kind in KINDS if getattr(self, kind) is not None)

    def _rules(self) -> list[tuple[bool, Rule]]:
        found = [kind for kind in KINDS if getattr(self, kind) is not None]
        what = " and ".join(found) or "none"
        return [
            (
                len(found) != 1,
                (
                    tuple(found) or KINDS,
                    f"found {what}; expected exactly one of {', '.join(KINDS)}",
                ),
            ),
            (
                self.at_least is not None and not {*found} & {*SCORING},
                (("at_least",), f"found it with {what}; expected one of {', '.join(SCORING)}"),
            ),
            regex_rule("regex", self.regex),
        ]


class Vote(Section):
    """What the candidates of a stage vote with: a part of each text."""

    regex: str | None = Field(
        default=None,
        min_length=1,
        description="Its last find in the text is the vote, the first group if it has one.",
    )
    expression: str | None = Field(
        default=None,
        min_length=1,
        description="Jinja expression over what the stage sees, and its text by its name; its "
        "value is the vote, and null abstains.",
    )

    def _rules(self) -> list[tuple[bool, Rule]]:
        found = "both" if self.regex is not None else "neither"
        return [
            (
                (self.regex is None) == (self.expression is None),
                (
                    ("regex", "expression"),
                    f"found {found}; expected exactly one of regex and expression",
                ),
            ),
            regex_rule("regex", self.regex),
        ]


def regex_rule(key: str, pattern: str | None) -> tuple[bool, Rule]:
    """Return the rule that a pattern is a regular expression."""
    problem = ""
    try:
        re.compile(pattern or "")
    except (re.error, RecursionError, OverflowError) as error:
        problem = f"{error}"
    return bool(problem), ((key,), f"found {pattern!r}, which is no regular expression: {problem}")
