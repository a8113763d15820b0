"""`submit --only-errors`: the quarantined rows of a complete job as the input of another job.

The input rows are read again from where they came, with their own types, and lie in one Parquet
file below the new output. Each keeps its id, hence its noise: a row whose cause is mended gets
the text that it would have had. A row is replayed with all of its samples.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from eagle_batch.data.describe import prepare
from eagle_batch.data.forms import Form, make_form
from eagle_batch.data.plan import Plan
from eagle_batch.data.prompts import Prompter
from eagle_batch.data.rows import RowReader
from eagle_batch.data.schema import ERROR_SCHEMA
from eagle_batch.errors import DROPS, ConfigError, LedgerError
from eagle_batch.job.layers import made_layer
from eagle_batch.job.ledger import Identity, latest, read_identity, read_records
from eagle_batch.job.objects import DATA, ERRORS, data_key, errors_key, read_table
from eagle_batch.job.store import LocalStore, Store, open_store
from eagle_batch.job.tasks import Task
from eagle_batch.pipeline import Input, Pipeline

INPUT = "_job/replay.parquet"
#: What a replay's output is called after the output that it replays.
SUFFIX = "-replay"


def replay(pipeline: Pipeline) -> Pipeline | None:
    """Return the pipeline of the replay, its input written; None where nothing is quarantined.

    Raises LedgerError when the output of the pipeline is not complete, ConfigError when its input
    is not what it was.
    """
    whole = open_store(pipeline.output.path)
    old = made_layer(whole, layers=pipeline.deduplicate is not None)
    new = open_store(pipeline.output.path.rstrip("/") + SUFFIX)
    identity = read_identity(old)
    form = make_form(pipeline.output)
    failed = {task: _failed_ids(old, form, task) for task in _with_errors(old, form, identity)}
    if not failed:
        return None
    # One that is there was written by an earlier start of this replay, which goes on.
    if new.get(INPUT) is None:
        plan, prompter = prepare(pipeline)
        _same_input(old, identity, plan)
        new.put_new(INPUT, _encode(pipeline, _selected(pipeline, plan, prompter, failed)))
    return _derived(pipeline, new)


def _with_errors(store: Store, form: Form, identity: Identity) -> list[Task]:
    """Return the tasks of a complete job that have quarantined rows, from its records alone."""
    listed = store.list(DATA)
    records = latest(read_records(store))
    tasks = list(identity.tasks)
    for task in tasks:  # grows by the parts of closed tasks while we go
        if data_key(task.key, form) not in listed or task.key not in records:
            raise LedgerError(
                f"{store.name}: not complete ({task.key} is missing); submit the pipeline without "
                "--only-errors first"
            )
        tasks += records[task.key].parts
    return [task for task in tasks if records[task.key].quarantined]


def _failed_ids(store: Store, form: Form, task: Task) -> frozenset[str]:
    key = errors_key(task.key, form)
    data = store.get(key)
    if data is None:
        raise LedgerError(f"{store.name}: {key} is gone; `eagle-batch verify` it")
    rows = read_table(form, key, data, ERROR_SCHEMA).select(["id", "reason"]).to_pylist()
    return frozenset(row["id"] for row in rows if row["reason"] not in DROPS)


def _same_input(store: Store, identity: Identity, plan: Plan) -> None:
    if identity.inputs != plan.inputs:
        raise ConfigError(
            f"input.path: the input is not the one of {store.name}; its quarantined rows "
            f"({ERRORS}/, column row) can be submitted as an input of their own"
        )


def _selected(
    pipeline: Pipeline, plan: Plan, prompter: Prompter, failed: dict[Task, frozenset[str]]
) -> Iterator[tuple[list[str], pa.Table]]:
    """Yield ids and input rows of each task that has quarantined ones."""
    reader = RowReader(pipeline, plan, prompter.stages)
    for task, ids in failed.items():
        rows = reader.read(plan.shards[task.shard], task.start, task.stop)
        places = [place for place, name in enumerate(rows.ids) if name in ids]
        yield [rows.ids[place] for place in places], rows.table.take(places)


def _encode(pipeline: Pipeline, found: Iterator[tuple[list[str], pa.Table]]) -> bytes:
    ids: list[str] = []
    tables: list[pa.Table] = []
    for names, table in found:
        ids += names
        tables.append(table)
    rows = pa.concat_tables(tables)
    if pipeline.input.id is None:
        rows = rows.add_column(0, pa.field("id", pa.string()), [pa.array(ids, pa.string())])
    sink = io.BytesIO()
    pq.write_table(rows, sink)
    return sink.getvalue()


def _derived(pipeline: Pipeline, new: Store) -> Pipeline:
    root = str(Path(new.root).resolve()) if isinstance(new, LocalStore) else new.root
    # How rows were found and chosen is behind them: only what they are to carry along is left.
    source = Input(
        path=(f"{root}/{INPUT}",),
        format="parquet",
        id=pipeline.input.id or "id",
        columns=pipeline.input.columns,
    )
    # These rows were counted against the limit before.
    limits = pipeline.limits.model_copy(update={"max_error_rate": 1.0})
    output = pipeline.output.model_copy(update={"path": new.root})
    return pipeline.model_copy(update={"input": source, "limits": limits, "output": output})
