"""The rows that are being decoded: tokens and lengths on the host, their mirror on the device.

Active rows are always slots 0 .. n-1, so that a round is a view of the first n rows of every
buffer and nothing is gathered. A row that ends in the middle leaves its slot to the last row.

Shape legend: S slots.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from eagle_batch.engine.grammars import Guide
from eagle_batch.engine.request import FinishReason, Request
from eagle_batch.engine.sampling import RowParams, pack_params


@dataclass(slots=True)
class Row:
    """One request while it is decoded; the owner of its generated tokens."""

    request: Request
    tokens: list[int] = field(default_factory=list)
    #: Committed tokens whose keys are in the target's cache.
    length: int = 0
    target_passes: int = 0
    drafted: int = 0
    accepted: int = 0
    #: Drafted tokens among those that each pass appended; see `Completion`.
    accepted_by_pass: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    #: Where a stop string begins in the decoded text.
    text_end: int | None = None
    #: Whether the drafter has followed this row from its first token on.
    followed: bool = True
    #: Where the row stands in its grammar, where it has one.
    guide: Guide | None = None
    #: Log-probability of each token, and the best tokens at its place, where asked for.
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[tuple[tuple[int, float], ...]] = field(default_factory=list)


class Slots:
    """Host list of active rows and the device tensors that mirror them."""

    def __init__(self, count: int, device: torch.device) -> None:
        self.count = count
        self.device = device
        self.rows: list[Row] = []
        self.root_S = torch.zeros(count, dtype=torch.int64, device=device)
        self.length_S = torch.zeros(count, dtype=torch.int64, device=device)
        self.index_S = torch.zeros(count, dtype=torch.int64, device=device)
        self._params: RowParams | None = None

    @property
    def free(self) -> int:
        """Slots without a row."""
        return self.count - len(self.rows)

    @property
    def params(self) -> RowParams:
        """Sampling parameters of all active rows; laid out anew only when rows came or went."""
        if self._params is None:
            params = [row.request.params for row in self.rows]
            keys = [row.request.noise_key for row in self.rows]
            self._params = pack_params(params, keys, self.device)
        return self._params

    def add(self, rows: list[Row]) -> int:
        """Append rows and return the slot of the first one."""
        first = len(self.rows)
        self.rows.extend(rows)
        self._params = None
        for tensor in (self.root_S, self.length_S, self.index_S):
            tensor[first : len(self.rows)] = 0
        return first

    def drop(self, slot: int) -> int:
        """Remove a row; return the slot whose row moves into its place, itself if it was last."""
        last = len(self.rows) - 1
        self._params = None
        self.rows[slot] = self.rows[last]
        self.rows.pop()
        for tensor in (self.root_S, self.length_S, self.index_S):
            tensor[slot] = tensor[last]
        return last
