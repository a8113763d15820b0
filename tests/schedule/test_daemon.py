"""The small scheduler: what it starts, when, and that a kill changes nothing."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from eagle_batch.errors import StoppedError
from eagle_batch.pipeline import Pipeline
from eagle_batch.schedule.cron import tick_name
from eagle_batch.schedule.daemon import Daemon, due
from eagle_batch.schedule.jobfile import ScheduledJob
from eagle_batch.schedule.records import State
from eagle_batch.schedule.run import Made, records_of, run_tick
from tests.schedule.jobs import World, make_job, utc, write_file

W, S = State.WAITING, State.STARTED
ONE, TWO, THREE = (utc(f"2027-03-0{day}T04:30") for day in (1, 2, 3))


@pytest.mark.parametrize(
    ("fields", "late_s", "candidates", "running", "expected"),
    [
        ({}, 0, [(ONE, W)], 0, [ONE]),
        ({}, 0, [(ONE, W)], 1, []),
        ({}, 0, [(ONE, W), (TWO, W)], 0, [ONE]),
        ({}, 0, [(ONE, S), (TWO, W)], 0, [ONE]),
        ({}, 9000, [(TWO, W)], 0, [TWO]),
        ({"overlap": "allow"}, 0, [(ONE, S), (TWO, W)], 3, [ONE, TWO]),
        ({"catch_up": 0}, 60, [(TWO, W)], 0, [TWO]),
        ({"catch_up": 0}, 120, [(TWO, W)], 0, []),
        ({"catch_up": 0}, 120, [(ONE, S), (TWO, W)], 0, [ONE]),
        ({}, 0, [], 0, []),
    ],
)
def test_what_is_due(
    fields: dict,
    late_s: float,
    candidates: Sequence,
    running: int,
    expected: list[datetime],
    tmp_path: Path,
) -> None:
    now = TWO + timedelta(seconds=late_s)
    assert due(make_job(tmp_path, **fields), now, candidates, running=running) == expected


class Run:
    """A run that takes its time; it is a real one in the records."""

    def __init__(self, job: ScheduledJob, tick: datetime, world: World, ends: float) -> None:
        self.job, self.tick, self.world, self.ends = job, tick, world, ends
        self.asked_to_end = False

    def poll(self) -> int | None:
        if self.world.now < self.ends:
            return None
        try:
            return int(run_tick(self.job, self.tick, self.world.surroundings()).exit_code)
        except StoppedError as error:
            return int(error.exit_code)

    def terminate(self) -> None:
        self.asked_to_end = True
        self.ends = self.world.now


class KilledRun(Run):
    """A run that is killed in the end, once it has begun."""

    def poll(self) -> int | None:
        if self.world.now < self.ends:
            return None
        records_of(self.job, self.world.clock).begin(self.tick)
        return -9


class Simulation:
    """A daemon in a world whose clock the test moves."""

    def __init__(self, job: ScheduledJob, start: datetime, lasts_s: float = 600) -> None:
        self.world = World(now=start.timestamp())
        self.job = job
        self.lasts_s = lasts_s
        self.started: list[str] = []
        self.most_at_once = 0
        self.kind: type[Run] = Run
        self.alive: list[Run] = []
        self.daemon = self.boot()

    def boot(self) -> Daemon:
        """A new daemon, which knows nothing of the one before."""
        self.alive = []
        return Daemon([self.job], self._start, self.world.lines.append, self.world.clock)

    def _start(self, job: ScheduledJob, tick: datetime) -> Run:
        self.started.append(tick_name(tick))
        run = self.kind(job, tick, self.world, self.world.now + self.lasts_s)
        self.alive = [*(r for r in self.alive if r.ends > self.world.now), run]
        self.most_at_once = max(self.most_at_once, len(self.alive))
        return run

    def until(self, end: datetime, step_s: float = 60) -> None:
        while self.world.now < end.timestamp():
            self.daemon.round()
            self.world.now += step_s

    @property
    def made(self) -> list[str]:
        return [run.output.path.rpartition("/")[2] for run in self.world.runs]


def test_each_tick_runs_once_and_on_time(tmp_path: Path) -> None:
    simulation = Simulation(make_job(tmp_path), utc("2027-03-01T00:00"))
    simulation.until(utc("2027-03-04T12:00"), 80)
    assert simulation.made == ["2027-03-01", "2027-03-02", "2027-03-03", "2027-03-04"]
    assert not any("after its time" in line for line in simulation.world.lines)


@pytest.mark.parametrize(
    ("start", "end", "expected"),
    [
        ("2027-03-27T12:00", "2027-03-29T12:00", ["20270328T010000Z", "20270329T003000Z"]),
        ("2027-10-30T12:00", "2027-11-01T12:00", ["20271031T003000Z", "20271101T013000Z"]),
    ],
)
def test_a_night_in_which_the_clocks_change_has_one_run(
    start: str, end: str, expected: list[str], tmp_path: Path
) -> None:
    job = make_job(tmp_path, schedule={"cron": "30 2 * * *", "timezone": "Europe/Berlin"})
    simulation = Simulation(job, utc(start), lasts_s=60)
    simulation.until(utc(end), 120)
    assert simulation.started == expected


def test_a_job_that_is_new_does_not_make_up_its_past(tmp_path: Path) -> None:
    simulation = Simulation(make_job(tmp_path, catch_up=5), utc("2027-03-01T12:00"))
    simulation.until(utc("2027-03-01T13:00"))
    assert simulation.started == []


@pytest.mark.parametrize(
    ("catch_up", "expected"),
    [
        (0, ["01", "06"]),
        (1, ["01", "05", "06"]),
        (3, ["01", "03", "04", "05", "06"]),
        (100, ["01", "02", "03", "04", "05", "06"]),
    ],
)
def test_missed_ticks_are_made_up_as_the_job_says(
    catch_up: int, expected: list[str], tmp_path: Path
) -> None:
    simulation = Simulation(make_job(tmp_path, catch_up=catch_up), utc("2027-03-01T00:00"))
    simulation.until(utc("2027-03-01T12:00"), 80)
    simulation.world.now = utc("2027-03-05T12:00").timestamp()
    simulation.daemon = simulation.boot()
    simulation.until(utc("2027-03-06T12:00"), 300)
    assert simulation.made == [f"2027-03-{day}" for day in expected]
    assert simulation.most_at_once == 1


def test_a_long_run_is_never_overtaken(tmp_path: Path) -> None:
    job = make_job(
        tmp_path,
        schedule={"cron": "*/10 * * * *"},
        set={"output.path": f"{tmp_path}/o/{{{{ run.utc }}}}"},
        catch_up=2,
    )
    simulation = Simulation(job, utc("2027-03-01T00:00"), lasts_s=25 * 60)
    simulation.until(utc("2027-03-01T03:00"))
    assert simulation.most_at_once == 1
    assert simulation.started == sorted(set(simulation.started))
    assert len(simulation.started) == 7  # one every 25 minutes


def test_where_overlap_is_allowed_every_tick_starts_on_time(tmp_path: Path) -> None:
    job = make_job(
        tmp_path,
        overlap="allow",
        schedule={"cron": "*/10 * * * *"},
        set={"output.path": f"{tmp_path}/o/{{{{ run.utc }}}}"},
    )
    simulation = Simulation(job, utc("2027-03-01T00:00"), lasts_s=25 * 60)
    simulation.until(utc("2027-03-01T02:05"))
    assert len(simulation.started) == 12
    assert simulation.most_at_once == 3


@pytest.mark.parametrize("killed_after_s", [0, 580, 620, 880, 940, 1200])
def test_a_daemon_that_is_killed_at_any_moment_loses_and_repeats_nothing(
    killed_after_s: int, tmp_path: Path
) -> None:
    """Its runs die with it here, which is the harder case."""
    simulation = Simulation(make_job(tmp_path), utc("2027-03-01T04:20"), lasts_s=300)
    simulation.until(utc("2027-03-01T04:20") + timedelta(seconds=killed_after_s), 20)
    records = records_of(simulation.job, simulation.world.clock)
    if simulation.alive and not simulation.made:
        records.begin(utc("2027-03-01T04:30"))  # what the run that died with it had written
    simulation.daemon = simulation.boot()
    simulation.until(utc("2027-03-02T12:00"))
    assert simulation.made == ["2027-03-01", "2027-03-02"]


def test_a_tick_that_was_begun_is_finished_however_old_it_is(tmp_path: Path) -> None:
    simulation = Simulation(make_job(tmp_path), utc("2027-03-01T04:00"))
    records_of(simulation.job, simulation.world.clock).begin(ONE)
    simulation.world.now = utc("2027-03-03T12:00").timestamp()
    simulation.daemon = simulation.boot()
    simulation.until(utc("2027-03-03T13:00"))
    assert simulation.made == ["2027-03-01", "2027-03-03"]


def test_a_long_run_that_dies_is_resumed_though_later_ticks_are_due(tmp_path: Path) -> None:
    job = make_job(
        tmp_path,
        schedule={"cron": "0 * * * *"},
        set={"output.path": f"{tmp_path}/o/{{{{ run.utc }}}}"},
    )
    simulation = Simulation(job, utc("2027-03-01T00:30"), lasts_s=150 * 60)
    simulation.kind = KilledRun
    simulation.until(utc("2027-03-01T03:00"))
    simulation.kind = Run
    simulation.lasts_s = 60
    simulation.until(utc("2027-03-01T05:30"))
    hours = ("01", "03", "04", "05")
    assert simulation.started == [f"20270301T{hour}0000Z" for hour in ("01", *hours)]
    assert simulation.made == [f"20270301T{hour}0000Z" for hour in hours]


def test_a_run_that_outlived_its_daemon_is_waited_for(tmp_path: Path) -> None:
    simulation = Simulation(make_job(tmp_path), utc("2027-03-01T04:00"))
    simulation.world.now = utc("2027-03-02T04:29:30").timestamp()
    records = records_of(simulation.job, simulation.world.clock)
    with records.hold(ONE, alone=True):
        simulation.daemon = simulation.boot()
        simulation.until(utc("2027-03-02T04:31"), 20)
        assert simulation.started == []
    simulation.until(utc("2027-03-02T05:00"), 20)
    assert simulation.started == ["20270302T043000Z"]


def test_a_tick_that_failed_is_left_alone_and_the_next_one_runs(tmp_path: Path) -> None:
    def fail_first(pipeline: Pipeline) -> Made:
        if pipeline.output.path.endswith("03-01"):
            raise StoppedError("no workers left")
        return Made(2, 0)

    job = make_job(tmp_path, retries=0)
    simulation = Simulation(job, utc("2027-03-01T00:00"), lasts_s=60)
    simulation.world.execute = fail_first
    simulation.until(utc("2027-03-02T12:00"))
    assert simulation.made == ["2027-03-01", "2027-03-02"]
    assert "nightly: tick 20270301T043000Z ended with code 4" in simulation.world.lines


def test_it_sleeps_until_the_next_tick_but_never_long(tmp_path: Path) -> None:
    simulation = Simulation(make_job(tmp_path), utc("2027-03-01T04:29:48"))
    assert simulation.daemon.round() == pytest.approx(12)
    simulation.world.now = utc("2027-03-01T03:00").timestamp()
    assert simulation.daemon.round() == 30


def test_asked_to_end_it_asks_its_runs_to_end(tmp_path: Path) -> None:
    simulation = Simulation(make_job(tmp_path), ONE - timedelta(seconds=30))
    simulation.world.now = ONE.timestamp()
    simulation.daemon.round()
    assert simulation.daemon.busy
    simulation.daemon.stop()
    simulation.daemon.wait(lambda seconds: None)
    assert [run.asked_to_end for run in simulation.alive] == [True]
    assert not simulation.daemon.busy


def test_the_real_daemon_ends_by_a_signal(tmp_path: Path) -> None:
    """With real processes and the real clock; the job is due next year."""
    path = write_file(tmp_path, schedule={"cron": "0 0 1 1 *"})
    command = [sys.executable, "-u", "-m", "eagle_batch", "jobs", "daemon", str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "looking after nightly\n"
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(30) == 0
    since = records_of(make_job(tmp_path, schedule={"cron": "0 0 1 1 *"})).since()
    assert abs((datetime.now(UTC) - since).total_seconds()) < 60


def test_a_real_run_is_started_and_its_end_is_told(tmp_path: Path) -> None:
    """The run is a process of its own; it fails at once, since its input is gone."""
    job = make_job(tmp_path, retries=0)
    (tmp_path / "pipeline" / "in.parquet").unlink()
    records_of(job, utc("2026-01-01T00:00").timestamp).since()
    command = [sys.executable, "-m", "eagle_batch", "jobs", "daemon", str(job.path), "--once"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert re.search(r"nightly: tick \S+ starts, \d+ s after its time\n", done.stdout)
    assert re.search(r"nightly: tick \S+ ended with code 2\n", done.stdout)
    assert "in.parquet" in done.stderr
