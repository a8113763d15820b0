"""Whether a head fits its target, and how well it drafts: the answer before a job is started.

A head that is read wrongly (a layer off by one, another rope base) loads and runs; only its
acceptance on the target's own texts shows it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from eagle_batch.engine.build import build_engine
from eagle_batch.engine.request import EngineMetrics, EngineSpec, Request, SamplingParams
from eagle_batch.errors import DataError
from eagle_batch.models.checkpoints import load_head
from eagle_batch.models.heads import Head, HeadConfig
from eagle_batch.training.dataset import Dataset
from eagle_batch.training.features import Chunk, compute_chunk
from eagle_batch.training.objectives import DraftVocabulary
from eagle_batch.training.run import load_target
from eagle_batch.training.samples import Sample, read_samples
from eagle_batch.training.validation import Acceptance, measure_acceptance

#: Below this share at the first position something is wrong more often than the training was short.
SUSPICIOUS = 0.3
#: Another choice of layers must accept so much more at the first position to be named.
_BETTER = 0.02
#: Chains are this deep, and texts this long.
_STEPS, _MAX_LENGTH = 4, 1024


@dataclass(frozen=True, slots=True)
class Decoded:
    """What an engine counted while it decoded prompts greedily with chains of the head."""

    #: n-alpha, as in `Acceptance`.
    by_position: tuple[float, ...]
    acceptance_length: float
    prompts: int
    tokens: int


@dataclass(frozen=True, slots=True)
class HeadReport:
    """What is known about a head that fits its target."""

    config: HeadConfig
    parameters: int
    #: On given texts; None where none were given.
    acceptance: Acceptance | None = None
    #: On given prompts; None where none were given.
    decoded: Decoded | None = None
    #: Aux layers with which the head would accept more, and how often at the first position with
    #: these and with its own; None where its own are the best of those that were tried.
    better: tuple[tuple[int, ...], float, float] | None = None

    @property
    def suspicious(self) -> bool:
        """Whether the first draft is refused so often that the head is hardly read rightly."""
        first = [found.by_position[0] for found in (self.acceptance, self.decoded) if found]
        return any(share < SUSPICIOUS for share in first)


def check_head(
    head_path: str,
    target: str,
    *,
    texts: Path | None = None,
    prompts: Sequence[str] = (),
    rows: int = 64,
    max_tokens: int = 64,
) -> HeadReport:
    """Load a head strictly, bind it to its target, and draft on texts or prompts of the target.

    `prompts` are users' questions, which the target answers greedily with this head.
    Raises HeadError, ModelError or DataError.
    """
    model = load_target(target, torch.float32)
    layers = int(model.config.num_hidden_layers)
    head = load_head(head_path, dtype=torch.float32, device="cpu", target_layers=layers)
    head.bind(model.get_input_embeddings().weight, model.get_output_embeddings().weight)
    report = HeadReport(head.config, sum(p.numel() for p in head.parameters()))
    samples: list[Sample] = []
    if texts is not None:
        samples = read_samples(texts, _MAX_LENGTH)[:rows]
        if not samples:
            raise DataError(f"{texts}: no row has a prompt and a completion of two tokens or more")
        report = replace(report, acceptance=_draft_on(head, model, samples, head.config.aux_layers))
    if prompts:
        spec = EngineSpec(target, head_path, tree="chain", depth=_STEPS, width=1, nodes=_STEPS)
        decoded, answers = _decode(spec, prompts[:rows], max_tokens)
        report, samples = replace(report, decoded=decoded), [*samples, *answers]
    return replace(report, better=_better_layers(head, model, samples))


def _decode(
    spec: EngineSpec, prompts: Sequence[str], max_tokens: int
) -> tuple[Decoded, list[Sample]]:
    engine = build_engine(spec)
    ids = [prompt_ids(engine.tokenizer, text) for text in prompts]
    for row, prompt in enumerate(ids):
        engine.add(Request(str(row), prompt, SamplingParams(max_tokens=max_tokens)))
    samples = []
    while engine.has_work:
        for done in engine.step():
            prompt = ids[int(done.request_id)]
            if len(done.token_ids) > 1:
                samples.append(Sample((*prompt, *done.token_ids), len(prompt)))
    return _decoded(engine.metrics(), len(prompts)), samples


def _decoded(metrics: EngineMetrics, prompts: int) -> Decoded:
    # A chain reaches its second draft where the first one was accepted.
    reached = (metrics.row_passes, *metrics.accepted_at)
    shares = zip(metrics.accepted_at, reached, strict=False)
    return Decoded(
        tuple(accepted / max(1, tried) for accepted, tried in shares),
        metrics.acceptance_length,
        prompts,
        metrics.completion_tokens,
    )


def prompt_ids(tokenizer: Any, text: str) -> tuple[int, ...]:
    """Return a question as the target's chat template puts it, or as it is where there is none."""
    if tokenizer.chat_template is None:
        return tuple(tokenizer.encode(text))
    turns = [{"role": "user", "content": text}]
    shown = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    return tuple(tokenizer.encode(shown, add_special_tokens=False))


def _draft_on(
    head: Head, model: Any, samples: Sequence[Sample], layers: tuple[int, ...]
) -> Acceptance:
    return _measure(head, model, compute_chunk(model, samples, layers), _STEPS)


def _measure(head: Head, model: Any, chunk: Chunk, steps: int) -> Acceptance:
    data = Dataset([chunk], held_out=0.0)
    vocabulary = DraftVocabulary(model.get_output_embeddings().weight, head.draft_to_target)
    return measure_acceptance(head, data, data.training, vocabulary, steps=steps, batch_tokens=4096)


def neighbours(layers: tuple[int, ...], count: int) -> list[tuple[int, ...]]:
    """Return other choices of aux layers that a head may have been trained with.

    Publishers count layers from their inputs or from their outputs, so all ids may be off by one;
    and the usual choice may have been left out of the config.
    """
    moved = [tuple(k + by for k in layers) for by in (-1, 1)]
    usual = (2, count // 2, count - 3)
    choices = [*moved, usual] if len(layers) == len(usual) else moved
    return [c for c in dict.fromkeys(choices) if c != layers and all(0 <= k < count for k in c)]


def _better_layers(
    head: Head, model: Any, samples: Sequence[Sample]
) -> tuple[tuple[int, ...], float, float] | None:
    own = head.config.aux_layers
    others = neighbours(own, int(model.config.num_hidden_layers))
    if not samples or not own or not others:
        return None
    union = tuple(sorted({k for choice in (own, *others) for k in choice}))
    chunk = compute_chunk(model, samples, union)

    def first(choice: tuple[int, ...]) -> float:
        return _measure(head, model, _with_layers(chunk, union, choice), 1).by_position[0]

    ours, best = first(own), max(others, key=first)
    found = first(best)
    return (best, found, ours) if found > ours + _BETTER else None


def _with_layers(chunk: Chunk, union: Sequence[int], choice: Sequence[int]) -> Chunk:
    """Return the features of some of the layers that a chunk holds."""
    width = chunk.aux_TF.shape[1] // len(union)
    parts = [chunk.aux_TF[:, union.index(k) * width :][:, :width] for k in choice]
    return replace(chunk, aux_TF=torch.cat(parts, dim=1))
