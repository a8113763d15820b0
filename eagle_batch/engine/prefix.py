"""Prefixes that prompts share and that no slot holds any more: kept beside the slots.

A system prompt, few-shot examples or the instructions of a stage make many prompts start alike. The
store keeps keys and values of a few such starts within a number of tokens, least recently used out
first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

#: Below this many tokens a copy is not worth its bookkeeping.
MIN_SHARED_TOKENS = 8


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """Columns of one prefix for the target and, where there is a head, for the drafter."""

    tokens: tuple[int, ...]
    target_columns: tuple[Tensor, ...]
    #: None where the drafter did not follow.
    draft_columns: tuple[Tensor, ...] | None

    def first(self, length: int) -> SharedPrefix:
        """Return what is kept of the first tokens."""
        target, draft = self.target_columns, self.draft_columns
        return SharedPrefix(
            self.tokens[:length],
            tuple(part[:, :length] for part in target),
            None if draft is None else tuple(part[:, :length] for part in draft),
        )


class PrefixStore:
    """A small least-recently-used store of shared prefixes."""

    def __init__(self, most_tokens: int) -> None:
        self._most_tokens = most_tokens
        self._entries: OrderedDict[tuple[int, ...], SharedPrefix] = OrderedDict()
        #: Tokens of all entries together.
        self.tokens = 0

    def match(self, prompt: Sequence[int], *, drafted: bool) -> tuple[SharedPrefix, int] | None:
        """Return the entry that a prompt shares most with, and how many leading tokens.

        drafted: look only at entries that the drafter has followed.
        """
        entries = [e for e in self._entries.values() if not drafted or e.draft_columns is not None]
        shared = [(common_length(entry.tokens, prompt), entry) for entry in entries]
        if not shared:
            return None
        length, entry = max(shared, key=lambda pair: pair[0])
        self._entries.move_to_end(entry.tokens)
        return entry, length

    def put(self, prefix: SharedPrefix) -> None:
        """Keep a prefix and drop the least recently used ones beyond the limit."""
        self._drop(prefix.tokens)
        self._entries[prefix.tokens] = prefix
        self.tokens += len(prefix.tokens)
        while self.tokens > self._most_tokens:
            self._drop(next(iter(self._entries)))

    def _drop(self, tokens: tuple[int, ...]) -> None:
        if self._entries.pop(tokens, None) is not None:
            self.tokens -= len(tokens)


def common_length(a: Sequence[int], b: Sequence[int]) -> int:
    """Return how many leading tokens two tuples share."""
    low, high = 0, min(len(a), len(b))
    if a[:high] == b[:high]:
        return high
    while low + 1 < high:
        middle = (low + high) // 2
        low, high = (middle, high) if a[low:middle] == b[low:middle] else (low, middle)
    return low
