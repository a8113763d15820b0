"""The draft vocabulary: the target's tokens that a head can propose."""

from __future__ import annotations

import torch
from torch import Tensor


def choose_draft_vocabulary(tokens: Tensor, size: int, vocab: int) -> Tensor | None:
    """Return the target ids of the `size` most frequent tokens, sorted by id; None keeps them all.

    Where fewer than `size` different tokens occur, the lowest ids fill up: in byte-pair
    vocabularies they are the most frequent merges.
    """
    if size >= vocab:
        return None
    counts = torch.bincount(tokens.long(), minlength=vocab)
    # A stable sort breaks ties towards low ids.
    return counts.argsort(descending=True, stable=True)[:size].sort().values


def widen_draft_vocabulary(tokens: Tensor, kept: Tensor, size: int, vocab: int) -> Tensor:
    """Return the ids that are kept and the most frequent others, `size` in all, sorted by id."""
    counts = torch.bincount(tokens.long(), minlength=vocab)
    counts[kept] = counts.max() + 1
    return counts.argsort(descending=True, stable=True)[:size].sort().values


def coverage(tokens: Tensor, kept: Tensor | None) -> float:
    """Return the share of tokens that the draft vocabulary holds."""
    if kept is None or not len(tokens):
        return 1.0
    return float(torch.isin(tokens.long(), kept).float().mean())
