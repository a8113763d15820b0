"""When jobs are due: a table of changes of clocks, month ends and leap days."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle_batch.errors import ConfigError
from eagle_batch.schedule.cron import (
    Schedule,
    last_ticks,
    make_schedule,
    next_ticks,
    parse_instant,
    tick_name,
    ticks,
    warnings,
)

BERLIN = "Europe/Berlin"


def utc(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


def local(schedule: Schedule, after: str, before: str) -> list[str]:
    """The ticks between two UTC times, as local wall-clock times with their offset."""
    found = ticks(schedule, utc(after), utc(before))
    return [f"{tick.astimezone(schedule.zone):%m-%d %H:%M%z}" for tick in found]


@pytest.mark.parametrize(
    ("cron", "expected"),
    [
        ("30 2 * * *", ["03-27 02:30+0100", "03-28 03:00+0200", "03-29 02:30+0200"]),
        ("0 2 * * *", ["03-27 02:00+0100", "03-28 03:00+0200", "03-29 02:00+0200"]),
        ("0,30 2 28 * *", ["03-28 03:00+0200"]),
        ("30 1 28 * *", ["03-28 01:30+0100"]),
        ("0 3 28 * *", ["03-28 03:00+0200"]),
        ("0 0 28 * *", ["03-28 00:00+0100"]),
        ("0 * 28 3 *", [f"03-28 {h:02}:00+0{1 + (h > 2)}00" for h in range(24) if h != 2]),
    ],
)
def test_a_time_that_spring_skips_is_due_once_after_the_gap(cron: str, expected: list[str]) -> None:
    found = local(make_schedule(cron, BERLIN), "2027-03-27T00:00", "2027-03-29T12:00")
    assert found == expected


@pytest.mark.parametrize(
    ("cron", "expected"),
    [
        ("30 2 * * *", ["10-30 02:30+0200", "10-31 02:30+0200", "11-01 02:30+0100"]),
        ("0,30 2 31 * *", ["10-31 02:00+0200", "10-31 02:30+0200"]),
        ("0 3 31 * *", ["10-31 03:00+0100"]),
        (
            "0 * 31 10 *",
            [
                f"10-31 {h:02}:00+0{o}00"
                for h, o in [(0, 2), (1, 2), (2, 2), (2, 1), *((h, 1) for h in range(3, 24))]
            ],
        ),
        (
            "*/30 2 31 10 *",
            [f"10-31 02:{m}+0{o}00" for o in (2, 1) for m in ("00", "30")],
        ),
    ],
)
def test_of_an_hour_that_autumn_repeats_fixed_times_are_due_once_and_others_twice(
    cron: str, expected: list[str]
) -> None:
    found = local(make_schedule(cron, BERLIN), "2027-10-30T00:00", "2027-11-01T12:00")
    assert found == expected


@pytest.mark.parametrize(
    ("cron", "after", "expected"),
    [
        ("0 0 29 2 *", "2027-01-01T00:00", ["20280229", "20320229", "20360229"]),
        ("0 0 L * *", "2027-12-31T00:00", ["20280131", "20280229", "20280331"]),
        ("0 0 31 * *", "2027-01-01T00:00", ["20270131", "20270331", "20270531"]),
        ("0 0 LW * *", "2027-01-01T00:00", ["20270129", "20270226", "20270331"]),
        ("0 0 13 * 5", "2027-08-01T00:00", ["20270806", "20270813", "20270820"]),
        ("0 0 1-7 * */7", "2027-08-01T12:00", ["20270905", "20271003", "20271107"]),
        ("0 0 * * 7", "2027-08-02T00:00", ["20270808", "20270815", "20270822"]),
        ("@monthly", "2027-01-01T00:00", ["20270201", "20270301", "20270401"]),
        ("@YEARLY", "2027-01-01T00:00", ["20280101", "20290101", "20300101"]),
    ],
)
def test_month_ends_leap_days_and_weekdays(cron: str, after: str, expected: list[str]) -> None:
    found = next_ticks(make_schedule(cron), utc(after), 3)
    assert [f"{tick:%Y%m%d}" for tick in found] == expected


@pytest.mark.parametrize(
    ("zone", "day"),
    [
        ("Australia/Lord_Howe", "2027-10-03"),
        ("America/New_York", "2027-03-14"),
        ("Asia/Kolkata", "2027-01-01"),
    ],
)
def test_an_hourly_job_is_due_every_sixty_minutes_whatever_the_clocks_do(
    zone: str, day: str
) -> None:
    start = utc(f"{day}T00:00") - timedelta(days=1)
    found = list(ticks(make_schedule("*/30 * * * *", zone), start, start + timedelta(days=2)))
    assert {later - early for early, later in pairwise(found)} == {timedelta(minutes=30)}


def test_the_first_end_is_excluded_and_the_last_included() -> None:
    daily = make_schedule("0 0 * * *")
    found = list(ticks(daily, utc("2027-01-01T00:00"), utc("2027-01-03T00:00")))
    assert found == [utc("2027-01-02T00:00"), utc("2027-01-03T00:00")]
    assert list(ticks(daily, utc("2027-01-01T00:00"), utc("2027-01-01T00:00"))) == []


@settings(max_examples=60, deadline=None)
@given(
    cron=st.sampled_from(
        ["30 2 * * *", "15 1-3 * * *", "0 * * * *", "*/20 * * * *", "0,59 2,3 * * *", "0 4 * * 1"]
    ),
    start=st.sampled_from(["2027-03-27T20:00", "2027-10-30T20:00", "2027-07-01T00:00"]),
    cut=st.integers(0, 60 * 24 * 3),
)
def test_a_span_that_is_cut_anywhere_has_the_same_ticks(cron: str, start: str, cut: int) -> None:
    """A daemon that is killed at any minute, clocks changing or not, misses and repeats nothing."""
    schedule = make_schedule(cron, BERLIN)
    first, last = utc(start), utc(start) + timedelta(days=3)
    middle = first + timedelta(minutes=cut)
    parts = [*ticks(schedule, first, middle), *ticks(schedule, middle, last)]
    assert parts == list(ticks(schedule, first, last))


@pytest.mark.parametrize("count", [1, 2, 7, 400])
@pytest.mark.parametrize("cron", ["* * * * *", "30 2 * * *", "0 0 1 * *"])
def test_the_last_ticks_are_the_end_of_all_ticks(cron: str, count: int) -> None:
    schedule = make_schedule(cron, BERLIN)
    after, before = utc("2027-03-20T11:00"), utc("2027-03-29T11:17")
    assert (
        last_ticks(schedule, before, count, after) == list(ticks(schedule, after, before))[-count:]
    )


def test_the_last_leap_day_is_found_eight_years_back() -> None:
    assert last_ticks(make_schedule("0 0 29 2 *"), utc("2104-02-28T00:00"), 1) == [
        utc("2096-02-29T00:00")
    ]


@pytest.mark.parametrize(
    ("cron", "zone", "parts"),
    [
        ("0 30 4 * * *", BERLIN, ["with 6 fields; seconds are not offered", "expected five"]),
        ("30 4 * *", BERLIN, ["with 4 fields", "expected five"]),
        ("@dayly", BERLIN, ["did you mean '@daily'?"]),
        ("@reboot", BERLIN, ["expected one of @yearly"]),
        ("61 * * * *", BERLIN, ["bad minute"]),
        ("0 0 30 2 *", BERLIN, ["bad day-of-month"]),
        ("0 0 * * mo", BERLIN, ["bad day-of-week"]),
        ("0 0 * * *", "Europe/Berln", ["timezone: found 'Europe/Berln'", "'Europe/Berlin'?"]),
        ("0 0 * * *", "/etc/localtime", ["timezone: found '/etc/localtime'"]),
        ("x", "y", ["cron: found 'x'", "timezone: found 'y'"]),
    ],
)
def test_what_is_no_schedule_is_refused(cron: str, zone: str, parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        make_schedule(cron, zone)
    assert [part for part in parts if part not in str(caught.value)] == []


@pytest.mark.parametrize(
    ("cron", "zone", "warned"),
    [
        ("30 2 * * *", BERLIN, True),
        ("0 3 * * 1", BERLIN, True),
        ("0 1,12 * * *", "Europe/London", True),
        ("30 4 * * *", BERLIN, False),
        ("30 2 * * *", "Etc/UTC", False),
        ("30 2 * * *", "Asia/Tokyo", False),
        ("30 * * * *", BERLIN, False),
    ],
)
def test_hours_in_which_clocks_change_are_warned_of(cron: str, zone: str, warned: bool) -> None:
    found = warnings(make_schedule(cron, zone), utc("2027-01-01T00:00"))
    assert bool(found) == warned


@pytest.mark.parametrize(
    "text",
    ["2027-03-28T04:30:00+02:00", "20270328T023000Z", "2027-03-28T02:30Z", "@1806201000"],
)
def test_an_instant_is_read_in_any_of_its_forms(text: str) -> None:
    assert parse_instant(text, "--tick") == utc("2027-03-28T02:30")
    assert tick_name(parse_instant(text, "--tick")) == "20270328T023000Z"


@pytest.mark.parametrize("text", ["2027-03-28T04:30", "yesterday", "@", "@-1", "", "04:30"])
def test_a_time_without_an_offset_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--tick: found .*expected a time with its offset"):
        parse_instant(text, "--tick")
