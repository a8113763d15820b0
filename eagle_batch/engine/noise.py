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
    return -_exponential(keys, indices, token_ids).log_()


def _exponential(keys: Tensor, indices: Tensor, token_ids: Tensor) -> Tensor:
    """Return standard exponential noise: -log of a uniform number in (0, 1)."""
    low, high = _place_words(keys, indices)
    bits = _hash_tokens(low[..., None], high[..., None], token_ids.to(torch.int32))
    # 23 bits plus a half: never 0 nor 1, so the logarithm is finite on both ends.
    uniform = (((bits >> 9) & 0x7FFFFF).to(torch.float32) + 0.5) * 2.0**-23
    return -uniform.log_()


def _place_words(keys: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """Mix a key and a token index into two int32 words (SplitMix64 finaliser)."""
    z = keys + (indices + 1) * -7046029254386353131
    z = (z ^ _shift(z, 30)) * -4658895280553007687
    z = (z ^ _shift(z, 27)) * -7723592293110705685
    z = z ^ _shift(z, 31)
    return _int32(z & _LOW), _int32(_shift(z, 32))


def _shift(z: Tensor, bits: int) -> Tensor:
    """Shift int64 words right without copying the sign."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _int32(word: Tensor) -> Tensor:
    """Reinterpret the low 32 bits as a signed word; a plain cast may saturate on some devices."""
    return torch.where(word >= 1 << 31, word - (1 << 32), word).to(torch.int32)


def _hash_tokens(low: Tensor, high: Tensor, token_ids: Tensor) -> Tensor:
    """Hash token ids under two words: two rounds of multiply and xor-shift, `[..., V]` int32."""
    x = (token_ids * -1640531527) ^ low
    x = (x ^ ((x >> 16) & 0xFFFF)) * 0x21F0AAAD
    x = (x ^ ((x >> 15) & 0x1FFFF)) * 0x735A2D97
    x = (x ^ ((x >> 15) & 0x1FFFF)) ^ high
    x = x * -2048144789
    x = (x ^ ((x >> 13) & 0x7FFFF)) * -1028477387
    return x ^ ((x >> 16) & 0xFFFF)
