"""The driver as a process: signalled, killed, doubled; the same command then finishes the job."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from eagle_batch.job.lock import process_start
from eagle_batch.job.verify import verify
from tests.job.fake_job import expected_rows, read_rows, write_job

pytestmark = pytest.mark.slow

TOPICS = [f"topic {'x' * (n % 7)}" for n in range(80)]
PATIENCE_S = 240.0


@pytest.fixture
def pipeline(tmp_path: Path) -> Path:
    return write_job(tmp_path, TOPICS, workers={"count": 2})


@contextmanager
def submitted(pipeline: Path, root: Path, step_s: float) -> Iterator[subprocess.Popen[str]]:
    """Start a driver in a process group of its own, as a shell does."""
    environment = {**os.environ, "FAKE_STEP_S": str(step_s)}
    with (pipeline.parent / f"log-{time.monotonic_ns()}.txt").open("w+") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.child", "submit", str(pipeline)],
            cwd=root,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def finish(pipeline: Path, root: Path) -> int:
    with submitted(pipeline, root, 0.0) as process:
        return process.wait(PATIENCE_S)


def wait_for_shards(output: Path, count: int, process: subprocess.Popen[str]) -> None:
    end = time.monotonic() + PATIENCE_S
    while len(list(output.glob("data/*.parquet"))) < count:
        assert process.poll() is None, log_of(output)
        assert time.monotonic() < end, log_of(output)
        time.sleep(0.05)


def log_of(output: Path) -> str:
    return "\n".join(path.read_text() for path in sorted(output.parent.glob("log-*.txt")))


def assert_whole(output: Path) -> None:
    assert read_rows(output) == expected_rows(TOPICS)
    report = verify(str(output))
    assert report.ok, report.findings


def test_ctrl_c_exits_130_and_a_second_driver_was_refused_with_5(
    pipeline: Path, repository: Path
) -> None:
    """Ctrl-C reaches the whole group: driver, Ray and actors."""
    output = pipeline.parent / "out"
    with submitted(pipeline, repository, 0.25) as process:
        wait_for_shards(output, 2, process)
        assert finish(pipeline, repository) == 5
        assert f"process {process.pid} on " in log_of(output)
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(60) == 130, log_of(output)
    assert 2 <= len(list(output.glob("data/*.parquet"))) < 20
    assert "run the same command again to make the rest" in log_of(output)
    assert "Traceback" not in log_of(output)
    assert finish(pipeline, repository) == 0, log_of(output)
    assert_whole(output)


def test_a_killed_driver_takes_its_actors_along_and_the_same_command_finishes(
    pipeline: Path, repository: Path
) -> None:
    output = pipeline.parent / "out"
    with submitted(pipeline, repository, 0.25) as process:
        wait_for_shards(output, 2, process)
        actors = wait_for_actors(output)
        process.kill()
        process.wait()
    end = time.monotonic() + 30
    while any(process_start(pid) is not None for pid in actors):
        assert time.monotonic() < end, "the actors outlive their driver"
        time.sleep(0.1)
    kept = {path: path.read_bytes() for path in output.glob("data/*.parquet")}
    assert 2 <= len(kept) < 20
    assert finish(pipeline, repository) == 0, log_of(output)
    assert {path: path.read_bytes() for path in kept} == kept
    assert_whole(output)


def test_a_function_beside_the_pipeline_file_checks_texts_on_the_workers(
    tmp_path: Path, repository: Path
) -> None:
    """Neither the driver nor Ray knows the folder; it says which process each call was in."""
    (tmp_path / "beside_checks.py").write_text(
        "import os\n"
        "def fine(text, row):\n"
        "    open(f'{os.path.dirname(__file__)}/pid-{os.getpid()}', 'w').close()\n"
        "    return row['topic'] != 'bad' or 'it is bad'\n"
    )
    stages = [
        {
            "name": "one",
            "prompt": "ask {{ topic }}",
            "validators": [{"python": "beside_checks:fine"}],
            "otherwise": "drop",
        },
        {"name": "two", "prompt": "{{ one }}"},
    ]
    pipeline = write_job(tmp_path, ["good", "bad", "fine"], stages=stages, samples=1)
    with submitted(pipeline, repository, 0.0) as process:
        assert process.wait(PATIENCE_S) == 0, log_of(tmp_path / "out")
        called = {int(path.name[4:]) for path in tmp_path.glob("pid-*")}
        assert called
        assert process.pid not in called
    assert [row["id"] for row in read_rows(tmp_path / "out")] == ["row0", "row2"]


def wait_for_actors(output: Path) -> list[int]:
    """The processes that the metrics name."""
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        metrics = output / "_job/metrics.json"
        if metrics.exists() and len(workers := json.loads(metrics.read_text())["workers"]) == 2:
            return [int(worker["pid"]) for worker in workers]
        time.sleep(0.1)
    raise AssertionError(log_of(output))


def test_a_ray_that_was_imported_before_its_settings_still_starts_and_says_so() -> None:
    program = (
        "import ray\n"
        "from eagle_batch.job.session import ray_session\n"
        "from eagle_batch.pipeline import Workers\n"
        "with ray_session(Workers(count=1, gpus=0), 1, print):\n"
        "    print(ray.get(ray.remote(lambda: 'works').remote()))\n"
    )
    # A Ray that runs in the process of the tests has its settings in the environment.
    clean = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env=clean,
    )
    assert done.returncode == 0, done.stderr
    warning, resources, answer = done.stdout.splitlines()
    assert "without tokens" in warning
    assert (resources, answer) == ("1 worker on cpu, with 1 CPU thread", "works")
