"""Processes that train one head together: each takes its share of every batch.

The gradient of a batch is the sum of its shares over the positions of the whole batch, so
a team takes the same steps as one process would, but for the order of its sums.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")

#: Longest wait for another process, which may be validating or computing hidden states.
_PATIENCE = dt.timedelta(hours=6)


@dataclass(frozen=True, slots=True)
class Team:
    """This process's place; a team of one never communicates."""

    rank: int = 0
    size: int = 1

    @property
    def first(self) -> bool:
        """Whether this process validates, saves and exports."""
        return self.rank == 0

    def share(self, items: Sequence[T]) -> list[T]:
        """Return this process's part of something, which may be nothing."""
        return list(items[self.rank :: self.size])

    def total(self, value: Tensor) -> Tensor:
        """Sum a value over the team."""
        if self.size == 1:
            return value
        value = value.clone()
        dist.all_reduce(value)
        return value

    def add_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Replace each gradient by the sum over the team; one that was empty-handed has zeros."""
        if self.size == 1:
            return
        trained = [p for p in parameters if p.requires_grad]
        parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in trained]
        flat = torch.cat([part.reshape(-1) for part in parts])
        dist.all_reduce(flat)
        sizes = [p.numel() for p in trained]
        for p, part in zip(trained, torch.split(flat, sizes), strict=True):
            p.grad = part.view_as(p)

    def from_first(self, value: T) -> T:
        """Return the first process's value in every process."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box)
        return box[0]

    def wait(self) -> None:
        """Return when every process has come here."""
        if self.size > 1:
            dist.barrier()


ALONE = Team()


@contextmanager
def joined(address: str, rank: int, size: int, device: torch.device) -> Iterator[Team]:
    """Be one of `size` processes that meet at `address` (tcp://host:port) while entered."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(
        backend, init_method=address, rank=rank, world_size=size, timeout=_PATIENCE
    )
    try:
        yield Team(rank, size)
    finally:
        dist.destroy_process_group()
