"""Draft trees of a batch: which nodes, whose children, who sees whom.

All rows of a round share one padded shape. Node 0 is the root: the last committed token, whose keys
are not in the cache yet. Nodes come in level order, so every parent precedes its children.

Shape legend: B rows, N nodes with the root, K width, R candidate records, D depth.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eagle_batch.models.quick import kernels_take


@dataclass(frozen=True, slots=True)
class DraftTree:
    """One draft tree for each row, root included."""

    #: int64 [B, N]; column 0 is the root token.
    tokens_BN: Tensor
    #: int64 [B, N]; index of each node's parent, 0 for the root itself.
    parents_BN: Tensor
    #: bool [B, N, N]; who is on the path from the root to a node, the node included.
    ancestors_BNN: Tensor
    #: int64 [B, N]; edges to the root.
    depth_BN: Tensor
    #: int64 [B, N]; place of a node in the order in which smaller trees would take it, from 1 on.
    order_BN: Tensor
    #: int64 [B, N]; place of a node among its siblings, 0 for the likeliest.
    rank_BN: Tensor
    #: Greatest depth of any node, known on the host.
    depth: int
    #: bool [B, N], on the host; the root, and the drafted nodes that are worth their verification.
    #: The others carry -1, which no target chooses. None: all are used.
    used_BN: Tensor | None = None

    @property
    def depths(self) -> list[int]:
        """How deep each row's draft is."""
        if self.used_BN is None:
            return [self.depth] * self.tokens_BN.shape[0]
        deepest_B = self.depth_BN.masked_fill(~self.used_BN, 0).amax(1)
        return deepest_B.tolist()


@dataclass(frozen=True, slots=True)
class Candidates:
    """Everything that a drafter considered, in level order; record r is at column r."""

    tokens_BR: Tensor
    #: Sum of the log-confidences from the root, float32.
    scores_BR: Tensor
    #: Record of the parent, -1 for the children of the root.
    parents_BR: Tensor


def root_tree(root_B: Tensor) -> DraftTree:
    """Return the tree without drafts: plain decoding."""
    tokens_BN = root_B[:, None]
    zeros = torch.zeros_like(tokens_BN)
    return DraftTree(
        tokens_BN,
        zeros,
        torch.ones_like(tokens_BN, dtype=torch.bool)[..., None],
        zeros,
        zeros,
        zeros,
        0,
    )


@dataclass(frozen=True, slots=True)
class Selection:
    """The drafted nodes of a tree in level order, M of them; see `DraftTree` for the fields."""

    tokens_BM: Tensor
    #: Node indices, where 0 is the root.
    parents_BM: Tensor
    order_BM: Tensor
    rank_BM: Tensor


def in_given_order(tokens_BM: Tensor, parents_BM: Tensor) -> Selection:
    """Return nodes that nobody ranked: a smaller tree would take the first of them."""
    order_BM = torch.arange(1, tokens_BM.shape[1] + 1, device=tokens_BM.device)
    return Selection(
        tokens_BM, parents_BM, order_BM.expand_as(tokens_BM), torch.zeros_like(tokens_BM)
    )


def build_tree(root_B: Tensor, nodes: Selection, depth: int) -> DraftTree:
    """Put the root before drafted nodes."""

    def rooted(values_BM: Tensor, root_B: Tensor) -> Tensor:
        return torch.cat((root_B[:, None], values_BM), dim=1)

    zero_B = torch.zeros_like(root_B)
    parents_BN = rooted(nodes.parents_BM, zero_B)
    ancestors_BNN = ancestor_mask(parents_BN, depth)
    return DraftTree(
        tokens_BN=rooted(nodes.tokens_BM, root_B),
        parents_BN=parents_BN,
        ancestors_BNN=ancestors_BNN,
        depth_BN=ancestors_BNN.sum(-1) - 1,
        order_BN=rooted(nodes.order_BM, zero_B),
        rank_BN=rooted(nodes.rank_BM, zero_B),
        depth=depth,
    )


