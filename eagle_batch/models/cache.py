"""Key/value slots of one model: reserve, append, keep the accepted path.

Shape legend: B rows of a pass, N new tokens a row, M scratch columns, T visible length, C slot
capacity, S slots, G key/value heads, R query heads a key/value head, H = G*R query heads, D head
size.

One tensor owns every layer, `[layers, S, C, 2, G, D]`, so that keeping an accepted path is a single
gather and scatter for all layers. Storage index j of a committed token equals its position. The
tokens of a pass go behind the committed ones, so a row's storage looks like this:

    [0, base)            committed, visible to every new token
    [base, base + M)     scratch: the nodes of a draft tree, visible as the ancestor mask says
    [base + M, C - 1)    garbage of earlier passes, never visible
    C - 1                where padding is written
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True)
class CacheShape:
    """The sizes of a key/value cache, all in elements."""

    layers: int
    slots: int
    capacity: int
    kv_heads: int
    head_dim: int


class PackedStep(Protocol):
    """A forward pass over the slots, as the layers of a packed model see it."""

    def attend_packed(
        self, layer: int, q_RHD: Tensor, kv_R2GD: Tensor, scale: float, window: int | None
    ) -> Tensor:
        """Do what `attend` does, tokens first."""


class Step(PackedStep, Protocol):
    """A forward pass over the slots, as the layers of any model see it."""

    def attend(
        self,
        layer: int,
        q_BHND: Tensor,
        k_BGND: Tensor,
        v_BGND: Tensor,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """Append k and v of the new tokens, return the attention output `[B, H, N, D]`."""


class Cache(Protocol):
    """The slots of a model, on one device or on several."""

    shape: CacheShape
    dtype: torch.dtype
    #: Where passes are described and rows are chosen.
    device: torch.device

    @property
    def bytes(self) -> int:
        """Memory of the slots in bytes."""

    def step(
        self,
        first_row: int,
        write_BN: Tensor,
        base_B: Tensor,
        visible_BNM: Tensor,
        positions_BN: Tensor,
        extent: int,
    ) -> Step:
        """Prepare one forward pass; see `KeyValueCache.step`."""

    def keep(self, first_row: int, source_BA: Tensor, target_BA: Tensor) -> None:
        """Copy storage columns `source` onto `target` in every layer (the accepted path)."""

    def swap_rows(self, a: int, b: int, length: int) -> None:
        """Exchange the first `length` columns of two slots."""

    def clear(self, row: int) -> None:
        """Forget a slot: what is not a number must not meet a weight of zero."""

    def snapshot(self, row: int, length: int) -> tuple[Tensor, ...]:
        """Return a copy of the first `length` columns of a slot, each `[layers, length, ...]`."""

    def restore(self, row: int, columns: tuple[Tensor, ...]) -> None:
        """Write columns from `snapshot`, or the first of them, to the start of a slot."""


class KeyValueCache:
    """Keys and values of `slots` rows, preallocated; the only owner of that memory."""

    def __init__(self, shape: CacheShape, *, dtype: torch.dtype, device: torch.device) -> None:
        self.shape = shape
        self.dtype, self.device = dtype, device
        self.store = torch.zeros(
            (shape.layers, shape.slots, shape.capacity, 2, shape.kv_heads, shape.head_dim),
            dtype=dtype,
            device=device,
        )
        #: The same memory by storage column: [layers, S * C, 2, G, D].
        self.columns = self.store.view(
            shape.layers, shape.slots * shape.capacity, 2, shape.kv_heads, shape.head_dim
        )

    @property
    def bytes(self) -> int:
        """Memory of the cache in bytes."""
        return self.store.numel() * self.store.element_size()

    def step(
        self,
        first_row: int,
        write_BN: Tensor,
        base_B: Tensor,
        visible_BNM: Tensor,
        positions_BN: Tensor,
        extent: int,
    ) -> CacheStep:
        """Prepare one forward pass over the slots `first_row .. first_row + B`.

        write_BN: int64 storage index of each new token (clamped to the padding place C - 1).
        base_B: int64 committed length of each row.
        visible_BNM: bool, whether new token n sees scratch column base + m.
        positions_BN: int64 rotary position of each new token; scratch column m has position
            base + depth, which only sliding-window layers need.
        extent: storage columns that the pass looks at; at least base + M of every row.
        """
        return CacheStep(self, first_row, write_BN, base_B, visible_BNM, positions_BN, extent)

    def keep(self, first_row: int, source_BA: Tensor, target_BA: Tensor) -> None:
        """Copy storage columns `source` onto `target` in every layer (the accepted path)."""
        rows = self.row_offsets(first_row, source_BA)
        columns = self.columns.index_select(1, (rows + source_BA).flatten())
        self.columns.index_copy_(1, (rows + target_BA).flatten(), columns)

    def swap_rows(self, a: int, b: int, length: int) -> None:
        """Exchange the first `length` columns of two slots."""
        kept = self.store[:, a, :length].clone()
        self.store[:, a, :length] = self.store[:, b, :length]
        self.store[:, b, :length] = kept

    def clear(self, row: int) -> None:
        """Zero a slot: what is not a number must not meet a weight of zero."""
        self.store[:, row] = 0

    def snapshot(self, row: int, length: int) -> tuple[Tensor, ...]:
        """Return a copy of the first `length` columns of a slot, `[layers, length, 2, G, D]`."""
        return (self.store[:, row, :length].clone(),)

    def restore(self, row: int, columns: tuple[Tensor, ...]) -> None:
        """Write columns from `snapshot` to the start of a slot."""
        (own,) = columns
        self.store[:, row, : own.shape[1]] = own

    def row_offsets(self, first_row: int, like_BA: Tensor) -> Tensor:
        """Return the first storage column of each row of a pass, int64 `[B, 1]`."""
        rows_B = torch.arange(first_row, first_row + like_BA.shape[0], device=like_BA.device)
        return (rows_B * self.shape.capacity)[:, None]


class CacheStep:
    """One forward pass over the cache: writes the new keys and values, attends with its mask."""

    def __init__(
        self,
        cache: KeyValueCache,
        first_row: int,
        write_BN: Tensor,
        base_B: Tensor,
        visible_BNM: Tensor,
        positions_BN: Tensor,
        extent: int,
    ) -> None:
        self.cache = cache
        self.first_row = first_row
        self.base_B = base_B
        self.visible_BNM = visible_BNM
        self._rows = slice(first_row, first_row + write_BN.shape[0])
        self._extent = extent
        clamped_BN = write_BN.clamp(max=cache.shape.capacity - 1)
        #: How many tokens of each row are in the pass; None: all of them are.
        self.counts: Sequence[int] | None = None
        #: int64; where each new token goes among the columns of all slots.
        self.index_R = (cache.row_offsets(first_row, write_BN) + clamped_BN).flatten()
        self._positions_BN = positions_BN
        self._write_BN = clamped_BN
        self._tokens = write_BN.shape[1]
        self._masks: dict[tuple[int | None, int], Tensor] = {}

    @property
    def parts(self) -> Sequence[CacheStep]:
        """The step itself: see `JoinedStep`."""
        return (self,)

    def trimmed(self, used_BN: Tensor) -> CacheStep:
        """Return the step over some tokens of each row alone, for kernels, which pad nothing."""
        step = copy(self)
        step.counts, step.index_R = used_BN.sum(1).tolist(), self.index_R[used_BN.flatten()]
        # Row n of the mask is of the n-th token that is there.
        order_BN = used_BN.sort(dim=1, descending=True, stable=True).indices
        step.visible_BNM = self.visible_BNM.gather(
            1, order_BN[..., None].expand_as(self.visible_BNM)
        )
        return step

    def attend(
        self,
        layer: int,
        q_BHND: Tensor,
        k_BGND: Tensor,
        v_BGND: Tensor,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """Append k and v of the new tokens, return the attention output `[B, H, N, D]`.

        window: a new token sees only keys less than this many positions back (sliding attention).
        softcap: attention scores are squashed to (-softcap, softcap) (Gemma 2).
        """
        kv_BN2GD = torch.stack((k_BGND.transpose(1, 2), v_BGND.transpose(1, 2)), dim=2)
        self._append(layer, kv_BN2GD.flatten(0, 1))
        B, H, N, D = q_BHND.shape
        G = k_BGND.shape[1]
        # The query heads that share a key/value head become extra query rows: keys are read once.
        q_BGMD = q_BHND.view(B, G, H // G, N, D).transpose(2, 3).reshape(B, G, -1, D)
        out_BGMD = self._look(layer, q_BGMD, scale, window, softcap)
        return out_BGMD.view(B, G, N, H // G, D).transpose(2, 3).reshape(B, H, N, D)

    def attend_packed(
        self, layer: int, q_RHD: Tensor, kv_R2GD: Tensor, scale: float, window: int | None
    ) -> Tensor:
        """Do what `attend` does without moving anything: tokens first, `[R, H * D]` comes out.

        q_RHD: query heads by their place in a group, then by group.
        kv_R2GD: keys and values of the new tokens.
        """
        self._append(layer, kv_R2GD)
        return self.look_packed(layer, q_RHD, scale, window)

    def look_packed(self, layer: int, q_RHD: Tensor, scale: float, window: int | None) -> Tensor:
        """Do what `attend_packed` does where the keys and values are in the cache already."""
        B, (R, H, D), G = self.base_B.shape[0], q_RHD.shape, self.cache.shape.kv_heads
        q_BGMD = q_RHD.view(B, R * H // (B * G), G, D).transpose(1, 2)
        out_BGMD = self._look(layer, q_BGMD, scale, window, None)
        return out_BGMD.transpose(1, 2).reshape(R, H * D)

    def _append(self, layer: int, kv_R2GD: Tensor) -> None:
        assert self.counts is None, "torch's attention takes rows of one length"
        self.cache.columns[layer].index_copy_(0, self.index_R, kv_R2GD)

    def _look(
        self,
        layer: int,
        q_BGMD: Tensor,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        """Return the attention output; M = N * R, the tokens with their heads of a group."""
        seen = self.cache.store[layer, self._rows, : self._extent]
        k_BGTD, v_BGTD = seen[:, :, 0].transpose(1, 2), seen[:, :, 1].transpose(1, 2)
        repeat = q_BGMD.shape[2] // self._tokens
        mask = self._mask(window, repeat, q_BGMD.dtype)
        if softcap is not None:
            return _softcapped_attention(q_BGMD, k_BGTD, v_BGTD, mask, scale, softcap)
        return F.scaled_dot_product_attention(q_BGMD, k_BGTD, v_BGTD, attn_mask=mask, scale=scale)

    def _mask(self, window: int | None, repeat: int, dtype: torch.dtype) -> Tensor:
        """Return the additive mask `[B, 1, N * repeat, T]`, built once for each window."""
        key = (window, repeat)
        if key not in self._masks:
            visible = _visible_columns(self.visible_BNM, self.base_B, self._extent)
            if window is not None:
                visible = visible & self._within(window)
            additive = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
            additive.masked_fill_(~visible, torch.finfo(dtype).min)
            self._masks[key] = additive.repeat_interleave(repeat, dim=1)[:, None]
        return self._masks[key]

    def _within(self, window: int) -> Tensor:
        columns_BT = torch.arange(self._extent, device=self.base_B.device).repeat(
            self.base_B.shape[0], 1
        )
        # Scratch columns hold tree nodes whose position is not their storage index.
        padded = F.pad(columns_BT, (0, max(0, self.cache.shape.capacity - self._extent)))
        padded.scatter_(1, self._write_BN, self._positions_BN)
        key_positions_BT = padded[:, : self._extent]
        return (self._positions_BN[:, :, None] - key_positions_BT[:, None, :]) < window


class JoinedStep:
    """Several steps in one pass: their tokens share every product, each looks at its own slots."""

    def __init__(self, steps: Sequence[CacheStep]) -> None:
        self.parts = steps
        self.cache = steps[0].cache
        #: int64; see `CacheStep`.
        self.index_R = torch.cat([step.index_R for step in steps])
        self._sizes = [step.index_R.shape[0] for step in steps]

    def attend_packed(
        self, layer: int, q_RHD: Tensor, kv_R2GD: Tensor, scale: float, window: int | None
    ) -> Tensor:
        """See `CacheStep.attend_packed`; the tokens come step by step."""
        queries, kvs = torch.split(q_RHD, self._sizes), torch.split(kv_R2GD, self._sizes)
        parts = zip(self.parts, queries, kvs, strict=True)
        return torch.cat([step.attend_packed(layer, q, kv, scale, window) for step, q, kv in parts])


def causal_visibility(rows: int, tokens: int, device: torch.device) -> Tensor:
    """Return the visibility `[B, N, N]` of a chain: token n sees tokens 0..n of its own pass."""
    chain = torch.ones((tokens, tokens), dtype=torch.bool, device=device).tril_()
    return chain.expand(rows, tokens, tokens)


def _visible_columns(visible_BNM: Tensor, base_B: Tensor, extent: int) -> Tensor:
    """Spread scratch visibility over storage: `[B, N, T]`, committed columns all visible."""
    B, N, M = visible_BNM.shape
    offset_BT = torch.arange(extent, device=base_B.device)[None] - base_B[:, None]
    scratch_BT = (offset_BT >= 0) & (offset_BT < M)
    index_BNT = offset_BT.clamp(0, M - 1)[:, None].expand(B, N, extent)
    return (offset_BT < 0)[:, None] | (visible_BNM.gather(2, index_BNT) & scratch_BT[:, None])


def _softcapped_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, softcap: float
) -> Tensor:
    scores = torch.tanh((q @ k.transpose(2, 3)) * (scale / softcap)) * softcap
    weights = torch.softmax((scores + mask).float(), dim=-1).to(q.dtype)
    return weights @ v
