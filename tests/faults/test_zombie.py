"""A worker is stopped, as a cut-off host seems, and wakes when its shards were made again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from eagle_batch.job.verify import verify
from tests.faults.dying import bury
from tests.job.fake_job import expected_rows, load_job, read_rows, run_in_process, write_job

TOPICS = [f"topic {'x' * (n % 7)}" for n in range(24)]
PATIENCE_S = 120.0


def test_a_worker_that_wakes_after_its_shards_were_made_elsewhere_adds_no_row(
    tmp_path: Path, repository: Path
) -> None:
    """1. a process holds shards and is stopped. 2. the job is finished. 3. it wakes and commits."""
    path = write_job(tmp_path, TOPICS)
    output = tmp_path / "out"
    with (tmp_path / "log.txt").open("w") as log:
        zombie = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.zombie", str(path)],
            cwd=repository,
            stdout=log,
            stderr=log,
            env=os.environ | {"FAKE_STEP_S": "0.2"},
        )
    try:
        wait_for(tmp_path / "begun", zombie)
        zombie.send_signal(signal.SIGSTOP)
        job = load_job(path)
        run_in_process(job)
        before = {file: file.read_bytes() for file in output.rglob("*.parquet")}
        zombie.send_signal(signal.SIGCONT)
        assert zombie.wait(PATIENCE_S) == 0, (tmp_path / "log.txt").read_text()
    finally:
        zombie.kill()
        zombie.wait()
    assert (tmp_path / "committed").read_text() == "part-00000 part-00001"
    assert {file: file.read_bytes() for file in output.rglob("*.parquet")} == before
    assert read_rows(output) == expected_rows(TOPICS)
    assert verify(str(output)).ok
    bury(output)
    assert run_in_process(job).already_complete


def wait_for(path: Path, process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not path.exists():
        assert process.poll() is None
        assert time.monotonic() < end
        time.sleep(0.02)
