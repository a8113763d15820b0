"""A process with a Ray cluster of several nodes on loopback, moved by lines on its input.

`kill` takes the newest node's raylet away without a word, `join` adds a node, `drain SECONDS` gives
notice that the newest node will go away and takes it away when that time is over. Each is answered.
"""

from __future__ import annotations

import sys
import threading
import time
from typing import Any

FAST_CHECKS = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 1000,
    "health_check_failure_threshold": 2,
}


def kill(node: Any) -> None:
    """End a raylet and reap it: a zombie's workers would think that it lives, and go on."""
    process = node.all_processes["raylet"][0].process
    process.kill()
    process.wait()


def drain(address: str, node: Any, seconds: float) -> None:
    """Do what a cloud does with a spot node: say so, then end it."""
    import ray
    from ray.core.generated import autoscaler_pb2

    accepted, message = ray._raylet.GcsClient(address=address).drain_node(
        node.node_id,
        autoscaler_pb2.DrainNodeReason.DRAIN_NODE_REASON_PREEMPTION,
        "spot",
        int((time.time() + seconds) * 1000),
    )
    assert accepted, message
    threading.Timer(seconds, kill, [node]).start()


def main(port: int, agent: int) -> None:
    from ray.cluster_utils import Cluster

    cluster = Cluster()
    # The agent takes submissions. Its usual port is that of every other Ray of this machine.
    ports = {"dashboard_port": port, "dashboard_agent_listen_port": agent}
    head = {"include_dashboard": True, **ports, "_system_config": FAST_CHECKS}
    memory = {"object_store_memory": 80 << 20}
    cluster.add_node(num_cpus=1, num_gpus=1, **head, **memory)
    nodes = [cluster.add_node(num_cpus=1, num_gpus=1, **memory) for _ in range(2)]
    print("ready", flush=True)
    try:
        for line in sys.stdin:
            order, *numbers = line.split()
            if order == "kill":
                kill(nodes.pop())
            elif order == "drain":
                drain(cluster.address, nodes.pop(), float(numbers[0]))
            else:
                nodes.append(cluster.add_node(num_cpus=1, num_gpus=1, **memory))
            print("done", flush=True)
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
