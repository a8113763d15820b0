"""A lean forward pass for Llama-shaped decoders: packed projections, few operators.

At small batches the operators around the matrix products cost more than the products themselves,
so this pass fuses q/k/v and gate/up into one product each, keeps the residual stream in float32
and calls nothing that a decoding step does not need. The weights are re-laid, not copied twice:
the packed tensors replace the module's own parameters. Families: see `PACKABLE`; every other
family keeps its own forward.

Shape legend: B rows, N tokens a row, R = B*N tokens of the batch, H hidden size or query heads, D
head size, G key/value heads, X heads of q, k and v together, Q = query heads * D.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eagle_batch.models.cache import CacheStep, JoinedStep, PackedStep
from eagle_batch.models.fused import (
    FusedLayer,
    FusedSizes,
    FusedStack,
    Rotation,
    RotationTable,
    is_fusible,
)
from eagle_batch.models.linear import DecodingLinear
from eagle_batch.models.quick import embedding, rms_norm
from eagle_batch.models.shelf import Shelf
from eagle_batch.models.split import moved

if TYPE_CHECKING:
    from eagle_batch.models.team import Team

#: Decoder layers with exactly the data flow of `PackedDecoder`, by class name.
PACKABLE = ("LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer")

#: Kinds of rotary embedding whose angles depend on the position alone, not on the longest one.
_FIXED_ROPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class PackedLayer:
    """Weights of one decoder layer, fused and laid out for decoding."""

    attention_norm: Tensor
    qkv: DecodingLinear
    qk_norm: Tensor | None
    o: DecodingLinear
    mlp_norm: Tensor
    gate_up: DecodingLinear
    down: DecodingLinear
    window: int | None


class PackedDecoder:
    """The decoder stack of a packable model, embedding to final norm.

    Heads are laid out for the cache: query heads by their place in a group first, so that the
    queries of all groups line up with the keys, and each pair of a rotation side by side, so that
    a rotation is one complex product. Scores, and so the text, do not depend on either order.
    """

    def __init__(
        self,
        base: Any,
        config: Any,
        *,
        heads: int,
        kv_heads: int,
        head_dim: int,
        team: Team | None = None,
    ) -> None:
        self._heads, self._kv_heads, self._head_dim = heads, kv_heads, head_dim
        self._eps = float(config.rms_norm_eps)
        self._scale = head_dim**-0.5
        self._rotary_emb = base.rotary_emb
        self._embed: Tensor = base.embed_tokens.weight
        order = HeadOrder(heads, kv_heads, head_dim)
        inputs = (self._embed.shape[1], heads * head_dim, head_dim, config.intermediate_size)
        fusible = team is not None and _is_fusible(base.layers, config, self._embed, inputs)
        shelf = Shelf() if fusible else None
        self._layers = [_pack_layer(layer, config, order, shelf) for layer in base.layers]
        #: Layers that are on another device than what comes before them.
        self._borders = _borders([layer.attention_norm.device for layer in self._layers])
        self._norm: Tensor = base.norm.weight.float()
        self._width = (self._norm.shape[0],)
        self._dtype = self._embed.dtype
        self._least_rows = self._layers[0].qkv.least_rows
        self._fused = self._fuse(team) if team is not None and fusible else None
        self._rotations = RotationTable(lambda positions_T: self._rotation(positions_T[None]))

    def forward(
        self,
        tokens_BN: Tensor,
        positions_BN: Tensor,
        step: PackedStep,
        aux_layers: Sequence[int],
    ) -> tuple[Tensor, Tensor | None]:
        """Return the post-norm hidden states `[B, N, H]` and the aux features `[B, N, F]`."""
        B, N = tokens_BN.shape
        x_RH = embedding(tokens_BN.flatten(), self._embed).float()
        fused = self._fused if self.suits(step) else None
        if fused is not None:
            assert isinstance(step, CacheStep | JoinedStep)
            rotation = self._fused_rotation(positions_BN, step)
            kept_RF = fused.run(x_RH, rotation, step, aux_layers)
        else:
            turns = torch.complex(*self._rotation(positions_BN))[:, None]
            x_RH, kept_RF = self._run(x_RH, turns, step, aux_layers)
        hidden = rms_norm(x_RH, self._norm, self._eps).to(self._dtype).view(B, N, -1)
        return hidden, kept_RF.to(self._dtype).view(B, N, -1) if aux_layers else None

    @property
    def fused(self) -> bool:
        """Whether there are kernels for this stack."""
        return self._fused is not None

    def suits(self, step: PackedStep) -> bool:
        """Whether kernels make this step."""
        fused = self._fused
        return fused is not None and isinstance(step, CacheStep | JoinedStep) and fused.suits(step)

    def _run(
        self, x_RH: Tensor, rotation: Tensor, step: PackedStep, keep: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """Return the residual stream after the last layer, and before those of `keep`."""
        rows, kept = x_RH.shape[0], {}
        # Few rows are padded: see `least_rows`. What stands in the padding is never read.
        padding = (0, 0, 0, max(0, self._least_rows - rows))
        x_RH = F.pad(x_RH, padding) if padding[3] else x_RH
        for index, layer in enumerate(self._layers):
            if index in self._borders:
                x_RH, rotation = (moved(each, self._borders[index]) for each in (x_RH, rotation))
            if index in keep:
                kept[index] = x_RH[:rows]
            out_RQ = self._attend(x_RH, layer, index, rotation, step)
            if padding[3]:
                out_RQ = F.pad(out_RQ, padding)
            x_RH = layer.o.add_to(x_RH, out_RQ)
            x_RH = self._feed_forward(x_RH, layer)
        states = [moved(kept[index], x_RH.device) for index in keep]
        return x_RH[:rows], torch.cat(states, dim=-1) if states else x_RH[:0]

    def _fuse(self, team: Team) -> FusedStack:
        sizes = FusedSizes(self._heads, self._kv_heads, self._head_dim, self._eps)
        layers = [
            FusedLayer(
                layer.attention_norm,
                layer.qkv,
                layer.o,
                layer.mlp_norm,
                layer.gate_up,
                layer.down,
            )
            for layer in self._layers
        ]
        return FusedStack(layers, sizes, team)

    def _rotation(self, positions_BN: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosine and sine of the angles of every token, float32 `[R, D/2]` each."""
        cos, sin = self._rotary_emb(self._norm, positions_BN)
        half = self._head_dim // 2
        return cos[..., :half].flatten(0, 1), sin[..., :half].flatten(0, 1)

    def _fused_rotation(self, positions_BN: Tensor, step: CacheStep | JoinedStep) -> Rotation:
        """Return the same for the kernels, out of a table where a position has one rotation."""
        if getattr(self._rotary_emb, "rope_type", None) in _FIXED_ROPES:
            return self._rotations.at(positions_BN, step.cache.shape.capacity)
        cos_RP, sin_RP = self._rotation(positions_BN)
        places_R = torch.arange(cos_RP.shape[0])
        return Rotation(cos_RP.contiguous(), sin_RP.contiguous(), places_R)

    def _attend(
        self,
        x_RH: Tensor,
        layer: PackedLayer,
        index: int,
        rotation: Tensor,
        step: PackedStep,
    ) -> Tensor:
        """Return the attention output of the real rows, `[R, heads * D]`."""
        R, H, G = rotation.shape[0], self._heads, self._kv_heads
        qkv = layer.qkv.forward(self._normed(x_RH, layer.attention_norm))
        qkv_RXD = qkv[:R].view(R, H + 2 * G, self._head_dim)
        q_RHD = self._rotate(qkv_RXD, layer.qk_norm, rotation)
        return step.attend_packed(
            index, q_RHD, qkv_RXD[:, H:].view(R, 2, G, -1), self._scale, layer.window
        )

    def _rotate(self, qkv_RXD: Tensor, qk_norm: Tensor | None, rotation: Tensor) -> Tensor:
        """Return the rotated queries `[R, heads, D]`; the keys are rotated in place."""
        R, H, G = rotation.shape[0], self._heads, self._kv_heads
        keys_RGD = qkv_RXD[:, H : H + G]
        qk = qkv_RXD
        if qk_norm is not None:
            qk = torch.rms_norm(qk[:, : H + G].float(), (self._head_dim,), None, self._eps)
            qk = qk * qk_norm
        pairs = torch.view_as_complex(qk.float().view(R, -1, self._head_dim // 2, 2))
        keys_RGD.copy_(torch.view_as_real(pairs[:, H : H + G] * rotation).flatten(-2))
        return torch.view_as_real(pairs[:, :H] * rotation).flatten(-2).to(self._dtype)

    def _feed_forward(self, x_RH: Tensor, layer: PackedLayer) -> Tensor:
        gate_up = layer.gate_up.forward(self._normed(x_RH, layer.mlp_norm))
        gate, up = gate_up.chunk(2, dim=-1)
        return layer.down.add_to(x_RH, F.silu(gate).mul_(up))

    def _normed(self, x_RH: Tensor, weight: Tensor) -> Tensor:
        return torch.rms_norm(x_RH, self._width, weight, self._eps).to(self._dtype)


@dataclass(frozen=True, slots=True)
class HeadOrder:
    """How the rows of the attention's weights are laid out anew."""

    heads: int
    kv_heads: int
    head_dim: int

    @property
    def _pairs(self) -> Tensor:
        """The places of a head, each beside the one that it is rotated with."""
        return torch.arange(self.head_dim).view(2, -1).t().flatten()

    @property
    def _queries(self) -> Tensor:
        """The query heads by their place in a group, then by group."""
        return torch.arange(self.heads).view(self.kv_heads, -1).t().flatten()

    def query_rows(self, weight: Tensor) -> Tensor:
        """Lay out the rows of the query projection or its bias."""
        return self._by_head(weight, self.heads)[self._queries][:, self._pairs].flatten(0, 1)

    def key_rows(self, weight: Tensor) -> Tensor:
        """Lay out the rows of the key projection or its bias."""
        return self._by_head(weight, self.kv_heads)[:, self._pairs].flatten(0, 1)

    def output_columns(self, weight: Tensor) -> Tensor:
        """Lay out the columns of the output projection, whose input are the heads."""
        columns = self._by_head(weight.t(), self.heads)[self._queries]
        return columns.flatten(0, 1).t()

    def qk_norm(self, q: Tensor, k: Tensor) -> Tensor:
        """Return the norms of all query and key heads, `[heads + kv_heads, D]`."""
        both = torch.cat((q.expand(self.heads, -1), k.expand(self.kv_heads, -1)))
        return both[:, self._pairs]

    def _by_head(self, rows: Tensor, heads: int) -> Tensor:
        return rows.reshape(heads, self.head_dim, *rows.shape[1:])


def _borders(devices: Sequence[torch.device]) -> dict[int, torch.device]:
    """Return the layers before which the pass moves on; it comes from the last layer's device."""
    before = [devices[-1], *devices]
    return {n: each for n, each in enumerate(devices) if each != before[n]}


def is_packable(layers: nn.ModuleList, config: Any) -> bool:
    """Whether every layer has the plain Llama data flow that `PackedDecoder` reproduces."""
    return (
        all(type(layer).__name__ in PACKABLE for layer in layers)
        and getattr(config, "hidden_act", None) == "silu"
        and not getattr(config, "mlp_bias", False)
    )


def _is_fusible(layers: Any, config: Any, embed: Tensor, inputs: Sequence[int]) -> bool:
    """Whether the kernels know all that these layers do."""
    return is_fusible(embed.dtype, embed.device, inputs) and all(
        _window(layer.self_attn, config) is None
        and not hasattr(layer.self_attn, "q_norm")
        and layer.self_attn.o_proj.bias is None
        for layer in layers
    )


def _pack_layer(layer: Any, config: Any, order: HeadOrder, shelf: Shelf | None) -> PackedLayer:
    """Fuse the weights of a layer and empty it, so that memory grows by one layer at most.

    shelf: where kernels read the matrices.
    """
    attention, mlp = layer.self_attn, layer.mlp
    packed = PackedLayer(
        attention_norm=layer.input_layernorm.weight.float(),
        qkv=_pack_qkv(attention, order, shelf),
        qk_norm=_pack_qk_norm(attention, order),
        o=DecodingLinear(
            order.output_columns(attention.o_proj.weight.detach()),
            attention.o_proj.bias,
            shelf=shelf,
        ),
        mlp_norm=layer.post_attention_layernorm.weight.float(),
        gate_up=DecodingLinear(
            torch.cat((mlp.gate_proj.weight.detach(), mlp.up_proj.weight.detach())), shelf=shelf
        ),
        down=DecodingLinear(mlp.down_proj.weight, shelf=shelf),
        window=_window(attention, config),
    )
    for name in ("self_attn", "mlp"):
        delattr(layer, name)
    return packed


def _pack_qkv(attention: Any, order: HeadOrder, shelf: Shelf | None) -> DecodingLinear:
    layouts = (
        (attention.q_proj, order.query_rows),
        (attention.k_proj, order.key_rows),
        (attention.v_proj, _as_they_are),
    )
    weight = torch.cat([lay_out(part.weight.detach()) for part, lay_out in layouts])
    biases = [lay_out(part.bias.detach()) for part, lay_out in layouts if part.bias is not None]
    return DecodingLinear(weight, torch.cat(biases) if biases else None, shelf=shelf)


def _as_they_are(rows: Tensor) -> Tensor:
    return rows


def _pack_qk_norm(attention: Any, order: HeadOrder) -> Tensor | None:
    if not hasattr(attention, "q_norm"):
        return None
    return order.qk_norm(attention.q_norm.weight.float(), attention.k_norm.weight.float())


def _window(attention: Any, config: Any) -> int | None:
    """Return the sliding window of a layer; Mistral keeps one for all layers in its config."""
    if hasattr(attention, "sliding_window"):
        return attention.sliding_window  # type: ignore[no-any-return]
    return config.sliding_window if config.model_type == "mistral" else None
