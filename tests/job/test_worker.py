"""A worker turns leases into whole objects: order, stages without barrier, quarantine, faults."""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from eagle_batch.errors import StoreError
from eagle_batch.job.reports import PumpReport
from eagle_batch.job.spec import WorkerSpec
from eagle_batch.job.store import LocalStore, Store
from eagle_batch.job.tasks import Lease, Share, Task, Withdrawal
from eagle_batch.job.worker import Worker
from tests.job.fake_engine import LONG, OVERFLOW, RAISE, FakeEngine, build_fake
from tests.job.fake_job import (
    expected_rows,
    load_job,
    read_errors,
    read_rows,
    write_job,
)
from tests.job.support import QUICK

TOPICS = [f"topic {'x' * n}" for n in range(10)]


def make(
    folder: Path, topics: list[str] = TOPICS, store: Store | None = None, **fields: Any
) -> Worker:
    job = load_job(write_job(folder, topics, **fields))
    return Worker(WorkerSpec(job.pipeline, job.plan, 0.0, "cpu", 1, build_fake), store)


def lease(shard: int, start: int, stop: int, attempt: int = 1) -> Lease:
    return Lease(Task(f"part-{shard:05d}", shard, start, stop), attempt, "run")


def run(worker: Worker, *leases: Lease) -> PumpReport:
    return worker.pump(leases, 60.0)


def test_rows_come_in_input_order_then_sample_order(tmp_path: Path) -> None:
    """The fake engine finishes them in another order: each prompt has a length of its own."""
    report = run(make(tmp_path), lease(0, 0, 4), lease(1, 0, 4), lease(2, 0, 2))
    assert len(report.committed) == 3
    assert read_rows(tmp_path / "out") == expected_rows(TOPICS)


def test_a_part_of_a_shard_holds_its_rows_only(tmp_path: Path) -> None:
    part = Lease(Task("part-00001.1", 1, 1, 3), 1, "run")
    run(make(tmp_path), part)
    wanted = [row for row in expected_rows(TOPICS) if row["id"] in ("row5", "row6")]
    assert read_rows(tmp_path / "out") == wanted


def test_the_commit_counts_what_was_written(tmp_path: Path) -> None:
    [(_, commit)] = run(make(tmp_path), lease(0, 0, 4)).committed
    assert (commit.rows, commit.errors, commit.tokens) == (8, 0, 8 * (3 + 2))
    assert commit.attempt == "run-1"


def test_a_pump_ends_after_its_time_and_the_next_goes_on(tmp_path: Path) -> None:
    worker = make(tmp_path)
    reports = [worker.pump((lease(0, 0, 4),), 0.0)]
    while not reports[-1].committed:
        reports.append(worker.pump((), 0.0))
        assert len(reports) < 50
    assert len(reports) > 2
    assert sum(report.units for report in reports) == 8
    assert sum(report.unit_tokens for report in reports) == 8 * 5
    assert sum(report.metrics.completion_tokens for report in reports) == 8 * 5


def test_a_pump_without_work_returns_at_once(tmp_path: Path) -> None:
    assert run(make(tmp_path)).committed == ()


def test_one_batch_waits_behind_the_running_one_and_no_more(tmp_path: Path) -> None:
    engines: list[FakeEngine] = []

    def build(spec: Any) -> FakeEngine:
        engines.append(build_fake(spec))
        return engines[-1]

    job = load_job(write_job(tmp_path, TOPICS))
    worker = Worker(WorkerSpec(job.pipeline, job.plan, 0.0, "cpu", 1, build))
    run(worker, lease(0, 0, 4), lease(1, 0, 4))
    # 4 slots: 4 new rows wait; up to 4 that finished a stage come on top.
    assert 4 <= engines[0].most_waiting <= 8


def test_a_row_goes_to_its_next_stage_while_others_are_in_the_first(tmp_path: Path) -> None:
    order: list[str] = []

    class Recording(FakeEngine):
        def add(self, request: Any) -> None:
            order.append(request.id)
            super().add(request)

    job = load_job(write_job(tmp_path, TOPICS))
    worker = Worker(WorkerSpec(job.pipeline, job.plan, 0.0, "cpu", 1, Recording))
    run(worker, lease(0, 0, 4), lease(1, 0, 4))
    stages = [name.rpartition("/")[2] for name in order]
    assert stages.index("1") < len(stages) - 1 - stages[::-1].index("0")


@pytest.mark.parametrize(
    ("topic", "reason", "stage"),
    [(LONG, "prompt_too_long", "one"), (OVERFLOW, "generation_overflow", "one")],
)
def test_a_bad_row_is_quarantined_with_its_reason_and_the_others_are_made(
    tmp_path: Path, topic: str, reason: str, stage: str
) -> None:
    topics = [TOPICS[0], topic, TOPICS[2], TOPICS[3]]
    [(_, commit)] = run(make(tmp_path, topics), lease(0, 0, 4, attempt=7)).committed
    assert (commit.rows, commit.errors) == (6, 2)
    errors = read_errors(tmp_path / "out")
    assert [(e["id"], e["sample"], e["reason"], e["stage"], e["attempt"]) for e in errors] == [
        ("row1", 0, reason, stage, 7),
        ("row1", 1, reason, stage, 7),
    ]
    assert f'"topic": "{topic}"' in errors[0]["row"]
    good = [row for row in expected_rows(topics) if row["id"] != "row1"]
    assert read_rows(tmp_path / "out") == good


