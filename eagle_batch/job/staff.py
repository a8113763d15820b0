"""How many workers there are: as many as there is work and room for, and no longer than that.

More are wanted, up to the most, while tasks wait although all are at work. When none waits any
more, those that nothing is left for are ended. A worker whose node will go away keeps what it
holds, gets nothing new, and is replaced.
"""

from __future__ import annotations

from itertools import count

from eagle_batch.job.entries import IN_FLIGHT, Rules, WorkerState
from eagle_batch.job.events import StartWorker, StopWorker


class Staff:
    """The one owner of who works."""

    def __init__(self, rules: Rules) -> None:
        """Begin with nobody."""
        self._rules = rules
        #: Those that were asked for and are not known to be gone, by number.
        self.workers: dict[int, WorkerState] = {}
        #: Workers that are wanted now, were there tasks for all.
        self.wanted = rules.workers
        self._numbers = count()

    def idle(self) -> list[int]:
        """Return the workers that could do something and have nothing to do."""
        return [n for n, w in self.workers.items() if w.ready and not w.holding and not w.draining]

    def follow(self, room: int) -> None:
        """Take in for how many workers the cluster has room."""
        wanted = max(room, self._rules.fewest)
        if self._rules.most is not None:
            # The cluster is asked to grow, so that a node that left is asked for again.
            wanted = max(self.wanted, min(wanted, self._rules.most))
        self.wanted = wanted

    def start(self, work: int, *, waiting: bool) -> list[StartWorker]:
        """Start workers up to the wanted number, or up to the work that is left.

        `work` counts tasks and loans; `waiting` tells whether tasks wait that any worker may have.
        """
        staff = [worker for worker in self.workers.values() if not worker.draining]
        if waiting and self._is_too_small(staff):
            assert self._rules.most is not None
            self.wanted = min(2 * self.wanted, self._rules.most)
        missing = min(self.wanted, work) - len(staff)
        numbers = [next(self._numbers) for _ in range(missing)]
        self.workers |= {number: WorkerState() for number in numbers}
        return [StartWorker(number) for number in numbers]

    def _is_too_small(self, staff: list[WorkerState]) -> bool:
        """Tell whether all wanted workers are at work, and more are allowed."""
        most = self._rules.most
        if most is None or self.wanted >= most or len(staff) < self.wanted:
            return False
        return all(len(worker.holding) == IN_FLIGHT for worker in staff)

    def release(self, unfinished: int, *, waiting: bool, looked: bool) -> list[StopWorker]:
        """End workers that nothing is left for; `waiting` tells whether any task waits.

        Those that are ready wait for a look at the others first, which may lend them rows. Of the
        rest as many stay as there are tasks under way, in case that a worker falls silent.
        """
        idle = [n for n, w in self.workers.items() if not w.holding]
        gone = [n for n in idle if self.workers[n].draining]
        if not waiting:
            kept = [n for n in idle if n not in gone]
            # Those that have not started yet go first, the youngest of them before the others.
            kept.sort(key=lambda n: (self.workers[n].ready, -n))
            spare = kept[: max(0, len(kept) - unfinished)]
            wait = self._rules.shares and not looked
            gone += [n for n in spare if not (wait and self.workers[n].ready)]
        else:
            # Where room is gone, what still waits for it would wait for ever.
            late = [n for n in idle if not self.workers[n].ready and n not in gone]
            surplus = sum(not w.draining for w in self.workers.values()) - self.wanted
            gone += late[: max(0, surplus)]
        for number in gone:
            del self.workers[number]
        return [StopWorker(number) for number in gone]
