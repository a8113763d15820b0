"""Key/value slots of a target whose layers are on several devices, and how a pass crosses over.

Each device has the slots of its own layers. A pass is described at the target's home, the last
device; what the layers of another device need of that is moved there once.

Shape legend: see `cache`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from eagle_batch.models.cache import CacheShape, CacheStep, KeyValueCache


class SplitCache:
    """See `eagle_batch.models.cache.Cache`; a `KeyValueCache` for each device."""

    def __init__(
        self, shape: CacheShape, devices: Sequence[torch.device], *, dtype: torch.dtype
    ) -> None:
        """Allocate; `devices` has the device of each layer, those of one beside each other."""
        self.shape = shape
        self.dtype = dtype
        self.device = devices[-1]
        self.parts = tuple(
            KeyValueCache(replace(shape, layers=len(list(run))), dtype=dtype, device=device)
            for device, run in groupby(devices)
        )
        #: Part of each layer, and the layer's number there.
        self.places = [(part, n) for part in self.parts for n in range(part.shape.layers)]

    @property
    def bytes(self) -> int:
        """Memory of the slots in bytes, on all devices."""
        return sum(part.bytes for part in self.parts)

    def step(
        self,
        first_row: int,
        write_BN: Tensor,
        base_B: Tensor,
        visible_BNM: Tensor,
        positions_BN: Tensor,
        extent: int,
    ) -> SplitStep:
        """Prepare one forward pass; see `KeyValueCache.step`."""
        tensors = write_BN, base_B, visible_BNM, positions_BN
        return SplitStep(self, first_row, tensors, extent)

    def keep(self, first_row: int, source_BA: Tensor, target_BA: Tensor) -> None:
        """Copy storage columns `source` onto `target` in every layer."""
        for part in self.parts:
            part.keep(first_row, moved(source_BA, part.device), moved(target_BA, part.device))

    def swap_rows(self, a: int, b: int, length: int) -> None:
        """Exchange the first `length` columns of two slots."""
        for part in self.parts:
            part.swap_rows(a, b, length)

    def clear(self, row: int) -> None:
        """Zero a slot."""
        for part in self.parts:
            part.clear(row)

    def snapshot(self, row: int, length: int) -> tuple[Tensor, ...]:
        """Return a copy of the first `length` columns of a slot, each device's on that device."""
        return tuple(columns for part in self.parts for columns in part.snapshot(row, length))

    def restore(self, row: int, columns: tuple[Tensor, ...]) -> None:
        """Write columns from `snapshot` to the start of a slot."""
        for part, own in zip(self.parts, columns, strict=True):
            part.restore(row, (own,))


class SplitStep:
    """See `eagle_batch.models.cache.Step`; a `CacheStep` for each device, made when first used."""

    def __init__(
        self,
        cache: SplitCache,
        first_row: int,
        tensors: tuple[Tensor, Tensor, Tensor, Tensor],
        extent: int,
    ) -> None:
        self._places = cache.places
        self._first_row = first_row
        self._tensors = tensors
        self._extent = extent
        self._steps: dict[torch.device, CacheStep] = {}
        #: What was moved: (tensor, where) -> the tensor itself, which keeps its id, and the copy.
        self._moved: dict[tuple[int, torch.device], tuple[Tensor, Tensor]] = {}

    def attend(
        self,
        layer: int,
        q_BHND: Tensor,
        k_BGND: Tensor,
        v_BGND: Tensor,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """See `CacheStep.attend`."""
        step, number = self._at(layer)
        return step.attend(number, q_BHND, k_BGND, v_BGND, scale, window, softcap)

    def attend_packed(
        self, layer: int, q_RHD: Tensor, kv_R2GD: Tensor, scale: float, window: int | None
    ) -> Tensor:
        """See `CacheStep.attend_packed`."""
        step, number = self._at(layer)
        return step.attend_packed(number, q_RHD, kv_R2GD, scale, window)

    def moved(self, tensor: Tensor, device: torch.device) -> Tensor:
        """Return a tensor of this pass on a device, moved there once however many layers ask."""
        key = id(tensor), device
        if key not in self._moved:
            self._moved[key] = tensor, moved(tensor, device)
        return self._moved[key][1]

    def _at(self, layer: int) -> tuple[CacheStep, int]:
        part, number = self._places[layer]
        if part.device not in self._steps:
            write, base, visible, positions = (moved(each, part.device) for each in self._tensors)
            self._steps[part.device] = part.step(
                self._first_row, write, base, visible, positions, self._extent
            )
        return self._steps[part.device], number


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on a device; between GPUs the host does not wait for it."""
    return tensor.to(device, non_blocking=True)


def bring_inputs(layer: nn.Module, device: torch.device) -> None:
    """Let a layer of the model's own code find all that it is called with on its device."""

    def bring(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        step = kwargs.get("attention")
        move = step.moved if isinstance(step, SplitStep) else moved
        return tree_map_only(Tensor, lambda tensor: move(tensor, device), (args, kwargs))

    layer.register_forward_pre_hook(bring, with_kwargs=True)
