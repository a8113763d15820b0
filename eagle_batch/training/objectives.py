"""What a head is trained for: EAGLE-3's unrolled distillation and EAGLE-1's feature regression.

Shape legend: B texts, N tokens, R rows of a step, W draft vocabulary, V target vocabulary,
F width of the features, H hidden size.
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
    def forward(ctx: Any, logits_BRW: Tensor, p_BRW: Tensor, weight_BR: Tensor) -> Tensor:
        """Return the sum over rows."""
        log_q = torch.log_softmax(logits_BRW, dim=-1)
        loss_BR = -(p_BRW * log_q).sum(dim=-1, dtype=torch.float32)
        q_BRW = torch.softmax(logits_BRW, dim=-1)
        ctx.save_for_backward(q_BRW.sub_(p_BRW).mul_(weight_BR[..., None].to(q_BRW.dtype)))
        return (loss_BR * weight_BR).sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        """Return the kept gradient, scaled."""
        (kept,) = ctx.saved_tensors
        return kept * gradient.to(kept.dtype), None, None


def soft_cross_entropy(logits_BRW: Tensor, p_BRW: Tensor, weight_BR: Tensor) -> Tensor:
    """Return the weighted sum over rows of -sum p log softmax(logits)."""
    total: Tensor = SoftCrossEntropy.apply(logits_BRW, p_BRW, weight_BR)  # type: ignore[no-untyped-call]
    return total


@dataclass(frozen=True, slots=True)
class Targets:
    """What the target says at each position, in the draft vocabulary."""

    #: Probabilities, renormalised on the draft vocabulary.
    p_BNW: Tensor
    #: Draft id of the most probable token; -1 where the draft vocabulary lacks it.
    top_BN: Tensor


class DraftVocabulary:
    """The target's output matrix cut to the draft vocabulary, and the map of ids into it."""

    def __init__(self, lm_head_VH: Tensor, kept: Tensor | None) -> None:
        device = lm_head_VH.device
        rows = torch.arange(len(lm_head_VH), device=device) if kept is None else kept.to(device)
        self.lm_head_WH = lm_head_VH.detach()[rows]
        self.draft_id_V = torch.full((len(lm_head_VH),), -1, dtype=torch.long, device=device)
        self.draft_id_V[rows] = torch.arange(len(rows), device=device)

    def targets(self, batch: Batch) -> Targets:
        """Compute the probabilities of a batch, once for all steps."""
        with torch.no_grad():
            logits_BNW = F.linear(batch.last_BNH.to(self.lm_head_WH.dtype), self.lm_head_WH)
            return Targets(logits_BNW.softmax(dim=-1), self.draft_id_V[batch.top_BN])


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
        targets = self.vocabulary.targets(batch)
        weight_BN = batch.completion_BN + self.prompt_weight * batch.prompt_BN
        weight_BN = weight_BN * (targets.top_BN >= 0)
        total = torch.zeros((), device=batch.tokens_BN.device)
        for step, out_BRH in enumerate(unroll(head, batch.tokens_BN, batch.aux_BNF, self.steps)):
            logits_BRW = head.logits(out_BRH)
            p_BRW = targets.p_BNW[:, 1 + step :].to(logits_BRW.dtype)
            loss = soft_cross_entropy(logits_BRW, p_BRW, weight_BN[:, 1 + step :])
            total = total + self.decay**step * loss
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
        p_BRW = self.vocabulary.targets(batch).p_BNW[:, 1:].to(logits_BRW.dtype)
        token = soft_cross_entropy(logits_BRW, p_BRW, weight_BR)
        total = _FEATURE_WEIGHT * (feature_BR * weight_BR).sum() + _TOKEN_WEIGHT * token
        return Loss(total, weight_BR.sum())
