"""Training beside a job: a head that learns from the texts that the job has written so far.

It learns in rounds. Each takes in new texts, goes over all that are kept for a limited time, and
measures acceptance on texts that it never learns from. A round without a gain is undone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from eagle_batch.errors import DataError
from eagle_batch.models.checkpoints import assemble, load_head
from eagle_batch.models.export import export_head
from eagle_batch.models.heads import Head
from eagle_batch.models.layouts import HeadParts
from eagle_batch.training.dataset import Dataset, feature_scale, rescale_fc
from eagle_batch.training.features import Chunk, compute_chunk
from eagle_batch.training.initial import head_config_for, tensors_from_target
from eagle_batch.training.learnt import Learnt
from eagle_batch.training.objectives import (
    DraftVocabulary,
    Eagle1Objective,
    Eagle3Objective,
    Objective,
)
from eagle_batch.training.run import load_target
from eagle_batch.training.samples import Sample
from eagle_batch.training.trainer import expected_length
from eagle_batch.training.validation import measure_acceptance

Clock = Callable[[], float]

#: One text of so many is held out.
HELD_OUT_EVERY = 12
#: Texts that one measurement reads, the newest.
HELD_OUT_TEXTS = 64
#: Bytes of hidden states that are kept; the oldest go first.
KEPT_BYTES = 2 << 30
#: Longer texts lose their beginning.
MAX_LENGTH = 1024
#: Padded tokens of one step.
BATCH_TOKENS = 1024
#: Share of a round's time that may go into the hidden states of new texts.
FEATURES_SHARE = 0.4
#: Times that a round goes over the texts, where the time suffices.
PASSES = 4
#: Steps of the training-time test, what each weighs less, and drafted positions that are measured.
TTT_STEPS, TTT_DECAY, MEASURED_STEPS = 3, 0.8, 4
#: Expected tokens a pass that a first head must reach, and times what the head in use reaches that
#: a better one must: less is not told from chance.
LEAST, MORE = 1.2, 1.02
#: Highest learning rate, its share at the end of a round, and steps in which it rises at first.
LR, LAST_LR, WARMUP = 2e-3, 0.1, 12
_BETAS = (0.9, 0.95)
_CLIP = 0.5


def is_gain(before: float | None, after: float) -> bool:
    """Tell whether a head drafts better than the one in use, and well enough to be tried at all."""
    return after >= LEAST if before is None else after >= MORE * before


@dataclass(frozen=True, slots=True)
class _Weights:
    """What training changes in a head."""

    state: dict[str, torch.Tensor]
    draft_to_target: torch.Tensor | None

    @classmethod
    def of(cls, head: Head) -> _Weights:
        return cls({n: t.clone() for n, t in head.state_dict().items()}, head.draft_to_target)

    def put(self, head: Head) -> None:
        head.load_state_dict(self.state)
        head.draft_to_target = self.draft_to_target


class OnlineTrainer:
    """Owns the head that is trained, its optimiser, and the hidden states of the texts so far."""

    def __init__(
        self, target: Any, start: Head | None = None, clock: Clock = time.monotonic
    ) -> None:
        """Begin with a head to improve, bound to the target, or with none.

        `target` is a transformers causal LM; everything runs on its device.
        """
        self._target = target
        self._clock = clock
        self._head = start
        self._chunks: list[Chunk] = []
        self._held: list[Chunk] = []
        self._seen = 0
        self._scale_F: torch.Tensor | None = None
        self._optimizer: torch.optim.Optimizer | None = None
        self._steps = 0
        self._rate = LR
        #: The head in use; what is trained goes on from it, or further where none is.
        self._used: _Weights | None = None
        self._generator = torch.Generator().manual_seed(0)
        aux = None if start is None else start.config.aux_layers
        shape = head_config_for(target.config, kind="eagle3", draft_vocab=2, aux_layers=aux)
        self._aux_layers = shape.aux_layers

    def round(self, texts: Sequence[Sample], seconds: float) -> Learnt:
        """Learn from new texts and from those before, for at most about so many seconds.

        Raises DataError while there is nothing to learn from or nothing is held out.
        """
        begun = self._clock()
        self._add(texts, begun + FEATURES_SHARE * seconds)
        if not self._chunks or not self._held:
            raise DataError(f"{self._seen} texts are too few to train a head and to measure it")
        head = self._prepared()
        # Measured anew: other texts are held out by now.
        before = None if self._used is None else self._measure(head)
        self._choose_vocabulary(head)
        data = Dataset(self._chunks, 0.0, self._scale_F)
        steps = self._learn(head, data, begun + seconds)
        after = self._measure(head)
        tokens = len(data.completion_tokens())
        gain = is_gain(before, after)
        self._settle(head, gain=gain)
        return Learnt(tokens, steps, self._clock() - begun, before, after, gain)

    def _settle(self, head: Head, *, gain: bool) -> None:
        if gain:
            self._used = _Weights.of(head)
        elif self._used is not None:
            self._used.put(head)
            self._rate /= 2
            self._optimizer = self._new_optimizer(head)

    def export(self, folder: Path, verifier: str = "") -> None:
        """Write the head in the official layout; raises HeadError where it reads back otherwise."""
        assert self._head is not None, "nothing was learnt yet"
        rescale_fc(self._head, None if self._scale_F is None else 1 / self._scale_F)
        try:
            export_head(self._head, folder, verifier=verifier)
        finally:
            rescale_fc(self._head, self._scale_F)

    # -- texts -------------------------------------------------------------------------------

    def _add(self, texts: Sequence[Sample], until: float) -> None:
        """Compute hidden states, a few texts at a time, the newest first, until the time is up."""
        first = self._seen
        self._seen += len(texts)
        numbered = list(enumerate(texts, first))[::-1]
        for start in range(0, len(numbered), HELD_OUT_EVERY):
            group = numbered[start : start + HELD_OUT_EVERY]
            for kept, is_held in ((self._chunks, False), (self._held, True)):
                part = [_cut(s) for n, s in group if (n % HELD_OUT_EVERY == 0) == is_held]
                if part:
                    kept.append(compute_chunk(self._target, part, self._aux_layers, BATCH_TOKENS))
            if self._clock() >= until:
                break
        while sum(map(_size, self._chunks)) > KEPT_BYTES:
            del self._chunks[0]
        while sum(len(chunk.prompt_lengths) for chunk in self._held[1:]) >= HELD_OUT_TEXTS:
            del self._held[0]

    def _measure(self, head: Head) -> float:
        """Return the expected tokens a pass of a chain on the held-out texts."""
        data = Dataset(self._held, 0.0, self._scale_F)
        head.eval()
        found = measure_acceptance(
            head,
            data,
            data.training,
            self._vocabulary(head),
            steps=MEASURED_STEPS,
            batch_tokens=BATCH_TOKENS,
        )
        return expected_length(found)

    def _vocabulary(self, head: Head) -> DraftVocabulary:
        weight = self._target.get_output_embeddings().weight.float()
        return DraftVocabulary(weight, head.draft_to_target)

    # -- the head ----------------------------------------------------------------------------

    def _prepared(self) -> Head:
        """Return the head that learns, which the first round makes ready."""
        if self._optimizer is not None:
            assert self._head is not None
            return self._head
        starts, self._head = self._head is not None, self._head or self._first_head()
        if self._head.config.kind == "eagle3" and self._head.config.aux_layers:
            self._scale_F = feature_scale(self._chunks)
            rescale_fc(self._head, self._scale_F)
        self._head.requires_grad_(True)
        self._used = _Weights.of(self._head) if starts else None
        self._optimizer = self._new_optimizer(self._head)
        return self._head

    def _first_head(self) -> Head:
        completions = Dataset(self._chunks, 0.0).completion_tokens()
        config = head_config_for(
            self._target.config,
            kind="eagle3",
            draft_vocab=vocabulary_size(int(completions.bincount().count_nonzero())),
            aux_layers=self._aux_layers,
        )
        kept = None
        if config.draft_vocab < config.vocab:
            kept = next_vocabulary(completions, torch.arange(config.draft_vocab), config.vocab)
        tensors = tensors_from_target(config, self._target.state_dict(), kept, seed=0)
        head = assemble(
            HeadParts(config, tensors, kept), dtype=torch.float32, device=self._target.device
        )
        embed, output = self._target.get_input_embeddings(), self._target.get_output_embeddings()
        head.bind(embed.weight, output.weight)
        return head

    def _new_optimizer(self, head: Head) -> torch.optim.Optimizer:
        return torch.optim.AdamW(head.parameters(), betas=_BETAS, weight_decay=0.0)

    def _choose_vocabulary(self, head: Head) -> None:
        """Let the head propose what the texts so far hold, where its vocabulary is a part."""
        known = head.draft_to_target
        if known is None or not head.config.own_lm_head:
            return
        completions = Dataset(self._chunks, 0.0).completion_tokens()
        kept = next_vocabulary(completions, known.cpu(), head.config.vocab)
        if not torch.equal(kept, known.cpu()):
            self._change_vocabulary(head, kept)

    def _change_vocabulary(self, head: Head, kept: torch.Tensor) -> None:
        """Let the head propose other tokens; those that are new begin with the target's rows."""
        assert self._optimizer is not None
        assert head.draft_to_target is not None
        parameter: torch.nn.Parameter = head.lm_head.weight  # type: ignore[union-attr, assignment]
        output = self._target.get_output_embeddings().weight
        whole_VH = output.detach().to(parameter.dtype, copy=True)
        whole_VH[head.draft_to_target] = parameter.detach()
        with torch.no_grad():
            parameter.copy_(whole_VH[kept.to(whole_VH.device)])
        head.draft_to_target = kept.to(parameter.device)
        self._optimizer.state.pop(parameter, None)

    # -- learning ----------------------------------------------------------------------------

    def _learn(self, head: Head, data: Dataset, until: float) -> int:
        """Take steps until the passes are made or the time is up; return how many."""
        objective = self._objective(head)
        begun = self._clock()
        epochs = [data.epoch(self._steps, number, BATCH_TOKENS) for number in range(PASSES)]
        batches = [rows for epoch in epochs for rows in epoch]
        for number, rows in enumerate(batches):
            elapsed = self._clock() - begun
            progress = max(number / len(batches), elapsed / max(until - begun, 1e-9))
            if number and progress >= 1:
                return number
            self._step(head, objective, data, rows, progress)
        return len(batches)

    def _step(
        self, head: Head, objective: Objective, data: Dataset, rows: list[int], progress: float
    ) -> None:
        assert self._optimizer is not None
        head.train()
        rise = min(1.0, (self._steps + 1) / WARMUP)
        for group in self._optimizer.param_groups:
            group["lr"] = self._rate * rise * max(LAST_LR, 1 - progress)
        batch = data.batch(rows).to(self._target.device)
        loss = objective.loss(head, batch, self._generator)
        self._optimizer.zero_grad(set_to_none=True)
        (loss.total / loss.weight.clamp(min=1.0)).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(head.parameters(), _CLIP)
        self._optimizer.step()
        self._steps += 1

    def _objective(self, head: Head) -> Objective:
        vocabulary = self._vocabulary(head)
        if head.config.kind == "eagle1":
            return Eagle1Objective(vocabulary)
        return Eagle3Objective(vocabulary, TTT_STEPS, TTT_DECAY, 0.0)


