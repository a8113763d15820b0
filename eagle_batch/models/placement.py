"""Where a target is put: on one device, or its layers over several, balanced by bytes.

Layers follow each other from device to device. The last device is the target's home: it has the
embedding, the final norm and the output projection, so that a tied matrix is there once, and with
them the head and everything that the engine keeps of its rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise

import torch
from torch import nn

from eagle_batch.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Placement:
    """The devices of a target, in the order of its layers, and what else they are to hold."""

    devices: tuple[torch.device, ...]
    #: Bytes of what will be put beside the target at its home: a head, a draft model.
    beside: int = 0
    #: Tokens that the slots will hold keys and values of.
    columns: int = 0

    @property
    def home(self) -> torch.device:
        """The device that the engine works on."""
        return self.devices[-1]


def split_layers(layers: Sequence[int], devices: int, home: int) -> tuple[int, ...]:
    """Return the device of each layer, 0 to `devices` - 1 in rising order, each of them used.

    The fullest device is as empty as it can be.

    layers: bytes of each layer. home: bytes that the last device holds beside its layers.
    Raises ConfigError where there are more devices than layers.
    """
    if devices > len(layers):
        raise ConfigError(
            f"workers.gpus: found {devices} for a target of {len(layers)} layers; expected no more "
            "GPUs than layers"
        )
    before = [0, *accumulate(layers)]

    @cache
    def best(device: int, stop: int) -> tuple[int, tuple[int, ...]]:
        """Return the bytes of the fullest device up to this one, and where each of them ends."""
        beside = home if device == devices - 1 else 0
        if device == 0:
            return before[stop] + beside, (stop,)
        choices = []
        for start in range(device, stop):
            fullest, ends = best(device - 1, start)
            mine = before[stop] - before[start] + beside
            choices.append((max(fullest, mine), (*ends, stop)))
        return min(choices)

    _, ends = best(devices - 1, len(layers))
    sizes = [stop - start for start, stop in pairwise((0, *ends))]
    return tuple(device for device, size in enumerate(sizes) for _ in range(size))


def place(model: nn.Module, base: nn.Module, where: Placement, column: int) -> None:
    """Move a model whose layers are `base.layers`; `column` is the bytes of a token's keys."""
    layers = base.layers
    assert isinstance(layers, nn.ModuleList)
    sizes = [_bytes(layer) for layer in layers]
    rest = _bytes(model) - sum(sizes) + where.beside
    full = [size + where.columns * column for size in sizes]
    devices = split_layers(full, len(where.devices), rest)
    for layer, device in zip(layers, devices, strict=True):
        layer.to(where.devices[device])
    # What is no layer moves alone: the whole may be larger than its home.
    base.layers = nn.ModuleList()
    model.to(where.home)
    base.layers = layers


def _bytes(module: nn.Module) -> int:
    return sum(part.numel() * part.element_size() for part in module.parameters())
