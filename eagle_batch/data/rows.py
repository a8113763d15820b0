"""The rows of a shard, read by the worker that will complete them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from eagle_batch.data.plan import Plan, ShardSpec, as_text
from eagle_batch.data.schema import passthrough_columns
from eagle_batch.data.selection import SelectedReader
from eagle_batch.data.templates import StageTemplate
from eagle_batch.data.values import value_at
from eagle_batch.errors import Reason, RequestError
from eagle_batch.pipeline import Pipeline


@dataclass(frozen=True, slots=True)
class Rows:
    """Consecutive input rows, with their ids."""

    ids: tuple[str, ...]
    #: Columns that are passed through or used by a template.
    table: pa.Table
    #: Columns that templates use.
    used: tuple[str, ...]

    def values(self, row: int) -> dict[str, object]:
        """Return what templates see of a row.

        Raises RequestError (invalid_text) where a value cannot be turned into a Python object, such
        as text that is not UTF-8.
        """
        return {name: self._value(name, row) for name in self.used}

    def row_json(self, row: int) -> str:
        """Return a row as JSON for the error table; what JSON does not have is written as text."""
        values = {name: self._shown(name, row) for name in self.table.column_names}
        text = json.dumps(values, ensure_ascii=False, default=str)
        return text.encode("utf-8", "replace").decode()

    def _value(self, name: str, row: int) -> Any:
        try:
            return value_at(self.table.column(name), row)
        except (ValueError, OverflowError, LookupError, pa.ArrowException) as error:
            message = f"column {name!r}: {error}"
            raise RequestError(Reason.INVALID_TEXT, message) from error

    def _shown(self, name: str, row: int) -> Any:
        try:
            return self._value(name, row)
        except RequestError as error:
            return f"<{error.message}>"


class RowReader:
    """Reads the rows of shards of one plan."""

    def __init__(self, pipeline: Pipeline, plan: Plan, stages: Sequence[StageTemplate]) -> None:
        self._plan = plan
        self._schema = plan.schema
        self._id = pipeline.input.id
        names = self._schema.names
        used = {name for stage in stages for name in stage.columns(names)}
        kept = {*passthrough_columns(pipeline, self._schema), *([self._id] if self._id else [])}
        self._used = tuple(name for name in names if name in used)
        self._columns = tuple(name for name in names if name in used | kept)
        self._reader = SelectedReader(plan.selection, self._schema, self._columns)

    def read(self, shard: ShardSpec, start: int = 0, stop: int | None = None) -> Rows:
        """Return rows [start, stop) of a shard; raises DataError when the file cannot be read."""
        stop = shard.rows if stop is None else stop
        file = self._plan.files[shard.file]
        table, places = self._reader.group(file, shard.row_group)
        first, last = shard.start + start, shard.start + stop
        part = _no_columns(last - first) if table is None else table.slice(first, last - first)
        if self._id is not None:
            return Rows(tuple(as_text(part.column(self._id)).to_pylist()), part, self._used)
        ids = derived_ids(file.name, shard.group_row, places[first:last])
        return Rows(ids, part, self._used)


def derived_ids(name: str, group_row: int, places: npt.NDArray[np.int64]) -> tuple[str, ...]:
    """Return the ids of rows that no column names: the file, and the row's number in it."""
    return tuple(f"{name}:{row}" for row in (group_row + places).tolist())


def _no_columns(rows: int) -> pa.Table:
    """Return a table of rows without columns."""
    return pa.table({"": pa.nulls(rows)}).select([])
