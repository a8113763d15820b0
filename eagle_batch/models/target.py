"""The target: a transformers causal language model run over our own cache slots.

The only file that touches transformers' internals. A model of any decoder-only family is switched
to an attention function of ours, which writes keys and values to a `Step` and attends there; the
model's own cache and masks are never used. At load the whole arrangement is compared with the
model's own forward pass, so that a family it does not fit is refused instead of decoded wrongly.

Shape legend: B rows, N tokens, H hidden size, F = aux layers * H, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AutoModelForCausalLM, PreTrainedModel

from eagle_batch.errors import ModelError
from eagle_batch.models.cache import (
    Cache,
    CacheShape,
    CacheStep,
    JoinedStep,
    KeyValueCache,
    Step,
    causal_visibility,
)
from eagle_batch.models.fused import FusedProduct, is_fusible, new_team
from eagle_batch.models.linear import DecodingLinear, replace_linears
from eagle_batch.models.packed import PackedDecoder, is_packable
from eagle_batch.models.placement import Placement, place
from eagle_batch.models.shelf import Shelf
from eagle_batch.models.split import SplitCache, bring_inputs, moved

ATTENTION = "eagle_batch"
#: Largest mean divergence (KL, nats a token) between our forward pass and the model's own.
PARITY_TOLERANCE = {
    torch.float64: 1e-9,
    torch.float32: 1e-6,
    torch.float16: 1e-2,
    torch.bfloat16: 1e-1,
}


@dataclass(frozen=True, slots=True)
class TargetShape:
    """The sizes of a target that the rest of the engine needs."""

    layers: int
    hidden: int
    kv_heads: int
    head_dim: int
    vocab: int
    #: Longest context that the model was made for, in tokens.
    context: int


@dataclass(frozen=True, slots=True)
class Pass:
    """What the decoder is run over: tokens, their positions, and where their keys go."""

    tokens_BN: Tensor
    positions_BN: Tensor
    step: Step

    def trimmed(self, used_BN: Tensor) -> Pass:
        """Return the pass over some tokens of each row alone, `[1, R]`, row after row."""
        assert isinstance(self.step, CacheStep)
        step = self.step.trimmed(used_BN)
        return Pass(self.tokens_BN[used_BN][None], self.positions_BN[used_BN][None], step)


@dataclass(frozen=True, slots=True)
class TargetOutput:
    """Result of one pass: post-norm last hidden state and the residual stream at the aux layers."""

    hidden_BNH: Tensor
    #: Inputs of the aux layers, in rising order of layer, concatenated; None when none were asked
    #: for.
    aux_BNF: Tensor | None

    @property
    def features_BNF(self) -> Tensor:
        """What a drafter takes in: the aux features where there are any, else the last state."""
        return self.hidden_BNH if self.aux_BNF is None else self.aux_BNF


class Target:
    """A causal LM whose keys and values live in slots of ours.

    It takes the model over: the plain weights of its layers are replaced by packed ones. Where the
    layers are on several devices, everything else, what goes in and what comes out are on the last.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model.eval().requires_grad_(False)
        self.base: Any = model.base_model
        self.config = model.config.get_text_config()
        self.shape = _read_shape(self.config)
        self.dtype: torch.dtype = model.dtype
        output = model.get_output_embeddings()
        self.device: torch.device = output.weight.device
        self.eos_token_ids = _eos_token_ids(model)
        self._layers = _find_layers(self.base, self.shape.layers)
        self._devices = [next(layer.parameters()).device for layer in self._layers]
        self._softcap: float | None = getattr(self.config, "final_logit_softcapping", None)
        self._logit_factor = _logit_factor(self.config)
        #: The output projection `[V, H]`; the embedding matrix itself where the two are tied.
        self.lm_head_weight_VH: Tensor = output.weight
        fusible = is_fusible(self.dtype, self.device, [self.shape.hidden])
        #: Threads of the kernels, where there are kernels for this target.
        self.team = new_team(self.shape.hidden) if fusible else None
        shelf = Shelf() if fusible else None
        self._lm_head = DecodingLinear(output.weight, output.bias, shelf=shelf)
        if fusible:
            # One copy serves both, and the embedding where it is the same matrix.
            output.weight.data = self._lm_head.plain
        self._fused_head = FusedProduct(self._lm_head, self.team) if self.team else None
        self._packed = self._pack()

    def _pack(self) -> PackedDecoder | None:
        """Re-lay the weights for decoding: fused where the family allows, else layer by layer."""
        if not is_packable(self._layers, self.config):
            replace_linears(self.base)
            return None
        heads, s = self.config.num_attention_heads, self.shape
        return PackedDecoder(
            self.base,
            self.config,
            heads=heads,
            kv_heads=s.kv_heads,
            head_dim=s.head_dim,
            team=self.team,
        )

    @property
    def embed_weight_VH(self) -> Tensor:
        """The input embedding matrix."""
        weight = self.model.get_input_embeddings().weight
        assert isinstance(weight, Tensor)
        return weight

    def new_cache(self, slots: int, capacity: int) -> Cache:
        """Allocate the key/value slots of this model."""
        s = self.shape
        shape = CacheShape(s.layers, slots, capacity, s.kv_heads, s.head_dim)
        if len(set(self._devices)) > 1:
            return SplitCache(shape, self._devices, dtype=self.dtype)
        return KeyValueCache(shape, dtype=self.dtype, device=self.device)

    def forward(
        self,
        tokens_BN: Tensor,
        positions_BN: Tensor,
        step: Step,
        aux_layers: Sequence[int] = (),
    ) -> TargetOutput:
        """Run the decoder; `aux_layers` are boundaries, k being the input of layer k."""
        if self._packed is not None:
            return TargetOutput(*self._packed.forward(tokens_BN, positions_BN, step, aux_layers))
        with self._captured(aux_layers) as captured:
            out = self.base(
                input_ids=tokens_BN, position_ids=positions_BN, use_cache=False, attention=step
            )
        hidden_BNH = out.last_hidden_state
        if not aux_layers:
            return TargetOutput(hidden_BNH, None)
        aux = [moved(captured[k], self.device) for k in aux_layers]
        return TargetOutput(hidden_BNH, torch.cat(aux, dim=-1))

    @property
    def can_trim(self) -> bool:
        """Whether passes of few tokens may be over rows of different lengths."""
        return self._packed is not None and self._packed.fused

    def trims(self, trimmed: Pass) -> bool:
        """Whether a pass over rows of different lengths is of few tokens."""
        return self._packed is not None and self._packed.suits(trimmed.step)

    def forward_together(
        self, passes: Sequence[Pass], aux_layers: Sequence[int] = ()
    ) -> list[TargetOutput]:
        """Run several passes, as one where the family allows: the weights are read once then."""
        steps = [p.step for p in passes if isinstance(p.step, CacheStep)]
        # On several devices too each pass goes alone.
        if self._packed is None or len(passes) == 1 or len(steps) < len(passes):
            return [self.forward(p.tokens_BN, p.positions_BN, p.step, aux_layers) for p in passes]
        hidden_1RH, aux_1RF = self._packed.forward(
            torch.cat([p.tokens_BN.flatten() for p in passes])[None],
            torch.cat([p.positions_BN.flatten() for p in passes])[None],
            JoinedStep(steps),
            aux_layers,
        )
        sizes = [p.tokens_BN.numel() for p in passes]
        hidden = torch.split(hidden_1RH[0], sizes)
        aux: Sequence[Tensor | None] = [None] * len(passes)
        if aux_1RF is not None:
            aux = torch.split(aux_1RF[0], sizes)
        return [
            TargetOutput(
                h_RH.view(*p.tokens_BN.shape, -1),
                None if a_RF is None else a_RF.view(*p.tokens_BN.shape, -1),
            )
            for p, h_RH, a_RF in zip(passes, hidden, aux, strict=True)
        ]

    def logits(self, hidden: Tensor) -> Tensor:
        """Apply the output projection to post-norm hidden states, `[..., H] -> [..., V]`."""
        flat = hidden.reshape(-1, hidden.shape[-1])
        logits = self._project(flat).view(*hidden.shape[:-1], -1)
        if self._logit_factor != 1.0:
            logits = logits * self._logit_factor
        if self._softcap is not None:
            logits = torch.tanh(logits / self._softcap) * self._softcap
        return logits

    def _project(self, hidden_RH: Tensor) -> Tensor:
        if self._fused_head is not None:
            return self._fused_head.forward(hidden_RH)
        rows, least = hidden_RH.shape[0], self._lm_head.least_rows
        if rows < least:
            hidden_RH = F.pad(hidden_RH, (0, 0, 0, least - rows))
        logits: Tensor = self._lm_head.forward(hidden_RH)
        return logits[:rows]

    @contextmanager
    def _captured(self, aux_layers: Sequence[int]) -> Iterator[dict[int, Tensor]]:
        captured: dict[int, Tensor] = {}
        handles = [
            self._layers[k].register_forward_pre_hook(_keep_input(captured, k), with_kwargs=True)
            for k in set(aux_layers)
        ]
        try:
            yield captured
        finally:
            for handle in handles:
                handle.remove()

    def check_parity(self, reference_NV: Tensor) -> float:
        """Compare with `reference_logits` of the same model; return the mean divergence (KL, nats).

        Raises ModelError when they differ: the family does something that the slots do not
        reproduce (its own kind of cache, attention without keys and values, changed logits).
        """
        expected = reference_NV.double().log_softmax(-1)
        with torch.inference_mode():
            actual = self._slot_logits(_probe(self.shape.vocab, self.device)).double()
        gap = float((expected.exp() * (expected - actual.log_softmax(-1))).sum(-1).mean())
        allowed = PARITY_TOLERANCE[self.dtype]
        if not gap <= allowed:
            raise ModelError(
                f"target {self.config.model_type!r}: its forward pass over cache slots differs "
                f"from the model's own by {gap:.3g} nats a token (allowed {allowed:.3g}), so its "
                "text would be wrong; expected a decoder-only family that uses transformers' "
                "attention interface"
            )
        return gap

    def _slot_logits(self, tokens: Tensor) -> Tensor:
        """Decode the probe in two chunks, so that the cache takes part in the comparison."""
        cache = self.new_cache(1, tokens.shape[1] + 1)
        half = tokens.shape[1] // 2
        hidden = [
            self._chunk(cache, tokens, start, stop)
            for start, stop in ((0, half), (half, tokens.shape[1]))
        ]
        return self.logits(torch.cat(hidden, dim=1))[0]

    def _chunk(self, cache: Cache, tokens: Tensor, start: int, stop: int) -> Tensor:
        positions = torch.arange(start, stop, device=self.device)[None]
        base = torch.tensor([start], device=self.device)
        step = cache.step(
            0, positions, base, causal_visibility(1, stop - start, self.device), positions, stop
        )
        return self.forward(tokens[:, start:stop], positions, step).hidden_BNH


