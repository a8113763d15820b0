"""Workers as Ray actors: started, pumped, watched and replaced.

Ray's own restarts and retries are off: a restarted actor would run a call twice unseen. A worker
whose process dies, whose engine breaks or whose pump does not return is reported lost, and killed.

A worker waits for room in the cluster, is placed on a node, builds its engine, works. One that has
no room yet is not late: nodes may have to start first.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from dataclasses import replace
from typing import Any

from eagle_batch.job.actor import WorkerActor
from eagle_batch.job.nodes import alive_nodes, draining_nodes, fullest_with_room, log_tail
from eagle_batch.job.reports import (
    Draining,
    Failure,
    Lost,
    NoRoom,
    Place,
    PoolEvent,
    Pumped,
    Room,
    Started,
    StartFailed,
    WorkerInfo,
)
from eagle_batch.job.resources import Resources, describe_nodes
from eagle_batch.job.spec import WorkerSpec
from eagle_batch.job.tasks import Order

#: Seconds between two looks at the cluster's nodes.
NODES_S = 2.0
#: Seconds before a drained node's end at which its shards are given back.
DRAIN_MARGIN_S = 10.0
#: Seconds that workers wait for room before the user is told.
TELL_S = 20.0


class RayPool:
    """See `eagle_batch.job.reports.Pool`."""

    def __init__(self, spec: WorkerSpec, resources: Resources, stall_seconds: float) -> None:
        """Take what every worker is built from; Ray must be initialised."""
        self._spec = replace(spec, device=resources.device, threads=resources.threads)
        self._resources = resources
        self._stall_s = stall_seconds
        self._actors: dict[int, Any] = {}
        #: Calls that have not returned: worker, in the order of the calls.
        self._calls: dict[Any, int] = {}
        #: How many of them there are of each worker.
        self._pending: Counter[int] = Counter()
        self._starting: set[int] = set()
        #: Where each worker is, once it has room.
        self._places: dict[int, Place] = {}
        #: When the oldest call of a worker began to run, by our clock.
        self._since: dict[int, float] = {}
        #: When the workers of a node that is drained are given up; None where it has no deadline.
        self._leaving: dict[int, float | None] = {}
        self._events: list[PoolEvent] = []
        self._nodes_at = time.monotonic()
        self._room = resources.count
        #: Since when workers have waited for room, and whether the user was told.
        self._short_since: float | None = None
        self._told = False

    @property
    def size(self) -> int:
        """Workers that are to run at first."""
        return self._resources.count

    def start(self, worker: int) -> None:
        """Begin to start a worker; Started or StartFailed follows."""
        import ray

        actor = ray.remote(WorkerActor).options(**self._options())
        self._actors[worker] = actor.remote(self._spec, worker)
        self._starting.add(worker)
        self._call(worker, self._actors[worker].where.remote())
        self._call(worker, self._actors[worker].start.remote())

    def _options(self) -> dict[str, Any]:
        wanted = self._resources
        options: dict[str, Any] = {
            "num_cpus": wanted.cpus,
            "num_gpus": wanted.gpus,
            "memory": wanted.memory,
            "resources": dict(wanted.custom),
            "max_restarts": 0,
            "max_task_retries": 0,
            "scheduling_strategy": self._strategy(),
        }
        if wanted.accelerator is not None:
            options["accelerator_type"] = wanted.accelerator
        return options

    def _strategy(self) -> Any:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        if self._resources.placement == "spread":
            return "SPREAD"
        workers = Counter(place.node for place in self._places.values())
        packed = self._resources.placement == "pack"
        node = fullest_with_room(alive_nodes(), self._resources, workers) if packed else None
        if node is None:
            return "DEFAULT"
        # Spills: somebody else's actors may be there too.
        return NodeAffinitySchedulingStrategy(node, soft=True, _spill_on_unavailable=True)

    def stop(self, worker: int) -> None:
        """End a worker that has nothing to do; no event follows."""
        self._starting.discard(worker)
        self._forget(worker)

    def pump(self, worker: int, orders: tuple[Order, ...], seconds: float) -> None:
        """Queue a pump that first takes in orders; Pumped or Lost follows."""
        self._call(worker, self._actors[worker].pump.remote(orders, seconds))

    def pending(self, worker: int) -> int:
        """Return how many calls of a worker were queued and have not returned."""
        return self._pending[worker]

    def _call(self, worker: int, reference: Any) -> None:
        if not self.pending(worker):
            self._since[worker] = time.monotonic()
        self._calls[reference] = worker
        self._pending[worker] += 1

    def poll(self, timeout: float) -> list[PoolEvent]:
        """Wait until something happened, or for `timeout` seconds, and return what did."""
        import ray

        if not self._calls:
            time.sleep(timeout)
        else:
            ready, _ = ray.wait(list(self._calls), timeout=timeout)
            if ready:
                ready, _ = ray.wait(list(self._calls), num_returns=len(self._calls), timeout=0)
            for reference in ready:
                self._returned(reference)
        self._give_up_on_the_stalled()
        if time.monotonic() - self._nodes_at >= NODES_S:
            self._nodes_at = time.monotonic()
            self._look_at_nodes()
        events, self._events = self._events, []
        return events

    def _returned(self, reference: Any) -> None:
        import ray

        worker = self._calls.pop(reference, None)
        if worker is None:
            return  # of a worker that was dropped a moment ago
        self._pending[worker] -= 1
        self._since[worker] = time.monotonic()
        silent = False
        try:
            result = ray.get(reference)
        except ray.exceptions.RayError as error:
            result = Failure(_first_lines(error), self._last_words(worker))
            silent = not _saw_it_end(error)
        if isinstance(result, Failure):
            self._drop(worker, result, maybe_alive=silent)
        elif isinstance(result, Place):
            self._places[worker] = result
        elif isinstance(result, WorkerInfo):
            self._starting.discard(worker)
            self._events.append(Started(worker, result))
        else:
            self._events.append(Pumped(worker, result))

    def _last_words(self, worker: int) -> str:
        place = self._places.get(worker)
        if place is None:
            return ""
        tail = log_tail(place)
        return f"the last lines of its log ({place.host}, pid {place.pid}):\n{tail}" if tail else ""

    def _give_up_on_the_stalled(self) -> None:
        now = time.monotonic()
        for worker in set(self._calls.values()) & self._places.keys():
            if now - self._since[worker] > self._stall_s:
                text = f"no answer within limits.stall_seconds ({self._stall_s:g} s)"
                self._drop(worker, Failure(text), maybe_alive=True)

    # -- the cluster -------------------------------------------------------------------------

    def _look_at_nodes(self) -> None:
        import ray

        with contextlib.suppress(ray.exceptions.RayError):  # the next look may find an answer
            self._see_draining(draining_nodes())
            nodes = list(alive_nodes().values())
            self._see_room(nodes)
            self._see_who_waits(nodes)

    def _see_draining(self, draining: dict[str, float | None]) -> None:
        now = time.monotonic()
        for worker, place in list(self._places.items()):
            if place.node in draining and worker not in self._leaving:
                left = draining[place.node]
                self._leaving[worker] = None if left is None else now + left - DRAIN_MARGIN_S
                self._events.append(Draining(worker, left))
        for worker, end in list(self._leaving.items()):
            if end is not None and now >= end:
                failure = Failure("its node is drained and its time is over")
                self._drop(worker, failure, maybe_alive=True)

    def _see_room(self, nodes: list[Any]) -> None:
        room = self._resources.room(nodes)
        if self._resources.follows and room != self._room:
            self._room = room
            self._events.append(Room(room))

    def _see_who_waits(self, nodes: list[Any]) -> None:
        waiting = len(self._actors.keys() - self._places.keys())
        now = time.monotonic()
        if not waiting:
            self._short_since, self._told = None, False
            return
        self._short_since = self._short_since or now
        waited = now - self._short_since
        workers = self._spec.pipeline.workers
        final = waited > workers.wait_seconds and len(self._places) < workers.min
        if final or (waited > TELL_S and not self._told):
            self._told = True
            text = (
                f"{waiting} workers have waited for room for {waited:.0f} s: each asks for "
                f"{self._resources.describe_needs()}; the cluster has {describe_nodes(nodes)}"
            )
            self._events.append(NoRoom(text, final))

    # -- ends --------------------------------------------------------------------------------

    def _drop(self, worker: int, failure: Failure, *, maybe_alive: bool) -> None:
        announced = worker in self._leaving
        self._forget(worker)
        if worker in self._starting:
            self._starting.discard(worker)
            self._events.append(StartFailed(worker, failure))
        else:
            self._events.append(Lost(worker, failure, announced, maybe_alive))

    def _forget(self, worker: int) -> None:
        import ray

        ray.kill(self._actors.pop(worker), no_restart=True)
        self._calls = {call: owner for call, owner in self._calls.items() if owner != worker}
        del self._pending[worker]
        self._places.pop(worker, None)
        self._leaving.pop(worker, None)

    def close(self) -> None:
        """End all workers at once."""
        import ray

        for actor in self._actors.values():
            with contextlib.suppress(ray.exceptions.RayError):
                ray.kill(actor, no_restart=True)
        self._actors.clear()
        self._calls.clear()
        self._pending.clear()


def _saw_it_end(error: Exception) -> bool:
    """Tell whether the worker's node saw its process end; a silent node may only be cut off."""
    import ray

    return isinstance(error, ray.exceptions.ActorDiedError) and "node has died" not in str(error)


def _first_lines(error: Exception) -> str:
    """Return what Ray says about a dead actor, without its list of identifiers."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    kept = [line for line in lines if "_id:" not in line and "_name:" not in line]
    named = (line for line in lines if line.startswith(("pid:", "ip:")))
    return " ".join([*kept[:3], *named])[:500] or type(error).__name__
