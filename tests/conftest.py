"""Fixtures that every room of the tests shares."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from eagle_batch import demo
from eagle_batch.folders import CACHE_VARIABLE

REPOSITORY = Path(__file__).resolve().parent.parent

# Tiny models gain nothing from a second thread, and on a busy machine lose most of their time in
# waiting for it. Set before torch loads; the workers of real jobs set their own.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(autouse=True)
def clean_environ(monkeypatch: pytest.MonkeyPatch) -> None:
    """A developer's own settings must not decide what a test sees; only the cache is kept."""
    for name in list(os.environ):
        if name.startswith("EAGLE_BATCH_") and name != CACHE_VARIABLE:
            monkeypatch.delenv(name)


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the checkout."""
    return REPOSITORY


@pytest.fixture(scope="session")
def demo_target() -> Path:
    """The folder of the demo target; the first run on a machine downloads and converts it."""
    return demo.fetch()
