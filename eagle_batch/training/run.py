"""From a training file to a trained head: loads the target, makes the features, trains."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from eagle_batch.errors import ConfigError, ModelError
from eagle_batch.models.linear import has_bfloat16
from eagle_batch.training.config import TrainingConfig
from eagle_batch.training.features import FeatureStore, target_identity
from eagle_batch.training.initial import head_config_for
from eagle_batch.training.samples import check_stages, find_files
from eagle_batch.training.team import ALONE, Team
from eagle_batch.training.trainer import Progress, Trainer, TrainingResult


def train_head(
    config: TrainingConfig,
    *,
    base: Path,
    target: str,
    on_file: Callable[[Path, int], None] = lambda _path, _tokens: None,
    on_step: Callable[[Progress], None] = lambda _: None,
    team: Team = ALONE,
) -> TrainingResult:
    """Run or resume the training of one head, alone or as one process of a team.

    `target` is the folder of the target, or its hub id; paths of the data are relative to `base`.
    Raises ConfigError, DataError, HeadError or ModelError.
    """
    if (base / config.start).is_dir():
        config = config.model_copy(update={"start": str(base / config.start)})
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    files = find_files(config.data, base)
    if config.stages is not None:
        check_stages(files, config.stages)
    device = training_device(config.device)
    model = load_target(target, teacher_dtype(device)).to(device)
    store = FeatureStore(
        config.features or config.out / "features",
        model,
        identity=_identity(model, target),
        aux_layers=_aux_layers(config, model),
        max_length=config.max_length,
        stages=config.stages,
    )
    for path in team.share(files):
        store.chunk(path)
    team.wait()
    chunks = []
    for path in files:
        chunks.append(store.chunk(path))
        on_file(path, len(chunks[-1].tokens_T))
    # A folder's name means nothing on another machine; a hub id does.
    name = "" if Path(target).is_dir() else target
    return Trainer(config, model.float(), chunks, name, team).run(on_step)


def training_device(name: str) -> torch.device:
    """Return the device that `auto` or a name means; ConfigError where there is no such GPU."""
    count = torch.cuda.device_count()
    if name == "auto":
        return torch.device("cuda" if count else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= count:
        raise ConfigError(
            f"device: found {name!r}, but torch sees {count} GPUs here; set `device: cpu`, or "
            "install a CUDA build of torch"
        )
    return device


def teacher_dtype(device: torch.device) -> torch.dtype:
    """Return the number format of the target's states: bfloat16 does for a teacher.

    Where the processor only emulates it, float32 is several times faster.
    """
    return torch.bfloat16 if device.type != "cpu" or has_bfloat16() else torch.float32


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
