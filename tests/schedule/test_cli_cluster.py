"""`submit --address`, `logs` and `stop`, as they are typed; the cluster is a stand-in."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pytest
from click.testing import CliRunner, Result

from eagle_batch import cli
from eagle_batch.errors import ConfigError, EagleBatchError, InterruptedRunError, StoppedError
from eagle_batch.job import cluster
from eagle_batch.job.cluster import Ended, Submission, Write
from eagle_batch.job.parcel import Parcel
from tests.job.fake_job import write_job
from tests.schedule.jobs import write_file

HEAD = "http://head:8265"


def invoke(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli.main, list(map(str, arguments)))


class FakeCluster:
    """Keeps what was asked of it."""

    asked: ClassVar[list[str]] = []
    ends: ClassVar[list[Ended | EagleBatchError | KeyboardInterrupt]] = []

    def __init__(self, address: str) -> None:
        self.address = address
        self.asked.append(f"connect {address}")

    def submit(self, parcel: Parcel) -> Submission:
        assert (parcel.folder / "launch.py").is_file()
        self.asked.append(f"submit {parcel.output}")
        return Submission("job-1", attached=False)

    def find(self, output: str) -> str:
        self.asked.append(f"find {output}")
        if "none" in output:
            raise ConfigError(f"{output}: nothing was submitted")
        return "job-1"

    def follow(self, submission: str, write: Write) -> Ended:
        write("a line\n")
        end = self.ends.pop(0)
        if isinstance(end, Ended):
            return end
        raise end

    def stop(self, submission: str) -> bool:
        self.asked.append(f"stop {submission}")
        return True


@pytest.fixture
def head(monkeypatch: pytest.MonkeyPatch) -> type[FakeCluster]:
    monkeypatch.setattr(cluster, "Cluster", FakeCluster)
    monkeypatch.setattr(FakeCluster, "asked", [])
    monkeypatch.setattr(FakeCluster, "ends", [Ended(8, 0)])
    for name in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    return FakeCluster


@pytest.mark.parametrize(
    ("end", "code"),
    [
        (Ended(8, 0), 0),
        (Ended(6, 2), 3),
        (ConfigError("wrong"), 2),
        (StoppedError("no workers left"), 4),
        (InterruptedRunError("was stopped"), 130),
        (KeyboardInterrupt(), 130),
    ],
)
def test_submit_and_logs_exit_as_the_run_does(
    end: Ended | EagleBatchError | KeyboardInterrupt,
    code: int,
    head: type[FakeCluster],
    tmp_path: Path,
) -> None:
    head.ends[:] = [end, end]
    for command, subject in (("submit", write_job(tmp_path, ["a"])), ("logs", tmp_path / "out")):
        result = invoke(command, subject, "--address", HEAD)
        assert (result.exit_code, result.stdout) == (code, "a line\n"), result.output
    assert head.asked[1] == f"submit {tmp_path}/out"
    assert head.asked[3] == f"find {tmp_path}/out"


def test_detached_it_returns_at_once_and_says_how_to_look(
    head: type[FakeCluster], tmp_path: Path
) -> None:
    result = invoke("submit", write_job(tmp_path, ["a"]), "--address", HEAD, "--detach")
    assert (result.exit_code, result.stdout) == (0, "")
    assert f"eagle-batch logs {tmp_path}/out --address {HEAD}" in result.stderr


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--address", HEAD, "--json", "--log", "log.jsonl"], "--json, --log: found beside"),
        (["--address", HEAD, "--dashboard"], "--dashboard: found beside"),
        (["--detach"], "--detach: found without a cluster"),
    ],
)
def test_options_that_would_have_no_effect_are_refused(
    options: list[str], said: str, head: type[FakeCluster], tmp_path: Path
) -> None:
    result = invoke("submit", write_job(tmp_path, ["a"]), *options)
    assert result.exit_code == 2
    assert said in result.stderr
    assert head.asked == []


def test_an_address_in_the_environment_is_as_good(
    head: type[FakeCluster], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", HEAD)
    assert invoke("submit", write_job(tmp_path, ["a"])).exit_code == 0
    assert invoke("stop", tmp_path / "out").stdout == "job-1: stopped\n"
    assert head.asked[0] == f"connect {HEAD}"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["logs", "out"], "--address: is missing"),
        (["stop", "none", "--address", HEAD], "nothing was submitted"),
        (["stop", "out", "--address", "head:8265"], "expected a URL such as http://HEAD:8265"),
    ],
)
def test_what_cannot_be_found_exits_2(
    arguments: list[str], said: str, head: type[FakeCluster]
) -> None:
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert said in result.stderr


def test_a_job_file_s_address_sends_its_ticks_there(
    head: type[FakeCluster], tmp_path: Path
) -> None:
    path = write_file(tmp_path, cluster={"address": HEAD})
    result = invoke("jobs", "run", path, "--tick", "2027-03-01T04:30Z")
    assert result.exit_code == 0, result.output
    assert "is complete: 8 rows, 0 quarantined" in result.stdout
    assert head.asked == [f"connect {HEAD}", f"submit {tmp_path}/out/2027-03-01"]
