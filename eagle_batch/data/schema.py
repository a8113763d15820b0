"""The declared schemas of the output and of the error table, and tables that have exactly them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import pyarrow as pa

from eagle_batch.data.forms import Form, make_form
from eagle_batch.data.typed import column_type, column_values
from eagle_batch.errors import Reason
from eagle_batch.pipeline import OUTPUT_COLUMNS, Pipeline
from eagle_batch.pipeline.problems import suggestion

GENERATION = pa.struct(
    [
        pa.field("stage", pa.string()),
        pa.field("prompt_tokens", pa.int32()),
        pa.field("completion_tokens", pa.int32()),
        pa.field("finish_reason", pa.string()),
        pa.field("target_passes", pa.int32()),
        pa.field("drafted", pa.int32()),
        pa.field("accepted", pa.int32()),
        pa.field("acceptance_length", pa.float32()),
        pa.field("seed", pa.int64()),
        pa.field("turn", pa.int32()),
        pa.field("candidate", pa.int32()),
        pa.field("attempt", pa.int32()),
        pa.field("kept", pa.bool_()),
        pa.field("score", pa.float32()),
    ]
)
TOKEN_IDS = pa.struct(
    [
        pa.field("stage", pa.string()),
        pa.field("prompt", pa.list_(pa.int32())),
        pa.field("ids", pa.list_(pa.int32())),
    ]
)
#: What goes with `ids`, token by token; the last two where best ones are asked for.
CHOSEN = (pa.field("stage", pa.string()), pa.field("chosen", pa.list_(pa.float32())))
BEST = (
    pa.field("best_ids", pa.list_(pa.list_(pa.int32()))),
    pa.field("best", pa.list_(pa.list_(pa.float32()))),
)

#: `characters` alternate: drafted, then the target's own, of each pass; their sum is the text.
SPANS = pa.struct([pa.field("stage", pa.string()), pa.field("characters", pa.list_(pa.int32()))])

ERROR_SCHEMA = pa.schema(
    [
        pa.field("id", pa.string()),
        pa.field("sample", pa.int32()),
        pa.field("stage", pa.string()),
        pa.field("reason", pa.string()),
        pa.field("message", pa.string()),
        pa.field("attempt", pa.int32()),
        pa.field("row", pa.string()),
    ]
)


@dataclass(frozen=True, slots=True)
class Generation:
    """How one text came about; an item of the `generation` column."""

    stage: str
    prompt_tokens: int
    completion_tokens: int
    finish_reason: str
    target_passes: int
    drafted: int
    accepted: int
    acceptance_length: float
    #: Address of the completion's noise.
    seed: int
    #: Turn of the stage's loop, candidate, and times that it was tried before; all from 0.
    turn: int = 0
    candidate: int = 0
    attempt: int = 0
    #: Whether the text is in the output, and what it was chosen by.
    kept: bool = True
    score: float | None = None


@dataclass(frozen=True, slots=True)
class TokenIds:
    """What the target read and wrote for one text; an item of the `token_ids` column."""

    stage: str
    prompt: tuple[int, ...]
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """How likely the target held the tokens of one text; an item of the `logprobs` column."""

    stage: str
    chosen: tuple[float, ...]
    #: For each token the ids of the best ones at its place, best first, and theirs.
    best_ids: tuple[tuple[int, ...], ...] = ()
    best: tuple[tuple[float, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class OutputRow:
    """One finished row: texts in the order of the stages, and every generation it took."""

    id: str
    sample: int
    #: Position of the input row in the table that is passed through.
    row: int
    texts: tuple[str | list[str] | None, ...]
    generation: tuple[Generation, ...]
    #: The head that drafted when it was finished.
    head: str | None = None
    #: Token ids of each text that is kept; only with output.token_ids.
    token_ids: tuple[TokenIds, ...] = ()
    #: Log-probabilities of each text that is kept; only with output.logprobs.
    logprobs: tuple[TokenLogprobs, ...] = ()
    #: Stage and characters, drafted and the target's own in turn; only with output.spans.
    spans: tuple[tuple[str, tuple[int, ...]], ...] = ()


@dataclass(frozen=True, slots=True)
class ErrorRow:
    """One quarantined row."""

    id: str
    sample: int
    stage: str
    reason: Reason
    message: str
    attempt: int
    #: The input row as JSON.
    row: str


def passthrough_columns(pipeline: Pipeline, source: pa.Schema) -> tuple[str, ...]:
    """Return the source columns that the output repeats; an id column named `id` becomes ours."""
    chosen = source.names if pipeline.input.columns is None else pipeline.input.columns
    ours = {"id"} if pipeline.input.id == "id" else set()
    return tuple(name for name in chosen if name not in ours)


def output_schema(pipeline: Pipeline, source: pa.Schema) -> pa.Schema:
    """Return the schema of every data object; the same for shards of no rows or only nulls."""
    fields = [pa.field("id", pa.string()), pa.field("sample", pa.int32())]
    fields += [source.field(name) for name in passthrough_columns(pipeline, source)]
    fields += [pa.field(stage.name, column_type(stage)) for stage in pipeline.stages]
    fields += [
        pa.field("generation", pa.list_(GENERATION)),
        pa.field("model", pa.string()),
        pa.field("head", pa.string()),
    ]
    if pipeline.output.token_ids:
        fields.append(pa.field("token_ids", pa.list_(TOKEN_IDS)))
    if pipeline.output.logprobs:
        fields.append(pa.field("logprobs", _logprobs_type(pipeline)))
    if pipeline.output.spans:
        fields.append(pa.field("spans", pa.list_(SPANS)))
    return pa.schema(fields)


def output_table(pipeline: Pipeline, rows: Sequence[OutputRow], source: pa.Table) -> pa.Table:
    """Return finished rows as a table of `output_schema`; `source` holds the input rows."""
    passed = passthrough_columns(pipeline, source.schema)
    taken = source.select(list(passed)).take(pa.array([row.row for row in rows], pa.int64()))
    schema = output_schema(pipeline, source.schema)
    columns: dict[str, pa.Array | pa.ChunkedArray] = {
        "id": pa.array([row.id for row in rows], pa.string()),
        "sample": pa.array([row.sample for row in rows], pa.int32()),
        "generation": pa.array(
            [[asdict(item) for item in row.generation] for row in rows], pa.list_(GENERATION)
        ),
        "model": pa.array([pipeline.target.model] * len(rows), pa.string()),
        "head": pa.array([row.head for row in rows], pa.string()),
    }
    for index, stage in enumerate(pipeline.stages):
        columns[stage.name] = column_values(stage, [row.texts[index] for row in rows])
    columns |= dict(zip(passed, taken.columns, strict=True))
    if pipeline.output.token_ids:
        ids = [[asdict(item) for item in row.token_ids] for row in rows]
        columns["token_ids"] = pa.array(ids, pa.list_(TOKEN_IDS))
    if pipeline.output.logprobs:
        items = [[asdict(item) for item in row.logprobs] for row in rows]
        columns["logprobs"] = pa.array(items, _logprobs_type(pipeline))
    if pipeline.output.spans:
        spans = [
            [{"stage": stage, "characters": list(numbers)} for stage, numbers in row.spans]
            for row in rows
        ]
        columns["spans"] = pa.array(spans, pa.list_(SPANS))
    return pa.Table.from_arrays([columns[name] for name in schema.names], schema=schema)


def error_table(rows: Sequence[ErrorRow]) -> pa.Table:
    """Return quarantined rows as a table of `ERROR_SCHEMA`."""
    return pa.Table.from_pylist([asdict(row) for row in rows], schema=ERROR_SCHEMA)


def schema_problems(pipeline: Pipeline, source: pa.Schema) -> list[str]:
    """Return one line for each column that is missing, has a name of ours or cannot be written."""
    chosen = source.names if pipeline.input.columns is None else pipeline.input.columns
    missing = [name for name in chosen if name not in source.names]
    lines = [_missing(name, source.names) for name in missing]
    lines += [
        f"input.columns: {name!r} is named twice; expected each column once"
        for name in dict.fromkeys(chosen)
        if list(chosen).count(name) > 1
    ]
    if lines:
        return lines
    passed = passthrough_columns(pipeline, source)
    lines = [_taken(name) for name in passed if name in OUTPUT_COLUMNS]
    for index, stage in enumerate(pipeline.stages):
        if stage.name in source.names:
            lines.append(
                f"stages.{index}.name: found {stage.name!r}, which is a column of the input; "
                "choose another name"
            )
    return lines + _unwritable(make_form(pipeline.output), source, passed)


def _logprobs_type(pipeline: Pipeline) -> pa.DataType:
    return pa.list_(pa.struct([*CHOSEN, *(BEST if pipeline.output.best_tokens else ())]))


def _missing(name: str, known: Sequence[str]) -> str:
    shown = ", ".join(repr(item) for item in known[:20]) + (", ..." if len(known) > 20 else "")
    return (
        f"input.columns: found {name!r}, which is no column; {suggestion(name, known)}"
        f"expected one of {shown}"
    )


def _taken(name: str) -> str:
    line = (
        f"input.columns: the input has a column {name!r}, a name that the output needs for itself; "
        "list the columns to pass through without it, or rename it"
    )
    return line + (" (or set input.id: id, if it names the rows)" if name == "id" else "")


def _unwritable(form: Form, source: pa.Schema, passed: Sequence[str]) -> list[str]:
    """Try all columns at once, and each alone only if that fails."""
    fields = [source.field(name) for name in passed]
    if form.problem(pa.schema(fields)) is None:
        return []
    found = [(field, form.problem(pa.schema([field]))) for field in fields]
    return [
        f"input.columns: column {field.name!r} of type {field.type} cannot be written to "
        f"{form.name} ({problem}); list the columns to pass through without it"
        for field, problem in found
        if problem
    ]
