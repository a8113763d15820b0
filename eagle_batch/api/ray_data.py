"""An output as a Ray Dataset, and generation inside a Ray Data program."""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa

from eagle_batch.data.plan import as_text, plan
from eagle_batch.data.schema import output_schema
from eagle_batch.errors import ConfigError
from eagle_batch.job.local import LocalWorker
from eagle_batch.job.spec import EngineFactory, build_real_engine
from eagle_batch.job.store import open_store
from eagle_batch.job.tasks import Task
from eagle_batch.pipeline import Pipeline
from eagle_batch.report.output import read_table

#: Why a row has no texts; null in rows that have them.
ERROR = "error"


class Generate:
    """A pipeline as a callable class for `map_batches`: one engine for each actor.

    A row gets the text that a job of this pipeline gives it, whatever the batches: its noise has
    the row's id as its address, hence `input.id` is needed. A row that a job would quarantine has
    null texts and the reason in the column `error`.

        rows.map_batches(Generate, fn_constructor_args=(pipeline,), batch_format="pyarrow")
    """

    def __init__(
        self, pipeline: Pipeline, device: str = "auto", build: EngineFactory = build_real_engine
    ) -> None:
        """Check the pipeline; the engine is built with the first batch.

        `input.path` is not read. Raises ConfigError where rows would not be what a job makes.
        """
        _refuse_selection(pipeline)
        self._pipeline = pipeline
        self._build = build
        self._device = device
        self._worker: LocalWorker | None = None

    def __call__(self, batch: pa.Table) -> pa.Table:
        """Return the output rows of a batch of input rows, in their order."""
        name = f"memory://eagle-batch-{uuid.uuid4().hex}.arrow"
        source = self._pipeline.input.model_copy(update={"path": (name,), "format": "arrow"})
        pipeline = self._pipeline.model_copy(update={"input": source})
        fs = fsspec.filesystem("memory")
        with fs.open(name, "wb") as file, pa.ipc.new_stream(file, batch.schema) as writer:
            writer.write_table(batch.combine_chunks())
        try:
            planned = plan(pipeline)
            tasks = [Task(shard.key, shard.index, 0, shard.rows) for shard in planned.shards]
            made = self._local().make(pipeline, planned, tasks)
        finally:
            fs.rm(name.removeprefix("memory:/"))
        return _with_errors(pipeline, batch, made.rows, made.errors)

    def _local(self) -> LocalWorker:
        if self._worker is None:
            device = self._device
            if device == "auto":
                from eagle_batch.engine.build import default_device

                device = default_device()
            self._worker = LocalWorker(self._build, device, self._pipeline.engine.threads)
        return self._worker


def _refuse_selection(pipeline: Pipeline) -> None:
    problems = []
    if pipeline.input.id is None:
        problems.append("input.id: found null; expected the column that names a row")
    if pipeline.input.selects or pipeline.input.limit is not None:
        problems.append(
            "input.where, sample, shuffle and limit: expected none of them; filter, sample or "
            "limit the Ray Dataset"
        )
    if problems:
        raise ConfigError(problems)


def _with_errors(pipeline: Pipeline, batch: pa.Table, rows: pa.Table, errors: pa.Table) -> pa.Table:
    """Add the quarantined rows, with their own columns and no texts, in the order of the batch."""
    names = as_text(batch.column(pipeline.input.id)).to_pylist()
    place = {name: number for number, name in enumerate(names)}
    schema = output_schema(pipeline, batch.schema)
    passed = [name for name in schema.names if name in batch.column_names and name != "id"]
    lost = errors.to_pylist()
    source = batch.select(passed).take(pa.array([place[row["id"]] for row in lost], pa.int64()))
    columns: dict[str, Any] = {
        name: pa.nulls(len(lost), schema.field(name).type) for name in schema.names
    }
    columns |= dict(zip(passed, source.columns, strict=True))
    columns |= {"id": errors.column("id"), "sample": errors.column("sample")}
    reasons = [f"{row['reason']}: {row['message']}" for row in lost]
    both = pa.concat_tables(
        [
            rows.append_column(ERROR, pa.nulls(rows.num_rows, pa.string())),
            pa.table(columns, schema=schema).append_column(ERROR, pa.array(reasons, pa.string())),
        ]
    )
    keys = zip(both.column("id").to_pylist(), both.column("sample").to_pylist(), strict=True)
    order = sorted(
        range(both.num_rows), key=[(place[name], sample) for name, sample in keys].__getitem__
    )
    return both.take(pa.array(order, pa.int64()))


def read_shards(root: str, keys: Sequence[str], *, local: bool) -> Any:
    """Return objects of an output as a Ray Dataset; Ray itself reads those that it can."""
    import ray.data

    if local:
        root = str(Path(root).resolve())
    if not all(key.endswith(".parquet") for key in keys):
        shards = ray.data.from_items([{"key": key} for key in keys])
        return shards.map_batches(partial(_rows_of, root), batch_size=1, batch_format="pyarrow")
    if local:
        return ray.data.read_parquet([f"{root}/{key}" for key in keys])
    fs, path = fsspec.core.url_to_fs(root)
    paths = [f"{path}/{key}" for key in keys]
    return ray.data.read_parquet(paths, filesystem=pa.fs.PyFileSystem(pa.fs.FSSpecHandler(fs)))


def _rows_of(root: str, shard: pa.Table) -> pa.Table:
    """Return the rows of the one shard that a table names; called in a task of Ray's."""
    [key] = shard.column("key").to_pylist()
    return read_table(open_store(root), key).replace_schema_metadata(None)


def refuse_running_ray() -> None:
    """Raise ConfigError where this process is a Ray program already."""
    if "ray" not in sys.modules or os.environ.get("RAY_ADDRESS"):
        return
    import ray

    if ray.is_initialized():
        raise ConfigError(
            "Ray runs in this process already, and a job starts its own; use eagle_batch.Generate "
            "in your Ray program, call ray.shutdown() first, or set RAY_ADDRESS"
        )
