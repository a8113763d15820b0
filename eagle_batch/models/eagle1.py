"""EAGLE-1 and EAGLE-2 heads (the same weights serve both; only the tree differs).

The feature is the target's last hidden state after its final norm. The layer has no input norm, the
residual is the output of fc, and the target's lm_head reads the result without a norm.
Shape legend: see `heads.py`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eagle_batch.models.heads import Attend, Head, HeadConfig


class Eagle1Head(Head):
    """Predicts the target's next feature from its feature and the embedding of the next token."""

    def __init__(self, config: HeadConfig, draft_to_target: Tensor | None = None) -> None:
        super().__init__(config, draft_to_target)
        self.fc = nn.Linear(2 * config.hidden, config.hidden, bias=config.fc_bias)

    def fuse(self, features_BNF: Tensor) -> Tensor:
        """Return the features as they are: the state of an EAGLE-1 head is the target's feature."""
        return features_BNF

    def forward(
        self, tokens_BN: Tensor, g_BNH: Tensor, positions_BN: Tensor, attend: Attend
    ) -> Tensor:
        """Return the predicted feature of the token in each row."""
        x_BNH = self.fc(torch.cat((self.embed(tokens_BN), g_BNH), dim=-1))
        out: Tensor = self.layer(x_BNH, x_BNH, positions_BN, attend)
        return out

    def logits(self, out_BNH: Tensor) -> Tensor:
        """Apply the target's lm_head to predicted features."""
        assert self.lm_head_VH is not None, "bind() comes before logits()"
        return F.linear(out_BNH.to(self.lm_head_VH.dtype), self.lm_head_VH)
