"""Whether two models spell texts in the same tokens; free of torch, so that `validate` can ask."""

from __future__ import annotations

from collections.abc import Mapping


def vocabulary_problem(target: Mapping[str, int], draft: Mapping[str, int]) -> str | None:
    """Return how the vocabulary of a drafting model differs from its target's; None if it is it."""
    different = {
        token: (target.get(token), draft.get(token))
        for token in sorted(target.keys() | draft.keys())
        if target.get(token) != draft.get(token)
    }
    if not different:
        return None
    token, (there, here) = next(iter(different.items()))
    return (
        f"has another tokenizer than the target: {len(different):,} tokens differ, {token!r} for "
        f"one is {there} in the target and {here} in the draft; expected a smaller model of the "
        "same family"
    )
