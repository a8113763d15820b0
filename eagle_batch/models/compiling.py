"""Compiles kernels with numba and keeps their machine code for the next process.

numba looks at the file of a function alone to tell whether what it kept is still right; kernels are
made of functions of several files. So each state of these files has a folder of its own.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numba

from eagle_batch.folders import cache_folder

#: The files that kernels are made of, below the package.
SOURCES = (
    "engine/choosing.py",
    "engine/drafters/kernels.py",
    "engine/kernels.py",
    "models/kernels.py",
    "models/team.py",
    "models/tiles.py",
)
_settings: Any = numba.config


def compiled(**options: Any) -> Callable[[Any], Any]:
    """Return a decorator: `numba.njit` with these options, kept on disk where that is possible."""

    def decorate(function: Any) -> Any:
        before, kept = _settings.CACHE_DIR, _folder()
        if kept is None:
            # numba would keep it elsewhere, by the file of the function alone.
            return numba.njit(**options)(function)
        # Nobody else's functions are to go there.
        _settings.CACHE_DIR = kept
        try:
            return numba.njit(cache=True, **options)(function)
        finally:
            _settings.CACHE_DIR = before

    return decorate


@cache
def _folder() -> str | None:
    """Return where code is kept, None where nothing can be written."""
    try:
        folder = Path(_settings.CACHE_DIR or cache_folder() / "kernels") / _state()
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return str(folder)
    except (OSError, RuntimeError):  # the latter where nobody knows a home
        return None


@cache
def _state() -> str:
    package = Path(__file__).parents[1]
    digest = hashlib.sha256(numba.__version__.encode())
    for name in SOURCES:
        digest.update((package / name).read_bytes())
    return digest.hexdigest()[:16]
