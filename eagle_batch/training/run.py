"""From a training file to a trained head: loads the target, makes the features, trains."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from eagle_batch.errors import ModelError
from eagle_batch.training.config import TrainingConfig
from eagle_batch.training.features import FeatureStore, target_identity
from eagle_batch.training.initial import head_config_for
from eagle_batch.training.samples import find_files
from eagle_batch.training.trainer import Progress, Trainer, TrainingResult


def train_head(
    config: TrainingConfig,
    *,
    base: Path,
    target: str,
    on_file: Callable[[Path, int], None] = lambda _path, _tokens: None,
    on_step: Callable[[Progress], None] = lambda _: None,
) -> TrainingResult:
    """Run or resume the training of one head.

    `target` is the folder of the target, or its hub id; paths of the data are relative to `base`.
    Raises ConfigError, DataError, HeadError or ModelError.
    """
    if (base / config.start).is_dir():
        config = config.model_copy(update={"start": str(base / config.start)})
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    files = find_files(config.data, base)
    # The target's states are only teachers: bfloat16 is enough for them and takes half the time.
    model = load_target(target, torch.bfloat16)
    store = FeatureStore(
        config.features or config.out / "features",
        model,
        identity=_identity(model, target),
        aux_layers=_aux_layers(config, model),
        max_length=config.max_length,
    )
    chunks = []
    for path in files:
        chunks.append(store.chunk(path))
        on_file(path, len(chunks[-1].tokens_T))
    # A folder's name means nothing on another machine; a hub id does.
    name = "" if Path(target).is_dir() else target
    return Trainer(config, model.float(), chunks, name).run(on_step)


def load_target(target: str, dtype: torch.dtype) -> Any:
    """Load a causal LM from a folder or the hub, safetensors only; ModelError where that fails."""
    from transformers import AutoModelForCausalLM

    try:
        return AutoModelForCausalLM.from_pretrained(
            target, dtype=dtype, use_safetensors=True
        ).eval()
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise ModelError(f"target {target}: cannot be loaded: {error}") from error


def _identity(model: Any, target: str) -> str:
    folder = Path(target)
    if folder.is_dir():
        return target_identity(folder)
    return f"{target}@{model.config.to_json_string()}"


def _aux_layers(config: TrainingConfig, model: Any) -> tuple[int, ...]:
    aux = None if config.aux_layers is None else tuple(config.aux_layers)
    shape = head_config_for(
        model.config, kind=config.kind, draft_vocab=config.draft_vocab, aux_layers=aux
    )
    return shape.aux_layers
