"""Build an engine from its spec: load the target, the tokenizer and the head, size the slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from eagle_batch.engine.calibration import measure_rows
from eagle_batch.engine.drafters.base import Drafter
from eagle_batch.engine.drafters.draft_model import DraftModelDrafter
from eagle_batch.engine.drafters.eagle import EagleDrafter
from eagle_batch.engine.drafters.growing import GrowingDrafter
from eagle_batch.engine.drafters.merged import MergedDrafter
from eagle_batch.engine.drafters.ngram import NgramDrafter
from eagle_batch.engine.drafters.static import DEFAULT_PATHS, StaticEagleDrafter
from eagle_batch.engine.ending import Decode
from eagle_batch.engine.engine import Engine, TakeHead
from eagle_batch.engine.memory import free_bytes
from eagle_batch.engine.request import EngineSpec
from eagle_batch.engine.sizing import SHARES, Sizing, settle
from eagle_batch.engine.vocabularies import vocabulary_problem
from eagle_batch.errors import ConfigError, ModelError
from eagle_batch.models.checkpoints import load_head
from eagle_batch.models.fused_head import fuse_head, is_fusible_head
from eagle_batch.models.heads import Head
from eagle_batch.models.linear import replace_linears
from eagle_batch.models.placement import Placement
from eagle_batch.models.target import Target, load_target

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}
#: Longest context that is reserved when the pipeline names none.
DEFAULT_CONTEXT = 2048
#: Tokens of a typical row, half of which stand before the passes that are timed.
_TYPICAL = 512
#: Bytes for each token of the vocabulary at each node: logits, adjusted, with noise, and counts.
_LOGIT_BYTES = 24


@dataclass(frozen=True, slots=True)
class Parts:
    """What is loaded once, however many engines are made of it."""

    target: Target
    tokenizer: PreTrainedTokenizerBase
    head: Head | None
    #: A smaller model that drafts.
    draft: Target | None = None


def build_engine(spec: EngineSpec) -> Engine:
    """Load everything that a spec names and return an engine that is ready to `add` and `step`.

    Raises ConfigError, HeadError or ModelError, each naming what does not fit.
    """
    return assemble(load_parts(spec), spec)


def load_parts(spec: EngineSpec) -> Parts:
    """Load target, tokenizer and head; see `build_engine` for what it raises."""
    if spec.threads is not None:
        torch.set_num_threads(spec.threads)
    where = _placement(spec)
    dtype = DTYPES[spec.dtype]
    target = load_target(spec.model, revision=spec.revision, dtype=dtype, where=where)
    tokenizer = AutoTokenizer.from_pretrained(spec.model, revision=spec.revision)
    if spec.draft is not None:
        return Parts(target, tokenizer, None, _load_draft(spec, tokenizer, target.device))
    head = None if spec.head is None else load_bound_head(spec.head, target)
    return Parts(target, tokenizer, head)


def load_bound_head(name: str, target: Target) -> Head:
    """Load a head for a target, ready to draft; raises HeadError where it does not fit."""
    layers, dtype = target.shape.layers, target.dtype
    head = load_head(name, dtype=dtype, device=target.device, target_layers=layers)
    head.bind(target.embed_weight_VH, target.lm_head_weight_VH)
    if target.team is not None and is_fusible_head(head, target.device):
        fuse_head(head, target.team)
    else:
        replace_linears(head)
    return head


def default_device() -> str:
    """Return the first GPU of this machine, else its CPU."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def device_named(name: str) -> str:
    """Return the device that an option means; `auto` is the default one."""
    return default_device() if name == "auto" else name


def _placement(spec: EngineSpec) -> Placement:
    """Return where the target goes; raises ConfigError where there are not so many GPUs."""
    if spec.gpus == 1:
        return Placement((torch.device(spec.device),))
    found = torch.cuda.device_count()
    if found < spec.gpus:
        raise ConfigError(
            f"workers.gpus: found {spec.gpus}, and this process sees {found}; expected so many on "
            "one node"
        )
    devices = tuple(torch.device(spec.device, number) for number in range(spec.gpus))
    beside = _stored_bytes(spec.head) + _stored_bytes(spec.draft)
    return Placement(devices, beside, spec.slots * (spec.context or DEFAULT_CONTEXT))


def _stored_bytes(folder: str | None) -> int:
    """Return what the weights in a folder take."""
    files = [] if folder is None else Path(folder).rglob("*")
    return sum(file.stat().st_size for file in files if file.suffix in {".safetensors", ".bin"})


def _load_draft(
    spec: EngineSpec, tokenizer: PreTrainedTokenizerBase, device: torch.device
) -> Target:
    """Load the model that drafts; refuse one that spells texts in other tokens."""
    assert spec.draft is not None
    own = AutoTokenizer.from_pretrained(spec.draft)
    problem = vocabulary_problem(tokenizer.get_vocab(), own.get_vocab())
    if problem:
        raise ConfigError(f"speculation.draft: {spec.draft}: {problem}")
    where = Placement((device,))
    try:
        return load_target(spec.draft, revision=None, dtype=DTYPES[spec.dtype], where=where)
    except ModelError as error:
        raise ConfigError(f"speculation.draft: {error}") from error


