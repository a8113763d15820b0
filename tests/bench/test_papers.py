"""The comparison of heads runs: every variant is trained and measured."""

from __future__ import annotations

from pathlib import Path

import torch

from eagle_batch.training.config import TrainingConfig
from eagle_batch.training.samples import Sample
from tests.bench.papers import compare
from tests.training.tiny_target import greedy_texts, make_target


def test_every_variant_is_trained_and_differs(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    target = make_target()
    samples = [Sample((*p, *c), len(p)) for p, c in greedy_texts(target, 40)]
    values = {"target": "tiny", "data": ["texts"], "out": tmp_path, "aux_layers": [2, 4, 5]}
    values |= {"draft_vocab": 64, "epochs": 100, "batch_tokens": 256, "held_out": 0.2}
    found = dict(compare(TrainingConfig.model_validate(values), target, samples, steps=8))
    assert len(found) == 6
    assert all(0 <= share <= 1 for alphas in found.values() for share in alphas)
    assert len(set(found.values())) == 6
