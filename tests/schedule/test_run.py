"""One tick is one run: however often it is called, whatever dies in between."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from eagle_batch.errors import (
    ConfigError,
    DataError,
    EagleBatchError,
    ExitCode,
    InterruptedRunError,
    OutputBusyError,
    StoppedError,
)
from eagle_batch.pipeline import Pipeline
from eagle_batch.schedule.jobfile import ScheduledJob, load_job
from eagle_batch.schedule.records import CRASHES_ALLOWED, State
from eagle_batch.schedule.run import Made, exact_tick, latest_tick, records_of, run_tick
from tests.schedule.jobs import World, make_job, utc, write_file

TICK = utc("2027-03-01T04:30")
NEXT = utc("2027-03-02T04:30")


def state(job: ScheduledJob) -> State:
    return records_of(job).status(TICK).state


def test_a_thousand_calls_one_after_the_other_are_one_run(tmp_path: Path) -> None:
    job, world = make_job(tmp_path), World()
    outcomes = [run_tick(job, TICK, world.surroundings()) for _ in range(1000)]
    assert len(world.runs) == 1
    assert Counter(outcome.already for outcome in outcomes) == {False: 1, True: 999}
    assert {outcome.finished for outcome in outcomes} == {outcomes[0].finished}
    assert {outcome.exit_code for outcome in outcomes} == {ExitCode.COMPLETE}


def test_a_thousand_calls_at_once_are_one_run(tmp_path: Path) -> None:
    job = make_job(tmp_path)
    begun, release = threading.Event(), threading.Event()

    def slowly(pipeline: Pipeline) -> Made:
        begun.set()
        assert release.wait(60)
        return Made(2, 0)

    world = World(slowly)

    def call(number: int) -> str:
        if number == 900:  # by then many found it busy; the rest comes while it ends
            release.set()
        try:
            return "already" if run_tick(job, TICK, world.surroundings()).already else "ran"
        except OutputBusyError:
            return "busy"

    with ThreadPoolExecutor(16) as pool:
        counts = Counter(pool.map(call, range(1000)))
    assert len(world.runs) == 1
    assert counts["ran"] == 1
    assert counts["busy"] > 0
    assert sum(counts.values()) == 1000


def test_a_busy_tick_names_who_runs_it(tmp_path: Path) -> None:
    job, world = make_job(tmp_path), World()
    records = records_of(job, world.clock)
    with records.hold(TICK, alone=False):
        assert records.status(TICK).state is State.RUNNING
        with pytest.raises(OutputBusyError, match="tick 20270301T043000Z of job nightly is being"):
            run_tick(job, TICK, world.surroundings())


@pytest.mark.parametrize(("overlap", "starts"), [("forbid", False), ("allow", True)])
def test_a_tick_starts_beside_another_one_only_where_that_is_allowed(
    overlap: str, starts: bool, tmp_path: Path
) -> None:
    job, world = make_job(tmp_path, overlap=overlap), World()
    with records_of(job, world.clock).hold(TICK, alone=overlap == "forbid"):
        if starts:
            run_tick(job, NEXT, world.surroundings())
        else:
            with pytest.raises(OutputBusyError, match="a tick of job nightly is being run"):
                run_tick(job, NEXT, world.surroundings())
    assert len(world.runs) == starts


KILLED = """
import os, sys
from datetime import datetime
from eagle_batch.schedule.jobfile import ScheduledJob, load_job
from eagle_batch.schedule.run import Surroundings, run_tick
world = Surroundings(lambda pipeline: os._exit(137), print)
run_tick(load_job(sys.argv[1]), datetime.fromisoformat(sys.argv[2]), world)
"""


def test_a_tick_whose_process_was_killed_is_run_again_at_once(tmp_path: Path) -> None:
    path = write_file(tmp_path)
    job = load_job(path)
    command = [sys.executable, "-c", KILLED, str(path), TICK.isoformat()]
    killed = subprocess.run(command, check=False, capture_output=True, text=True)
    assert killed.returncode == 137, killed.stderr
    assert state(job) is State.STARTED
    assert records_of(job).begun() == [TICK]
    outcome = run_tick(job, TICK, World().surroundings())
    assert (outcome.already, outcome.finished.attempts) == (False, 2)
    assert records_of(job).begun() == []


RACER = """
import sys, time
from datetime import datetime
from pathlib import Path
from eagle_batch.errors import OutputBusyError
from eagle_batch.schedule.jobfile import load_job
from eagle_batch.schedule.run import Made, Surroundings, run_tick
folder = Path(sys.argv[1])
def execute(pipeline):
    with (folder / "runs").open("a") as file:
        file.write("run\\n")
    time.sleep(0.3)
    return Made(2, 0)
job = load_job(folder / "nightly.yaml")
print("ready", flush=True)
while not (folder / "go").exists():
    time.sleep(0.001)
for _ in range(50):
    try:
        run_tick(job, datetime.fromisoformat(sys.argv[2]), Surroundings(execute, print))
    except OutputBusyError:
        time.sleep(0.01)
