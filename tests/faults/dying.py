"""A store that dies at a chosen operation, and takes everything down with it, as SIGKILL does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from eagle_batch.job.lock import read_holder
from eagle_batch.job.store import LocalStore, open_store
from tests.job.support import QUICK

#: Tells whether to die at an operation: (its number, its verb, its key).
When = Callable[[int, str, str], bool]


class Death(BaseException):
    """Nothing catches it: neither `except Exception` nor a retry."""


def at(verb: str, key: str) -> When:
    """The moment of one operation on one object."""
    return lambda number, done, where: (done, where) == (verb, key)


class DyingStore(LocalStore):
    """Counts operations that change something; dies before or after one of them took effect."""

    def __init__(self, root: Path, when: When, *, after: bool = False) -> None:
        super().__init__(str(root), QUICK, lambda seconds: None)
        self.log: list[tuple[str, str]] = []
        self._when = when
        self._after = after
        self._dead = False

    def _step(self, verb: str, key: str, act: Callable[[], None]) -> None:
        if self._dead:
            raise Death
        self._dead = self._when(len(self.log), verb, key)
        self.log.append((verb, key))
        if not self._dead or self._after:
            act()
        if self._dead:
            raise Death

    def _create(self, key: str, data: bytes) -> None:
        self._step("create", key, lambda: super(DyingStore, self)._create(key, data))

    def _replace(self, key: str, data: bytes) -> None:
        self._step("replace", key, lambda: super(DyingStore, self)._replace(key, data))

    def _delete(self, key: str) -> None:
        self._step("delete", key, lambda: super(DyingStore, self)._delete(key))


def bury(output: Path) -> None:
    """Make the lock look as the kernel leaves it: its process is gone. Ours lives, in tests."""
    store = open_store(str(output), QUICK)
    number, holder = read_holder(store)
    if holder is not None and not holder.released:
        store.put_replace(
            f"_job/lock/{number:06d}.json", replace(holder, process_start=1).to_bytes()
        )
