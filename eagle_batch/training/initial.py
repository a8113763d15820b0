"""Where training starts: a head made of parts of its target, or of random numbers.

The output side (lm_head, final norm) and the last decoder layer of the target fit a head as they
are; its attention reads [embedding, state], so the target's weights go to the half of the state.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from eagle_batch.models.heads import HeadConfig
from eagle_batch.models.layouts import HeadParts
from eagle_batch.models.packing import LAYER, canonical_shapes

_SPREAD = 0.02


def head_config_for(
    target: Any, *, kind: str, draft_vocab: int, aux_layers: tuple[int, ...] | None
) -> HeadConfig:
    """Return the configuration of a new head, shaped like one decoder layer of its target."""
    layers, hidden = int(target.num_hidden_layers), int(target.hidden_size)
    heads = int(target.num_attention_heads)
    eagle3 = kind == "eagle3"
    # In a target of a few layers some of them are the same.
    low, middle, high = min(2, layers - 1), layers // 2, max(0, layers - 3)
    default = tuple(sorted({low, middle, high})) if eagle3 else ()
    return HeadConfig(
        kind="eagle3" if eagle3 else "eagle1",
        hidden=hidden,
        target_hidden=hidden,
        heads=heads,
        kv_heads=int(getattr(target, "num_key_value_heads", None) or heads),
        head_dim=int(getattr(target, "head_dim", None) or hidden // heads),
        intermediate=int(target.intermediate_size),
        rope_theta=float(
            (getattr(target, "rope_parameters", None) or {}).get("rope_theta", 10000.0)
        ),
        rms_eps=float(getattr(target, "rms_norm_eps", 1e-6)),
        vocab=int(target.vocab_size),
        draft_vocab=min(draft_vocab, int(target.vocab_size)) if eagle3 else int(target.vocab_size),
        aux_layers=default if aux_layers is None else aux_layers,
        own_lm_head=eagle3,
    )


def random_tensors(config: HeadConfig, seed: int) -> dict[str, Tensor]:
    """Return canonical tensors of a random head: small normal matrices, norms of one."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.ones(shape)
        if len(shape) == 1 and not name.endswith("bias")
        else torch.randn(shape, generator=generator) * _SPREAD
        for name, shape in canonical_shapes(config).items()
    }


def tensors_from_target(
    config: HeadConfig, target: Mapping[str, Tensor], kept: Tensor | None, seed: int
) -> dict[str, Tensor]:
    """Return canonical tensors that start from the target's, wherever a shape allows it.

    `target` is the state of a Llama-shaped model; parts that it lacks stay random.
    """
    tensors = random_tensors(config, seed)
    last = max(int(n.split(".")[2]) for n in target if n.startswith("model.layers."))
    prefix = f"model.layers.{last}."
    for name in tensors:
        source = target.get(name.replace(LAYER, prefix))
        if name.startswith(LAYER) and source is not None:
            tensors[name] = _fitted(source.detach().float(), tensors[name])
    _take(tensors, f"{LAYER}hidden_norm.weight", target.get(f"{prefix}input_layernorm.weight"))
    _take(
        tensors,
        f"{LAYER}input_layernorm.weight",
        target.get("model.layers.0.input_layernorm.weight"),
    )
    _take(tensors, "norm.weight", target.get("model.norm.weight"))
    lm_head = target.get("lm_head.weight", target.get("model.embed_tokens.weight"))
    if lm_head is not None:
        _take(tensors, "lm_head.weight", lm_head if kept is None else lm_head[kept])
    _pass_through(tensors["fc.weight"], config)
    return tensors


def widened(parts: HeadParts, kept: Tensor, lm_head_VH: Tensor) -> HeadParts:
    """Return a head that can draft more tokens: rows that it lacks are the target's.

    kept: target ids, sorted, among them all that the head drafts now.
    """
    assert parts.draft_to_target is not None
    weight_WH = lm_head_VH[kept].detach().float().clone()
    weight_WH[torch.searchsorted(kept, parts.draft_to_target)] = parts.tensors[
        "lm_head.weight"
    ].float()
    config = replace(parts.config, draft_vocab=len(kept))
    return HeadParts(config, parts.tensors | {"lm_head.weight": weight_WH}, kept)


def _fitted(source: Tensor, spread: Tensor) -> Tensor:
    """Put the target's weight on the last columns (the state); the embedding's stay small."""
    if source.shape == spread.shape:
        return source.clone()
    if source.dim() == 2 and source.shape[0] == spread.shape[0]:
        return torch.cat((spread[:, : -source.shape[1]], source), dim=1)
    return spread


def _take(tensors: dict[str, Tensor], name: str, source: Tensor | None) -> None:
    if source is not None and name in tensors and tensors[name].shape == source.shape:
        tensors[name] = source.detach().float().clone()


def _pass_through(fc_HF: Tensor, config: HeadConfig) -> None:
    """Let fc hand the last block of its input, the highest feature, through to the state."""
    if config.hidden == config.target_hidden:
        fc_HF *= 0.1
        fc_HF[:, -config.hidden :] += torch.eye(config.hidden)