def load_target(path: str, *, revision: str | None, dtype: torch.dtype, where: Placement) -> Target:
    """Load a causal LM from a folder or the hub, safetensors only, and prove that it decodes right.

    Raises ModelError when it cannot be loaded or does not run over cache slots, ConfigError when it
    has too few layers for so many devices.
    """
    try:
        model = AutoModelForCausalLM.from_pretrained(
            path,
            revision=revision,
            dtype=dtype,
            attn_implementation=ATTENTION,
            use_safetensors=True,
        )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise ModelError(f"target.model: {path!r} cannot be loaded: {error}") from error
    place_target(model, where)
    reference_NV = reference_logits(model)
    target = Target(model)
    target.check_parity(reference_NV)
    return target


def place_target(model: PreTrainedModel, where: Placement) -> None:
    """Move a model to its devices; raises ConfigError where these are more than its layers."""
    if len(where.devices) == 1:
        model.to(where.home)
        return
    base, shape = model.base_model, _read_shape(model.config.get_text_config())
    layers = _find_layers(base, shape.layers)
    place(model, base, where, 2 * shape.kv_heads * shape.head_dim * model.dtype.itemsize)
    for layer in layers:
        bring_inputs(layer, next(layer.parameters()).device)


@torch.inference_mode()
def reference_logits(model: PreTrainedModel) -> Tensor:
    """Return the logits `[N, V]` of a short probe by the model's own code, before it is packed."""
    model.eval().set_attn_implementation("eager")
    try:
        probe = _probe(model.config.get_text_config().vocab_size, model.device)
        logits: Tensor = model(input_ids=probe, use_cache=False).logits[0]
    finally:
        model.set_attn_implementation(ATTENTION)
    return logits


