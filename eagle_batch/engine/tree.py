"""Draft trees of a batch: which nodes, whose children, who sees whom.

All rows of a round share one padded shape. Node 0 is the root: the last committed token, whose keys
are not in the cache yet. Nodes come in level order, so every parent precedes its children.

Shape legend: B rows, N nodes with the root, K width, R candidate records, D depth.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


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
    #: Greatest depth of any node, known on the host.
    depth: int


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
        tokens_BN, zeros, torch.ones_like(tokens_BN, dtype=torch.bool)[..., None], zeros, 0
    )


def build_tree(root_B: Tensor, tokens_BM: Tensor, parents_BM: Tensor, depth: int) -> DraftTree:
    """Put the root before M drafted nodes; `parents` are node indices where 0 is the root."""
    tokens_BN = torch.cat((root_B[:, None], tokens_BM), dim=1)
    parents_BN = torch.cat((torch.zeros_like(root_B)[:, None], parents_BM), dim=1)
    ancestors_BNN = ancestor_mask(parents_BN, depth)
    depth_BN = ancestors_BNN.sum(-1) - 1
    return DraftTree(tokens_BN, parents_BN, ancestors_BNN, depth_BN, depth)


def ancestor_mask(parents_BN: Tensor, depth: int) -> Tensor:
    """Return who is an ancestor-or-self of whom, bool `[B, N, N]`, by walking parents up."""
    B, N = parents_BN.shape
    current_BN = torch.arange(N, device=parents_BN.device).expand(B, N)
    mask_BNN = torch.zeros((B, N, N), dtype=torch.bool, device=parents_BN.device)
    for _ in range(depth + 1):
        mask_BNN.scatter_(2, current_BN[..., None], True)
        current_BN = parents_BN.gather(1, current_BN)
    return mask_BNN


def select_nodes(candidates: Candidates, count: int) -> tuple[Tensor, Tensor]:
    """Return tokens and parents `[B, count]` of the best candidates, as EAGLE-2 reranks them.

    A child never scores above its parent; ties and NaN are settled by record order, so a chosen
    node's parent is always chosen too.
    """
    scores_BR = candidates.scores_BR.nan_to_num(nan=-torch.inf)
    order_BR = scores_BR.sort(dim=1, descending=True, stable=True).indices
    chosen_BM = order_BR[:, :count].sort(dim=1).values
    tokens_BM = candidates.tokens_BR.gather(1, chosen_BM)
    node_of_record = torch.zeros_like(candidates.parents_BR)
    nodes_BM = torch.arange(1, count + 1, device=chosen_BM.device).expand_as(chosen_BM)
    node_of_record.scatter_(1, chosen_BM, nodes_BM)
    records_BM = candidates.parents_BR.gather(1, chosen_BM)
    parents_BM = node_of_record.gather(1, records_BM.clamp(min=0)).masked_fill(records_BM < 0, 0)
    return tokens_BM, parents_BM
