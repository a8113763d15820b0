"""The plan of a job: which rows make which shard. Deciding is pure; `plan` reads what it needs."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby

import numpy as np
import pyarrow as pa

from eagle_batch.data.choosing import Chosen, choose
from eagle_batch.data.contamination import identities
from eagle_batch.data.groups import Group
from eagle_batch.data.numbers import Numbers
from eagle_batch.data.selection import Counts, SelectedReader, Selection, first_rows, row_hashes
from eagle_batch.data.sources import DataSet, InputFile, survey
from eagle_batch.errors import DataError
from eagle_batch.pipeline import Pipeline
from eagle_batch.pipeline.fingerprint import InputIdentity, fingerprint
from eagle_batch.pipeline.problems import suggestion

_SHOWN = 5
EVERY_ROW = Selection()
NO_ROWS = Counts(0)

#: (file, group) of the input.
Place = tuple[int, int]


@dataclass(frozen=True, slots=True)
class ShardSpec:
    """Rows [start, stop) of those taken from one group; they make one object of the output."""

    index: int
    #: Name of the objects: "part-00000".
    key: str
    #: Index into `Plan.files`.
    file: int
    row_group: int
    start: int
    stop: int
    #: Number, in its file, of the first row of the group.
    group_row: int

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
    #: Which rows of a group are taken; [start, stop) of a shard counts those alone.
    selection: Selection = EVERY_ROW
    #: What became of the rows that are in no shard.
    counts: Counts = NO_ROWS
    #: Files that are no input, and still decide which rows come out.
    beside: tuple[InputIdentity, ...] = ()
    #: What the target is known by; see `identity.target_identity`.
    target: str = ""

    @property
    def inputs(self) -> tuple[InputIdentity, ...]:
        """Every file that the rows depend on."""
        return tuple(file.identity for file in self.files) + self.beside

    @property
    def unplanned(self) -> int:
        """Rows beyond `input.limit`, in the files that were opened."""
        return self.counts.seen - self.counts.filtered - self.counts.unsampled - self.rows

    @property
    def schema(self) -> pa.Schema:
        """Columns of the input."""
        return pa.ipc.read_schema(pa.BufferReader(base64.b64decode(self.schema_ipc)))

    def account(self) -> str:
        """Say what became of the input's rows that are in no shard; empty where there are none."""
        parts = (
            (self.counts.filtered, "dropped by input.where"),
            (self.counts.unsampled, "left out by input.sample"),
            (self.unplanned, "beyond input.limit"),
        )
        named = ", ".join(f"{rows:,} {why}" for rows, why in parts if rows)
        seen = f"{self.counts.seen:,} rows in the input"
        return f"{seen}: {self.rows:,} planned, {named}" if named else ""

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
            selection = Selection(**data.pop("selection", {}))
            counts = Counts(**data.pop("counts", {"seen": data["rows"]}))
            beside = tuple(InputIdentity(**item) for item in data.pop("beside", ()))
            return cls(
                files=files,
                shards=shards,
                selection=selection,
                counts=counts,
                beside=beside,
                **data,
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"this is no plan of eagle-batch: {error!r}") from error


def plan(pipeline: Pipeline) -> Plan:
    """Find the input, check the ids of its rows and divide it into shards.

    Raises DataError when files, columns or ids are not what the pipeline says.
    """
    return make_plan(pipeline, survey(pipeline))


def make_plan(pipeline: Pipeline, data: DataSet, target: str = "") -> Plan:
    """Return the plan for an input that was surveyed; `target` is the identity of the model.

    Reads the id column and the columns of `input.where`, one group at a time, and nothing else.
    """
    chosen = choose(pipeline, data)
    files, source = chosen.data.files, pipeline.input
    order = shuffled_groups(files, pipeline.seed) if source.shuffle else None
    shards = lay_out(files, pipeline.output.rows_per_shard, source.limit, order)
    if not shards:
        raise DataError(_no_rows(pipeline, chosen.counts))
    check_ids(pipeline, chosen, shards)
    beside = identities(pipeline.decontaminate)
    return Plan(
        fingerprint=fingerprint(pipeline, [*(file.identity for file in files), *beside], target),
        files=files,
        shards=shards,
        rows=sum(shard.rows for shard in shards),
        schema_ipc=base64.b64encode(data.schema.serialize()).decode(),
        selection=chosen.selection,
        counts=chosen.counts,
        beside=beside,
        target=target,
    )


def _no_rows(pipeline: Pipeline, counts: Counts) -> str:
    names = ", ".join(pipeline.input.path)
    if not counts.seen:
        return f"input.path: {names}: holds no rows; expected at least one"
    if counts.filtered == counts.seen:
        where = f"input.where: {pipeline.input.where!r}"
        return f"{where} holds for none of {counts.seen} rows; expected at least one"
    return f"input.sample: {pipeline.input.sample} takes none of {counts.seen} rows; raise it"


