"""Devices that are not there: tensors that compute on the CPU and say that they are on a GPU.

An operation over tensors of two devices fails, as it does on real ones; what is made names its
device; only what copies may cross. So a pass over several GPUs runs here as it does there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

CPU = torch.device("cpu")
#: What may take tensors of two devices: copies, and what is written into a place.
CROSSING = {"to", "_to_copy", "copy_", "__setitem__"}
#: What takes indices of the CPU into tensors anywhere.
INDEXING = {"index", "__getitem__"}
#: What asks for a tensor's own device, shape and type.
ITSELF = {"__get__", "__set__", "_has_compatible_shallow_copy_type"}


class Placed(Tensor):
    """A tensor of the CPU that says it is elsewhere."""

    kept: Tensor

    @staticmethod
    def __new__(cls: Any, kept: Tensor, device: torch.device) -> Any:
        placed = Tensor._make_wrapper_subclass(
            cls,
            kept.shape,
            strides=kept.stride(),
            storage_offset=kept.storage_offset(),
            dtype=kept.dtype,
            device=device,
        )
        placed.kept = kept
        return placed

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.__name__ in ITSELF:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        # Before torch itself would ask a driver for the device.
        return run(func.__name__, func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return run(func.overloadpacket.__name__, func, args, kwargs or {})


def run(name: str, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operation on the CPU; its result is where its arguments are, or where it was told."""
    leaves = tree_leaves((args, kwargs))
    tensors = [x for x in leaves if isinstance(x, Tensor)]
    lost = [x.device for x in tensors if x.device != CPU and not isinstance(x, Placed)]
    assert lost == [], f"{name} over tensors that are nowhere"
    found = devices(tensors, name)
    assert len(found) < 2 or name in CROSSING, f"{name} over {found}"
    told = next((x for x in leaves if isinstance(x, torch.device)), None)
    real_args, real_kwargs = tree_map(here, (args, kwargs))
    out = (_count if name == "histc" else func)(*real_args, **real_kwargs)
    if name in CROSSING and told not in {None, *found}:
        out = out.clone()  # On the CPU it may have been the very same memory.
    # What changes a tensor returns that one.
    same = {id(x.kept): x for x in tensors if isinstance(x, Placed)}
    where = told or next(iter(found), CPU)

    def there(x: Tensor) -> Tensor:
        if id(x) in same:
            return same[id(x)]
        return x if where == CPU or isinstance(x, Placed) else Placed(x, where)

    return tree_map_only(Tensor, there, out)


def _count(x: Tensor, *options: Any, **named: Any) -> Tensor:
    """Count whole numbers, which the CPU can do in fractions only."""
    return torch.histc(x.float(), *options, **named).to(x.dtype)


def here(x: Any) -> Any:
    """Return what stands for a value on the CPU."""
    if isinstance(x, Placed):
        return x.kept
    return CPU if isinstance(x, torch.device) else x


def devices(tensors: list[Tensor], name: str) -> dict[torch.device, None]:
    """Return where tensors are; single numbers of the CPU are welcome everywhere."""
    there = [x.device for x in tensors if x.device != CPU or (x.dim() and name not in INDEXING)]
    return dict.fromkeys(there)


class Devices(TorchDispatchMode):
    """While active, everything that names a GPU is made there."""

    def __init__(self) -> None:
        super().__init__()
        # Else torch looks for a driver as soon as it reads the name of a GPU.
        self._mode_key = torch._C._TorchDispatchModeKey.FAKE

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return run(func.overloadpacket.__name__, func, args, kwargs or {})


class Event:
    """A CUDA event that takes no time."""

    def __init__(self, enable_timing: bool) -> None:
        self.stream: Any = None

    def record(self, stream: Any) -> None:
        self.stream = stream

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: Event) -> float:
        assert self.stream == end.stream
        return 1.0


@contextmanager
def logical_gpus() -> Iterator[None]:
    """Have as many GPUs as anybody names."""
    torch._C._set_only_lift_cpu_tensors(True)
    # Else a module would move its memory and not its tensors.
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        with (
            Devices(),
            patch("torch.cuda.Event", Event),
            patch("torch.cuda.current_stream", lambda device: ("stream", device)),
            patch("torch.cuda.synchronize", lambda device: None),
            patch("torch.cuda.get_device_capability", lambda device: (9, 0)),
        ):
            yield
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)
        torch._C._set_only_lift_cpu_tensors(False)
