"""Finished jobs of the fake engine, recorded as `submit` does."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from rich.console import Console

from eagle_batch.job.driver import run_job
from eagle_batch.job.store import Store, open_store
from eagle_batch.report.output import Objects
from eagle_batch.report.progress import PlainView
from eagle_batch.report.recorder import Recorder
from tests.job.fake_engine import LONG
from tests.job.fake_job import InProcessPool, load_job, write_job

EVIL = "<script>alert(1)</script> & 'quotes'"


def nothing(store: Objects) -> None:
    """Make no report."""


def finished(folder: Path, topics: list[str] | None = None, **fields: Any) -> Store:
    """Run a small job to its end; returns its store, with a timeline and no report."""
    topics = topics or ["tides", EVIL, LONG, "rain", "why is the sky blue"]
    path = write_job(folder, topics, limits={"max_error_rate": 1.0}, **fields)
    store = open_store(str(folder / "out"))
    recorder = Recorder(PlainView(Console(file=io.StringIO())), store, nothing)
    lost = iter([True])

    def lose_one(worker: int, pump: int) -> None:
        if next(lost, False):
            raise RuntimeError("the device is gone")

    job = load_job(path)
    run_job(
        job, lambda started: InProcessPool(job.pipeline, job, started, sabotage=lose_one), recorder
    )
    recorder.close()
    return store
