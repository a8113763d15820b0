"""What all manifests share: how a tick is run by the scheduler that the user already has."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from eagle_batch.errors import ConfigError, ExitCode
from eagle_batch.pipeline import Pipeline
from eagle_batch.schedule.cron import next_ticks
from eagle_batch.schedule.jobfile import ScheduledJob, pipeline_for

#: Days of the week as cron counts them.
DAYS = ("Sun", "Mon", "Tue", "Wed", "Thu", "Fri", "Sat")
#: A cluster's file system, as the image of jobs/README.md has it.
HOME_IN_IMAGE = "/home/ray"


@dataclass(frozen=True)
class Place:
    """Where a scheduler finds things; paths are those of the machine or image that runs the job."""

    #: The command, `eagle-batch` as a rule.
    command: str = "eagle-batch"
    #: The job file there.
    job_file: str = ""
    #: Working directory, to which a relative output.path belongs.
    folder: str = ""
    image: str = "registry.example/eagle-batch:latest"
    service_account: str = "eagle-batch"


@dataclass(frozen=True)
class Fields:
    """A cron expression as sorted numbers; None where all are meant."""

    minutes: tuple[int, ...] | None
    hours: tuple[int, ...] | None
    days: tuple[int, ...] | None
    months: tuple[int, ...] | None
    weekdays: tuple[int, ...] | None
    #: Whether a day must fit both day fields, rather than one of them.
    both_days: bool


def run_command(place: Place, *options: str) -> str:
    """Return the shell command that runs one tick."""
    return " ".join([place.command, "jobs", "run", shlex.quote(place.job_file), *options])


def accepting_quarantine(command: str) -> str:
    """Return a shell line that fails where a command fails: quarantined rows are no failure."""
    return f"{command}; code=$?; [ $code -eq {int(ExitCode.QUARANTINED)} ] || exit $code"


def plain_fields(job: ScheduledJob, scheduler: str) -> Fields:
    """Return the schedule as numbers; raises ConfigError for what only some schedulers know."""
    parsed = job.schedule.parsed
    weekdays = [day for day in parsed.weekdays if isinstance(day, int)]
    if min(parsed.days) < 0 or len(weekdays) < len(parsed.weekdays):
        raise ConfigError(
            f"{job.path}: schedule.cron: found {job.schedule.cron!r}, and {scheduler} knows "
            "neither L nor #; use `eagle-batch jobs daemon` or name the days"
        )
    return Fields(
        _some(parsed.minutes, 60),
        _some(parsed.hours, 24),
        _some(parsed.days, 31),
        _some(parsed.months, 12),
        _some({day % 7 for day in weekdays}, 7),
        both_days=parsed.day_and,
    )


def portable_cron(job: ScheduledJob, scheduler: str) -> str:
    """Return the expression as numbers, which all cron parsers read alike.

    Raises ConfigError where they do not: L, #, and two day fields of which one begins with `*`.
    """
    fields = plain_fields(job, scheduler)
    if fields.days and fields.weekdays and fields.both_days:
        raise ConfigError(
            f"{job.path}: schedule.cron: found {job.schedule.cron!r}, where a day must fit the "
            f"day of the month and the day of the week; {scheduler} takes either; use "
            "`eagle-batch jobs daemon` or `--to systemd`"
        )
    columns = (fields.minutes, fields.hours, fields.days, fields.months, fields.weekdays)
    return " ".join("*" if c is None else _steps(c) for c in columns)


def _steps(numbers: tuple[int, ...]) -> str:
    """Write numbers as a list, or as `*/n` where they are the multiples within an hour."""
    step = numbers[1] - numbers[0] if len(numbers) > 1 else 0
    every = tuple(range(0, 60, step)) if step > 1 and 60 % step == 0 else ()
    return f"*/{step}" if numbers == every else ",".join(map(str, numbers))


def _some(numbers: set[int], all_of_them: int) -> tuple[int, ...] | None:
    return None if len(numbers) == all_of_them else tuple(sorted(numbers))


def time_to_catch_up(job: ScheduledJob, now: datetime | None = None) -> int:
    """Return for how many seconds a missed tick may start late: until the next one, at most a day.

    Two minutes where the job makes up nothing.
    """
    if not job.file.catch_up:
        return 120
    first, second = next_ticks(job.schedule, now or datetime.now(UTC), 2)
    return int(max(timedelta(minutes=2), min(timedelta(days=1), second - first)).total_seconds())


def first_pipeline(job: ScheduledJob) -> Pipeline:
    """Return the pipeline of the next tick; raises ConfigError as `pipeline_for` does."""
    return pipeline_for(job, next_ticks(job.schedule, datetime.now(UTC), 1)[0])