def assemble(parts: Parts, spec: EngineSpec) -> Engine:
    """Make an engine of loaded parts; without a head it drafts by n-grams, or decodes plainly."""
    context = _context(spec.context, parts.target.shape.context)
    sizing = fitting(parts, spec, context) if spec.fit_slots else Sizing(spec.slots, "as asked")
    spec = replace(spec, slots=sizing.slots)
    drafter: Drafter | None = None
    if spec.head is not None and parts.head is not None:
        drafter = _build_drafter(spec, parts.head, context)
    elif spec.draft is not None and parts.draft is not None:
        drafter = DraftModelDrafter(
            parts.draft,
            target_vocab=parts.target.shape.vocab,
            slots=spec.slots,
            capacity=context + spec.reach + 2,
            **_sizes(spec),
        )
    elif spec.ngram:
        drafter = _ngram(spec, context, spec.depth, parts.target.device)
    drafter = _with_branch(drafter, spec, context, parts.target.device)
    return Engine(
        parts.target,
        drafter,
        parts.tokenizer,
        _decoder(parts.tokenizer),
        slots=spec.slots,
        context=context,
        prefill_chunk=spec.prefill_chunk,
        auto=spec.auto,
        take_head=_head_taker(spec, parts.target, context) if spec.adapt else None,
        room=spec.nodes + spec.with_head("").branch if spec.adapt else 0,
        sizing=sizing,
    )


def fitting(parts: Parts, spec: EngineSpec, context: int) -> Sizing:
    """Return how many slots memory and speed allow on the target's device."""
    device = parts.target.device

    def seconds(rows: int) -> float:
        return measure_rows(parts.target, rows, min(context, _TYPICAL) // 2)

    free, share = free_bytes(device), SHARES.get(device.type, SHARES["cpu"])
    return settle(free, share, slot_bytes(parts, spec, context), seconds)


def slot_bytes(parts: Parts, spec: EngineSpec, context: int) -> int:
    """Return the memory of one row: keys and values, what drafts it, and its logits."""
    target, nodes = parts.target, spec.nodes + spec.branch
    columns = context + nodes + 2
    numbers, drafted = columns * _column(target), 0
    if parts.draft is not None:
        numbers += columns * _column(parts.draft)
    elif parts.head is not None:
        config = parts.head.config
        numbers += columns * (2 * config.kv_heads * config.head_dim + config.feature_width)
        drafted = spec.width * config.draft_vocab
    logits = (1 + nodes) * target.shape.vocab + drafted
    return numbers * target.dtype.itemsize + logits * _LOGIT_BYTES


def _column(model: Target) -> int:
    """Return how many numbers a model keeps of one token."""
    shape = model.shape
    return shape.layers * 2 * shape.kv_heads * shape.head_dim


def _head_taker(spec: EngineSpec, target: Target, context: int) -> TakeHead:
    def take(name: str, now: Drafter | None) -> Drafter:
        head = load_bound_head(name, target)
        if isinstance(now, EagleDrafter | MergedDrafter) and now.take(head):
            return now
        later = spec.with_head(name)
        drafter = _with_branch(_build_drafter(later, head, context), later, context, target.device)
        assert drafter is not None
        return drafter

    return take


def _with_branch(
    drafter: Drafter | None, spec: EngineSpec, context: int, device: torch.device
) -> Drafter | None:
    if spec.branch and isinstance(drafter, GrowingDrafter):
        return MergedDrafter(drafter, _ngram(spec, context, spec.branch, device))
    return drafter


def _ngram(spec: EngineSpec, context: int, depth: int, device: torch.device) -> NgramDrafter:
    return NgramDrafter(slots=spec.slots, capacity=context, depth=depth, device=device)


def _decoder(tokenizer: PreTrainedTokenizerBase) -> Decode:
    """Return how token ids become text; spaces are left as the model wrote them."""

    def decode(token_ids: Sequence[int]) -> str:
        text = tokenizer.decode(
            list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        assert isinstance(text, str)
        return text

    return decode


def _context(wanted: int | None, limit: int) -> int:
    if wanted is None:
        return min(limit, DEFAULT_CONTEXT)
    if wanted > limit:
        raise ConfigError(
            f"target.context: {wanted} tokens, but the target was made for {limit}; "
            f"lower it to {limit} or less"
        )
    return wanted


def _build_drafter(spec: EngineSpec, head: Head, context: int) -> Drafter:
    # Elsewhere the host would have to wait for the lengths of the rows.
    late = next(head.parameters()).device.type == "cpu"
    if spec.tree == "static":
        paths = spec.paths or DEFAULT_PATHS
        return StaticEagleDrafter(head, paths, slots=spec.slots, capacity=context + 2, late=late)
    capacity = context + spec.reach + 2
    return EagleDrafter(head, slots=spec.slots, capacity=capacity, late=late, **_sizes(spec))


def _sizes(spec: EngineSpec) -> dict[str, int]:
    if spec.tree == "chain":
        return {"depth": spec.depth, "width": 1, "nodes": spec.depth}
    return {"depth": spec.depth, "width": spec.width, "nodes": spec.nodes}
