"""Ray while a job runs: the cluster that RAY_ADDRESS names, or one inside this process."""

from __future__ import annotations

import functools
import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from eagle_batch.errors import ConfigError, StoppedError
from eagle_batch.job.nodes import alive_nodes
from eagle_batch.job.resources import Resources, choose_resources, describe_nodes
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


@contextmanager
def ray_session(
    workers: Workers,
    threads: int | None,
    say: Callable[[str], None],
    *,
    dashboard: bool = False,
    beside: Mapping[str, float] | None = None,
) -> Iterator[Resources]:
    """Have Ray while entered: the cluster that RAY_ADDRESS names, else one inside this process.

    beside: what is kept free for something else than workers, by Ray's names.

    Yields what the workers get. Raises StoppedError when Ray cannot be started.
    """
    if os.environ.get("RAY_ADDRESS"):
        with _connected():
            nodes = list(alive_nodes().values())
            yield _say(choose_resources(workers, threads, nodes, beside=beside), say)
        return
    cores = len(os.sched_getaffinity(0))
    if _asks_for_no_token():
        say("Ray was imported before, without tokens: other users of this machine can reach it")
    room = cores + int((beside or {}).get("CPU", 0))
    with _embedded(workers, room, dashboard=dashboard) as url:
        if url:
            token = os.environ.get("RAY_AUTH_TOKEN", "none")
            say(f"dashboard: http://{url} (token {token})")
        nodes = list(alive_nodes().values())
        resources = choose_resources(workers, threads, nodes, cores, beside=beside)
        _refuse_without_room(resources, workers)
        yield _say(resources, say)


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


def _refuse_without_room(resources: Resources, workers: Workers) -> None:
    """A cluster may grow; this machine does not."""
    nodes = list(alive_nodes().values())
    if resources.room(nodes) < workers.min:
        raise ConfigError(
            f"workers: this machine has no room for {workers.min} of them; each asks for "
            f"{resources.describe_needs()}, and there is {describe_nodes(nodes)}; ask for less, or "
            "name a cluster (RAY_ADDRESS, --address)"
        )


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


@contextmanager
def _embedded(workers: Workers, cores: int, *, dashboard: bool) -> Iterator[str | None]:
    """Start a Ray of our own on this machine and end it; yields the dashboard's address."""
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
                yield context.dashboard_url if dashboard else None
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

    count = max(workers.min, 1 if workers.count == "auto" else workers.count, workers.max or 1)
    options: dict[str, Any] = {
        "address": "local",  # never an old cluster that left its address behind
        "num_cpus": max(cores, int(count * workers.cpus) + 1),
        # What nodes of a cluster would declare: the same file runs here.
        "resources": {name: count * much for name, much in workers.resources.items()},
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


@functools.cache
def _token() -> str:
    """Return the token of this process: Ray's core reads it once, also if Ray is started again."""
    return secrets.token_hex(32)


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """Set variables that are not set, and a token of our own, while entered."""
    added = {name: value for name, value in values.items() if name not in os.environ}
    if "RAY_AUTH_TOKEN" not in os.environ and "RAY_AUTH_TOKEN_PATH" not in os.environ:
        added["RAY_AUTH_TOKEN"] = _token()
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)
