"""Pushing an output: verified first, rows before the card, against a hub on this machine."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from eagle_batch.cli import main
from eagle_batch.data.finding import find_files
from eagle_batch.errors import ConfigError, LedgerError, StoreError
from eagle_batch.job import push as pushing
from eagle_batch.job.push import Destination, push
from eagle_batch.job.store import open_store
from eagle_batch.report.write import write_reports
from tests.data.fake_hub import Hub, hub
from tests.job.fake_engine import LONG
from tests.job.fake_job import load_job, run_in_process, write_job

__all__ = ["hub"]  # a fixture
TOPICS = [LONG if n == 5 else f"topic {n}" for n in range(12)]


@pytest.fixture
def output(tmp_path: Path) -> Path:
    run_in_process(load_job(write_job(tmp_path, TOPICS, limits={"max_error_rate": 0.9})))
    write_reports(open_store(str(tmp_path / "out")))
    return tmp_path / "out"


def test_rows_are_pushed_before_the_card_and_nothing_else(
    output: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pushing, "MOST_OBJECTS", 2)
    outcome = CliRunner().invoke(main, ["push", str(output), "hf://datasets/me/synth"])
    assert outcome.exit_code == 0, outcome.output
    assert "pushed 9 objects" in outcome.output
    paths = [path for repo, path in hub.written if repo == "me/synth"]
    shards = [f"part-0000{n}.parquet" for n in range(3)]
    rows = [f"{folder}/{name}" for folder in ("data", "errors") for name in shards]
    assert paths == [*rows, "report.html", "_job/pipeline.json", "README.md"]
    assert all(hub.repos["me/synth"][path] == (output / path).read_bytes() for path in paths)
    assert sum("commit" in path for _, path in hub.requests) == 4
    [found, *_] = find_files(["hf://datasets/me/synth/data/*.parquet"], "auto")
    assert found.size == (output / rows[0]).stat().st_size
    assert push(str(output), "hf://datasets/me/synth").objects == 9  # again: nothing is in the way


def test_json_lines_are_pushed_without_what_only_a_resume_needs(tmp_path: Path, hub: Hub) -> None:
    output = {"format": "jsonl", "compression": "gzip"}
    path = write_job(tmp_path, TOPICS, limits={"max_error_rate": 0.9}, output=output)
    run_in_process(load_job(path))
    write_reports(open_store(str(tmp_path / "out")))
    push(str(tmp_path / "out"), "hf://datasets/me/lines")
    pushed = hub.repos["me/lines"]
    assert sorted(pushed) == sorted(
        [f"{folder}/part-0000{n}.jsonl.gz" for folder in ("data", "errors") for n in range(3)]
        + ["README.md", "_job/pipeline.json", "report.html"]
    )
    assert b"errors/*.jsonl.gz" in pushed["README.md"]


def test_an_output_that_is_not_whole_is_not_pushed(output: Path, hub: Hub) -> None:
    (output / "data" / "part-00001.parquet").unlink()
    with pytest.raises(LedgerError, match=r"not whole, hence not pushed.*part-00001\.parquet"):
        push(str(output), "hf://datasets/me/synth")
    assert hub.requests == []


def test_a_data_set_of_other_rows_is_left_alone(output: Path, hub: Hub) -> None:
    hub.repos["me/synth"] = {"data/train-00000.parquet": b"theirs", "notes.md": b"mine"}
    with pytest.raises(LedgerError, match=r"holds 1 objects that this output has not \(data/train"):
        push(str(output), "hf://datasets/me/synth")
    assert hub.written == []


def test_a_hub_that_refuses_is_told_with_what_to_do(
    output: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.refuse = 403
    with pytest.raises(StoreError, match=r"me/synth: cannot push: .*403.*hf auth login"):
        push(str(output), "hf://datasets/me/synth")


@pytest.mark.parametrize("text", ["runs/x", "hf://me/x", "hf://datasets/x", "hf://datasets/a/b/c"])
def test_a_destination_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="expected hf://datasets/OWNER/NAME"):
        Destination.parse(text)
    assert Destination.parse("hf://datasets/a/b@dev/") == Destination("a/b", "dev")
