"""What a run was started with: the exact command, the versions and the settings."""

from __future__ import annotations

import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from eagle_batch.pipeline import Pipeline
from eagle_batch.pipeline.fingerprint import resolved

PACKAGES = (
    "eagle-batch",
    "torch",
    "transformers",
    "ray",
    "pyarrow",
    "fsspec",
    "tokenizers",
    "numba",
)


def about_run(pipeline: Pipeline, command: list[str]) -> dict[str, Any]:
    """Return the record that each run leaves in `_job/runs/`."""
    return {
        "command": command,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in PACKAGES},
        "git_commit": git_commit(),
        "executable": sys.executable,
        "pipeline": resolved(pipeline),
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def git_commit() -> str | None:
    """Return the commit of the checkout that this code runs from; None when it is installed."""
    folder = Path(__file__).resolve().parents[2]
    if not (folder / ".git").exists():
        return None
    try:
        done = subprocess.run(  # noqa: S603 - our own arguments
            ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40"],  # noqa: S607
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None
