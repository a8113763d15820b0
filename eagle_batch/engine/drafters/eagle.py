"""Drafting with an EAGLE head: grow a tree in feature space.

The head predicts the target's next feature from the last feature and the token that followed it,
and feeds its prediction back (EAGLE, arXiv 2401.15077).

Shape legend: B rows, A places of an accepted path, F feature width, H hidden size of the head.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from eagle_batch.engine.controller import Shape
from eagle_batch.engine.drafters.arrears import Arrears, Rest
from eagle_batch.engine.drafters.base import CommittedChain, DraftState
from eagle_batch.engine.drafters.growing import GrowingDrafter
from eagle_batch.engine.tree import DraftTree
from eagle_batch.models.cache import CacheShape, CacheStep, KeyValueCache, Step, causal_visibility
from eagle_batch.models.heads import Head, StepAttention
from eagle_batch.models.quick import has_kernels

if TYPE_CHECKING:
    from eagle_batch.engine.drafters.grower import Grower


class EagleDrafter(GrowingDrafter):
    """Drafts in feature space; position i of its slots pairs feature i with token i + 1."""

    def __init__(
        self,
        head: Head,
        *,
        slots: int,
        capacity: int,
        depth: int,
        width: int,
        nodes: int,
        late: bool = False,
    ) -> None:
        """Allocate the head's slots.

        late: run the head over committed tokens only when it is to draft.
        """
        config = head.config
        self.head = head
        self.aux_layers = config.aux_layers
        width = min(width, config.draft_vocab)
        weight = next(head.parameters())
        shape = CacheShape(1, slots, capacity + depth * width, config.kv_heads, config.head_dim)
        super().__init__(
            KeyValueCache(shape, dtype=weight.dtype, device=weight.device),
            hidden=config.hidden,
            target_ids_V=_target_ids(head),
            depth=depth,
            width=width,
            nodes=nodes,
        )
        self._scale = config.head_dim**-0.5
        self._grower = self._new_grower()
        self.late = late
        self._arrears = Arrears(slots, capacity, weight.device) if late else None

    def take(self, head: Head) -> bool:
        """Draft with another head of the same configuration; returns whether it is one.

        What rows hold of the old one stays: a head that has learnt on reads it nearly as well.
        """
        if head.config != self.head.config:
            return False
        self.head = head
        self._target_ids = _target_ids(head)
        self._grower = self._new_grower()
        if self._arrears is not None:
            self._arrears.forget()
        return True

    def extend(self, chain: CommittedChain, features_BAF: Tensor, tokens_BA: Tensor) -> None:
        """Take in committed tokens, or put them off; see `Drafter`."""
        if self._arrears is None:
            self._read(chain, features_BAF, tokens_BA)
        else:
            self._arrears.note(chain, features_BAF, tokens_BA)

    def prepare(self, state: DraftState) -> None:
        """Run the head over what rows are far behind with."""
        self._catch_up(state, short=False)

    def draft(self, state: DraftState) -> DraftTree:
        """Bring the head up to date, then grow the tree of each row; see `GrowingDrafter`."""
        if self._grower is None or state.guide is not None:
            self._follow(state)
            return super().draft(state)
        shape = Shape(self.depth, self.width, self.nodes)
        return self._grower.grow(state, self.states_SH, self._rest(state), shape)

    def _rest(self, state: DraftState) -> Rest | None:
        """Return what rows are still behind when all but the grower had its turn."""
        if self._arrears is None or self._grower is None or not self._grower.follows:
            self._follow(state)
            return None
        self._catch_up(state, short=False)
        return self._arrears.rest(state.first_row, state.length_B.tolist())

    def _follow(self, state: DraftState) -> None:
        """Run the head over everything that rows are behind with."""
        self._catch_up(state, short=False)
        self._catch_up(state, short=True)

    def _catch_up(self, state: DraftState, *, short: bool) -> None:
        if self._arrears is not None:
            lengths = state.length_B.tolist()
            for due in self._arrears.due(state.first_row, lengths, short=short):
                self._read(due.chain, due.features_BAF, due.tokens_BA)

    def swap_rows(self, a: int, b: int, length: int) -> None:
        """Exchange what is known of two rows."""
        super().swap_rows(a, b, length)
        if self._arrears is not None:
            self._arrears.swap_rows(a, b, length)

    def snapshot(self, row: int, length: int) -> tuple[Tensor, ...]:
        """Return the keys and values of the first `length` positions, or what they are made of."""
        if self._arrears is not None:
            return self._arrears.snapshot(row, length)
        return super().snapshot(row, length)

    def restore(self, row: int, columns: tuple[Tensor, ...]) -> None:
        """Put what `snapshot` returned at the start of a row."""
        if self._arrears is not None:
            self._arrears.restore(row, columns)
        else:
            super().restore(row, columns)

    def _read(self, chain: CommittedChain, features_BAF: Tensor, tokens_BA: Tensor) -> None:
        """Run the head over committed tokens; the output at `last` is what the row drafts from."""
        B, A = tokens_BA.shape
        device = tokens_BA.device
        positions_BA = chain.start_B[:, None] + torch.arange(A, device=device)
        visible = causal_visibility(B, A, device)
        extent = self._extent(chain.longest + A)
        step = self.cache.step(
            chain.first_row, positions_BA, chain.start_B, visible, positions_BA, extent
        )
        out_BAH = self._run(step, tokens_BA, self.head.fuse(features_BAF), positions_BA)
        self._keep_states(chain, out_BAH, chain.last_B)

    def _new_grower(self) -> Grower | None:
        """Return what grows trees in one call, where kernels know all that the head does."""
        if not has_kernels() or self.cache.device.type != "cpu":
            return None
        from eagle_batch.engine.drafters.grower import Grower, is_growable

        assert isinstance(self.cache, KeyValueCache), "a head is on one device"
        growable = is_growable(self.head)
        return Grower(self.head, self.cache, self._target_ids) if growable else None

    def _run(self, step: Step, tokens: Tensor, states: Tensor, positions: Tensor) -> Tensor:
        assert isinstance(step, CacheStep), "a head is on one device"
        attend = StepAttention(step, self._scale)
        return self.head(tokens, states, positions, attend)  # type: ignore[no-any-return]

    def _logits(self, states: Tensor) -> Tensor:
        return self.head.logits(states)


def _target_ids(head: Head) -> Tensor:
    """Return the target id of each token that a head can draft."""
    if head.draft_to_target is not None:
        return head.draft_to_target
    return torch.arange(head.config.draft_vocab, device=next(head.parameters()).device)
