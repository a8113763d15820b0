"""A worker turns leases into whole objects: order, stages without barrier, quarantine, faults."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from eagle_batch.errors import StoreError
from eagle_batch.job.reports import PumpReport
from eagle_batch.job.spec import WorkerSpec
from eagle_batch.job.store import LocalStore, Store
from eagle_batch.job.tasks import Lease, Task
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
    assert row["token_ids"] == [
        {"stage": "one", "ids": [0, 1, 2]},
        {"stage": "two", "ids": [0, 1]},
    ]


def test_the_generation_column_tells_of_every_stage(tmp_path: Path) -> None:
    run(make(tmp_path), lease(0, 0, 1))
    row = pq.read_table(tmp_path / "out/data/part-00000.parquet").to_pylist()[1]
    from eagle_batch.engine.request import noise_key

    first = row["generation"][0]
    assert (first["stage"], first["completion_tokens"], first["target_passes"]) == ("one", 3, 2)
    assert first["acceptance_length"] == 1.5
    assert first["seed"] == noise_key(3, "row0", 1, "one")
