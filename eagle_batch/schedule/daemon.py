"""A small scheduler for those who have none: starts due ticks as processes of their own.

It keeps no state: what is due follows from the job files and the records beside the outputs, so
that it may be killed at any time. Runs outlive it; the next daemon sees them in the records.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from types import FrameType
from typing import Protocol

from eagle_batch.errors import StoreError
from eagle_batch.job.interrupts import SIGNALS
from eagle_batch.schedule.cron import last_ticks, next_ticks, tick_name
from eagle_batch.schedule.jobfile import ScheduledJob
from eagle_batch.schedule.records import Clock, Records, State
from eagle_batch.schedule.run import records_of

#: A tick that is not begun this long after its time was missed.
ON_TIME = timedelta(seconds=90)
#: Longest and shortest sleep: crashed runs are found, and children reaped, in between.
LONGEST_S = 30.0
SHORTEST_S = 1.0

_OPEN = (State.WAITING, State.STARTED)


class Child(Protocol):
    """A run that was started."""

    def poll(self) -> int | None:
        """Return its exit code, None while it runs."""

    def terminate(self) -> None:
        """Ask it to commit what it can and end."""


Start = Callable[[ScheduledJob, datetime], Child]


def due(
    job: ScheduledJob,
    now: datetime,
    candidates: Sequence[tuple[datetime, State]],
    *,
    running: int,
) -> list[datetime]:
    """Return the ticks to start now, oldest first; pure.

    `candidates` are the ticks that the job still cares about, in order; `running` tells how many
    of its runs are at work.
    """
    wanted = [
        tick
        for tick, state in candidates
        if state is State.STARTED
        or (state is State.WAITING and (job.file.catch_up > 0 or now - tick <= ON_TIME))
    ]
    if job.file.overlap == "allow":
        return wanted
    return [] if running else wanted[:1]


@dataclass
class _Watched:
    """One job as the daemon sees it."""

    job: ScheduledJob
    records: Records
    since: datetime
    #: Ticks that were begun, by whomever, and are not done: finished however old they get.
    begun: set[datetime]
    children: dict[datetime, Child] = field(default_factory=dict)
    #: Ticks that need no more looking after.
    settled: set[datetime] = field(default_factory=set)


class Daemon:
    """Looks after some jobs, one round at a time."""

    def __init__(
        self, jobs: Sequence[ScheduledJob], start: Start, say: Callable[[str], None], clock: Clock
    ) -> None:
        """Read what the records say; a job that is seen for the first time starts with now."""
        self._start = start
        self._say = say
        self._clock = clock
        self._watched = [self._watch(job) for job in jobs]

    def _watch(self, job: ScheduledJob) -> _Watched:
        records = records_of(job, self._clock)
        return _Watched(job, records, records.since(), set(records.begun()))

    def greet(self) -> None:
        """Say what is looked after."""
        self._say(f"looking after {', '.join(watched.job.name for watched in self._watched)}")

    @property
    def busy(self) -> bool:
        """Whether a run that this daemon started is at work."""
        return any(watched.children for watched in self._watched)

    def round(self) -> float:
        """Start what is due; returns the seconds until there can be something new."""
        now = datetime.fromtimestamp(self._clock(), UTC)
        for watched in self._watched:
            self.reap(watched)
            try:
                self._look_after(watched, now)
            except StoreError as error:
                self._say(f"{watched.job.name}: {error}; looked at again later")
        if self.busy:
            return SHORTEST_S
        following = [tick for w in self._watched for tick in next_ticks(w.job.schedule, now, 1)]
        wait = min(((tick - now).total_seconds() for tick in following), default=LONGEST_S)
        return min(LONGEST_S, max(0.0, wait))

    def reap(self, watched: _Watched) -> None:
        """Tell of the children that ended."""
        for tick, child in list(watched.children.items()):
            code = child.poll()
            if code is not None:
                del watched.children[tick]
                self._say(f"{watched.job.name}: tick {tick_name(tick)} ended with code {code}")

    def stop(self) -> None:
        """Ask the runs of this daemon to end; they are resumed by the next one."""
        for watched in self._watched:
            for child in watched.children.values():
                child.terminate()

    def wait(self, sleep: Callable[[float], None]) -> None:
        """Wait for the runs of this daemon."""
        while self.busy:
            for watched in self._watched:
                self.reap(watched)
            sleep(SHORTEST_S / 10)

    def _look_after(self, watched: _Watched, now: datetime) -> None:
        alone = watched.job.file.overlap == "forbid"
        if alone and watched.children:
            return
        candidates = self._candidates(watched, now)
        if not candidates:
            return
        elsewhere = alone and watched.records.running() is not None
        running = len(watched.children) + elsewhere
        for tick in due(watched.job, now, candidates, running=running):
            late = (now - tick).total_seconds()
            note = f", {late:.0f} s after its time" if now - tick > ON_TIME else ""
            self._say(f"{watched.job.name}: tick {tick_name(tick)} starts{note}")
            watched.begun.add(tick)
            watched.children[tick] = self._start(watched.job, tick)

    def _candidates(self, watched: _Watched, now: datetime) -> list[tuple[datetime, State]]:
        """Return the open ticks: those begun, and the last ones since the job was first seen."""
        count = max(1, watched.job.file.catch_up)
        recent = last_ticks(watched.job.schedule, now, count, watched.since)
        watched.settled &= set(recent)
        ticks = sorted({*watched.begun, *recent} - watched.settled - watched.children.keys())
        found = []
        for tick in ticks:
            state = watched.records.status(tick).state
            if state in _OPEN:
                found.append((tick, state))
            elif state is not State.RUNNING:
                watched.settled.add(tick)
                watched.begun.discard(tick)
        return found


def start_process(job: ScheduledJob, tick: datetime) -> Child:
    """Run a tick by `eagle-batch jobs run`, in a process group that a Ctrl-C here spares."""
    command = [sys.executable, "-m", "eagle_batch", "jobs", "run", str(job.path), "--plain"]
    return subprocess.Popen([*command, "--tick", tick_name(tick)], start_new_session=True)  # noqa: S603


def serve(daemon: Daemon, *, once: bool = False) -> None:
    """Go round until SIGTERM or Ctrl-C, then let the runs commit what they can."""
    asked = threading.Event()

    def ask(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - signature
        asked.set()

    before = {number: signal.signal(number, ask) for number in SIGNALS}
    daemon.greet()
    try:
        while not asked.is_set():
            pause = daemon.round()
            if once:
                break
            asked.wait(pause)
        if asked.is_set():
            daemon.stop()
        daemon.wait(time.sleep)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
