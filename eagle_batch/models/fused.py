"""The packed decoder stack through compiled CPU kernels, for passes of few rows.

The kernels work on the memory of torch's tensors: numpy sees it without a copy. What they write
between two products lives in buffers that are allocated once.

Shape legend: L layers, R rows of a flat batch, H hidden size, X heads of queries, keys and values
times their size, F kept states times H, P pairs of a rotation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from eagle_batch.models.cache import CacheStep, JoinedStep, KeyValueCache
from eagle_batch.models.linear import DecodingLinear, has_bfloat16
from eagle_batch.models.quick import has_kernels

if TYPE_CHECKING:
    from eagle_batch.models.team import Team

#: Rows of a pass, and tokens of a row of the batch, up to which the kernels are faster than torch's
#: operators: many queries over the same keys are what its attention is made for.
_MOST_ROWS, _MOST_TOKENS = 512, 128
#: The same rows where torch multiplies in bfloat16 and these kernels have to widen it.
_MOST_ROWS_WIDENED = 16
#: Hidden size from which on it pays to share a layer between threads.
_LEAST_SHARED = 128


@dataclass(frozen=True, slots=True)
class FusedLayer:
    """One decoder layer; the weights lie in their plain layout."""

    attention_norm: Tensor
    qkv: DecodingLinear
    o: DecodingLinear
    mlp_norm: Tensor
    gate_up: DecodingLinear
    down: DecodingLinear


def is_fusible(dtype: torch.dtype, device: torch.device, inputs: Sequence[int]) -> bool:
    """Whether there are kernels for matrices of these elements and inputs on this device."""
    if device.type != "cpu" or not has_kernels():
        return False
    from eagle_batch.models.tiles import INPUTS

    return dtype in {torch.float32, torch.bfloat16} and not any(size % INPUTS for size in inputs)


def activations(matrices: Sequence[DecodingLinear]) -> torch.dtype:
    """Return the type in which products over plain weights take their other side in."""
    from eagle_batch.models.tiles import PAIR_INPUTS, PAIRS

    halves = all(matrix.sample.dtype == torch.bfloat16 for matrix in matrices)
    fit = not any(matrix.in_features % PAIR_INPUTS for matrix in matrices)
    return torch.bfloat16 if PAIRS and halves and fit else torch.float32


def new_team(hidden: int) -> Team:
    """Return a team for a model: as many threads as torch has, one where there is little to do."""
    from eagle_batch.models.team import Team

    return Team(torch.get_num_threads() if hidden >= _LEAST_SHARED else 1)


def elements(tensor: Tensor) -> Any:
    """Return a tensor's memory as an array; bfloat16 as its bits."""
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


@dataclass(frozen=True, slots=True)
class FusedSizes:
    """What the buffers are made for."""

    heads: int
    kv_heads: int
    head_dim: int
    eps: float


@dataclass(frozen=True, slots=True)
class Rotation:
    """The rotations of the tokens of a pass."""

    #: float32, contiguous; cosine and sine of the angles at T places.
    cos_TP: Tensor
    sin_TP: Tensor
    #: int64 [R]; the place of each token.
    place_R: Tensor


class RotationTable:
    """The rotations of all positions, computed once."""

    def __init__(self, angles: Callable[[Tensor], tuple[Tensor, Tensor]]) -> None:
        """Begin empty; angles: positions `[T]` -> cosine and sine, `[T, P]` each."""
        self._angles = angles
        self._cos_TP = self._sin_TP = torch.empty(0, 0)

    def at(self, positions_BN: Tensor, limit: int) -> Rotation:
        """Return the rotations at positions, all below the limit but for padding."""
        if self._cos_TP.shape[0] < limit:
            cos_TP, sin_TP = self._angles(torch.arange(limit))
            self._cos_TP, self._sin_TP = cos_TP.contiguous(), sin_TP.contiguous()
        return Rotation(self._cos_TP, self._sin_TP, positions_BN.flatten())


class FusedProduct:
    """One matrix over few or many rows, its result in float32."""

    def __init__(self, matrix: DecodingLinear, team: Team) -> None:
        from eagle_batch.models import kernels

        self._kernel = kernels.product
        self._matrix, self._team = matrix, team
        self._kind = elements(matrix.sample)
        self._takes = activations([matrix])

    def forward(self, x_RA: Tensor) -> Tensor:
        """Return the product `[R, O]`."""
        out_RO = torch.empty(x_RA.shape[0], self._matrix.out_features)
        inputs = elements(x_RA.to(self._takes).contiguous())
        self._team.run(self._kernel, 1, self._matrix.address, inputs, out_RO.numpy(), self._kind)
        return out_RO if self._matrix.bias is None else out_RO.add_(self._matrix.bias)


