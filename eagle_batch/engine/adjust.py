"""Everything that changes logits before a choice, in one order, for every place of a batch.

Penalties and biases, then bad words, then the grammar. The same adjustments apply at the root of a
tree, at each drafted node with the history of its path, and in a prefill.

Shape legend: B rows, N nodes with the root, A places of an accepted path, V vocabulary.
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any

from torch import Tensor

from eagle_batch.engine.bad_words import BadWords, word_tokens
from eagle_batch.engine.grammars import Grammars
from eagle_batch.engine.guides import Guides
from eagle_batch.engine.history import TokenHistory
from eagle_batch.engine.request import SamplingParams
from eagle_batch.engine.sampling import RowParams
from eagle_batch.engine.slots import Row, Slots
from eagle_batch.engine.tree import DraftTree
from eagle_batch.models.target import Target

#: Lists of bad words whose tokens are remembered.
_KNOWN_LISTS = 256


class Adjustments:
    """Owns what the rows in slots said and may say."""

    def __init__(self, target: Target, tokenizer: Any, slots: Slots) -> None:
        vocab = target.shape.vocab
        self._history = TokenHistory(slots.count, vocab, target.device)
        self._bad_words = BadWords(slots.count, target.device)
        self._grammars = Grammars(tokenizer, vocab, target.eos_token_ids)
        self._words = lru_cache(_KNOWN_LISTS)(partial(word_tokens, tokenizer))
        #: Grammars of the active rows.
        self.guides = Guides(slots)

    def check(self, params: SamplingParams) -> None:
        """Compile what a row will need; raises ConfigError where that cannot be done."""
        if params.structured is not None:
            self._grammars.guide(params.structured)
        self._words(params.bad_words)

    def set_row(self, slot: int, row: Row) -> None:
        """Begin a row that passed `check`."""
        params = row.request.params
        self._history.set_row(slot, row.request)
        self._bad_words.set_row(slot, self._words(params.bad_words))
        if params.structured is not None:
            row.guide = self._grammars.guide(params.structured)

    def add(self, first_row: int, tokens_BA: Tensor, count_B: Tensor) -> None:
        """Take in the first `count` generated tokens of each row."""
        self._history.add(first_row, tokens_BA, count_B)
        self._bad_words.add(first_row, tokens_BA, count_B)

    def move_row(self, source: int, target: int) -> None:
        """Copy what is known of a row to another slot; its grammar moves with the row itself."""
        self._history.move_row(source, target)
        self._bad_words.move_row(source, target)

    def adjust(
        self, logits_BNV: Tensor, first_row: int, tree: DraftTree | None, params: RowParams
    ) -> Tensor:
        """Return the logits to choose from; the very tensor where no row asks for anything."""
        logits_BNV = self._history.adjust(logits_BNV, first_row, tree, params)
        if params.bad_words:
            logits_BNV = self._bad_words.mask(logits_BNV, first_row, tree)
        return self.guides.mask(logits_BNV, first_row, tree)
