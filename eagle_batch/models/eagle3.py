"""EAGLE-3 heads, with the variants found in public checkpoints.

fc fuses features of several depths of the target once; afterwards the head feeds its own output
back, before the final norm (after it with `norm_output`). Shape legend: see `heads.py`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eagle_batch.models.heads import Attend, Head, HeadConfig
from eagle_batch.models.quick import rms_norm


class Eagle3Head(Head):
    """Predicts the target's next token in a vocabulary of its own from fused features."""

    def __init__(self, config: HeadConfig, draft_to_target: Tensor | None = None) -> None:
        super().__init__(config, draft_to_target)
        hidden, width = config.hidden, config.feature_width
        chunks = len(config.aux_layers) if config.fc_norm else 0
        self.fc = nn.Linear(width, hidden, bias=config.fc_bias) if config.aux_layers else None
        self.input_norm = nn.Parameter(torch.empty(width)) if config.norm_before_fc else None
        self.fc_norm = nn.ParameterList(
            nn.Parameter(torch.empty(config.target_hidden)) for _ in range(chunks)
        )
        self.input_layernorm = nn.Parameter(torch.empty(hidden))
        self.hidden_norm = nn.Parameter(torch.empty(hidden))
        self.norm = nn.Parameter(torch.empty(hidden))
        self.lm_head = (
            nn.Linear(hidden, config.draft_vocab, bias=False) if config.own_lm_head else None
        )

    def fuse(self, features_BNF: Tensor) -> Tensor:
        """Project features of the target, concatenated from low to high, to the state g."""
        if self.fc is None:
            return features_BNF
        eps = self.config.rms_eps
        if self.input_norm is not None:
            features_BNF = rms_norm(features_BNF, self.input_norm, eps)
        if self.fc_norm:
            chunks = features_BNF.chunk(len(self.fc_norm), dim=-1)
            normed = [rms_norm(c, w, eps) for c, w in zip(chunks, self.fc_norm, strict=True)]
            features_BNF = torch.cat(normed, dim=-1)
        g_BNH: Tensor = self.fc(features_BNF)
        return g_BNH

    def forward(
        self, tokens_BN: Tensor, g_BNH: Tensor, positions_BN: Tensor, attend: Attend
    ) -> Tensor:
        """Return the state to feed back: the residual stream, or its norm with `norm_output`."""
        eps = self.config.rms_eps
        normed_BNH = rms_norm(g_BNH, self.hidden_norm, eps)
        embed_BNH = rms_norm(self.embed(tokens_BN), self.input_layernorm, eps)
        residual_BNH = normed_BNH if self.config.norm_before_residual else g_BNH
        x_BNI = torch.cat((embed_BNH, normed_BNH), dim=-1)
        out: Tensor = self.layer(x_BNI, residual_BNH, positions_BN, attend)
        return rms_norm(out, self.norm, eps) if self.config.norm_output else out

    def logits(self, out_BNH: Tensor) -> Tensor:
        """Return logits over the draft vocabulary."""
        if not self.config.norm_output:
            out_BNH = rms_norm(out_BNH, self.norm, self.config.rms_eps)
        if self.lm_head is None:
            assert self.lm_head_VH is not None, "bind() comes before logits()"
            logits_BNW = F.linear(out_BNH.to(self.lm_head_VH.dtype), self.lm_head_VH)
        else:
            logits_BNW = self.lm_head(out_BNH)
        scale = self.config.logit_scale
        return logits_BNW if scale == 1.0 else logits_BNW * scale
