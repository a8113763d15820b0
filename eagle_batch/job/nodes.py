"""What a Ray cluster tells of its nodes: what they have, which are about to go, a process's log."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from eagle_batch.job.reports import Place
from eagle_batch.job.resources import Node, Resources

#: Lines of a dead worker's own log that are shown.
LOG_LINES = 15
#: Seconds that another node gets to send them.
LOG_S = 5.0


def alive_nodes() -> dict[str, Node]:
    """Return what each node of the cluster has, by Ray's names; those about to go are left out."""
    import ray

    going = draining_nodes()
    nodes = {node["NodeID"]: node["Resources"] for node in ray.nodes() if node["Alive"]}
    return {name: node for name, node in nodes.items() if name not in going}


def draining_nodes() -> dict[str, float | None]:
    """Return the nodes that are being drained -> seconds that are left, None without a deadline.

    A node is drained when its cloud takes it back (autoscaler, KubeRay), when its `ray start
    --block` gets SIGTERM, or by `ray drain-node`.
    """
    import ray

    # No public call tells of it in Ray 2.60.
    deadlines = ray._private.state.state.get_draining_nodes()  # noqa: SLF001
    now = time.time()
    return {
        name: deadline_ms / 1000 - now if deadline_ms else None
        for name, deadline_ms in deadlines.items()
    }


def fullest_with_room(
    nodes: Mapping[str, Node], resources: Resources, workers: Counter[str]
) -> str | None:
    """Return the node with the least room for one more worker; None where no node has any."""
    left = {name: resources.room([node]) - workers[name] for name, node in nodes.items()}
    return min((name for name in left if left[name] > 0), key=lambda name: left[name], default=None)


def log_tail(place: Place) -> str:
    """Return the last lines of a worker's stderr; empty where nobody has them."""
    import ray

    folder = log_folder()
    if folder is not None and place.node == ray.get_runtime_context().get_node_id():
        files = folder.glob(f"worker-*-{place.pid}.err")
        return _last_lines("".join(file.read_text("utf-8", "replace") for file in files))
    return _last_lines(_remote_log(place))


def _last_lines(text: str) -> str:
    """Leave out our own lines, which tell what went well; the driver has the ids."""
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith('{"time"')]
    return "\n".join(lines[-LOG_LINES:])


def _remote_log(place: Place) -> str:
    from ray.util.state import get_log

    try:
        parts = get_log(
            node_id=place.node, pid=place.pid, suffix="err", tail=10 * LOG_LINES, timeout=int(LOG_S)
        )
        return "".join(parts)
    except Exception:  # noqa: BLE001 - it serves a message about something else
        return ""


def log_folder() -> Path | None:
    """Return Ray's folder of logs on this machine, if this process belongs to a node."""
    import ray

    node = ray._private.worker._global_node  # noqa: SLF001 - it has no public name
    return None if node is None else Path(node.get_logs_dir_path())
