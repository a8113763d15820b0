"""Starts of prompts whose keys are there already: copied into a slot instead of computed.

A slot holds the keys of the row in it, and those of the row that ended there until another takes
the slot. So the next text of a row finds the prompt and the text before it, and a prompt finds the
system prompt or the examples that it shares with one that is being decoded. What prompts share but
no slot holds any more is kept beside the slots.

Nothing here grows with the rows that pass: tokens are kept of each slot and of a few prompts.

Shape legend: S slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from eagle_batch.engine.drafters.base import Drafter
from eagle_batch.engine.prefix import MIN_SHARED_TOKENS, PrefixStore, SharedPrefix
from eagle_batch.engine.slots import Row
from eagle_batch.models.cache import Cache

#: Latest prompts that are remembered to see what prompts share.
_REMEMBERED = 32
#: Slots whose tokens the store of shared prefixes may hold at least, and one of how many slots.
_LEAST_STORE, _STORE_SHARE = 2, 8


class TokenTable:
    """Sequences of tokens side by side, to see how much of another each begins with."""

    def __init__(self, rows: int, width: int) -> None:
        self._rows = np.full((rows, width), -1, dtype=np.int32)

    def set(self, row: int, tokens: Sequence[int]) -> None:
        """Put a sequence in a row."""
        count = min(len(tokens), self._rows.shape[1])
        self._rows[row, :count] = tokens[:count]
        self._rows[row, count:] = -1

    def swap(self, a: int, b: int) -> None:
        """Exchange two rows."""
        self._rows[[a, b]] = self._rows[[b, a]]

    def tokens(self, row: int, count: int) -> tuple[int, ...]:
        """Return the first tokens of a row."""
        return tuple(self._rows[row, :count].tolist())

    def common(self, tokens: Sequence[int], rows: int | None = None) -> npt.NDArray[np.int64]:
        """Return how many leading tokens each of the first rows shares with a sequence."""
        count = min(len(tokens), self._rows.shape[1])
        same = self._rows[:rows, :count] == np.asarray(tokens[:count], dtype=np.int32)
        return np.where(same.all(1), count, same.argmin(1))


@dataclass(frozen=True, slots=True)
class Start:
    """What is there of a prompt."""

    #: Leading tokens whose keys can be copied.
    length: int = 0
    #: Where they are: in a slot, or in a prefix of the store.
    slot: int = -1
    prefix: SharedPrefix | None = None


class Starts:
    """Knows what every slot begins with, and brings it where a prompt needs it."""

    def __init__(self, cache: Cache, drafter: Drafter | None, context: int) -> None:
        slots = cache.shape.slots
        self._cache = cache
        self._drafter = drafter
        self._table = TokenTable(slots, context)
        self._followed_S = np.zeros(slots, dtype=np.bool_)
        self._recent = TokenTable(_REMEMBERED, context)
        self._next_recent = 0
        self._room = max(_LEAST_STORE, slots // _STORE_SHARE) * context
        self._store = PrefixStore(self._room)

    def use(self, drafter: Drafter) -> None:
        """Forget what another drafter, or one that has learnt, was not shown."""
        self._drafter = drafter
        self._followed_S[:] = False
        self._store = PrefixStore(self._room)

    def find(self, prompt: Sequence[int], *, follow: bool) -> Start:
        """Return the longest start of a prompt that is there.

        follow: whether the drafter has to know it too.

        The last token of a prompt is never reused (its hidden state is needed), nor the last token
        of the match: the head pairs every feature with the token after it, which may differ.
        """
        drafted = follow and self._drafter is not None
        common_S = self._table.common(prompt)
        if drafted:
            common_S = np.where(self._followed_S, common_S, 0)
        slot = int(common_S.argmax())
        start = Start(_usable(int(common_S[slot]), prompt), slot)
        kept = self._store.match(prompt, drafted=drafted)
        if kept is not None and _usable(kept[1], prompt) > start.length:
            start = Start(_usable(kept[1], prompt), prefix=kept[0])
        return start if start.length >= MIN_SHARED_TOKENS else Start()

    def bring(self, rows: Sequence[tuple[Row, Start]], first_slot: int) -> list[Row]:
        """Copy what is known of rows into the slots from the first on; return the rows by slot."""
        slots = range(first_slot, first_slot + len(rows))
        order = placed([start.slot for _, start in rows], slots)
        by_slot = [(slot, *rows[item]) for slot, item in zip(slots, order, strict=True)]
        # All are read before the first is written: a slot may be source and target.
        copies = [
            (slot, self._read(start))
            for slot, _, start in by_slot
            if start.length and start.slot != slot
        ]
        for slot, columns in copies:
            self._cache.restore(slot, columns.target_columns)
            if self._drafter is not None and columns.draft_columns is not None:
                self._drafter.restore(slot, columns.draft_columns)
        for _, row, start in by_slot:
            row.length = start.length
        return [row for _, row, _ in by_slot]

    def begun(self, slot: int, row: Row, known: int) -> None:
        """Note a prompt whose keys are in a slot now, of which the first `known` were there."""
        prompt = row.request.prompt_ids
        self._table.set(slot, prompt)
        self._followed_S[slot] = row.followed
        shared = int(self._recent.common(prompt).max())
        if _usable(shared, prompt) - known >= MIN_SHARED_TOKENS:
            self._store.put(self._snapshot(slot, prompt[:shared], drafted=row.followed))
        self._recent.set(self._next_recent, prompt)
        self._next_recent = (self._next_recent + 1) % _REMEMBERED

    def ended(self, row: Row, slot: int, last: int) -> None:
        """Note that a row ended in a slot, and went to the last one as that one's row came."""
        self._table.swap(slot, last)
        self._followed_S[slot] = self._followed_S[last]
        sound = row.finish_reason != "overflow"
        self._table.set(last, (*row.request.prompt_ids, *row.tokens) if sound else ())
        self._followed_S[last] = row.followed

    def _read(self, start: Start) -> SharedPrefix:
        """Copy the columns of a start out of where they are."""
        if start.prefix is None:
            tokens = self._table.tokens(start.slot, start.length)
            return self._snapshot(start.slot, tokens, drafted=True)
        return start.prefix.first(start.length)

    def _snapshot(self, slot: int, tokens: tuple[int, ...], *, drafted: bool) -> SharedPrefix:
        drafter = self._drafter if drafted else None
        length = len(tokens)
        return SharedPrefix(
            tokens,
            self._cache.snapshot(slot, length),
            None if drafter is None else drafter.snapshot(slot, length),
        )


def placed(sources: Sequence[int], slots: range) -> list[int]:
    """Return which item each slot gets: the first whose source it is, any other where none is."""
    owner: dict[int, int] = {}
    for item, source in enumerate(sources):
        if source in slots:
            owner.setdefault(source, item)
    rest = iter([item for item in range(len(sources)) if item not in owner.values()])
    return [owner[slot] if slot in owner else next(rest) for slot in slots]


def _usable(common: int, prompt: Sequence[int]) -> int:
    return min(common, len(prompt) - 1) - 1
