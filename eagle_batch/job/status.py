"""How far a job is, read from its output alone; takes no lock and writes nothing."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import Any

from eagle_batch.job.layers import finished_layer, has_layers, made_layer
from eagle_batch.job.ledger import METRICS, latest, read_identity, read_records
from eagle_batch.job.lock import is_alive, read_holder
from eagle_batch.job.objects import DATA, data_key
from eagle_batch.job.store import open_store


@dataclass(frozen=True, slots=True)
class JobStatus:
    """What an output says about its job."""

    output: str
    name: str
    #: "running", "complete" or "stopped": not complete, and nobody is at work.
    state: str
    #: Rows x samples of the job, and those that records account for.
    units: int
    rows: int
    quarantined: int
    #: Those that were left out on purpose.
    dropped: int
    #: Shards, parts of split ones included; objects that wait for a record count as done.
    tasks: int
    tasks_done: int
    #: Host and process of the run that holds the output; None without one.
    host: str | None
    pid: int | None
    #: Seconds since that run, or the last one, was heard of; None before the first.
    silent_s: float | None
    #: When this was read, in seconds since the epoch.
    looked: float
    #: The document of `_job/metrics.json`, if there is one yet.
    metrics: dict[str, Any] | None


def read_status(output: str, now: float | None = None) -> JobStatus:
    """Return how far the job of an output is.

    Raises LedgerError when there is no job in it, StoreError when it cannot be read.
    """
    now = time.time() if now is None else now
    store = open_store(output)
    identity = read_identity(store)
    layers = has_layers(identity.resolved)
    commits = latest(read_records(store))
    finished = latest(read_records(finished_layer(store))) if layers else commits
    form = identity.form
    objects = made_layer(store, layers=layers).list(DATA)
    tasks = list(identity.tasks)
    for commit in commits.values():
        tasks += commit.parts
    done = sum(data_key(task.key, form) in objects for task in tasks)
    _, holder = read_holder(store)
    alive = holder is not None and is_alive(holder, now)
    stored = store.get(METRICS)
    metrics = None if stored is None else json.loads(stored)
    whole = done == len(tasks) and (not layers or len(finished) == len(tasks))
    # Records go out in batches; while a driver runs, its metrics know more.
    newest = metrics if alive and metrics is not None else {}
    counted = list((finished or commits).values())
    return JobStatus(
        output=store.name,
        name=str(identity.resolved.get("name", "")),
        state="running" if alive else "complete" if whole else "stopped",
        units=identity.units,
        rows=max(newest.get("rows", 0), sum(commit.rows for commit in counted)),
        quarantined=max(
            newest.get("quarantined", 0), sum(commit.quarantined for commit in counted)
        ),
        dropped=max(newest.get("dropped", 0), sum(commit.dropped for commit in counted)),
        tasks=len(tasks),
        tasks_done=done,
        host=holder.host if holder is not None and alive else None,
        pid=holder.pid if holder is not None and alive else None,
        silent_s=None if holder is None else max(0.0, now - holder.beat),
        looked=now,
        metrics=metrics,
    )
