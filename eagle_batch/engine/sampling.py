"""Logits to token: the processed distribution and the choice under addressed noise.

A token is `argmax(processed logits + Gumbel noise)`, which is a sample of the processed
distribution; at temperature 0 the noise is left out. The same function chooses at the root of a
tree, at every drafted node and in the plain decoder, so the text cannot depend on speculation.

Shape legend: B rows, N places of a row, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from eagle_batch.engine.noise import gumbel
from eagle_batch.engine.request import SamplingParams

_NO_TOP_K = 1 << 30
#: Candidates that are sorted at first when a nucleus is looked for on the CPU.
_NUCLEUS_GUESS = 256


@dataclass(frozen=True, slots=True)
class RowParams:
    """Sampling parameters of a batch: device tensors by row, flags for all of them."""

    temperature_B: Tensor
    top_k_B: Tensor
    top_p_B: Tensor
    min_p_B: Tensor
    min_tokens_B: Tensor
    noise_key_B: Tensor
    #: Whether any row samples, filters, or has a least length; decided on the host when rows
    #: change.
    sampled: bool
    top_k: int
    nucleus: bool
    min_p: bool
    least_length: bool

    def narrow(self, start: int, stop: int) -> RowParams:
        """Return the parameters of a range of rows; the flags stay those of the whole."""
        rows = slice(start, stop)
        tensors = ("temperature_B", "top_k_B", "top_p_B", "min_p_B", "min_tokens_B", "noise_key_B")
        return replace(self, **{name: getattr(self, name)[rows] for name in tensors})


def pack_params(
    params: Sequence[SamplingParams], keys: Sequence[int], device: torch.device
) -> RowParams:
    """Lay the parameters of all rows out for the device."""

    def floats(values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=device)

    def ints(values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    sampling = [p for p in params if p.temperature > 0]
    return RowParams(
        temperature_B=floats([p.temperature for p in params]),
        top_k_B=ints([p.top_k or _NO_TOP_K for p in params]),
        top_p_B=floats([1.0 if p.top_p is None else p.top_p for p in params]),
        min_p_B=floats([p.min_p or 0.0 for p in params]),
        min_tokens_B=ints([p.min_tokens for p in params]),
        noise_key_B=ints(keys),
        sampled=bool(sampling),
        top_k=max((p.top_k for p in sampling if p.top_k), default=0),
        nucleus=any(p.top_p is not None and p.top_p < 1 for p in sampling),
        min_p=any(p.min_p for p in sampling),
        least_length=any(p.min_tokens > 0 for p in params),
    )


def choose(logits_BNV: Tensor, index_BN: Tensor, params: RowParams, eos_ids: Tensor) -> Tensor:
    """Return the chosen token of every place, int64 `[B, N]`.

    index_BN: index of the generated token that is chosen at each place (0 for the first of a row).
    eos_ids: int64 `[E]`, banned while a row is shorter than its least length.
    """
    if params.least_length:
        logits_BNV = _ban_early_end(logits_BNV, index_BN, params, eos_ids)
    if not params.sampled:
        return logits_BNV.argmax(-1)
    scores = filtered_logits(logits_BNV, params)
    token_ids = torch.arange(scores.shape[-1], device=scores.device)
    keys_BN = params.noise_key_B[:, None].expand_as(index_BN)
    noise = gumbel(keys_BN, index_BN, token_ids)
    noise.masked_fill_((params.temperature_B == 0)[:, None, None], 0.0)
    return scores.add_(noise).argmax(-1)


def filtered_logits(logits_BNV: Tensor, params: RowParams) -> Tensor:
    """Return new float32 logits after temperature, top-k, top-p and min-p; dropped tokens are -inf.

    The order is the common one: temperature first, then top-k, then top-p of what is left, then
    min-p. Rows at temperature 0 are left as they are.
    """
    temperature = torch.where(params.temperature_B > 0, params.temperature_B, 1.0)
    scores = logits_BNV.float() / temperature[:, None, None]
    greedy = (params.temperature_B == 0)[:, None, None]
    if params.top_k:
        scores = _mask_below(scores, _kth_score(scores, params), greedy)
    if params.nucleus:
        scores = _mask_below(scores, nucleus_threshold(scores, params.top_p_B[:, None]), greedy)
    if params.min_p:
        floor = scores.amax(-1) + params.min_p_B.log()[:, None]
        scores = _mask_below(scores, floor, greedy)
    return scores


def nucleus_threshold(scores_BNV: Tensor, top_p_BN: Tensor) -> Tensor:
    """Return the least score in the nucleus: the smallest set that reaches `top_p`, with ties."""
    total = scores_BNV.logsumexp(-1, keepdim=True)
    vocab = scores_BNV.shape[-1]
    if scores_BNV.device.type == "cpu" and vocab > 4 * _NUCLEUS_GUESS:
        # A host decision costs nothing here, and a full sort of the vocabulary costs milliseconds.
        threshold, complete = _threshold_among(
            scores_BNV.topk(_NUCLEUS_GUESS).values, total, top_p_BN
        )
        if bool(complete.all()):
            return threshold
    return _threshold_among(scores_BNV.sort(-1, descending=True).values, total, top_p_BN)[0]


def _threshold_among(
    sorted_scores: Tensor, total: Tensor, top_p_BN: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the nucleus threshold and whether the sorted scores reach `top_p` at all."""
    mass = (sorted_scores - total).exp().cumsum(-1)
    inside = torch.cat((torch.zeros_like(mass[..., :1]), mass[..., :-1]), -1) < top_p_BN[..., None]
    last = inside.sum(-1, keepdim=True) - 1
    complete = (mass[..., -1] >= top_p_BN) | (top_p_BN >= 1)
    threshold = sorted_scores.gather(-1, last.clamp(min=0)).squeeze(-1)
    return torch.where(top_p_BN >= 1, -torch.inf, threshold), complete


def _kth_score(scores_BNV: Tensor, params: RowParams) -> Tensor:
    vocab = scores_BNV.shape[-1]
    best = scores_BNV.topk(min(params.top_k, vocab)).values
    rank = (params.top_k_B.clamp(max=best.shape[-1]) - 1)[:, None, None].expand(*best.shape[:2], 1)
    kth = best.gather(-1, rank).squeeze(-1)
    return torch.where((params.top_k_B >= _NO_TOP_K)[:, None], -torch.inf, kth)


def _mask_below(scores_BNV: Tensor, threshold_BN: Tensor, greedy_B11: Tensor) -> Tensor:
    return scores_BNV.masked_fill((scores_BNV < threshold_BN[..., None]) & ~greedy_B11, -torch.inf)


def _ban_early_end(
    logits_BNV: Tensor, index_BN: Tensor, params: RowParams, eos_ids: Tensor
) -> Tensor:
    early_BN = index_BN < params.min_tokens_B[:, None]
    logits_BNV = logits_BNV.clone()
    ends = logits_BNV.index_select(-1, eos_ids)
    logits_BNV[..., eos_ids] = ends.masked_fill(early_BN[..., None], -torch.inf)
    return logits_BNV