def test_a_shard_of_bad_rows_only_is_committed_with_no_rows(tmp_path: Path) -> None:
    [(_, commit)] = run(make(tmp_path, [LONG, LONG]), lease(0, 0, 2)).committed
    assert (commit.rows, commit.errors) == (0, 4)
    assert pq.read_table(tmp_path / "out/data/part-00000.parquet").schema.names[:2] == [
        "id",
        "sample",
    ]


def test_an_engine_that_breaks_is_no_fault_of_a_row(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="the device is gone"):
        run(make(tmp_path, [RAISE]), lease(0, 0, 1))
    assert not (tmp_path / "out/data").exists()


def test_an_input_that_went_away_fails_the_task_and_not_the_worker(tmp_path: Path) -> None:
    worker = make(tmp_path)
    (tmp_path / "in.parquet").unlink()
    [(failed, failure)] = run(worker, lease(0, 0, 4)).failed
    assert failed == lease(0, 0, 4)
    assert "in.parquet" in failure.message


class Full(LocalStore):
    def _create(self, key: str, data: bytes) -> None:
        raise PermissionError("disk quota exceeded")


def test_a_store_that_refuses_fails_the_task_and_not_the_worker(tmp_path: Path) -> None:
    worker = make(tmp_path, store=Full(str(tmp_path / "out"), QUICK, lambda s: None))
    [(_, failure)] = run(worker, lease(0, 0, 4)).failed
    assert isinstance(failure.error, StoreError)
    assert "disk quota exceeded" in failure.message
    # It can be leased again: nothing of the first attempt is left.
    assert len(run(worker, lease(0, 0, 4, attempt=2)).failed) == 1


def test_the_loser_of_a_race_reports_the_winners_objects(tmp_path: Path) -> None:
    first, second = make(tmp_path), make(tmp_path)
    [(_, won)] = run(first, lease(0, 0, 4, attempt=1)).committed
    [(mine, commit)] = run(second, lease(0, 0, 4, attempt=2)).committed
    assert (mine.attempt, commit) == (2, won)


def test_the_output_has_token_ids_when_asked(tmp_path: Path) -> None:
    run(make(tmp_path, output={"token_ids": True}), lease(0, 0, 1))
    row = pq.read_table(tmp_path / "out/data/part-00000.parquet").to_pylist()[0]
    assert [(item["stage"], item["ids"]) for item in row["token_ids"]] == [
        ("one", [0, 1, 2]),
        ("two", [0, 1]),
    ]
    prompts = [len(item["prompt"]) for item in row["token_ids"]]
    assert prompts == [item["prompt_tokens"] for item in row["generation"]]


def test_the_generation_column_tells_of_every_stage(tmp_path: Path) -> None:
    run(make(tmp_path), lease(0, 0, 1))
    row = pq.read_table(tmp_path / "out/data/part-00000.parquet").to_pylist()[1]
    from eagle_batch.engine.request import noise_key

    first = row["generation"][0]
    assert (first["stage"], first["completion_tokens"], first["target_passes"]) == ("one", 3, 2)
    assert first["acceptance_length"] == 1.5
    assert first["seed"] == noise_key(3, "row0", 1, "one")


def made_elsewhere(folder: Path, start: int, stop: int, *inner: Share) -> Share:
    """Rows of the first shard that another worker makes."""
    part = Lease(Task("part-00000+7", 0, start, stop), 7, "run", of="part-00000", shares=inner)
    job = load_job(folder / "pipeline.yaml")
    [(_, share)] = run(
        Worker(WorkerSpec(job.pipeline, job.plan, 0.0, "cpu", 1, build_fake)), part
    ).shares
    return share


SHARDED: dict[str, Any] = {
    "output": {"rows_per_shard": 10},
    "limits": {"max_error_rate": 1.0},
}
WITH_BAD_ROWS = [LONG if n in (1, 7) else topic for n, topic in enumerate(TOPICS)]


@pytest.mark.parametrize("pumps", range(10))
def test_rows_that_another_worker_made_take_their_place_whenever_it_is_told(
    tmp_path: Path, pumps: int
) -> None:
    """They may be not begun, under way, in quarantine or made; the counts add up to the rows."""
    worker = make(tmp_path, WITH_BAD_ROWS, **SHARDED)
    share = made_elsewhere(tmp_path, 5, 9)
    whole = lease(0, 0, 10)
    reports = [worker.pump((whole,) if n == 0 else (), 0.0) for n in range(pumps)]
    reports += [worker.pump((replace(whole, shares=(share,)),), 60.0)]
    reports += [worker.pump((), 60.0)]
    [(told, commit)] = [pair for report in reports for pair in report.committed]
    assert told.shares == (share,)
    good = [row for row in expected_rows(WITH_BAD_ROWS) if row["id"] not in ("row1", "row7")]
    assert read_rows(tmp_path / "out") == good
    errors = [(e["id"], e["sample"], e["attempt"]) for e in read_errors(tmp_path / "out")]
    assert errors == [("row1", 0, 1), ("row1", 1, 1), ("row7", 0, 7), ("row7", 1, 7)]
    assert (commit.rows, commit.errors, commit.tokens) == (16, 4, 16 * 5)
    made = sum(r.settled for r in reports) - sum(r.discarded for r in reports)
    assert made == 20 - share.units
    tokens = sum(r.metrics.completion_tokens - r.discarded_tokens for r in reports)
    assert tokens == 16 * 5 - share.spent


