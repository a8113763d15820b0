"""EAGLE-1 static trees: the same shape in every round, whatever the head thinks of it.

A tree is a list of paths; the path (0, 2) is the third-best child of the best child of the root.
Only the tokens differ from round to round, so parents and masks are computed once.

Shape legend: B rows, E nodes that are expanded at a level, M drafted nodes, C scratch columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from eagle_batch.engine.drafters.base import DraftState
from eagle_batch.engine.drafters.eagle import EagleDrafter
from eagle_batch.engine.tree import DraftTree, build_tree, in_given_order

Path = tuple[int, ...]

#: The tree of EAGLE-1 (25 nodes, depth 5), as its authors chose it on a 7B target.
DEFAULT_PATHS: tuple[Path, ...] = (
    *((i,) for i in range(4)),
    *((0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0), (2, 1), (3, 0)),
    *((0, 0, 0), (0, 0, 1), (0, 0, 2), (0, 1, 0), (0, 1, 1), (0, 2, 0), (0, 2, 1), (1, 0, 0)),
    *((0, 0, 0, 0), (0, 0, 0, 1), (0, 0, 0, 2)),
    *((0, 0, 0, 0, 0), (0, 0, 0, 0, 1)),
)


@dataclass(frozen=True, slots=True)
class _Level:
    """The nodes of one depth: which are expanded, and which children of those are kept."""

    #: Places of the expanded nodes within the level above; int64 [E].
    expanded: Tensor
    #: For each node of this level, its parent's place in `expanded` and its rank; int64 [nodes].
    parent: Tensor
    rank: Tensor
    #: Scratch columns that each expanded node sees; bool [E, C].
    visible: Tensor


class StaticEagleDrafter(EagleDrafter):
    """Drafts one fixed list of paths."""

    def __init__(
        self,
        head: Any,
        paths: Sequence[Path] = DEFAULT_PATHS,
        *,
        slots: int,
        capacity: int,
        late: bool = False,
    ) -> None:
        paths = check_paths(paths)
        super().__init__(
            head,
            slots=slots,
            # Every expanded node has a scratch column.
            capacity=capacity + len(paths),
            depth=max(map(len, paths)),
            width=max(max(path) for path in paths) + 1,
            nodes=len(paths),
            late=late,
        )
        self.nodes = len(paths)
        device = self.states_SH.device
        self._levels = _levels(paths, device)
        node_of = {path: i for i, path in enumerate(((), *paths))}
        self._parents_M = torch.tensor([node_of[path[:-1]] for path in paths], device=device)

    def draft(self, state: DraftState) -> DraftTree:
        """Fill the fixed tree with the head's best tokens."""
        self._follow(state)
        B = state.root_B.shape[0]
        states = self.states_SH[state.first_row : state.first_row + B, None]
        tokens = self._likeliest(states, state, 0)[1]
        level_tokens = tokens[:, 0, self._levels[0].rank]
        level_states = states.expand(-1, level_tokens.shape[1], -1)
        above = torch.zeros_like(self._levels[0].rank)
        drafted, column = [level_tokens], 0
        for depth, level in enumerate(self._levels[1:], start=1):
            states = self._expand_nodes(state, level, level_tokens, level_states, depth - 1, column)
            column += states.shape[1]
            if state.guide is not None:
                expanded = level_tokens[:, level.expanded]
                state.guide.grow(above.expand(B, -1)[:, level.expanded], expanded)
            tokens = self._likeliest(states, state, depth)[1]
            above = level.parent
            level_tokens = tokens[:, level.parent, level.rank]
            level_states = states[:, level.parent]
            drafted.append(level_tokens)
        parents = self._parents_M.expand(B, -1)
        nodes = in_given_order(torch.cat(drafted, dim=1), parents)
        return build_tree(state.root_B, nodes, self.depth)

    def _expand_nodes(
        self,
        state: DraftState,
        level: _Level,
        tokens: Tensor,
        states: Tensor,
        depth: int,
        column: int,
    ) -> Tensor:
        """Run the head over the nodes of one level that have children; return their outputs."""
        tokens_BE = tokens[:, level.expanded]
        B, E = tokens_BE.shape
        positions_BE = (state.length_B + depth)[:, None].expand(B, E)
        columns = torch.arange(column, column + E, device=tokens.device)
        step = self.cache.step(
            state.first_row,
            state.length_B[:, None] + columns,
            state.length_B,
            level.visible.expand(B, -1, -1),
            positions_BE,
            self._extent(state.longest + column + E),
        )
        return self._run(step, tokens_BE, states[:, level.expanded], positions_BE)


def check_paths(paths: Sequence[Sequence[int]]) -> tuple[Path, ...]:
    """Return paths in level order; raises ValueError where they are not one tree."""
    found = sorted({tuple(path) for path in paths}, key=lambda path: (len(path), path))
    known = {(), *found}
    orphans = [path for path in found if path[:-1] not in known]
    if not found or () in found or orphans or min(min(path, default=0) for path in found) < 0:
        raise ValueError(
            f"found {list(map(list, orphans)) or list(map(list, found))}; expected paths of ranks "
            "such as [0], [1], [0, 0], each with its beginning in the list"
        )
    return tuple(found)


def _levels(paths: Sequence[Path], device: torch.device) -> list[_Level]:
    depth = max(map(len, paths))
    by_depth = [[path for path in paths if len(path) == d] for d in range(depth + 1)]
    columns: list[Path] = []
    levels = []
    for above, nodes in pairwise(by_depth):
        inner = [path for path in (above or [()]) if any(node[:-1] == path for node in nodes)]
        if inner != [()]:
            columns += inner
        visible = [[path[: len(seen)] == seen for seen in columns] for path in inner]
        levels.append(
            _Level(
                torch.tensor([(above or [()]).index(path) for path in inner], device=device),
                torch.tensor([inner.index(node[:-1]) for node in nodes], device=device),
                torch.tensor([node[-1] for node in nodes], device=device),
                torch.tensor(visible, dtype=torch.bool, device=device),
            )
        )
    return levels