def shuffled_groups(files: Sequence[InputFile], seed: int) -> list[Place]:
    """Return the groups of all files as (file, group), in an order that follows from the seed."""
    places: list[Place] = []
    hashes: list[int] = []
    for number, file in enumerate(files):
        groups = np.arange(len(file.groups), dtype=np.int64)
        hashes += row_hashes(seed, "groups", file.name, groups).tolist()
        places += [(number, int(group)) for group in groups]
    return [place for _, place in sorted(zip(hashes, places, strict=True))]


def lay_out(
    files: Sequence[InputFile],
    rows_per_shard: int,
    limit: int | None = None,
    order: Sequence[Place] | None = None,
) -> tuple[ShardSpec, ...]:
    """Divide the first `limit` rows into shards that each lie in one group; every row once.

    `order` is that of the groups; without it, it is that of the input. Shards of a group stay
    neighbours, so that a worker reads a group once.
    """
    places = order if order is not None else _in_order(files)
    ranges = list(_ranges(files, rows_per_shard, limit, places))
    digits = max(5, len(str(len(ranges) - 1)))
    return tuple(
        ShardSpec(index, f"part-{index:0{digits}}", *where) for index, where in enumerate(ranges)
    )


def _in_order(files: Sequence[InputFile]) -> list[Place]:
    return [
        (number, group) for number, file in enumerate(files) for group in range(len(file.groups))
    ]


def _ranges(
    files: Sequence[InputFile], rows_per_shard: int, limit: int | None, places: Sequence[Place]
) -> Iterator[tuple[int, int, int, int, int]]:
    """Yield (file, group, start, stop, number of the group's first row in its file)."""
    left = limit
    starts = [first_rows(file.groups) for file in files]
    for number, group in places:
        taken = files[number].groups[group].taken
        rows = taken if left is None else min(taken, left)
        for start in range(0, rows, rows_per_shard):
            stop = min(start + rows_per_shard, rows)
            yield number, group, start, stop, int(starts[number][group])
        left = None if left is None else left - rows


def check_ids(pipeline: Pipeline, chosen: Chosen, shards: Sequence[ShardSpec]) -> None:
    """Raise DataError unless the id column exists and names every row once."""
    name = pipeline.input.id
    if name is None:
        return
    problem = id_column_problem(name, chosen.data.schema)
    if problem:
        raise DataError(problem)
    seen = Numbers()
    for group in _id_groups(name, chosen, shards):
        seen.add(group)
    repeated = seen.repeated(lambda: _id_groups(name, chosen, shards), _SHOWN + 1)
    if repeated:
        raise DataError(
            f"input.id: column {name!r} names {_repeated(repeated)}; expected unique ids"
        )


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


def _id_groups(name: str, chosen: Chosen, shards: Sequence[ShardSpec]) -> Iterator[list[str]]:
    """Yield the ids of the planned rows, group by group."""
    data = chosen.data
    reader = SelectedReader(chosen.selection, data.schema, [name])
    for (number, group), some in groupby(shards, lambda shard: (shard.file, shard.row_group)):
        file = data.files[number]
        table, rows = reader.group(file, group)
        assert table is not None
        *_, last = some
        column = table.column(name).slice(0, last.stop)
        if column.null_count:
            place = column.is_null().to_pylist().index(True)
            raise DataError(
                f"input.id: column {name!r} is null, first in {file.path} row "
                f"{last.group_row + int(rows[place])}; expected an id in every row"
            )
        yield texts_of(name, column)


def texts_of(name: str, column: pa.ChunkedArray) -> list[str]:
    """Return ids as Python texts; raises DataError for one that is not UTF-8."""
    ids = as_text(column)
    try:
        ids.validate(full=True)
    except pa.ArrowInvalid as error:
        raise DataError(f"input.id: column {name!r} holds an id that is not UTF-8") from error
    found: list[str] = ids.to_pylist()
    return found


def _repeated(ids: Sequence[str]) -> str:
    shown = ", ".join(repr(item) for item in ids[:_SHOWN])
    more = " and more" if len(ids) > _SHOWN else ""
    return f"more than one row with the id {shown}{more}"


def _listed(names: Sequence[str], limit: int = 20) -> str:
    shown = ", ".join(repr(name) for name in names[:limit])
    return shown + (f" and {len(names) - limit} more" if len(names) > limit else "")


def _file_from(item: dict[str, object]) -> InputFile:
    groups = item.pop("groups")
    assert isinstance(groups, list)
    return InputFile(groups=tuple(Group(**group) for group in groups), **item)  # type: ignore[arg-type]
