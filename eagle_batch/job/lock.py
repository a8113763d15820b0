"""One driver an output: a lock of numbered objects, taken by create-only puts, kept by heartbeats.

The lock is the highest `_job/lock/NNNNNN.json`. To take it is to put the next number, which
exactly one of any number of drivers can; to hold it is to rewrite one's own number now and then.
Nobody deletes a higher number, so a driver that was taken for dead finds out at its next beat. So
does one of two that a store without conditional puts let take the same number.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from eagle_batch.errors import OutputBusyError
from eagle_batch.job.store import Store

FOLDER = "_job/lock"
#: Seconds between two heartbeats.
BEAT_S = 15.0
#: Seconds without a heartbeat after which a holder is taken for dead. Several beats long, because
#: a slow store delays them and because the clocks of two hosts differ.
EXPIRY_S = 120.0


@dataclass(frozen=True, slots=True)
class Holder:
    """Who holds the lock; the content of a lock object."""

    run: str
    host: str
    pid: int
    #: Where that pid means something: containers may share a host name.
    pid_space: str
    #: Start of the process in clock ticks after boot, which tells a reused pid; 0 where unknown.
    process_start: int
    #: Unix times.
    since: float
    beat: float
    released: bool = False

    def to_bytes(self) -> bytes:
        """Return the JSON of the lock object."""
        return json.dumps(asdict(self)).encode()


def process_start(pid: int) -> int | None:
    """Return when a process of this host started, in clock ticks after boot; None if it is dead.

    Gives 0 for a living process on systems without /proc.
    """
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        pass
    try:
        fields = Path(f"/proc/{pid}/stat").read_text("ascii").rpartition(")")[2].split()
    except OSError:
        return 0
    return None if fields[0] == "Z" else int(fields[19])


class Lock:
    """The right to write commit records into an output."""

    def __init__(self, store: Store, run: str, clock: Callable[[], float] = time.time) -> None:
        self._store = store
        self._clock = clock
        self._number = 0
        now = clock()
        pid = os.getpid()
        self._mine = Holder(
            run, socket.gethostname(), pid, _pid_space(), process_start(pid) or 0, now, now
        )

    def acquire(self) -> None:
        """Take the lock. Raises OutputBusyError when a living driver holds it."""
        number, holder = read_holder(self._store)
        if holder is not None and self._is_alive(holder):
            raise OutputBusyError(self._busy(holder))
        self._number = number + 1
        won = self._store.put_new(_key(self._number), self._mine.to_bytes())
        # Where the last put wins, one may have come after ours; see `beat` for one yet to come.
        _, winner = read_holder(self._store)
        if not won or winner is None or winner.run != self._mine.run:
            raise OutputBusyError(self._busy(winner or self._mine))
        for old in self._store.list(FOLDER):
            if old < _key(self._number):
                self._store.delete(old)

    def beat(self) -> None:
        """Say that we live, at most once in BEAT_S. Raises OutputBusyError when we were deposed."""
        now = self._clock()
        if not self._number or now - self._mine.beat < BEAT_S:
            return
        number, holder = read_holder(self._store)
        if holder is not None and (number > self._number or holder.run != self._mine.run):
            raise OutputBusyError(
                f"{self._store.name}: this run was silent for {now - self._mine.beat:.0f} s and "
                f"taken for dead; {_who(holder)} holds the output now and goes on with the job"
            )
        self._mine = replace(self._mine, beat=now)
        self._store.put_replace(_key(self._number), self._mine.to_bytes())

    def release(self) -> None:
        """Give the lock back; the object stays and says so."""
        if self._number:
            self._mine = replace(self._mine, beat=self._clock(), released=True)
            self._store.put_replace(_key(self._number), self._mine.to_bytes())
            self._number = 0

    def _is_alive(self, holder: Holder) -> bool:
        return is_alive(holder, self._clock())

    def _busy(self, holder: Holder) -> str:
        age = max(0.0, self._clock() - holder.beat)
        return (
            f"{self._store.name}: another run holds this output: {_who(holder)}, last heard of "
            f"{age:.0f} s ago; wait for it, stop it, or choose another output.path "
            f"(a run that died is forgotten {EXPIRY_S:.0f} s after its last sign)"
        )


def read_holder(store: Store) -> tuple[int, Holder | None]:
    """Return the number and the content of the highest lock object; (0, None) without any."""
    keys = sorted(store.list(FOLDER))
    if not keys:
        return 0, None
    number = int(keys[-1].rpartition("/")[2].removesuffix(".json"))
    data = store.get(keys[-1])
    # Deleted between listing and reading: a newer holder cleaned up; its number is taken.
    return number, None if data is None else Holder(**json.loads(data))


def is_alive(holder: Holder, now: float) -> bool:
    """Tell whether the holder of a lock still runs, as far as can be seen from this host."""
    if holder.released:
        return False
    if (holder.host, holder.pid_space) == (socket.gethostname(), _pid_space()):
        start = process_start(holder.pid)
        if start is None or (holder.process_start and start != holder.process_start):
            return False
    return now - holder.beat < EXPIRY_S


def _pid_space() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")  # noqa: PTH115 - a name, not a path
    except OSError:
        return ""


def _key(number: int) -> str:
    return f"{FOLDER}/{number:06d}.json"


def _who(holder: Holder) -> str:
    return f"process {holder.pid} on {holder.host}"
