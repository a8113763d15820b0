"""Walk a draft tree against the target: which path it accepts, which tokens come out.

The target has chosen a token at every node (its own distribution, its own noise). From the root
the walk goes to the child that carries the chosen token, as long as there is one; the token chosen
at the last node is the bonus. Nothing here knows how the tree was drafted, so nothing about the
draft but its luck can reach the output (EAGLE, arXiv 2401.15077, with the acceptance test of exact
coupling).

Shape legend: B rows, N nodes with the root, A = depth + 1 places of a path.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from eagle_batch.engine.tree import DraftTree


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one verification pass yields for each row."""

    #: int64 [B, A]; nodes of the accepted path, the root first; places behind it repeat the last
    #: node.
    path_BA: Tensor
    #: int64 [B, A]; the emitted tokens: those of the accepted nodes, then the bonus; padding
    #: behind.
    tokens_BA: Tensor
    #: int64 [B]; accepted drafted tokens, so accepted + 1 tokens are emitted.
    accepted_B: Tensor


def walk(tree: DraftTree, chosen_BN: Tensor) -> Verdict:
    """Follow the target's choices down the tree."""
    node_B = torch.zeros_like(tree.tokens_BN[:, 0])
    alive_B = torch.ones_like(node_B, dtype=torch.bool)
    accepted_B = torch.zeros_like(node_B)
    path = [node_B]
    # A root is its own parent in the table; it must not be found as its own child.
    parents_BN = tree.parents_BN.clone()
    parents_BN[:, 0] = -1
    for _ in range(tree.depth):
        wanted_B = chosen_BN.gather(1, node_B[:, None])
        match_BN = (parents_BN == node_B[:, None]) & (tree.tokens_BN == wanted_B)
        alive_B = alive_B & match_BN.any(1)
        node_B = torch.where(alive_B, match_BN.int().argmax(1), node_B)
        accepted_B = accepted_B + alive_B
        path.append(node_B)
    path_BA = torch.stack(path, dim=1)
    return Verdict(path_BA, chosen_BN.gather(1, path_BA), accepted_B)
