"""Submissions on three nodes, some of which die, are taken back or join meanwhile."""

from __future__ import annotations

import json
import os
import re
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Self

import pytest

from eagle_batch.errors import InterruptedRunError
from eagle_batch.job.cluster import Cluster, Ended, Submission
from eagle_batch.job.parcel import Parcel, pack
from eagle_batch.job.verify import verify
from eagle_batch.pipeline import load_pipeline
from tests.job.fake_job import expected_rows, read_rows, write_job
from tests.schedule.test_cluster import free_port

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:ssl=None is deprecated:DeprecationWarning"),
]

TOPICS = [f"topic {'x' * (n % 5)}" for n in range(144)]
SHARDS = len(TOPICS) // 4


class Nodes:
    """The process of `tests.schedule.nodes`."""

    def __init__(self, folder: Path, repository: Path, token: str) -> None:
        self.port = free_port()
        self.address = f"http://127.0.0.1:{self.port}"
        self.token = token
        self.folder = folder
        kept = {name: text for name, text in os.environ.items() if not name.startswith("RAY_")}
        environment = kept | {
            "RAY_TMPDIR": str(folder),
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": token,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(repository),
        }
        self.log = folder / "log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.schedule.nodes", str(self.port), str(free_port())],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

    def __enter__(self) -> Self:
        self._expect("ready")
        return self

    def __exit__(self, *_: object) -> None:
        """Its input's end is its own."""
        try:
            self.process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.communicate()

    def order(self, word: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{word}\n")
        self.process.stdin.flush()
        self._expect("done")

    def _expect(self, word: str) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.strip() == word:
                return
        raise AssertionError(self.log.read_text())


@pytest.fixture(scope="module")
def cluster(repository: Path) -> Iterator[Nodes]:
    """Three nodes with a GPU each; tests leave as many behind."""
    with (
        tempfile.TemporaryDirectory("", "eb-", "/tmp", ignore_cleanup_errors=True) as folder,
        Nodes(Path(folder), repository, secrets.token_hex(32)) as running,
    ):
        yield running


@pytest.fixture
def nodes(cluster: Nodes, monkeypatch: pytest.MonkeyPatch) -> Nodes:
    monkeypatch.setenv("RAY_AUTH_TOKEN", cluster.token)
    return cluster


def submit(
    api: Cluster, folder: Path, *, count: int = 2, **fields: Any
) -> tuple[Submission, Callable[[], int]]:
    """Submit a job with a worker for each GPU; returns when it has written something new.

    The second thing returned tells how many shards are there.
    """

    def shards() -> int:
        return len(list(folder.glob("p/out/data/*.parquet")))

    before = shards()
    workers = {"count": "auto", "gpus": 1, "cpus": 0.5}
    pipeline = write_job(folder / "p", TOPICS, **{"workers": workers} | fields)
    submission = api.submit(make_parcel(pipeline, folder))
    wait_until(lambda: shards() >= before + count)
    assert api.is_running(submission.id)
    return submission, shards


def make_parcel(pipeline: Path, folder: Path) -> Parcel:
    away = Path(tempfile.mkdtemp(dir=folder))
    return pack(load_pipeline(pipeline), away, ["-m", "tests.schedule.fake_submit", "slow"])


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 150
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def assert_whole(output: Path) -> None:
    rows = sorted(read_rows(output), key=lambda row: (row["id"], row["sample"]))
    assert rows == sorted(expected_rows(TOPICS), key=lambda row: (row["id"], row["sample"]))
    report = verify(str(output))
    assert report.ok, report.findings


@pytest.mark.exhaustive
def test_the_life_of_a_submission_on_nodes_that_die_are_taken_back_or_join(
    nodes: Nodes, tmp_path: Path
) -> None:
    """Submitted, attached to, stopped, resumed, while the cluster changes under it."""
    api = Cluster(nodes.address)
    first, _ = submit(api, tmp_path)
    attached = api.submit(make_parcel(tmp_path / "p" / "pipeline.yaml", tmp_path))
    assert attached == Submission(first.id, attached=True)
    nodes.order("kill")
    nodes.order("join")
    time.sleep(1)
    assert api.stop(first.id)
    shown: list[str] = []
    with pytest.raises(InterruptedRunError, match="was stopped"):
        api.follow(first.id, shown.append)
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "p/out/data").iterdir()}

    again, shards = submit(api, tmp_path, count=1)
    assert again.id != first.id
    written = shards()
    nodes.order("drain 25")
    nodes.order("join")
    assert api.follow(again.id, shown.append) == Ended(2 * len(TOPICS), 0)
    assert shards() > written, "the drain came while it worked"
    text = "".join(shown)
    assert f"resuming: {len(kept)} of {SHARDS} shards are committed" in text
    # A drained node has time to finish what it holds: nothing is lost with it.
    assert "was lost" not in text.partition("goes away in 2")[2]
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    assert_whole(tmp_path / "p" / "out")
    assert_logged(nodes.folder)


def assert_logged(folder: Path) -> None:
    """Each shard's commit is in the log of a worker, the end of the run in the driver's."""
    logs = folder.glob("ray/session_2*/logs")
    files = [file for folder in logs for file in folder.iterdir() if file.is_file()]
    workers = read_lines(file for file in files if re.fullmatch(r"worker-.*\.err", file.name))
    drivers = read_lines(file for file in files if file.name.startswith("eagle-batch-driver-"))
    made = {line["shard"]: line for line in workers if line["message"] == "shard committed"}
    # A worker that is killed may have committed its last shards and not said so.
    assert made.keys() <= {f"part-{n:05d}" for n in range(SHARDS)}
    assert len(made) >= SHARDS - 4
    assert all({"job", "run", "worker", "attempt"} <= line.keys() for line in made.values())
    ends = [line["message"] for line in drivers if line["message"].startswith("run ended")]
    assert ends == ["run ended: interrupted", "run ended: complete"]


def read_lines(files: Iterable[Path]) -> list[dict[str, Any]]:
    lines = [line for file in files for line in file.read_text("utf-8").splitlines()]
    found = [json.loads(line) for line in lines if line.startswith('{"time"')]
    return sorted(found, key=lambda line: str(line["time"]))


@pytest.mark.exhaustive
def test_shards_are_given_back_before_a_node_s_time_is_over(nodes: Nodes, tmp_path: Path) -> None:
    """Two shards in the hands of a worker take longer than its node has."""
    api = Cluster(nodes.address)
    small: dict[str, Any] = {"output": {"rows_per_shard": 8}, "engine": {"slots": 2}}
    submission, _ = submit(api, tmp_path, **small)
    nodes.order("drain 11")
    nodes.order("join")
    shown: list[str] = []
    assert api.follow(submission.id, shown.append) == Ended(2 * len(TOPICS), 0)
    assert "its node is drained and its time is over" in "".join(shown)
    assert_whole(tmp_path / "p" / "out")
