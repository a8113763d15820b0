"""Acceptance on held-out texts: by position, and as tokens a pass of a chain that really decodes.

Shape legend: B texts, N tokens, R rows of a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eagle_batch.models.heads import Head
from eagle_batch.training.dataset import Batch, Dataset
from eagle_batch.training.features import groups_of_similar_length
from eagle_batch.training.objectives import DraftVocabulary, first_row
from eagle_batch.training.unroll import unroll

#: Share of a text's tokens that must be the target's first choice for the text to count as greedy;
#: not all of them, because near-ties fall differently in another batch shape.
_GREEDY_SHARE = 0.97


@dataclass(frozen=True, slots=True)
class Acceptance:
    """How often drafts are the target's first choice."""

    #: n-alpha: of the chains whose first n drafts were right, the share whose next one was too.
    by_position: tuple[float, ...]
    #: Tokens a pass, bonus included, of chains that decode the greedy texts; None without any.
    chain_length: float | None
    texts: int
    positions: int


@dataclass(slots=True)
class _Counts:
    reached: list[int]
    accepted: list[int]
    texts: int = 0
    tokens: int = 0
    passes: int = 0


@torch.no_grad()
def measure_acceptance(
    head: Head,
    data: Dataset,
    rows: Sequence[int],
    vocabulary: DraftVocabulary,
    *,
    steps: int,
    batch_tokens: int,
) -> Acceptance:
    """Draft a chain of `steps` at every position of the given rows and count what is right."""
    counts = _Counts([0] * steps, [0] * steps)
    for group in groups_of_similar_length([data.length(i) for i in rows], batch_tokens):
        batch = data.batch([rows[i] for i in group]).to(vocabulary.draft_id_V.device)
        _count(head, batch, vocabulary, counts)
    alphas = (a / max(1, r) for a, r in zip(counts.accepted, counts.reached, strict=True))
    return Acceptance(
        by_position=tuple(round(alpha, 4) for alpha in alphas),
        chain_length=round(counts.tokens / counts.passes, 4) if counts.passes else None,
        texts=counts.texts,
        positions=counts.reached[0],
    )


def _count(head: Head, batch: Batch, vocabulary: DraftVocabulary, counts: _Counts) -> None:
    first_choice_BN = vocabulary.draft_id_V[batch.top_BN]
    text_BN = vocabulary.draft_id_V[batch.tokens_BN]
    steps = len(counts.reached)
    first = first_row(batch.completion_BN, steps)
    alive_BR = torch.ones_like(batch.completion_BN[:, 1 + first :])
    shape = (steps, *batch.tokens_BN.shape)
    followed = torch.zeros(shape, dtype=torch.bool, device=batch.tokens_BN.device)
    outs = unroll(head, batch.tokens_BN, batch.aux_BNF, steps, first)
    for step, out_BRH in enumerate(outs):
        drafted_BR = head.logits(out_BRH).argmax(dim=-1)
        rows, begin = drafted_BR.shape[1], 1 + step + first
        alive_BR = alive_BR[:, :rows] & batch.completion_BN[:, begin:]
        counts.reached[step] += int(alive_BR.sum())
        alive_BR = alive_BR & (drafted_BR == first_choice_BN[:, begin:])
        counts.accepted[step] += int(alive_BR.sum())
        drawn = slice(first, first + rows - 1)
        followed[step, :, drawn] = drafted_BR[:, :-1] == text_BN[:, begin + 1 :]
    counts.texts += len(batch.tokens_BN)
    for row in range(len(batch.tokens_BN)):
        if _is_greedy(batch, row):
            tokens, passes = _decode(followed[:, row], batch.completion_BN[row])
            counts.tokens += tokens
            counts.passes += passes


def _is_greedy(batch: Batch, row: int) -> bool:
    counted = batch.completion_BN[row, :-1]
    right = batch.top_BN[row, :-1] == batch.tokens_BN[row, 1:]
    return bool(right[counted].float().mean() >= _GREEDY_SHARE)


def _decode(followed_SN: Tensor, completion_N: Tensor) -> tuple[int, int]:
    """Walk one text as rounds of drafts do: each pass keeps the right drafts and one token more."""
    accepted_N = followed_SN.long().cumprod(dim=0).sum(dim=0).tolist()
    positions = completion_N.nonzero().flatten().tolist()
    row, last = positions[0], positions[-1]
    tokens = passes = 0
    while row < last:
        gained = min(accepted_N[row] + 1, last - row)
        row, tokens, passes = row + gained, tokens + gained, passes + 1
    return tokens, passes
