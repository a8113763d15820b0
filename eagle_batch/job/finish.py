"""Taking out duplicates: from the objects that the workers made to those that readers find.

Shard by shard in the order of the plan. Each row's fate depends on the rows before it, hence a
finish that was cut short reads everything again and puts only what is not there yet; what it puts
is what it would have put then.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from eagle_batch.data.forms import Form, make_form
from eagle_batch.data.schema import ERROR_SCHEMA, ErrorRow, error_table
from eagle_batch.errors import LedgerError, Reason
from eagle_batch.job.job import Job, JobResult, Watcher
from eagle_batch.job.layers import finished_layer
from eagle_batch.job.ledger import COMMITS, METRICS, Ledger, latest, next_number, read_records
from eagle_batch.job.objects import DATA, Objects, data_key, find, read_table
from eagle_batch.job.store import Store
from eagle_batch.job.tasks import Commit, Lease, Task
from eagle_batch.pipeline import Deduplicate
from eagle_batch.stages.duplicates import Duplicates, make_duplicates

#: Columns of a row that do not go into the error table's JSON.
_NOT_SHOWN = ("generation", "token_ids", "logprobs", "spans", "model", "head")


@dataclass(frozen=True, slots=True)
class Sifted:
    """One shard without its duplicates."""

    task: Task
    rows: pa.Table
    errors: pa.Table
    tokens: int
    parts: tuple[Task, ...]


def finish(
    job: Job, ledger: Ledger, store: Store, result: JobResult, watcher: Watcher
) -> JobResult:
    """Write what is left when duplicates are taken out; `store` is the whole output.

    Raises StoreError, or LedgerError when something else lies at the place of an object.
    """
    section = job.pipeline.deduplicate
    assert section is not None
    final, form = finished_layer(store), make_form(job.pipeline.output)
    known = latest(read_records(final))
    listed = final.list(DATA)
    if not known or any(data_key(key, form) not in listed for key in known):
        watcher.say(f"taking out duplicates of {section.column}")
        known = _write(job, ledger, final, section, listed)
    return _counted(final, result, tuple(known.values()))


def sift(
    store: Store, form: Form, tasks: tuple[Task, ...], section: Deduplicate
) -> Iterator[Sifted]:
    """Yield every shard of the made layer, parts of closed ones included, without duplicates."""
    duplicates = make_duplicates(section)
    kept: list[tuple[str, int]] = []
    for task in tasks:
        yield from _sift(store, form, task, section, duplicates, kept)


def _sift(
    store: Store,
    form: Form,
    task: Task,
    section: Deduplicate,
    duplicates: Duplicates,
    kept: list[tuple[str, int]],
) -> Iterator[Sifted]:
    key = data_key(task.key, form)
    found = find(store, form, key)
    if found is None:
        raise LedgerError(f"{store.name}: {key} is gone; run the job again")
    if found.errors is None:
        raise LedgerError(f"{key}: the errors object that it carries was changed")
    errors = read_table(form, key, found.errors, ERROR_SCHEMA)
    rows, errors = (table.replace_schema_metadata(None) for table in (found.table, errors))
    mask, dropped = _judge(rows, section, duplicates, kept)
    tokens = found.footer.tokens - _tokens(rows.filter(pc.invert(mask)))
    left = pa.concat_tables([errors, error_table(dropped)])
    yield Sifted(task, rows.filter(mask), left, tokens, found.footer.parts)
    for part in found.footer.parts:
        yield from _sift(store, form, part, section, duplicates, kept)


def _judge(
    rows: pa.Table, section: Deduplicate, duplicates: Duplicates, kept: list[tuple[str, int]]
) -> tuple[pa.Array, list[ErrorRow]]:
    """Return which rows stay, and the error rows of the others."""
    names = zip(rows["id"].to_pylist(), rows["sample"].to_pylist(), strict=True)
    mask: list[bool] = []
    dropped: list[ErrorRow] = []
    for place, (name, text) in enumerate(zip(names, rows[section.column].to_pylist(), strict=True)):
        number = None if text is None else duplicates.add(text)
        mask.append(number is None)
        if number is not None:
            dropped.append(_error(rows, place, section.column, name, kept[number]))
        elif text is not None:
            kept.append(name)
    return pa.array(mask, pa.bool_()), dropped


def _error(
    rows: pa.Table, place: int, column: str, name: tuple[str, int], first: tuple[str, int]
) -> ErrorRow:
    shown = [each for each in rows.column_names if each not in _NOT_SHOWN]
    [row] = rows.select(shown).slice(place, 1).to_pylist()
    return ErrorRow(
        id=name[0],
        sample=name[1],
        stage=column,
        reason=Reason.DUPLICATE,
        message=f"{column} repeats that of id {first[0]!r}, sample {first[1]}",
        attempt=1,
        row=json.dumps(row, ensure_ascii=False, default=str),
    )


def _tokens(rows: pa.Table) -> int:
    items: Any = rows["generation"].combine_chunks().flatten()
    return int(pc.sum(pc.struct_field(items, "completion_tokens")).as_py() or 0)


def _write(
    job: Job, ledger: Ledger, final: Store, section: Deduplicate, listed: dict[str, int]
) -> dict[str, Commit]:
    form = make_form(job.pipeline.output)
    objects = Objects(final, job.plan.fingerprint, form, job.pipeline.samples)
    commits: dict[str, Commit] = {}
    for shard in sift(ledger.store, form, ledger.identity.tasks, section):
        ledger.tend()
        if objects.data_key(shard.task) in listed:
            commit = objects.settle(shard.task, exclusive=ledger.exclusive)
        else:
            lease = Lease(shard.task, 1, "finish", ledger.exclusive)
            commit = objects.put(lease, shard.rows, shard.errors, shard.tokens, shard.parts)
        commits[commit.key] = commit
    number = next_number(final.list(COMMITS))
    lines = "".join(json.dumps(asdict(commit)) + "\n" for commit in commits.values())
    final.put_new(f"{COMMITS}/{number:06d}-finish.jsonl", lines.encode())
    return commits


def _counted(store: Store, result: JobResult, commits: tuple[Commit, ...]) -> JobResult:
    """Return the result with the numbers of what is left, which the metrics get too."""
    rows = sum(commit.rows for commit in commits)
    dropped = sum(commit.dropped for commit in commits)
    counts = {"rows": rows, "dropped": dropped}
    metrics = None
    if result.metrics is not None:
        metrics = {**result.metrics, **counts}
        stored = json.loads(store.get(METRICS) or b"{}")
        store.put_replace(METRICS, json.dumps({**stored, **counts}).encode())
    return replace(result, rows=rows, dropped=dropped, metrics=metrics)
