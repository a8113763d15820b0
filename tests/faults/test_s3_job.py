"""Whole jobs on a real S3 server: run, cut off, resumed, verified; no credential is written."""

from __future__ import annotations

import io
import uuid
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from eagle_batch.cli import main
from eagle_batch.errors import StoreError
from eagle_batch.job.driver import run_job
from eagle_batch.job.job import Job
from eagle_batch.job.objects import SHARES
from eagle_batch.job.store import Retry, Store, open_store
from eagle_batch.job.verify import verify
from tests.faults.inputs import check_input_from_a_store
from tests.faults.proxy import Proxy
from tests.faults.seaweed import ADMIN, BUCKET, READER, Seaweed, environment, filesystem
from tests.job.fake_engine import LONG
from tests.job.fake_job import (
    SlowFirst,
    Watch,
    expected_rows,
    load_job,
    run_in_process,
    share_at_once,
    write_job,
)
from tests.job.test_partitions import check_on_a_store

pytestmark = pytest.mark.slow

TOPICS = [f"topic {'x' * (n % 7)}" for n in range(24)]
QUICK = Retry(tries=2, pause_s=0.05, deadline_s=1.0)


def job_on_s3(folder: Path, topics: list[str] = TOPICS, rows_per_shard: int = 4) -> Job:
    output = {"path": f"s3://{BUCKET}/{uuid.uuid4().hex}", "rows_per_shard": rows_per_shard}
    return load_job(write_job(folder, topics, output=output, limits={"max_error_rate": 0.9}))


def rows_of(store: Store) -> list[dict[str, Any]]:
    columns = ["id", "sample", "topic", "one", "two"]
    objects = (store.get(key) or b"" for key in sorted(store.list("data")))
    return [
        row for o in objects for row in pq.read_table(io.BytesIO(o), columns=columns).to_pylist()
    ]


def assert_whole(job: Job) -> None:
    store = open_store(job.pipeline.output.path)
    assert rows_of(store) == expected_rows(TOPICS)
    report = verify(store)
    assert report.ok, report.findings


def test_a_job_runs_is_verified_and_does_nothing_when_it_is_complete(
    s3: Seaweed, tmp_path: Path
) -> None:
    job = job_on_s3(tmp_path)
    run_in_process(job)
    assert_whole(job)
    assert run_in_process(job).already_complete


def test_input_and_output_lie_in_the_store(s3: Seaweed, tmp_path: Path) -> None:
    check_input_from_a_store(f"s3://{BUCKET}/{uuid.uuid4().hex}", tmp_path)


def test_partitions_lie_in_the_store_and_read_back(s3: Seaweed, tmp_path: Path) -> None:
    check_on_a_store(f"s3://{BUCKET}/{uuid.uuid4().hex}", tmp_path)


def test_rows_that_workers_make_for_each_other_go_through_the_server_and_are_removed(
    s3: Seaweed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    share_at_once(monkeypatch)
    job = job_on_s3(tmp_path, rows_per_shard=12)
    result = run_job(job, lambda started: SlowFirst(job, started, every=7, size=2), Watch())
    assert_whole(job)
    assert result.metrics is not None
    assert "used" in {loan["state"] for loan in result.metrics["loans"]}
    assert open_store(job.pipeline.output.path).list(SHARES) == {}


def test_a_job_whose_store_goes_away_stops_and_resumes_to_the_same_rows(
    s3_proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = job_on_s3(tmp_path)
    store = open_store(job.pipeline.output.path, QUICK)

    def sabotage(worker: int, pump: int) -> None:
        s3_proxy.blackhole = s3_proxy.blackhole or len(store.list("data")) >= 2

    monkeypatch.setattr(Retry, "deadline", lambda retry, size: retry.deadline_s)
    with pytest.raises(StoreError, match=r"cannot .*\nwhat is committed is kept"):
        run_in_process(job, store=store, sabotage=sabotage)
    s3_proxy.blackhole = False
    before = store.list("data")
    assert 0 < len(before) < 6
    watch = Watch()
    take_lock_from_the_dead(store)
    run_in_process(job, watch)
    assert_whole(job)
    assert any(line.startswith("resuming") for line in watch.lines)


def take_lock_from_the_dead(store: Store) -> None:
    """The process that held it lives on, in this test."""
    for key in store.list("_job/lock"):
        store.delete(key)


def test_no_credential_is_written_anywhere(s3: Seaweed, tmp_path: Path) -> None:
    job = job_on_s3(tmp_path, [LONG, *TOPICS])
    watch = Watch()
    assert run_in_process(job, watch).quarantined == 2
    fs = filesystem(s3.url, ADMIN)
    keys = fs.find(job.pipeline.output.path)
    assert {"data", "errors", "_job"} <= {key.split("/")[2] for key in keys}
    written = b"".join(fs.cat_file(key) for key in keys)
    assert b"pipeline" in written
    for secret in ADMIN:
        assert secret.encode() not in written
        assert secret not in "\n".join(watch.lines)


@pytest.mark.parametrize("command", ["verify", "status"])
def test_a_command_with_a_wrong_secret_exits_4_and_does_not_tell_it(
    seaweed: Seaweed, command: str
) -> None:
    with environment(seaweed.url, (ADMIN[0], READER[1])):
        result = CliRunner().invoke(main, [command, f"s3://{BUCKET}/job"])
    assert result.exit_code == 4
    assert "Error: s3://bucket/job: cannot " in result.output
    assert "Traceback" not in result.output
    assert not [secret for secret in (*ADMIN, *READER) if secret in result.output]
