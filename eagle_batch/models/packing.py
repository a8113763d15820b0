"""Canonical tensor names of a head, their shapes, and the packed form that the modules hold.

Canonical names are those of the speculators layout (`layers.0.*`); every layout maps to them. The
modules hold q, k, v as one matrix and gate, up as another: one matmul is faster than three.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from eagle_batch.models.heads import Head, HeadConfig

LAYER = "layers.0."
ATTENTION = LAYER + "self_attn."

#: Packed parameter -> the canonical tensors that it stacks, in this order.
_STACKS: dict[str, tuple[str, ...]] = {
    "layer.qkv_proj.weight": tuple(f"{ATTENTION}{x}_proj.weight" for x in "qkv"),
    "layer.qkv_proj.bias": tuple(f"{ATTENTION}{x}_proj.bias" for x in "qkv"),
    "layer.gate_up_proj.weight": (
        f"{LAYER}mlp.gate_proj.weight",
        f"{LAYER}mlp.up_proj.weight",
    ),
}

#: Parameter -> canonical tensor, where the names differ and nothing is stacked.
_RENAMES: dict[str, str] = {
    "layer.o_proj.weight": f"{ATTENTION}o_proj.weight",
    "layer.down_proj.weight": f"{LAYER}mlp.down_proj.weight",
    "layer.post_attention_layernorm": f"{LAYER}post_attention_layernorm.weight",
    "layer.q_norm": f"{ATTENTION}q_norm.weight",
    "layer.k_norm": f"{ATTENTION}k_norm.weight",
    "input_layernorm": f"{LAYER}input_layernorm.weight",
    "hidden_norm": f"{LAYER}hidden_norm.weight",
    "input_norm": "input_norm.weight",
    "norm": "norm.weight",
}


def canonical_shapes(config: HeadConfig) -> dict[str, tuple[int, ...]]:
    """Return every tensor that a head of this configuration holds, and its shape."""
    shapes = _layer_shapes(config) | _fusion_shapes(config)
    if config.own_embed:
        shapes["embed_tokens.weight"] = (config.vocab, config.hidden)
    if config.kind == "eagle3":
        shapes |= {
            f"{LAYER}input_layernorm.weight": (config.hidden,),
            f"{LAYER}hidden_norm.weight": (config.hidden,),
            "norm.weight": (config.hidden,),
        }
        if config.own_lm_head:
            shapes["lm_head.weight"] = (config.draft_vocab, config.hidden)
    return shapes


def _layer_shapes(config: HeadConfig) -> dict[str, tuple[int, ...]]:
    q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {}
    for name, rows in (("q", q), ("k", kv), ("v", kv)):
        shapes[f"{ATTENTION}{name}_proj.weight"] = (rows, config.attention_inputs)
        if config.qkv_bias:
            shapes[f"{ATTENTION}{name}_proj.bias"] = (rows,)
    shapes[f"{ATTENTION}o_proj.weight"] = (config.hidden, q)
    if config.qk_norm:
        shapes[f"{ATTENTION}q_norm.weight"] = shapes[f"{ATTENTION}k_norm.weight"] = (
            config.head_dim,
        )
    shapes[f"{LAYER}mlp.gate_proj.weight"] = (config.intermediate, config.hidden)
    shapes[f"{LAYER}mlp.up_proj.weight"] = (config.intermediate, config.hidden)
    shapes[f"{LAYER}mlp.down_proj.weight"] = (config.hidden, config.intermediate)
    shapes[f"{LAYER}post_attention_layernorm.weight"] = (config.hidden,)
    return shapes


def _fusion_shapes(config: HeadConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of fc and its norms; an EAGLE-3 head on the last hidden state has none."""
    if config.kind == "eagle1":
        inputs = 2 * config.hidden
    elif config.aux_layers:
        inputs = config.feature_width
    else:
        return {}
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (config.hidden, inputs)}
    if config.fc_bias:
        shapes["fc.bias"] = (config.hidden,)
    if config.norm_before_fc:
        shapes["input_norm.weight"] = (inputs,)
    if config.fc_norm:
        for k in range(len(config.aux_layers)):
            shapes[f"fc_norm.{k}.weight"] = (config.target_hidden,)
    return shapes


def pack(tensors: Mapping[str, Tensor], names: list[str]) -> dict[str, Tensor]:
    """Return the modules' parameters, by the given names, from canonical tensors."""
    return {name: _packed(tensors, name) for name in names}


def _packed(tensors: Mapping[str, Tensor], name: str) -> Tensor:
    if name in _STACKS:
        return torch.cat([tensors[part] for part in _STACKS[name]], dim=0)
    return tensors[_canonical(name)].contiguous()


def _canonical(name: str) -> str:
    if name.startswith("fc_norm."):
        return f"{name}.weight"
    return _RENAMES.get(name, name)


def unpack(head: Head) -> dict[str, Tensor]:
    """Return the canonical tensors of a head: the inverse of `pack`, with its own embedding."""
    shapes = canonical_shapes(head.config)
    tensors: dict[str, Tensor] = {}
    for name, value in head.state_dict().items():
        if name in _STACKS:
            parts = _STACKS[name]
            sizes = [shapes[part][0] for part in parts]
            tensors |= dict(zip(parts, value.split(sizes, dim=0), strict=True))
        else:
            tensors[_canonical(name)] = value
    if head.config.own_embed:
        assert head.embed_VH is not None
        tensors["embed_tokens.weight"] = head.embed_VH
    return tensors
