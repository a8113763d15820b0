"""Logits to token: the processed distribution and the choice under addressed noise.

A token is `argmax(processed logits + Gumbel noise)`, which is a sample of the processed
distribution; at temperature 0 the noise is left out. The same function chooses at the root of a
tree, at every drafted node and in the plain decoder, so the text cannot depend on speculation.

Shape legend: B rows, N places of a row, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from eagle_batch.engine.noise import gumbel
from eagle_batch.engine.request import SamplingParams
from eagle_batch.models.quick import has_kernels, kernels_take

_NO_TOP_K = 1 << 30
#: Logits of the rows that are walked together on the CPU; about a megabyte stays in its cache.
_WALK_BLOCK = 1 << 18
#: Tokens that a walk tries before it sorts.
_WALK_STEPS = 6


@dataclass(frozen=True, slots=True)
class RowParams:
    """Sampling parameters of a batch: device tensors by row, flags for all of them."""

    temperature_B: Tensor
    top_k_B: Tensor
    top_p_B: Tensor
    min_p_B: Tensor
    min_tokens_B: Tensor
    noise_key_B: Tensor
    repetition_B: Tensor
    presence_B: Tensor
    frequency_B: Tensor
    #: bool; rows whose logits depend on their history or have a bias.
    history_B: Tensor
    #: Whether any row samples, is greedy, filters, has a least length, a history or bad words;
    #: decided on the host when rows change.
    sampled: bool
    greedy: bool
    top_k: int
    nucleus: bool
    min_p: bool
    least_length: bool
    history: bool
    bad_words: bool
    #: Whether the host may look at results in the middle of a round: on the CPU, where it is free.
    host_looks: bool
    #: Most log-probabilities that any row asks for at a place; None if none does.
    logprobs: int | None

    @property
    def unadjusted(self) -> bool:
        """Whether a choice depends on nothing but the logits of its place and the noise there."""
        return not (self.history or self.bad_words or self.least_length)

    def narrow(self, start: int, stop: int) -> RowParams:
        """Return the parameters of a range of rows; the flags stay those of the whole."""
        return self.pick(slice(start, stop))

    def pick(self, rows: Tensor | slice) -> RowParams:
        """Return the parameters of some rows, by index; the flags stay those of the whole."""
        tensors = [field.name for field in fields(self) if field.name.endswith("_B")]
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
        repetition_B=floats([p.repetition_penalty for p in params]),
        presence_B=floats([p.presence_penalty for p in params]),
        frequency_B=floats([p.frequency_penalty for p in params]),
        history_B=torch.tensor([p.penalised or bool(p.logit_bias) for p in params], device=device),
        sampled=bool(sampling),
        greedy=len(sampling) < len(params),
        top_k=max((p.top_k for p in sampling if p.top_k), default=0),
        nucleus=any(p.top_p is not None and p.top_p < 1 for p in sampling),
        min_p=any(p.min_p for p in sampling),
        least_length=any(p.min_tokens > 0 for p in params),
        history=any(p.penalised or p.logit_bias for p in params),
        bad_words=any(p.bad_words for p in params),
        host_looks=device.type == "cpu",
        logprobs=max((p.logprobs for p in params if p.logprobs is not None), default=None),
    )


def choose(logits_BNV: Tensor, index_BN: Tensor, params: RowParams, eos_ids: Tensor) -> Tensor:
    """Return the chosen token of every place, int64 `[B, N]`.

    index_BN: index of the generated token that is chosen at each place (0 for the first of a row).
    eos_ids: int64 `[E]`, banned while a row is shorter than its least length.
    """
    if params.least_length:
        logits_BNV = _ban_early_end(logits_BNV, index_BN, params, eos_ids)
    if not params.sampled:
        return best_tokens(logits_BNV)
    if params.host_looks:
        return _choose_on_host(logits_BNV, index_BN, params)
    scores = filtered_logits(logits_BNV, params)
    return scores.add_(_noise(scores, index_BN, params)).argmax(-1)


def _choose_on_host(logits_BNV: Tensor, index_BN: Tensor, params: RowParams) -> Tensor:
    """Choose by compiled code where there is some, and the rest by walking."""
    if not has_kernels():
        return choose_by_walking(logits_BNV, index_BN, params)
    from eagle_batch.engine.choosing import UNDECIDED, choose_compiled

    chosen_BN = choose_compiled(logits_BNV, index_BN, params)
    (rows_R,) = (chosen_BN == UNDECIDED).any(1).nonzero(as_tuple=True)
    if rows_R.numel():
        rest = (logits_BNV[rows_R], index_BN[rows_R], params.pick(rows_R))
        chosen_BN[rows_R] = choose_by_walking(*rest)
    return chosen_BN


def best_tokens(logits_BNV: Tensor) -> Tensor:
    """Return the token of the highest logit of every place; a NaN counts as the highest."""
    if not kernels_take(logits_BNV):
        return logits_BNV.argmax(-1)
    from eagle_batch.engine import kernels

    best_BN = torch.empty(logits_BNV.shape[:-1], dtype=torch.int64)
    kernels.peaks(logits_BNV.flatten(0, -2).numpy(), best_BN.flatten().numpy())
    return best_BN


def best_logits(logits_BKV: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the highest logits of every place in falling order, their ids, and the logsumexp."""
    if not kernels_take(logits_BKV):
        return *logits_BKV.topk(count), logits_BKV.logsumexp(-1)
    from eagle_batch.engine import kernels

    shape = (*logits_BKV.shape[:-1], count)
    values, ids = torch.empty(shape), torch.empty(shape, dtype=torch.int64)
    totals = torch.empty(shape[:-1])
    kernels.best(
        logits_BKV.flatten(0, -2).numpy(),
        values.flatten(0, -2).numpy(),
        ids.flatten(0, -2).numpy(),
        totals.flatten().numpy(),
    )
    return values, ids, totals


