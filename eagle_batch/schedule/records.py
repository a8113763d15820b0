"""What is known of a job's ticks, kept as objects beside its outputs, and the right to run one.

    <root>/_schedule/<job>/since.json                when the daemon first saw the job
                           outputs/<digest>          the tick that an output belongs to
                           _job/lock/                who runs the job, where overlap is forbidden
                           <tick>/_job/lock/         who runs the tick
                           <tick>/attempts/NNN.json  began; NNN.end.json: how it ended
                           <tick>/finished.json      done; never written twice

Every object but a lock's heartbeat is created and never changed, so that any number of schedulers
on any number of hosts agree.
"""

from __future__ import annotations

import hashlib
import json
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

from eagle_batch.errors import ConfigError, EagleBatchError, OutputBusyError, StoreError
from eagle_batch.job.lock import BEAT_S, Holder, Lock, is_alive, read_holder
from eagle_batch.job.store import Store, open_store
from eagle_batch.schedule.cron import tick_name

FOLDER = "_schedule"
#: Attempts that may end without a word (killed, host lost) before the daemon gives a tick up.
CRASHES_ALLOWED = 5

Clock = Callable[[], float]


class State(StrEnum):
    """How far a tick is."""

    WAITING = "waiting"
    RUNNING = "running"
    #: Begun, and nobody is at work: the next call resumes it.
    STARTED = "started"
    FAILED = "failed"
    COMPLETE = "complete"


@dataclass(frozen=True, slots=True)
class Finished:
    """A tick that is done; the content of `finished.json`."""

    tick: str
    output: str
    rows: int
    quarantined: int
    #: Unix time.
    ended: float
    attempts: int


@dataclass(frozen=True, slots=True)
class TickStatus:
    """What the records say about one tick."""

    state: State
    attempts: int = 0
    #: What the last attempt failed with.
    error: str = ""
    finished: Finished | None = None
    holder: Holder | None = None


