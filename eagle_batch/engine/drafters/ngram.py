"""Drafting by looking back: what followed the last time these tokens stood here?

Prompt lookup needs no head and no weights. It pays where an answer repeats its prompt or itself:
code, extraction, rewriting. The search is one comparison over the row's own tokens, on the device.

Shape legend: S slots, B rows, A places of an accepted path, C token capacity, D depth.
"""

from __future__ import annotations

import torch
from torch import Tensor

from eagle_batch.engine.controller import Shape
from eagle_batch.engine.drafters.base import CommittedChain, DraftState
from eagle_batch.engine.tree import DraftTree, build_tree, in_given_order, marked, root_tree
from eagle_batch.models.quick import kernels_take

#: Tokens that must agree for what followed to be worth its verification, and drafted tokens for
#: each of them at most: after two, one in two first guesses is right; after twelve, one in two
#: sixteenth ones (greedy answers of the demo target, MT-bench, GSM8K and HumanEval).
_LEAST_MATCH, _PER_MATCH = 2, 2
#: Fitted to the same statistics: at a price of 0.22 a token that agrees is worth about 1.6 drafted
#: ones, at 0.37 0.9, at 0.57 0.5, for that is where guesses are right as often as the price.
_PRICED, _DISCOUNT = 0.4, 0.2
#: Tokens that are compared at least.
_LONGEST = 8


def worth(length_B: Tensor, most: int, price: float = 0.0) -> Tensor:
    """Return how many tokens of a draft of `most` each row's match is worth, int64 `[B]`.

    price: chance below which a guess is worth nothing; see `DraftState`.
    """
    per_match = min(_PER_MATCH, _PRICED / price - _DISCOUNT) if price > 0 else _PER_MATCH
    drafted_B = (length_B * per_match).long().clamp(0, most)
    return drafted_B.masked_fill(length_B < _LEAST_MATCH, 0)


