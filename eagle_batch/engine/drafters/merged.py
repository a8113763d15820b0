"""A tree with an n-gram branch: what a model drafts, and what followed the same tokens before.

Where a text repeats its prompt or itself, what followed the earlier place is a nearly free draft,
which no narrow tree holds for certain. It hangs on the deepest node of the tree that it agrees
with, so that the walk finds the longer of the two.

Shape legend: B rows, N nodes of the tree with the root, D nodes of the branch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from eagle_batch.engine.controller import Shape
from eagle_batch.engine.drafters.base import CommittedChain, DraftState
from eagle_batch.engine.drafters.eagle import EagleDrafter
from eagle_batch.engine.drafters.growing import GrowingDrafter
from eagle_batch.engine.drafters.ngram import NgramDrafter
from eagle_batch.engine.tree import (
    DraftTree,
    Selection,
    build_tree,
    marked,
    root_tree,
    tree_arrays,
    unfilled_tree,
)
from eagle_batch.models.heads import Head
from eagle_batch.models.quick import kernels_take


class MergedDrafter:
    """Drafts with a model and with n-grams; either may be left out of a round."""

    def __init__(self, model: GrowingDrafter, ngram: NgramDrafter) -> None:
        self.aux_layers = model.aux_layers
        self.nodes, self.depth, self.width = model.nodes, model.depth, model.width
        self.branch = ngram.depth
        self.late = model.late and ngram.late
        self._model = model
        self._ngram = ngram

    def take(self, head: Head) -> bool:
        """Let the model draft with another head; see `EagleDrafter.take`."""
        return isinstance(self._model, EagleDrafter) and self._model.take(head)

    def use(self, shape: Shape) -> None:
        """Draft in another shape from the next round on; no nodes leaves the branch alone."""
        self.depth, self.width, self.nodes = shape.depth, shape.width, shape.nodes
        self.branch = shape.branch
        if shape.nodes:
            self._model.use(shape)
        if shape.branch:
            self._ngram.use(Shape(shape.branch, 1, shape.branch))

    def extend(self, chain: CommittedChain, features_BAF: Tensor, tokens_BA: Tensor) -> None:
        """Take in committed tokens; both follow every row, whatever drafts in this round."""
        self._model.extend(chain, features_BAF, tokens_BA)
        self._ngram.extend(chain, features_BAF, tokens_BA)

    def prepare(self, state: DraftState) -> None:
        """Let the model work off what it put off, if it is to draft."""
        if self.nodes:
            self._model.prepare(state)

    def draft(self, state: DraftState) -> DraftTree:
        """Return the model's tree with the branch behind its nodes."""
        if not self.branch:
            return self._tree(state)
        branch_BD, sure = self._ngram.branches(state)
        # What the model says there is seldom worth its time: what it missed it reads later, many
        # tokens in one pass.
        tree = self._tree(state) if not sure else root_tree(state.root_B)
        if branch_BD.shape[1] == 0:
            return tree
        merged = merge(tree, branch_BD, self.nodes + 1)
        return marked(merged) if state.ragged else merged

    def _tree(self, state: DraftState) -> DraftTree:
        return self._model.draft(state) if self.nodes else root_tree(state.root_B)

    def swap_rows(self, a: int, b: int, length: int) -> None:
        """Exchange what is known of two rows."""
        self._model.swap_rows(a, b, length)
        self._ngram.swap_rows(a, b, length)

    def snapshot(self, row: int, length: int) -> tuple[Tensor, ...]:
        """Return what both know of the first `length` positions of a row."""
        return (*self._model.snapshot(row, length), *self._ngram.snapshot(row, length))

    def restore(self, row: int, columns: tuple[Tensor, ...]) -> None:
        """Put a snapshot at the start of a row."""
        self._model.restore(row, columns[:-1])
        self._ngram.restore(row, columns[-1:])


def merge(tree: DraftTree, branch_BD: Tensor, behind: int | None = None) -> DraftTree:
    """Hang a chain of tokens on a tree, from the deepest node down that carries them.

    behind: the order that its nodes come behind, that of the last node of the tree if None.

    A token of the chain that the tree has already becomes a sibling without children, which no walk
    goes to: the earlier node is found first. So every row keeps the same number of nodes.
    """
    (B, N), D = tree.tokens_BN.shape, branch_BD.shape[1]
    depth = max(tree.depth, D)
    behind = N if behind is None else behind
    if kernels_take(tree.tokens_BN, tree.parents_BN, branch_BD):
        return _merge_compiled(tree, branch_BD, depth, behind)
    node_B = torch.zeros_like(tree.tokens_BN[:, 0])
    own_BN = tree.parents_BN.clone()
    own_BN[:, 0] = -1
    parents = [tree.parents_BN[:, 1:]]
    for place in range(D):
        parents.append(node_B[:, None])
        same_BN = (own_BN == node_B[:, None]) & (tree.tokens_BN == branch_BD[:, place, None])
        known_B = same_BN.any(1)
        node_B = torch.where(known_B, same_BN.int().argmax(1), N + place)
    # Behind all nodes of the tree: without the branch, none of these is there.
    order_BD = torch.arange(behind + 1, behind + D + 1, device=branch_BD.device).expand(B, D)
    nodes = Selection(
        torch.cat((tree.tokens_BN[:, 1:], branch_BD), dim=1),
        torch.cat(parents, dim=1),
        torch.cat((tree.order_BN[:, 1:], order_BD), dim=1),
        torch.cat((tree.rank_BN[:, 1:], torch.zeros_like(branch_BD)), dim=1),
    )
    return build_tree(tree.tokens_BN[:, 0], nodes, depth)


def _merge_compiled(tree: DraftTree, branch_BD: Tensor, depth: int, behind: int) -> DraftTree:
    from eagle_batch.engine import kernels

    B, N = tree.tokens_BN.shape
    merged = unfilled_tree(B, N + branch_BD.shape[1], depth)
    chain = branch_BD.contiguous().numpy()
    kernels.merge(*tree_arrays(tree), chain, behind, *tree_arrays(merged))
    return merged
