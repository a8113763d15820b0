"""A lean forward pass for Llama-shaped decoders: packed projections, few operators.

At small batches the operators around the matrix products cost more than the products themselves,
so this pass fuses q/k/v and gate/up into one product each, keeps the residual stream in float32
and calls nothing that a decoding step does not need. The weights are re-laid, not copied twice:
the packed tensors replace the module's own parameters. Families: see `PACKABLE`; every other
family keeps its own forward.

Shape legend: R rows of a flat batch (B*N), H hidden size, D head size, Q query heads, G key/value
heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eagle_batch.models.linear import DecodingLinear

#: Decoder layers with exactly the data flow of `PackedDecoder`, by class name.
PACKABLE = ("LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer")


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
    """The decoder stack of a packable model, embedding to final norm."""

    def __init__(self, base: Any, config: Any, *, heads: int, kv_heads: int, head_dim: int) -> None:
        self._heads, self._kv_heads, self._head_dim = heads, kv_heads, head_dim
        self._eps = float(config.rms_norm_eps)
        self._scale = head_dim**-0.5
        self._rotary_emb = base.rotary_emb
        self._embed: Tensor = base.embed_tokens.weight
        self._layers = [_pack_layer(layer, config, heads, kv_heads) for layer in base.layers]
        self._norm: Tensor = base.norm.weight.float()
        self._dtype = self._embed.dtype

    def forward(
        self, tokens_BN: Tensor, positions_BN: Tensor, attention: Any, aux_layers: Sequence[int]
    ) -> tuple[Tensor, Tensor | None]:
        """Return the post-norm hidden states `[B, N, H]` and the aux features `[B, N, F]`."""
        B, N = tokens_BN.shape
        x_RH = F.embedding(tokens_BN.flatten(), self._embed).float()
        x_RH = _with_rows(x_RH, B * N + self._layers[0].qkv.padding(B * N))
        rotary = self._rotary(x_RH, positions_BN)
        captured = {}
        for index, layer in enumerate(self._layers):
            if index in aux_layers:
                captured[index] = x_RH[: B * N].to(self._dtype)
            x_RH = self._attend(x_RH, layer, index, rotary, attention, (B, N))
            x_RH = self._feed_forward(x_RH, layer)
        hidden = self._normed(x_RH[: B * N], self._norm).view(B, N, -1)
        if not aux_layers:
            return hidden, None
        return hidden, torch.cat([captured[k] for k in aux_layers], dim=-1).view(B, N, -1)

    def _rotary(self, x_RH: Tensor, positions_BN: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin, `[R, 1, D]`; the sine carries the sign of the half rotation."""
        cos, sin = self._rotary_emb(x_RH, positions_BN)
        half = self._head_dim // 2
        signed = torch.cat((-sin[..., :half], sin[..., half:]), dim=-1)
        return cos.flatten(0, 1)[:, None], signed.flatten(0, 1)[:, None]

    def _attend(
        self,
        x_RH: Tensor,
        layer: PackedLayer,
        index: int,
        rotary: tuple[Tensor, Tensor],
        attention: Any,
        shape: tuple[int, int],
    ) -> Tensor:
        B, N = shape
        rotated_heads = self._heads + self._kv_heads
        qkv = layer.qkv(self._normed(x_RH, layer.attention_norm))
        qkv = qkv[: B * N].view(B * N, rotated_heads + self._kv_heads, self._head_dim)
        qk = self._rotate(qkv[:, :rotated_heads].float(), layer.qk_norm, rotary).to(self._dtype)
        heads_first = qk.view(B, N, rotated_heads, -1).transpose(1, 2)
        out = attention.attend(
            index,
            heads_first[:, : self._heads],
            heads_first[:, self._heads :],
            qkv[:, rotated_heads:].view(B, N, self._kv_heads, -1).transpose(1, 2),
            self._scale,
            layer.window,
        )
        out_RH = out.transpose(1, 2).reshape(B * N, -1)
        return layer.o.add_to(x_RH, _with_rows(out_RH, x_RH.shape[0]))

    def _rotate(self, qk: Tensor, qk_norm: Tensor | None, rotary: tuple[Tensor, Tensor]) -> Tensor:
        if qk_norm is not None:
            qk = F.rms_norm(qk, (self._head_dim,), None, self._eps) * qk_norm
        cos, signed_sin = rotary
        return torch.addcmul(qk * cos, qk.roll(self._head_dim // 2, -1), signed_sin)

    def _feed_forward(self, x_RH: Tensor, layer: PackedLayer) -> Tensor:
        gate_up = layer.gate_up(self._normed(x_RH, layer.mlp_norm))
        gate, up = gate_up.chunk(2, dim=-1)
        return layer.down.add_to(x_RH, F.silu(gate).mul_(up))

    def _normed(self, x_RH: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x_RH, (x_RH.shape[-1],), weight, self._eps).to(self._dtype)


def _with_rows(x: Tensor, rows: int) -> Tensor:
    """Append empty rows up to a count."""
    return x if x.shape[0] == rows else F.pad(x, (0, 0, 0, rows - x.shape[0]))


def is_packable(layers: nn.ModuleList, config: Any) -> bool:
    """Whether every layer has the plain Llama data flow that `PackedDecoder` reproduces."""
    return (
        all(type(layer).__name__ in PACKABLE for layer in layers)
        and getattr(config, "hidden_act", None) == "silu"
        and not getattr(config, "mlp_bias", False)
    )


def _pack_layer(layer: Any, config: Any, heads: int, kv_heads: int) -> PackedLayer:
    """Fuse the weights of a layer and empty it, so that memory grows by one layer at most."""
    attention, mlp = layer.self_attn, layer.mlp
    packed = PackedLayer(
        attention_norm=layer.input_layernorm.weight.float(),
        qkv=_fused([attention.q_proj, attention.k_proj, attention.v_proj]),
        qk_norm=_pack_qk_norm(attention, heads, kv_heads),
        o=_fused([attention.o_proj]),
        mlp_norm=layer.post_attention_layernorm.weight.float(),
        gate_up=_fused([mlp.gate_proj, mlp.up_proj]),
        down=_fused([mlp.down_proj]),
        window=_window(attention, config),
    )
    for name in ("self_attn", "mlp"):
        delattr(layer, name)
    return packed


def _fused(parts: list[nn.Linear]) -> DecodingLinear:
    biases: list[Tensor | None] = [part.bias for part in parts]
    present = [bias for bias in biases if bias is not None]
    weight = torch.cat([part.weight.detach() for part in parts])
    return DecodingLinear(weight, torch.cat(present) if present else None)


def _pack_qk_norm(attention: Any, heads: int, kv_heads: int) -> Tensor | None:
    if not hasattr(attention, "q_norm"):
        return None
    q, k = attention.q_norm.weight.float(), attention.k_norm.weight.float()
    return torch.cat((q.expand(heads, -1), k.expand(kv_heads, -1)))


def _window(attention: Any, config: Any) -> int | None:
    """Return the sliding window of a layer; Mistral keeps one for all layers in its config."""
    if hasattr(attention, "sliding_window"):
        return attention.sliding_window  # type: ignore[no-any-return]
    return config.sliding_window if config.model_type == "mistral" else None