class NgramDrafter:
    """Proposes a chain: the continuation of the latest place with the longest matching suffix."""

    aux_layers: tuple[int, ...] = ()
    width = 1
    branch = 0
    late = True  # it does no more than put tokens down

    def __init__(
        self,
        *,
        slots: int,
        capacity: int,
        depth: int,
        device: torch.device,
        longest: int | None = None,
    ) -> None:
        """Allocate the slots; longest: tokens that are compared, enough for the depth if None."""
        self.depth = self.nodes = depth
        longest = max(_LONGEST, -(-depth // _PER_MATCH)) if longest is None else longest
        self._longest = longest
        #: Tokens by position; position p of a row is column p + longest, the margin before is -1.
        self.tokens_SC = torch.full(
            (slots, longest + capacity + depth + 2), -1, dtype=torch.int64, device=device
        )

    def extend(self, chain: CommittedChain, features_BAF: Tensor, tokens_BA: Tensor) -> None:
        """Write down the committed tokens; the features are of no use here."""
        del features_BAF
        B, A = tokens_BA.shape
        columns_BA = chain.start_B[:, None] + torch.arange(A, device=tokens_BA.device)
        columns_BA = (columns_BA + 1 + self._longest).clamp(max=self.tokens_SC.shape[1] - 1)
        # Padding lands behind the row's last token and is overwritten before it is ever looked at.
        self.tokens_SC[chain.first_row : chain.first_row + B].scatter_(1, columns_BA, tokens_BA)

    def prepare(self, state: DraftState) -> None:
        """Do nothing: nothing is put off."""

    def draft(self, state: DraftState) -> DraftTree:
        """Return what followed the best earlier matches; nonsense where there are none.

        Where the host may look, no more of it than is worth its verification.
        """
        drafted_BD, _ = self.branches(state)
        depth = drafted_BD.shape[1]
        if depth == 0:
            return root_tree(state.root_B)
        parents_BD = torch.arange(depth, device=drafted_BD.device).expand_as(drafted_BD)
        tree = build_tree(state.root_B, in_given_order(drafted_BD, parents_BD), depth)
        return marked(tree) if state.ragged else tree

    def branches(self, state: DraftState) -> tuple[Tensor, bool]:
        """Return the tokens that `draft` makes chains of, `[B, D]`; -1 behind what a row uses.

        And whether little better can be drafted: every row agrees in all tokens that are compared,
        after eight of which 93 of a hundred first guesses are right (see `_LEAST_MATCH`).
        """
        drafted_BD, length_B = self.look_back(state)
        if not state.params.host_looks:
            return drafted_BD, False
        worth_B = worth(length_B, self.depth, state.price)
        drafted_BD = drafted_BD[:, : int(worth_B.max())]
        if not state.ragged:
            return drafted_BD, False
        unused_BD = torch.arange(drafted_BD.shape[1]) >= worth_B[:, None]
        return drafted_BD.masked_fill(unused_BD, -1), int(length_B.min()) >= self._longest

    def look_back(self, state: DraftState) -> tuple[Tensor, Tensor]:
        """Return what followed the longest, then latest, match, and its length: `[B, D]`, `[B]`.

        What goes beyond the row's last token begins again: such a text goes round in a circle.
        """
        B = state.root_B.shape[0]
        rows_BC = self.tokens_SC[state.first_row : state.first_row + B]
        last_B = state.length_B + self._longest
        if kernels_take(rows_BC, last_B):
            from eagle_batch.engine import kernels

            drafted_BD = torch.empty((B, self.depth), dtype=torch.int64)
            length_B = torch.empty_like(last_B)
            arrays = [each.numpy() for each in (rows_BC, last_B, drafted_BD, length_B)]
            kernels.look_back(*arrays[:2], self._longest, *arrays[2:])
            return drafted_BD, length_B
        columns_C = torch.arange(rows_BC.shape[1], device=rows_BC.device)
        length_BC = self._match_lengths(rows_BC, last_B[:, None])
        score_BC = length_BC * rows_BC.shape[1] + columns_C
        score_BC = score_BC.masked_fill(columns_C >= last_B[:, None], -1)
        best_B1 = score_BC.argmax(1, keepdim=True)
        beyond_B1 = last_B[:, None] - best_B1
        places_BD = best_B1 + 1 + torch.arange(self.depth, device=rows_BC.device) % beyond_B1
        drafted_BD = rows_BC.gather(1, places_BD.clamp(max=rows_BC.shape[1] - 1))
        return drafted_BD.clamp(min=0), length_BC.gather(1, best_B1)[:, 0]

    def use(self, shape: Shape) -> None:
        """Draft a chain of another length from the next round on."""
        self.depth = self.nodes = shape.depth

    def swap_rows(self, a: int, b: int, length: int) -> None:
        """Exchange two rows' tokens."""
        del length
        self.tokens_SC[[a, b]] = self.tokens_SC[[b, a]]

    def snapshot(self, row: int, length: int) -> tuple[Tensor, ...]:
        """Return the tokens at positions 1 to `length` of a row, `[1, length]`."""
        first = self._longest + 1
        return (self.tokens_SC[row : row + 1, first : first + length].clone(),)

    def restore(self, row: int, columns: tuple[Tensor, ...]) -> None:
        """Put tokens from `snapshot`, or the first of them, at the start of a row."""
        first = self._longest + 1
        (tokens,) = columns
        self.tokens_SC[row, first : first + tokens.shape[1]] = tokens[0]

    def _match_lengths(self, rows_BC: Tensor, last_B1: Tensor) -> Tensor:
        """Return how many tokens that end at each column equal the row's last ones, int64."""
        lengths_BC = torch.zeros_like(rows_BC)
        matches_BC = torch.ones_like(rows_BC, dtype=torch.bool)
        for back in range(self._longest):
            wanted_B1 = rows_BC.gather(1, last_B1 - back)
            matches_BC = matches_BC & (rows_BC.roll(back, 1) == wanted_B1) & (wanted_B1 >= 0)
            lengths_BC += matches_BC
        return lengths_BC
