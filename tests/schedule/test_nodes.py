"""A submission on three nodes, one of which dies while another joins."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import pytest

from eagle_batch.job.cluster import Cluster, Ended
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


@pytest.fixture
def nodes(repository: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Nodes]:
    token = secrets.token_hex(32)
    monkeypatch.setenv("RAY_AUTH_TOKEN", token)
    with (
        tempfile.TemporaryDirectory("", "eb-", "/tmp", ignore_cleanup_errors=True) as folder,
        Nodes(Path(folder), repository, token) as running,
    ):
        yield running


def test_a_node_that_dies_and_one_that_joins_change_nothing(nodes: Nodes, tmp_path: Path) -> None:
    api = Cluster(f"http://127.0.0.1:{nodes.port}")
    pipeline = write_job(tmp_path / "p", TOPICS, workers={"count": 3, "gpus": 1})
    output = tmp_path / "p" / "out"
    module = ["-m", "tests.schedule.fake_submit", "slow"]
    submission = api.submit(pack(load_pipeline(pipeline), tmp_path, module))
    deadline = time.monotonic() + 150
    while len(list(output.glob("data/*.parquet"))) < 2:
        assert time.monotonic() < deadline
        assert api.is_running(submission.id)
        time.sleep(0.1)
    nodes.order("kill")
    nodes.order("join")
    shown: list[str] = []
    assert api.follow(submission.id, shown.append) == Ended(96, 0)
    assert "was lost, its shards go back" in "".join(shown)
    rows = sorted(read_rows(output), key=lambda row: (row["id"], row["sample"]))
    assert rows == sorted(expected_rows(TOPICS), key=lambda row: (row["id"], row["sample"]))
    report = verify(str(output))
    assert report.ok
