"""The `logprobs` of a choice as the OpenAI API has them, from an output's columns."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from eagle_batch.data.spelling import Spelling
from eagle_batch.errors import ConfigError

#: Part of a character, which has no bytes of its own here.
_BROKEN = "\ufffd"


def spelling_of(resolved: dict[str, Any]) -> tuple[Spelling | None, str]:
    """Return what spells the tokens of an output, or why its `logprobs` stay null.

    Both are nothing where the job keeps no log-probabilities.
    """
    if not resolved["output"].get("logprobs"):
        return None, ""
    if not resolved["output"].get("token_ids"):
        return None, "they need the column token_ids too (output.token_ids: true)"
    target = resolved["target"]
    try:
        spelling = Spelling(target["model"], target.get("revision"))
    except ConfigError as error:
        return None, str(error)
    if not spelling.known:
        return None, f"target.model: {target['model']} has no tokenizer.json"
    return spelling, ""


def choice_logprobs(
    row: dict[str, Any], stage: str, spelling: Spelling, finish: str
) -> dict[str, Any] | None:
    """Return those of one stage's text; None where it has not exactly one text."""
    kept = [item for item in row["logprobs"] if item["stage"] == stage]
    tokens = [item["ids"] for item in row["token_ids"] if item["stage"] == stage]
    if len(kept) != 1 or len(tokens) != 1:
        return None
    (item,), (ids,) = kept, tokens
    places = zip(
        pairwise([None, *ids]),
        item["chosen"],
        item.get("best_ids") or [()] * len(ids),
        item.get("best") or [()] * len(ids),
        strict=True,
    )
    content = []
    for (before, token), value, others, values in places:
        pairs = zip(others, values, strict=True)
        best = [_token(spelling, other, before, its) for other, its in pairs]
        content.append(_token(spelling, token, before, value) | {"top_logprobs": best})
    # The token that ends a text is no part of it.
    return {"content": content[:-1] if finish == "eos" else content, "refusal": None}


def _token(spelling: Spelling, token: int, before: int | None, value: float) -> dict[str, Any]:
    text = spelling.text(token, before)
    data = None if _BROKEN in text else list(text.encode())
    return {"token": text, "logprob": value, "bytes": data}