"""


def test_processes_that_race_for_a_tick_run_it_once(tmp_path: Path) -> None:
    write_file(tmp_path)
    command = [sys.executable, "-c", RACER, str(tmp_path), TICK.isoformat()]
    racers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    for racer in racers:
        assert racer.stdout is not None
        assert racer.stdout.readline() == "ready\n"
    (tmp_path / "go").touch()
    for racer in racers:
        racer.communicate(timeout=120)
        assert racer.returncode == 0
    assert (tmp_path / "runs").read_text() == "run\n"


def test_records_in_an_object_store_mean_the_same(tmp_path: Path) -> None:
    root = f"memory://{tmp_path.name}"
    change = {"output.path": f"{root}/out-{{{{ run.date }}}}"}
    job, world = make_job(tmp_path, set=change), World(failing(InterruptedRunError("stopped")))
    with pytest.raises(InterruptedRunError):
        run_tick(job, TICK, world.surroundings())
    assert records_of(job).begun() == [TICK]
    assert run_tick(job, TICK, world.surroundings()).finished.attempts == 2
    assert run_tick(job, TICK, world.surroundings()).already
    assert records_of(job).begun() == []
    assert records_of(job, lambda: 5.0).since() == records_of(job).since()


def failing(*errors: EagleBatchError) -> Callable[[Pipeline], Made]:
    left = list(errors)

    def run(pipeline: Pipeline) -> Made:
        if left:
            raise left.pop(0)
        return Made(2, 1)

    return run


def test_a_failure_is_tried_again_as_often_as_the_job_says(tmp_path: Path) -> None:
    job = make_job(tmp_path, retries=2, retry_seconds=7.0)
    world = World(failing(StoppedError("no workers left"), DataError("input.path: not there yet")))
    outcome = run_tick(job, TICK, world.surroundings())
    assert (len(world.runs), world.slept, outcome.finished.attempts) == (3, [7.0, 7.0], 3)
    assert outcome.exit_code is ExitCode.QUARANTINED
    assert run_tick(job, TICK, world.surroundings()).exit_code is ExitCode.COMPLETE


def test_a_tick_that_fails_for_good_says_why_and_may_be_run_by_hand(tmp_path: Path) -> None:
    job = make_job(tmp_path, retries=1)
    world = World(failing(StoppedError("one"), StoppedError("two")))
    with pytest.raises(StoppedError, match="two"):
        run_tick(job, TICK, world.surroundings())
    status = records_of(job).status(TICK)
    assert (status.state, status.attempts, status.error) == (State.FAILED, 2, "two")
    assert run_tick(job, TICK, world.surroundings()).finished.attempts == 3


def test_what_cannot_get_better_is_not_tried_again(tmp_path: Path) -> None:
    world = World(failing(ConfigError("speculation.head: does not fit")))
    job = make_job(tmp_path)
    with pytest.raises(ConfigError, match="does not fit"):
        run_tick(job, TICK, world.surroundings())
    assert (world.slept, state(job)) == ([], State.FAILED)


def test_an_interrupted_tick_is_no_failure(tmp_path: Path) -> None:
    job = make_job(tmp_path, retries=0)
    world = World(failing(InterruptedRunError("stopped")))
    with pytest.raises(InterruptedRunError):
        run_tick(job, TICK, world.surroundings())
    assert state(job) is State.STARTED
    assert run_tick(job, TICK, world.surroundings()).finished.attempts == 2


def test_ctrl_c_and_sigterm_are_not_noted_as_a_death(tmp_path: Path) -> None:
    def interrupt(pipeline: Pipeline) -> Made:
        raise KeyboardInterrupt

    job, world = make_job(tmp_path), World(interrupt)
    for _ in range(CRASHES_ALLOWED + 2):
        with pytest.raises(InterruptedRunError):
            run_tick(job, TICK, world.surroundings())
    assert state(job) is State.STARTED


def test_a_tick_that_dies_again_and_again_is_given_up(tmp_path: Path) -> None:
    job = make_job(tmp_path)
    for _ in range(6):
        assert state(job) in {State.WAITING, State.STARTED}
        records_of(job).begin(TICK)
    assert records_of(job).status(TICK).error.startswith("6 attempts were killed")


def test_two_ticks_never_share_an_output(tmp_path: Path) -> None:
    """Found when it happens, for the pairs that the file's check does not look at."""
    job, world = make_job(tmp_path), World()
    run_tick(job, TICK, world.surroundings())
    records_of(job).claim_output(TICK, world.runs[0].output.path)
    with pytest.raises(ConfigError, match="holds the rows of the tick 20270301T043000Z"):
        records_of(job).claim_output(NEXT, world.runs[0].output.path)


def test_each_tick_has_its_own_output_and_record(tmp_path: Path) -> None:
    job, world = make_job(tmp_path), World()
    for tick in (TICK, NEXT):
        run_tick(job, tick, world.surroundings())
    assert [run.output.path for run in world.runs] == [
        f"{tmp_path}/out/2027-03-01",
        f"{tmp_path}/out/2027-03-02",
    ]
    place = tmp_path / "out" / "_schedule" / "nightly"
    assert sorted(path.parent.name for path in place.glob("*/finished.json")) == [
        "20270301T043000Z",
        "20270302T043000Z",
    ]


def test_a_tick_is_found_by_any_time_until_the_next_one(tmp_path: Path) -> None:
    job = make_job(tmp_path)
    assert latest_tick(job, utc("2027-03-02T04:29:59")) == TICK
    assert latest_tick(job, NEXT) == NEXT
    assert exact_tick(job, NEXT) == NEXT
    with pytest.raises(ConfigError, match=r"neighbours are 2027-03-01T04:30.*2027-03-02T04:30"):
        exact_tick(job, utc("2027-03-02T04:29"))
