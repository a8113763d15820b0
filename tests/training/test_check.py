"""`heads check` says what a wrong reading of a head would hide."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from eagle_batch.cli import main
from eagle_batch.engine.request import EngineMetrics
from eagle_batch.training.check import _decoded, check_head, neighbours
from eagle_batch.training.features import Chunk
from tests.training.conftest import AUX
from tests.training.test_trainer import settings, train


@pytest.fixture(scope="module")
def trained(target: Any, chunk: Chunk, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a target, as `model`, and a head that learned its texts, as `head`."""
    folder = tmp_path_factory.mktemp("trained")
    target.save_pretrained(folder / "model")
    train(target, chunk, settings(folder, epochs=25, evaluate_every=100))
    return folder


def with_layers(trained: Path, folder: Path, layers: tuple[int, ...]) -> Path:
    """Copy the head and let its config name other layers."""
    head = shutil.copytree(trained / "head", folder / "head")
    config = json.loads((head / "config.json").read_text())
    config.pop("eagle_config")
    config["eagle_aux_hidden_state_layer_ids"] = list(layers)
    (head / "config.json").write_text(json.dumps(config))
    return head


@pytest.mark.parametrize("by", [-1, 1])
def test_layers_that_are_off_by_one_are_noticed(
    by: int, trained: Path, data_file: Path, tmp_path: Path
) -> None:
    head = with_layers(trained, tmp_path, tuple(k + by for k in AUX))
    report = check_head(str(head), str(trained / "model"), texts=data_file)
    assert report.better is not None
    layers, theirs, ours = report.better
    assert layers == AUX
    assert theirs > ours


def test_nothing_is_said_of_a_head_that_is_read_rightly(trained: Path, data_file: Path) -> None:
    report = check_head(str(trained / "head"), str(trained / "model"), texts=data_file)
    assert report.better is None
    assert not report.suspicious


def test_the_command_says_which_layers_do_better(
    trained: Path, data_file: Path, tmp_path: Path
) -> None:
    head = with_layers(trained, tmp_path, tuple(k + 1 for k in AUX))
    command = ["heads", "check", str(head), str(trained / "model"), "--texts", str(data_file)]
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 0, result.output
    assert f"warning: with aux layers {', '.join(map(str, AUX))} the first draft" in result.output


def test_a_head_that_drafts_nonsense_is_suspicious(
    target: Any, chunk: Chunk, data_file: Path, tmp_path: Path
) -> None:
    target.save_pretrained(tmp_path / "model")
    train(target, chunk, settings(tmp_path, start="random", epochs=1, lr=1e-9))
    report = check_head(str(tmp_path / "head"), str(tmp_path / "model"), texts=data_file)
    assert report.suspicious


@pytest.mark.parametrize(
    ("layers", "count", "expected"),
    [
        ((2, 15, 27), 30, [(1, 14, 26), (3, 16, 28)]),
        ((1, 14, 26), 30, [(0, 13, 25), (2, 15, 27)]),
        # Layer -1 does not exist; the usual choice was not made.
        ((0, 3, 5), 8, [(1, 4, 6), (2, 4, 5)]),
        ((7,), 8, [(6,)]),
        ((), 8, []),
    ],
)
def test_neighbours(layers: tuple[int, ...], count: int, expected: list[tuple[int, ...]]) -> None:
    assert neighbours(layers, count) == expected


def test_acceptance_by_position_counts_chains_that_came_so_far() -> None:
    metrics = EngineMetrics(row_passes=100, round_tokens=170, accepted_at=(50, 20, 0))
    found = _decoded(metrics, 3)
    assert found.by_position == (0.5, 0.4, 0.0)
    assert found.acceptance_length == pytest.approx(1.7)
