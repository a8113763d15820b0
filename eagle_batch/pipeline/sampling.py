"""How a completion is sampled, for all rows or by a row's own columns."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import Field, model_validator

from eagle_batch.pipeline.base import Count, Section
from eagle_batch.pipeline.problems import Rule

#: A value that is an expression over the row: "{{ temperature }}".
_EXPRESSION = re.compile(r"\{\{.*\}\}", re.DOTALL)


class Sampling(Section):
    """How one completion is sampled; the defaults are greedy decoding."""

    temperature: float = Field(
        default=0.0, ge=0, le=100, description="0 chooses the most probable token; above 0 samples."
    )
    top_p: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="Keep the smallest set of tokens with this probability.",
    )
    top_k: int | None = Field(default=None, ge=1, description="Keep the k most probable tokens.")
    min_p: float | None = Field(
        default=None,
        ge=0,
        lt=1,
        description="Drop tokens below this share of the most probable one.",
    )
    max_tokens: Count = Field(default=128, description="Most tokens of one completion.")
    min_tokens: int = Field(
        default=0, ge=0, description="No end of sequence before this many tokens."
    )
    stop: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(strict=False)] = Field(
        default=(), description="Strings that end a completion; they are cut from the text."
    )
    stop_token_ids: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(strict=False)] = Field(
        default=(), description="Token ids that end a completion."
    )
    ignore_eos: bool = Field(
        default=False, description="Go on after the end of sequence, until max_tokens."
    )
    repetition_penalty: float = Field(
        default=1.0, gt=0, le=10, description="Above 1, tokens of prompt and text get less likely."
    )
    presence_penalty: float = Field(
        default=0.0, ge=-2, le=2, description="Subtracted for every token that the text holds."
    )
    frequency_penalty: float = Field(
        default=0.0, ge=-2, le=2, description="Subtracted each time that the text holds a token."
    )
    logit_bias: dict[int, float] = Field(
        default_factory=dict, description="Added to the logits of tokens, by token id."
    )
    bad_words: Annotated[tuple[Annotated[str, Field(pattern=r"\S")], ...], Field(strict=False)] = (
        Field(
            default=(),
            description="Words that are never written, as the tokenizer spells them, at the start "
            "of a text and after a space.",
        )
    )

    by_row: dict[str, str] = Field(
        default_factory=dict,
        description="Fields that each row sets for itself: field -> Jinja expression. "
        '`temperature: "{{ heat }}"` is short for it.',
    )

    @model_validator(mode="before")
    @classmethod
    def _gather_expressions(cls, data: Any) -> Any:
        """Take values in braces as expressions over the row."""
        if not isinstance(data, dict):
            return data
        found = {
            name: value
            for name, value in data.items()
            if name in cls.model_fields and isinstance(value, str) and _EXPRESSION.fullmatch(value)
        }
        given = data.get("by_row") or {}
        if not found or not isinstance(given, dict):
            return data
        rest = {name: value for name, value in data.items() if name not in found}
        return {**rest, "by_row": {**given, **found}}

    @property
    def is_greedy(self) -> bool:
        """Whether the same prompt always makes the same text, in every row."""
        return self.temperature == 0 and "temperature" not in self.by_row

    def fixed(self) -> dict[str, Any]:
        """Return the fields that are the same for every row, by name."""
        return self.model_dump(exclude={"by_row"})

    def _rules(self) -> list[tuple[bool, Rule]]:
        settable = [name for name in Sampling.model_fields if name != "by_row"]
        unknown = sorted(set(self.by_row) - set(settable))
        return [
            (
                self.min_tokens > self.max_tokens,
                (
                    ("min_tokens", "max_tokens"),
                    f"found {self.min_tokens} and {self.max_tokens}; expected min <= max",
                ),
            ),
            (
                bool(unknown),
                (("by_row",), f"found {', '.join(unknown)}; expected one of {', '.join(settable)}"),
            ),
        ]
