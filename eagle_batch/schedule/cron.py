"""When a job is due: cron expressions in a time zone, as instants in UTC. Pure, without a clock.

The rules are those of Debian's cron: a fixed time that a change of clocks skips is due once, right
after the gap, and one that comes twice is due the first time; `*` hours and minutes follow the
instants themselves, so that an hourly job is due 23, 24 or 25 times a day.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from functools import cached_property
from itertools import islice, pairwise
from zoneinfo import ZoneInfo

from cronsim import CronSim, CronSimError

from eagle_batch.errors import ConfigError
from eagle_batch.pipeline.problems import suggestion

#: Names for expressions, which cron programs know and the parser does not.
NAMES = {
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
    "@monthly": "0 0 1 * *",
    "@weekly": "0 0 * * 0",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@hourly": "0 * * * *",
}
TICK_FORMAT = "%Y%m%dT%H%M%SZ"
#: The parser forgets which of two equal local times it starts from; earlier there is no doubt.
_RUN_UP = timedelta(hours=4)
#: Local hours in which the clocks of this world change.
_CHANGING_HOURS = (1, 2, 3)
_FIELDS = 5


@dataclass(frozen=True)
class Schedule:
    """A cron expression of five fields, in a time zone."""

    cron: str
    timezone: str = "Etc/UTC"

    @cached_property
    def zone(self) -> ZoneInfo:
        """The rules of the zone."""
        return ZoneInfo(self.timezone)

    @cached_property
    def parsed(self) -> CronSim:
        """The expression's fields as sets of numbers."""
        return CronSim(self.cron, datetime(2000, 1, 1, tzinfo=UTC))

    @property
    def at_fixed_hours(self) -> bool:
        """Whether hours and minutes are named, so that a change of clocks matters."""
        minute, hour, *_ = self.cron.split()
        return not minute.startswith("*") and not hour.startswith("*")


def make_schedule(cron: str, timezone: str = "Etc/UTC") -> Schedule:
    """Check an expression and a zone; raises ConfigError with the problems of both."""
    problems: list[str] = []
    expression = " ".join(cron.split())
    try:
        expression = _normal(expression)
        CronSim(expression, datetime(2000, 1, 1, tzinfo=UTC))
    except CronSimError as error:
        text = f"{str(error)[:1].lower()}{str(error)[1:]}"
        problems.append(
            f"cron: found {cron!r}, {text}; expected minute, hour, day of the month, month and "
            "day of the week, for example '30 4 * * *'"
        )
    except ConfigError as error:
        problems.extend(f"cron: {problem}" for problem in error.problems)
    try:
        ZoneInfo(timezone)
    except (KeyError, ValueError, OSError):
        problems.append(
            f"timezone: found {timezone!r}; {_similar_zone(timezone)}expected a name of the IANA "
            "list, such as Europe/Berlin or Etc/UTC"
        )
    if problems:
        raise ConfigError(problems)
    return Schedule(expression, timezone)


def _normal(expression: str) -> str:
    if expression.startswith("@"):
        known = NAMES.get(expression.lower())
        if known is None:
            hint = suggestion(expression.lower(), NAMES)
            raise ConfigError(f"found {expression!r}; {hint}expected one of {', '.join(NAMES)}")
        return known
    fields = len(expression.split())
    if fields != _FIELDS:
        seconds = "; seconds are not offered, since cron programs disagree about them"
        raise ConfigError(
            f"found {expression!r} with {fields} fields{seconds if fields > _FIELDS else ''}; "
            "expected five: minute, hour, day of the month, month and day of the week"
        )
    return expression


def _similar_zone(name: str) -> str:
    from zoneinfo import available_timezones

    return suggestion(name, sorted(available_timezones()))


def ticks(schedule: Schedule, after: datetime, before: datetime) -> Iterator[datetime]:
    """Yield the instants in UTC, later than `after` and not later than `before`, in order."""
    last = after
    for tick in _from(schedule, after):
        if tick > before:
            return
        if tick > last:
            last = tick
            yield tick


def next_ticks(schedule: Schedule, after: datetime, count: int) -> list[datetime]:
    """Return the next `count` instants after one; fewer where the expression has no more."""
    return list(islice(ticks(schedule, after, datetime.max.replace(tzinfo=UTC)), count))


def last_ticks(
    schedule: Schedule, before: datetime, count: int, after: datetime | None = None
) -> list[datetime]:
    """Return the last `count` instants up to `before`, in order; none at or before `after`."""
    floor = after or before - timedelta(days=366 * 9)  # the longest way between two leap days
    span = timedelta(hours=2)
    while True:
        start = max(floor, before - span)
        found = list(ticks(schedule, start, before))
        if len(found) >= count or start == floor:
            return found[max(0, len(found) - count) :]
        span *= 4


def _from(schedule: Schedule, after: datetime) -> Iterator[datetime]:
    start = (after - _RUN_UP).astimezone(schedule.zone)
    for tick in CronSim(schedule.cron, start):
        yield tick.astimezone(UTC)


def tick_name(tick: datetime) -> str:
    """Return how a tick is written in names: `20270328T003000Z`."""
    return tick.astimezone(UTC).strftime(TICK_FORMAT)


def parse_instant(text: str, what: str) -> datetime:
    """Read an instant: ISO 8601 with an offset, a tick's name, or `@` and Unix seconds.

    Raises ConfigError that begins with `what`.
    """
    try:
        if re.fullmatch(r"@\d{1,11}", text):
            return datetime.fromtimestamp(int(text[1:]), UTC)
        found: datetime | None = datetime.fromisoformat(text)
    except ValueError:
        found = None
    if found is None or found.tzinfo is None:
        raise ConfigError(
            f"{what}: found {text!r}; expected a time with its offset, such as "
            "2027-03-28T04:30:00+02:00 or 20270328T023000Z, or @ and Unix seconds"
        )
    return found.astimezone(UTC)


def clock_changes(schedule: Schedule, since: datetime, days: int = 366) -> list[date]:
    """Return the local days around which the zone's offset changes, within so many days."""
    starts = [(since + timedelta(days=n)).astimezone(schedule.zone) for n in range(days)]
    return [
        later.date() for early, later in pairwise(starts) if early.utcoffset() != later.utcoffset()
    ]


def warnings(schedule: Schedule, since: datetime) -> list[str]:
    """Return what a user should know about a schedule that is valid."""
    early = sorted(set(_CHANGING_HOURS) & {int(hour) for hour in schedule.parsed.hours})
    if not (schedule.at_fixed_hours and early and clock_changes(schedule, since)):
        return []
    text = (
        f"schedule.cron: {schedule.cron!r} is due between 01:00 and 03:59 in {schedule.timezone}, "
        "where a change of clocks skips or repeats times, and schedulers differ about what is due "
        "then; choose another hour or Etc/UTC"
    )
    return [text]


def warnings_lines(schedule: Schedule) -> list[str]:
    """Return the warnings for manifests, as of today."""
    return warnings(schedule, datetime.now(UTC))
