"""The protocol between the engine and whatever proposes tokens.

Shape legend: B rows, A places of an accepted path, F feature width of the target.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, log
from typing import Protocol

from torch import Tensor

from eagle_batch.engine.controller import Shape
from eagle_batch.engine.guides import DraftGuide
from eagle_batch.engine.sampling import RowParams
from eagle_batch.engine.tree import DraftTree


@dataclass(frozen=True, slots=True)
class DraftState:
    """Where the rows of a round stand; all tensors on the device."""

    first_row: int
    #: Last committed token of each row, whose keys are not in the target's cache yet. int64 [B].
    root_B: Tensor
    #: Committed tokens that have target features. int64 [B].
    length_B: Tensor
    #: Index of the generated token that comes after the root. int64 [B].
    index_B: Tensor
    params: RowParams
    #: Greatest committed length of any row, known on the host.
    longest: int
    #: Grammars of the rows, which rule out candidates; None where no row has one.
    guide: DraftGuide | None = None
    #: What the verification of one more node costs, in tokens of the batch: a node that is accepted
    #: less often is not worth it. 0 keeps all.
    price: float = 0.0

    @property
    def least(self) -> float:
        """Log-chance below which nodes are left out."""
        return log(self.price) if self.ragged and self.price > 0 else -inf

    @property
    def ragged(self) -> bool:
        """Whether rows may draft different numbers of nodes: where the host sees to each row.

        Nothing may look at the tokens of nodes that are not used.
        """
        params = self.params
        looks = params.host_looks and params.unadjusted and self.guide is None
        return looks and params.logprobs is None


@dataclass(frozen=True, slots=True)
class CommittedChain:
    """Where committed tokens of a batch of rows lie."""

    first_row: int
    #: Position of the first feature of each row. int64 [B].
    start_B: Tensor
    #: Place from which each row drafts next; the places behind it are padding. int64 [B].
    last_B: Tensor
    #: Greatest start of any row, known on the host.
    longest: int
    #: Rows whose `last` is in this call; a chunk of a longer prompt has none yet. None: all. bool
    #: [B].
    ends_B: Tensor | None = None
    #: At the begin of prompts, the token at `start` of each row, which no call has brought. int64
    #: [B].
    before_B: Tensor | None = None


class Drafter(Protocol):
    """Proposes a tree for every row and follows what the target accepted.

    A drafter cannot change the output, only how many target passes it takes.
    """

    #: Target features it wants: boundaries of decoder layers; () is the last hidden state.
    aux_layers: tuple[int, ...]
    #: Drafted nodes of one tree (the root excluded), their greatest depth, children of a node.
    nodes: int
    depth: int
    width: int
    #: Most nodes of an n-gram branch beside the tree, each the child of the one before.
    branch: int
    #: Whether tokens are only put down until there is something to draft, which costs next to
    #: nothing where that never comes.
    late: bool

    def extend(self, chain: CommittedChain, features_BAF: Tensor, tokens_BA: Tensor) -> None:
        """Take in committed tokens with the target's true features.

        Place i of a row pairs the feature at position start + i with the token at start + i + 1.
        """
        ...

    def use(self, shape: Shape) -> None:
        """Draft in another shape from the next round on."""
        ...

    def prepare(self, state: DraftState) -> None:
        """Work off what was put off for long, before a round whose time is taken."""
        ...

    def draft(self, state: DraftState) -> DraftTree:
        """Propose one tree for each row."""
        ...

    def swap_rows(self, a: int, b: int, length: int) -> None:
        """Exchange what is known of the first `length` positions of two rows."""
        ...

    def snapshot(self, row: int, length: int) -> tuple[Tensor, ...]:
        """Return what is known of a row's first `length` positions, each `[_, length, ...]`."""
        ...

    def restore(self, row: int, columns: tuple[Tensor, ...]) -> None:
        """Put a snapshot, or the first positions of it, at the start of a row."""
        ...