@pytest.mark.parametrize("larger_first", [False, True])
def test_of_shares_within_each_other_the_larger_counts(tmp_path: Path, larger_first: bool) -> None:
    worker = make(tmp_path, **SHARDED)
    inner, outer = made_elsewhere(tmp_path, 6, 8), made_elsewhere(tmp_path, 4, 10)
    last = made_elsewhere(tmp_path, 0, 4)
    shares = (outer, inner, last) if larger_first else (inner, last, outer)
    [(told, commit)] = run(worker, replace(lease(0, 0, 10), shares=shares)).committed
    assert told.shares == (last, outer)
    assert read_rows(tmp_path / "out") == expected_rows(TOPICS)
    assert commit.tokens == 20 * 5


def test_a_share_may_hold_another(tmp_path: Path) -> None:
    make(tmp_path, **SHARDED)
    inner = made_elsewhere(tmp_path, 6, 8)
    outer = made_elsewhere(tmp_path, 4, 10, inner)
    assert (outer.units, outer.tokens, outer.spent) == (12, 60, 60)
    worker = make(tmp_path, **SHARDED)
    run(worker, replace(lease(0, 0, 10), shares=(outer,)))
    assert read_rows(tmp_path / "out") == expected_rows(TOPICS)


def test_a_withdrawn_task_is_left_and_the_worker_is_well(tmp_path: Path) -> None:
    worker = make(tmp_path, **SHARDED)
    reports = [worker.pump((lease(0, 0, 10),), 0.0)]
    reports += [worker.pump((), 0.0) for _ in range(4)]
    reports += [worker.pump((Withdrawal("part-00000", 1), Withdrawal("part-00009", 1)), 60.0)]
    assert reports[-1].progress == ()
    assert sum(report.discarded for report in reports) == sum(r.units for r in reports) > 0
    tokens = sum(report.metrics.completion_tokens for report in reports)
    assert sum(report.discarded_tokens for report in reports) == tokens
    assert not (tmp_path / "out/data").exists()
    run(worker, lease(0, 0, 10, attempt=2))
    assert read_rows(tmp_path / "out") == expected_rows(TOPICS)


def test_progress_tells_what_is_begun_and_not_finished(tmp_path: Path) -> None:
    """Four slots, and as many requests wait: what is finished leaves room for the next."""
    worker = make(tmp_path, **SHARDED)
    assert worker.pump((), 0.0).progress == ()
    finished = 0
    for leases in ((lease(0, 0, 10),), (), (), ()):
        report = worker.pump(leases, 0.0)
        finished += report.units
        [at] = report.progress
        assert (at.key, at.attempt) == ("part-00000", 1)
        assert 0 < at.open <= 2 * 4
        # The second sample of the last row may not be begun.
        assert finished + at.open in (2 * at.begun, 2 * at.begun - 1)


def test_rows_of_every_type_come_back_from_a_share_as_they_are(tmp_path: Path) -> None:
    path = write_job(tmp_path, TOPICS, **SHARDED)
    table = pq.read_table(tmp_path / "in.parquet")
    columns: dict[str, Any] = {
        "choice": pa.array(["a", "b"] * 5).cast(pa.dictionary(pa.int8(), pa.string())),
        "large": pa.array(["a", None] * 5, pa.large_string()),
        "price": pa.array([Decimal("1.10"), None] * 5, pa.decimal128(9, 2)),
        "at": pa.array([1, None] * 5, pa.timestamp("s", "Europe/Berlin")),
        "of_day": pa.array([1, None] * 5, pa.time32("s")),
        "tags": pa.array([[{"a": 1}], None] * 5),
        "nothing": pa.nulls(10),
    }
    for name, column in columns.items():
        table = table.append_column(name, column)
    pq.write_table(table, tmp_path / "in.parquet")
    job = load_job(path)

    def written(*leases: Lease) -> pa.Table:
        worker = Worker(WorkerSpec(job.pipeline, job.plan, 0.0, "cpu", 1, build_fake))
        run(worker, *leases)
        found = tmp_path / "out/data/part-00000.parquet"
        made = pq.read_table(found)
        found.unlink()
        return made

    alone = written(lease(0, 0, 10))
    shares = made_elsewhere(tmp_path, 2, 5), made_elsewhere(tmp_path, 5, 9)
    together = written(replace(lease(0, 0, 10), shares=shares))
    assert together.schema.remove_metadata() == alone.schema.remove_metadata()
    assert together.equals(alone)
