"""Workers as Ray actors: started, pumped, watched and replaced. The only place that knows Ray.

Ray's own restarts and retries are off: a restarted actor would run a call twice unseen. A worker
whose process dies, whose engine breaks or whose pump does not return is reported lost, and killed.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from eagle_batch.errors import StoppedError
from eagle_batch.job.reports import (
    Failure,
    Lost,
    PoolEvent,
    Pumped,
    PumpReport,
    Started,
    StartFailed,
    WorkerInfo,
)
from eagle_batch.job.spec import WorkerSpec
from eagle_batch.job.tasks import Lease
from eagle_batch.job.telemetry import Telemetry
from eagle_batch.pipeline import Workers

#: What an embedded Ray is told through its environment, unless the user told it something else.
EMBEDDED_ENVIRONMENT = {
    # Listen on 127.0.0.1 alone.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_AUTH_MODE": "token",
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray nices its workers to 15, so that anything else on the machine would starve the engine.
    "RAY_worker_niceness": "0",
}
#: Memory of Ray's object store: only descriptors and counters pass through it.
OBJECT_STORE_BYTES = 128 << 20


class WorkerActor:
    """A worker behind Ray: every exception becomes a record, which survives any pickling."""

    def __init__(self, spec: WorkerSpec) -> None:
        self._spec = spec
        self._worker: Any = None
        self._telemetry = Telemetry(spec.pipeline.name)

    def start(self) -> WorkerInfo | Failure:
        """Build the engine."""
        if self._spec.threads is not None:
            # Read by the libraries that torch loads, which happens after this line.
            os.environ["OMP_NUM_THREADS"] = str(self._spec.threads)
        from eagle_batch.job.worker import Worker

        try:
            self._worker = Worker(self._spec)
        except Exception as error:  # noqa: BLE001 - the worker's edge
            return Failure.of(error)
        info: WorkerInfo = self._worker.info()
        return info

    def pump(self, leases: tuple[Lease, ...], seconds: float) -> PumpReport | Failure:
        """Turn the worker's pump; after a Failure its engine is not to be used again."""
        try:
            report: PumpReport = self._worker.pump(leases, seconds)
        except Exception as error:  # noqa: BLE001 - the worker's edge
            return Failure.of(error)
        self._telemetry.count(report)
        return report


@dataclass(frozen=True, slots=True)
class Resources:
    """How many workers run, and what each gets."""

    count: int
    cpus: float
    gpus: float
    device: str
    #: CPU threads of each engine.
    threads: int | None

    def describe(self) -> str:
        """Return one line for people."""
        many = f"{self.count} worker" + ("s" if self.count != 1 else "")
        each = f"{self.gpus:g} GPU" if self.gpus else f"{self.threads or 'all'} CPU threads"
        return f"{many} on {self.device}, each with {each}"