class FusedStack:
    """Runs decoder layers over one step; owns the buffers between the products."""

    def __init__(self, layers: Sequence[FusedLayer], sizes: FusedSizes, team: Team) -> None:
        from eagle_batch.models import kernels

        self._kernels, self.team = kernels, team
        #: Some elements of the kind of the weights.
        self.kind = elements(layers[0].qkv.sample)
        self._layers = layers
        self._members, self._size = sizes.heads // sizes.kv_heads, sizes.head_dim
        matrices = [(each.qkv, each.o, each.gate_up, each.down) for each in layers]
        norms = [torch.stack((each.attention_norm, each.mlp_norm)) for each in layers]
        self.weights = kernels.Stack(
            np.array([[matrix.address for matrix in row] for row in matrices]),
            torch.stack(norms).float().numpy(),
            _biases(layers),
            np.float32(sizes.eps),
            np.float32(sizes.head_dim**-0.5),
        )
        #: Type of what products take in.
        self.takes = activations([matrix for row in matrices for matrix in row])
        widened = layers[0].qkv.sample.dtype != self.takes and has_bfloat16()
        self._most_rows = _MOST_ROWS_WIDENED if widened else _MOST_ROWS
        self._buffers = self._new_buffers(0, 0, 0)
        self._storage: tuple[KeyValueCache | None, Any] = (None, None)

    def suits(self, step: CacheStep | JoinedStep) -> bool:
        """Whether the kernels are the faster way to make a pass."""
        return step.index_R.shape[0] <= self._most_rows and _most_tokens(step) <= _MOST_TOKENS

    def run(
        self,
        x_RH: Tensor,
        rotation: Rotation,
        step: CacheStep | JoinedStep,
        keep: Sequence[int] = (),
        given_RA: Tensor | None = None,
    ) -> Tensor:
        """Run the residual stream `x`, float32, in place; return its states at `keep`, `[R, F]`.

        given: what the attention of the first layer takes in instead of the norm of `x`.
        """
        rows, hidden = x_RH.shape
        kept_RF = torch.empty(rows, len(keep) * hidden)
        given_RA = torch.empty(0, hidden) if given_RA is None else given_RA
        storage, buffers = self.room(step.cache, rows, _most_tokens(step))
        place = self._kernels.Place(
            rotation.cos_TP.numpy(),
            rotation.sin_TP.numpy(),
            rotation.place_R.numpy(),
            step.index_R.numpy(),
            *rows_of(step),
        )
        self.team.run(
            self._kernels.decode,
            self._kernels.PHASES * len(self._layers),
            self.weights,
            place,
            storage,
            buffers,
            x_RH.numpy(),
            elements(given_RA.to(self.takes).contiguous()),
            np.array(keep, np.int64),
            kept_RF.numpy(),
            self.kind,
        )
        return kept_RF

    def room(self, cache: KeyValueCache, rows: int, tokens: int) -> tuple[Any, Any]:
        """Return a cache's memory `[L, S, C, 2, G, D]`, and buffers for a pass over it.

        tokens: of a row of the batch, at most.
        """
        if self._storage[0] is not cache:
            self._storage = (cache, elements(cache.store))
        queries, places = tokens * self._members, cache.shape.capacity + 1
        had = (*self._buffers.qkv_RX.shape[:1], *self._buffers.scores_WJT.shape[1:])
        if had[0] < rows or had[1] < queries or had[2] < places:
            self._buffers = self._new_buffers(
                max(had[0], rows), max(had[1], queries), max(had[2], places)
            )
        return self._storage[1], self._buffers

    def _new_buffers(self, rows: int, queries: int, places: int) -> Any:
        first, workers = self._layers[0], self.team.workers
        inputs = max(first.qkv.in_features, first.gate_up.in_features)
        taken = [
            *((rows, width) for width in (first.o.in_features, first.down.in_features)),
            (workers, rows, inputs),
        ]
        written = [
            (rows, first.qkv.out_features),
            (workers, rows, self._kernels.SHARE),
            *((workers, queries, width) for width in (self._size, places, self._size)),
        ]
        return self._kernels.Buffers(
            *(elements(torch.zeros(size, dtype=self.takes)) for size in taken),
            *(np.zeros(size, np.float32) for size in written),
        )


def _most_tokens(step: CacheStep | JoinedStep) -> int:
    return max(part.visible_BNM.shape[1] for part in step.parts)


def rows_of(step: CacheStep | JoinedStep) -> tuple[Any, ...]:
    """Return what a place says of the rows of a pass, from their slots on; see `kernels.Place`."""
    if len(step.parts) > 1:
        return _rows_together(step.parts)
    (part,) = step.parts
    B, N, M = part.visible_BNM.shape
    counts = part.counts
    return (
        np.arange(part.first_row, part.first_row + B),
        np.arange(0, B * N + 1, N) if counts is None else np.cumsum([0, *counts]),
        part.base_B.numpy(),
        np.full(B, M),
        part.visible_BNM.contiguous().numpy(),
    )


def _rows_together(parts: Sequence[CacheStep]) -> tuple[Any, ...]:
    rows, tokens, columns = zip(*(part.visible_BNM.shape for part in parts), strict=True)
    slots = [np.arange(part.first_row, part.first_row + len(part.base_B)) for part in parts]
    visible = [
        F.pad(part.visible_BNM, (0, max(columns) - m, 0, max(tokens) - n))
        for part, n, m in zip(parts, tokens, columns, strict=True)
    ]
    return (
        np.concatenate(slots),
        np.concatenate(([0], np.cumsum(np.repeat(tokens, rows)))),
        torch.cat([part.base_B for part in parts]).numpy(),
        np.repeat(columns, rows),
        torch.cat(visible).numpy(),
    )


def _biases(layers: Sequence[FusedLayer]) -> Any:
    biases = [each.qkv.bias for each in layers]
    if biases[0] is None:
        return np.zeros((len(layers), 0), np.float32)
    return torch.stack([bias for bias in biases if bias is not None]).float().numpy()
