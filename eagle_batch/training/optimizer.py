"""What turns gradients into steps: AdamW for all weights, or Muon for the matrices inside a head.

Muon (Jordan et al., 2024) makes every singular value of a matrix's step equal, so that rare
directions are learnt as fast as frequent ones. Its steps are scaled to the size that AdamW's have
(Liu et al., 2025), so both share one learning rate. The output matrix, whose rows are tokens, and
vectors stay with AdamW.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from eagle_batch.training.config import TrainingConfig

_BETAS = (0.9, 0.95)
_MOMENTUM = 0.95
#: Matrices whose rows are tokens.
_BY_TOKEN = ("lm_head.weight", "embed_tokens.weight")


class Optimizers:
    """The optimisers of one head, each with the parameters that it is for."""

    def __init__(self, head: nn.Module, config: TrainingConfig) -> None:
        named = [(name, p) for name, p in head.named_parameters() if p.requires_grad]
        inner = [
            p
            for name, p in named
            if config.optimizer == "muon" and p.dim() == 2 and name not in _BY_TOKEN
        ]
        taken = {id(p) for p in inner}
        others = [p for _, p in named if id(p) not in taken]
        self._all: dict[str, torch.optim.Optimizer] = {
            "adamw": torch.optim.AdamW(_groups(others, config.weight_decay), betas=_BETAS)
        }
        if inner:
            self._all["muon"] = torch.optim.Muon(
                inner,
                weight_decay=config.weight_decay,
                momentum=_MOMENTUM,
                adjust_lr_fn="match_rms_adamw",
            )

    def clear(self) -> None:
        """Forget the gradients."""
        for each in self._all.values():
            each.zero_grad(set_to_none=True)

    def step(self, rate: float) -> None:
        """Take one step at a learning rate."""
        for each in self._all.values():
            for group in each.param_groups:
                group["lr"] = rate
            each.step()

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs."""
        return {name: each.state_dict() for name, each in self._all.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state of the same head and settings."""
        for name, each in self._all.items():
            each.load_state_dict(state[name])


def _groups(parameters: Iterable[nn.Parameter], decay: float) -> list[dict[str, Any]]:
    """Weight decay is for matrices; norms and biases are left alone."""
    parameters = list(parameters)
    return [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": decay},
        {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
    ]
