"""What a training run needs to go on where it stopped, saved so that a crash never costs more.

Two saved states are kept. A state is written beside them under another name and renamed when
complete, so the previous one stays good until the next one is.
"""

from __future__ import annotations

import os
import pickle
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eagle_batch.errors import ConfigError

_NAME = re.compile(r"state-(\d{8})\.pt")
_KEPT = 2


@dataclass(frozen=True, slots=True)
class TrainingState:
    """Everything that the next step depends on; `position` counts batches of the epoch."""

    #: Hash of the settings and the data that the run depends on.
    fingerprint: str
    step: int
    epoch: int
    position: int
    head: dict[str, Tensor]
    optimizer: dict[str, Any]
    best: float
    seconds: float
    curve: list[dict[str, Any]]


def save_state(folder: Path, state: TrainingState) -> None:
    """Write a state durably, then drop the oldest."""
    folder.mkdir(parents=True, exist_ok=True)
    final = folder / f"state-{state.step:08d}.pt"
    partial = folder / f"{final.name}.{os.getpid()}.tmp"
    values = {name: getattr(state, name) for name in TrainingState.__slots__}
    with partial.open("wb") as file:
        torch.save(values, file)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(final)
    for old in _states(folder)[:-_KEPT]:
        old.unlink()


def load_state(folder: Path, fingerprint: str) -> TrainingState | None:
    """Return the newest readable state, or None for a new run.

    Raises ConfigError where the states belong to other settings or other data, or none is readable.
    """
    problems = []
    for path in reversed(_states(folder)):
        try:
            state = TrainingState(**torch.load(path, map_location="cpu", weights_only=True))
        except (OSError, RuntimeError, EOFError, pickle.UnpicklingError, TypeError) as error:
            problems.append(f"{path}: not readable: {error}")
            continue
        if state.fingerprint != fingerprint:
            raise ConfigError(
                f"{folder}: holds a run with other settings or other data; choose another `out`, "
                "and to go on from its head set `start` to the exported folder"
            )
        return state
    if problems:
        raise ConfigError([*problems, f"{folder}: no state is readable; remove it to start again"])
    return None


def _states(folder: Path) -> list[Path]:
    return sorted(p for p in folder.glob("state-*.pt") if _NAME.fullmatch(p.name))
