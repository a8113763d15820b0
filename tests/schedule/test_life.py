"""The whole life of a submission by the commands that people type, on nodes as people start them.

`test_nodes.py` goes deeper into what a changing cluster does to a run; here all is of the shell.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from eagle_batch.engine.testing import byte_tokenizer, tiny_model
from tests.end_to_end.commands import Outcome, eagle_batch, texts
from tests.job.fake_job import expected_rows, read_rows, write_job
from tests.schedule.raylets import PATIENCE_S, Network, Raylets, wait_until

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(900)]

TOPICS = [f"topic {'x' * (n % 5)}" for n in range(240)]
SHARDS = len(TOPICS) // 4


@pytest.fixture(scope="module")
def raylets(repository: Path) -> Iterator[Raylets]:
    """Three nodes with a core and a GPU each; tests leave as many behind."""
    try:
        network = Network()
    except OSError as error:
        pytest.skip(str(error))
    # Short: a Unix socket's path has at most 107 bytes.
    with tempfile.TemporaryDirectory("", "eb-", "/tmp", ignore_cleanup_errors=True) as folder:
        try:
            with Raylets(network, Path(folder), repository) as running:
                running.join()
                running.join()
                yield running
        finally:
            network.close()


class Shell:
    """Types `eagle-batch` commands about one job."""

    def __init__(
        self, raylets: Raylets, folder: Path, module: str = "tests.schedule.fake_cli"
    ) -> None:
        self.raylets = raylets
        self.folder = folder
        self.output = folder / "out"
        self._module = module
        self._begun = 0

    def type(self, command: str, *arguments: str | Path) -> Outcome:
        return self.raylets.run(*self._words(command, *arguments))

    def begin(self, command: str, *arguments: str | Path) -> Follower:
        """Begin what follows the run until it ends."""
        self._begun += 1
        log = self.folder / f"{command}-{self._begun}.log"
        with log.open("w") as handle:
            process = self.raylets.begin(handle, *self._words(command, *arguments))
        return Follower(process, log)

    def status(self) -> dict[str, Any]:
        done = self.type("status", self.output, "--json")
        assert done.code == 0, done.text
        found: dict[str, Any] = json.loads(done.text.splitlines()[-1])
        return found

    def shards(self) -> dict[Path, int]:
        """When each shard was written."""
        return {path: path.stat().st_mtime_ns for path in self.output.glob("data/*.parquet")}

    def _words(self, command: str, *arguments: str | Path) -> tuple[str | Path, ...]:
        where = ("--address", self.raylets.address) if command in {"submit", "logs", "stop"} else ()
        return "-m", self._module, command, *arguments, *where


class Follower:
    """A command that shows the lines of a run."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self._process = process
        self.log = log

    def wait_for(self, pattern: str) -> None:
        def is_there() -> bool:
            if re.search(pattern, self.log.read_text()):
                return True
            assert self._process.poll() is None, self.log.read_text()
            return False

        wait_until(is_there, self.log)

    def end(self) -> Outcome:
        return Outcome(self._process.wait(PATIENCE_S), self.log.read_text())


def test_submit_attach_look_stop_and_resume_on_nodes_that_die_and_join(
    raylets: Raylets, tmp_path: Path
) -> None:
    workers = {"count": "auto", "gpus": 1, "cpus": 0.5}
    pipeline = write_job(tmp_path, TOPICS, workers=workers)
    shell = Shell(raylets, tmp_path)
    kept = stop_what_was_submitted(shell, pipeline)
    resume_while_nodes_change(shell, pipeline, kept)
    look_at_what_is_complete(shell, pipeline)


def stop_what_was_submitted(shell: Shell, pipeline: Path) -> dict[Path, int]:
    """Returns the shards that a stopped run has left."""
    detached = shell.type("submit", pipeline, "--detach")
    assert detached.code == 0, detached.text
    (name,) = re.findall(r"submitted (eagle-batch-\w+-1) on http", detached.text)
    lines = shell.begin("logs", shell.output)
    attached = shell.begin("submit", pipeline)
    lines.wait_for("3 workers on cuda, each with 1 GPU")
    attached.wait_for(f"attached to {name}")
    wait_until(lambda: len(shell.shards()) >= 6, lines.log)
    status = shell.status()
    assert (status["state"], status["units"], status["workers"]) == ("running", 480, 3)
    other = shell.type("submit", pipeline, "--set", "seed=4", "--detach")
    assert other.code == 5, other.text
    assert "runs another pipeline into this output" in other.text

    stopped = shell.type("stop", shell.output)
    assert (stopped.code, stopped.text) == (0, f"{name}: stopped\n")
    for follower in (lines, attached):
        end = follower.end()
        assert end.code == 130, end.text
        assert f"{name} on {shell.raylets.address} was stopped; what it committed" in end.text
    assert shell.type("logs", shell.output).code == 130
    kept = shell.shards()
    status = shell.status()
    assert status["state"] == "stopped", "the lock was not released"
    assert 6 <= status["tasks_done"] == len(kept) < SHARDS
    # What is committed is on record: whatever was at work when the stop came.
    assert status["rows"] == 8 * len(kept)
    verified = shell.type("verify", shell.output)
    assert verified.code == 4, verified.text
    return kept


