"""Build an engine from its spec: load the target, the tokenizer and the head, size the slots."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from eagle_batch.engine.drafters.base import Drafter
from eagle_batch.engine.drafters.eagle import EagleDrafter
from eagle_batch.engine.ending import Decode
from eagle_batch.engine.engine import Engine
from eagle_batch.engine.request import EngineSpec
from eagle_batch.errors import ConfigError
from eagle_batch.models.checkpoints import load_head
from eagle_batch.models.target import Target, load_target

_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}
#: Longest context that is reserved when the pipeline names none.
_DEFAULT_CONTEXT = 2048


def build_engine(spec: EngineSpec) -> Engine:
    """Load everything that a spec names and return an engine that is ready to `add` and `step`.

    Raises ConfigError, HeadError or ModelError, each naming what does not fit.
    """
    if spec.threads is not None:
        torch.set_num_threads(spec.threads)
    device = torch.device(spec.device)
    target = load_target(
        spec.model, revision=spec.revision, dtype=_DTYPES[spec.dtype], device=device
    )
    tokenizer = AutoTokenizer.from_pretrained(spec.model, revision=spec.revision)
    context = _context(spec.context, target.shape.context)
    drafter = None if spec.head is None else _build_drafter(spec, spec.head, target, context)
    return Engine(
        target,
        drafter,
        tokenizer,
        _decoder(tokenizer),
        slots=spec.slots,
        context=context,
        prefill_chunk=spec.prefill_chunk,
    )


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
        return min(limit, _DEFAULT_CONTEXT)
    if wanted > limit:
        raise ConfigError(
            f"target.context: {wanted} tokens, but the target was made for {limit}; "
            f"lower it to {limit} or less"
        )
    return wanted


def _build_drafter(spec: EngineSpec, path: str, target: Target, context: int) -> Drafter:
    head = load_head(
        path, dtype=target.dtype, device=target.device, target_layers=target.shape.layers
    )
    head.bind(target.embed_weight_VH, target.lm_head_weight_VH)
    if spec.tree == "chain":
        width, nodes = 1, spec.depth
    else:
        width, nodes = spec.width, spec.nodes
    return EagleDrafter(
        head,
        slots=spec.slots,
        capacity=context + spec.depth + 2,
        depth=spec.depth,
        width=width,
        nodes=nodes,
    )
