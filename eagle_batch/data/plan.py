"""The plan of a job: which rows make which shard. Deciding is pure; `plan` reads what it needs."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import pyarrow as pa
import pyarrow.compute as pc

from eagle_batch.data.groups import Group
from eagle_batch.data.sources import DataSet, InputFile, read_rows, survey
from eagle_batch.errors import DataError
from eagle_batch.pipeline import Pipeline
from eagle_batch.pipeline.fingerprint import fingerprint
from eagle_batch.pipeline.problems import suggestion

_SHOWN = 5


@dataclass(frozen=True, slots=True)
class ShardSpec:
    """Rows [start, stop) of one group of one file; they make one object of the output."""

    index: int
    #: Name of the objects: "part-00000".
    key: str
    #: Index into `Plan.files`.
    file: int
    row_group: int
    start: int
    stop: int
    #: Number, in its file, of the shard's first row.
    first_row: int

    @property
    def rows(self) -> int:
        """Input rows of the shard."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Plan:
    """All that a worker needs to know about the input."""

    fingerprint: str
    files: tuple[InputFile, ...]
    shards: tuple[ShardSpec, ...]
    rows: int
    #: The input's schema, serialised by Arrow, in base64.
    schema_ipc: str

    @property
    def schema(self) -> pa.Schema:
        """Columns of the input."""
        return pa.ipc.read_schema(pa.BufferReader(base64.b64decode(self.schema_ipc)))

    def to_json(self) -> str:
        """Return the plan as JSON text; `from_json` reads it."""
        return json.dumps(asdict(self), ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Return the plan that `to_json` wrote; raises ValueError for any other text."""
        try:
            data = json.loads(text)
            files = tuple(_file_from(item) for item in data.pop("files"))
            shards = tuple(ShardSpec(**item) for item in data.pop("shards"))
            return cls(files=files, shards=shards, **data)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"this is no plan of eagle-batch: {error!r}") from error


def plan(pipeline: Pipeline) -> Plan:
    """Find the input, check the ids of its rows and divide it into shards.

    Raises DataError when files, columns or ids are not what the pipeline says.
    """
    return make_plan(pipeline, survey(pipeline))


def make_plan(pipeline: Pipeline, data: DataSet) -> Plan:
    """Return the plan for an input that was surveyed; reads the id column and nothing else."""
    shards = lay_out(data.files, pipeline.output.rows_per_shard, pipeline.input.limit)
    if not shards:
        names = ", ".join(pipeline.input.path)
        raise DataError(f"input.path: {names}: holds no rows; expected at least one")
    check_ids(pipeline, data)
    return Plan(
        fingerprint=fingerprint(pipeline, [file.identity for file in data.files]),
        files=data.files,
        shards=shards,
        rows=sum(shard.rows for shard in shards),
        schema_ipc=base64.b64encode(data.schema.serialize()).decode(),
    )


def lay_out(
    files: Sequence[InputFile], rows_per_shard: int, limit: int | None = None
) -> tuple[ShardSpec, ...]:
    """Divide the first `limit` rows into shards that each lie in one group; every row once."""
    ranges = list(_ranges(files, rows_per_shard, limit))
    digits = max(5, len(str(len(ranges) - 1)))
    return tuple(
        ShardSpec(index, f"part-{index:0{digits}}", *where) for index, where in enumerate(ranges)
    )


def _ranges(
    files: Sequence[InputFile], rows_per_shard: int, limit: int | None
) -> Iterator[tuple[int, int, int, int, int]]:
    """Yield (file, group, start, stop, number of the first row in its file)."""
    left = limit
    for number, file in enumerate(files):
        before = 0
        for group_number, group in enumerate(file.groups):
            rows = group.rows if left is None else min(group.rows, left)
            for start in range(0, rows, rows_per_shard):
                stop = min(start + rows_per_shard, rows)
                yield number, group_number, start, stop, before + start
            before += group.rows
            left = None if left is None else left - rows


def check_ids(pipeline: Pipeline, data: DataSet) -> None:
    """Raise DataError unless the id column exists and names every row once."""
    name = pipeline.input.id
    if name is None:
        return
    problem = id_column_problem(name, data.schema)
    if problem:
        raise DataError(problem)
    arrays = list(_id_arrays(name, data, pipeline.input.limit))
    _refuse_null_ids(name, data, arrays)
    ids = pa.chunked_array([as_text(array) for array in arrays], pa.string())
    try:
        ids.validate(full=True)
    except pa.ArrowInvalid as error:
        raise DataError(f"input.id: column {name!r} holds an id that is not UTF-8") from error
    if pc.count_distinct(ids).as_py() < len(ids):
        raise DataError(f"input.id: column {name!r} names {_repeated(ids)}; expected unique ids")


def id_column_problem(name: str, schema: pa.Schema) -> str | None:
    """Return what is wrong with the id column's name or type, or None."""
    if name not in schema.names:
        return (
            f"input.id: found {name!r}, which is no column; {suggestion(name, schema.names)}"
            f"expected one of {_listed(schema.names)}, or null to derive ids"
        )
    kind = schema.field(name).type
    inner = kind.value_type if pa.types.is_dictionary(kind) else kind
    if pa.types.is_integer(inner) or pa.types.is_string(inner) or pa.types.is_large_string(inner):
        return None
    return (
        f"input.id: column {name!r} is {kind}; expected whole numbers or text, "
        "or null to derive ids"
    )


def as_text(array: pa.ChunkedArray | pa.Array) -> pa.Array:
    """Return ids as one array of strings."""
    kind = array.type
    plain = array.cast(kind.value_type) if pa.types.is_dictionary(kind) else array
    text = plain.cast(pa.string())
    return text.combine_chunks() if isinstance(text, pa.ChunkedArray) else text


def _id_arrays(name: str, data: DataSet, limit: int | None) -> Iterator[pa.ChunkedArray]:
    left = limit
    for file in data.files:
        for index in range(len(file.groups)):
            array = read_rows(file, index, data.schema, [name]).column(0).slice(0, left)
            left = None if left is None else left - len(array)
            yield array


def _refuse_null_ids(name: str, data: DataSet, arrays: Sequence[pa.ChunkedArray]) -> None:
    nulls = sum(array.null_count for array in arrays)
    if not nulls:
        return
    places = ((file, group) for file in data.files for group in range(len(file.groups)))
    for (file, group), array in zip(places, arrays, strict=True):
        if array.null_count:
            row = array.is_null().to_pylist().index(True)
            row += sum(item.rows for item in file.groups[:group])
            raise DataError(
                f"input.id: column {name!r} is null in {nulls} rows, first in {file.path} row {row}"
                "; expected an id in every row"
            )


def _repeated(ids: pa.ChunkedArray) -> str:
    counts = pc.value_counts(ids)
    repeated = [item["values"] for item in counts.to_pylist() if item["counts"] > 1]
    shown = ", ".join(repr(item) for item in repeated[:_SHOWN])
    more = f" and {len(repeated) - _SHOWN} more" if len(repeated) > _SHOWN else ""
    return f"more than one row with the id {shown}{more}"


def _listed(names: Sequence[str], limit: int = 20) -> str:
    shown = ", ".join(repr(name) for name in names[:limit])
    return shown + (f" and {len(names) - limit} more" if len(names) > limit else "")


def _file_from(item: dict[str, object]) -> InputFile:
    groups = item.pop("groups")
    assert isinstance(groups, list)
    return InputFile(groups=tuple(Group(**group) for group in groups), **item)  # type: ignore[arg-type]
