"""A real S3 server on this machine: SeaweedFS, started on free ports, killed and started again."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import s3fs

BUCKET = "bucket"
#: Distinctive, so that a test can look for them in files and messages.
ADMIN = ("AKIAEAGLEADMIN", "admin-secret-6f1d2c9b")
READER = ("AKIAEAGLEREADER", "reader-secret-77aa01e3")
START_S = 90.0
#: A server's RPC ports are its HTTP ports and this.
RPC = 10_000


def find_weed() -> str | None:
    """The server's program, beside this interpreter or in PATH."""
    beside = Path(sys.executable).with_name("weed")
    return str(beside) if beside.exists() else shutil.which("weed")


def free_ports(count: int, *, with_rpc: bool = False) -> list[int]:
    """Ports nobody listens on; with the ports of RPC free too."""
    found: list[int] = []
    while len(found) < count:
        with contextlib.ExitStack() as stack:
            first = stack.enter_context(socket.socket())
            first.bind(("127.0.0.1", 0))
            port = first.getsockname()[1]
            if port in found:
                continue
            if with_rpc:
                port = port % 20_000 + 20_000
                second, third = (stack.enter_context(socket.socket()) for _ in range(2))
                try:
                    second.bind(("127.0.0.1", port))
                    third.bind(("127.0.0.1", port + RPC))
                except OSError:
                    continue
            found.append(port)
    return found


@dataclass
class Seaweed:
    """One server with a folder of its own."""

    folder: Path
    ports: list[int] = field(default_factory=lambda: free_ports(4, with_rpc=True))
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Where the server speaks S3."""
        return f"http://127.0.0.1:{self.ports[3]}"

    def start(self) -> None:
        """Start the server and wait until an object can be put and read back."""
        program = find_weed()
        assert program is not None
        (self.folder / "data").mkdir(parents=True, exist_ok=True)
        config = self.folder / "s3.json"
        config.write_text(json.dumps(identities()))
        with (self.folder / "log.txt").open("ab") as log:
            self.process = subprocess.Popen(
                [program, *flags(self.folder, self.ports)], stdout=log, stderr=log
            )
        self._wait()

    def _wait(self) -> None:
        end = time.monotonic() + START_S
        while True:
            assert self.process is not None
            assert self.process.poll() is None, (self.folder / "log.txt").read_text()[-2000:]
            fs = filesystem(self.url, ADMIN)
            try:
                with contextlib.suppress(FileExistsError):
                    fs.mkdir(BUCKET)
                fs.pipe_file(f"{BUCKET}/ready", b"yes")
                assert fs.cat_file(f"{BUCKET}/ready") == b"yes"
                return
            except Exception:
                if time.monotonic() > end:
                    raise
            time.sleep(0.2)

    def kill(self) -> None:
        """End the server at once, as a power cut does."""
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def stop(self) -> None:
        """End the server; it may not listen to TERM for minutes."""
        assert self.process is not None
        self.process.terminate()
        try:
            self.process.wait(3)
        except subprocess.TimeoutExpired:
            self.kill()


def flags(folder: Path, ports: list[int]) -> list[str]:
    """A whole SeaweedFS in one process, on 127.0.0.1 alone."""
    master, volume, filer, s3 = ports
    return [
        "-logtostderr=true",
        "server",
        f"-dir={folder / 'data'}",
        "-ip=127.0.0.1",
        "-ip.bind=127.0.0.1",
        f"-master.port={master}",
        # Without these two a restart waits for an election, up to a minute.
        "-master.peers=none",
        "-master.electionTimeout=1s",
        "-master.volumeSizeLimitMB=64",
        f"-volume.port={volume}",
        "-volume.max=200",
        "-filer",
        f"-filer.port={filer}",
        "-s3",
        f"-s3.port={s3}",
        f"-s3.config={folder / 's3.json'}",
        "-s3.port.iceberg=0",
        "-s3.port.lance=0",
        "-s3.autoCreateBucket=false",
        "-s3.allowDeleteBucketNotEmpty=true",
    ]


def identities() -> dict[str, object]:
    """Who may do what."""

    def one(name: str, keys: tuple[str, str], actions: list[str]) -> dict[str, object]:
        credentials = [{"accessKey": keys[0], "secretKey": keys[1]}]
        return {"name": name, "credentials": credentials, "actions": actions}

    return {
        "identities": [
            one("admin", ADMIN, ["Admin", "Read", "Write", "List", "Tagging"]),
            one("reader", READER, ["Read", "List"]),
        ]
    }


def filesystem(url: str, keys: tuple[str, str]) -> s3fs.S3FileSystem:
    """A client of the test's own."""
    return s3fs.S3FileSystem(
        key=keys[0], secret=keys[1], endpoint_url=url, skip_instance_cache=True
    )


@contextmanager
def environment(url: str, keys: tuple[str, str]) -> Iterator[None]:
    """What a user sets: an address and a key, in the environment alone."""
    values = {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": keys[0],
        "AWS_SECRET_ACCESS_KEY": keys[1],
        "AWS_REGION": "us-east-1",
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
    }
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    forget_clients()
    try:
        yield
    finally:
        forget_clients()
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def forget_clients() -> None:
    """Close the clients that fsspec keeps; the environment is not among what tells them apart."""
    for client in list(s3fs.S3FileSystem._cache.values()):
        if client._s3 is not None:
            client.close_session(client.loop, client._s3)
    s3fs.S3FileSystem.clear_instance_cache()
    with warnings.catch_warnings():
        # A request that was cancelled leaves its socket to the garbage collector.
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()
