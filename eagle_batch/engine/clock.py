"""Where the time of a round goes: prefill, draft, verify, host.

On the CPU a phase is timed where it runs. On CUDA a phase only enqueues work, so events are
recorded and read after the round's own synchronisation; timing adds none.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch

Phase = Literal["prefill", "draft", "verify"]


class PhaseClock:
    """Adds up seconds by phase; what is in no phase is the host's share."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pending: list[tuple[Phase, float, torch.cuda.Event, torch.cuda.Event]] = []
        self.seconds: dict[str, float] = {"prefill": 0.0, "draft": 0.0, "verify": 0.0}
        self.total = 0.0

    @property
    def host(self) -> float:
        """Seconds of steps that were spent in no phase."""
        return max(0.0, self.total - sum(self.seconds.values()))

    @contextmanager
    def step(self) -> Iterator[None]:
        """Time a whole engine step."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._collect()
            self.total += time.perf_counter() - start

    @contextmanager
    def phase(self, name: Phase, prefill: float = 0.0) -> Iterator[None]:
        """Attribute what runs inside to a phase.

        prefill: the share of it that is prefill, where prompts are in the same pass.
        """
        if self._device.type != "cuda":
            start = time.perf_counter()
            yield
            self._add(name, prefill, time.perf_counter() - start)
            return
        begin, end = _event(), _event()
        # The stream of our device, whichever device is the current one.
        stream = torch.cuda.current_stream(self._device)
        begin.record(stream)
        yield
        end.record(stream)
        self._pending.append((name, prefill, begin, end))

    def _collect(self) -> None:
        for name, prefill, begin, end in self._pending:
            end.synchronize()
            self._add(name, prefill, begin.elapsed_time(end) / 1000.0)
        self._pending.clear()

    def _add(self, name: Phase, prefill: float, seconds: float) -> None:
        self.seconds[name] += seconds * (1 - prefill)
        self.seconds["prefill"] += seconds * prefill


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