def vocabulary_size(seen: int) -> int:
    """Return the size of a draft vocabulary: twice the tokens seen, since others will come.

    A power of two, 1024 at least.
    """
    return max(1024, 1 << (2 * seen - 1).bit_length())


def next_vocabulary(tokens: torch.Tensor, known: torch.Tensor, vocab: int) -> torch.Tensor:
    """Return as many ids as are known, sorted: the most frequent, then those that are known."""
    # A token that occurs once goes before one that was only known.
    rank = 2 * torch.bincount(tokens.long(), minlength=vocab)
    rank[known] += 1
    return rank.argsort(descending=True, stable=True)[: len(known)].sort().values


def _cut(sample: Sample) -> Sample:
    """Leave out the beginning of a long text, so that what was written stays."""
    beyond = max(0, len(sample.tokens) - MAX_LENGTH)
    return Sample(sample.tokens[beyond:], max(1, sample.prompt_length - beyond))


def _size(chunk: Chunk) -> int:
    return chunk.aux_TF.nbytes + chunk.last_TH.nbytes


def open_trainer(
    model: str, start: str | None, *, dtype: str, device: str, threads: int | None
) -> OnlineTrainer:
    """Load a target, in the number format of the job, and the head to begin with, if there is one.

    Raises ModelError or HeadError.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    target = load_target(model, getattr(torch, dtype)).to(device)
    head = None
    if start is not None:
        layers = int(target.config.num_hidden_layers)
        head = load_head(start, dtype=torch.float32, device=device, target_layers=layers)
        embed, output = target.get_input_embeddings(), target.get_output_embeddings()
        head.bind(embed.weight, output.weight)
    return OnlineTrainer(target, head)
