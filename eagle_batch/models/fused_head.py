"""An EAGLE head through compiled CPU kernels.

Its matrices are held in bfloat16, whatever the target's type: a round reads them several times, and
what is drafted can change how many tokens a pass gains, never which. All else stays as it was.

Shape legend: see `heads.py`; R rows of a flat batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from eagle_batch.models.fused import (
    FusedLayer,
    FusedProduct,
    FusedSizes,
    FusedStack,
    RotationTable,
    is_fusible,
)
from eagle_batch.models.heads import DecoderLayer, Head, StepAttention
from eagle_batch.models.linear import DecodingLinear
from eagle_batch.models.packed import HeadOrder
from eagle_batch.models.shelf import Shelf

if TYPE_CHECKING:
    from eagle_batch.models.team import Team


class FusedLinear(nn.Module):
    """A linear layer over few rows."""

    def __init__(self, linear: nn.Linear, team: Team, shelf: Shelf) -> None:
        super().__init__()
        self.matrix = _narrow(linear.weight, shelf, linear.bias)
        self._product = FusedProduct(self.matrix, team)

    def forward(self, x: Tensor) -> Tensor:
        """Return the product, float32, which is what it was summed in."""
        return self._product.forward(x.flatten(0, -2)).view(*x.shape[:-1], -1)


class FusedHeadLayer(nn.Module):
    """Does what a `DecoderLayer` does, over a cache that it lays out its own way."""

    def __init__(self, layer: DecoderLayer, team: Team, shelf: Shelf) -> None:
        super().__init__()
        sizes = FusedSizes(layer.heads, layer.kv_heads, layer.head_dim, layer.eps)
        frequencies = layer.rotary.frequencies
        self.rotations = RotationTable(lambda at_T: _cos_sin(at_T[:, None] * frequencies))
        self.post_attention_layernorm = layer.post_attention_layernorm
        norm = layer.post_attention_layernorm.detach()
        fused = FusedLayer(
            # The caller normalises what comes in.
            attention_norm=norm,
            qkv=_pack_qkv(layer, shelf),
            o=_narrow(_order(layer).output_columns(layer.o_proj.weight), shelf),
            mlp_norm=norm,
            gate_up=_narrow(layer.gate_up_proj.weight, shelf),
            down=_narrow(layer.down_proj.weight, shelf),
        )
        self.stack = FusedStack([fused], sizes, team)

    def forward(
        self, x_BNI: Tensor, residual_BNH: Tensor, positions_BN: Tensor, attend: StepAttention
    ) -> Tensor:
        """Return the residual stream after attention and MLP, not normalised, float32."""
        # It is changed in place.
        x_RH = residual_BNH.flatten(0, 1).float().clone()
        rotation = self.rotations.at(positions_BN, attend.step.cache.shape.capacity)
        self.stack.run(x_RH, rotation, attend.step, given_RA=x_BNI.flatten(0, 1))
        return x_RH.view_as(residual_BNH)


def is_fusible_head(head: Head, device: torch.device) -> bool:
    """Whether there are kernels for all that a head does."""
    config = head.config
    inputs = (
        config.attention_inputs,
        config.heads * config.head_dim,
        config.head_dim,
        config.hidden,
        config.intermediate,
        config.feature_width,
    )
    return not config.qk_norm and is_fusible(torch.bfloat16, device, inputs)


def fuse_head(head: Head, team: Team) -> None:
    """Swap the layer of a head and its other matrices for fused ones, in place."""
    assert isinstance(head.layer, DecoderLayer)
    shelf = Shelf()
    head.add_module("layer", FusedHeadLayer(head.layer, team, shelf))
    for name, child in list(head.named_children()):
        if type(child) is nn.Linear:
            setattr(head, name, FusedLinear(child, team, shelf))


def _cos_sin(angles_TP: Tensor) -> tuple[Tensor, Tensor]:
    return angles_TP.cos(), angles_TP.sin()


def _narrow(weight: Tensor, shelf: Shelf, bias: Tensor | None = None) -> DecodingLinear:
    return DecodingLinear(weight.detach().bfloat16(), bias, shelf=shelf)


def _order(layer: DecoderLayer) -> HeadOrder:
    return HeadOrder(layer.heads, layer.kv_heads, layer.head_dim)


def _pack_qkv(layer: DecoderLayer, shelf: Shelf) -> DecodingLinear:
    """Lay the rows of queries and keys out as the kernels want them."""
    sizes = [count * layer.head_dim for count in (layer.heads, layer.kv_heads, layer.kv_heads)]

    def ordered(rows: Tensor) -> Tensor:
        q, k, v = torch.split(rows.detach(), sizes)
        return torch.cat((_order(layer).query_rows(q), _order(layer).key_rows(k), v))

    bias: Tensor | None = layer.qkv_proj.bias
    return _narrow(ordered(layer.qkv_proj.weight), shelf, None if bias is None else ordered(bias))
