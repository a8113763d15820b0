"""What each row has said so far, as far as penalties and biases need to know.

Penalties depend on the tokens before a place. At a node of a draft tree these are the row's tokens
and the tokens on the path to the node, so that every path has its own history and the accepted
text is the text of plain decoding. Nothing is allocated until a row asks for it.

Shape legend: S slots, B rows, N nodes with the root, A places of a path, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from eagle_batch.engine.request import Request
from eagle_batch.engine.sampling import RowParams
from eagle_batch.engine.tree import DraftTree


@dataclass(slots=True)
class _Tables:
    """Device tables of all slots."""

    #: int32 [S, V]; how often each token was generated.
    counts_SV: Tensor
    #: bool [S, V]; whether each token stands in the prompt.
    prompted_SV: Tensor
    #: float32 [S, V]; what is added to the logits, -inf for a banned token.
    bias_SV: Tensor


class TokenHistory:
    """Owns the token counts of all rows and changes logits by them."""

    def __init__(self, slots: int, vocab: int, device: torch.device) -> None:
        self._sizes = (slots, vocab)
        self._device = device
        self._tables: _Tables | None = None

    def set_row(self, slot: int, request: Request) -> None:
        """Begin a row's history with its prompt; costs nothing unless its sampling asks for it."""
        params = request.params
        if not (params.penalised or params.logit_bias):
            return
        tables = self._allocated()
        tables.counts_SV[slot] = 0
        tables.prompted_SV[slot] = False
        tables.prompted_SV[slot, self._ids(request.prompt_ids)] = True
        tables.bias_SV[slot] = 0.0
        if params.logit_bias:
            ids, values = zip(*params.logit_bias, strict=True)
            tables.bias_SV[slot, self._ids(ids)] = torch.tensor(values, device=self._device)

    def add(self, first_row: int, tokens_BA: Tensor, count_B: Tensor) -> None:
        """Count the first `count` tokens of each row as generated."""
        if self._tables is None:
            return
        real_BA = torch.arange(tokens_BA.shape[1], device=self._device) < count_B[:, None]
        rows = self._tables.counts_SV[first_row : first_row + tokens_BA.shape[0]]
        rows.scatter_add_(1, tokens_BA, real_BA.int())

    def move_row(self, source: int, target: int) -> None:
        """Copy a row's history to another slot."""
        if self._tables is None:
            return
        for table in (self._tables.counts_SV, self._tables.prompted_SV, self._tables.bias_SV):
            table[target] = table[source]

    def adjust(
        self, logits_BNV: Tensor, first_row: int, tree: DraftTree | None, params: RowParams
    ) -> Tensor:
        """Return the logits after penalties, then biases; the very tensor where no row has any.

        Repetition divides positive and multiplies negative logits of tokens in prompt or text;
        then frequency and presence are subtracted for tokens of the text, as vLLM and OpenAI
        define them.
        """
        if self._tables is None or not params.history:
            return logits_BNV
        rows = slice(first_row, first_row + logits_BNV.shape[0])
        counts_BNV = self._path_counts(rows, tree)
        said_BNV = counts_BNV > 0
        seen_BNV = said_BNV | self._tables.prompted_SV[rows, None]
        logits = logits_BNV.float()
        repetition = params.repetition_B[:, None, None]
        repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
        logits = torch.where(seen_BNV, repeated, logits)
        logits = logits - params.frequency_B[:, None, None] * counts_BNV
        logits = logits - params.presence_B[:, None, None] * said_BNV
        return torch.where(
            params.history_B[:, None, None], logits + self._tables.bias_SV[rows, None], logits_BNV
        )

    def _path_counts(self, rows: slice, tree: DraftTree | None) -> Tensor:
        """Return how often each token was said before each node chooses, int32 `[B, N, V]`."""
        assert self._tables is not None
        counts_BNV = self._tables.counts_SV[rows, None]
        if tree is None or tree.depth == 0:
            return counts_BNV
        B, N = tree.tokens_BN.shape
        # The root is counted already: it was committed with the last round.
        drafted_BNM = tree.tokens_BN[:, None, 1:].expand(B, N, N - 1)
        on_path_BNM = tree.ancestors_BNN[:, :, 1:].int()
        counts_BNV = counts_BNV.repeat(1, N, 1)
        return counts_BNV.scatter_add_(2, drafted_BNM, on_path_BNM)

    def _allocated(self) -> _Tables:
        if self._tables is None:
            self._tables = _Tables(
                torch.zeros(self._sizes, dtype=torch.int32, device=self._device),
                torch.zeros(self._sizes, dtype=torch.bool, device=self._device),
                torch.zeros(self._sizes, dtype=torch.float32, device=self._device),
            )
        return self._tables

    def _ids(self, ids: tuple[int, ...]) -> Tensor:
        return torch.tensor(ids, dtype=torch.int64, device=self._device)
