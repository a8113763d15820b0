"""Submissions on three nodes, some of which die, are taken back or join meanwhile."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import pytest

from eagle_batch.job.cluster import Cluster, Ended, Submission
from eagle_batch.job.parcel import pack
from eagle_batch.job.verify import verify
from eagle_batch.pipeline import load_pipeline
from tests.job.fake_job import expected_rows, read_rows, write_job
from tests.schedule.test_cluster import free_port

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:ssl=None is deprecated:DeprecationWarning"),
]

TOPICS = [f"topic {'x' * (n % 5)}" for n in range(48)]


class Nodes:
    """The process of `tests.schedule.nodes`."""

    def __init__(self, folder: Path, repository: Path, token: str) -> None:
        self.port = free_port()
        self.token = token
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
                [sys.executable, "-m", "tests.schedule.nodes", str(self.port)],
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


def submit(nodes: Nodes, folder: Path, **fields: Any) -> tuple[Cluster, Submission]:
    """Submit a job of three workers with a GPU each; returns when it has written something."""
    api = Cluster(f"http://127.0.0.1:{nodes.port}")
    workers = {"count": 3, "gpus": 1, "cpus": 0.5}
    pipeline = write_job(folder / "p", TOPICS, **{"workers": workers} | fields)
    module = ["-m", "tests.schedule.fake_submit", "slow"]
    submission = api.submit(pack(load_pipeline(pipeline), folder, module))
    wait_until(lambda: len(list(folder.glob("p/out/data/*.parquet"))) >= 2)
    assert api.is_running(submission.id)
    return api, submission


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


def test_nodes_that_die_are_taken_back_or_join_change_nothing(nodes: Nodes, tmp_path: Path) -> None:
    """The one that is taken back has time to finish what it holds: nothing is lost with it."""
    api, submission = submit(nodes, tmp_path)
    nodes.order("kill")
    nodes.order("join")
    written = len(list(tmp_path.glob("p/out/data/*.parquet")))
    wait_until(lambda: len(list(tmp_path.glob("p/out/data/*.parquet"))) > written)
    nodes.order("drain 25")
    nodes.order("join")
    shown: list[str] = []
    assert api.follow(submission.id, shown.append) == Ended(96, 0)
    text = "".join(shown)
    assert "goes away in 2" in text
    assert text.count("was lost, its shards go back") == 1
    assert_whole(tmp_path / "p" / "out")


@pytest.mark.exhaustive
def test_shards_are_given_back_before_a_node_s_time_is_over(nodes: Nodes, tmp_path: Path) -> None:
    """Two shards in the hands of a worker take longer than its node has."""
    small = {"output": {"rows_per_shard": 8}, "engine": {"slots": 2}}
    api, submission = submit(nodes, tmp_path, **small)
    nodes.order("drain 11")
    nodes.order("join")
    shown: list[str] = []
    assert api.follow(submission.id, shown.append) == Ended(96, 0)
    assert "its node is drained and its time is over" in "".join(shown)
    assert_whole(tmp_path / "p" / "out")
