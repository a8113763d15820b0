"""What a resume finds, adopts, makes again or refuses; over a local disk and an object store."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from eagle_batch.errors import LedgerError, OutputBusyError
from eagle_batch.job.ledger import Ledger, Scan, latest, read_identity, read_records
from eagle_batch.job.lock import read_holder
from eagle_batch.job.store import LocalStore, Store, open_store
from eagle_batch.job.tasks import Commit, Lease, Task
from tests.job.support import (
    FINGERPRINT,
    QUICK,
    errors,
    identity,
    ledger,
    objects,
    put,
    put_all,
    rows,
)


@pytest.fixture(params=["local", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    root = str(tmp_path) if request.param == "local" else f"memory://{tmp_path.name}"
    return open_store(root, QUICK)


JOB = identity()


def scan(store: Store, **changes: object) -> Scan:
    book = ledger(store, identity(**changes), run="later")  # type: ignore[arg-type]
    try:
        return book.open({})
    finally:
        book.close()


def test_a_fresh_output_has_everything_left_to_do(store: Store) -> None:
    found = scan(store)
    assert found.tasks == JOB.tasks
    assert found.commits == {}
    assert not found.complete


def test_the_job_is_written_down_and_read_back(store: Store) -> None:
    scan(store)
    assert read_identity(store) == replace(JOB, started=1000.0)


def test_a_recorded_commit_is_done(store: Store) -> None:
    book = ledger(store, JOB)
    book.open({})
    commit = put(store, JOB, JOB.tasks[1])
    book.record(commit)
    book.close()
    found = scan(store)
    assert found.commits == {"part-00001": commit}
    assert found.adopted == ()


def test_a_complete_object_without_a_record_is_adopted_and_then_recorded(store: Store) -> None:
    book = ledger(store, JOB)
    book.open({})
    commit = put(store, JOB, JOB.tasks[1])
    book.close()
    assert scan(store).adopted == ("part-00001",)
    again = scan(store)
    assert (again.adopted, again.commits) == ((), {"part-00001": commit})


def test_an_errors_object_alone_is_no_commit_and_goes(store: Store) -> None:
    """Its rows are made again, and a reader must not find them quarantined meanwhile."""
    book = ledger(store, JOB)
    book.open({})
    put(store, JOB, JOB.tasks[0])
    store.delete("data/part-00000.parquet")
    book.close()
    assert scan(store).commits == {}
    assert store.list("errors") == {}


@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize("harm", [lambda data: None, lambda data: data + b"x"])
def test_an_errors_object_that_is_gone_or_another_is_put_again_from_the_data_object(
    store: Store, recorded: bool, harm: Callable[[bytes], bytes | None]
) -> None:
    """The crash came between the two puts, or somebody has touched it."""
    book = ledger(store, JOB)
    book.open({})
    commit = put(store, JOB, JOB.tasks[0], bad=(1,))
    if recorded:
        book.record(commit)
    book.close()
    key = "errors/part-00000.parquet"
    whole = store.get(key) or b""
    changed = harm(whole)
    store.delete(key) if changed is None else store.put_replace(key, changed)
    found = scan(store)
    assert found.commits == {"part-00000": commit}
    assert (found.restored, found.adopted) == (
        (("part-00000",), ()) if recorded else ((), ("part-00000",))
    )
    assert store.get(key) == whole


def test_a_resume_lists_and_reads_nothing_of_a_shard_that_is_recorded(tmp_path: Path) -> None:
    class Counting(LocalStore):
        def __init__(self) -> None:
            super().__init__(str(tmp_path), QUICK, lambda seconds: None)
            self.log: list[tuple[str, str]] = []

        def _list(self, prefix: str) -> dict[str, int]:
            self.log.append(("list", prefix))
            return super()._list(prefix)

        def _read(self, key: str) -> bytes:
            self.log.append(("read", key))
            return super()._read(key)

    counts = []
    for shards in (3, 40):
        job = identity(shards=shards, fingerprint=FINGERPRINT)
        for path in sorted(tmp_path.rglob("*"), reverse=True):
            path.unlink() if path.is_file() else path.rmdir()
        put_all(open_store(str(tmp_path), QUICK), job)
        store = Counting()
        book = ledger(store, job, "later")
        assert book.open({}).complete
        book.close()
        assert not [key for _, key in store.log if key.endswith(".parquet")]
        assert store.log.count(("list", "data")) == store.log.count(("list", "errors")) == 1
        counts.append(len(store.log))
    assert counts[0] == counts[1], "requests grow with the shards"


def test_a_torn_object_is_moved_away_and_made_again(store: Store) -> None:
    book = ledger(store, JOB)
    book.open({})
    put(store, JOB, JOB.tasks[0])
    whole = store.get("data/part-00000.parquet") or b""
    store.put_replace("data/part-00000.parquet", whole[:-7])
    book.close()
    found = scan(store)
    assert (found.damaged, found.commits) == (("part-00000",), {})
    assert store.list("data") == {}
    assert store.get("_job/damaged/part-00000.parquet") == whole[:-7]


def test_a_recorded_object_that_is_gone_is_made_again_and_its_record_retracted(
    store: Store,
) -> None:
    put_all(store, JOB)
    store.delete("data/part-00001.parquet")
    found = scan(store)
    assert found.missing == ("part-00001",)
    assert set(found.commits) == {"part-00000", "part-00002"}
    assert "part-00001" not in latest(read_records(store))
    put_all(store, JOB, run="third")
    assert scan(store).complete


def test_a_recorded_object_of_another_size_is_refused(store: Store) -> None:
    put_all(store, JOB)
    store.put_replace("data/part-00001.parquet", b"PAR1 something else PAR1")
    with pytest.raises(LedgerError, match=r"part-00001.parquet has 24 bytes, its record"):
        scan(store)


@pytest.mark.parametrize("key", ["data/part-00009.parquet", "errors/mine.parquet"])
def test_a_parquet_file_that_is_not_ours_is_refused(store: Store, key: str) -> None:
    put_all(store, JOB)
    store.put_new(key, b"PAR1")
    with pytest.raises(LedgerError, match=key):
        scan(store)


def test_data_without_a_job_is_refused_and_left_alone(store: Store) -> None:
    store.put_new("data/old.parquet", b"PAR1")
    with pytest.raises(LedgerError, match=r"data/old.parquet but no _job/pipeline.json"):
        scan(store)
    assert store.get("_job/pipeline.json") is None


def test_a_changed_pipeline_is_refused_and_the_changed_keys_are_named(store: Store) -> None:
    put_all(store, JOB)
    changed = {**JOB.resolved, "seed": 1}
    with pytest.raises(LedgerError, match="seed: was 0, is now 1"):
        scan(store, fingerprint="0" * 64, resolved=changed)


def test_a_refusal_gives_the_lock_back(store: Store) -> None:
    put_all(store, JOB)
    with pytest.raises(LedgerError):
        scan(store, fingerprint="0" * 64)
    assert scan(store).complete


def test_a_finished_job_is_complete(store: Store) -> None:
    put_all(store, JOB)
    assert scan(store).complete


def test_two_drivers_cannot_open_one_output(store: Store) -> None:
    book = ledger(store, JOB)
    book.open({})
    with pytest.raises(OutputBusyError):
        ledger(store, JOB, "run2").open({})
    book.close()


def test_the_parts_of_a_closed_task_are_found_from_the_output_alone(store: Store) -> None:
    """The driver died after closing the parent and before anything else was recorded."""
    book = ledger(store, JOB)
    book.open({})
    parent = JOB.tasks[0]
    parts = parent.split(2)
    none = rows(parent).slice(0, 0)
    objects(store, JOB).put(Lease(parent, 4, "run1"), none, errors(parent), parts=parts)
    put(store, JOB, parts[1])
    book.close()
    found = scan(store)
    assert found.tasks == (*JOB.tasks, *parts)
    assert set(found.commits) == {"part-00000", "part-00000.1"}


def test_records_go_out_in_batches_one_new_object_each(store: Store) -> None:
    book = ledger(store, JOB)
    book.open({})
    for task in JOB.tasks:
        book.record(put(store, JOB, task))
    book.tend()
    assert store.list("_job/commits") == {}
    book.flush()
    book.close()
    [key] = store.list("_job/commits")
    assert key == "_job/commits/000000-run1.jsonl"
    lines = (store.get(key) or b"").decode().splitlines()
    assert [json.loads(line)["key"] for line in lines] == [task.key for task in JOB.tasks]


def test_waiting_records_are_written_after_a_while(tmp_path: Path) -> None:
    store = open_store(str(tmp_path), QUICK)
    now = [1000.0]
    book = Ledger(store, JOB, objects(store, JOB), "run1", clock=lambda: now[0])
    book.open({})
    book.record(put(store, JOB, JOB.tasks[0]))
    book.tend()
    assert read_records(store) == []
    now[0] += 31
    book.tend()
    assert len(read_records(store)) == 1
    book.close()


def test_a_long_scan_keeps_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each adoption takes a minute; a second driver must not take the first one for dead."""
    store = open_store(str(tmp_path), QUICK)
    book = ledger(store, JOB)
    book.open({})
    for task in JOB.tasks:
        put(store, JOB, task)
    book.close()
    now = [1000.0]
    slow = objects(store, JOB)
    settle = slow.settle

    def settle_slowly(task: Task, *, exclusive: bool) -> Commit:
        now[0] += 60
        return settle(task, exclusive=exclusive)

    monkeypatch.setattr(slow, "settle", settle_slowly)
    Ledger(store, JOB, slow, "later", clock=lambda: now[0]).open({})
    holder = read_holder(store)[1]
    assert holder is not None
    assert now[0] - holder.beat <= 60


