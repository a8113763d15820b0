"""One tick of a job, run once however often it is asked for, by whomever and wherever."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime

from eagle_batch.errors import (
    ConfigError,
    DataError,
    EagleBatchError,
    ExitCode,
    InterruptedRunError,
    ModelError,
)
from eagle_batch.pipeline import Pipeline
from eagle_batch.schedule.cron import last_ticks, next_ticks, tick_name
from eagle_batch.schedule.jobfile import ScheduledJob, pipeline_for
from eagle_batch.schedule.records import Clock, Finished, Records


@dataclass(frozen=True, slots=True)
class Made:
    """What a pipeline that ran to its end made."""

    rows: int
    quarantined: int


#: Runs a pipeline to its end; raises EagleBatchError.
Execute = Callable[[Pipeline], Made]


@dataclass(frozen=True, slots=True)
class Outcome:
    """A tick that is done."""

    finished: Finished
    #: Whether it was done before this call.
    already: bool

    @property
    def exit_code(self) -> ExitCode:
        """What the command returns: a tick that was done before is no news."""
        news = self.finished.quarantined and not self.already
        return ExitCode.QUARANTINED if news else ExitCode.COMPLETE


@dataclass(frozen=True)
class Surroundings:
    """What a run needs of the world; tests bring their own."""

    execute: Execute
    say: Callable[[str], None]
    clock: Clock = time.time
    sleep: Callable[[float], None] = time.sleep


def records_of(job: ScheduledJob, clock: Clock = time.time) -> Records:
    """Open the records of a job."""
    return Records(job.root, job.name, clock)


def run_tick(job: ScheduledJob, tick: datetime, world: Surroundings) -> Outcome:
    """Run a tick unless it is done, trying again after a failure as the job says.

    Raises OutputBusyError while another call runs it, and what its last attempt failed with.
    """
    records = records_of(job, world.clock)
    done = records.finished(tick)
    if done is not None:
        return Outcome(done, already=True)
    with records.hold(tick, alone=job.file.overlap == "forbid"):
        # Another call may have finished it between the question and the lock.
        done = records.finished(tick)
        if done is not None:
            return Outcome(done, already=True)
        return Outcome(_attempts(job, tick, records, world), already=False)


def _attempts(job: ScheduledJob, tick: datetime, records: Records, world: Surroundings) -> Finished:
    left = job.file.retries
    while True:
        number = records.begin(tick)
        try:
            return _attempt(job, tick, number, records, world)
        except EagleBatchError as error:
            again = left > 0 and _may_pass(error)
            interrupted = error.exit_code is ExitCode.INTERRUPTED
            records.end(tick, number, error, given_up=not again and not interrupted)
            if not again:
                raise
            world.say(f"attempt {number} failed: {error}")
        except KeyboardInterrupt:
            interrupted_error = InterruptedRunError("interrupted")
            records.end(tick, number, interrupted_error, given_up=False)
            raise interrupted_error from None
        left -= 1
        world.say(f"trying again in {job.file.retry_seconds:g} s, {left} tries are left after it")
        world.sleep(job.file.retry_seconds)


def _attempt(
    job: ScheduledJob, tick: datetime, number: int, records: Records, world: Surroundings
) -> Finished:
    pipeline = pipeline_for(job, tick)
    records.claim_output(tick, pipeline.output.path)
    world.say(f"{job.name}: tick {tick_name(tick)}, attempt {number}, to {pipeline.output.path}")
    made = world.execute(pipeline)
    finished = Finished(
        tick=tick_name(tick),
        output=pipeline.output.path,
        rows=made.rows,
        quarantined=made.quarantined,
        ended=world.clock(),
        attempts=number,
    )
    records.finish(tick, finished)
    return finished


def _may_pass(error: EagleBatchError) -> bool:
    """Tell whether trying again can help: an input may be late, a store or a cluster sick."""
    wrong = isinstance(error, ConfigError | ModelError) and not isinstance(error, DataError)
    return not wrong and error.exit_code is not ExitCode.INTERRUPTED


def latest_tick(job: ScheduledJob, at: datetime) -> datetime:
    """Return the last tick up to an instant; raises ConfigError before the first one."""
    found = last_ticks(job.schedule, at, 1)
    if not found:
        raise ConfigError(f"{job.path}: schedule.cron: was never due up to {at.isoformat()}")
    return found[0]


def exact_tick(job: ScheduledJob, at: datetime) -> datetime:
    """Return the tick at an instant; raises ConfigError that names its neighbours."""
    before = last_ticks(job.schedule, at, 1)
    if before and before[0] == at:
        return at
    near = [*before, *next_ticks(job.schedule, at, 1)]
    names = " and ".join(tick.isoformat() for tick in near)
    raise ConfigError(
        f"--tick: found {at.isoformat()}, when {job.name} is not due; its neighbours are {names} "
        "(--at takes the last tick up to any instant)"
    )
