"""Committed tokens that a head has not run over yet: kept until it is to draft again.

A full batch is often decoded plainly, and whoever is not to draft need not follow. What the head
would take in, the target's features and the tokens after them, is put down instead, which is one
copy; before the next draft it catches up in one pass over many tokens. So plain rounds cost what
they cost without a head, and yet every row can be drafted again: in the tail of a batch, say.

Which rows are behind is known on the host, so this is for devices whose results it may look at.

Shape legend: S slots, C columns of a slot, B rows, A places, F feature width of the target.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eagle_batch.engine.drafters.base import CommittedChain

#: Tokens of a row above which it catches up by itself: padded to it, others would cost as much. A
#: round's longest draft and its bonus token stay below.
SHORT = 20


@dataclass(frozen=True, slots=True)
class Due:
    """What some rows are behind."""

    chain: CommittedChain
    features_BAF: Tensor
    tokens_BA: Tensor


@dataclass(frozen=True, slots=True)
class Rest:
    """What all rows are behind, as it was put down."""

    #: Features, and the tokens after them, by slot and position: the tables themselves.
    features_SCF: Tensor
    tokens_SC: Tensor
    #: First token of each row, and number of tokens.
    starts: list[int]
    counts: list[int]


class Arrears:
    """Features and tokens by slot and position, and how far the head has run over each slot."""

    def __init__(self, slots: int, capacity: int, device: torch.device) -> None:
        self._capacity = capacity
        #: Allocated with the first features, which tell its width and type.
        self._features_SCF = torch.zeros(slots, 0, 0, device=device)
        #: Column p holds the token at position p + 1, which is paired with feature p.
        self._tokens_SC = torch.zeros(slots, capacity, dtype=torch.int64, device=device)
        self._done = [0] * slots

    def note(self, chain: CommittedChain, features_BAF: Tensor, tokens_BA: Tensor) -> None:
        """Put down what a head would take in; what it knew of later positions is void."""
        (B, A), first = tokens_BA.shape, chain.first_row
        self._widen(features_BAF)
        place_A = torch.arange(A, device=tokens_BA.device)
        # Padding lands behind the row's last token and is overwritten before it is ever read.
        column_BA = (chain.start_B[:, None] + place_A).clamp(max=self._capacity - 1)
        row_B1 = torch.arange(first, first + B, device=tokens_BA.device)[:, None]
        self._features_SCF[row_B1, column_BA] = features_BAF
        self._tokens_SC[row_B1, column_BA] = tokens_BA
        for row, start in enumerate(chain.start_B.tolist(), start=first):
            self._done[row] = min(self._done[row], start)

    def due(self, first_row: int, lengths: Sequence[int], *, short: bool) -> Iterator[Due]:
        """Yield what rows of these lengths are behind; once taken, they are not any more.

        short: the rows that are few tokens behind, all at once; else the others, one by one.
        """
        behind = [
            length - done for length, done in zip(lengths, self._done[first_row:], strict=False)
        ]
        if not short:
            for i, count in enumerate(behind):
                if count > SHORT:
                    yield self._take(first_row + i, lengths[i : i + 1])
        elif 0 < max(behind) <= SHORT:
            yield self._take(first_row, lengths)

    def rest(self, first_row: int, lengths: Sequence[int]) -> Rest:
        """Return all that rows of these lengths are behind; once taken, they are not any more."""
        rows = slice(first_row, first_row + len(lengths))
        starts = self._done[rows]
        counts = [max(0, length - start) for length, start in zip(lengths, starts, strict=True)]
        self._done[rows] = lengths
        return Rest(self._features_SCF, self._tokens_SC, starts, counts)

    def forget(self) -> None:
        """Let the head run over everything again, since it has changed."""
        self._done = [0] * len(self._done)

    def swap_rows(self, a: int, b: int, length: int) -> None:
        """Exchange the first `length` positions of two rows."""
        for table in (self._features_SCF, self._tokens_SC):
            table[[a, b], :length] = table[[b, a], :length]
        self._done[a], self._done[b] = self._done[b], self._done[a]

    def snapshot(self, row: int, length: int) -> tuple[Tensor, ...]:
        """Return the first `length` positions of a row."""
        tables = (self._features_SCF, self._tokens_SC)
        return tuple(table[row : row + 1, :length].clone() for table in tables)

    def restore(self, row: int, columns: tuple[Tensor, ...]) -> None:
        """Put a snapshot, or the first positions of it, at the start of a row."""
        features, tokens = columns
        self._widen(features)
        self._features_SCF[row, : features.shape[1]] = features[0]
        self._tokens_SC[row, : tokens.shape[1]] = tokens[0]
        self._done[row] = 0

    def _take(self, first_row: int, lengths: Sequence[int]) -> Due:
        stop = first_row + len(lengths)
        starts = self._done[first_row:stop]
        width = max(length - start for length, start in zip(lengths, starts, strict=True))
        self._done[first_row:stop] = lengths
        device = self._tokens_SC.device
        start_B = torch.tensor(starts, device=device)
        last_B = torch.tensor(lengths, device=device) - start_B - 1
        column_BA = start_B[:, None] + torch.arange(width, device=device)
        column_BA = column_BA.clamp(max=self._capacity - 1)
        row_B1 = torch.arange(first_row, stop, device=device)[:, None]
        chain = CommittedChain(
            first_row, start_B, last_B.clamp(min=0), max(starts), ends_B=last_B >= 0
        )
        return Due(chain, self._features_SCF[row_B1, column_BA], self._tokens_SC[row_B1, column_BA])

    def _widen(self, like_BAF: Tensor) -> None:
        width = like_BAF.shape[-1]
        if self._features_SCF.shape[-1] != width:
            slots = self._features_SCF.shape[0]
            self._features_SCF = like_BAF.new_zeros(slots, self._capacity, width)
