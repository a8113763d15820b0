from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from eagle_batch.training.features import Chunk, FeatureStore
from tests.training import tiny_target

AUX = (2, 4, 5)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """Sums split over threads may differ in the last bit from one machine to another."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def target() -> Any:
    return tiny_target.make_target()


@pytest.fixture(scope="session")
def texts(target: Any) -> list[tuple[list[int], list[int]]]:
    return tiny_target.greedy_texts(target, 60)


@pytest.fixture(scope="session")
def data_file(
    texts: list[tuple[list[int], list[int]]], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    return tiny_target.write_texts(tmp_path_factory.mktemp("data") / "texts.parquet", texts)


@pytest.fixture(scope="session")
def chunk(target: Any, data_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Chunk:
    return store(target, tmp_path_factory.mktemp("features")).chunk(data_file, batch_tokens=256)


def store(target: Any, folder: Path, aux: tuple[int, ...] = AUX) -> FeatureStore:
    return FeatureStore(folder, target, identity="tiny", aux_layers=aux, max_length=64)
