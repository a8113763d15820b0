"""Training-time test: a head runs over whole texts as it will run when it drafts.

Row i of step s holds the state of a chain of s drafted tokens that hangs off the prefix 0..i. It
sees

    step 0, rows 0..i     keys from true features (causal)
    steps 1..s, row i     its own chain (diagonals)

takes token i + 1 + s, has position i + s, and predicts the token after it. Texts are padded on the
right; every step has one row less, because one token less is left to predict.

Rows before a `first` one, such as those of prompts, are needed as keys only: later steps leave them
out, and row r of a step stands for row first + r above.

Shape legend: B texts, N tokens of the longest text, R rows of a step (N - 1 - s - first; those of
step 0 before `first` run too, and are not yielded), A query heads,
G key/value heads, D head dimension, F width of the features, H hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from eagle_batch.models.heads import Head


class StepAttention:
    """The attention of one unrolled pass; called once a step, it remembers earlier steps' keys."""

    def __init__(self, first: int = 0) -> None:
        self._first = first
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    def __call__(self, q_BARD: Tensor, k_BGRD: Tensor, v_BGRD: Tensor) -> Tensor:
        """Attend to the causal keys of step 0 and to the row's own keys of later steps."""
        self._keys.append(k_BGRD)
        self._values.append(v_BGRD)
        texts, heads, rows, size = q_BARD.shape
        groups = k_BGRD.shape[1]
        before = self._first if len(self._keys) > 1 else 0
        seen = before + rows
        q = (q_BARD * size**-0.5).reshape(texts, groups, heads // groups, rows, size)
        prefix_keys, prefix_values = (x[0][:, :, :seen] for x in (self._keys, self._values))
        scores = _fold(q) @ prefix_keys.transpose(-1, -2)
        future = _future(rows, before, q.device)
        scores = scores.view(*q.shape[:4], seen).masked_fill(future, -torch.inf)
        own = [_own_scores(q, key[:, :, None, :rows]) for key in self._keys[1:]]
        weights = torch.softmax(torch.cat([scores, *own], dim=-1), dim=-1, dtype=torch.float32)
        weights = weights.to(q.dtype)
        out = (_fold(weights[..., :seen]) @ prefix_values).view(q.shape)
        for step, value in enumerate(self._values[1:]):
            out = out + weights[..., seen + step, None] * value[:, :, None, :rows]
        return out.reshape(texts, heads, rows, size)


def _fold(x: Tensor) -> Tensor:
    """Stack the query heads that share a key head, so that one matmul serves them all."""
    return x.flatten(2, 3)


def _own_scores(q: Tensor, key: Tensor) -> Tensor:
    return (q * key).sum(dim=-1, keepdim=True)


def _future(rows: int, before: int, device: torch.device) -> Tensor:
    return torch.ones(rows, before + rows, dtype=torch.bool, device=device).triu(1 + before)


def unroll(
    head: Head, tokens_BN: Tensor, features_BNF: Tensor, steps: int, first: int = 0
) -> Iterator[Tensor]:
    """Yield the outputs of each step; row r of step s predicts the token first + r + 2 + s."""
    attend = StepAttention(first)
    positions_N = torch.arange(tokens_BN.shape[1], device=tokens_BN.device)
    g_BRH = head.fuse(features_BNF)
    for step in range(min(steps, tokens_BN.shape[1] - 1 - first)):
        before = first if step else 0
        tokens_BR = tokens_BN[:, 1 + step + before :]
        rows = tokens_BR.shape[1]
        positions_BR = (positions_N[before : before + rows] + step).expand(len(tokens_BN), rows)
        out_BRH = head(tokens_BR, g_BRH[:, :rows], positions_BR, attend)
        g_BRH = out_BRH if step else out_BRH[:, first:]
        yield g_BRH
