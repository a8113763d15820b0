"""How many weights a model has, from its configuration alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Weights that one token's forward pass computes with, and those that a pass may read."""

    #: Of a mixture of experts, the shared weights and those of the experts of one token.
    computed: int
    #: All of them; the table of input embeddings only where the output layer shares it.
    read: int


def model_size(config: Any) -> ModelSize:
    """Count the weights of a causal LM; nothing is allocated."""
    import transformers

    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    tied = getattr(config, "tie_word_embeddings", False)
    table = model.get_input_embeddings().weight
    sizes = [(name, w.numel()) for name, w in model.named_parameters() if tied or w is not table]
    experts = sum(size for name, size in sizes if ".experts." in name)
    everything = sum(size for _, size in sizes)
    return ModelSize(everything - round(experts * (1 - _share(config))), everything)


def _share(config: Any) -> float:
    """Return the share of its experts that a token goes through; 1 without experts."""
    count = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    active = getattr(config, "num_experts_per_tok", None)
    return active / count if count and active else 1.0
