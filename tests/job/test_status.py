"""How far a job is, from the store alone, while it runs, after it ended and after it died."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eagle_batch.errors import LedgerError
from eagle_batch.job.ledger import METRICS
from eagle_batch.job.status import read_status
from eagle_batch.job.store import Store, open_store
from tests.job.support import QUICK, identity, ledger, put, put_all

JOB = identity()


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(str(tmp_path), QUICK)


def test_a_complete_job(store: Store) -> None:
    put_all(store, JOB)
    found = read_status(store.root, now=1010.0)
    assert (found.state, found.rows, found.units, found.tasks_done) == ("complete", 12, 12, 3)
    assert (found.host, found.silent_s) == (None, 10.0)


def test_a_running_job_shows_what_its_records_do_not_hold_yet(store: Store) -> None:
    book = ledger(store, JOB)
    book.open({})
    book.record(put(store, JOB, JOB.tasks[0], bad=(1,)))
    assert read_status(store.root, now=1001.0).rows == 0
    store.put_replace(METRICS, json.dumps({"rows": 3, "quarantined": 1}).encode())
    found = read_status(store.root, now=1001.0)
    assert (found.state, found.rows, found.quarantined, found.tasks_done) == ("running", 3, 1, 1)
    book.close()


def test_a_job_whose_driver_is_silent_has_stopped(store: Store) -> None:
    book = ledger(store, JOB)
    book.open({})
    book.record(put(store, JOB, JOB.tasks[0]))
    book.flush()
    assert read_status(store.root, now=1001.0).state == "running"
    found = read_status(store.root, now=2000.0)
    assert (found.state, found.rows, found.host) == ("stopped", 4, None)
    book.close()


def test_reading_changes_nothing(store: Store) -> None:
    put_all(store, JOB)
    before = {path: path.stat().st_mtime_ns for path in Path(store.root).rglob("*")}
    read_status(store.root)
    assert {path: path.stat().st_mtime_ns for path in Path(store.root).rglob("*")} == before


def test_a_folder_without_a_job_is_refused(store: Store) -> None:
    with pytest.raises(LedgerError, match="expected the output folder of"):
        read_status(store.root)
