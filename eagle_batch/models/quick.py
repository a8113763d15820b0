"""Small operators that compiled kernels of the CPU do sooner than torch, where they may."""

from __future__ import annotations

import functools
import importlib.util
import os

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor


@functools.cache
def has_kernels() -> bool:
    """Whether there is numba to compile kernels, and a system that they know."""
    return os.name == "posix" and importlib.util.find_spec("numba") is not None


def kernels_take(*tensors: Tensor) -> bool:
    """Whether kernels know these: float32 or integers, in plain order, without gradients."""
    return (
        has_kernels()
        and not torch.is_grad_enabled()
        and all(
            each.device.type == "cpu"
            and (each.dtype == torch.float32 or not each.is_floating_point())
            and each.is_contiguous()
            for each in tensors
        )
    )


def rms_norm(x: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last dimension, in the type of x (autocast may lower it)."""
    if not kernels_take(x, weight_H):
        return F.rms_norm(x, weight_H.shape, weight_H.to(x.dtype), eps)
    from eagle_batch.models import kernels

    out = torch.empty_like(x)
    weight = weight_H.detach().numpy()
    kernels.normalise(x.flatten(0, -2).numpy(), weight, np.float32(eps), out.flatten(0, -2).numpy())
    return out


def embedding(tokens: Tensor, weight_VH: Tensor) -> Tensor:
    """Look tokens up."""
    if not kernels_take(tokens, weight_VH):
        return F.embedding(tokens, weight_VH)
    # torch splits even a handful of rows between its threads.
    return torch.from_numpy(weight_VH.detach().numpy()[tokens.numpy()])
