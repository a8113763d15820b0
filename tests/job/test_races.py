"""Attempts of one shard with different errors, in every order of their store operations.

Each attempt is a thread that waits for its turn before every operation; the orders are enumerated,
and so are the deaths. After each operation a reader looks at what a glob would show. What an
attempt does next follows from what it saw so far, so that an order is left as soon as it comes to
where another one was before.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field

import pytest

from eagle_batch.job.ledger import Identity
from eagle_batch.job.objects import find
from eagle_batch.job.store import Store
from eagle_batch.job.tasks import Commit, Lease, Task
from tests.job.support import ERRORS as SCHEMA
from tests.job.support import QUICK, errors, identity, objects, rows

TASK = Task("part-00000", 0, 0, 4)
#: One form whose data object carries the errors object, and one that has a stamp for that.
JOBS = {
    form: identity(output={"format": form, "compression": "none"}) for form in ("parquet", "jsonl")
}


class Death(BaseException):
    """An attempt is killed."""


class Shelf(Store):
    """Objects in a dictionary; `turn` is called before each operation, `saw` with its outcome."""

    def __init__(self, *, exclusive: bool) -> None:
        super().__init__("shelf", QUICK, lambda seconds: None)
        self.objects: dict[str, bytes] = {}
        self.turn: Callable[[], None] = lambda: None
        self.saw: Callable[[bytes | None], None] = lambda outcome: None
        self._exclusive = exclusive

    def is_exclusive(self) -> bool:
        return self._exclusive

    def _create(self, key: str, data: bytes) -> None:
        assert self._exclusive, "it has no such operation"
        self.turn()
        self.saw(self.objects.get(key))
        if key in self.objects:
            raise FileExistsError(key)
        self.objects[key] = data

    def _replace(self, key: str, data: bytes) -> None:
        self.turn()
        self.saw(None)
        self.objects[key] = data

    def _read(self, key: str) -> bytes:
        self.turn()
        self.saw(self.objects.get(key))
        try:
            return self.objects[key]
        except KeyError:
            raise FileNotFoundError(key) from None

    def _list(self, prefix: str) -> dict[str, int]:
        raise NotImplementedError

    def _delete(self, key: str) -> None:
        raise NotImplementedError


@dataclass
class Attempt:
    """One worker's put, which goes on by one operation whenever it is told to."""

    number: int
    #: Rows that it quarantines; None for the driver, which closes the shard to split it.
    bad: tuple[int, ...] | None
    job: Identity
    commit: Commit | None = None
    failed: BaseException | None = None
    over: bool = False
    dying: bool = False
    #: The outcomes of its operations.
    seen: list[int] = field(default_factory=list)
    _go: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    _paused: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))

    def start(self, shelf: Shelf) -> None:
        self._thread = threading.Thread(target=self._run, args=(shelf,), daemon=True)
        self._thread.start()
        self._paused.acquire()

    def turn(self) -> None:
        """Called in the attempt's own thread: wait until it may go on."""
        self._paused.release()
        self._go.acquire()
        if self.dying:
            raise Death

    def go_on(self, *, dying: bool = False) -> None:
        """Let it do what it waits to do, up to its next operation or its end."""
        self.dying = dying
        self._go.release()
        self._paused.acquire()

    def _run(self, shelf: Shelf) -> None:
        own = Shelf(exclusive=shelf.is_exclusive())
        own.objects, own.turn = shelf.objects, self.turn
        own.saw = lambda outcome: self.seen.append(hash(outcome))
        lease = Lease(TASK, self.number, "run", shelf.is_exclusive())
        try:
            self.commit = self._put(own, lease)
        except Death:
            pass
        except BaseException as error:  # noqa: BLE001 - told in the test's thread
            self.failed = error
        self.over = True
        self._paused.release()

    def _put(self, store: Store, lease: Lease) -> Commit:
        writer = objects(store, self.job)
        if self.bad is None:
            none = rows(TASK).slice(0, 0)
            return writer.put(lease, none, errors(TASK), parts=TASK.split(2))
        made = rows(TASK, bad=self.bad)
        return writer.put(lease, made, errors(TASK, bad=self.bad, attempt=self.number))


@dataclass
class Order:
    """The choices of one run: those of a prefix, then always the first; and how many there were."""

    prefix: tuple[int, ...]
    taken: list[tuple[int, int]] = field(default_factory=list)

    def choose(self, options: int) -> int:
        place = len(self.taken)
        choice = self.prefix[place] if place < len(self.prefix) else 0
        self.taken.append((choice, options))
        return choice

    def following(self) -> tuple[int, ...] | None:
        """The prefix of the next run, in the order of a depth-first search."""
        taken = self.taken
        while taken and taken[-1][0] + 1 == taken[-1][1]:
            taken = taken[:-1]
        if not taken:
            return None
        return (*(choice for choice, _ in taken[:-1]), taken[-1][0] + 1)


def every_order() -> Iterator[Order]:
    prefix: tuple[int, ...] | None = ()
    while prefix is not None:
        order = Order(prefix)
        yield order
        prefix = order.following()


