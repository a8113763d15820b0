"""Counts what an engine did; the engine adds, metrics are read as frozen snapshots."""

from __future__ import annotations

from collections.abc import Sequence

from eagle_batch.engine.clock import PhaseClock
from eagle_batch.engine.prefill import Prefill
from eagle_batch.engine.request import EngineMetrics


class Counters:
    """Cumulative counters of one engine."""

    def __init__(self, slots: int, depth: int) -> None:
        self._slots = slots
        self.rows = 0
        self.completion_tokens = 0
        self._target_passes = 0
        self._row_passes = 0
        self._round_tokens = 0
        self._passes_by_shape: dict[str, int] = {}
        self._passes_by_rows: dict[str, int] = {}
        self._drafted_at = [0] * depth
        self._accepted_at = [0] * depth

    def deepen(self, depth: int) -> None:
        """Make room for drafts of this depth."""
        missing = [0] * (depth - len(self._drafted_at))
        self._drafted_at += missing
        self._accepted_at += missing

    def add_round(self, accepted: Sequence[int], depths: Sequence[int], shape: str) -> None:
        """Count one verification pass that accepted so many drafted tokens in each row."""
        self._target_passes += 1
        self._passes_by_shape[shape] = self._passes_by_shape.get(shape, 0) + 1
        kind = f"{1 << (len(accepted) - 1).bit_length()} {shape}"
        self._passes_by_rows[kind] = self._passes_by_rows.get(kind, 0) + 1
        self._row_passes += len(accepted)
        self._round_tokens += sum(accepted) + len(accepted)
        for level in range(max(depths, default=0)):
            self._drafted_at[level] += sum(depth > level for depth in depths)
            self._accepted_at[level] += sum(count > level for count in accepted)

    def snapshot(self, clock: PhaseClock, prefill: Prefill) -> EngineMetrics:
        """Return everything as one frozen record."""
        return EngineMetrics(
            rows=self.rows,
            prompt_tokens=prefill.prompt_tokens,
            cached_prompt_tokens=prefill.cached_tokens,
            completion_tokens=self.completion_tokens,
            target_passes=self._target_passes,
            row_passes=self._row_passes,
            round_tokens=self._round_tokens,
            drafted_at=tuple(self._drafted_at),
            accepted_at=tuple(self._accepted_at),
            slot_passes=self._target_passes * self._slots,
            passes_by_shape=tuple(sorted(self._passes_by_shape.items())),
            passes_by_rows=tuple(sorted(self._passes_by_rows.items())),
            prefill_s=clock.seconds["prefill"],
            draft_s=clock.seconds["draft"],
            verify_s=clock.seconds["verify"],
            host_s=clock.host,
        )
