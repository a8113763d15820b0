"""The whole pipeline file, and the way from YAML to a Pipeline.

Defaults are settled in the sections and nowhere else; nothing changes a Pipeline afterwards.
Unknown keys are errors, and all errors of a file are reported together.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError

from eagle_batch.errors import ConfigError
from eagle_batch.pipeline.base import Section
from eagle_batch.pipeline.locations import locate, locate_model
from eagle_batch.pipeline.loops import loop_rules
from eagle_batch.pipeline.model import Speculation, Target
from eagle_batch.pipeline.modules import look_beside
from eagle_batch.pipeline.overrides import Key, apply_overrides
from eagle_batch.pipeline.problems import Rule, explain_problems
from eagle_batch.pipeline.result import Output
from eagle_batch.pipeline.running import EngineOptions, Limits, Workers
from eagle_batch.pipeline.source import Input
from eagle_batch.pipeline.stage import Stage
from eagle_batch.pipeline.strict_yaml import read_yaml
from eagle_batch.pipeline.vllm import vllm_rules
from eagle_batch.pipeline.whole_set import Decontaminate, Deduplicate

#: Columns of every output row; neither a stage nor a source column may take these names.
OUTPUT_COLUMNS = ("id", "sample", "generation", "model", "head", "token_ids", "logprobs", "spans")

#: The name under which a template sees its whole row, for columns that are no identifiers.
ROW_VARIABLE = "row"

#: The name under which a stage in a loop sees the number of its turn, from 1.
TURN_VARIABLE = "turn"


class Pipeline(Section):
    """A whole pipeline file, checked and complete."""

    _sections = ("speculation", "engine", "workers", "limits")

    name: str = Field(
        pattern=r"^[a-z0-9][a-z0-9._-]*$",
        max_length=100,
        description="Name of the pipeline: a-z, 0-9, '.', '_' and '-'.",
    )
    seed: int = Field(default=0, ge=0, le=2**63 - 1, description="Seed of all sampling.")
    input: Input = Field(description="The data set to read.")
    target: Target = Field(description="The model that generates.")
    speculation: Speculation = Field(description="How tokens are drafted.")
    stages: Annotated[tuple[Stage, ...], Field(min_length=1, strict=False)] = Field(
        description="Generations over each row, in order; a later stage sees the earlier texts."
    )
    samples: int = Field(default=1, ge=1, le=100_000, description="Output rows for each input row.")
    deduplicate: Deduplicate | None = Field(
        default=None, description="Leave out rows that say the same as an earlier one."
    )
    decontaminate: Decontaminate | None = Field(
        default=None, description="Leave out rows that share a run of words with given texts."
    )
    engine: EngineOptions = Field(default=EngineOptions(), description="Size of one engine.")
    workers: Workers = Field(default=Workers(), description="Number and size of the workers.")
    output: Output = Field(description="Where the results go.")
    limits: Limits = Field(default=Limits(), description="When the job gives up.")

    def _rules(self) -> list[tuple[bool, Rule]]:
        names = [stage.name for stage in self.stages]
        rules = [rule for i, name in enumerate(names) for rule in _stage_name_rules(names, i, name)]
        context = self.target.context
        for i, stage in enumerate(self.stages):
            limit = stage.sampling.max_tokens
            text = (
                f"found {limit} and {context}; expected max_tokens below the context, which also "
                "holds the prompt; lower max_tokens or raise the context"
            )
            keys = (f"stages.{i}.sampling.max_tokens", "target.context")
            rules.append((context is not None and limit >= context, (keys, text)))
        rules += loop_rules(self.stages)
        if self.engine.kind == "vllm":
            samplings = [stage.sampling for stage in self.stages]
            rules += vllm_rules(self.engine, self.workers, self.speculation, samplings)
        return rules + self._whole_set_rules(names)

    def _whole_set_rules(self, names: list[str]) -> list[tuple[bool, Rule]]:
        looked_at = self.decontaminate.stages if self.decontaminate is not None else ()
        kinds = {stage.name: stage.keep for stage in self.stages}
        unknown = [name for name in looked_at if name not in names]
        on = self.deduplicate.column if self.deduplicate is not None else ""
        return [
            (
                bool(unknown),
                (
                    ("decontaminate.stages",),
                    f"found {', '.join(unknown)}; expected stages: {', '.join(names)}",
                ),
            ),
            (
                kinds.get(on) == "all",
                (
                    ("deduplicate.column",),
                    f"found {on!r}, a list of texts; expected one text a row",
                ),
            ),
        ]


def _stage_name_rules(names: list[str], index: int, name: str) -> list[tuple[bool, Rule]]:
    reserved = (*OUTPUT_COLUMNS, ROW_VARIABLE)
    first = names.index(name)
    taken = f"found {name!r}, which is taken by the output; choose a name other than "
    twice = f"found {name!r} twice; expected a different name for each stage"
    return [
        (name in reserved, ((f"stages.{index}.name",), taken + ", ".join(reserved))),
        (first < index, ((f"stages.{index}.name", f"stages.{first}.name"), twice)),
    ]


def load_pipeline(path: str | Path, overrides: Sequence[str] = ()) -> Pipeline:
    """Read a pipeline file, apply `--set` overrides and resolve its relative paths.

    Raises ConfigError with every problem of the file, each naming the file and the dotted key.
    """
    source = str(path)
    data = read_yaml(Path(path), source, "a pipeline (name, input, target, stages, output)")
    changed, set_keys = apply_overrides(data, overrides)
    pipeline = parse_pipeline(changed, source, set_keys)
    return settle_paths(pipeline, Path(path).resolve().parent)


def parse_pipeline(data: Any, source: str, set_keys: Sequence[Key] = ()) -> Pipeline:
    """Check plain data, such as what `resolved` returned; paths are taken as they are.

    Raises ConfigError with every problem, each naming `source` and the dotted key.
    """
    try:
        return Pipeline.model_validate(data)
    except ValidationError as error:
        raise ConfigError(explain_problems(error, Pipeline, data, source, set_keys)) from error


def settle_paths(pipeline: Pipeline, folder: Path) -> Pipeline:
    """Return the pipeline with absolute paths: inputs by the file's folder, the output by ours.

    Modules that it names and that lie in the folder can be imported from then on.
    """
    look_beside(pipeline, folder)
    head, draft = pipeline.speculation.head, pipeline.speculation.draft
    inputs = tuple(locate(path, folder) for path in pipeline.input.path)
    changes = {
        "input": pipeline.input.model_copy(update={"path": inputs}),
        "target": pipeline.target.model_copy(
            update={"model": locate_model(pipeline.target.model, folder)}
        ),
        "speculation": pipeline.speculation.model_copy(
            update={
                "head": None if head is None else locate(head, folder),
                "draft": None if draft is None else locate_model(draft, folder),
            }
        ),
        "decontaminate": _settled(pipeline.decontaminate, folder),
        "output": pipeline.output.model_copy(
            update={"path": locate(pipeline.output.path, Path.cwd())}
        ),
    }
    return pipeline.model_copy(update=changes)


def _settled(section: Decontaminate | None, folder: Path) -> Decontaminate | None:
    if section is None:
        return None
    return section.model_copy(update={"against": tuple(locate(p, folder) for p in section.against)})
