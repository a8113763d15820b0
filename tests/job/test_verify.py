"""Each way an output can be wrong has its own finding; a whole output has none."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from eagle_batch.errors import LedgerError
from eagle_batch.job.ledger import Identity
from eagle_batch.job.store import Store, open_store
from eagle_batch.job.tasks import Lease
from eagle_batch.job.verify import verify
from tests.job.support import QUICK, errors, identity, ledger, objects, put, put_all, rows

JOB = identity(samples=2)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = open_store(str(tmp_path), QUICK)
    put_all(store, JOB)
    return store


def test_a_whole_output_has_no_findings(store: Store) -> None:
    report = verify(store.root)
    assert report.ok
    assert report.findings == ()
    assert (report.rows_in, report.rows_out, report.quarantined) == (24, 24, 0)
    assert (report.objects, report.tokens) == (6, 72)


def test_quarantined_rows_are_counted_and_are_no_finding(tmp_path: Path) -> None:
    store = open_store(str(tmp_path), QUICK)
    book = ledger(store, JOB)
    book.open({})
    for task in JOB.tasks:
        book.record(put(store, JOB, task, bad=(1,)))
    book.close()
    report = verify(store)
    assert report.ok
    assert (report.rows_out, report.quarantined) == (18, 6)


def test_a_split_task_is_whole(tmp_path: Path) -> None:
    store = open_store(str(tmp_path), QUICK)
    job: Identity = identity(shards=1)
    book = ledger(store, job)
    book.open({})
    parent = job.tasks[0]
    empty = rows(parent).slice(0, 0)
    writer = objects(store, job)
    book.record(writer.put(Lease(parent, 2, "r"), empty, errors(parent), parts=parent.split(3)))
    for part in parent.split(3):
        book.record(put(store, job, part))
    book.close()
    assert verify(store).ok


def overwrite(store: Store, key: str, change: Callable[[bytes], bytes]) -> None:
    store.put_replace(key, change(store.get(key) or b""))


def rewrite_rows(store: Store, key: str, change: Callable[[pa.Table], pa.Table]) -> None:
    """Change the rows of an object and keep its metadata, as a careful forger would."""
    table = pq.read_table(pa.BufferReader(store.get(key) or b""))
    sink = pa.BufferOutputStream()
    pq.write_table(change(table).replace_schema_metadata(table.schema.metadata), sink)
    store.put_replace(key, bytes(sink.getvalue()))


def copy(store: Store, source: str, key: str) -> None:
    store.put_new(key, store.get(source) or b"")


def forge_record(store: Store) -> None:
    [key] = store.list("_job/commits")
    lines = [json.loads(line) for line in (store.get(key) or b"").splitlines()]
    lines[0]["rows"] += 1
    store.put_replace(key, "\n".join(map(json.dumps, lines)).encode())


ZERO = "data/part-00000.parquet"
ONE = "data/part-00001.parquet"
DAMAGE: dict[str, tuple[Callable[[Store], object], str, str]] = {
    "a deleted data object": (lambda s: s.delete(ONE), "missing", ONE),
    "a deleted errors object": (
        lambda s: s.delete("errors/part-00001.parquet"),
        "missing",
        "errors/part-00001.parquet",
    ),
    "a torn object": (lambda s: overwrite(s, ONE, lambda b: b[:-9]), "damaged", ONE),
    "one flipped bit": (
        lambda s: overwrite(s, ONE, lambda b: b[:60] + bytes([b[60] ^ 1]) + b[61:]),
        "",
        "part-00001",
    ),
    "a lost row": (lambda s: rewrite_rows(s, ONE, lambda t: t.slice(1)), "mismatch", ONE),
    "a row twice": (
        lambda s: rewrite_rows(s, ONE, lambda t: t.take([0, 0, *range(2, 8)])),
        "duplicate",
        ONE,
    ),
    "a changed text": (
        lambda s: rewrite_rows(s, ONE, lambda t: t.set_column(2, "text", [["x"] * 8])),
        "forged_record",
        "record of part-00001",
    ),
    "a dropped column": (
        lambda s: rewrite_rows(s, ONE, lambda t: t.drop_columns(["text"])),
        "mismatch",
        ONE,
    ),
    "another shard's object": (
        lambda s: overwrite(s, ONE, lambda b: s.get(ZERO) or b""),
        "foreign",
        ONE,
    ),
    "a second copy of a shard": (
        lambda s: copy(s, ONE, "data/part-00001 (copy).parquet"),
        "foreign",
        "data/part-00001 (copy).parquet",
    ),
    "a foreign file": (lambda s: s.put_new("data/x.csv", b""), "foreign", "x.csv"),
    "a forged record": (forge_record, "forged_record", "record of part-00000"),
    "a record of no shard": (
        lambda s: s.put_new("_job/commits/000009-x.jsonl", record("part-00009")),
        "forged_record",
        "record of part-00009",
    ),
    "a record that is no JSON": (
        lambda s: s.put_new("_job/commits/000009-x.jsonl", b"hello\n"),
        "forged_record",
        "_job/commits/000009-x.jsonl:1",
    ),
}


def record(key: str) -> bytes:
    names = ("data_bytes", "errors_bytes", "rows", "errors", "tokens")
    line = {"key": key, "attempt": "a", "parts": [], "data_sha256": "", "errors_sha256": ""}
    return json.dumps(line | dict.fromkeys(names, 0)).encode()


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_found_and_named(store: Store, damage: str) -> None:
    harm, kind, where = DAMAGE[damage]
    harm(store)
    report = verify(store)
    assert not report.ok
    assert any(kind in f.kind and where in f.where for f in report.findings), report.findings


def test_an_id_in_two_shards_is_a_duplicate(tmp_path: Path) -> None:
    store = open_store(str(tmp_path), QUICK)
    job = identity(shards=2)
    book = ledger(store, job)
    book.open({})
    for task in job.tasks:
        table = rows(job.tasks[0])
        book.record(objects(store, job).put(Lease(task, 1, "r"), table, errors(task), 12))
    book.close()
    report = verify(store)
    assert {f.kind for f in report.findings} == {"duplicate"}
    assert "'0:0', sample 0 is also in data/part-00000.parquet" in report.findings[0].message


def test_an_unfinished_job_is_not_whole(tmp_path: Path) -> None:
    store = open_store(str(tmp_path), QUICK)
    book = ledger(store, JOB)
    book.open({})
    book.record(put(store, JOB, JOB.tasks[0]))
    book.close()
    report = verify(store)
    assert not report.ok
    assert [f.kind for f in report.findings] == ["unfinished", "unfinished"]


def test_an_object_that_waits_for_its_record_is_named(tmp_path: Path) -> None:
    store = open_store(str(tmp_path), QUICK)
    job = identity(shards=1)
    book = ledger(store, job)
    book.open({})
    put(store, job, job.tasks[0])
    book.close()
    assert [f.kind for f in verify(store).findings] == ["record_missing"]


def test_a_folder_without_a_job_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match=r"no _job/pipeline\.json"):
        verify(str(tmp_path))
