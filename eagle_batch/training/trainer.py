"""The training run: epochs of batches, validations, saved states, and the best head exported."""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from eagle_batch.errors import DataError
from eagle_batch.models.checkpoints import assemble, load_head, read_head
from eagle_batch.models.export import export_head
from eagle_batch.models.heads import Head
from eagle_batch.models.layouts import HeadParts
from eagle_batch.training.config import TrainingConfig
from eagle_batch.training.dataset import Dataset, feature_scale, rescale_fc
from eagle_batch.training.features import Chunk
from eagle_batch.training.initial import (
    head_config_for,
    random_tensors,
    tensors_from_target,
    widened,
)
from eagle_batch.training.objectives import (
    DraftVocabulary,
    Eagle1Objective,
    Eagle3Objective,
    Loss,
    Objective,
)
from eagle_batch.training.picture import draw_curve
from eagle_batch.training.state import TrainingState, load_state, save_state
from eagle_batch.training.team import ALONE, Team
from eagle_batch.training.validation import Acceptance, measure_acceptance
from eagle_batch.training.vocabulary import (
    choose_draft_vocabulary,
    coverage,
    widen_draft_vocabulary,
)

_BETAS = (0.9, 0.95)
#: What may change between a run and its continuation without changing its numbers.
_FREE_SETTINGS = {"out", "features", "threads", "save_every", "data", "stages", "target", "start"}
_FREE_SETTINGS |= {"device", "workers"}


@dataclass(frozen=True, slots=True)
class Progress:
    """One step of a run, as a progress display wants it."""

    step: int
    steps: int
    loss: float
    #: Newest validation; None before the first.
    acceptance: Acceptance | None


@dataclass(frozen=True, slots=True)
class TrainingResult:
    """What a finished run leaves."""

    head: Path
    steps: int
    seconds: float
    best: Acceptance


