"""Words that are never written: the token that would complete one is banned, path by path.

A word is the sequences of tokens that the tokenizer writes it with, at the start of a text and
after a space. What came before a place is the row's text and the tokens on the path to the node.

Shape legend: S slots, B rows, N nodes with the root, A places of an accepted path, W words of a
row, L tokens of the longest word, H = L - 1 tokens of history, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle_batch.engine.tree import DraftTree

#: Padding before a shorter word, which matches anything, and a token that no text has.
_ANY, _NONE = -1, -2
Words = tuple[tuple[int, ...], ...]


class BadWords:
    """Owns the words of every slot and the last tokens that each row wrote."""

    def __init__(self, slots: int, device: torch.device) -> None:
        self._device = device
        self._words_SWL = torch.full((slots, 0, 1), _ANY, dtype=torch.int64, device=device)
        self._recent_SH = torch.full((slots, 0), _NONE, dtype=torch.int64, device=device)

    def set_row(self, slot: int, words: Words) -> None:
        """Begin a row; costs nothing while no row has words."""
        self._reserve(len(words), max(map(len, words), default=1))
        if self._words_SWL.shape[1] == 0:
            return
        longest = self._words_SWL.shape[2]
        self._recent_SH[slot] = _NONE
        self._words_SWL[slot] = _ANY
        padded = [[_ANY] * (longest - len(word)) + list(word) for word in words]
        if padded:
            self._words_SWL[slot, : len(words)] = torch.tensor(padded, device=self._device)

    def add(self, first_row: int, tokens_BA: Tensor, count_B: Tensor) -> None:
        """Take in the first `count` tokens of each row."""
        H = self._recent_SH.shape[1]
        if H == 0:
            return
        rows = slice(first_row, first_row + tokens_BA.shape[0])
        text = torch.cat((self._recent_SH[rows], tokens_BA), dim=1)
        kept_BH = count_B[:, None] + torch.arange(H, device=self._device)
        self._recent_SH[rows] = text.gather(1, kept_BH)

    def move_row(self, source: int, target: int) -> None:
        """Copy a row to another slot."""
        self._words_SWL[target] = self._words_SWL[source]
        self._recent_SH[target] = self._recent_SH[source]

    def mask(self, logits_BNV: Tensor, first_row: int, tree: DraftTree | None) -> Tensor:
        """Return the logits with every token banned that would complete a word."""
        if self._words_SWL.shape[1] == 0:
            return logits_BNV
        rows = slice(first_row, first_row + logits_BNV.shape[0])
        words_BWL = self._words_SWL[rows]
        last_BW, before_BWH = words_BWL[..., -1], words_BWL[..., :-1]
        history_BNH = self._history(rows, tree)
        same = (before_BWH[:, None] == history_BNH[:, :, None]) | (before_BWH == _ANY)[:, None]
        ends_BNW = same.all(-1) & (last_BW != _ANY)[:, None]
        limit = torch.where(ends_BNW, -torch.inf, torch.inf).to(logits_BNV.dtype)
        index = last_BW.clamp(min=0)[:, None].expand_as(ends_BNW)
        return logits_BNV.scatter_reduce(2, index, limit, "amin")

    def _history(self, rows: slice, tree: DraftTree | None) -> Tensor:
        """Return the tokens before the choice at each node, oldest first, `[B, N, H]`."""
        recent_BH = self._recent_SH[rows]
        H = recent_BH.shape[1]
        if H == 0 or tree is None or tree.depth == 0:
            return recent_BH[:, None]
        node_BN = torch.arange(tree.tokens_BN.shape[1], device=self._device).expand_as(
            tree.tokens_BN
        )
        left_BN = torch.full_like(node_BN, H - 1)
        back = []
        for _ in range(H):
            at_root = node_BN == 0
            older = recent_BH.gather(1, left_BN)
            back.append(torch.where(at_root, older, tree.tokens_BN.gather(1, node_BN)))
            left_BN = (left_BN - at_root.long()).clamp(min=0)
            node_BN = tree.parents_BN.gather(1, node_BN)
        return torch.stack(back[::-1], dim=-1)

    def _reserve(self, words: int, longest: int) -> None:
        """Make room for more or longer words than any row had so far."""
        more = max(0, words - self._words_SWL.shape[1])
        longer = max(0, longest - self._words_SWL.shape[2])
        if more or longer:
            self._words_SWL = F.pad(self._words_SWL, (longer, 0, 0, more), value=_ANY)
            self._recent_SH = F.pad(self._recent_SH, (longer, 0), value=_NONE)


def word_tokens(tokenizer: Any, words: Sequence[str]) -> Words:
    """Return the token sequences of words, at the start of a text and after a space."""
    texts = [text for word in words for text in (word, " " + word.lstrip())]
    found = [tuple(tokenizer.encode(text, add_special_tokens=False)) for text in texts]
    return tuple(dict.fromkeys(ids for ids in found if ids))
