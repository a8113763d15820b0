"""Writes heads in public layouts, reads each back and compares before it counts as written."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from eagle_batch.errors import HeadError
from eagle_batch.models.checkpoints import load_head
from eagle_batch.models.heads import Head, HeadConfig
from eagle_batch.models.packing import LAYER, unpack

Layout = Literal["official", "speculators"]

_IDS = "eagle_aux_hidden_state_layer_ids"


def export_head(
    head: Head,
    folder: Path,
    *,
    layout: Layout = "official",
    dtype: torch.dtype = torch.bfloat16,
    verifier: str = "",
) -> None:
    """Write config.json and model.safetensors, whole or not at all; `verifier` names the target.

    Raises HeadError where the layout cannot say what the head is, or what was written reads back
    differently.
    """
    from safetensors.torch import save_file

    if layout == "speculators" and head.config.kind != "eagle3":
        raise HeadError("the speculators layout holds EAGLE-3 heads only; use the official one")
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    writer = _official if layout == "official" else _speculators
    config, tensors = writer(head, verifier)
    stored = {n: t.to(dtype) if t.is_floating_point() else t for n, t in tensors.items()}
    save_file(
        {n: t.detach().contiguous() for n, t in stored.items()}, partial / "model.safetensors"
    )
    # safetensors makes files that only their owner reads; a cluster's workers read these too.
    (partial / "model.safetensors").chmod(0o644)
    text = json.dumps(config | {"torch_dtype": str(dtype).removeprefix("torch.")}, indent=2)
    (partial / "config.json").write_text(text + "\n", "utf-8")
    _compare(head, load_head(str(partial), dtype=dtype, device="cpu"), str(folder))
    _replace(partial, folder)


def _replace(partial: Path, folder: Path) -> None:
    """Put the new files in place; what else lies in the folder (a model card) stays."""
    folder.mkdir(parents=True, exist_ok=True)
    # Weights first: a reader between the two sees a configuration of the same training run.
    for name in ("model.safetensors", "config.json"):
        (partial / name).replace(folder / name)
    partial.rmdir()


def _official(head: Head, verifier: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The layout of SafeAILab and SpecForge (`midlayer.*`); EAGLE-1 keeps `layers.0.*`."""
    config, tensors = head.config, unpack(head)
    if config.kind == "eagle1":
        record = _llama(config) | {"bias": config.fc_bias, "qkv_bias": config.qkv_bias}
        return {"architectures": ["LlamaForCausalLM"]} | record, tensors
    renamed = {name.replace(LAYER, "midlayer.", 1): tensor for name, tensor in tensors.items()}
    record = {
        "architectures": ["LlamaForCausalLMEagle3"],
        **_llama(config),
        **_eagle3(config),
        # Engines that read the nested ids take them for outputs of layers, which is one less.
        "eagle_config": {
            "use_aux_hidden_state": bool(config.aux_layers),
            _IDS: [k - 1 for k in config.aux_layers],
        },
    }
    if verifier:
        record["target_model"] = verifier
    return record, renamed | _maps(head)


def _speculators(head: Head, verifier: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    config = head.config
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": 3,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    record = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": verifier or None, "architectures": ["LlamaForCausalLM"]},
        },
        "transformer_layer_config": _llama(config),
        "embed_requires_grad": False,
        **_eagle3(config),
    }
    if not config.aux_layers:
        record["eagle_config"] = {"use_aux_hidden_state": False}
    return record, unpack(head) | _maps(head)


def _llama(config: HeadConfig) -> dict[str, Any]:
    record: dict[str, Any] = {
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": config.hidden,
        "intermediate_size": config.intermediate,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "num_hidden_layers": 1,
        "rms_norm_eps": config.rms_eps,
        "rope_theta": config.rope_theta,
        "max_position_embeddings": 8192,
        "vocab_size": config.vocab,
        "attention_bias": config.qkv_bias,
        "mlp_bias": False,
        "tie_word_embeddings": False,
    }
    if config.rope_scaling is not None:
        record["rope_scaling"] = _rope_scaling(config)
    return record


def _rope_scaling(config: HeadConfig) -> dict[str, Any]:
    scaling = config.rope_scaling
    assert scaling is not None
    record: dict[str, Any] = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind == "llama3":
        record |= {
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_positions,
        }
    return record


def _eagle3(config: HeadConfig) -> dict[str, Any]:
    record: dict[str, Any] = {
        "draft_vocab_size": config.draft_vocab,
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.norm_before_fc,
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
    }
    if config.aux_layers:
        record[_IDS] = list(config.aux_layers)
    if config.target_hidden != config.hidden:
        record["target_hidden_size"] = config.target_hidden
    if config.logit_scale != 1.0:
        record["logit_scale"] = config.logit_scale
    return record


def _maps(head: Head) -> dict[str, Tensor]:
    """d2t holds offsets, t2d marks the kept ids; a head on the whole vocabulary has neither."""
    ids = head.draft_to_target
    if ids is None:
        return {}
    kept = torch.zeros(head.config.vocab, dtype=torch.bool)
    kept[ids.cpu()] = True
    return {"d2t": ids.cpu() - torch.arange(len(ids)), "t2d": kept}


def _compare(written: Head, read: Head, where: str) -> None:
    if written.config != read.config:
        raise HeadError(f"{where}: reads back as {read.config}, written was {written.config}")
    old, new = unpack(written), unpack(read)
    different = [n for n, t in old.items() if not torch.equal(t.to(new[n].dtype).cpu(), new[n])]
    if different or not _same_map(written.draft_to_target, read.draft_to_target):
        raise HeadError(f"{where}: tensors {different or ['d2t']} read back differently")


def _same_map(first: Tensor | None, second: Tensor | None) -> bool:
    if first is None or second is None:
        return first is second
    return torch.equal(first.cpu(), second.cpu())