class Trainer:
    """Trains one head; `run` goes on from the newest saved state of its folder."""

    def __init__(
        self,
        config: TrainingConfig,
        target: Any,
        chunks: list[Chunk],
        name: str = "",
        team: Team = ALONE,
    ) -> None:
        self.config = config
        self.name = name
        self.team = team
        self.device = target.get_output_embeddings().weight.device
        plain = Dataset(chunks, config.held_out)
        _require_both_sides(plain)
        self.head = self._start(target, plain)
        scaled = (
            isinstance(getattr(self.head, "fc", None), torch.nn.Linear) and config.kind == "eagle3"
        )
        self.scale_F = feature_scale(chunks) if scaled else None
        self.data = Dataset(chunks, config.held_out, self.scale_F)
        rescale_fc(self.head, self.scale_F)
        self.head.to(self.device)
        self.held_out = self.data.validation[: config.held_out_rows]
        self.vocabulary = DraftVocabulary(
            target.get_output_embeddings().weight.to(_DTYPES[config.dtype]),
            self.head.draft_to_target,
        )
        self.covered = coverage(plain.completion_tokens(), self.head.draft_to_target)
        self.objective = self._objective()
        self.optimizer = torch.optim.AdamW(_groups(self.head, config), betas=_BETAS)
        self._epochs = [len(self._batches(e)) for e in range(config.epochs)]
        self.steps = sum(self._epochs)
        self.state = self._fresh_state()

    def run(self, on_step: Callable[[Progress], None] = lambda _: None) -> TrainingResult:
        """Train to the end; raises ConfigError where the folder holds another run."""
        folder = self.config.out / "state"
        found = load_state(folder, self.state.fingerprint) if self.team.first else None
        saved = self.team.from_first(found)
        if saved is not None:
            self._restore(saved)
        for loss in self._train():
            if self.team.first:
                on_step(self._keep(loss, folder))
        if self.team.first:
            self._finish()
        self.team.wait()
        return self._result()

    def _keep(self, loss: float, folder: Path) -> Progress:
        """Validate and save where it is time to."""
        step = self.state.step
        if step % self.config.evaluate_every == 0 or step == self.steps:
            self._validate(loss)
        if step % self.config.save_every == 0 or step == self.steps:
            save_state(folder, self._captured())
        return Progress(step, self.steps, loss, self._last_acceptance())

    def _train(self) -> Iterator[float]:
        """Take one optimiser step at a time and yield its loss."""
        while self.state.epoch < self.config.epochs:
            batches = self._batches(self.state.epoch)
            for rows in batches[self.state.position :]:
                started = time.monotonic()
                loss = self._step(rows)
                self.state = replace(
                    self.state,
                    step=self.state.step + 1,
                    position=self.state.position + 1,
                    seconds=self.state.seconds + time.monotonic() - started,
                )
                if self.state.position == len(batches):
                    self.state = replace(self.state, epoch=self.state.epoch + 1, position=0)
                yield loss

    def _step(self, rows: list[int]) -> float:
        self.head.train()
        rate = learning_rate(self.state.step, self.steps, self.config)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.zero_grad(set_to_none=True)
        loss = self._gradient(self.team.share(rows))
        torch.nn.utils.clip_grad_norm_(self.head.parameters(), self.config.clip)
        self.optimizer.step()
        return loss

    def _gradient(self, rows: list[int]) -> float:
        """Leave the gradient of the whole batch's mean loss, of which `rows` are our share."""
        part = Loss(*torch.zeros(2, device=self.device))
        if rows:
            # A step's randomness depends on its number alone, so that a resumed run has the same.
            place = np.random.SeedSequence([self.config.seed, self.state.step, self.team.rank])
            generator = torch.Generator().manual_seed(int(place.generate_state(1)[0]))
            with self._arithmetic():
                batch = self.data.batch(rows).to(self.device)
                part = self.objective.loss(self.head, batch, generator)
        weight = self.team.total(part.weight).clamp(min=1.0)
        if rows:
            (part.total / weight).backward()  # type: ignore[no-untyped-call]
        self.team.add_gradients(self.head.parameters())
        return float(self.team.total(part.total.detach()) / weight)

    def _arithmetic(self) -> AbstractContextManager[Any]:
        if self.config.dtype == "float32":
            return nullcontext()
        return torch.autocast(self.device.type, dtype=_DTYPES[self.config.dtype])

    def _validate(self, loss: float) -> None:
        """Measure acceptance, extend the curve, and export the head when it is the best so far."""
        self.head.eval()
        with self._arithmetic():
            found = measure_acceptance(
                self.head,
                self.data,
                self.held_out,
                self.vocabulary,
                steps=max(2, self.config.ttt_steps),
                batch_tokens=self.config.batch_tokens,
            )
        record = {
            "step": self.state.step,
            "epoch": self.state.epoch,
            "seconds": round(self.state.seconds, 1),
            "loss": round(loss, 5),
            "lr": learning_rate(self.state.step, self.steps, self.config),
            "acceptance": list(found.by_position),
            "chain_length": found.chain_length,
        }
        score = expected_length(found)
        best = max(score, self.state.best)
        if score > self.state.best:
            self._export("head", "official")
        self.state = replace(self.state, best=best, curve=[*self.state.curve, record])
        lines = "".join(json.dumps(r) + "\n" for r in self.state.curve)
        _write_whole(self.config.out / "curve.jsonl", lines)

    def _finish(self) -> None:
        """Write the best head in the other layout too, and draw the curve."""
        draw_curve(self.config.out / "curve.svg", self.state.curve)
        best = load_head(str(self.config.out / "head"), dtype=torch.float32, device="cpu")
        if self.config.kind == "eagle3":
            export_head(
                best, self.config.out / "head-speculators", layout="speculators", verifier=self.name
            )

    def _result(self) -> TrainingResult:
        curve = self.team.from_first(self.state.curve)
        top = max(curve, key=lambda r: expected_length(_acceptance(r)))
        return TrainingResult(
            self.config.out / "head", self.state.step, self.state.seconds, _acceptance(top)
        )

    def _export(self, name: str, layout: Any) -> None:
        """Export with the features' scale folded into fc; the head being trained is restored."""
        rescale_fc(self.head, None if self.scale_F is None else 1 / self.scale_F)
        try:
            export_head(self.head, self.config.out / name, layout=layout, verifier=self.name)
        finally:
            rescale_fc(self.head, self.scale_F)

    def _batches(self, epoch: int) -> list[list[int]]:
        return self.data.epoch(self.config.seed, epoch, self.config.batch_tokens)

    def _start(self, target: Any, data: Dataset) -> Head:
        """Build the head that training begins with, in float32 and bound to the target."""
        config = self.config
        new = config.start in {"target", "random"}
        parts = self._new_parts(target, data) if new else self._known_parts(target, data)
        head = assemble(parts, dtype=torch.float32, device="cpu")
        embed, lm_head = target.get_input_embeddings(), target.get_output_embeddings()
        head.bind(embed.weight.cpu(), lm_head.weight.cpu())
        return head.requires_grad_(True)

    def _known_parts(self, target: Any, data: Dataset) -> HeadParts:
        """Return the head to go on from, with more tokens to draft where more are asked for."""
        config, layers = self.config, int(target.config.num_hidden_layers)
        parts = read_head(config.start, target_layers=layers)
        known, weight_VH = parts.draft_to_target, target.get_output_embeddings().weight.cpu()
        asked = config.draft_vocab if "draft_vocab" in config.model_fields_set else 0
        fits = (parts.config.vocab, parts.config.hidden) == tuple(weight_VH.shape)
        if known is None or not fits or not len(known) < asked < len(weight_VH):
            return parts
        kept = widen_draft_vocabulary(data.completion_tokens(), known, asked, len(weight_VH))
        return widened(parts, kept, weight_VH)

    def _new_parts(self, target: Any, data: Dataset) -> HeadParts:
        config = self.config
        aux = None if config.aux_layers is None else tuple(config.aux_layers)
        shape = head_config_for(
            target.config, kind=config.kind, draft_vocab=config.draft_vocab, aux_layers=aux
        )
        size = shape.draft_vocab if config.kind == "eagle3" else shape.vocab
        kept = choose_draft_vocabulary(data.completion_tokens(), size, shape.vocab)
        if config.start == "random":
            return HeadParts(shape, random_tensors(shape, config.seed), kept)
        return HeadParts(
            shape, tensors_from_target(shape, target.state_dict(), kept, config.seed), kept
        )

    def _objective(self) -> Objective:
        config = self.config
        if config.kind == "eagle1":
            return Eagle1Objective(self.vocabulary)
        return Eagle3Objective(
            self.vocabulary, config.ttt_steps, config.ttt_decay, config.prompt_weight
        )

    def _fresh_state(self) -> TrainingState:
        return TrainingState(
            fingerprint=self._fingerprint(),
            step=0,
            epoch=0,
            position=0,
            head={},
            optimizer={},
            best=0.0,
            seconds=0.0,
            curve=[],
        )

    def _fingerprint(self) -> str:
        """Hash what the numbers of the run depend on: settings, rows and the first weights."""
        settings = self.config.model_dump(mode="json", exclude=_FREE_SETTINGS)
        digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
        for chunk in self.data.chunks:
            digest.update(chunk.tokens_T.numpy().tobytes())
            digest.update(chunk.starts.numpy().tobytes())
        for value in self.head.state_dict().values():
            digest.update(value.detach().cpu().numpy().tobytes())
        return digest.hexdigest()

    def _captured(self) -> TrainingState:
        return replace(
            self.state,
            head=self.head.state_dict(),
            optimizer=self.optimizer.state_dict(),
        )

    def _restore(self, saved: TrainingState) -> None:
        self.head.load_state_dict(saved.head)
        self.optimizer.load_state_dict(saved.optimizer)
        self.state = replace(saved, head={}, optimizer={})

    def _last_acceptance(self) -> Acceptance | None:
        return _acceptance(self.state.curve[-1]) if self.state.curve else None


