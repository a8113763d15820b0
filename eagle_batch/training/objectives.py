"""What a head is trained for: EAGLE-3's unrolled distillation and EAGLE-1's feature regression.

Shape legend: B texts, N tokens, R rows of a step, P counted positions, C those of a step, W draft
vocabulary, V target vocabulary, F width of the features, H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle_batch.models.heads import Head
from eagle_batch.training.dataset import Batch
from eagle_batch.training.unroll import unroll

#: EAGLE-1's weights of feature regression and distillation, and the width of its input noise.
_FEATURE_WEIGHT, _TOKEN_WEIGHT = 1.0, 0.1
_NOISE_WIDTH, _NOISE_LENGTH = 0.2, 512


@dataclass(frozen=True, slots=True)
class Loss:
    """What is to be minimised is total / weight, over all parts of a batch."""

    #: Sum over the counted positions.
    total: Tensor
    #: Their weight, without a gradient.
    weight: Tensor


class Objective(Protocol):
    """A loss over one batch; randomness comes from `generator` alone."""

    def loss(self, head: Head, batch: Batch, generator: torch.Generator) -> Loss:
        """Return the sum over the batch's positions, and what they weigh."""
        ...


class SoftCrossEntropy(torch.autograd.Function):
    """Weighted sum of -sum p log q, with the gradient made in the forward pass.

    The gradient with respect to the logits is weight * (q - p): nothing else need be kept, where
    autograd would keep several copies of the largest tensor of the training.
    """

    @staticmethod
    def forward(ctx: Any, logits_W: Tensor, p_W: Tensor, weight: Tensor) -> Tensor:
        """Return the sum over all dimensions but the last, which `weight` lacks."""
        log_q = torch.log_softmax(logits_W, dim=-1)
        loss = -(p_W * log_q).sum(dim=-1, dtype=torch.float32)
        q_W = torch.softmax(logits_W, dim=-1)
        ctx.save_for_backward(q_W.sub_(p_W).mul_(weight[..., None].to(q_W.dtype)))
        return (loss * weight).sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        """Return the kept gradient, scaled."""
        (kept,) = ctx.saved_tensors
        return kept * gradient.to(kept.dtype), None, None


def soft_cross_entropy(logits_W: Tensor, p_W: Tensor, weight: Tensor) -> Tensor:
    """Return the weighted sum over all rows of -sum p log softmax(logits)."""
    total: Tensor = SoftCrossEntropy.apply(logits_W, p_W, weight)  # type: ignore[no-untyped-call]
    return total


class DraftVocabulary:
    """The target's output matrix cut to the draft vocabulary, and the map of ids into it."""

    def __init__(self, lm_head_VH: Tensor, kept: Tensor | None) -> None:
        device = lm_head_VH.device
        rows = torch.arange(len(lm_head_VH), device=device) if kept is None else kept.to(device)
        self.lm_head_WH = lm_head_VH.detach()[rows]
        self.draft_id_V = torch.full((len(lm_head_VH),), -1, dtype=torch.long, device=device)
        self.draft_id_V[rows] = torch.arange(len(rows), device=device)

    @torch.no_grad()
    def probabilities(self, last_H: Tensor) -> Tensor:
        """Return the target's probabilities, renormalised; `[..., H] -> [..., W]`."""
        return F.linear(last_H.to(self.lm_head_WH.dtype), self.lm_head_WH).softmax(dim=-1)

    def draft_ids(self, batch: Batch) -> Tensor:
        """Return the draft id of the most probable token `[B, N]`, -1 where it has none."""
        return self.draft_id_V[batch.top_BN]


def first_row(counted_BN: Tensor, steps: int) -> int:
    """Return the first row of which any of `steps` steps has a position that counts."""
    places = counted_BN.any(dim=0).nonzero()
    return max(0, int(places[0]) - steps) if len(places) else 0


@dataclass(frozen=True, slots=True)
class Eagle3Objective:
    """Soft cross-entropy over the unrolled steps, later steps weighing less."""

    vocabulary: DraftVocabulary
    steps: int
    decay: float
    #: Weight of prompt positions beside 1 for completions; the target's opinion is there for free.
    prompt_weight: float

    def loss(self, head: Head, batch: Batch, generator: torch.Generator) -> Loss:  # noqa: ARG002
        """Return the loss; a position whose best token cannot be drafted does not count."""
        weight_BN = batch.completion_BN + self.prompt_weight * batch.prompt_BN
        weight_BN = weight_BN * (self.vocabulary.draft_ids(batch) >= 0)
        # Prompts and padding outnumber what counts; the widest product is spared them.
        counted_BN = weight_BN > 0
        place_BN = counted_BN.flatten().cumsum(0).view_as(counted_BN) - 1
        p_PW = self.vocabulary.probabilities(batch.last_BNH[counted_BN])
        total = torch.zeros((), device=batch.tokens_BN.device)
        first = first_row(counted_BN, self.steps)
        outs = unroll(head, batch.tokens_BN, batch.aux_BNF, self.steps, first)
        for begin, out_BRH in enumerate(outs, 1 + first):
            counted_BR = counted_BN[:, begin:]
            logits_CW = head.logits(out_BRH[counted_BR])
            p_CW = p_PW[place_BN[:, begin:][counted_BR]].to(logits_CW.dtype)
            loss = soft_cross_entropy(logits_CW, p_CW, weight_BN[:, begin:][counted_BR])
            total = total + self.decay ** (begin - 1 - first) * loss
        return Loss(total, weight_BN[:, 1:].sum())


@dataclass(frozen=True, slots=True)
class Eagle1Objective:
    """Smooth L1 to the target's next feature, plus a little distillation through its lm_head."""

    vocabulary: DraftVocabulary

    def loss(self, head: Head, batch: Batch, generator: torch.Generator) -> Loss:
        """Return the loss of the completion positions; the input features carry uniform noise."""
        noise = torch.rand(batch.aux_BNF.shape, generator=generator).to(batch.aux_BNF.device) - 0.5
        noise *= _NOISE_WIDTH * _NOISE_LENGTH / batch.tokens_BN.shape[1]
        out_BRH = next(unroll(head, batch.tokens_BN, batch.aux_BNF + noise, 1))
        weight_BR = batch.completion_BN[:, 1:].float()
        wanted_BRH = batch.last_BNH[:, 1:].float()
        feature_BR = F.smooth_l1_loss(out_BRH.float(), wanted_BRH, reduction="none").mean(dim=-1)
        logits_BRW = head.logits(out_BRH)
        p_BRW = self.vocabulary.probabilities(batch.last_BNH[:, 1:]).to(logits_BRW.dtype)
        token = soft_cross_entropy(logits_BRW, p_BRW, weight_BR)
        total = _FEATURE_WEIGHT * (feature_BR * weight_BR).sum() + _TOKEN_WEIGHT * token
        return Loss(total, weight_BR.sum())
