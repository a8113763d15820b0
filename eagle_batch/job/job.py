"""A job from outside: what is to be made, who works, who watches, and what came of it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Protocol

from eagle_batch.data.plan import Plan
from eagle_batch.data.prompts import Prompter
from eagle_batch.job.entries import SHARE_S, Rules
from eagle_batch.job.ledger import Identity
from eagle_batch.job.meter import Snapshot
from eagle_batch.job.reports import Pool
from eagle_batch.job.tasks import Task
from eagle_batch.pipeline import Pipeline
from eagle_batch.pipeline.fingerprint import resolved


class Watcher(Protocol):
    """Somebody who is shown how the job goes."""

    def update(self, snapshot: Snapshot) -> None:
        """Show how far the job is."""

    def say(self, text: str) -> None:
        """Show one line."""


class SizedPool(Pool, Protocol):
    """A pool that knows how many workers it begins with."""

    @property
    def size(self) -> int:
        """Workers that are to run at first."""


@dataclass(frozen=True, slots=True)
class Job:
    """What is to be made, checked and planned."""

    pipeline: Pipeline
    plan: Plan
    prompter: Prompter
    #: Command, versions and settings, for `_job/runs/`.
    about: dict[str, Any]

    @property
    def identity(self) -> Identity:
        """What the ledger compares."""
        return Identity(
            fingerprint=self.plan.fingerprint,
            resolved=resolved(self.pipeline),
            inputs=self.plan.inputs,
            tasks=tuple(Task(s.key, s.index, 0, s.rows) for s in self.plan.shards),
            samples=self.pipeline.samples,
            plan=json.loads(self.plan.to_json()),
            target=self.plan.target,
        )

    def rules(self, workers: int, *, exclusive: bool = True) -> Rules:
        """Return the limits that the coordinator applies."""
        limits = self.pipeline.limits
        return Rules(
            workers=workers,
            fewest=self.pipeline.workers.min,
            most=self.pipeline.workers.max,
            samples=self.pipeline.samples,
            worker_attempts=limits.worker_attempts,
            shard_attempts=limits.shard_attempts,
            max_error_rate=limits.max_error_rate,
            share_s=SHARE_S,
            exclusive=exclusive,
        )


@dataclass(frozen=True, slots=True)
class JobResult:
    """A complete job."""

    output: str
    units: int
    rows: int
    quarantined: int
    #: Whether an earlier run had made everything and nothing was started.
    already_complete: bool
    #: The document of `_job/metrics.json`; None when nothing was started.
    metrics: dict[str, Any] | None
    #: Rows that were left out on purpose.
    dropped: int = 0
