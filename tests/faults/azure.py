"""An emulator of Azure Blob Storage on this machine, where `npm install azurite` has put it."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.faults.seaweed import free_ports

CONTAINER = "bucket"
ACCOUNT = "eaglestore"
#: Base64, as Azure has them; distinctive, so that a test can look for them.
KEY = "ZWFnbGUtYmF0Y2gta2V5LW5vYm9keS1tYXktc2VlLTE="
WRONG_KEY = "ZWFnbGUtYmF0Y2gta2V5LW5vYm9keS1tYXktc2VlLTI="
START_S = 60.0


def find_program() -> str | None:
    """The emulator in PATH, if its client is installed too."""
    return shutil.which("azurite-blob") if importlib.util.find_spec("adlfs") else None


@contextmanager
def named(port: int, key: str) -> Iterator[None]:
    """Make `az://` lead to a port of this machine while entered, in the environment alone."""
    from adlfs import AzureBlobFileSystem

    text = (
        f"DefaultEndpointsProtocol=http;AccountName={ACCOUNT};AccountKey={key};"
        f"BlobEndpoint=http://127.0.0.1:{port}/{ACCOUNT};"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AZURE_STORAGE_CONNECTION_STRING", text)
        # The environment is not among what tells two clients apart.
        AzureBlobFileSystem.clear_instance_cache()
        yield
        AzureBlobFileSystem.clear_instance_cache()


@contextmanager
def emulated(program: str, folder: Path) -> Iterator[int]:
    """Run the emulator with one container; yields its port."""
    [port] = free_ports(1)
    command = [program, "--blobHost", "127.0.0.1", "--blobPort", str(port)]
    command += ["--location", str(folder), "--silent", "--skipApiVersionCheck"]
    command += ["--disableTelemetry"]
    accounts = {"AZURITE_ACCOUNTS": f"{ACCOUNT}:{KEY}"}
    with (folder / "log.txt").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | accounts)
        try:
            with named(port, KEY):
                _wait(process)
            yield port
        finally:
            process.kill()
            process.wait()


def _wait(process: subprocess.Popen[bytes]) -> None:
    import fsspec

    end = time.monotonic() + START_S
    while True:
        assert process.poll() is None
        fs = fsspec.filesystem("az", skip_instance_cache=True)
        try:
            fs.mkdir(CONTAINER)
            return
        except Exception:
            if time.monotonic() > end:
                raise
        time.sleep(0.3)
