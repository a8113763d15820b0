"""Two processes that share every batch take the steps of one process."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch.multiprocessing.spawn import spawn

from eagle_batch.cli import main
from eagle_batch.training.features import Chunk
from eagle_batch.training.team import ALONE, Team, joined
from eagle_batch.training.trainer import Progress, Trainer
from tests.training.test_heads_command import write_config
from tests.training.test_trainer import curve, settings, train, weights
from tests.training.tiny_target import make_target


def _train(rank: int, size: int, address: str, runs: dict[Path, int], chunk: Chunk) -> None:
    torch.set_num_threads(1)
    with joined(address, rank, size, torch.device("cpu")) as team:
        for out, batch in runs.items():
            losses: list[float] = []
            config = settings(out, batch_tokens=batch)
            trainer = Trainer(config, make_target(), [chunk], "tiny", team)

            def tell(progress: Progress, told: list[float] = losses) -> None:
                told.append(progress.loss)

            trainer.run(tell)
            (out / f"losses-{rank}.json").write_text(json.dumps(losses))


@pytest.fixture(scope="module")
def together(target: Any, chunk: Chunk, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with three runs of two processes, each with its losses.

    Batches of 24 tokens hold one text, so that one of the two has nothing to do; `resumed` goes on
    from what one process saved after four steps, whose losses it has too.
    """
    folder = tmp_path_factory.mktemp("together")
    runs = {folder / "256": 256, folder / "24": 24, folder / "resumed": 256}
    first = train(target, chunk, settings(folder / "resumed"), stop_at=4)
    for out in runs:
        out.mkdir(exist_ok=True)
    (folder / "resumed" / "first.json").write_text(json.dumps(first))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    spawn(_train, (2, address, runs, chunk), nprocs=2)
    return folder


def losses(folder: Path, name: str) -> list[float]:
    found: list[float] = json.loads((folder / name).read_text())
    return found


@pytest.mark.exhaustive
@pytest.mark.parametrize("batch", [256, 24])
def test_two_processes_learn_what_one_learns(
    batch: int, together: Path, target: Any, chunk: Chunk, tmp_path: Path
) -> None:
    alone = train(target, chunk, settings(tmp_path, batch_tokens=batch))
    out = together / str(batch)
    assert losses(out, "losses-0.json") == pytest.approx(alone, rel=1e-4)
    assert losses(out, "losses-1.json") == []  # only the first one tells
    assert len(curve(out)) == len(curve(tmp_path))
    expected = weights(tmp_path / "head")
    for name, found in weights(out / "head").items():
        torch.testing.assert_close(found, expected[name], rtol=0.05, atol=0.02)


@pytest.mark.exhaustive
def test_two_processes_go_on_with_what_one_saved(
    together: Path, target: Any, chunk: Chunk, tmp_path: Path
) -> None:
    whole = train(target, chunk, settings(tmp_path))
    out = together / "resumed"
    found = losses(out, "first.json") + losses(out, "losses-0.json")
    assert found == pytest.approx(whole, rel=1e-4)


def test_every_item_is_in_one_share() -> None:
    items = list(range(7))
    shares = [Team(rank, 3).share(items) for rank in range(3)]
    assert sorted(item for share in shares for item in share) == items
    assert ALONE.share(items) == items


def test_the_command_trains_with_two_processes_under_ray(
    target: Any, data_file: Path, tmp_path: Path
) -> None:
    target.save_pretrained(tmp_path / "model")
    alone = write_config(tmp_path, data=[str(data_file)], out=str(tmp_path / "alone"), threads=1)
    runner = CliRunner()
    assert runner.invoke(main, ["heads", "train", str(alone)]).exit_code == 0
    changes = {"data": [str(data_file)], "out": str(tmp_path / "team"), "workers": 2, "threads": 1}
    result = runner.invoke(main, ["heads", "train", str(write_config(tmp_path, **changes))])
    assert result.exit_code == 0, result.output
    assert "2 workers on cpu" in result.output
    assert "step" in result.output
    one, two = (curve(tmp_path / name) for name in ("alone", "team"))
    assert [r["loss"] for r in two] == pytest.approx([r["loss"] for r in one], rel=1e-3)


@pytest.mark.exhaustive
def test_what_a_team_cannot_do_is_explained(target: Any, tmp_path: Path) -> None:
    target.save_pretrained(tmp_path / "model")
    path = write_config(tmp_path, data=["nothing.parquet"], workers=2, threads=1)
    result = CliRunner().invoke(main, ["heads", "train", str(path)])
    assert result.exit_code == 2, result.output
    assert "nothing.parquet" in result.output
