"""What the papers of EAGLE found, in small: heads that differ in one thing each, trained alike.

    python -m tests.bench.papers --data answers.parquet --steps 300

Every head sees the same batches for the same number of steps and is measured on the same held-out
texts: n-alpha is the share of the chains of n right drafts whose next draft is right as well.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import click
import torch

from eagle_batch import demo
from eagle_batch.training.config import TrainingConfig
from eagle_batch.training.dataset import Batch, Dataset
from eagle_batch.training.features import Chunk, compute_chunk
from eagle_batch.training.run import load_target
from eagle_batch.training.samples import read_samples
from eagle_batch.training.trainer import Trainer
from eagle_batch.training.validation import measure_acceptance

#: n-alpha is measured for n below this.
POSITIONS = 3


@dataclass(frozen=True)
class Variant:
    """A head that differs from EAGLE-3 in one thing."""

    name: str
    settings: dict[str, Any] = field(default_factory=dict)
    #: Whether the head sees the token that was sampled after the feature, or the one before it.
    feedback: bool = True
    #: Whether the head sees features of the target at all.
    features: bool = True


def variants(top: int) -> list[Variant]:
    """Return the heads of the comparison; `top` is the highest layer whose input can be taken."""
    return [
        Variant("EAGLE-3"),
        Variant("no training-time test", {"ttt_steps": 1}),
        Variant("top feature alone", {"aux_layers": [top]}),
        Variant("no token fed back", feedback=False),
        Variant("tokens without features", features=False),
        Variant("EAGLE-1", {"kind": "eagle1", "aux_layers": None}),
    ]


class SeenDataset(Dataset):
    """Batches as a variant's head sees them; what it is to foresee stays as it is."""

    variant: Variant

    def batch(self, rows: Sequence[int]) -> Batch:
        """Return a batch without what the variant lacks."""
        found = super().batch(rows)
        if not self.variant.feedback:
            # Row i reads token i + 1 of this; a shift by one leaves it with token i.
            found = replace(found, tokens_BN=found.tokens_BN.roll(1, dims=1))
        if not self.variant.features:
            found = replace(found, aux_BNF=torch.zeros_like(found.aux_BNF))
        return found


def train(
    variant: Variant, config: TrainingConfig, target: Any, chunk: Chunk, steps: int
) -> tuple[float, ...]:
    """Train one head for so many steps and return its n-alphas."""
    config = config.model_copy(update=variant.settings)
    trainer = Trainer(config, target, [chunk])
    trainer.data.__class__ = SeenDataset
    trainer.data.variant = variant  # type: ignore[attr-defined]
    trainer.steps = steps
    for _ in zip(range(steps), trainer._train(), strict=False):
        pass
    trainer.head.eval()
    return measure_acceptance(
        trainer.head,
        trainer.data,
        trainer.held_out,
        trainer.vocabulary,
        steps=POSITIONS,
        batch_tokens=config.batch_tokens,
    ).by_position


def compare(
    config: TrainingConfig, target: Any, samples: Sequence[Any], steps: int
) -> Iterator[tuple[str, tuple[float, ...]]]:
    """Train every variant in turn on the same texts."""
    layers = int(target.config.num_hidden_layers)
    usual = config.aux_layers or [2, layers // 2, layers - 3]
    config = config.model_copy(update={"aux_layers": usual})
    for variant in variants(layers - 1):
        chosen = variant.settings.get("aux_layers", usual) or []
        chunk = compute_chunk(target, samples, chosen)
        yield variant.name, train(variant, config, target, chunk, steps)


@click.command()
@click.option("--data", type=click.Path(path_type=Path, exists=True), required=True)
@click.option("--texts", default=1000, help="Texts that are read.")
@click.option("--steps", default=300)
@click.option("--json", "json_path", type=click.Path(path_type=Path))
def main(data: Path, texts: int, steps: int, json_path: Path | None) -> None:
    """Train each head on the demo target's answers and print its acceptance."""
    target = load_target(str(demo.resolve(demo.DEFAULT)), torch.float32)
    samples = read_samples(data, 512)[:texts]
    found = {}
    click.echo("| head | 0-alpha | 1-alpha | 2-alpha |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as out:
        config = TrainingConfig.model_validate(
            {
                "target": "demo",
                "data": [str(data)],
                "out": Path(out),
                "draft_vocab": 6144,
                "ttt_steps": 3,
                "epochs": 1000,
                "lr": 2e-3,
                "batch_tokens": 1024,
                "held_out": 0.05,
            }
        )
        for name, alphas in compare(config, target, samples, steps):
            found[name] = alphas
            click.echo(f"| {name} | {' | '.join(f'{a:.3f}' for a in alphas)} |")
    if json_path is not None:
        json_path.write_text(json.dumps(found, indent=1), "utf-8")


if __name__ == "__main__":
    main()
