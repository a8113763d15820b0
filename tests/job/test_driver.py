"""Whole jobs over an in-process pool: what comes out, what is shown, and how each one ends."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eagle_batch.errors import (
    ConfigError,
    InterruptedRunError,
    LedgerError,
    OutputBusyError,
    StoppedError,
    StoreError,
)
from eagle_batch.job.driver import run_job
from eagle_batch.job.store import LocalStore
from eagle_batch.job.verify import verify
from tests.faults.dying import bury
from tests.job.fake_engine import LONG, OVERFLOW, RAISE, build_broken, build_refused
from tests.job.fake_job import (
    CrashError,
    InProcessPool,
    SlowFirst,
    Watch,
    expected_rows,
    load_job,
    read_errors,
    read_rows,
    run_in_process,
    share_at_once,
    write_job,
)
from tests.job.support import QUICK

TOPICS = [f"topic {'x' * (n % 7)}" for n in range(18)]


def test_a_job_writes_what_an_undisturbed_run_writes(tmp_path: Path) -> None:
    job = load_job(write_job(tmp_path, TOPICS))
    result = run_in_process(job)
    assert read_rows(tmp_path / "out") == expected_rows(TOPICS)
    assert (result.rows, result.quarantined, result.units) == (36, 0, 36)
    assert verify(str(tmp_path / "out")).ok


@pytest.mark.parametrize("size", [2, 5])
def test_the_number_of_workers_changes_nothing(tmp_path: Path, size: int) -> None:
    run_in_process(load_job(write_job(tmp_path, TOPICS)), size=size)
    assert read_rows(tmp_path / "out") == expected_rows(TOPICS)


def test_a_job_runs_into_memory_too(tmp_path: Path) -> None:
    """The object-store path of the ledger, without a server."""
    job = load_job(write_job(tmp_path, TOPICS, output={"path": f"memory://{tmp_path.name}"}))
    run_in_process(job)
    report = verify(f"memory://{tmp_path.name}")
    assert report.ok
    assert report.rows_out == 36


def test_the_same_command_again_starts_nothing(tmp_path: Path) -> None:
    job = load_job(write_job(tmp_path, TOPICS))
    run_in_process(job)
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "out/data").iterdir()}

    def no_pool(started: float) -> Any:
        raise AssertionError("a complete job starts no pool")

    again = run_job(job, no_pool, Watch())
    assert again.already_complete
    assert (again.rows, again.quarantined) == (36, 0)
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "out/data").iterdir()} == before


def test_bad_rows_are_quarantined_and_the_job_is_complete(tmp_path: Path) -> None:
    topics = [*TOPICS[:5], LONG, *TOPICS[6:9], OVERFLOW, *TOPICS[10:]]
    path = write_job(tmp_path, topics, limits={"max_error_rate": 0.5})
    result = run_in_process(load_job(path))
    assert (result.rows, result.quarantined) == (32, 4)
    reasons = {error["id"]: error["reason"] for error in read_errors(tmp_path / "out")}
    assert reasons == {"row5": "prompt_too_long", "row9": "generation_overflow"}
    report = verify(str(tmp_path / "out"))
    assert report.ok
    assert report.quarantined == 4


def test_too_many_bad_rows_stop_the_job_and_a_higher_limit_resumes_it(tmp_path: Path) -> None:
    path = write_job(tmp_path, [LONG] * 8 + TOPICS)
    with pytest.raises(StoppedError, match=r"above limits.max_error_rate \(0.1\)") as caught:
        run_in_process(load_job(path))
    assert "run the same command again" in str(caught.value)
    result = run_in_process(load_job(path, "limits.max_error_rate=0.9"))
    assert (result.rows, result.quarantined) == (36, 16)


def crash_at(*moments: tuple[int, int]) -> Callable[[int, int], None]:
    def sabotage(worker: int, pump: int) -> None:
        if (worker, pump) in moments:
            raise CrashError(f"worker {worker} dies in pump {pump}")

    return sabotage


def test_lost_workers_are_replaced_and_no_row_changes(tmp_path: Path) -> None:
    job = load_job(write_job(tmp_path, TOPICS))
    watch = Watch()
    run_in_process(job, watch, size=2, sabotage=crash_at((0, 2), (1, 1), (2, 3)))
    assert read_rows(tmp_path / "out") == expected_rows(TOPICS)
    assert sum("was lost" in line for line in watch.lines) == 3
    assert verify(str(tmp_path / "out")).ok


@pytest.mark.parametrize("position", [0, 5, 17])
def test_a_row_that_breaks_every_engine_is_cut_out_and_quarantined(
    tmp_path: Path, position: int
) -> None:
    topics = [*TOPICS[:position], RAISE, *TOPICS[position + 1 :]]
    path = write_job(tmp_path, topics, output={"rows_per_shard": 18})
    watch = Watch()
    result = run_in_process(load_job(path), watch)
    bad = f"row{position}"
    wanted = [row for row in expected_rows(topics) if row["id"] != bad]
    found = sorted(read_rows(tmp_path / "out"), key=lambda r: (int(r["id"][3:]), r["sample"]))
    assert found == wanted
    errors = read_errors(tmp_path / "out")
    assert [(e["id"], e["sample"], e["reason"]) for e in errors] == [
        (bad, 0, "worker_crash"),
        (bad, 1, "worker_crash"),
    ]
    assert "the device is gone" in errors[0]["message"]
    assert (result.rows, result.quarantined) == (34, 2)
    report = verify(str(tmp_path / "out"))
    assert report.ok, report.findings
    assert any("split in" in line for line in watch.lines)


def test_a_job_that_was_split_resumes_and_is_complete(tmp_path: Path) -> None:
    topics = [*TOPICS[:5], RAISE, *TOPICS[6:]]
    path = write_job(tmp_path, topics, output={"rows_per_shard": 18})
    run_in_process(load_job(path))
    assert run_in_process(load_job(path)).already_complete


def test_a_store_that_fails_for_every_shard_stops_the_job_with_the_reason(tmp_path: Path) -> None:
    class NoData(LocalStore):
        def _create(self, key: str, data: bytes) -> None:
            if key.startswith("data/"):
                raise PermissionError("disk quota exceeded")
            super()._create(key, data)

    job = load_job(write_job(tmp_path, TOPICS[:4]))
    store = NoData(str(tmp_path / "out"), QUICK, lambda s: None)
    with pytest.raises(StoppedError, match="disk quota exceeded"):
        run_in_process(job, store=store)
    run_in_process(job)
    assert read_rows(tmp_path / "out") == expected_rows(TOPICS[:4])


def test_an_engine_that_the_user_must_mend_ends_the_job_at_once(tmp_path: Path) -> None:
    job = load_job(write_job(tmp_path, TOPICS))
    watch = Watch()
    with pytest.raises(ConfigError, match="does not fit"):
        run_in_process(job, watch, build=build_refused)
    assert watch.lines == []


def test_an_engine_that_cannot_start_ends_the_job_after_three_tries(tmp_path: Path) -> None:
    job = load_job(write_job(tmp_path, TOPICS))
    watch = Watch()
    with pytest.raises(StoppedError, match="no kernel image is available") as caught:
        run_in_process(job, watch, build=build_broken)
    assert len(watch.lines) == 3
    assert "build_broken" in str(caught.value), "the worker's own traceback is kept"


def test_workers_that_always_die_stop_the_job(tmp_path: Path) -> None:
    def sabotage(worker: int, pump: int) -> None:
        raise CrashError("the driver is too old")

    job = load_job(write_job(tmp_path, TOPICS))
    with pytest.raises(StoppedError, match="the driver is too old"):
        run_in_process(job, sabotage=sabotage)


def test_a_stopped_job_gives_the_lock_back_and_resumes(tmp_path: Path) -> None:
    job = load_job(write_job(tmp_path, TOPICS))
    with pytest.raises(StoppedError):
        run_in_process(job, build=build_broken)
    run_in_process(job)
    assert read_rows(tmp_path / "out") == expected_rows(TOPICS)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_keeps_what_is_committed_and_the_same_command_resumes(
    tmp_path: Path, number: int
) -> None:
    def sabotage(worker: int, pump: int) -> None:
        if pump == 20:
            os.kill(os.getpid(), number)

    job = load_job(write_job(tmp_path, TOPICS))
    before = signal.getsignal(number)
    with pytest.raises(InterruptedRunError, match="run the same command again"):
        run_in_process(job, sabotage=sabotage)
    assert signal.getsignal(number) is before
    some = len(read_rows(tmp_path / "out"))
    assert 0 < some < 36
    watch = Watch()
    run_in_process(job, watch)
    assert read_rows(tmp_path / "out") == expected_rows(TOPICS)
    assert f"resuming: {some // 8} of 5 shards are committed" in watch.lines


def test_a_second_driver_is_refused(tmp_path: Path) -> None:
    job = load_job(write_job(tmp_path, TOPICS))
    refused: list[str] = []

    def sabotage(worker: int, pump: int) -> None:
        if pump == 2:
            with pytest.raises(OutputBusyError) as caught:
                run_in_process(job)
            refused.append(str(caught.value))

    run_in_process(job, sabotage=sabotage)
    assert len(refused) == 1
    assert f"process {os.getpid()}" in refused[0]
    assert read_rows(tmp_path / "out") == expected_rows(TOPICS)


def test_a_changed_seed_is_refused_by_name(tmp_path: Path) -> None:
    path = write_job(tmp_path, TOPICS)
    run_in_process(load_job(path))
    with pytest.raises(LedgerError, match="seed: was 3, is now 4"):
        run_in_process(load_job(path, "seed=4"))


def test_settings_that_change_no_text_may_change_between_runs(tmp_path: Path) -> None:
    path = write_job(tmp_path, TOPICS)

    def sabotage(worker: int, pump: int) -> None:
        if pump == 20:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(InterruptedRunError):
        run_in_process(load_job(path), sabotage=sabotage)
    run_in_process(load_job(path, "engine.slots=2", "output.compression=none", "name=other"))
    assert read_rows(tmp_path / "out") == expected_rows(TOPICS)


def test_the_view_is_never_at_its_end_before_the_last_commit(tmp_path: Path) -> None:
    watch = Watch()
    run_in_process(load_job(write_job(tmp_path, TOPICS)), watch)
    assert watch.snapshots[-1].committed == watch.snapshots[-1].units == 36
    early = [s for s in watch.snapshots if s.tasks_done < s.tasks]
    assert early
    assert all(s.committed < s.units for s in early)


def test_the_metrics_tell_of_this_run_and_of_the_ones_before(tmp_path: Path) -> None:
    path = write_job(tmp_path, TOPICS)

    def sabotage(worker: int, pump: int) -> None:
        if pump == 20:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(InterruptedRunError):
        run_in_process(load_job(path), sabotage=sabotage)
    result = run_in_process(load_job(path))
    document = json.loads((tmp_path / "out/_job/metrics.json").read_text())
    assert document["state"] == "complete"
    assert [run["state"] for run in document["earlier_runs"]] == ["interrupted"]
    assert document["rows"] == 36
    assert document["rows_this_run"] + document["earlier_runs"][0]["rows_this_run"] >= 36
    assert document["engine"]["completion_tokens"] == document["rows_this_run"] * 5
    assert document["engine"]["acceptance_at"] == [0.5]
    assert document["engine"]["time_share"]["verify"] == pytest.approx(2 / 3)
    assert document["series"][-1]["tokens"] > 0
    assert document["discarded_tokens"] == 0
    assert result.metrics is not None
    assert result.metrics["run"] == document["run"]


def test_every_run_leaves_its_command_versions_and_settings(tmp_path: Path) -> None:
    job = load_job(write_job(tmp_path, TOPICS[:2]))
    run_in_process(job)
    [path] = (tmp_path / "out/_job/runs").iterdir()
    assert json.loads(path.read_text())["command"] == ["test"]


def test_a_shard_whose_objects_were_deleted_is_made_again(tmp_path: Path) -> None:
    job = load_job(write_job(tmp_path, TOPICS))
    run_in_process(job)
    (tmp_path / "out/data/part-00002.parquet").unlink()
    watch = Watch()
    run_in_process(job, watch)
    assert read_rows(tmp_path / "out") == expected_rows(TOPICS)
    assert verify(str(tmp_path / "out")).ok
    assert any("made again: part-00002" in line for line in watch.lines)


def test_the_pool_is_closed_however_the_job_ends(tmp_path: Path) -> None:
    job = load_job(write_job(tmp_path, TOPICS))
    pools: list[InProcessPool] = []

    def make_pool(started: float) -> InProcessPool:
        pools.append(InProcessPool(job.pipeline, job, started, build=build_broken))
        return pools[-1]

    with pytest.raises(StoppedError):
        run_job(job, make_pool, Watch())
    assert pools[0].closed


def test_the_driver_needs_neither_torch_nor_ray(repository: Path) -> None:
    import subprocess
    import sys

    modules = "eagle_batch.job.driver, eagle_batch.job.worker, eagle_batch.job.submit"
    more = "eagle_batch.job.verify, eagle_batch.job.status, eagle_batch.cli, eagle_batch.report"
    script = (
        f"import sys, {modules}, {more}\n"
        "print([m for m in ('torch', 'ray', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=repository
    )
    assert done.stdout.strip() == "[]"


@pytest.fixture
def sharing(monkeypatch: pytest.MonkeyPatch) -> None:
    share_at_once(monkeypatch)


@pytest.mark.usefixtures("sharing")
def test_a_worker_that_stands_still_does_not_hold_up_the_end_of_the_job(tmp_path: Path) -> None:
    """Worker 0 gets its first shards and then stands still; worker 1 makes the rest, and those."""
    topics = [f"topic {n}" for n in range(24)]
    job = load_job(write_job(tmp_path, topics))
    made: list[SlowFirst] = []

    def make_pool(started: float) -> SlowFirst:
        made.append(SlowFirst(job, started, stands=2, size=2))
        return made[0]

    watch = Watch()
    result = run_job(job, make_pool, watch)
    assert read_rows(tmp_path / "out") == expected_rows(topics)
    assert made[0]._pumps[0] == 2
    assert result.metrics is not None
    assert result.metrics["hedges"] == len(result.metrics["loans"]) >= 2
    assert {loan["state"] for loan in result.metrics["loans"]} == {"used"}
    said = [line for line in watch.lines if line.startswith("no shard waits")]
    assert len(said) == 1
    assert "part-0000" in said[0]
    # What worker 0 generated and did not commit was made again.
    assert result.metrics["discarded_tokens"] > 0
    generated = result.metrics["engine"]["completion_tokens"]
    assert generated - result.metrics["discarded_tokens"] == 48 * 5
    assert list((tmp_path / "out/_job/shares").iterdir()) == []


@pytest.mark.usefixtures("sharing")
@pytest.mark.parametrize("size", [2, 4])
def test_the_last_shard_is_made_by_all_workers(tmp_path: Path, size: int) -> None:
    """As many shards as workers, of which worker 0's has 48 rows and the others' are done soon.

    All workers are equally fast; a shard alone would take its worker 48 x 2 x 2 / 4 steps.
    """
    topics = [*(f"topic {n}" for n in range(48)), *[LONG] * 48 * (size - 1)]
    path = write_job(tmp_path, topics, output={"rows_per_shard": 48}, limits={"max_error_rate": 1})
    job = load_job(path)
    made: list[InProcessPool] = []

    def make_pool(started: float) -> InProcessPool:
        made.append(InProcessPool(job.pipeline, job, started, size=size))
        return made[0]

    result = run_job(job, make_pool, Watch())
    assert read_rows(tmp_path / "out") == expected_rows(topics[:48])
    alone = 48 * 2 * 2 * 2 / 4
    assert made[0]._pumps[0] < alone / size * 1.5 + 8
    assert result.metrics is not None
    assert size - 1 <= result.metrics["hedges"] < 4 * size
    generated = result.metrics["engine"]["completion_tokens"]
    assert generated - result.metrics["discarded_tokens"] == 96 * 5
    assert result.metrics["discarded_tokens"] < 0.3 * generated


@pytest.mark.usefixtures("sharing")
@pytest.mark.parametrize("every", [2, 3, 5, 9, 30])
def test_however_slow_a_worker_is_the_rows_and_the_numbers_are_right(
    tmp_path: Path, every: int
) -> None:
    topics = [LONG if n in (3, 15) else f"topic {'x' * (n % 7)}" for n in range(24)]
    path = write_job(tmp_path, topics, output={"rows_per_shard": 12}, limits={"max_error_rate": 1})
    job = load_job(path)
    watch = Watch()
    result = run_job(job, lambda started: SlowFirst(job, started, every=every, size=2), watch)
    good = [row for row in expected_rows(topics) if row["id"] not in ("row3", "row15")]
    assert read_rows(tmp_path / "out") == good
    assert [e["id"] for e in read_errors(tmp_path / "out")] == ["row3"] * 2 + ["row15"] * 2
    assert verify(str(tmp_path / "out")).ok
    assert result.metrics is not None
    assert result.metrics["hedges"] > 0
    generated = result.metrics["engine"]["completion_tokens"]
    assert generated - result.metrics["discarded_tokens"] == 44 * 5
    completed = [snapshot.completed for snapshot in watch.snapshots]
    assert completed[-1] == 48


def test_a_store_that_fails_stops_the_job_and_says_how_to_go_on(tmp_path: Path) -> None:
    """The disk is full before the records are written; what was committed stays and is adopted."""

    class Full(LocalStore):
        def _create(self, key: str, data: bytes) -> None:
            if key.startswith("_job/commits"):
                raise OSError(28, "No space left on device")
            super()._create(key, data)

    job = load_job(write_job(tmp_path, TOPICS))
    store = Full(str(tmp_path / "out"), QUICK, lambda seconds: None)
    with pytest.raises(
        StoreError, match=r"No space left(.|\n)*run the same command again"
    ) as caught:
        run_in_process(job, store=store)
    assert caught.value.exit_code == 4
    bury(tmp_path / "out")
    watch = Watch()
    run_in_process(job, watch)
    assert any("checked and adopted" in line for line in watch.lines)
    assert read_rows(tmp_path / "out") == expected_rows(TOPICS)