def resume_while_nodes_change(shell: Shell, pipeline: Path, kept: dict[Path, int]) -> None:
    resumed = shell.begin("submit", pipeline)
    resumed.wait_for(rf"resuming: {len(kept)} of {SHARDS} shards are committed")
    wait_until(lambda: len(shell.shards()) >= len(kept) + 4, resumed.log)
    shell.raylets.kill()
    resumed.wait_for(r"worker \d+ was lost, its shards go back")
    written = len(shell.shards())
    shell.raylets.join()
    assert shell.status()["state"] == "running"
    end = resumed.end()
    assert end.code == 0, end.text
    assert "submitted eagle-batch-" in end.text
    assert f"complete: {2 * len(TOPICS)} of {2 * len(TOPICS)} rows, 0 quarantined" in end.text
    assert written < SHARDS, "the node died while there was work"
    shards = shell.shards()
    assert {path: shards[path] for path in kept} == kept


def look_at_what_is_complete(shell: Shell, pipeline: Path) -> None:
    status = shell.status()
    assert (status["state"], status["rows"], status["quarantined"]) == ("complete", 480, 0)
    again = shell.type("submit", pipeline)
    assert again.code == 0, again.text
    assert "was complete already; nothing was started" in again.text
    assert shell.type("logs", shell.output).code == 0
    stopped = shell.type("stop", shell.output)
    assert stopped.code == 0
    assert stopped.text.endswith("-3: had ended already\n")
    verified = shell.type("verify", shell.output)
    assert verified.code == 0, verified.text
    assert "whole: 480 in = 480 out + 0 quarantined" in verified.text
    assert sorted(read_rows(shell.output), key=place) == sorted(expected_rows(TOPICS), key=place)


def place(row: dict[str, Any]) -> tuple[str, int]:
    return row["id"], row["sample"]


def given(raylets: Raylets, folder: Path, gpus: float, topics: list[str]) -> list[dict[str, Any]]:
    """Run a job to its end; returns what each of its workers was given."""
    shell = Shell(raylets, folder)
    pipeline = write_job(folder, topics, workers={"count": "auto", "gpus": gpus, "cpus": 0.25})
    done = shell.type("submit", pipeline)
    assert done.code == 0, done.text
    assert sorted(read_rows(shell.output), key=place) == sorted(expected_rows(topics), key=place)
    return [json.loads(path.read_text()) for path in shell.folder.glob("worker-*.json")]


def test_half_a_gpu_each_puts_two_workers_on_one(raylets: Raylets, tmp_path: Path) -> None:
    told = given(raylets, tmp_path, 0.5, TOPICS)
    assert len(told) == 6
    assert set(Counter(worker["node"] for worker in told).values()) == {2}
    assert {(*worker["gpus"], worker["visible"], worker["split"]) for worker in told} == {
        (0, "0", 1)
    }


def test_two_gpus_each_are_two_of_one_node(raylets: Raylets, tmp_path: Path) -> None:
    """The three nodes have as many GPUs in all, and none has two."""
    raylets.join(gpus=2)
    try:
        (told,) = given(raylets, tmp_path, 2, TOPICS[:48])
    finally:
        raylets.kill()
    assert sorted(told["gpus"]) == [0, 1]
    assert told["visible"].split(",") == ["0", "1"]
    assert told["split"] == 2, "the layers are shared out over both"


def write_tiny(folder: Path) -> Path:
    """Write a pipeline for the real engine, with a target that any core is fast enough for."""
    tokenizer = byte_tokenizer()
    tiny_model(vocab=len(tokenizer)).save_pretrained(folder / "target")
    tokenizer.save_pretrained(folder / "target")
    words = [f"{n * n % 97}" for n in range(48)]
    pq.write_table(pa.table({"id": [f"r{n}" for n in range(48)], "word": words}), folder / "in.pq")
    sampling = {"max_tokens": 24, "temperature": 0.8}
    document = {
        "name": "tiny",
        "input": {"path": "in.pq", "format": "parquet", "id": "id"},
        "target": {"model": str(folder / "target"), "context": 128},
        "speculation": {"method": "ngram", "depth": 3},
        "stages": [{"name": "one", "prompt": "{{ word }}", "sampling": sampling}],
        "engine": {"slots": 4, "threads": 1},
        # One core each, which is all that a node has.
        "workers": {"count": 3, "gpus": 0, "cpus": 1, "placement": "spread"},
        "output": {"path": str(folder / "out"), "rows_per_shard": 2},
    }
    path = folder / "pipeline.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


def test_three_nodes_write_what_this_machine_writes_by_itself(
    raylets: Raylets, tmp_path: Path
) -> None:
    """The real engine, told of one option more."""
    pipeline = write_tiny(tmp_path)
    shell = Shell(raylets, tmp_path, "eagle_batch")
    done = shell.type("submit", pipeline)
    assert done.code == 0, done.text
    assert "3 workers on cpu, each with 1 CPU thread" in done.text
    alone = tmp_path / "alone"
    here = eagle_batch(
        "submit", pipeline, "--output", alone, "--set", "workers.count=1", cwd=tmp_path
    )
    assert here.code == 0, here.text
    assert texts(shell.output, "one") == texts(alone, "one")
    assert len(texts(alone, "one")) == 48
    assert shell.type("verify", shell.output).code == 0
