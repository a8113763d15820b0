"""Walk a draft tree against the target: which path it accepts, which tokens come out.

The target has chosen a token at every node (its own distribution, its own noise). From the root
the walk goes to the child that carries the chosen token, as long as there is one; the token chosen
at the last node is the bonus. Nothing here knows how the tree was drafted, so nothing about the
draft but its luck can reach the output (EAGLE, arXiv 2401.15077, with the acceptance test of exact
coupling).

Shape legend: B rows, N nodes with the root, A = depth + 1 places of a path.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from eagle_batch.engine.tree import DraftTree
from eagle_batch.models.quick import kernels_take


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
    if kernels_take(tree.tokens_BN, tree.parents_BN, chosen_BN):
        return _follow(tree, chosen_BN)
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


def _follow(tree: DraftTree, chosen_BN: Tensor) -> Verdict:
    from eagle_batch.engine import kernels

    places = (chosen_BN.shape[0], tree.depth + 1)
    verdict = Verdict(
        torch.empty(places, dtype=torch.int64),
        torch.empty(places, dtype=torch.int64),
        torch.empty(places[0], dtype=torch.int64),
    )
    kernels.follow(
        tree.parents_BN.numpy(),
        tree.tokens_BN.numpy(),
        chosen_BN.numpy(),
        verdict.path_BA.numpy(),
        verdict.tokens_BA.numpy(),
        verdict.accepted_B.numpy(),
    )
    return verdict


def walk_stepwise(tree: DraftTree, choose_at: Callable[[Tensor, Tensor, int], Tensor]) -> Verdict:
    """Follow the target's choices, asking for a choice only where the walk arrives.

    The same verdict as `walk`. It asks the host after every level whether any row goes on, which is
    free on the CPU, and there a choice under noise costs more than a level.

    choose_at(rows_R, nodes_R, depth) -> tokens_R: the choices of some rows at their nodes.
    """
    B = tree.tokens_BN.shape[0]
    rows_R = torch.arange(B, device=tree.tokens_BN.device)
    node_B = torch.zeros_like(rows_R)
    accepted_B = torch.zeros_like(rows_R)
    path_BA = torch.zeros((B, tree.depth + 1), dtype=torch.int64, device=rows_R.device)
    tokens_BA = torch.zeros_like(path_BA)
    parents_BN = tree.parents_BN.clone()
    parents_BN[:, 0] = -1
    for depth in range(tree.depth + 1):
        chosen_R = choose_at(rows_R, node_B[rows_R], depth)
        # Places behind the end repeat the last node and its choice.
        path_BA[rows_R, depth:] = node_B[rows_R, None]
        tokens_BA[rows_R, depth:] = chosen_R[:, None]
        match_RN = (parents_BN[rows_R] == node_B[rows_R, None]) & (
            tree.tokens_BN[rows_R] == chosen_R[:, None]
        )
        found_R = match_RN.any(1)
        rows_R = rows_R[found_R]
        if rows_R.numel() == 0:
            break
        node_B[rows_R] = match_RN[found_R].int().argmax(1)
        accepted_B[rows_R] += 1
    return Verdict(path_BA, tokens_BA, accepted_B)
