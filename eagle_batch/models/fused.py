"""The packed decoder stack through fused CPU kernels, for passes of few rows.

The kernels work on the memory of torch's tensors: numpy sees it without a copy. What they write
between two products lives in buffers that are allocated once.

Shape legend: R rows of a flat batch, P rows with padding, H hidden size, Q query heads, D head
size, I width of the feed-forward layer.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eagle_batch.models.cache import CacheStep, KeyValueCache
from eagle_batch.models.linear import DecodingLinear

#: Rows up to which one thread of the kernels is faster than all threads of torch's operators, as a
#: whole and for attention (2 cores, AVX-512).
MOST_ROWS = 64
_MOST_ATTENDING = {torch.float32: 16, torch.bfloat16: MOST_ROWS}


@dataclass(frozen=True, slots=True)
class FusedLayer:
    """One decoder layer: its products, and its norms as arrays."""

    attention_norm: Any
    qkv: DecodingLinear
    o: DecodingLinear
    mlp_norm: Any
    gate_up: DecodingLinear
    down: DecodingLinear


@dataclass(frozen=True, slots=True)
class FusedSizes:
    """What the buffers are made for."""

    hidden: int
    heads: int
    head_dim: int
    feed_forward: int
    eps: float


def is_fusible(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether there are kernels for these elements on this device, and numba to compile them."""
    return (
        device.type == "cpu"
        and dtype in {torch.float32, torch.bfloat16}
        and importlib.util.find_spec("numba") is not None
    )


def elements(tensor: Tensor) -> Any:
    """Return a tensor's memory as an array; bfloat16 as its bits."""
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


class FusedStack:
    """Runs the layers of a `PackedDecoder` over one `CacheStep`; owns the buffers between them."""

    def __init__(self, layers: Sequence[FusedLayer], sizes: FusedSizes, dtype: torch.dtype) -> None:
        from eagle_batch.models import kernels

        self._kernels = kernels
        self._layers = layers
        self._sizes = sizes
        self._eps = np.float32(sizes.eps)
        self._scale = sizes.head_dim**-0.5
        width = sizes.heads * sizes.head_dim
        # Zeros: rows of padding are multiplied, though nobody reads the products.
        self._normed = torch.zeros(MOST_ROWS, sizes.hidden, dtype=dtype)
        self._attended = torch.zeros(MOST_ROWS, width, dtype=dtype)
        self._gated = torch.zeros(MOST_ROWS, sizes.feed_forward, dtype=dtype)
        self._queries = torch.zeros(MOST_ROWS, sizes.heads, sizes.head_dim)
        self._most_attending = _MOST_ATTENDING[dtype]
        self._scores = np.zeros((0, 0, 0), np.float32)
        self._sums = np.zeros((0, 0, 0), np.float32)
        self._storage: tuple[KeyValueCache | None, list[Any]] = (None, [])

    def run(self, x_PH: Tensor, rotation_RP: Tensor, step: CacheStep, keep: Sequence[int]) -> _Run:
        """Return the residual stream after the last layer, and before those of `keep`.

        x: float32. rotation: complex `[R, D / 2]`.
        """
        rows, padded = rotation_RP.shape[0], x_PH.shape[0]
        place = _Place(
            rotation_RP.real.contiguous().numpy(),
            rotation_RP.imag.contiguous().numpy(),
            step.index_R.numpy(),
            step.first_row,
            step.base_B.numpy(),
            step.visible_BNM.numpy(),
            self._queries[:rows].numpy(),
        )
        storage = self._layers_of(step.cache, place.visible.shape[1])
        normed, attended = self._normed[:padded], self._attended[:padded]
        gated = self._gated[:padded]
        arrays = elements(normed), elements(attended), elements(gated)
        kept = {}
        for index, layer in enumerate(self._layers):
            if index in keep:
                kept[index] = x_PH
            self._kernels.normalise(x_PH.numpy(), layer.attention_norm, self._eps, arrays[0])
            self._rotate(layer.qkv.forward(normed), storage[index], place)
            if rows <= self._most_attending:
                self._attend(storage[index], place, arrays[1])
            else:
                queries = self._queries[:rows].to(normed.dtype)
                attended[:rows] = step.look_packed(index, queries, self._scale, None)
            x_PH = layer.o.add_to(x_PH, attended)
            self._kernels.normalise(x_PH.numpy(), layer.mlp_norm, self._eps, arrays[0])
            self._kernels.gate(elements(layer.gate_up.forward(normed)), arrays[2])
            x_PH = layer.down.add_to(x_PH, gated)
        return _Run(x_PH, kept)

    def _rotate(self, qkv_PX: Tensor, storage_SC: Any, place: _Place) -> None:
        """Rotate queries and keys, and put keys and values into the cache."""
        pairs = self._sizes.head_dim // 2
        self._kernels.rotate(
            elements(qkv_PX).reshape(qkv_PX.shape[0], -1, pairs, 2),
            place.cos,
            place.sin,
            storage_SC.reshape(-1, 2, storage_SC.shape[3], pairs, 2),
            place.index,
            place.queries.reshape(*place.queries.shape[:2], pairs, 2),
        )

    def _attend(self, storage_SC: Any, place: _Place, out: Any) -> None:
        self._kernels.attend(
            place.queries,
            storage_SC,
            place.first,
            place.base,
            place.visible,
            np.float32(self._scale),
            self._scores,
            self._sums,
            out,
        )

    def _layers_of(self, cache: KeyValueCache, tokens: int) -> list[Any]:
        """Return the cache's layers as arrays `[S, C, 2, G, D]`, and have scratch for a pass."""
        shape = cache.shape
        queries = tokens * self._sizes.heads // shape.kv_heads
        if self._storage[0] is not cache:
            self._storage = (cache, [elements(layer) for layer in cache.store])
            queries = max(queries, self._scores.shape[0])
            self._scores = np.zeros((0, 0, 0), np.float32)
        if self._scores.shape[0] < queries:
            self._scores = np.zeros((queries, shape.kv_heads, shape.capacity + 1), np.float32)
            self._sums = np.zeros((queries, shape.kv_heads, shape.head_dim), np.float32)
        return self._storage[1]


@dataclass(frozen=True, slots=True)
class _Run:
    x_PH: Tensor
    kept: dict[int, Tensor]


@dataclass(frozen=True, slots=True)
class _Place:
    """Where the tokens of a pass stand, as arrays."""

    cos: Any
    sin: Any
    index: Any
    first: int
    base: Any
    visible: Any
    queries: Any
