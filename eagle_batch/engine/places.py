"""Where the nodes of a round's trees lie among the tokens of its pass, and what was said of them.

A pass is over all nodes, row by row; or, where kernels make it, over those alone that rows use, so
that a row with a long branch costs the others nothing.

Shape legend: B rows, N nodes with the root, R tokens of the pass, A places of a path, V vocabulary,
X any width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from eagle_batch.engine.tree import DraftTree


@dataclass(frozen=True, slots=True)
class Places:
    """The token of each node, int64 `[B, N]`: those of a row are side by side.

    A node that is not used has that of the last one before it that is.
    """

    place_BN: Tensor
    #: Whether the tokens of the pass are all nodes, row by row.
    whole: bool

    def by_node(self, values_RX: Tensor) -> Tensor:
        """Return what each node was given, `[B, N, X]`; a view where the pass has all nodes."""
        if self.whole:
            return values_RX.view(*self.place_BN.shape, -1)
        return values_RX[self.place_BN]

    def along(self, values_RV: Tensor, path_BA: Tensor, tokens_BA: Tensor) -> Tensor:
        """Return the values of tokens at the nodes of a path, `[B, A]`."""
        return values_RV[self.place_BN.gather(1, path_BA), tokens_BA]


def all_nodes(tree: DraftTree) -> Places:
    """Return the places of a pass over all nodes."""
    nodes = tree.tokens_BN.numel()
    place_R = torch.arange(nodes, device=tree.tokens_BN.device)
    return Places(place_R.view_as(tree.tokens_BN), whole=True)


def used_nodes(tree: DraftTree) -> Places:
    """Return the places of a pass over the nodes that are used."""
    assert tree.used_BN is not None
    place_R = tree.used_BN.flatten().cumsum(0) - 1
    return Places(place_R.view_as(tree.tokens_BN), whole=False)
