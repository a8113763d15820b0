"""Growing a tree level by level with a model that drafts, ranked under the row's own noise.

The dynamic tree keeps the likeliest nodes of a beam (EAGLE-2, arXiv 2406.16858). Since the target
will choose `argmax(logits / T + noise)` with noise that is known in advance, candidates are ranked
by the draft's logits under that same noise. What the model is, an EAGLE head or a whole small
model, is left to the drafters built on this.

Shape legend: B rows, A places, H hidden size of the drafting model, K width, V draft vocabulary, M
scratch columns, R candidate records.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from eagle_batch.engine.controller import Shape
from eagle_batch.engine.drafters.base import CommittedChain, DraftState
from eagle_batch.engine.noise import gumbel
from eagle_batch.engine.sampling import best_logits, filtered_candidates
from eagle_batch.engine.tree import Candidates, DraftTree, marked, plant
from eagle_batch.models.cache import Cache, Step
from eagle_batch.models.quick import kernels_take

#: Draft tokens of a node that are considered under noise, the likeliest by plain logits.
CANDIDATES = 64


def most_nodes(depth: int, width: int, nodes: int) -> int:
    """Return how many nodes a tree can have: no more than there are candidates."""
    return min(nodes, width + (depth - 1) * width**2)


@dataclass(frozen=True, slots=True)
class _Frontier:
    """The nodes that are expanded next."""

    tokens_BK: Tensor
    scores_BK: Tensor
    #: State that is fed back into the model for each node: its parent's output.
    states_BKH: Tensor
    #: Record number of each node.
    records_BK: Tensor
    #: Scratch columns that each node sees: its ancestors and itself, bool [B, K, M].
    visible_BKM: Tensor


class GrowingDrafter(ABC):
    """Owns the drafting model's key/value slots and the state from which each row drafts."""

    #: Target features that the model takes in; see `Drafter`.
    aux_layers: tuple[int, ...] = ()
    branch = 0
    late = False
    #: Keys of a row that the model holds beyond those of the target: 1 where it saw the root too.
    _ahead = 0

    def __init__(
        self,
        cache: Cache,
        *,
        hidden: int,
        target_ids_V: Tensor,
        depth: int,
        width: int,
        nodes: int,
    ) -> None:
        self.cache = cache
        #: Target id of each token that the model can draft.
        self._target_ids = target_ids_V
        self.width = min(width, len(target_ids_V))
        self.depth = depth
        self.nodes = most_nodes(depth, self.width, nodes)
        self._widest = self.width
        self.states_SH = torch.zeros(
            (cache.shape.slots, hidden), dtype=cache.dtype, device=cache.device
        )

    @abstractmethod
    def extend(self, chain: CommittedChain, features_BAF: Tensor, tokens_BA: Tensor) -> None:
        """Take in committed tokens; see `Drafter`."""

    def prepare(self, state: DraftState) -> None:
        """Work off what was put off: here nothing is."""
        del state

    @abstractmethod
    def _run(self, step: Step, tokens: Tensor, states: Tensor, positions: Tensor) -> Tensor:
        """Run the model over nodes of a tree; return their states `[B, K, H]`."""

    @abstractmethod
    def _logits(self, states: Tensor) -> Tensor:
        """Return the logits `[..., V]` of what follows each state."""

    def draft(self, state: DraftState) -> DraftTree:
        """Grow a tree of `depth` levels, `width` candidates a node, and keep the best `nodes`."""
        frontier = self._first_level(state)
        records = [
            Candidates(
                frontier.tokens_BK, frontier.scores_BK, torch.full_like(frontier.tokens_BK, -1)
            )
        ]
        for level in range(1, self.depth):
            states_BKH = self._expand(state, frontier, level - 1)
            candidates, frontier = self._next_level(state, frontier, states_BKH, level)
            records.append(candidates)
        everything = Candidates(
            torch.cat([r.tokens_BR for r in records], 1),
            torch.cat([r.scores_BR for r in records], 1),
            torch.cat([r.parents_BR for r in records], 1),
        )
        tree = plant(state.root_B, everything, self.nodes, self.width, self.depth, state.least)
        return marked(tree) if state.ragged else tree

    def use(self, shape: Shape) -> None:
        """Draft in this shape from the next round on; it may not exceed the one built with."""
        assert shape.depth >= 1, "plain decoding needs no drafter"
        self.depth = shape.depth
        self.width = min(shape.width, self._widest)
        self.nodes = most_nodes(shape.depth, self.width, shape.nodes)

    def swap_rows(self, a: int, b: int, length: int) -> None:
        """Exchange two rows' keys, values and drafting states."""
        self.cache.swap_rows(a, b, length + self._ahead)
        self.states_SH[[a, b]] = self.states_SH[[b, a]]

    def snapshot(self, row: int, length: int) -> tuple[Tensor, ...]:
        """Return the keys and values of the first `length` positions."""
        return self.cache.snapshot(row, length)

    def restore(self, row: int, columns: tuple[Tensor, ...]) -> None:
        """Put keys and values of a shared prefix at the start of a row."""
        self.cache.restore(row, columns)

    def _extent(self, columns: int, size: int = 32) -> int:
        """Round an extent up, so that rounds share few shapes."""
        return min(-(-columns // size) * size, self.cache.shape.capacity)

    def _keep_states(self, chain: CommittedChain, states_BAH: Tensor, last_B: Tensor) -> None:
        """Draft next from the state at each row's last place."""
        B, _, H = states_BAH.shape
        states_BH = states_BAH.gather(1, last_B[:, None, None].expand(B, 1, H))[:, 0]
        rows = slice(chain.first_row, chain.first_row + B)
        if chain.ends_B is not None:
            states_BH = torch.where(chain.ends_B[:, None], states_BH, self.states_SH[rows])
        self.states_SH[rows] = states_BH

    def _first_level(self, state: DraftState) -> _Frontier:
        B = state.root_B.shape[0]
        states_BH = self.states_SH[state.first_row : state.first_row + B]
        gains, tokens = self._likeliest(states_BH[:, None], state, 0)
        if state.guide is not None:
            state.guide.grow(torch.zeros_like(tokens[:, 0]), tokens[:, 0])
        eye = torch.eye(self.width, dtype=torch.bool, device=tokens.device)
        return _Frontier(
            tokens_BK=tokens[:, 0],
            scores_BK=gains[:, 0],
            states_BKH=states_BH[:, None].expand(B, self.width, -1),
            records_BK=torch.arange(self.width, device=tokens.device).expand(B, -1),
            visible_BKM=eye.expand(B, -1, -1),
        )

    def _expand(self, state: DraftState, frontier: _Frontier, level: int) -> Tensor:
        """Run the model over a frontier; its keys go behind those of the levels above."""
        base_B = state.length_B + self._ahead
        positions_BK = (base_B + level)[:, None].expand_as(frontier.tokens_BK)
        columns = torch.arange(
            level * self.width, (level + 1) * self.width, device=positions_BK.device
        )
        write_BK = base_B[:, None] + columns
        extent = self._extent(state.longest + self._ahead + (level + 1) * self.width)
        step = self.cache.step(
            state.first_row, write_BK, base_B, frontier.visible_BKM, positions_BK, extent
        )
        return self._run(step, frontier.tokens_BK, frontier.states_BKH, positions_BK)

    def _next_level(
        self, state: DraftState, frontier: _Frontier, states_BKH: Tensor, level: int
    ) -> tuple[Candidates, _Frontier]:
        """Score the children of a frontier and pick the best of them as the next one."""
        B, K = frontier.tokens_BK.shape
        gains_BKK, tokens_BKK = self._likeliest(states_BKH, state, level)
        beam = advance(gains_BKK, frontier.scores_BK, frontier.visible_BKM)
        parent_BK = beam.picked_BK // K
        tokens_BR = tokens_BKK.flatten(1)
        tokens_BK = tokens_BR.gather(1, beam.picked_BK)
        if state.guide is not None:
            state.guide.grow(parent_BK, tokens_BK)
        next_frontier = _Frontier(
            tokens_BK=tokens_BK,
            scores_BK=beam.best_BK,
            states_BKH=states_BKH.gather(1, parent_BK[..., None].expand_as(states_BKH)),
            records_BK=beam.picked_BK + (K + (level - 1) * K * K),
            visible_BKM=beam.visible_BKM,
        )
        parents_BR = frontier.records_BK[..., None].expand(B, K, K).flatten(1)
        return Candidates(tokens_BR, beam.scores_BR, parents_BR), next_frontier

    def _likeliest(
        self, states_BKH: Tensor, state: DraftState, level: int
    ) -> tuple[Tensor, Tensor]:
        """Return the `width` tokens that the target will most likely choose after each node.

        Log-chances and target ids, both `[B, K, width]`. With noise, the draft's perturbed logits
        are as good a guess of the target's perturbed logits as the plain ones are of the plain:
        both err by the draft's error. So the chance is a softmax of the perturbed logits, on the
        scale of the plain ones. Noise is evaluated for the likeliest candidates only.
        """
        params = state.params
        logits_BKV = self._logits(states_BKH).float()
        if state.guide is not None:
            logits_BKV = state.guide.ban(logits_BKV, self._target_ids)
        if not params.sampled:
            gains, ids, total_BK = best_logits(logits_BKV, self.width)
            gains = gains - total_BK[..., None]
            return _no_nan(gains), self._target_ids[ids]
        count = min(CANDIDATES, logits_BKV.shape[-1])
        top_BKC, ids_BKC, total_BK = best_logits(logits_BKV, count)
        tokens_BKC = self._target_ids[ids_BKC]
        places_BK = (state.index_B + level)[:, None].expand(logits_BKV.shape[:2])
        keys_BK = params.noise_key_B[:, None].expand_as(places_BK)
        noise_BKC = gumbel(keys_BK, places_BK, tokens_BKC) * params.temperature_B[:, None, None]
        kept_BKC = filtered_candidates(top_BKC, total_BK, params)
        gains, picked = (kept_BKC + noise_BKC).log_softmax(-1).topk(self.width)
        return _no_nan(gains), tokens_BKC.gather(-1, picked)


@dataclass(frozen=True, slots=True)
class _Beam:
    """The children of a frontier and the best of them."""

    #: Sums of log-chances, one child after the other.
    scores_BR: Tensor
    #: The best children and their scores, in falling order.
    picked_BK: Tensor
    best_BK: Tensor
    #: Scratch columns that each of them sees, those of its own level included.
    visible_BKM: Tensor


def advance(gains_BKK: Tensor, scores_BK: Tensor, visible_BKM: Tensor) -> _Beam:
    """Score the children of a frontier and pick as many of them as it has nodes."""
    B, K = scores_BK.shape
    if kernels_take(gains_BKK, scores_BK):
        from eagle_batch.engine import kernels

        beam = _Beam(
            torch.empty(B, K * K),
            torch.empty(B, K, dtype=torch.int64),
            torch.empty(B, K),
            torch.empty(B, K, visible_BKM.shape[2] + K, dtype=torch.bool),
        )
        kernels.advance(
            *(each.numpy() for each in (gains_BKK, scores_BK, visible_BKM.contiguous())),
            *(
                each.numpy()
                for each in (beam.scores_BR, beam.picked_BK, beam.best_BK, beam.visible_BKM)
            ),
        )
        return beam
    scores_BR = (gains_BKK + scores_BK[..., None]).flatten(1)
    best_BK, picked_BK = scores_BR.topk(K)
    index = (picked_BK // K)[..., None].expand_as(visible_BKM)
    own = torch.eye(K, dtype=torch.bool, device=scores_BK.device).expand(B, K, K)
    return _Beam(
        scores_BR, picked_BK, best_BK, torch.cat((visible_BKM.gather(1, index), own), dim=2)
    )


def _no_nan(gains: Tensor) -> Tensor:
    """Take what has no log-chance (all was banned, or the head overflowed) as the least likely."""
    return gains.masked_fill(gains.isnan(), -torch.inf)
