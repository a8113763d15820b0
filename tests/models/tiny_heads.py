"""Random heads of every public layout, as their authors' files name and shape them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.models.reference_heads import Sizes

NESTED = "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True)
class Tiny:
    """A checkpoint before it is written."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    sizes: Sizes
    #: Prefix of the layer's tensors in the file.
    layer: str

    def write(self, folder: Path, *, archive: bool = False) -> str:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        if archive:
            torch.save(self.tensors, folder / "pytorch_model.bin")
        else:
            save_file(self.tensors, folder / "model.safetensors")
        return str(folder)

    def changed(
        self,
        config: dict[str, Any] | None = None,
        tensors: Mapping[str, Tensor | None] | None = None,
    ) -> Tiny:
        """Return a copy with other settings and tensors; None removes."""
        settings = {k: v for k, v in (self.config | (config or {})).items() if v is not None}
        changed = {**self.tensors, **(tensors or {})}
        kept = {k: v for k, v in changed.items() if v is not None}
        return replace(self, config=settings, tensors=kept)


def rand(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator) * 0.3


def layer_tensors(g: torch.Generator, s: Sizes, layer: str, inputs: int) -> dict[str, Tensor]:
    q, kv = s.heads * s.head_dim, s.kv_heads * s.head_dim
    return {
        f"{layer}self_attn.q_proj.weight": rand(g, q, inputs),
        f"{layer}self_attn.k_proj.weight": rand(g, kv, inputs),
        f"{layer}self_attn.v_proj.weight": rand(g, kv, inputs),
        f"{layer}self_attn.o_proj.weight": rand(g, s.hidden, q),
        f"{layer}mlp.gate_proj.weight": rand(g, s.intermediate, s.hidden),
        f"{layer}mlp.up_proj.weight": rand(g, s.intermediate, s.hidden),
        f"{layer}mlp.down_proj.weight": rand(g, s.hidden, s.intermediate),
        f"{layer}post_attention_layernorm.weight": 1 + rand(g, s.hidden),
    }


def llama_config(s: Sizes) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": s.hidden,
        "intermediate_size": s.intermediate,
        "num_attention_heads": s.heads,
        "num_key_value_heads": s.kv_heads,
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "rms_norm_eps": s.eps,
        "vocab_size": s.vocab,
    }


def eagle1(seed: int = 0, *, bias: bool = True, qkv_bias: bool = False, embed: bool = True) -> Tiny:
    s, g = Sizes(), torch.Generator().manual_seed(seed)
    tensors = layer_tensors(g, s, "layers.0.", s.hidden)
    tensors["fc.weight"] = rand(g, s.hidden, 2 * s.hidden)
    config = llama_config(s) | {"architectures": ["LlamaForCausalLM"]}
    if bias:
        tensors["fc.bias"] = rand(g, s.hidden)
    else:
        config["bias"] = False
    if qkv_bias:
        config["qkv_bias"] = True
        for name, rows in (("q", s.heads), ("k", s.kv_heads), ("v", s.kv_heads)):
            tensors[f"layers.0.self_attn.{name}_proj.bias"] = rand(g, rows * s.head_dim)
    if embed:
        tensors["embed_tokens.weight"] = rand(g, s.vocab, s.hidden)
    return Tiny(config, tensors, s, "layers.0.")


def eagle3(seed: int = 0, *, layer: str = "midlayer.", full: bool = False) -> Tiny:
    """The official layout: no layer ids, no rope base."""
    s, g = Sizes(), torch.Generator().manual_seed(seed)
    rows = s.vocab if full else s.draft_vocab
    tensors = layer_tensors(g, s, layer, 2 * s.hidden)
    tensors |= {
        f"{layer}input_layernorm.weight": 1 + rand(g, s.hidden),
        f"{layer}hidden_norm.weight": 1 + rand(g, s.hidden),
        "fc.weight": rand(g, s.hidden, s.aux * s.hidden),
        "norm.weight": 1 + rand(g, s.hidden),
        "lm_head.weight": rand(g, rows, s.hidden),
    }
    if not full:
        kept = torch.randperm(s.vocab, generator=g)[:rows].sort().values
        tensors["d2t"] = kept - torch.arange(rows)
        tensors["t2d"] = torch.isin(torch.arange(s.vocab), kept)
    config = llama_config(s) | {"architectures": ["LlamaForCausalLM"], "draft_vocab_size": rows}
    return Tiny(config, tensors, s, layer)


def modelopt(seed: int = 0) -> Tiny:
    """Nested ids (outputs of layers), offsets without the mask."""
    base = eagle3(seed, layer="layers.0.")
    nested = {NESTED: [1, 5, 8], "use_aux_hidden_state": True, "use_last_layernorm": True}
    config = {"architectures": ["LlamaForCausalLMEagle3"], "eagle_config": nested}
    return base.changed(config, {"t2d": None})


def speculators(seed: int = 0, *, qk_norm: bool = False) -> Tiny:
    """Sizes in transformer_layer_config, boundary ids at the top, an embedding in the file."""
    base = eagle3(seed, layer="layers.0.")
    s, g = replace(base.sizes, theta=500000.0), torch.Generator().manual_seed(seed + 1)
    layer_config = llama_config(s) | {"rope_theta": s.theta}
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_config": {"algorithm": "eagle3"},
        "transformer_layer_config": layer_config,
        "draft_vocab_size": s.draft_vocab,
        "norm_before_residual": True,
        NESTED: [2, 6, 9],
    }
    tensors = base.tensors | {"embed_tokens.weight": rand(g, s.vocab, s.hidden)}
    if qk_norm:
        tensors["layers.0.self_attn.q_norm.weight"] = 1 + rand(g, s.head_dim)
        tensors["layers.0.self_attn.k_norm.weight"] = 1 + rand(g, s.head_dim)
    return replace(base, config=config, tensors=tensors, sizes=s)


def last_hidden(seed: int = 0) -> Tiny:
    """EAGLE-3 on the target's last hidden state: no fc."""
    nested = {"use_aux_hidden_state": False}
    return eagle3(seed, layer="layers.0.").changed({"eagle_config": nested}, {"fc.weight": None})


def eagle31(seed: int = 0, *, legacy: bool = False) -> Tiny:
    """A norm for each fused feature, and the state fed back after the final norm."""
    base, g = eagle3(seed), torch.Generator().manual_seed(seed + 1)
    names = (
        [f"aux_norm_{n}" for n in ("low", "mid", "high")]
        if legacy
        else [f"fc_norm.{k}" for k in range(3)]
    )
    norms = {f"{name}.weight": 1 + rand(g, base.sizes.hidden) for name in names}
    flag = {"use_aux_norm": True} if legacy else {"fc_norm": True}
    return base.changed(flag | {"norm_output": True}, norms)


def norm_before_fc(seed: int = 0) -> Tiny:
    base, g = modelopt(seed), torch.Generator().manual_seed(seed + 1)
    nested = base.config["eagle_config"] | {"norm_before_fc": True}
    weight = 1 + rand(g, base.sizes.aux * base.sizes.hidden)
    return base.changed({"eagle_config": nested}, {"input_norm.weight": weight})


def prefixed(tiny: Tiny) -> Tiny:
    """The repackings of vLLM and SGLang put `model.` before all but the output matrix."""
    renamed = {n if n == "lm_head.weight" else f"model.{n}": t for n, t in tiny.tensors.items()}
    return replace(tiny, tensors=renamed)