_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def _require_both_sides(data: Dataset) -> None:
    if not data.training or not data.validation:
        raise DataError(
            f"data: {len(data.training)} rows to train on and {len(data.validation)} held out; "
            "both are needed: add rows, or change held_out"
        )


def learning_rate(step: int, steps: int, config: TrainingConfig) -> float:
    """Linear warm-up, then a cosine down to a fiftieth of the highest rate."""
    warm = max(1, int(config.warmup * steps))
    if step < warm:
        return config.lr * (step + 1) / warm
    done = (step - warm) / max(1, steps - warm)
    return config.lr * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * done)))


def expected_length(acceptance: Acceptance) -> float:
    """Tokens a pass of a chain, were all positions alike; what the best head is chosen by."""
    total, alive = 1.0, 1.0
    for alpha in acceptance.by_position:
        alive *= alpha
        total += alive
    return total


def _acceptance(record: dict[str, Any]) -> Acceptance:
    return Acceptance(tuple(record["acceptance"]), record["chain_length"], 0, 0)


def _groups(head: Head, config: TrainingConfig) -> list[dict[str, Any]]:
    """Weight decay is for matrices; norms and biases are left alone."""
    matrices = [p for p in head.parameters() if p.dim() > 1]
    vectors = [p for p in head.parameters() if p.dim() == 1]
    return [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]


def _write_whole(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    partial.write_text(text, "utf-8")
    partial.replace(path)