def marked(tree: DraftTree) -> DraftTree:
    """Return a tree that knows which of its nodes are used: those that carry a token."""
    used_BN = tree.tokens_BN >= 0
    return tree if used_BN.all() else replace(tree, used_BN=used_BN)


def plant(
    root_B: Tensor,
    candidates: Candidates,
    count: int,
    width: int,
    depth: int,
    least: float = -inf,
) -> DraftTree:
    """Return the tree of the best `count` candidates; see `select_nodes` and `build_tree`.

    least: score below which nodes carry -1.
    """
    records = (candidates.tokens_BR, candidates.scores_BR, candidates.parents_BR)
    if not kernels_take(root_B, *records):
        return build_tree(root_B, select_nodes(candidates, count, width, least), depth)
    from eagle_batch.engine import kernels

    tree = unfilled_tree(root_B.shape[0], count + 1, depth)
    kernels.plant(
        tuple(record.numpy() for record in records),
        root_B.numpy(),
        width,
        np.float32(least),
        *tree_arrays(tree),
    )
    return tree


def unfilled_tree(rows: int, nodes: int, depth: int) -> DraftTree:
    """Return trees on the CPU whose fields a kernel is going to write."""
    tokens, parents, depths, orders, ranks = torch.empty((5, rows, nodes), dtype=torch.int64)
    ancestors_BNN = torch.empty((rows, nodes, nodes), dtype=torch.bool)
    return DraftTree(tokens, parents, ancestors_BNN, depths, orders, ranks, depth)


def tree_arrays(tree: DraftTree) -> tuple[tuple[Any, ...], Any]:
    """Return what kernels take as `tree_F`, tokens, parents, depths, orders, ranks; and ancestors.

    The arrays are the tree's own memory where that is in plain order.
    """
    fields = (tree.tokens_BN, tree.parents_BN, tree.depth_BN, tree.order_BN, tree.rank_BN)
    arrays = tuple(field.contiguous().numpy() for field in fields)
    return arrays, tree.ancestors_BNN.contiguous().numpy()


def ancestor_mask(parents_BN: Tensor, depth: int) -> Tensor:
    """Return who is an ancestor-or-self of whom, bool `[B, N, N]`, by walking parents up."""
    B, N = parents_BN.shape
    current_BN = torch.arange(N, device=parents_BN.device).expand(B, N)
    mask_BNN = torch.zeros((B, N, N), dtype=torch.bool, device=parents_BN.device)
    for _ in range(depth + 1):
        mask_BNN.scatter_(2, current_BN[..., None], True)
        current_BN = parents_BN.gather(1, current_BN)
    return mask_BNN


def select_nodes(candidates: Candidates, count: int, width: int, least: float = -inf) -> Selection:
    """Return the best `count` candidates, as EAGLE-2 reranks them.

    A child never scores above its parent; ties and NaN are settled by record order, so a chosen
    node's parent is always chosen too. width: children of a node, which lie side by side in falling
    order among the records. least: see `plant`.
    """
    scores_BR = candidates.scores_BR.nan_to_num(nan=-torch.inf)
    best_BM = scores_BR.sort(dim=1, descending=True, stable=True).indices[:, :count]
    chosen_BM, order_BM = best_BM.sort(dim=1)
    node_of_record = torch.zeros_like(candidates.parents_BR)
    nodes_BM = torch.arange(1, count + 1, device=chosen_BM.device).expand_as(chosen_BM)
    node_of_record.scatter_(1, chosen_BM, nodes_BM)
    records_BM = candidates.parents_BR.gather(1, chosen_BM)
    parents_BM = node_of_record.gather(1, records_BM.clamp(min=0)).masked_fill(records_BM < 0, 0)
    tokens_BM = candidates.tokens_BR.gather(1, chosen_BM)
    if least > -inf:
        tokens_BM = tokens_BM.masked_fill(candidates.scores_BR.gather(1, chosen_BM) < least, -1)
    return Selection(tokens_BM, parents_BM, order_BM + 1, chosen_BM % width)
