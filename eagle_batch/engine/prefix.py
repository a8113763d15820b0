"""Prefixes that prompts share: computed once, copied into every slot that starts with them.

A system prompt, few-shot examples or the n samples of one prompt make many prompts start alike. The
store keeps keys and values of a few such starts, least recently used out first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile

from torch import Tensor

#: Below this many tokens a copy is not worth its bookkeeping.
MIN_SHARED_TOKENS = 8


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """Columns of one prefix for the target and, where there is a head, for the drafter."""

    tokens: tuple[int, ...]
    target_columns: Tensor
    draft_columns: tuple[Tensor, ...] | None


class PrefixStore:
    """A small least-recently-used store of shared prefixes."""

    def __init__(self, entries: int = 8) -> None:
        self._limit = entries
        self._entries: OrderedDict[tuple[int, ...], SharedPrefix] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def match(self, prompt: Sequence[int]) -> tuple[SharedPrefix, int] | None:
        """Return the entry that covers most of a prompt, and how many tokens may be reused.

        The last token of a prompt is never reused (its hidden state is needed), nor the last token
        of the match: the head pairs every feature with the token after it, which may differ.
        """
        best: tuple[SharedPrefix, int] | None = None
        for entry in self._entries.values():
            usable = min(common_length(entry.tokens, prompt), len(prompt) - 1) - 1
            if usable >= MIN_SHARED_TOKENS and (best is None or usable > best[1]):
                best = (entry, usable)
        if best is not None:
            self._entries.move_to_end(best[0].tokens)
        return best

    def worth_sharing(self, prompt: Sequence[int], others: Iterable[Sequence[int]]) -> int:
        """Return how many tokens of a prompt to keep for others, 0 if nothing is gained."""
        shared = max((common_length(prompt, other) for other in others), default=0)
        known = self.match(prompt)
        gain = shared - (known[1] + 1 if known else 0)
        return shared if gain >= MIN_SHARED_TOKENS else 0

    def put(self, prefix: SharedPrefix) -> None:
        """Keep a prefix and drop the least recently used one beyond the limit."""
        self._entries[prefix.tokens] = prefix
        self._entries.move_to_end(prefix.tokens)
        if len(self._entries) > self._limit:
            self._entries.popitem(last=False)


def common_length(a: Sequence[int], b: Sequence[int]) -> int:
    """Return how many leading tokens two sequences share."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))
