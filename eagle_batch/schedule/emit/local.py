"""What the schedulers of one machine read: a crontab, or a systemd service and its timer."""

from __future__ import annotations

import shlex

from eagle_batch.errors import ExitCode
from eagle_batch.schedule.cron import warnings_lines
from eagle_batch.schedule.emit.command import (
    DAYS,
    Fields,
    Place,
    plain_fields,
    portable_cron,
    run_command,
)
from eagle_batch.schedule.jobfile import ScheduledJob


def crontab(job: ScheduledJob, place: Place) -> dict[str, str]:
    """Return lines for `crontab`; a tick that the machine slept through is not made up by cron."""
    command = f"cd {shlex.quote(place.folder)} && {run_command(place)}"
    notes = [
        "CRON_TZ is read by cronie; Debian's cron goes by the machine's own time zone",
        "cron makes up no tick; `--to systemd` does",
        *warnings_lines(job.schedule),
    ]
    lines = [f"# {note}" for note in notes]
    lines.append(f"CRON_TZ={job.schedule.timezone}")
    # A percent sign ends the command in a crontab.
    lines.append(f"{portable_cron(job, 'cron')} " + command.replace("%", "\\%"))
    return {f"{job.name}.crontab": "\n".join(lines) + "\n"}


def systemd(job: ScheduledJob, place: Place) -> dict[str, str]:
    """Return a oneshot service, which never overlaps itself, and the timer that starts it."""
    fields = plain_fields(job, "systemd")
    command = [*shlex.split(place.command), "jobs", "run", place.job_file]
    service = [
        "[Unit]",
        f"Description=eagle-batch job {job.name}",
        "",
        "[Service]",
        "Type=oneshot",
        f"WorkingDirectory={place.folder.replace('%', '%%')}",
        f"ExecStart={' '.join(map(_quoted, command))}",
        "# All rows are done and some are quarantined: no failure.",
        f"SuccessExitStatus={int(ExitCode.QUARANTINED)}",
        "# The driver alone is asked to end: it lets its workers finish their shards first.",
        "KillMode=mixed",
        "TimeoutStopSec=60",
    ]
    persistent = "true" if job.file.catch_up else "false"
    timer = [
        *(f"# {note}" for note in warnings_lines(job.schedule)),
        "[Unit]",
        f"Description=Schedule of eagle-batch job {job.name}",
        "",
        "[Timer]",
        *(f"OnCalendar={line}" for line in calendar(fields, job.schedule.timezone)),
        "# A tick that the machine slept through is made up once.",
        f"Persistent={persistent}",
        "AccuracySec=1s",
        "",
        "[Install]",
        "WantedBy=timers.target",
    ]
    name = f"eagle-batch-{job.name}"
    return {
        f"{name}.service": "\n".join(service) + "\n",
        f"{name}.timer": "\n".join(timer) + "\n",
    }


def calendar(fields: Fields, timezone: str) -> list[str]:
    """Return systemd's words for a schedule; two where either of two day fields is enough."""
    time = f"{_numbers(fields.hours)}:{_numbers(fields.minutes)}:00 {timezone}"
    if fields.days and fields.weekdays and not fields.both_days:
        return [
            f"{_date(fields, fields.days)} {time}",
            f"{_weekdays(fields.weekdays)}{_date(fields, None)} {time}",
        ]
    return [f"{_weekdays(fields.weekdays)}{_date(fields, fields.days)} {time}"]


def _date(fields: Fields, days: tuple[int, ...] | None) -> str:
    return f"*-{_numbers(fields.months)}-{_numbers(days)}"


def _weekdays(days: tuple[int, ...] | None) -> str:
    return "" if days is None else ",".join(DAYS[day] for day in days) + " "


def _numbers(numbers: tuple[int, ...] | None) -> str:
    return "*" if numbers is None else ",".join(f"{number:02d}" for number in numbers)


def _quoted(word: str) -> str:
    """Return a word of a command line as systemd reads it."""
    text = word.replace("%", "%%").replace("\\", "\\\\").replace('"', '\\"').replace("$", "$$")
    return f'"{text}"' if set(word) & set(" \t'\"\\;") else text
