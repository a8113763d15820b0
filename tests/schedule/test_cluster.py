"""Submissions by the Jobs API: against a stand-in, and against a real head on loopback."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from eagle_batch.errors import (
    ConfigError,
    EagleBatchError,
    InterruptedRunError,
    OutputBusyError,
    StoppedError,
)
from eagle_batch.job import cluster
from eagle_batch.job.cluster import Cluster, Ended, Submission
from eagle_batch.job.parcel import Parcel, pack
from eagle_batch.pipeline import load_pipeline
from tests.job.fake_job import expected_rows, read_rows, write_job

TOPICS = [f"topic {'x' * n}" for n in range(12)]


@dataclass
class Info:
    submission_id: str
    metadata: dict[str, str]
    status: str = "RUNNING"
    driver_exit_code: int | None = None
    message: str = ""


@dataclass
class StandIn:
    """Behaves as Ray's client was seen to behave."""

    jobs: dict[str, Info] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    #: How many lines get through before the connection breaks, once.
    breaks_after: int | None = None

    def list_jobs(self) -> list[Info]:
        return list(self.jobs.values())

    def get_job_info(self, name: str) -> Info:
        if name not in self.jobs:
            raise RuntimeError(f"Request failed with status code 404: Job {name} does not exist")
        return self.jobs[name]

    def submit_job(self, *, submission_id: str, metadata: dict[str, str], **_: Any) -> str:
        if submission_id in self.jobs:
            raise RuntimeError("Request failed with status code 500: Traceback ...")
        self.jobs[submission_id] = Info(submission_id, metadata)
        return submission_id

    def stop_job(self, name: str) -> bool:
        self.jobs[name].status = "STOPPED"
        return True

    async def tail_job_logs(self, name: str) -> AsyncIterator[str]:
        for number, line in enumerate(self.lines):
            if number == self.breaks_after:
                self.breaks_after = None
                raise RuntimeError("WebSocket connection closed unexpectedly")
            yield line
        if self.jobs[name].status == "RUNNING":
            self.jobs[name].status = "SUCCEEDED"


@pytest.fixture
def stand_in() -> StandIn:
    return StandIn()


