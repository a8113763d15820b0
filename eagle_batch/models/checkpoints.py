"""Loads heads of every public layout, strictly: every tensor fits, nothing stays random."""

from __future__ import annotations

import torch
from torch import Tensor

from eagle_batch.errors import HeadError
from eagle_batch.models.eagle1 import Eagle1Head
from eagle_batch.models.eagle3 import Eagle3Head
from eagle_batch.models.headfiles import read_files, resolve_head
from eagle_batch.models.heads import Head, HeadConfig
from eagle_batch.models.layouts import HeadParts, interpret
from eagle_batch.models.packing import pack

_MODULES: dict[str, type[Head]] = {"eagle1": Eagle1Head, "eagle3": Eagle3Head}


def load_head(
    path: str,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    target_layers: int | None = None,
) -> Head:
    """Load a head from a folder, `demo:<name>`, a URL or a hub id; call its `bind` next.

    `target_layers` is the number of decoder layers of the target; it is needed where the checkpoint
    names no aux layers. Raises HeadError naming file, tensor, what was found and what was expected.
    """
    return assemble(read_head(path, target_layers=target_layers), dtype=dtype, device=device)


def read_head(path: str, *, target_layers: int | None = None) -> HeadParts:
    """Read what `load_head` makes a head of."""
    return interpret(read_files(resolve_head(path)), target_layers)


def assemble(parts: HeadParts, *, dtype: torch.dtype, device: torch.device | str) -> Head:
    """Build the module on the meta device and assign every parameter from the checkpoint."""
    head = empty_head(parts.config)
    tensors = {n: t.to(dtype=dtype, device=device) for n, t in parts.tensors.items()}
    head.load_state_dict(pack(tensors, list(head.state_dict())), strict=True, assign=True)
    head.draft_to_target = _on(device, parts.draft_to_target)
    head.embed_VH = tensors.get("embed_tokens.weight")
    # The rotary frequencies are the only tensor that is computed, not loaded.
    head.to(device)
    left = [n for n, p in head.named_parameters() if p.is_meta]
    if left:
        raise HeadError(f"tensors {left} were not loaded")
    return head.eval().requires_grad_(False)


def empty_head(config: HeadConfig) -> Head:
    """Return a head of this configuration without storage."""
    with torch.device("meta"):
        return _MODULES[config.kind](config)


def _on(device: torch.device | str, tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.to(device)
