"""A process with a Ray cluster of several nodes on loopback, moved by lines on its input.

`kill` takes the newest node's raylet away without a word, `join` adds a node; each is answered.
"""

from __future__ import annotations

import sys
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


def main(port: int) -> None:
    from ray.cluster_utils import Cluster

    cluster = Cluster()
    head = {"include_dashboard": True, "dashboard_port": port, "_system_config": FAST_CHECKS}
    memory = {"object_store_memory": 80 << 20}
    cluster.add_node(num_cpus=1, num_gpus=1, **head, **memory)
    nodes = [cluster.add_node(num_cpus=1, num_gpus=1, **memory) for _ in range(2)]
    print("ready", flush=True)
    try:
        for line in sys.stdin:
            if line.strip() == "kill":
                kill(nodes.pop())
            else:
                nodes.append(cluster.add_node(num_cpus=1, num_gpus=1, **memory))
            print("done", flush=True)
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]))
