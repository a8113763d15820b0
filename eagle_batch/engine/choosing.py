"""Choosing under noise on the CPU, compiled: each place in a few passes over its logits.

The choice is that of `sampling.choose`, to the bit. A token's noise is computed only where its
random bits are so high that it could win, which is seldom. What comes out is checked against
rounding: where another order of a sum, or another logarithm, might decide otherwise, nothing is
chosen here and the caller asks torch.

Shape legend: P places, V vocabulary, W workers of a team, K best tokens.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from torch import Tensor

from eagle_batch.engine.kernels import highest_of, insert, peak_of
from eagle_batch.engine.noise import place_words, scramble
from eagle_batch.models.compiling import compiled
from eagle_batch.models.kernels import exponential
from eagle_batch.models.team import Team, claim, finish, settle

F32, U32 = np.float32, np.uint32
_LN2 = F32(0.6931472)
#: Tokens whose noise is bounded together, and what rounding may take from the bound.
_PART, _MARGIN = 64, F32(1e-3)
#: Best tokens of a place that are looked at, should the nucleus refuse some.
_BEST = 16
#: Scores, and shares of the whole mass, that are closer than this are for torch to compare.
_CLOSE, _CLOSE_MASS = F32(1e-4), F32(1e-5)
#: What stands for a choice that was not made.
UNDECIDED = -1

# A score is divided as torch divides it: no reciprocals.
_SUMS = {"contract", "nsz", "reassoc"}
_kernel: Any = compiled(fastmath=_SUMS, error_model="numpy")
_instruction: Any = intrinsic
_shared: Any = compiled(fastmath=_SUMS, error_model="numpy", nogil=True)
_no_nan: Any = compiled(fastmath=_SUMS | {"nnan"}, error_model="numpy")


@_kernel
def _kth(scores_V, k, found_V):
    """Return the k-th highest score: at least k parts have a highest above the k-th of these."""
    vocab = scores_V.shape[0]
    if k >= vocab:
        return F32(-np.inf)
    size = max(1, min(128, vocab // (8 * k)))
    parts = vocab // size
    for part in range(parts):
        stop = vocab if part == parts - 1 else (part + 1) * size
        found_V[part] = highest_of(scores_V[part * size : stop])
    bound = np.sort(found_V[:parts])[parts - k]
    count = 0
    for i in range(vocab):
        if scores_V[i] >= bound:
            found_V[count] = scores_V[i]
            count += 1
    return np.sort(found_V[:count])[count - k]


@_kernel
def _mass(scores_V, peak, least, above):
    """Return the mass of the scores from `least` on that are higher than `above`."""
    total = F32(0)
    for i in range(scores_V.shape[0]):
        weight = exponential(scores_V[i] - peak)
        counts = (scores_V[i] >= least) & (scores_V[i] > above)
        total += weight if counts else F32(0)
    return total


@_instruction
def _exponent(_context, _value):
    """Return the exponent of a positive float32: of 1 it is 0, of 0.75 it is -1."""

    def generate(_target, builder, _signature, arguments):
        i32 = ir.IntType(32)
        bits = builder.lshr(builder.bitcast(arguments[0], i32), i32(23))
        return builder.sub(bits, i32(127))

    return types.int32(types.float32), generate


@_kernel
def token_bits(scrambled, factor, offset):
    """Return the 23 random bits of a token at a place; see `noise.gumbel`."""
    x = U32(scrambled * factor + offset)
    x = U32(x ^ (x >> U32(15)))
    return U32(U32(x * U32(0xC2B2AE35)) >> U32(9))


@_kernel
def noise_of(bits):
    """Return the noise that bits stand for; torch's logarithms may differ in the last place."""
    return F32(-np.log(-np.log((np.float64(bits) + 0.5) * 2.0**-23)))


@_no_nan
def _bound(scores_V, scrambled_V, first, stop, factor, offset):
    """Return what no score of a part is above with its noise, without a logarithm.

    -log(-log u) is less than -log(1 - u), and 1 - u at least the power of two below it.
    """
    highest = F32(-np.inf)
    for i in range(first, stop):
        rest = F32(np.int32(U32(0x7FFFFF) - token_bits(scrambled_V[i], factor, offset))) + F32(0.5)
        highest = max(highest, scores_V[i] + F32(23 - _exponent(rest)) * _LN2)
    return highest


