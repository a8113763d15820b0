"""The rows of a shard, read by the worker that will complete them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from eagle_batch.data.plan import Plan, ShardSpec, as_text
from eagle_batch.data.schema import passthrough_columns
from eagle_batch.data.sources import read_rows
from eagle_batch.data.templates import StageTemplate
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
        scalar = self.table.column(name)[row]
        try:
            return _rounded(scalar).as_py()
        except (ValueError, OverflowError, LookupError, pa.ArrowException) as error:
            message = f"column {name!r}: {error}"
            raise RequestError(Reason.INVALID_TEXT, message) from error

    def _shown(self, name: str, row: int) -> Any:
        try:
            return self._value(name, row)
        except RequestError as error:
            return f"<{error.message}>"


class RowReader:
    """Reads shards of one plan; keeps the last group, from which neighbouring shards come."""

    def __init__(self, pipeline: Pipeline, plan: Plan, stages: Sequence[StageTemplate]) -> None:
        self._plan = plan
        self._schema = plan.schema
        self._id = pipeline.input.id
        names = self._schema.names
        used = {name for stage in stages for name in stage.columns(names)}
        kept = {*passthrough_columns(pipeline, self._schema), *([self._id] if self._id else [])}
        self._used = tuple(name for name in names if name in used)
        self._columns = tuple(name for name in names if name in used | kept)
        self._held: tuple[int, int] | None = None
        self._table: pa.Table | None = None

    def read(self, shard: ShardSpec, start: int = 0, stop: int | None = None) -> Rows:
        """Return rows [start, stop) of a shard; raises DataError when the file cannot be read."""
        stop = shard.rows if stop is None else stop
        table = self._group(shard).slice(shard.start + start, stop - start)
        return Rows(self._ids(shard, table, start), table, self._used)

    def _group(self, shard: ShardSpec) -> pa.Table:
        place = (shard.file, shard.row_group)
        if self._table is None or self._held != place:
            self._table = None  # Two groups at once may be more than the memory holds.
            file = self._plan.files[shard.file]
            self._table = read_rows(file, shard.row_group, self._schema, self._columns)
            self._held = place
        return self._table

    def _ids(self, shard: ShardSpec, table: pa.Table, start: int) -> tuple[str, ...]:
        if self._id is not None:
            return tuple(as_text(table.column(self._id)).to_pylist())
        name, first = self._plan.files[shard.file].name, shard.first_row + start
        return tuple(f"{name}:{row}" for row in range(first, first + table.num_rows))


def _rounded(scalar: pa.Scalar) -> pa.Scalar:
    """Python's times end at microseconds; finer ones are cut for templates, not for the output."""
    kind = scalar.type
    if pa.types.is_timestamp(kind) and kind.unit == "ns":
        return scalar.cast(pa.timestamp("us", kind.tz), safe=False)
    if pa.types.is_duration(kind) and kind.unit == "ns":
        return scalar.cast(pa.duration("us"), safe=False)
    if pa.types.is_time(kind) and kind.bit_width == 64 and kind.unit == "ns":
        return scalar.cast(pa.time64("us"), safe=False)
    return scalar