def test_what_a_killed_writer_left_is_swept(tmp_path: Path) -> None:
    store = open_store(str(tmp_path), QUICK)
    scan(store)
    (tmp_path / "data").mkdir()
    left = tmp_path / "data" / ".part-00000.parquet.ab12.tmp"
    left.write_bytes(b"half")
    scan(store)
    assert not left.exists()


def test_each_run_leaves_its_settings(store: Store) -> None:
    for run in ("one", "two"):
        book = ledger(store, JOB, run)
        book.open({"command": ["eagle-batch", "submit"]})
        book.close()
    keys = sorted(store.list("_job/runs"))
    assert keys == ["_job/runs/000000-one.json", "_job/runs/000001-two.json"]
    assert json.loads(store.get(keys[1]) or b"")["command"] == ["eagle-batch", "submit"]


def test_a_line_that_is_no_record_is_named(store: Store) -> None:
    store.put_new("_job/commits/000000-x.jsonl", b'{"retracted": "part-00000"}\n{"key": 1}\n')
    with pytest.raises(LedgerError, match=r"_job/commits/000000-x.jsonl:2: not a commit record"):
        read_records(store)


def test_an_object_of_this_job_with_fewer_rows_is_refused_by_name(store: Store) -> None:
    book = ledger(store, JOB)
    book.open({})
    short = Task("part-00000", 0, 0, 3)
    put(store, JOB, short)
    book.close()
    with pytest.raises(LedgerError, match=r"part-00000.parquet: accounts for 3 \+ 0 rows, not 4"):
        scan(store)


def test_a_resumed_job_keeps_the_time_of_its_first_start(store: Store) -> None:
    """Chat templates that print the date must print the same one after a resume."""
    for now in (1000.0, 99_000.0):
        book = ledger(store, JOB, f"at{now:.0f}", now)
        book.open({})
        book.close()
        assert book.identity.started == 1000.0
