"""Quarantined rows go through again, and come out with the text that they would have had."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest
import yaml
from click.testing import CliRunner

from eagle_batch.cli import main
from eagle_batch.data.describe import prepare
from eagle_batch.errors import ConfigError, LedgerError
from eagle_batch.job.job import Job
from eagle_batch.job.replay import replay
from eagle_batch.job.verify import verify
from eagle_batch.pipeline import Pipeline, load_pipeline
from tests.job.fake_engine import LONG
from tests.job.fake_job import (
    expected_rows,
    load_job,
    read_errors,
    read_rows,
    run_in_process,
    write_job,
)

BAD = (2, 9)
TOPICS = [LONG if n in BAD else f"topic {n}" for n in range(12)]


def finished(folder: Path) -> Path:
    """A complete job with two bad rows; returns its pipeline file."""
    path = write_job(folder, TOPICS, limits={"max_error_rate": 0.9})
    run_in_process(load_job(path))
    return path


def run(pipeline: Pipeline) -> None:
    plan, prompter = prepare(pipeline)
    run_in_process(Job(pipeline, plan, prompter, {}))


def mend(path: Path) -> None:
    """The prompts no longer contain what made them too long."""
    document = yaml.safe_load(path.read_text())
    for stage in document["stages"]:
        stage["prompt"] = stage["prompt"].replace("{{ topic }}", "{{ topic | replace('{', '') }}")
    path.write_text(yaml.safe_dump(document))


def test_mended_rows_come_out_with_their_own_ids_samples_and_noise(tmp_path: Path) -> None:
    path = finished(tmp_path)
    before = {p: p.read_bytes() for p in (tmp_path / "out").rglob("*") if p.is_file()}
    mend(path)
    again = replay(load_pipeline(path))
    assert again is not None
    assert again.output.path == f"{tmp_path}/out-replay"
    run(again)
    wanted = [
        row
        for row in expected_rows([topic.replace("{", "") for topic in TOPICS])
        if row["id"] in {f"row{n}" for n in BAD}
    ]
    got = read_rows(tmp_path / "out-replay")
    assert [row | {"topic": row["topic"].replace("{", "")} for row in got] == wanted
    assert verify(f"{tmp_path}/out-replay").ok
    assert {p: p.read_bytes() for p in (tmp_path / "out").rglob("*") if p.is_file()} == before


def test_rows_that_fail_again_are_quarantined_again_and_do_not_stop_the_replay(
    tmp_path: Path,
) -> None:
    again = replay(load_pipeline(finished(tmp_path)))
    assert again is not None
    run(again)
    assert read_rows(tmp_path / "out-replay") == []
    pairs = [(row["id"], row["sample"]) for row in read_errors(tmp_path / "out-replay")]
    assert pairs == [("row2", 0), ("row2", 1), ("row9", 0), ("row9", 1)]


def test_derived_ids_are_kept(tmp_path: Path) -> None:
    path = finished(tmp_path / "x")
    document = yaml.safe_load(path.read_text())
    document["input"] |= {"id": None, "columns": ["topic", "n"]}
    document["output"]["path"] = f"{tmp_path}/derived"
    path.write_text(yaml.safe_dump(document))
    run_in_process(load_job(path))
    again = replay(load_pipeline(path))
    assert again is not None
    run(again)
    ids = {row["id"] for row in read_errors(tmp_path / "derived-replay")}
    assert ids == {"in.parquet:2", "in.parquet:9"}


@pytest.mark.parametrize(
    "choice",
    [{"sample": 9}, {"sample": 0.8}, {"where": "n >= 0"}, {"shuffle": True}],
    ids=str,
)
def test_rows_that_were_chosen_are_not_chosen_again(
    tmp_path: Path, choice: dict[str, object]
) -> None:
    """A sample of a sample would leave rows out without a word."""
    path = write_job(tmp_path, [LONG] * 12, limits={"max_error_rate": 1.0})
    document = yaml.safe_load(path.read_text())
    document["input"] |= {"columns": ["topic"], **choice}
    path.write_text(yaml.safe_dump(document))
    run_in_process(load_job(path))
    failed = {row["id"] for row in read_errors(tmp_path / "out")}
    assert failed
    again = replay(load_pipeline(path))
    assert again is not None
    run(again)
    assert {row["id"] for row in read_errors(tmp_path / "out-replay")} == failed
    assert verify(f"{tmp_path}/out-replay").ok


def test_a_replay_that_was_interrupted_goes_on_with_the_same_rows(tmp_path: Path) -> None:
    path = finished(tmp_path)
    first = replay(load_pipeline(path))
    stored = (tmp_path / "out-replay/_job/replay.parquet").read_bytes()
    assert replay(load_pipeline(path)) == first
    assert (tmp_path / "out-replay/_job/replay.parquet").read_bytes() == stored


def test_nothing_to_replay_is_said(tmp_path: Path) -> None:
    path = write_job(tmp_path, ["a", "b"])
    run_in_process(load_job(path))
    assert replay(load_pipeline(path)) is None
    assert not (tmp_path / "out-replay").exists()


def test_an_output_that_is_not_complete_is_refused(tmp_path: Path) -> None:
    path = finished(tmp_path)
    (tmp_path / "out/data/part-00001.parquet").unlink()
    with pytest.raises(LedgerError, match=r"not complete .*without --only-errors first"):
        replay(load_pipeline(path))


def test_another_input_is_refused(tmp_path: Path) -> None:
    path = finished(tmp_path)
    pq.write_table(pq.read_table(tmp_path / "in.parquet").slice(1), tmp_path / "in.parquet")
    with pytest.raises(ConfigError, match="the input is not the one of"):
        replay(load_pipeline(path))


def test_the_command_says_when_there_is_nothing_to_replay_and_when_there_is_no_output(
    tmp_path: Path,
) -> None:
    path = write_job(tmp_path, ["a", "b"])
    missing = CliRunner().invoke(main, ["submit", str(path), "--only-errors"])
    assert missing.exit_code == 2
    assert "no _job/pipeline.json" in missing.output
    run_in_process(load_job(path))
    nothing = CliRunner().invoke(main, ["submit", str(path), "--only-errors"])
    assert nothing.exit_code == 0
    assert f"nothing to replay: {tmp_path}/out has no quarantined rows" in nothing.output
