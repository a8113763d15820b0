"""Names what we do not load: drafts that are not EAGLE heads, and variants that we do not compute.

A wrong forward pass shows only as poor acceptance, never as an error: what is not known is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import torch

from eagle_batch.errors import HeadError
from eagle_batch.models.headfiles import HeadFiles

_PLAIN = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_MAPS = ("d2t", "t2d")
_QUANTISED = re.compile(
    r"\.(qweight|qzeros|scales|weight_scale\w*|weight_packed|weight_zero_point)$"
)


def refuse_unsupported(files: HeadFiles) -> None:
    """Raise HeadError, naming the kind, for a draft that is not an EAGLE head we reproduce."""
    for matches, reason in _KINDS:
        if matches(files):
            raise HeadError(f"{files.source}: {reason}")
    for problem in _damaged(files):
        raise HeadError(f"{files.source}: {problem}")


def _architecture(files: HeadFiles) -> str:
    names = files.config.get("architectures") or [""]
    return str(names[0])


def _any_tensor(files: HeadFiles, *parts: str) -> bool:
    return any(part in name for name in files.tensors for part in parts)


def _is_dflash(files: HeadFiles) -> bool:
    return "dflash_config" in files.config or "DFlash" in _architecture(files)


def _is_parallel(files: HeadFiles) -> bool:
    keys = ("mask_token_id", "pard_token", "ptd_token_id")
    kind = files.config.get("speculators_model_type")
    marked = any(files.config.get(key) is not None for key in keys)
    return kind == "peagle" or _any_tensor(files, "mask_hidden") or marked


def _is_medusa(files: HeadFiles) -> bool:
    keys = ("medusa_num_heads", "medusa_num_layers")
    linear = any(re.fullmatch(r"(medusa_head\.)?\d+\.\d+\.\w+\.weight", n) for n in files.tensors)
    return "Medusa" in _architecture(files) or any(k in files.config for k in keys) or linear


def _is_mla(files: HeadFiles) -> bool:
    return "DeepseekV2" in _architecture(files) or _any_tensor(files, "kv_a_proj", "q_a_proj")


def _is_moe(files: HeadFiles) -> bool:
    return _any_tensor(files, ".experts.", "block_sparse_moe")


def _is_quantised(files: HeadFiles) -> bool:
    if files.config.get("quantization_config") or any(map(_QUANTISED.search, files.tensors)):
        return True
    return any(t.dtype not in _PLAIN for n, t in files.tensors.items() if not n.endswith(_MAPS))


def _has_more_layers(files: HeadFiles) -> bool:
    return any(re.search(r"(^|\.)layers\.[1-9]", name) for name in files.tensors)


_KINDS: tuple[tuple[Callable[[HeadFiles], bool], str], ...] = (
    (_is_dflash, "a DFlash draft, which is not an EAGLE head; use an EAGLE-1, -2 or -3 head"),
    (_is_parallel, "a P-EAGLE (parallel drafting) head, not supported; use an EAGLE-3 head"),
    (_is_medusa, "Medusa heads, not supported; use an EAGLE-1, -2 or -3 head"),
    (_is_mla, "an EAGLE-3 head with DeepSeek's MLA attention, not supported"),
    (_is_moe, "a head with a mixture of experts, not supported"),
    (_is_quantised, "quantised weights, not supported; use the float16 or bfloat16 checkpoint"),
    (
        _has_more_layers,
        "more than one decoder layer: an EAGLE head has one (is this the target itself?)",
    ),
)


def _damaged(files: HeadFiles) -> Iterator[str]:
    for name, tensor in files.tensors.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            bad = int((~torch.isfinite(tensor)).sum())
            yield (
                f"tensor {name} holds {bad} values that are NaN or infinite; "
                "the file is damaged or the training diverged"
            )
