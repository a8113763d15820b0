"""Noise with an address: a counter-based generator evaluated where it is needed.

The Gumbel noise of a token depends on (noise key of the row, index of the generated token, token
id) and on nothing else: not on the batch, the tree, the device or the order of evaluation. The
hash is integer arithmetic in 32-bit lanes, so every device computes the same bits.

Shape legend: `...` any shape of places, V token ids.
"""

from __future__ import annotations

import torch
from torch import Tensor

_LOW = 0xFFFFFFFF


def gumbel(keys: Tensor, indices: Tensor, token_ids: Tensor) -> Tensor:
    """Return standard Gumbel noise `[..., V]`, float32.

    keys: int64 `[...]`, from `noise_key`; indices: int64 `[...]`, index of the generated token;
    token_ids: int64, broadcast against `[..., V]`.
    """
    factor, offset = place_words(keys, indices)
    bits = _mix_tokens(factor[..., None], offset[..., None], token_ids)
    # 23 bits plus a half: never 0 nor 1, so both logarithms are finite.
    uniform = bits.to(torch.float32).add_(0.5).mul_(2.0**-23)
    return uniform.log_().neg_().log_().neg_()


def place_words(keys: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """Mix a key and a token index into an odd factor and an offset (SplitMix64 finaliser)."""
    z = keys + (indices + 1) * -7046029254386353131
    z = (z ^ _shift(z, 30)) * -4658895280553007687
    z = (z ^ _shift(z, 27)) * -7723592293110705685
    z = z ^ _shift(z, 31)
    return _int32(z & _LOW) | 1, _int32(_shift(z, 32))


def _shift(z: Tensor, bits: int) -> Tensor:
    """Shift int64 words right without copying the sign."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _int32(word: Tensor) -> Tensor:
    """Reinterpret the low 32 bits as a signed word; a plain cast may saturate on some devices."""
    return torch.where(word >= 1 << 31, word - (1 << 32), word).to(torch.int32)


def _mix_tokens(factor: Tensor, offset: Tensor, token_ids: Tensor) -> Tensor:
    """Hash token ids at a place to 23 random bits, `[..., V]` int32.

    The ids are scrambled by themselves first, which costs one pass over the vocabulary; what is
    done at every place is one multiply-add, one xor-shift and one multiply, in place.
    """
    x = scramble(token_ids.to(torch.int32)) * factor
    x.add_(offset)
    x.bitwise_xor_((x >> 15).bitwise_and_(0x1FFFF))
    x.mul_(-1028477387)
    return x.bitwise_right_shift_(9).bitwise_and_(0x7FFFFF)


def scramble(x: Tensor) -> Tensor:
    """Spread int32 words over 32 bits (a multiply and xor-shift finaliser)."""
    x = (x + 1) * -1640531527
    x = (x ^ ((x >> 16) & 0xFFFF)) * 0x21F0AAAD
    x = (x ^ ((x >> 15) & 0x1FFFF)) * 0x735A2D97
    return x ^ ((x >> 15) & 0x1FFFF)