def _probe(vocab: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, vocab, (1, 32), generator=generator).to(device)


def _attention_function(  # noqa: PLR0913, PLR0917 - the signature is transformers'
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    _mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    attention: Step | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Stand in for transformers' attention; `attention` is a keyword of the forward call."""
    if attention is None:
        raise ModelError(
            f"{type(module).__name__} does not pass keywords on to its attention function"
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = attention.attend(int(module.layer_idx), query, key, value, scale, sliding_window, softcap)  # type: ignore[arg-type]
    return out.transpose(1, 2), None


AttentionInterface.register(ATTENTION, _attention_function)


def _keep_input(captured: dict[int, Tensor], layer: int) -> Any:
    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        captured[layer] = args[0] if args else kwargs["hidden_states"]

    return hook


def _find_layers(base: nn.Module, count: int) -> nn.ModuleList:
    layers = getattr(base, "layers", None)
    if not isinstance(layers, nn.ModuleList) or len(layers) != count:
        raise ModelError(
            f"target: {type(base).__name__} has no list of {count} decoder layers named 'layers'; "
            "expected a decoder-only model"
        )
    return layers


def _read_shape(config: Any) -> TargetShape:
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    context = getattr(config, "max_position_embeddings", None) or 2048
    return TargetShape(
        config.num_hidden_layers, config.hidden_size, kv_heads, head_dim, config.vocab_size, context
    )


def _eos_token_ids(model: PreTrainedModel) -> tuple[int, ...]:
    for source in (getattr(model, "generation_config", None), model.config):
        ids = getattr(source, "eos_token_id", None)
        if ids is not None:
            return tuple(ids) if isinstance(ids, (list, tuple)) else (int(ids),)
    return ()


def _logit_factor(config: Any) -> float:
    """Return what the family multiplies its logits with (Cohere multiplies, Granite divides)."""
    return float(getattr(config, "logit_scale", None) or 1.0) / float(
        getattr(config, "logits_scaling", None) or 1.0
    )
