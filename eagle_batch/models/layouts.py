"""Reads the public layouts of EAGLE heads: which kind a checkpoint is, and what its settings mean.

Detection goes by tensors, because nothing in an EAGLE-1 configuration says "EAGLE". Settings and
tensors must agree; where a layout leaves the meaning open, the head is refused rather than guessed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from eagle_batch.errors import HeadError
from eagle_batch.models.headfiles import HeadFiles
from eagle_batch.models.heads import HeadConfig, RopeScaling
from eagle_batch.models.packing import ATTENTION, LAYER, canonical_shapes
from eagle_batch.models.refusals import refuse_unsupported
from eagle_batch.models.settings import Settings

_ALIASES = {"aux_norm_low": "fc_norm.0", "aux_norm_mid": "fc_norm.1", "aux_norm_high": "fc_norm.2"}
#: What the official training code uses when the configuration names no base; never the target's.
_DEFAULT_ROPE_THETA = 10000.0
#: ModelOpt switches whose other value changes the forward pass.
_FIXED_SWITCHES = {
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
}


@dataclass(frozen=True, slots=True)
class HeadParts:
    """A checkpoint after interpretation: canonical tensors that fit the configuration exactly."""

    config: HeadConfig
    tensors: dict[str, Tensor]
    draft_to_target: Tensor | None


def interpret(files: HeadFiles, target_layers: int | None) -> HeadParts:
    """Map a checkpoint of any public layout to canonical form; HeadError where it does not fit.

    `target_layers` is needed only where the checkpoint names no aux layers, whose default depends
    on it.
    """
    refuse_unsupported(files)
    tensors = canonical_names(files.tensors)
    settings = Settings.of(files.config, str(files.folder / "config.json"))
    if f"{LAYER}hidden_norm.weight" in tensors:
        config = _eagle3_config(settings, tensors, target_layers)
    elif "fc.weight" in tensors and "norm.weight" not in tensors:
        config = _eagle1_config(settings, tensors)
        tensors = _without_target_copies(tensors, config, files.source)
    else:
        raise HeadError(
            f"{files.source}: neither an EAGLE-3 head (no midlayer.hidden_norm or "
            "layers.0.hidden_norm) nor an EAGLE-1 head (fc without a final norm); "
            f"found {_some(sorted(files.tensors))}"
        )
    mapping = _draft_to_target(tensors, config, files.source)
    weights = {name: t for name, t in tensors.items() if name not in ("d2t", "t2d")}
    _check_fit(weights, config, files.source)
    return HeadParts(config, weights, mapping)


def canonical_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename the tensors of any layout to canonical names; drop buffers that are computed."""
    renamed: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        short = name.removeprefix("model.")
        short = re.sub(r"^midlayer\.", LAYER, short)
        first, _, rest = short.partition(".")
        short = f"{_ALIASES[first]}.{rest}" if first in _ALIASES else short
        if short.endswith("rotary_emb.inv_freq"):
            continue
        if short in renamed:
            raise HeadError(f"tensor {short} is in the checkpoint twice, once as {name}")
        renamed[short] = tensor
    return renamed


def _eagle1_config(settings: Settings, tensors: Mapping[str, Tensor]) -> HeadConfig:
    vocab = settings.integer("vocab_size")
    return HeadConfig(
        kind="eagle1",
        **_sizes(settings),
        target_hidden=settings.integer("hidden_size"),
        vocab=vocab,
        draft_vocab=vocab,
        aux_layers=(),
        fc_bias=settings.agrees("bias", present="fc.bias" in tensors),
        qkv_bias=settings.agrees("qkv_bias", present=f"{ATTENTION}q_proj.bias" in tensors),
        own_embed="embed_tokens.weight" in tensors,
        own_lm_head=False,
    )


def _eagle3_config(
    settings: Settings, tensors: Mapping[str, Tensor], target_layers: int | None
) -> HeadConfig:
    for key, value in _FIXED_SWITCHES.items():
        settings.must_be(key, value)
    hidden, vocab = settings.integer("hidden_size"), settings.integer("vocab_size")
    target_hidden = settings.integer("target_hidden_size", hidden)
    own_lm_head = "lm_head.weight" in tensors
    rows = tensors["lm_head.weight"].shape[0] if own_lm_head else vocab
    chunks = any(name.startswith("fc_norm.") for name in tensors)
    return HeadConfig(
        kind="eagle3",
        **_sizes(settings),
        target_hidden=target_hidden,
        vocab=vocab,
        draft_vocab=settings.integer("draft_vocab_size", rows),
        aux_layers=_aux_layers(settings, tensors, target_hidden, target_layers),
        fc_bias="fc.bias" in tensors,
        qkv_bias=settings.agrees("attention_bias", present=f"{ATTENTION}q_proj.bias" in tensors),
        qk_norm=f"{ATTENTION}q_norm.weight" in tensors,
        norm_before_residual=_norm_before_residual(settings),
        norm_before_fc=settings.agrees("norm_before_fc", present="input_norm.weight" in tensors),
        fc_norm=settings.agrees("fc_norm", present=settings.agrees("use_aux_norm", present=chunks)),
        norm_output=settings.flag("norm_output", default=False),
        own_embed="embed_tokens.weight" in tensors,
        own_lm_head=own_lm_head,
        logit_scale=settings.number("logit_scale", 1.0),
    )


