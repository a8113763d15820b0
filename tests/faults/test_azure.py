"""The store suite and a whole job on an emulator of Azure Blob Storage that checks credentials."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from eagle_batch.errors import StoreError
from eagle_batch.job.store import Retry, Store, open_store
from eagle_batch.job.verify import verify
from tests.faults.azure import CONTAINER, KEY, WRONG_KEY, emulated, find_program, named
from tests.faults.inputs import check_input_from_a_store
from tests.job import test_store as suite
from tests.job.fake_job import load_job, run_in_process, write_job
from tests.job.test_partitions import check_on_a_store

pytestmark = [
    pytest.mark.slow,
    # The client leaves closing its connections to the garbage collector.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

QUICK = Retry(tries=3, pause_s=0.05, deadline_s=30.0)


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    program = find_program()
    if program is None:
        pytest.skip("needs adlfs (the dev group) and azurite-blob in PATH (npm install azurite)")
    with emulated(program, tmp_path_factory.mktemp("azure")) as port:
        yield port


@pytest.fixture
def azure(port: int) -> Iterator[str]:
    """A place of its own in the container."""
    with named(port, KEY):
        yield f"az://{CONTAINER}/{uuid.uuid4().hex}"


@pytest.mark.parametrize(
    "check",
    [*suite.ON_EVERY_STORE, suite.test_a_disk_and_the_memory_let_one_writer_win],
)
def test_the_store_suite_holds_on_azure(azure: str, check: Callable[[Store], None]) -> None:
    check(open_store(azure, QUICK))


def test_a_job_runs_on_azure_is_verified_and_does_nothing_when_it_is_complete(
    azure: str, tmp_path: Path
) -> None:
    topics = [f"topic {n}" for n in range(8)]
    job = load_job(write_job(tmp_path, topics, output={"path": azure}))
    run_in_process(job)
    report = verify(job.pipeline.output.path)
    assert (report.ok, report.rows_out) == (True, 16), report.findings
    assert run_in_process(job).already_complete


@pytest.mark.parametrize("scheme", ["az", "abfs"])
def test_input_and_output_lie_in_the_store(azure: str, tmp_path: Path, scheme: str) -> None:
    check_input_from_a_store(azure.replace("az://", f"{scheme}://"), tmp_path)


def test_partitions_lie_in_the_store_and_read_back(azure: str, tmp_path: Path) -> None:
    check_on_a_store(azure, tmp_path)


@pytest.mark.parametrize("verb", ["put_new", "put_replace", "get", "list"])
def test_a_wrong_key_is_refused_at_once_without_being_told(port: int, verb: str) -> None:
    waits: list[float] = []
    with named(port, WRONG_KEY):
        store = open_store(f"az://{CONTAINER}/x", QUICK, waits.append)
        arguments = ("k", b"one") if verb.startswith("put") else ("k",)
        with pytest.raises(StoreError, match=r"cannot \w+ k") as caught:
            getattr(store, verb)(*arguments)
    assert waits == [], "it was tried again"
    assert not [key for key in (KEY, WRONG_KEY) if key in str(caught.value)]


def test_a_missing_container_is_named(azure: str) -> None:
    store = open_store("az://no-such-container/x", QUICK, lambda seconds: None)
    with pytest.raises(StoreError, match="az://no-such-container/x: cannot write k"):
        store.put_new("k", b"one")