def run(
    order: Order,
    shelf: Shelf,
    form: str,
    attempts: list[Attempt],
    deaths: int,
    known: set[Hashable],
) -> bool:
    """Follow an order to its end; False where it leads to a state that was looked into before."""
    for attempt in attempts:
        attempt.start(shelf)
    while living := [attempt for attempt in attempts if not attempt.over]:
        choice = order.choose(len(living) * (2 if deaths else 1))
        dying = choice >= len(living)
        deaths -= dying
        living[choice % len(living)].go_on(dying=dying)
        look(shelf, form)
        state = (
            tuple(sorted(shelf.objects.items())),
            tuple((tuple(a.seen), a.over) for a in attempts),
            deaths,
        )
        if len(order.taken) >= max(1, len(order.prefix)) and state in known:
            for attempt in attempts:
                if not attempt.over:
                    attempt.go_on(dying=True)
            return False
        known.add(state)
    assert [attempt.failed for attempt in attempts] == [None] * len(attempts)
    return True


def look(shelf: Shelf, form: str) -> None:
    """What a reader finds at any moment."""
    listed = shelf.objects.get(f"errors/{TASK.key}.{form}")
    if f"data/{TASK.key}.{form}" not in shelf.objects:
        assert listed is None, "quarantined rows of a shard that is not there"
        return
    own = errors_in(shelf, form)
    if shelf.is_exclusive():
        assert listed in (None, own), "data and errors are of two attempts"


def errors_in(shelf: Shelf, form: str) -> bytes:
    """The errors object that the data object carries; together they hold every row once."""
    lies = {key: data for key, data in shelf.objects.items() if not key.startswith("errors/")}
    return _errors_in(tuple(sorted(lies.items())), form)


@functools.cache
def _errors_in(lies: tuple[tuple[str, bytes], ...], form: str) -> bytes:
    shelf = Shelf(exclusive=True)
    shelf.objects = dict(lies)
    written = JOBS[form].form
    found = find(shelf, written, f"data/{TASK.key}.{form}")
    assert found is not None
    assert found.errors is not None
    listed = written.read(found.errors, SCHEMA)
    ids = found.table["id"].to_pylist() + listed["id"].to_pylist()
    assert sorted(ids) == ([] if found.footer.parts else [f"0:{n}" for n in range(4)])
    return found.errors


def settled(shelf: Shelf, form: str) -> Commit:
    """What a resume makes of it, whose first look is at the data object."""
    found = objects(shelf, JOBS[form]).settle(TASK, exclusive=shelf.is_exclusive())
    assert shelf.objects[f"errors/{TASK.key}.{form}"] == errors_in(shelf, form)
    return found


#: Quarantined rows of the attempts that are under way at once; None is the driver's closing.
Cast = tuple[tuple[int, ...] | None, ...]
TWO: Cast = ((1,), (3,))
SPLIT: Cast = ((1,), None)
THREE: Cast = ((), (3,), None)
#: The same rows by two attempts, of which each says who it is; and no rows, for two reasons.
SAME: Cast = ((1,), (1,))
NO_ROWS: Cast = ((0, 1, 2, 3), None)


def play(cast: Cast, form: str, *, exclusive: bool, deaths: int) -> int:
    """Play every order; returns how many states there are."""
    known: set[Hashable] = set()
    for order in every_order():
        shelf = Shelf(exclusive=exclusive)
        attempts = [Attempt(number, bad, JOBS[form]) for number, bad in enumerate(cast, 1)]
        if not run(order, shelf, form, attempts, deaths, known):
            continue
        commits = [attempt.commit for attempt in attempts if attempt.commit is not None]
        if f"data/{TASK.key}.{form}" not in shelf.objects:
            assert commits == []
            continue
        if len(commits) == len(attempts):
            own, listed = errors_in(shelf, form), shelf.objects[f"errors/{TASK.key}.{form}"]
            assert listed == own, "all came to their end, and nothing is to mend"
        found = settled(shelf, form)
        if exclusive:
            assert commits == [found] * len(commits), "each reports what lies there"
    return len(known)


@pytest.mark.parametrize(
    ("cast", "form", "exclusive", "deaths", "least"),
    [
        (TWO, "parquet", True, 1, 50),
        (SPLIT, "parquet", True, 1, 50),
        (TWO, "parquet", False, 0, 50),
        (TWO, "parquet", False, 1, 500),
        (TWO, "jsonl", True, 1, 50),
        (SPLIT, "jsonl", True, 1, 50),
        (SAME, "jsonl", True, 1, 50),
        (NO_ROWS, "jsonl", True, 1, 50),
        (SAME, "jsonl", False, 0, 50),
        pytest.param(TWO, "parquet", True, 2, 60, marks=pytest.mark.exhaustive),
        pytest.param(THREE, "parquet", True, 1, 500, marks=pytest.mark.exhaustive),
        pytest.param(TWO, "parquet", False, 2, 900, marks=pytest.mark.exhaustive),
        pytest.param(TWO, "jsonl", False, 1, 900, marks=pytest.mark.exhaustive),
        pytest.param(SAME, "jsonl", False, 1, 900, marks=pytest.mark.exhaustive),
        pytest.param(THREE, "jsonl", True, 1, 500, marks=pytest.mark.exhaustive),
    ],
)
def test_in_every_order_a_reader_finds_rows_and_errors_of_one_attempt(
    cast: Cast, form: str, exclusive: bool, deaths: int, least: int
) -> None:
    states = play(cast, form, exclusive=exclusive, deaths=deaths)
    assert states >= least, "the orders were not enumerated"
