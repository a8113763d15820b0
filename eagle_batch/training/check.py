"""Whether a head fits its target, and how well it drafts: the answer before a job is started.

A head that is read wrongly (a layer off by one, another rope base) loads and runs; only its
acceptance on the target's own texts shows it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from eagle_batch.errors import DataError
from eagle_batch.models.checkpoints import load_head
from eagle_batch.models.heads import HeadConfig
from eagle_batch.training.dataset import Dataset
from eagle_batch.training.features import compute_chunk
from eagle_batch.training.objectives import DraftVocabulary
from eagle_batch.training.run import load_target
from eagle_batch.training.samples import read_samples
from eagle_batch.training.validation import Acceptance, measure_acceptance


@dataclass(frozen=True, slots=True)
class HeadReport:
    """What is known about a head that fits its target."""

    config: HeadConfig
    parameters: int
    #: None where no texts were given.
    acceptance: Acceptance | None


def check_head(
    head_path: str, target: str, texts: Path | None, *, rows: int = 64, steps: int = 4
) -> HeadReport:
    """Load a head strictly, bind it to its target and, given texts of the target, draft on them.

    Raises HeadError, ModelError or DataError.
    """
    model = load_target(target, torch.float32)
    layers = int(model.config.num_hidden_layers)
    head = load_head(head_path, dtype=torch.float32, device="cpu", target_layers=layers)
    output = model.get_output_embeddings().weight
    head.bind(model.get_input_embeddings().weight, output)
    count = sum(p.numel() for p in head.parameters())
    if texts is None:
        return HeadReport(head.config, count, None)
    samples = read_samples(texts, max_length=1024)[:rows]
    if not samples:
        raise DataError(f"{texts}: no row has both a prompt and a completion of two tokens or more")
    data = Dataset([compute_chunk(model, samples, head.config.aux_layers)], held_out=0.0)
    found = measure_acceptance(
        head,
        data,
        data.training,
        DraftVocabulary(output, head.draft_to_target),
        steps=steps,
        batch_tokens=4096,
    )
    return HeadReport(head.config, count, found)
