"""An S3 server without conditional puts: `rclone serve s3`, where its package is installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.faults.seaweed import ADMIN, BUCKET, environment, filesystem, free_ports

START_S = 60.0


def find_rclone() -> str | None:
    """The program beside this interpreter or in PATH."""
    beside = Path(sys.executable).with_name("rclone")
    return str(beside) if beside.exists() else shutil.which("rclone")


@contextmanager
def serving(program: str, folder: Path) -> Iterator[Path]:
    """Serve a folder, and make `s3://` lead to it while entered; yields the bucket's folder."""
    [port] = free_ports(1)
    root = folder / "root"
    (root / BUCKET).mkdir(parents=True)
    command = [program, "serve", "s3", str(root), "--addr", f"127.0.0.1:{port}"]
    command += ["--auth-key", ",".join(ADMIN), "--config", str(folder / "none.conf")]
    url = f"http://127.0.0.1:{port}"
    with environment(url, ADMIN), (folder / "log.txt").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ)
        try:
            _wait(process, url)
            yield root / BUCKET
        finally:
            process.kill()
            process.wait()


def _wait(process: subprocess.Popen[bytes], url: str) -> None:
    end = time.monotonic() + START_S
    while True:
        assert process.poll() is None
        try:
            filesystem(url, ADMIN).pipe_file(f"{BUCKET}/ready", b"yes")
            return
        except Exception:
            if time.monotonic() > end:
                raise
        time.sleep(0.2)
