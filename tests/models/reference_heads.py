"""Plain forward passes of the heads, written from the public code, with nothing of ours.

They take tensors by their names in the checkpoint and full causal attention, one text at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sizes:
    hidden: int = 32
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 8
    intermediate: int = 48
    vocab: int = 50
    draft_vocab: int = 20
    aux: int = 3
    target_layers: int = 12
    eps: float = 1e-5
    theta: float = 10000.0


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def rotate(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """x [heads, tokens, dim]; pairs are (i, i + dim / 2)."""
    half = x.shape[-1] // 2
    out = torch.empty_like(x)
    for i in range(half):
        angle = positions.float() * theta ** (-2 * i / x.shape[-1])
        cos, sin = angle.cos(), angle.sin()
        out[..., i] = x[..., i] * cos - x[..., i + half] * sin
        out[..., i + half] = x[..., i + half] * cos + x[..., i] * sin
    return out


def attention(
    t: Mapping[str, Tensor], prefix: str, x: Tensor, positions: Tensor, s: Sizes
) -> Tensor:
    def project(name: str, heads: int) -> Tensor:
        y = x @ t[f"{prefix}{name}_proj.weight"].T
        if f"{prefix}{name}_proj.bias" in t:
            y = y + t[f"{prefix}{name}_proj.bias"]
        y = y.view(len(x), heads, s.head_dim).transpose(0, 1)
        if f"{prefix}{name}_norm.weight" in t:
            y = norm(y, t[f"{prefix}{name}_norm.weight"], s.eps)
        return y

    q = rotate(project("q", s.heads), positions, s.theta)
    k = rotate(project("k", s.kv_heads), positions, s.theta)
    v = project("v", s.kv_heads)
    outs = []
    for head in range(s.heads):
        group = head // (s.heads // s.kv_heads)
        scores = q[head] @ k[group].T / s.head_dim**0.5
        future = torch.ones_like(scores).triu(1).bool()
        outs.append(scores.masked_fill(future, -torch.inf).softmax(-1) @ v[group])
    return torch.cat(outs, -1) @ t[f"{prefix}o_proj.weight"].T


def mlp(t: Mapping[str, Tensor], prefix: str, x: Tensor) -> Tensor:
    gate = x @ t[f"{prefix}gate_proj.weight"].T
    up = x @ t[f"{prefix}up_proj.weight"].T
    return (gate * torch.sigmoid(gate) * up) @ t[f"{prefix}down_proj.weight"].T


def eagle1(
    t: Mapping[str, Tensor],
    embed: Tensor,
    tokens: Tensor,
    feature: Tensor,
    positions: Tensor,
    s: Sizes,
) -> Tensor:
    x = torch.cat([embed[tokens], feature], -1) @ t["fc.weight"].T
    if "fc.bias" in t:
        x = x + t["fc.bias"]
    h = x + attention(t, "layers.0.self_attn.", x, positions, s)
    return h + mlp(
        t, "layers.0.mlp.", norm(h, t["layers.0.post_attention_layernorm.weight"], s.eps)
    )


def eagle3_fuse(t: Mapping[str, Tensor], features: Tensor, s: Sizes) -> Tensor:
    if "fc.weight" not in t:
        return features
    if "input_norm.weight" in t:
        features = norm(features, t["input_norm.weight"], s.eps)
    chunks = list(features.chunk(s.aux, -1))
    for i, name in enumerate(("low", "mid", "high")):
        for key in (f"fc_norm.{i}.weight", f"aux_norm_{name}.weight"):
            if key in t:
                chunks[i] = norm(chunks[i], t[key], s.eps)
    return torch.cat(chunks, -1) @ t["fc.weight"].T


def eagle3(
    t: Mapping[str, Tensor],
    layer: str,
    embed: Tensor,
    tokens: Tensor,
    g: Tensor,
    positions: Tensor,
    s: Sizes,
    *,
    residual_is_normed: bool = False,
) -> Tensor:
    """The residual stream after the layer, before the final norm."""
    e = norm(embed[tokens], t[f"{layer}input_layernorm.weight"], s.eps)
    n = norm(g, t[f"{layer}hidden_norm.weight"], s.eps)
    x = torch.cat([e, n], -1)
    h = (n if residual_is_normed else g) + attention(t, f"{layer}self_attn.", x, positions, s)
    return h + mlp(t, f"{layer}mlp.", norm(h, t[f"{layer}post_attention_layernorm.weight"], s.eps))
