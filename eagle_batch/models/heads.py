"""What every EAGLE head shares: configuration, its one decoder layer and the seam to the engine.

A head never owns a cache. It computes q, k and v, applies the rotary embedding, and hands them to
the `attend` function of its caller, who writes k and v wherever they belong and applies the mask.

Shape legend: B rows, N new tokens, H hidden size of the head, F width of the target's features,
I inputs of the attention projections, A attention heads, G key/value heads, X heads of several
kinds, D head dimension, V target vocabulary, W draft vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eagle_batch.errors import HeadError
from eagle_batch.models.cache import CacheStep
from eagle_batch.models.quick import embedding, rms_norm

#: attend(q_BAND, k_BGND, v_BGND) -> o_BAND; rotary is applied, cache and mask are the caller's.
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class StepAttention:
    """Attends over the one layer of a head's own key/value slots."""

    step: CacheStep
    scale: float

    def __call__(self, q_BAND: Tensor, k_BGND: Tensor, v_BGND: Tensor) -> Tensor:
        """Append keys and values, return the attention output."""
        return self.step.attend(0, q_BAND, k_BGND, v_BGND, self.scale)


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """A change of the rotary frequencies, as `rope_scaling` of a head's configuration states it."""

    kind: Literal["linear", "llama3"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192


@dataclass(frozen=True, slots=True)
class HeadConfig:
    """Everything that decides which tensors a head has and what it computes; nothing is implied."""

    kind: Literal["eagle1", "eagle3"]
    hidden: int
    target_hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    rope_theta: float
    rms_eps: float
    #: Vocabulary of the target.
    vocab: int
    draft_vocab: int
    #: Boundary k is the input of decoder layer k, so k layers have run; () is the last hidden state
    #: after the target's final norm.
    aux_layers: tuple[int, ...]
    fc_bias: bool = False
    qkv_bias: bool = False
    #: RMSNorm of q and k in each attention head (Qwen3 draft layers).
    qk_norm: bool = False
    #: The residual is hidden_norm(g) instead of g.
    norm_before_residual: bool = False
    #: One RMSNorm over all fused features before fc (`input_norm`).
    norm_before_fc: bool = False
    #: One RMSNorm for each fused feature before fc (`fc_norm.k`, EAGLE-3.1).
    fc_norm: bool = False
    #: The final norm is applied before the state is fed back (EAGLE-3.1).
    norm_output: bool = False
    #: The checkpoint holds an embedding, or an output matrix, of its own.
    own_embed: bool = False
    own_lm_head: bool = True
    rope_scaling: RopeScaling | None = None
    logit_scale: float = 1.0

    @property
    def feature_width(self) -> int:
        """Width F of the features that `Head.fuse` takes."""
        return self.target_hidden * max(1, len(self.aux_layers))

    @property
    def attention_inputs(self) -> int:
        """Inputs I of q, k and v: EAGLE-3 reads the embedding beside the state."""
        return 2 * self.hidden if self.kind == "eagle3" else self.hidden


def inverse_frequencies(config: HeadConfig) -> Tensor:
    """Return the rotary frequencies [D/2], float32, on the CPU even under a meta-device context."""
    exponents = (
        torch.arange(0, config.head_dim, 2, dtype=torch.float32, device="cpu") / config.head_dim
    )
    frequencies = torch.pow(torch.tensor(config.rope_theta, device="cpu"), exponents).reciprocal()
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    return _llama3_frequencies(frequencies, scaling)


def _llama3_frequencies(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Slow the long waves by `factor`, keep the short ones, and blend those between."""
    turns = scaling.original_max_positions * frequencies / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    keep = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return frequencies * (keep + (1.0 - keep) / scaling.factor)


class Rotary(nn.Module):
    """Rotary embedding, half-split convention, from positions: there is no table to outgrow."""

    frequencies: Tensor

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.register_buffer("frequencies", inverse_frequencies(config), persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:  # noqa: FBT001, FBT002
        """Follow moves between devices, but stay float32: bf16 angles are wrong past 256."""
        exact = self.frequencies
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.frequencies = exact.to(self.frequencies.device)
        return self

    def forward(self, x_BNXD: Tensor, positions_BN: Tensor) -> Tensor:
        """Rotate every head of x by its token's position."""
        angles = positions_BN[..., None, None] * self.frequencies
        cos, sin = angles.cos().to(x_BNXD.dtype), angles.sin().to(x_BNXD.dtype)
        first, second = x_BNXD.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class DecoderLayer(nn.Module):
    """One Llama decoder layer with q, k, v and gate, up packed into one matrix each.

    The caller normalises the input, because the two kinds of head do that differently.
    """

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = config.heads, config.kv_heads, config.head_dim
        self.eps = config.rms_eps
        packed = (config.heads + 2 * config.kv_heads) * config.head_dim
        self.rotary = Rotary(config)
        self.qkv_proj = nn.Linear(config.attention_inputs, packed, bias=config.qkv_bias)
        self.o_proj = nn.Linear(config.heads * config.head_dim, config.hidden, bias=False)
        self.gate_up_proj = nn.Linear(config.hidden, 2 * config.intermediate, bias=False)
        self.down_proj = nn.Linear(config.intermediate, config.hidden, bias=False)
        self.post_attention_layernorm = nn.Parameter(torch.empty(config.hidden))
        self.q_norm = nn.Parameter(torch.empty(config.head_dim)) if config.qk_norm else None
        self.k_norm = nn.Parameter(torch.empty(config.head_dim)) if config.qk_norm else None

    def forward(
        self, x_BNI: Tensor, residual_BNH: Tensor, positions_BN: Tensor, attend: Attend
    ) -> Tensor:
        """Return the residual stream after attention and MLP, not normalised."""
        h_BNH = residual_BNH + self._attention(x_BNI, positions_BN, attend)
        return h_BNH + self._mlp(rms_norm(h_BNH, self.post_attention_layernorm, self.eps))

    def _attention(self, x_BNI: Tensor, positions_BN: Tensor, attend: Attend) -> Tensor:
        rows, tokens = x_BNI.shape[:2]
        qkv_BNXD = self.qkv_proj(x_BNI).view(rows, tokens, -1, self.head_dim)
        qk, v = qkv_BNXD.split((self.heads + self.kv_heads, self.kv_heads), dim=2)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = qk.split((self.heads, self.kv_heads), dim=2)
            q, k = rms_norm(q, self.q_norm, self.eps), rms_norm(k, self.k_norm, self.eps)
            qk = torch.cat((q, k), dim=2)
        q, k = self.rotary(qk, positions_BN).split((self.heads, self.kv_heads), dim=2)
        o_BAND = attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        out: Tensor = self.o_proj(o_BAND.transpose(1, 2).reshape(rows, tokens, -1))
        return out

    def _mlp(self, x_BNH: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x_BNH).chunk(2, dim=-1)
        out: Tensor = self.down_proj(F.silu(gate) * up)
        return out


class Head(nn.Module):
    """Base of the EAGLE heads: what the engine and the trainer call.

    Row i of the inputs pairs the feature of position i with the token of position i + 1 and has
    position id i; its logits are about the token of position i + 2.
    """

    #: target id = draft_to_target[draft id]; None where both vocabularies are the same.
    draft_to_target: Tensor | None
    embed_VH: Tensor | None
    lm_head_VH: Tensor | None

    def __init__(self, config: HeadConfig, draft_to_target: Tensor | None = None) -> None:
        super().__init__()
        self.config = config
        self.layer = DecoderLayer(config)
        self.register_buffer("draft_to_target", draft_to_target, persistent=False)
        self.register_buffer("embed_VH", None, persistent=False)
        self.register_buffer("lm_head_VH", None, persistent=False)

    def fuse(self, features_BNF: Tensor) -> Tensor:
        """Turn features of the target into the state g that `forward` takes."""
        raise NotImplementedError

    def forward(
        self, tokens_BN: Tensor, g_BNH: Tensor, positions_BN: Tensor, attend: Attend
    ) -> Tensor:
        """Run the decoder layer; the result is the next state g and the input of `logits`."""
        raise NotImplementedError

    def logits(self, out_BNH: Tensor) -> Tensor:
        """Return logits over the draft vocabulary for states that `forward` returned."""
        raise NotImplementedError

    def embed(self, tokens_BN: Tensor) -> Tensor:
        """Look tokens of the target's vocabulary up in the bound embedding."""
        assert self.embed_VH is not None, "bind() comes before forward()"
        return embedding(tokens_BN, self.embed_VH)

    def bind(self, embed_weight_VH: Tensor, lm_head_weight_VH: Tensor) -> None:
        """Share the target's embedding and, where the head has none of its own, its output matrix.

        Raises HeadError where the target's shapes are not those that the head was trained for.
        """
        config = self.config
        wanted = (config.vocab, config.target_hidden)
        for name, weight in (("embedding", embed_weight_VH), ("lm_head", lm_head_weight_VH)):
            if tuple(weight.shape) != wanted:
                raise HeadError(
                    f"the head does not fit this target: the target's {name} is "
                    f"{list(weight.shape)}, the head was trained for {list(wanted)} "
                    "(vocabulary, hidden size); use the head that was trained for this target"
                )
        if self._takes_embedding(embed_weight_VH):
            self.embed_VH = self._like_weights(embed_weight_VH)
        if not config.own_lm_head:
            self.lm_head_VH = self._like_weights(lm_head_weight_VH)

    def _takes_embedding(self, target_VH: Tensor) -> bool:
        """Whether the target's embedding replaces the head's own (training may have changed it)."""
        own = self.embed_VH
        if own is None or self.config.kind == "eagle1":
            return True
        if own.shape != target_VH.shape:
            return False
        return torch.equal(own, self._like_weights(target_VH))

    def _like_weights(self, weight: Tensor) -> Tensor:
        reference = self.layer.post_attention_layernorm
        return weight.detach().to(dtype=reference.dtype, device=reference.device)
