"""What a pipeline would do: all its problems at once, or a summary; starts and writes nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import fsspec

from eagle_batch.data.beside import contamination_problems, duplicate_problems
from eagle_batch.data.chat import ChatTemplate, model_folder
from eagle_batch.data.checks import check_stages
from eagle_batch.data.drafts import draft_problems
from eagle_batch.data.forms import make_form
from eagle_batch.data.identity import target_identity
from eagle_batch.data.partitions import column_problems
from eagle_batch.data.plan import Plan, make_plan
from eagle_batch.data.prompts import Prompter, load_chat, uses_chat
from eagle_batch.data.rows import RowReader
from eagle_batch.data.schema import output_schema, schema_problems
from eagle_batch.data.sources import DataSet, InputFile, survey
from eagle_batch.data.templates import StageTemplate, compile_stages
from eagle_batch.data.typed import untyped_reason
from eagle_batch.data.where import RowFilter
from eagle_batch.engine.grammars import grammar_problem
from eagle_batch.errors import ConfigError, RequestError
from eagle_batch.pipeline import Pipeline
from eagle_batch.pipeline.locations import is_url


@dataclass(frozen=True, slots=True)
class PlanSummary:
    """What `eagle-batch plan` prints."""

    name: str
    fingerprint: str
    files: tuple[InputFile, ...]
    #: Input rows, and output rows: `rows` times `samples`.
    rows: int
    samples: int
    output_rows: int
    shards: int
    #: Rows of the largest shard.
    rows_per_shard: int
    stages: tuple[str, ...]
    #: Prompt of the first row in the first stage, or why it has none.
    first_prompt: str
    #: (stage, prompt) of the later stages for that row; what is not written yet stands as <name>.
    later_prompts: tuple[tuple[str, str], ...]
    output_columns: tuple[tuple[str, str], ...]
    output_path: str
    #: Keys of the first and the last data object below the output.
    first_key: str
    last_key: str
    workers: str
    #: What became of rows of the input that are in no shard; empty where all are in one.
    account: str
    #: Things that are allowed and perhaps not meant.
    notes: tuple[str, ...]


def check(pipeline: Pipeline) -> tuple[str, ...]:
    """Check what can be checked without starting; raises ConfigError with all problems.

    Returns remarks: things that are allowed and perhaps not meant.
    """
    _, prompter = prepare(pipeline)
    return tuple(_notes(pipeline, prompter))


def prepare(pipeline: Pipeline) -> tuple[Plan, Prompter]:
    """Check a pipeline and return its plan and prompts; raises ConfigError with all problems."""
    problems: list[str] = []
    stages: tuple[StageTemplate, ...] = ()
    chat: ChatTemplate | None = None
    with _collecting(problems):
        stages = compile_stages(pipeline.stages)
    with _collecting(problems):
        check_stages(stages)
    target = ""
    with _collecting(problems):
        chat = _chat(pipeline)
        target = target_identity(pipeline)
    prompter = Prompter(stages, chat)
    problems += prompter.problems()
    problems += _grammar_problems(pipeline)
    problems += contamination_problems(pipeline)
    problems += [*draft_problems(pipeline), *_output_problems(pipeline)]
    with _collecting(problems):
        data = survey(pipeline)
        problems += _column_problems(pipeline, data, stages)
        if not any(problem.startswith("input.where: ") for problem in problems):
            plan = make_plan(pipeline, data, target)
    if problems:
        raise ConfigError(dict.fromkeys(problems))
    return plan, prompter


def _chat(pipeline: Pipeline) -> ChatTemplate | None:
    if uses_chat(pipeline):
        return load_chat(pipeline)
    model_folder(pipeline.target.model, pipeline.target.revision)  # It must be there all the same.
    return None


def describe(pipeline: Pipeline) -> PlanSummary:
    """Return what the pipeline would do; raises ConfigError with all its problems."""
    plan, prompter = prepare(pipeline)
    schema = output_schema(pipeline, plan.schema)
    prompts = _first_prompts(pipeline, plan, prompter)
    form = make_form(pipeline.output)
    return PlanSummary(
        name=pipeline.name,
        fingerprint=plan.fingerprint,
        files=plan.files,
        rows=plan.rows,
        samples=pipeline.samples,
        output_rows=plan.rows * pipeline.samples,
        shards=len(plan.shards),
        rows_per_shard=max(shard.rows for shard in plan.shards),
        stages=tuple(stage.name for stage in pipeline.stages),
        first_prompt=prompts[0],
        later_prompts=tuple(zip([s.name for s in pipeline.stages[1:]], prompts[1:], strict=True)),
        output_columns=tuple((field.name, str(field.type)) for field in schema),
        output_path=pipeline.output.path,
        first_key=f"data/{plan.shards[0].key}{form.ending}",
        last_key=f"data/{plan.shards[-1].key}{form.ending}",
        workers=_workers(pipeline),
        account=plan.account(),
        notes=tuple(_notes(pipeline, prompter)),
    )


@contextmanager
def _collecting(problems: list[str]) -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        problems.extend(error.problems)


def _column_problems(
    pipeline: Pipeline, data: DataSet, stages: tuple[StageTemplate, ...]
) -> list[str]:
    names = [stage.name for stage in pipeline.stages]
    problems = schema_problems(pipeline, data.schema)
    for template in stages:
        problems += template.problems(data.schema.names, names)
    if not problems:
        problems += duplicate_problems(pipeline, data.schema)
        problems += column_problems(
            pipeline.output.partition_by, output_schema(pipeline, data.schema)
        )
    return problems + _filter_problems(pipeline, data)


def _filter_problems(pipeline: Pipeline, data: DataSet) -> list[str]:
    where = pipeline.input.where
    return [] if where is None else RowFilter(where).problems(data.schema.names)


def _grammar_problems(pipeline: Pipeline) -> Iterator[str]:
    for index, stage in enumerate(pipeline.stages):
        structured = None if stage.structured is None else stage.structured.request
        problem = None if structured is None else grammar_problem(structured)
        if structured is not None and problem:
            yield f"stages.{index}.structured.{structured.kind}: cannot be compiled: {problem}"


def _output_problems(pipeline: Pipeline) -> list[str]:
    path = pipeline.output.path
    if is_url(path):
        return _store_problems(path)
    nearest = next(place for place in (Path(path), *Path(path).parents) if place.exists())
    if not nearest.is_dir():
        return [f"output.path: {nearest} is a file; expected a folder, existing or new"]
    if not os.access(nearest, os.W_OK | os.X_OK):
        return [f"output.path: {nearest} is not writable; choose a folder that you may write to"]
    return []


def _store_problems(path: str) -> list[str]:
    try:
        fsspec.core.url_to_fs(path)
    except (ValueError, ImportError, OSError) as error:
        return [f"output.path: {path}: {error}"]
    return []


def _first_prompts(pipeline: Pipeline, plan: Plan, prompter: Prompter) -> list[str]:
    """Return the prompt of the first row in each stage, in the first turn of a loop."""
    nothing_passed = pipeline.input.model_copy(update={"columns": ()})
    lean = pipeline.model_copy(update={"input": nothing_passed})
    rows = RowReader(lean, plan, prompter.stages).read(plan.shards[0], 0, 1)
    names = [stage.name for stage in pipeline.stages]
    prompts = []
    for index, template in enumerate(prompter.stages):
        texts = {name: f"<{name}>" for name in names[:index]}
        try:
            seen = template.begins(rows.values(0), names) | texts
            prompts.append(prompter.render(index, seen))
        except RequestError as error:
            why = "it depends on what earlier stages write" if index else str(error.reason)
            prompts.append(f"(row {rows.ids[0]} has no prompt: {why}: {error.message})")
    return prompts


def _workers(pipeline: Pipeline) -> str:
    workers = pipeline.workers
    count = "one for each GPU" if workers.count == "auto" else str(workers.count)
    gpus = "a GPU if there is one" if workers.gpus == "auto" else f"{workers.gpus:g} GPUs"
    return f"{count}, each with {workers.cpus:g} CPUs and {gpus}"


def _notes(pipeline: Pipeline, prompter: Prompter) -> Iterator[str]:
    if pipeline.samples > 1 and all(s.sampling.is_greedy for s in pipeline.stages):
        yield (
            f"samples: {pipeline.samples} samples at temperature 0 are all the same text; "
            "raise stages.*.sampling.temperature or set samples: 1"
        )
    for index, stage in enumerate(pipeline.stages):
        reason = untyped_reason(stage)
        if reason is not None:
            yield (
                f"stages.{index}.structured.json_schema: {reason}, so column {stage.name!r} holds "
                "the JSON as text"
            )
    if prompter.chat is not None and prompter.chat.uses_clock:
        yield "target.model: its chat template may print today's date into every prompt"