def choose_by_walking(logits_BNV: Tensor, index_BN: Tensor, params: RowParams) -> Tensor:
    """Choose without sorting the vocabulary: take the best perturbed token that is in the nucleus.

    A token is in the nucleus when the tokens above it hold less than `top_p`, which is one sum.
    The best perturbed token usually passes, so the sort that a nucleus asks for is seldom needed.
    Rows go a few at a time, to stay in the processor's cache; the host may decide here, it is the
    device.
    """
    places = logits_BNV.shape[1]
    block = max(1, _WALK_BLOCK // (places * logits_BNV.shape[-1]))
    starts = range(0, logits_BNV.shape[0], block)
    parts = [
        _walk_block(
            logits_BNV[start : start + block],
            index_BN[start : start + block],
            params.narrow(start, start + block),
        )
        for start in starts
    ]
    return torch.cat(parts)


def _walk_block(logits_BNV: Tensor, index_BN: Tensor, params: RowParams) -> Tensor:
    temperature = torch.where(params.temperature_B > 0, params.temperature_B, 1.0)
    scores = logits_BNV.float() / temperature[:, None, None]
    if params.top_k:
        greedy = (params.temperature_B == 0)[:, None, None]
        scores = _mask_below(scores, _kth_score(scores, params), greedy)
    perturbed = _noise(scores, index_BN, params).add_(scores)
    best_BN = perturbed.argmax(-1)
    if not (params.nucleus or params.min_p):
        return best_BN
    inside = _Inside(scores, params)
    for _ in range(_WALK_STEPS):
        refused = ~inside(best_BN)
        if not bool(refused.any()):
            return best_BN
        perturbed.scatter_(-1, best_BN[..., None], -torch.inf)
        best_BN = torch.where(refused, perturbed.argmax(-1), best_BN)
    # A nucleus so narrow that the walk is long: settle it with a sort.
    scores = filtered_logits(logits_BNV, params)
    return scores.add_(_noise(scores, index_BN, params)).argmax(-1)


class _Inside:
    """Tells whether a token survives top-p and min-p; greedy rows keep everything."""

    def __init__(self, scores_BNV: Tensor, params: RowParams) -> None:
        self._scores = scores_BNV
        self._peak_BN = scores_BNV.amax(-1)
        self._weights = (scores_BNV - self._peak_BN[..., None]).exp_()
        self._limit_BN = self._weights.sum(-1) * params.top_p_B[:, None]
        self._floor_BN = self._peak_BN + params.min_p_B.log()[:, None]
        self._keeps_all = ((params.temperature_B == 0) | (params.top_p_B >= 1))[:, None]
        self._greedy = (params.temperature_B == 0)[:, None]

    def __call__(self, token_BN: Tensor) -> Tensor:
        score_BN = self._scores.gather(-1, token_BN[..., None])[..., 0]
        above_BN = (self._weights * (self._scores > score_BN[..., None])).sum(-1)
        in_nucleus = (above_BN < self._limit_BN) | self._keeps_all
        return in_nucleus & ((score_BN >= self._floor_BN) | self._greedy)


def _noise(scores_BNV: Tensor, index_BN: Tensor, params: RowParams) -> Tensor:
    """Return the noise of every token at every place; none for greedy rows."""
    token_ids = torch.arange(scores_BNV.shape[-1], device=scores_BNV.device)
    noise = gumbel(params.noise_key_B[:, None].expand_as(index_BN), index_BN, token_ids)
    if params.greedy:
        noise.masked_fill_((params.temperature_B == 0)[:, None, None], 0.0)
    return noise


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
        scores = _mask_below(scores, nucleus_threshold(scores, params.top_p_B), greedy)
    if params.min_p:
        floor = scores.amax(-1) + params.min_p_B.log()[:, None]
        scores = _mask_below(scores, floor, greedy)
    return scores


def filtered_candidates(top_BKC: Tensor, total_BK: Tensor, params: RowParams) -> Tensor:
    """Apply top-k, top-p and min-p to the best C logits of a longer list, given in falling order.

    For drafting, where an approximation costs acceptance at most: the nucleus is taken of the
    draft's own distribution. total_BK: logsumexp over the whole list, at temperature 1.
    """
    kept = top_BKC
    greedy = (params.temperature_B == 0)[:, None, None]
    if params.top_k:
        rank = torch.arange(top_BKC.shape[-1], device=top_BKC.device)
        kept = kept.masked_fill((rank >= params.top_k_B[:, None, None]) & ~greedy, -torch.inf)
    if params.nucleus:
        mass = (top_BKC - total_BK[..., None]).exp()
        before = mass.cumsum(-1) - mass
        kept = kept.masked_fill((before >= params.top_p_B[:, None, None]) & ~greedy, -torch.inf)
    if params.min_p:
        floor_BK1 = top_BKC[..., :1] + (params.min_p_B.log() * params.temperature_B)[:, None, None]
        kept = kept.masked_fill((top_BKC < floor_BK1) & ~greedy, -torch.inf)
    return kept


def nucleus_threshold(scores_BNV: Tensor, top_p_B: Tensor) -> Tensor:
    """Return the least score in the nucleus `[B, N]`: the smallest set reaching top_p, ties in."""
    ordered = scores_BNV.sort(-1, descending=True).values
    mass = ordered.softmax(-1).cumsum(-1)
    before = torch.cat((torch.zeros_like(mass[..., :1]), mass[..., :-1]), -1)
    last = (before < top_p_B[:, None, None]).sum(-1, keepdim=True) - 1
    threshold_BN = ordered.gather(-1, last.clamp(min=0)).squeeze(-1)
    return torch.where(top_p_B[:, None] >= 1, -torch.inf, threshold_BN)


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
