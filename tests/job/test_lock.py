"""One driver an output: who gets the lock, who is taken for dead, and how the deposed find out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from eagle_batch.errors import OutputBusyError
from eagle_batch.job.lock import BEAT_S, EXPIRY_S, Lock, process_start, read_holder
from eagle_batch.job.store import LocalStore, Store, open_store
from tests.job.support import QUICK


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(params=["local", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    root = str(tmp_path) if request.param == "local" else f"memory://{tmp_path.name}"
    return open_store(root, QUICK)


def pretend(store: Store, **changes: object) -> None:
    """Rewrite the lock as if another process had taken it."""
    number, holder = read_holder(store)
    assert holder is not None
    body = replace(holder, **changes).to_bytes()  # type: ignore[arg-type]
    store.put_replace(f"_job/lock/{number:06d}.json", body)


def test_a_second_driver_is_told_host_pid_and_age(store: Store) -> None:
    clock = Clock()
    Lock(store, "one", clock).acquire()
    clock.now += 7
    with pytest.raises(OutputBusyError) as caught:
        Lock(store, "two", clock).acquire()
    holder = read_holder(store)[1]
    assert holder is not None
    assert f"process {os.getpid()} on {holder.host}" in str(caught.value)
    assert "7 s ago" in str(caught.value)


def test_a_released_lock_is_free(store: Store) -> None:
    first = Lock(store, "one")
    first.acquire()
    first.release()
    Lock(store, "two").acquire()
    holder = read_holder(store)[1]
    assert holder is not None
    assert holder.run == "two"


def test_a_silent_holder_on_another_host_is_taken_for_dead_only_after_the_expiry(
    store: Store,
) -> None:
    clock = Clock()
    Lock(store, "one", clock).acquire()
    pretend(store, host="elsewhere")
    clock.now += EXPIRY_S - 1
    with pytest.raises(OutputBusyError, match="elsewhere"):
        Lock(store, "two", clock).acquire()
    clock.now += 2
    Lock(store, "two", clock).acquire()


def test_a_dead_process_of_this_host_frees_the_lock_at_once(store: Store) -> None:
    script = "import os; print(os.getpid())"
    child = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, check=True)
    Lock(store, "one").acquire()
    pretend(store, pid=int(child.stdout))
    Lock(store, "two").acquire()


def test_a_reused_pid_is_not_taken_for_the_holder(store: Store) -> None:
    Lock(store, "one").acquire()
    pretend(store, process_start=1)
    Lock(store, "two").acquire()


def test_a_pid_of_another_container_of_the_same_name_is_not_looked_up(store: Store) -> None:
    Lock(store, "one").acquire()
    pretend(store, pid=2**22 - 1, pid_space="pid:[1]")
    with pytest.raises(OutputBusyError):
        Lock(store, "two").acquire()


def test_a_deposed_holder_finds_out_at_its_next_beat(store: Store) -> None:
    """1. one is stopped (a laptop's lid). 2. two takes over. 3. one wakes up."""
    clock = Clock()
    one = Lock(store, "one", clock)
    one.acquire()
    pretend(store, host="elsewhere")
    clock.now += EXPIRY_S + 1
    Lock(store, "two", clock).acquire()
    with pytest.raises(OutputBusyError, match="taken for dead"):
        one.beat()


def test_a_beat_keeps_the_lock(store: Store) -> None:
    clock = Clock()
    one = Lock(store, "one", clock)
    one.acquire()
    pretend(store, host="elsewhere")
    clock.now += EXPIRY_S - 1
    one.beat()
    clock.now += EXPIRY_S - 1
    with pytest.raises(OutputBusyError):
        Lock(store, "two", clock).acquire()


def test_beats_are_rare(tmp_path: Path) -> None:
    clock = Clock()
    store = open_store(str(tmp_path), QUICK)
    one = Lock(store, "one", clock)
    one.acquire()
    before = store.get("_job/lock/000001.json")
    clock.now += 1
    one.beat()
    assert store.get("_job/lock/000001.json") == before


def test_of_two_drivers_that_see_the_same_dead_lock_one_gets_it(tmp_path: Path) -> None:
    """Both read number 1 as dead; both try to put number 2."""
    store = open_store(str(tmp_path), QUICK)
    Lock(store, "one").acquire()
    pretend(store, released=True)
    rival = Lock(store, "rival")

    class Slow(Lock):
        def _is_alive(self, holder: object) -> bool:
            rival.acquire()
            return False

    with pytest.raises(OutputBusyError):
        Slow(store, "slow").acquire()
    assert json.loads(store.get("_job/lock/000002.json") or b"")["run"] == "rival"


def test_a_living_process_has_a_start_and_a_dead_one_none() -> None:
    script = "input()"
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE) as child:
        assert (process_start(child.pid) or 0) > 0
        child.kill()
        # Dead and not waited for: a zombie keeps its pid and holds no lock.
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert process_start(child.pid) is None
    assert process_start(child.pid) is None


def test_of_two_that_a_weak_store_lets_take_one_number_the_first_finds_out(tmp_path: Path) -> None:
    """The store has no conditional put: the second put replaces the first."""

    class LastWins(LocalStore):
        def _create(self, key: str, data: bytes) -> None:
            self._replace(key, data)

    now = [1000.0]
    store = LastWins(str(tmp_path), QUICK, lambda seconds: None)
    first, second = (Lock(store, name, lambda: now[0]) for name in ("first", "second"))
    first.acquire()
    store.put_replace("_job/lock/000001.json", second._mine.to_bytes())
    now[0] += BEAT_S
    with pytest.raises(OutputBusyError, match="holds the output now"):
        first.beat()


def test_a_lock_that_was_overwritten_at_once_is_not_taken(tmp_path: Path) -> None:
    other = Lock(LocalStore(str(tmp_path), QUICK, lambda s: None), "other")._mine

    class Beaten(LocalStore):
        def _create(self, key: str, data: bytes) -> None:
            super()._create(key, data)
            self._replace(key, other.to_bytes())

        def put_new(self, key: str, data: bytes) -> bool:
            self._create(key, data)
            return True

    lock = Lock(Beaten(str(tmp_path), QUICK, lambda s: None), "mine")
    with pytest.raises(OutputBusyError, match="another run holds this output"):
        lock.acquire()