@_kernel
def _best(scores_V, least, scrambled_V, factor, offset, values_K, tokens_K):
    """Fill in the best tokens with their noise, best first; return how many there are."""
    count, bar, vocab = 0, F32(-np.inf), scores_V.shape[0]
    for first in range(0, vocab, _PART):
        stop = min(first + _PART, vocab)
        if _bound(scores_V, scrambled_V, first, stop, factor, offset) + _MARGIN < bar:
            continue
        for i in range(first, stop):
            value = scores_V[i] + noise_of(token_bits(scrambled_V[i], factor, offset))
            if scores_V[i] >= least and value > bar:
                count = min(count + 1, _BEST)
                insert(values_K, tokens_K, count - 1, value, i)
                bar = values_K[count - 1] if count == _BEST else bar
    return count


@_kernel
def _sampled(scores_V, peak, kth, least, top_p, scrambled_V, factor, offset):
    """Return the best token with its noise that is in the nucleus."""
    values_K, tokens_K = np.empty(_BEST, F32), np.empty(_BEST, np.int64)
    count = _best(scores_V, least, scrambled_V, factor, offset, values_K, tokens_K)
    whole = _mass(scores_V, peak, kth, F32(-np.inf)) if top_p < F32(1) else F32(0)
    for k in range(count):
        last = k + 1 == count
        if count == _BEST if last else values_K[k] - values_K[k + 1] < _CLOSE:
            return UNDECIDED
        if top_p >= F32(1):
            return tokens_K[k]
        above = _mass(scores_V, peak, kth, scores_V[tokens_K[k]])
        if abs(above - top_p * whole) < _CLOSE_MASS * whole:
            return UNDECIDED
        if above < top_p * whole:
            return tokens_K[k]
    return UNDECIDED


@_kernel
def _choose_place(logits_PV, rows, words_P2, scrambled_V, scores_V, found_V, out_P, p):
    temperature, log_min_p, top_p, top_k = rows[0][p], rows[1][p], rows[2][p], rows[3][p]
    if temperature == F32(0):
        out_P[p] = peak_of(logits_PV[p])
        return
    for i in range(scores_V.shape[0]):
        scores_V[i] = logits_PV[p, i] / temperature
    top = peak_of(scores_V)
    peak = scores_V[top]
    if not np.isfinite(peak):
        out_P[p] = top
        return
    kth = _kth(scores_V, top_k, found_V)
    least = max(kth, peak + log_min_p)
    out_P[p] = _sampled(
        scores_V, peak, kth, least, top_p, scrambled_V, words_P2[p, 0], words_P2[p, 1]
    )


@_shared
def _choose(rank, counters, logits_PV, rows, words_P2, scrambled_V, scores_WV, found_WV, out_P):
    """Choose at every place; see `Team.run`."""
    places, scores_V, found_V = out_P.shape[0], scores_WV[rank], found_WV[rank]
    p = claim(counters, 0)
    while p < places:
        _choose_place(logits_PV, rows, words_P2, scrambled_V, scores_V, found_V, out_P, p)
        finish(counters, 0)
        p = claim(counters, 0)
    settle(counters, 0, places)


def choose_compiled(logits_BNV: Tensor, index_BN: Tensor, params: Any) -> Tensor:
    """Return the chosen token of every place, or `UNDECIDED`, int64 `[B, N]`.

    params: `RowParams` of the rows.
    """
    tokens, vocab = index_BN.shape[1], logits_BNV.shape[-1]

    def places(values_B: Tensor) -> Any:
        return values_B.repeat_interleave(tokens).numpy()

    keys_P = params.noise_key_B.repeat_interleave(tokens)
    words_P2 = torch.stack(place_words(keys_P, index_BN.flatten()), dim=1)
    rows = (
        places(params.temperature_B),
        places(params.min_p_B.log()),
        places(params.top_p_B),
        places(params.top_k_B),
    )
    out_P = np.empty(index_BN.numel(), np.int64)
    team = _team(1 if out_P.size == 1 else torch.get_num_threads())
    scores_WV, found_WV = np.empty((2, team.workers, vocab), F32)
    logits_PV = logits_BNV.float().reshape(-1, vocab).contiguous().numpy()
    words = words_P2.numpy().view(U32)
    inputs = (logits_PV, rows, words, scrambled(vocab))
    team.run(_choose, 1, *inputs, scores_WV, found_WV, out_P)
    return torch.from_numpy(out_P).view_as(index_BN)


@lru_cache(maxsize=2)
def _team(workers: int) -> Team:
    return Team(workers)


@lru_cache(maxsize=4)
def scrambled(vocab: int) -> Any:
    """Return what `token_bits` takes of each token, uint32 `[V]`."""
    return scramble(torch.arange(vocab, dtype=torch.int32)).numpy().view(U32)
