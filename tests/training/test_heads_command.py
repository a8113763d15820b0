"""`eagle-batch heads train`: texts go in, a head comes out; a wrong file is explained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from eagle_batch.cli import main
from eagle_batch.models.checkpoints import load_head
from tests.training.conftest import AUX


def write_config(folder: Path, **changes: Any) -> Path:
    values = {
        "target": "model",
        "data": ["texts.parquet"],
        "out": str(folder / "run"),
        "aux_layers": list(AUX),
        "draft_vocab": 48,
        "ttt_steps": 2,
        "epochs": 1,
        "batch_tokens": 256,
        "held_out": 0.2,
    }
    path = folder / "head.yaml"
    path.write_text(yaml.safe_dump({k: v for k, v in (values | changes).items() if v is not None}))
    return path


def test_a_file_of_texts_becomes_a_head(target: Any, data_file: Path, tmp_path: Path) -> None:
    target.save_pretrained(tmp_path / "model")
    config = write_config(tmp_path, data=[str(data_file)])
    result = CliRunner().invoke(main, ["heads", "train", str(config)])
    assert result.exit_code == 0, result.output
    assert "accepted by position" in result.output
    import torch

    head = load_head(str(tmp_path / "run" / "head"), dtype=torch.float32, device="cpu")
    assert head.config.aux_layers == AUX


def test_a_head_is_checked_against_its_target_and_its_texts(
    target: Any, data_file: Path, tmp_path: Path
) -> None:
    target.save_pretrained(tmp_path / "model")
    config = write_config(tmp_path, data=[str(data_file)])
    runner = CliRunner()
    assert runner.invoke(main, ["heads", "train", str(config)]).exit_code == 0
    head, model = str(tmp_path / "run" / "head"), str(tmp_path / "model")
    result = runner.invoke(main, ["heads", "check", head, model, "--texts", str(data_file)])
    assert result.exit_code == 0, result.output
    assert "drafts 48 of 64 tokens" in result.output
    assert "accepted by position" in result.output
    (tmp_path / "run" / "head" / "model.safetensors").write_bytes(b"short")
    result = runner.invoke(main, ["heads", "check", head, model])
    assert result.exit_code == 2
    assert "model.safetensors" in result.output


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"lr": -1, "epochs": "many"}, ("lr", "epochs")),
        ({"epoch": 3}, ("epoch", "epochs")),
        ({"data": None}, ("data", "missing")),
        ({"data": ["nothing.parquet"]}, ("nothing.parquet",)),
        ({"target": "demo:unknown"}, ("unknown",)),
        ({"held_out": 1.5}, ("held_out",)),
    ],
)
def test_a_wrong_file_is_explained(
    changes: dict[str, Any], words: tuple[str, ...], tmp_path: Path
) -> None:
    path = write_config(tmp_path, **changes)
    result = CliRunner().invoke(main, ["heads", "train", str(path)])
    assert result.exit_code == 2, result.output
    assert all(word in result.output for word in words), result.output


def test_the_shipped_training_file_is_valid() -> None:
    from eagle_batch.cli.heads import load_training_config

    folder = Path(__file__).parents[2] / "pipelines" / "heads"
    files = sorted(folder.glob("*-eagle3.yaml"))
    assert files
    for path in files:
        load_training_config(path)