def choose_resources(workers: Workers, threads: int | None, cores: int, gpus: float) -> Resources:
    """Settle the number and size of workers for a cluster with so many cores and GPUs.

    One worker for each GPU; on the CPU one that uses all cores, since each holds a whole model.
    """
    each = (1.0 if gpus else 0.0) if workers.gpus == "auto" else float(workers.gpus)
    automatic = max(1, int(gpus / each)) if each else 1
    count = automatic if workers.count == "auto" else workers.count
    own = threads if threads is not None or each else max(1, cores // count)
    return Resources(count, workers.cpus, each, "cuda" if each else "cpu", own)


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
        #: When the oldest call of a worker began to run, by our clock.
        self._since: dict[int, float] = {}
        self._events: list[PoolEvent] = []

    @property
    def size(self) -> int:
        """Workers that may run at once."""
        return self._resources.count

    def start(self, worker: int) -> None:
        """Begin to start a worker; Started or StartFailed follows."""
        import ray

        actor = ray.remote(WorkerActor).options(
            num_cpus=self._resources.cpus,
            num_gpus=self._resources.gpus,
            max_restarts=0,
            max_task_retries=0,
        )
        self._actors[worker] = actor.remote(self._spec)
        self._starting.add(worker)
        self._call(worker, self._actors[worker].start.remote())

    def pump(self, worker: int, leases: tuple[Lease, ...], seconds: float) -> None:
        """Queue a pump that first takes in new leases; Pumped or Lost follows."""
        self._call(worker, self._actors[worker].pump.remote(leases, seconds))

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
            return []
        ready, _ = ray.wait(list(self._calls), timeout=timeout)
        if ready:
            ready, _ = ray.wait(list(self._calls), num_returns=len(self._calls), timeout=0)
        for reference in ready:
            self._returned(reference)
        self._give_up_on_the_stalled()
        events, self._events = self._events, []
        return events

    def _returned(self, reference: Any) -> None:
        import ray

        worker = self._calls.pop(reference, None)
        if worker is None:
            return  # of a worker that was dropped a moment ago
        self._pending[worker] -= 1
        self._since[worker] = time.monotonic()
        try:
            result = ray.get(reference)
        except ray.exceptions.RayError as error:
            result = Failure(_first_lines(error))
        if isinstance(result, Failure):
            self._drop(worker, result)
        elif isinstance(result, WorkerInfo):
            self._starting.discard(worker)
            self._events.append(Started(worker, result))
        else:
            self._events.append(Pumped(worker, result))

    def _give_up_on_the_stalled(self) -> None:
        now = time.monotonic()
        for worker in set(self._calls.values()):
            if now - self._since[worker] > self._stall_s:
                text = f"no answer within limits.stall_seconds ({self._stall_s:g} s)"
                self._drop(worker, Failure(text))

    def _drop(self, worker: int, failure: Failure) -> None:
        import ray

        ray.kill(self._actors.pop(worker), no_restart=True)
        self._calls = {call: owner for call, owner in self._calls.items() if owner != worker}
        del self._pending[worker]
        if worker in self._starting:
            self._starting.discard(worker)
            self._events.append(StartFailed(worker, failure))
        else:
            self._events.append(Lost(worker, failure))

    def close(self) -> None:
        """End all workers at once."""
        import ray

        for actor in self._actors.values():
            with contextlib.suppress(ray.exceptions.RayError):
                ray.kill(actor, no_restart=True)
        self._actors.clear()
        self._calls.clear()
        self._pending.clear()


def _first_lines(error: Exception) -> str:
    """Return what Ray says about a dead actor, without its list of identifiers."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    kept = [line for line in lines if "_id:" not in line and "_name:" not in line]
    named = (line for line in lines if line.startswith(("pid:", "ip:")))
    return " ".join([*kept[:3], *named])[:500] or type(error).__name__


@contextmanager
def ray_session(
    workers: Workers, threads: int | None, say: Callable[[str], None], *, dashboard: bool = False
) -> Iterator[Resources]:
    """Have Ray while entered: the cluster that RAY_ADDRESS names, else one inside this process.

    Yields what the workers get. Raises StoppedError when Ray cannot be started.
    """
    if os.environ.get("RAY_ADDRESS"):
        with _connected():
            yield _say(_cluster_resources(workers, threads), say)
        return
    cores = len(os.sched_getaffinity(0))
    if _asks_for_no_token():
        say("Ray was imported before, without tokens: other users of this machine can reach it")
    with _embedded(workers, cores, dashboard=dashboard) as (url, gpus):
        if url:
            token = os.environ.get("RAY_AUTH_TOKEN", "none")
            say(f"dashboard: http://{url} (token {token})")
        yield _say(choose_resources(workers, threads, cores, gpus), say)


def _asks_for_no_token() -> bool:
    """Tell whether Ray is in this process and has settled for no token; it decides at import."""
    if "ray" not in sys.modules:
        return False
    import ray

    mode = ray._raylet.get_authentication_mode()  # noqa: SLF001 - it has no public name
    return bool(mode != ray._raylet.AuthenticationMode.TOKEN)  # noqa: SLF001 - same


def _say(resources: Resources, say: Callable[[str], None]) -> Resources:
    say(resources.describe())
    return resources


@contextmanager
def _connected() -> Iterator[None]:
    import ray

    try:
        ray.init(logging_level="WARNING", log_to_driver=False)
    except (ConnectionError, RuntimeError, ValueError) as error:
        address = os.environ["RAY_ADDRESS"]
        raise StoppedError(
            f"RAY_ADDRESS={address}: cannot connect to that Ray cluster: {error}; start it, or "
            "unset RAY_ADDRESS to run on this machine"
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


def _cluster_resources(workers: Workers, threads: int | None) -> Resources:
    import ray

    total = ray.cluster_resources()
    # Actors are spread over hosts, so the cores of one host are not known: Ray's own setting of
    # OMP_NUM_THREADS by `workers.cpus` stands unless the pipeline names threads.
    chosen = choose_resources(workers, threads, int(total.get("CPU", 1)), total.get("GPU", 0.0))
    return replace(chosen, threads=threads)


@contextmanager
def _embedded(
    workers: Workers, cores: int, *, dashboard: bool
) -> Iterator[tuple[str | None, float]]:
    """Start a Ray of our own on this machine and end it; yields the dashboard and the GPUs."""
    # Short: a Unix socket's path has at most 107 bytes.
    folder = tempfile.mkdtemp(prefix="eb-", dir="/tmp")
    settings = EMBEDDED_ENVIRONMENT | {"RAY_TMPDIR": folder}
    if _asks_for_no_token():
        settings["RAY_AUTH_MODE"] = "disabled"
    with _environment(settings):
        # Only now: Ray's core reads some of these variables when it is imported.
        import ray

        try:
            with _silent_raylet():
                context = _init_twice(workers, cores, dashboard=dashboard)
                gpus = float(ray.cluster_resources().get("GPU", 0.0))
                yield (context.dashboard_url if dashboard else None), gpus
        finally:
            ray.shutdown()
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _silent_raylet() -> Iterator[None]:
    """Keep Ray from printing its own page about each dead process; `Lost` tells of it.

    There is no setting for this; the name is looked up each time a message arrives.
    """
    import ray

    module = ray._private.worker  # noqa: SLF001
    printer = module.print_to_stdstream
    module.print_to_stdstream = lambda data, ignore_prefix: None  # noqa: ARG005
    try:
        yield
    finally:
        module.print_to_stdstream = printer


def _init_twice(workers: Workers, cores: int, *, dashboard: bool) -> Any:
    """Start Ray; on a busy machine the first start may miss Ray's own fixed limit of 30 s."""
    import ray

    count = 1 if workers.count == "auto" else workers.count
    options: dict[str, Any] = {
        "address": "local",  # never an old cluster that left its address behind
        "num_cpus": max(cores, int(count * workers.cpus) + 1),
        "include_dashboard": dashboard,
        "logging_level": "ERROR",
        "log_to_driver": False,
        "object_store_memory": OBJECT_STORE_BYTES,
    }
    try:
        return ray.init(**options)
    except (RuntimeError, ConnectionError, TimeoutError, OSError):
        ray.shutdown()
    try:
        return ray.init(**options)
    except (RuntimeError, ConnectionError, TimeoutError, OSError) as error:
        said = " ".join(str(error).split())[:300]
        raise StoppedError(f"Ray could not be started on this machine: {said}") from error


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """Set variables that are not set, and a token of our own, while entered."""
    added = {name: value for name, value in values.items() if name not in os.environ}
    if "RAY_AUTH_TOKEN" not in os.environ and "RAY_AUTH_TOKEN_PATH" not in os.environ:
        added["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)