def _sizes(settings: Settings) -> dict[str, Any]:
    """Fields that both kinds read the same way."""
    settings.must_be("hidden_act", "silu")
    settings.must_be("num_hidden_layers", 1)
    heads = settings.integer("num_attention_heads")
    return {
        "hidden": settings.integer("hidden_size"),
        "heads": heads,
        "kv_heads": settings.integer("num_key_value_heads", heads),
        "head_dim": settings.integer("head_dim", settings.integer("hidden_size") // heads),
        "intermediate": settings.integer("intermediate_size"),
        "rope_theta": _rope_theta(settings),
        "rope_scaling": _rope_scaling(settings),
        "rms_eps": settings.number("rms_norm_eps", 1e-6),
    }


def _rope_theta(settings: Settings) -> float:
    plain = settings.optional("rope_theta")
    nested = (settings.optional("rope_parameters") or {}).get("rope_theta")
    if plain is not None and nested is not None and float(plain) != float(nested):
        raise HeadError(
            f"{settings.source}: rope_theta is {plain}, rope_parameters.rope_theta is {nested}; "
            "keep the one that the head was trained with"
        )
    return float(plain or nested or _DEFAULT_ROPE_THETA)


def _rope_scaling(settings: Settings) -> RopeScaling | None:
    raw = settings.optional("rope_scaling") or settings.optional("rope_parameters") or {}
    kind = raw.get("rope_type", raw.get("type", "default"))
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling("linear", float(raw["factor"]))
    if kind == "llama3":
        return RopeScaling(
            "llama3",
            float(raw["factor"]),
            float(raw["low_freq_factor"]),
            float(raw["high_freq_factor"]),
            int(raw["original_max_position_embeddings"]),
        )
    raise HeadError(
        f"{settings.source}: rope_scaling of type {kind!r} is not supported; "
        "supported are default, linear and llama3"
    )


def _norm_before_residual(settings: Settings) -> bool:
    """Official heads never norm the residual; readers of speculators disagree on the default."""
    if settings.is_speculators and settings.optional("norm_before_residual") is None:
        raise HeadError(
            f"{settings.source}: norm_before_residual is missing and its default differs between "
            "engines; add it (true or false) as the head was trained"
        )
    return settings.flag("norm_before_residual", default=False)


def _aux_layers(
    settings: Settings, tensors: Mapping[str, Tensor], target_hidden: int, target_layers: int | None
) -> tuple[int, ...]:
    """Boundary ids of the fused features; `named_aux_layers` says what the ids of a file mean."""
    fc = tensors.get("fc.weight")
    if not settings.flag("use_aux_hidden_state", default=True):
        if fc is not None:
            raise HeadError(
                f"{settings.source}: use_aux_hidden_state is false, yet there is an fc.weight"
            )
        return ()
    if fc is None:
        raise HeadError(
            f"{settings.source}: tensor fc.weight is missing, and use_aux_hidden_state is not false"
        )
    count, rest = divmod(fc.shape[1], target_hidden)
    if rest:
        raise HeadError(
            f"{settings.source}: fc.weight has {fc.shape[1]} inputs, "
            f"expected a multiple of the target's hidden size {target_hidden}"
        )
    ids = named_aux_layers(settings)
    if ids is None:
        ids = _default_aux_layers(settings, target_layers)
    if len(ids) == count + 1 and settings.is_speculators:
        ids = ids[:-1]  # the last id served its training only
    return _checked_aux_layers(ids, count, settings, target_layers)


def named_aux_layers(settings: Settings) -> tuple[int, ...] | None:
    """Return the boundary ids that a file names: top-level ids as they are, nested ids + 1."""
    key = "eagle_aux_hidden_state_layer_ids"
    top, nested = settings.ids(key), settings.nested_ids(key)
    shifted = None if nested is None else tuple(k + 1 for k in nested)
    if top is not None and shifted is not None and top != shifted:
        raise HeadError(
            f"{settings.source}: {key} is {list(top)} (layers run) and eagle_config.{key} is "
            f"{list(nested or ())} (outputs of layers); they must differ by one, keep the right one"
        )
    return shifted if top is None else top


def _default_aux_layers(settings: Settings, target_layers: int | None) -> tuple[int, ...]:
    if target_layers is None:
        raise HeadError(
            f"{settings.source}: names no eagle_aux_hidden_state_layer_ids, so they depend on the "
            "number of layers of the target; say it (target_layers)"
        )
    return (2, target_layers // 2, target_layers - 3)


def _checked_aux_layers(
    ids: tuple[int, ...], count: int, settings: Settings, target_layers: int | None
) -> tuple[int, ...]:
    top = max(ids, default=0) if target_layers is None else target_layers
    if len(ids) != count or len(set(ids)) != count or not all(0 <= k <= top for k in ids):
        limit = "" if target_layers is None else f" (the target has {target_layers} layers)"
        raise HeadError(
            f"{settings.source}: features are taken from boundaries {list(ids)}, "
            f"but fc.weight fuses {count} different ones{limit}; "
            "set eagle_aux_hidden_state_layer_ids as the head was trained"
        )
    return ids


def _without_target_copies(
    tensors: dict[str, Tensor], config: HeadConfig, source: str
) -> dict[str, Tensor]:
    """Drop the lm_head of a converted EAGLE-1 head: it is the target's, which is used anyway."""
    if "lm_head.weight" in tensors:
        _check_shape(
            "lm_head.weight", tensors["lm_head.weight"], (config.vocab, config.hidden), source
        )
    return {name: t for name, t in tensors.items() if name != "lm_head.weight"}


def _draft_to_target(
    tensors: Mapping[str, Tensor], config: HeadConfig, source: str
) -> Tensor | None:
    """Resolve d2t, which holds offsets, to target ids; None where the vocabularies are the same."""
    offsets, kept = tensors.get("d2t"), tensors.get("t2d")
    if offsets is None:
        if config.draft_vocab != config.vocab:
            raise HeadError(
                f"{source}: tensor d2t is missing; without it the draft vocabulary "
                f"({config.draft_vocab}) must be the target's ({config.vocab})"
            )
        return None
    _check_shape("d2t", offsets, (config.draft_vocab,), source)
    ids = torch.arange(config.draft_vocab) + offsets.long()
    if int(ids.min()) < 0 or int(ids.max()) >= config.vocab or len(set(ids.tolist())) != len(ids):
        raise HeadError(
            f"{source}: tensor d2t does not map the draft vocabulary to different ids of the "
            f"target's {config.vocab}; expected offsets (target id - draft id)"
        )
    if kept is not None:
        _check_kept(kept, ids, config, source)
    identity = config.draft_vocab == config.vocab and not bool(offsets.any())
    return None if identity else ids


def _check_kept(kept: Tensor, ids: Tensor, config: HeadConfig, source: str) -> None:
    _check_shape("t2d", kept, (config.vocab,), source)
    if not torch.equal(kept.bool().nonzero().flatten(), ids.sort().values):
        raise HeadError(f"{source}: tensors d2t and t2d name different draft vocabularies")


def _check_fit(tensors: Mapping[str, Tensor], config: HeadConfig, source: str) -> None:
    """Every expected tensor is there, nothing else is, and all shapes are right."""
    expected = canonical_shapes(config)
    missing = sorted(expected.keys() - tensors.keys())
    surplus = sorted(tensors.keys() - expected.keys())
    if missing or surplus:
        found = [f"missing {_some(missing)}"] if missing else []
        found += [f"unexpected {_some(surplus)}"] if surplus else []
        raise HeadError(
            f"{source}: not the tensors of an {_KIND_NAMES[config.kind]} head: "
            f"{'; '.join(found)} (canonical names)"
        )
    for name, shape in expected.items():
        _check_shape(name, tensors[name], shape, source)


_KIND_NAMES: dict[Literal["eagle1", "eagle3"], str] = {"eagle1": "EAGLE-1", "eagle3": "EAGLE-3"}


def _check_shape(name: str, tensor: Tensor, shape: tuple[int, ...], source: str) -> None:
    if tuple(tensor.shape) != shape:
        raise HeadError(
            f"{source}: tensor {name} is {list(tensor.shape)}, "
            f"expected {list(shape)} from config.json"
        )


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 6} more" if len(names) > 6 else ""
    return ", ".join(names[:6]) + more