@pytest.fixture
def jobs_api(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    monkeypatch.setattr(cluster, "POLL_S", 0.0)
    connected = Cluster.__new__(Cluster)
    connected.address = "http://head:8265"
    connected._client = stand_in
    return connected


def parcel(digest: str = "d1", output: str = "s3://bucket/out") -> Parcel:
    return Parcel(Path("/nowhere"), output, "p", digest, ())


def test_a_second_submit_attaches_and_a_third_after_the_end_starts_anew(
    jobs_api: Cluster, stand_in: StandIn
) -> None:
    first = jobs_api.submit(parcel())
    assert not first.attached
    assert jobs_api.submit(parcel()) == Submission(first.id, attached=True)
    stand_in.jobs[first.id].status = "FAILED"
    again = jobs_api.submit(parcel())
    assert (again.attached, again.id) == (False, first.id[:-1] + "2")
    assert jobs_api.find("s3://bucket/out") == again.id
    assert not jobs_api.submit(parcel(output="s3://bucket/other")).attached


def test_another_pipeline_into_an_output_at_work_is_refused(jobs_api: Cluster) -> None:
    jobs_api.submit(parcel())
    with pytest.raises(OutputBusyError, match="runs another pipeline into this output"):
        jobs_api.submit(parcel("d2"))


def test_of_two_submits_at_once_the_later_one_attaches(
    jobs_api: Cluster, stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both saw no job; Ray answers the later one with a traceback."""
    first = jobs_api.submit(parcel())
    monkeypatch.setattr(stand_in, "list_jobs", list)
    assert jobs_api.submit(parcel()) == Submission(first.id, attached=True)


def test_a_head_that_takes_no_jobs_is_waited_for_and_then_given_up(
    jobs_api: Cluster, stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusals = ["No available agent to submit job, please try again later."] * 2
    takes = stand_in.submit_job

    def submit_job(**fields: Any) -> str:
        if refusals:
            raise RuntimeError(f"Request failed with status code 500: {refusals.pop()}.")
        return takes(**fields)

    monkeypatch.setattr(stand_in, "submit_job", submit_job)
    assert not jobs_api.submit(parcel()).attached
    refusals += ["No available agent to submit job, please try again later."]
    monkeypatch.setattr(cluster, "PATIENCE_S", 0.0)
    with pytest.raises(StoppedError, match=r"No available agent.*its dashboard_agent.log says why"):
        jobs_api.submit(parcel(output="s3://bucket/other"))


@pytest.mark.parametrize("breaks_after", [None, 0, 2, 3])
def test_lines_are_shown_once_even_when_the_connection_breaks(
    breaks_after: int | None, jobs_api: Cluster, stand_in: StandIn
) -> None:
    stand_in.lines = ["one\n", "two\nthree", "\n", "complete: 8 of 9 rows, 1 quarantined\n"]
    stand_in.breaks_after = breaks_after
    shown: list[str] = []
    ended = jobs_api.follow(jobs_api.submit(parcel()).id, shown.append)
    assert "".join(shown) == "".join(stand_in.lines)
    assert ended == Ended(rows=8, quarantined=1)


@pytest.mark.parametrize(
    ("status", "code", "error"),
    [
        ("FAILED", 2, ConfigError),
        ("FAILED", 4, StoppedError),
        ("FAILED", 5, OutputBusyError),
        ("FAILED", 1, StoppedError),
        ("FAILED", None, StoppedError),
        ("STOPPED", None, InterruptedRunError),
        ("STOPPED", 130, InterruptedRunError),
    ],
)
def test_failed_and_stopped_are_told_apart(
    status: str,
    code: int | None,
    error: type[EagleBatchError],
    jobs_api: Cluster,
    stand_in: StandIn,
) -> None:
    name = jobs_api.submit(parcel()).id
    stand_in.jobs[name].status, stand_in.jobs[name].driver_exit_code = status, code
    with pytest.raises(EagleBatchError) as caught:
        jobs_api.follow(name, lambda text: None)
    assert type(caught.value) is error


def test_a_run_with_quarantined_rows_is_complete(jobs_api: Cluster, stand_in: StandIn) -> None:
    """Its exit code is 3, which Ray calls FAILED."""
    name = jobs_api.submit(parcel()).id
    stand_in.lines = ["was complete already; nothing was started: 6 of 8 rows, 2 quarantined\n"]
    stand_in.jobs[name].status, stand_in.jobs[name].driver_exit_code = "FAILED", 3
    assert jobs_api.follow(name, lambda text: None) == Ended(6, 2)


def test_a_cluster_that_falls_silent_is_waited_for_and_then_given_up(
    jobs_api: Cluster, stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = jobs_api.submit(parcel()).id
    answers: list[Exception | Info] = [ConnectionError("reset"), stand_in.jobs[name]]

    def answer(name: str) -> Info:
        found = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(stand_in, "get_job_info", answer)
    assert jobs_api.is_running(name)
    monkeypatch.setattr(cluster, "PATIENCE_S", 0.0)
    answers[:] = [ConnectionError("refused")]
    with pytest.raises(StoppedError, match="does not answer any more: refused; the run may go on"):
        jobs_api.is_running(name)


def test_nobody_at_the_address_says_what_was_expected() -> None:
    with pytest.raises(StoppedError, match=r"http://127.0.0.1:9: cannot talk to Ray's Jobs API"):
        Cluster("http://127.0.0.1:9")


# -- a real head ---------------------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@dataclass(frozen=True)
class Head:
    address: str
    token: str


@pytest.fixture(scope="module")
def head(repository: Path) -> Iterator[Head]:
    """A Ray head on loopback with token authentication, ended by its process id."""
    port, token = free_port(), secrets.token_hex(32)
    with tempfile.TemporaryDirectory(
        prefix="eb-", dir="/tmp", ignore_cleanup_errors=True
    ) as folder:
        environment = {
            **{name: text for name, text in os.environ.items() if not name.startswith("RAY_")},
            "RAY_TMPDIR": folder,
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": token,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(repository),
        }
        command = [
            *(str(Path(sys.executable).parent / "ray"), "start", "--head", "--block"),
            *("--port", str(free_port()), "--dashboard-port", str(port), "--num-cpus", "3"),
            *("--ray-client-server-port", str(free_port())),
            *("--dashboard-agent-listen-port", str(free_port())),
            *("--object-store-memory", str(100 << 20), "--disable-usage-stats"),
        ]
        with (Path(folder) / "log").open("w") as log:
            process = subprocess.Popen(
                command, env=environment, stdout=log, stderr=subprocess.STDOUT
            )
        try:
            wait_for(f"http://127.0.0.1:{port}/api/version", process, Path(folder) / "log", token)
            yield Head(f"http://127.0.0.1:{port}", token)
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def wait_for(url: str, process: subprocess.Popen[bytes], log: Path, token: str) -> None:
    deadline = time.monotonic() + 120
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"})
    while True:
        try:
            with urllib.request.urlopen(request, timeout=5):
                return
        except OSError:
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.3)


def submit(folder: Path, api: Cluster, *, slow: bool = False) -> Submission:
    """Submit a job of the fake engine."""
    away = Path(tempfile.mkdtemp(dir=folder))
    pipeline = load_pipeline(folder / "pipeline.yaml")
    module = ["-m", "tests.schedule.fake_submit", "slow" if slow else "quick"]
    return api.submit(pack(pipeline, away, module))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:ssl=None is deprecated:DeprecationWarning")
def test_a_wrong_token_and_a_wrong_pipeline_are_refused_by_the_real_head_and_command(
    head: Head, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A Ray that this process started has left its own.
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match="the cluster refuses the token"):
        Cluster(head.address)
    monkeypatch.setenv("RAY_AUTH_TOKEN", head.token)
    api = Cluster(head.address)
    path = write_job(tmp_path / "p", ["a"], stages=[{"name": "one", "prompt": "{{ nope }}"}])
    submission = api.submit(pack(load_pipeline(path), tmp_path))
    shown: list[str] = []
    with pytest.raises(ConfigError, match="failed with exit code 2"):
        api.follow(submission.id, shown.append)
    assert "stages.0.prompt: found 'nope', which is neither a column" in "".join(shown)


@pytest.mark.filterwarnings("ignore:ssl=None is deprecated:DeprecationWarning")
def test_the_life_of_a_submission(
    head: Head, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Submit, attach, stop, resume; `test_nodes.py` does it on a changing cluster, by hand."""
    monkeypatch.setenv("RAY_AUTH_TOKEN", head.token)
    api = Cluster(head.address)
    write_job(tmp_path, TOPICS)
    first = submit(tmp_path, api, slow=True)
    assert submit(tmp_path, api, slow=True) == Submission(first.id, attached=True)
    deadline = time.monotonic() + 120
    while not list((tmp_path / "out" / "data").glob("*.parquet")):
        assert time.monotonic() < deadline
        assert api.is_running(first.id)
        time.sleep(0.1)
    assert api.stop(first.id)
    with pytest.raises(InterruptedRunError, match="was stopped"):
        api.follow(first.id, lambda text: None)
    committed = {path: path.stat().st_mtime_ns for path in (tmp_path / "out/data").iterdir()}
    assert 0 < len(committed) < 3

    shown: list[str] = []
    again = submit(tmp_path, api)
    assert again.id != first.id
    assert api.follow(again.id, shown.append) == Ended(24, 0)
    assert "resuming: " in "".join(shown)
    assert read_rows(tmp_path / "out") == expected_rows(TOPICS)
    assert {path: path.stat().st_mtime_ns for path in committed} == committed
    assert api.find(str(tmp_path / "out")) == again.id
    assert not api.stop(again.id)
