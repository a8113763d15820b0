"""A Ray cluster as people start one, `ray start` by `ray start`, in a network of its own.

The network has nothing but loopback, so that all that listens is out of reach, and no port is
taken. Each node has its own range of ports, as several nodes of one host must.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Self

import psutil

from tests.end_to_end.commands import Outcome, outcome
from tests.schedule.nodes import FAST_CHECKS

HERE = Path(sys.executable).parent
#: What a raylet may take to start, and a command to end, where there is one busy core.
PATIENCE_S = 240.0
DASHBOARD = 8265
GCS = 6379
#: Each node's ports, as steps from its first.
STEPS = {
    "node-manager-port": 1,
    "object-manager-port": 2,
    "runtime-env-agent-port": 3,
    "dashboard-agent-grpc-port": 4,
    "dashboard-agent-listen-port": 5,
    "metrics-export-port": 6,
    "min-worker-port": 100,
    "max-worker-port": 899,
}
#: Makes loopback usable, says so, and keeps the network until its input ends.
HOLDER = """
import fcntl, socket, struct, sys
UP, SET_FLAGS = 1, 0x8914
with socket.socket() as any_socket:
    fcntl.ioctl(any_socket, SET_FLAGS, struct.pack("16sh14x", b"lo", UP))
print("up", flush=True)
sys.stdin.read()
"""


class Network:
    """A network namespace; raises OSError where this machine makes none."""

    def __init__(self) -> None:
        self._holder = subprocess.Popen(
            ["unshare", "--user", "--map-root-user", "--net", sys.executable, "-c", HOLDER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self._holder.stdout is not None
        if self._holder.stdout.readline() != "up\n":
            self.close()
            raise OSError("no network namespace for us")

    def enter(self, *command: str | Path) -> list[str]:
        """Return a command that runs another one in here; they are one process."""
        options = ["--user", "--net", "--preserve-credentials"]
        return ["nsenter", "--target", str(self._holder.pid), *options, "--", *map(str, command)]

    def close(self) -> None:
        self._holder.communicate(timeout=30)


class Raylets:
    """A head with a GPU that is not there, and nodes like it that come and go."""

    def __init__(self, network: Network, folder: Path, repository: Path) -> None:
        self.address = f"http://127.0.0.1:{DASHBOARD}"
        self._network = network
        self._folder = folder
        self._repository = repository
        self._token = secrets.token_hex(32)
        self._nodes: list[subprocess.Popen[bytes]] = []
        self._started = 0

    def __enter__(self) -> Self:
        checks = json.dumps(FAST_CHECKS)
        ports = ["--port", str(GCS), "--dashboard-port", str(DASHBOARD)]
        try:
            self._start("--head", *ports, "--ray-client-server-port", "10001", system=checks)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """The head goes last; each takes what belongs to it along."""
        for process in reversed(self._nodes):
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def join(self, gpus: int = 1) -> None:
        """Start one more node; returns when it belongs to the cluster."""
        self._start("--address", f"127.0.0.1:{GCS}", gpus=gpus)

    def kill(self) -> None:
        """End the newest node's raylet without a word; its `ray start` ends with it."""
        process = self._nodes.pop()
        (raylet,) = (
            child for child in psutil.Process(process.pid).children() if child.name() == "raylet"
        )
        raylet.kill()
        process.wait(PATIENCE_S)
        assert process.returncode != 0

    def run(self, *command: str | Path) -> Outcome:
        """Run `python COMMAND` beside the cluster to its end."""
        entered = self._network.enter(sys.executable, *command)
        return outcome(entered, env=self._environment(), patience_s=PATIENCE_S)

    def begin(self, log: IO[str], *command: str | Path) -> subprocess.Popen[str]:
        """Begin `python COMMAND` beside the cluster."""
        return subprocess.Popen(
            self._network.enter(sys.executable, *command),
            env=self._environment(),
            stdout=log,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def _environment(self) -> dict[str, str]:
        kept = {name: text for name, text in os.environ.items() if not name.startswith("RAY_")}
        return kept | {
            "RAY_TMPDIR": str(self._folder),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": self._token,
            "PATH": f"{HERE}:{os.environ['PATH']}",
            "PYTHONPATH": str(self._repository),
        }

    def _start(self, *arguments: str, gpus: int = 1, system: str | None = None) -> None:
        first = 11_000 + 1000 * self._started
        self._started += 1
        ports = [f"--{name}={first + step}" for name, step in STEPS.items()]
        command = [
            *(HERE / "ray", "start", "--block", *arguments, "--node-ip-address=127.0.0.1"),
            *(*ports, "--num-cpus=1", f"--num-gpus={gpus}", f"--object-store-memory={80 << 20}"),
            *(() if system is None else (f"--system-config={system}",)),
        ]
        log = self._folder / f"node-{self._started}.log"
        with log.open("w") as handle:
            process = subprocess.Popen(
                self._network.enter(*command),
                env=self._environment(),
                stdout=handle,
                stderr=subprocess.STDOUT,
            )
        self._nodes.append(process)

        def is_up() -> bool:
            assert process.poll() is None, log.read_text()
            return "Ray runtime started" in log.read_text()

        wait_until(is_up, log)


def wait_until(holds: Callable[[], bool], log: Path) -> None:
    """Look until something holds; where that takes too long, fail with a log."""
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.1)
