"""Jobs on real Ray actors, some of which die; the engine is fake, the processes are not."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import eagle_batch.job.job
from eagle_batch.errors import ConfigError, StoppedError
from eagle_batch.job import pool
from eagle_batch.job.driver import run_job
from eagle_batch.job.job import Job, JobResult
from eagle_batch.job.pool import RayPool
from eagle_batch.job.reports import Pumped, Started
from eagle_batch.job.resources import Resources, choose_resources
from eagle_batch.job.session import _refuse_without_room
from eagle_batch.job.spec import EngineFactory, WorkerSpec
from eagle_batch.job.verify import verify
from eagle_batch.pipeline import Workers
from tests.job.fake_engine import (
    HANG,
    KILL,
    LAST_WORDS,
    build_broken,
    build_fake,
    build_quick_to_die,
    build_refused,
    build_slow,
    build_slow_once,
)
from tests.job.fake_job import (
    Watch,
    expected_rows,
    load_job,
    read_errors,
    read_rows,
    write_job,
)

pytestmark = pytest.mark.slow

TOPICS = [f"topic {'x' * (n % 7)}" for n in range(24)]

#: Sees every event of the pool on its way to the driver.
Spy = Callable[["SpiedPool", Any], None]


class SpiedPool(RayPool):
    """A pool whose events a test sees, with the process of each worker."""

    def __init__(self, *arguments: Any, spy: Spy | None = None) -> None:
        super().__init__(*arguments)
        self.pids: dict[int, int] = {}
        self.spy = spy

    def poll(self, timeout: float) -> list[Any]:
        events = super().poll(timeout)
        for event in events:
            if isinstance(event, Started):
                self.pids[event.worker] = event.info.pid
            if self.spy is not None:
                self.spy(self, event)
        return events


def run(
    job: Job,
    resources: Resources,
    *,
    watch: Watch | None = None,
    spy: Spy | None = None,
    stall_s: float = 60.0,
    build: EngineFactory = build_fake,
) -> JobResult:
    def make_pool(started: float) -> RayPool:
        spec = WorkerSpec(job.pipeline, job.plan, started, "cpu", 1, build)
        return SpiedPool(spec, resources, stall_s, spy=spy)

    return run_job(job, make_pool, watch or Watch())


def assert_whole(output: Path, topics: list[str], without: str = "") -> None:
    rows = sorted(read_rows(output), key=lambda row: (int(row["id"][3:]), row["sample"]))
    assert rows == [row for row in expected_rows(topics) if row["id"] != without]
    report = verify(str(output))
    assert report.ok, report.findings


def test_two_actors_write_what_an_undisturbed_run_writes(
    tmp_path: Path, ray_resources: Resources
) -> None:
    job = load_job(write_job(tmp_path, TOPICS))
    pids: dict[int, int] = {}
    # Slow, so that the second one is there before the first has made everything.
    result = run(
        job, ray_resources, spy=lambda pool, event: pids.update(pool.pids), build=build_slow
    )
    assert_whole(tmp_path / "out", TOPICS)
    assert len(set(pids.values()) | {os.getpid()}) == 3, "each worker is a process of its own"
    assert result.metrics is not None
    assert result.metrics["engine"]["completion_tokens"] == 48 * 5
    assert all(worker["rows"] > 0 for worker in result.metrics["workers"])


def test_an_actor_process_that_is_killed_costs_no_row(
    tmp_path: Path, ray_resources: Resources, capfd: pytest.CaptureFixture[str]
) -> None:
    killed: list[int] = []

    def spy(pool: SpiedPool, event: Any) -> None:
        if isinstance(event, Pumped) and event.report.units and not killed:
            killed.append(pool.pids[event.worker])
            os.kill(killed[0], signal.SIGKILL)

    watch = Watch()
    run(
        load_job(write_job(tmp_path, TOPICS)), ray_resources, watch=watch, spy=spy, build=build_slow
    )
    assert_whole(tmp_path / "out", TOPICS)
    [lost] = [line for line in watch.lines if "was lost" in line]
    assert "died" in lost
    assert "raylet" not in "".join(capfd.readouterr())


def test_a_row_that_kills_its_process_is_found_and_quarantined(
    tmp_path: Path, ray_resources: Resources
) -> None:
    topics = [*TOPICS[:6], KILL, *TOPICS[7:]]
    path = write_job(tmp_path, topics, limits={"shard_attempts": 2})
    watch = Watch()
    result = run(load_job(path), ray_resources, watch=watch)
    assert (result.rows, result.quarantined) == (46, 2)
    lost = [line for line in watch.lines if "was lost" in line]
    assert all(f"the last lines of its log ({socket.gethostname()}, pid " in line for line in lost)
    assert all(line.endswith(LAST_WORDS) for line in lost)
    assert_whole(tmp_path / "out", topics, without="row6")
    errors = read_errors(tmp_path / "out")
    assert {(e["id"], e["reason"]) for e in errors} == {("row6", "worker_crash")}


def test_a_worker_that_hangs_is_killed_and_replaced(
    tmp_path: Path, ray_resources: Resources
) -> None:
    topics = [*TOPICS[:3], HANG]
    path = write_job(
        tmp_path, topics, output={"rows_per_shard": 1}, limits={"shard_attempts": 1}, samples=1
    )
    pids: dict[int, int] = {}
    watch = Watch()
    job = load_job(path, "limits.max_error_rate=1.0")
    run(job, ray_resources, watch=watch, stall_s=4.0, spy=lambda pool, _: pids.update(pool.pids))
    assert [e["id"] for e in read_errors(tmp_path / "out")] == ["row3"]
    assert any("no answer within limits.stall_seconds (4 s)" in line for line in watch.lines)
    wait_until_dead(list(pids.values()))


def test_an_actor_that_is_stopped_and_wakes_again_leaves_one_copy_of_every_row(
    tmp_path: Path, ray_resources: Resources
) -> None:
    """SIGSTOP looks like a host that is cut off; SIGCONT like the network coming back."""
    stopped: list[int] = []

    def spy(pool: SpiedPool, event: Any) -> None:
        if isinstance(event, Pumped) and event.report.units and not stopped:
            stopped.append(pool.pids[event.worker])
            os.kill(stopped[0], signal.SIGSTOP)

    watch = Watch()
    job = load_job(write_job(tmp_path, TOPICS))
    run(job, ray_resources, watch=watch, spy=spy, stall_s=4.0, build=build_slow)
    with contextlib.suppress(ProcessLookupError):
        os.kill(stopped[0], signal.SIGCONT)
    wait_until_dead(stopped)
    assert any("no answer within limits.stall_seconds (4 s)" in line for line in watch.lines)
    assert_whole(tmp_path / "out", TOPICS)


def wait_until_dead(pids: list[int]) -> None:
    from eagle_batch.job.lock import process_start

    end = time.monotonic() + 20
    while any(process_start(pid) is not None for pid in pids):
        assert time.monotonic() < end, f"still alive: {pids}"
        time.sleep(0.1)


def test_no_actor_outlives_its_job(tmp_path: Path, ray_resources: Resources) -> None:
    pids: dict[int, int] = {}
    job = load_job(write_job(tmp_path, TOPICS[:4]))
    run(job, ray_resources, spy=lambda pool, event: pids.update(pool.pids))
    wait_until_dead(list(pids.values()))


def test_an_engine_that_cannot_start_ends_the_job_with_the_worker_s_own_traceback(
    tmp_path: Path, ray_resources: Resources
) -> None:
    job = load_job(write_job(tmp_path, TOPICS))
    with pytest.raises(StoppedError, match="no kernel image is available") as caught:
        run(job, ray_resources, build=build_broken)
    assert "in build_broken" in str(caught.value)


def test_an_error_that_the_user_must_mend_crosses_the_process_as_it_is(
    tmp_path: Path, ray_resources: Resources
) -> None:
    job = load_job(write_job(tmp_path, TOPICS))
    with pytest.raises(ConfigError, match=r"speculation\.head: does not fit"):
        run(job, ray_resources, build=build_refused)


def test_a_process_that_dies_while_it_starts_ends_the_job_after_three_tries(
    tmp_path: Path, ray_resources: Resources
) -> None:
    job = load_job(write_job(tmp_path, TOPICS))
    watch = Watch()
    with pytest.raises(StoppedError, match="3 workers in a row failed to start"):
        run(job, replace(ray_resources, count=1), watch=watch, build=build_quick_to_die)
    assert sum("failed to start" in line for line in watch.lines) == 3


def test_a_cluster_without_room_is_waited_for_and_then_named(
    tmp_path: Path, ray_resources: Resources, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "NODES_S", 0.2)
    monkeypatch.setattr(pool, "TELL_S", 0.5)
    job = load_job(write_job(tmp_path, TOPICS, workers={"gpus": 1, "wait_seconds": 3.0}))
    watch = Watch()
    with pytest.raises(StoppedError, match="1 workers have waited for room for 3 s: each asks for"):
        run(job, replace(ray_resources, count=1, gpus=1.0), watch=watch)
    [early, _] = watch.lines
    assert early.startswith("1 workers have waited for room for 1 s: each asks for 1 CPU, 1 GPU;")
    assert "the cluster has 1 x (" in early


def test_this_machine_is_not_waited_for(ray_resources: Resources) -> None:
    wanted = Workers(count=1, gpus=8)
    asked = choose_resources(wanted, 1, [])
    with pytest.raises(ConfigError, match="this machine has no room for 1 of them; each asks for"):
        _refuse_without_room(asked, wanted)


def test_workers_of_unlike_speed_get_as_many_shards_as_they_make(
    tmp_path: Path, ray_resources: Resources, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each worker has an engine, hence costs and drafts, of its own; shards go to who is ready."""
    topics = [f"topic {n}" for n in range(40)]
    job = load_job(write_job(tmp_path, topics, output={"rows_per_shard": 2}))
    result = run(job, ray_resources, build=partial(build_slow_once, str(tmp_path / "slow")))
    assert_whole(tmp_path / "out", topics)
    assert result.metrics is not None
    slow, fast = sorted(worker["rows"] for worker in result.metrics["workers"])
    assert fast > 2 * slow > 0


def test_a_worker_without_work_makes_rows_of_a_slow_worker_s_shard(
    tmp_path: Path, ray_resources: Resources, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two shards and two workers, of which one is ten times as slow."""
    monkeypatch.setattr(eagle_batch.job.job, "SHARE_S", 0.2)
    topics = [f"topic {n}" for n in range(32)]
    job = load_job(write_job(tmp_path, topics, output={"rows_per_shard": 16}))
    result = run(job, ray_resources, build=partial(build_slow_once, str(tmp_path / "slow")))
    assert_whole(tmp_path / "out", topics)
    assert result.metrics is not None
    assert "used" in {loan["state"] for loan in result.metrics["loans"]}
    assert list((tmp_path / "out/_job/shares").iterdir()) == []
    slow, fast = sorted(worker["rows"] for worker in result.metrics["workers"])
    assert fast > 2 * slow > 0
