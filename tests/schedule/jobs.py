"""Job files for tests, over a pipeline that needs no model, and a world that stands still."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from eagle_batch.pipeline import Pipeline
from eagle_batch.schedule.jobfile import ScheduledJob, load_job
from eagle_batch.schedule.run import Made, Surroundings
from tests.job.fake_job import write_job

#: The moment at which tests read job files.
NOW = datetime(2027, 3, 1, 12, tzinfo=UTC)


def utc(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


def write_file(folder: Path, **fields: Any) -> Path:
    """Write a pipeline and a job file that runs it daily at 04:30 UTC; returns the job file."""
    pipeline = write_job(folder / "pipeline", ["a", "b"])
    document = {
        "name": "nightly",
        "pipeline": str(pipeline),
        "set": {"output.path": f"{folder}/out/{{{{ run.date }}}}"},
        "schedule": {"cron": "30 4 * * *"},
    }
    path = folder / "nightly.yaml"
    path.write_text(yaml.safe_dump(document | fields))
    return path


def make_job(folder: Path, **fields: Any) -> ScheduledJob:
    return load_job(write_file(folder, **fields), NOW)


def everything_made(pipeline: Pipeline) -> Made:
    return Made(rows=2, quarantined=0)


@dataclass
class World:
    """Counts the runs; time passes only when somebody sleeps."""

    execute: Callable[[Pipeline], Made] = everything_made
    now: float = NOW.timestamp()
    runs: list[Pipeline] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    slept: list[float] = field(default_factory=list)

    def surroundings(self) -> Surroundings:
        return Surroundings(self._run, self.lines.append, self.clock, self._sleep)

    def clock(self) -> float:
        return self.now

    def _run(self, pipeline: Pipeline) -> Made:
        self.runs.append(pipeline)
        return self.execute(pipeline)

    def _sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds
