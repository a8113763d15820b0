"""Drafting with a smaller language model of the same tokenizer: classic speculative decoding.

The model keeps key/value slots of its own and reads every committed token, prompts included
(Leviathan et al., arXiv 2211.17192). What it proposes is ranked under the target's noise, as every
draft is.

Shape legend: B rows, A places of an accepted path, F feature width, H hidden size, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from eagle_batch.engine.drafters.base import CommittedChain
from eagle_batch.engine.drafters.growing import GrowingDrafter
from eagle_batch.models.cache import Step, causal_visibility
from eagle_batch.models.target import Target


class DraftModelDrafter(GrowingDrafter):
    """Drafts by decoding a small model; position i of its slots is token i."""

    # The root itself is read when it is committed; the target reads it with the next round.
    _ahead = 1

    def __init__(
        self,
        model: Target,
        *,
        target_vocab: int,
        slots: int,
        capacity: int,
        depth: int,
        width: int,
        nodes: int,
    ) -> None:
        self.model = model
        # Where one of the two pads its vocabulary, the padding is no token.
        vocab = min(model.shape.vocab, target_vocab)
        width = min(width, vocab)
        super().__init__(
            model.new_cache(slots, capacity + 1 + depth * width),
            hidden=model.shape.hidden,
            target_ids_V=torch.arange(vocab, device=model.device),
            depth=depth,
            width=width,
            nodes=nodes,
        )

    def extend(self, chain: CommittedChain, features_BAF: Tensor, tokens_BA: Tensor) -> None:
        """Read committed tokens; the state at `last` is what the row drafts from."""
        del features_BAF
        start_B, last_B = chain.start_B + 1, chain.last_B
        if chain.before_B is not None:
            tokens_BA = torch.cat((chain.before_B[:, None], tokens_BA), dim=1)
            start_B, last_B = chain.start_B, chain.last_B + 1
        B, A = tokens_BA.shape
        positions_BA = start_B[:, None] + torch.arange(A, device=tokens_BA.device)
        visible = causal_visibility(B, A, tokens_BA.device)
        extent = self._extent(chain.longest + 1 + A)
        step = self.cache.step(
            chain.first_row, positions_BA, start_B, visible, positions_BA, extent
        )
        self._keep_states(chain, self._run(step, tokens_BA, tokens_BA, positions_BA), last_B)

    def _run(self, step: Step, tokens: Tensor, states: Tensor, positions: Tensor) -> Tensor:
        del states
        known = tokens.clamp(max=self.model.shape.vocab - 1)
        return self.model.forward(known, positions, step).hidden_BNH

    def _logits(self, states: Tensor) -> Tensor:
        return self.model.logits(states)[..., : len(self._target_ids)]
