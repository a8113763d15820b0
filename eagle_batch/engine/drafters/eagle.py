"""Drafting with an EAGLE head: grow a tree in feature space.

The head predicts the target's next feature from the last feature and the token that followed it,
and feeds its prediction back (EAGLE, arXiv 2401.15077).

Shape legend: B rows, A places of an accepted path, F feature width, H hidden size of the head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from eagle_batch.engine.drafters.base import CommittedChain
from eagle_batch.engine.drafters.growing import GrowingDrafter
from eagle_batch.models.cache import CacheShape, CacheStep, KeyValueCache, Step, causal_visibility
from eagle_batch.models.heads import Head, StepAttention


class EagleDrafter(GrowingDrafter):
    """Drafts in feature space; position i of its slots pairs feature i with token i + 1."""

    def __init__(
        self, head: Head, *, slots: int, capacity: int, depth: int, width: int, nodes: int
    ) -> None:
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

    def take(self, head: Head) -> bool:
        """Draft with another head of the same configuration; returns whether it is one.

        What rows hold of the old one stays: a head that has learnt on reads it nearly as well.
        """
        if head.config != self.head.config:
            return False
        self.head = head
        self._target_ids = _target_ids(head)
        return True

    def extend(self, chain: CommittedChain, features_BAF: Tensor, tokens_BA: Tensor) -> None:
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