class Records:
    """The records of one job."""

    def __init__(self, root: str, job: str, clock: Clock) -> None:
        """Open the records below a job's root; nothing is written yet."""
        self._parent = f"{root.rstrip('/')}/{FOLDER}"
        self._url = f"{self._parent}/{job}"
        self._store = open_store(self._url)
        self._job = job
        self._clock = clock

    @property
    def place(self) -> str:
        """Where the records lie, as it may be shown."""
        return self._store.name

    def since(self) -> datetime:
        """Return when the job was first seen, which is now for a new one."""
        self._store.put_new("since.json", json.dumps({"since": self._clock()}).encode())
        stored = self._store.get("since.json")
        assert stored is not None
        return datetime.fromtimestamp(json.loads(stored)["since"], UTC)

    def claim_output(self, tick: datetime, output: str) -> None:
        """Note that an output is the tick's; raises ConfigError where it is another tick's."""
        key = f"outputs/{hashlib.sha256(output.encode()).hexdigest()[:32]}"
        if not self._store.put_new(key, tick_name(tick).encode()):
            owner = (self._store.get(key) or b"").decode()
            raise ConfigError(
                f"set.output.path: found {output!r} for the tick {tick_name(tick)}, which holds "
                f"the rows of the tick {owner}; expected one output a tick: name it by run.utc"
            )

    def finished(self, tick: datetime) -> Finished | None:
        """Return the tick's end, None before it."""
        stored = self._store.get(f"{tick_name(tick)}/finished.json")
        return None if stored is None else Finished(**json.loads(stored))

    def status(self, tick: datetime) -> TickStatus:
        """Return what is known of a tick."""
        done = self.finished(tick)
        if done is not None:
            return TickStatus(State.COMPLETE, done.attempts, finished=done)
        holder = self._holder(self._tick_store(tick))
        attempts, ends = self._attempts(tick)
        last = ends.get(attempts, {})
        error = str(last.get("error", ""))
        if holder is not None:
            return TickStatus(State.RUNNING, attempts, error, holder=holder)
        if last.get("given_up"):
            return TickStatus(State.FAILED, attempts, error)
        crashed = attempts - len(ends)
        if crashed > CRASHES_ALLOWED:
            said = f"{crashed} attempts were killed, or their hosts were lost"
            return TickStatus(State.FAILED, attempts, said)
        return TickStatus(State.STARTED if attempts else State.WAITING, attempts, error)

    def begun(self) -> list[datetime]:
        """Return the ticks that were begun and are not done, in order."""
        keys = [key.split("/") for key in open_store(self._parent).list(self._job)]
        began = {parts[-3] for parts in keys if len(parts) > 2 and parts[-2] == "attempts"}
        done = {parts[-2] for parts in keys if parts[-1] == "finished.json"}
        return sorted(datetime.fromisoformat(name).astimezone(UTC) for name in began - done)

    def running(self) -> Holder | None:
        """Return who runs the job, where overlap is forbidden."""
        return self._holder(self._store)

    def begin(self, tick: datetime) -> int:
        """Note that an attempt begins; returns its number. Only the tick's holder may."""
        number = self._attempts(tick)[0] + 1
        body = {"began": self._clock(), "nonce": uuid.uuid4().hex}
        self._tick_store(tick).put_new(f"attempts/{number:03d}.json", json.dumps(body).encode())
        return number

    def end(self, tick: datetime, number: int, error: EagleBatchError, *, given_up: bool) -> None:
        """Note how an attempt ended without finishing the tick."""
        body = {
            "ended": self._clock(),
            "exit_code": int(error.exit_code),
            "error": str(error),
            "given_up": given_up,
        }
        key = f"attempts/{number:03d}.end.json"
        self._tick_store(tick).put_replace(key, json.dumps(body).encode())

    def finish(self, tick: datetime, finished: Finished) -> None:
        """Note that the tick is done, once and for all."""
        body = json.dumps(asdict(finished)).encode()
        self._tick_store(tick).put_new("finished.json", body)

    @contextmanager
    def hold(self, tick: datetime, *, alone: bool) -> Iterator[None]:
        """Have the right to run a tick, and with `alone` the job.

        Raises OutputBusyError where somebody else who is alive has it.
        """
        with ExitStack() as stack:
            if alone:
                stack.enter_context(self._held(self._store, f"a tick of job {self._job}"))
            what = f"tick {tick_name(tick)} of job {self._job}"
            stack.enter_context(self._held(self._tick_store(tick), what))
            yield

    @contextmanager
    def _held(self, store: Store, what: str) -> Iterator[None]:
        lock = Lock(store, uuid.uuid4().hex[:12], self._clock)
        try:
            lock.acquire()
        except OutputBusyError as error:
            raise OutputBusyError(f"{what} is being run: {error}") from error
        ended = threading.Event()
        beats = threading.Thread(target=_keep, args=(lock, ended), daemon=True)
        beats.start()
        try:
            yield
        finally:
            ended.set()
            beats.join()
            lock.release()

    def _tick_store(self, tick: datetime) -> Store:
        return open_store(f"{self._url}/{tick_name(tick)}")

    def _attempts(self, tick: datetime) -> tuple[int, dict[int, dict[str, Any]]]:
        store = self._tick_store(tick)
        keys = store.list("attempts")
        ends = {int(key[9:12]): store.get(key) for key in keys if key.endswith(".end.json")}
        return len(keys) - len(ends), {n: json.loads(body) for n, body in ends.items() if body}

    def _holder(self, store: Store) -> Holder | None:
        _, holder = read_holder(store)
        return holder if holder is not None and is_alive(holder, self._clock()) else None


def _keep(lock: Lock, ended: threading.Event) -> None:
    """Beat until told to end; a lost lock is found by the output's own, which protects the rows."""
    while not ended.wait(BEAT_S / 3):
        with suppress(StoreError, OutputBusyError):
            lock.beat()
