"""The pipeline file: strict typed models, their defaults, and the way from YAML to a Pipeline.

Defaults are settled here and nowhere else; nothing changes a Pipeline afterwards. Unknown keys are
errors, and all errors of a file are reported together.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from eagle_batch.errors import ConfigError
from eagle_batch.fingerprint import InputIdentity, explain_difference, fingerprint, resolved
from eagle_batch.locations import locate, locate_model
from eagle_batch.overrides import Key, apply_overrides
from eagle_batch.problems import Rule, broken_rules, explain_problems
from eagle_batch.strict_yaml import read_yaml

__all__ = [
    "OUTPUT_COLUMNS",
    "ROW_VARIABLE",
    "EngineOptions",
    "Input",
    "InputIdentity",
    "Limits",
    "Message",
    "Output",
    "Pipeline",
    "Sampling",
    "Speculation",
    "Stage",
    "Target",
    "Workers",
    "explain_difference",
    "fingerprint",
    "load_pipeline",
    "parse_pipeline",
    "resolved",
]

#: Columns of every output row; neither a stage nor a source column may take these names.
OUTPUT_COLUMNS = ("id", "sample", "generation", "model", "head", "token_ids")

#: The name under which a template sees its whole row, for columns that are no identifiers.
ROW_VARIABLE = "row"

Count = Annotated[int, Field(ge=1, le=1_000_000)]
Strings = Annotated[tuple[str, ...], Field(strict=False)]


def _as_list(value: object) -> object:
    return (value,) if isinstance(value, str) else value


class _Model(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, hide_input_in_errors=True
    )
    #: Fields that hold a model and may be left out.
    _sections: ClassVar[tuple[str, ...]] = ()

    @model_validator(mode="before")
    @classmethod
    def _fill_sections(cls, data: Any) -> Any:
        """Take a section that is left out, or left empty, as one of defaults only."""
        if not isinstance(data, dict):
            return data
        empty: dict[str, Any] = {key: {} for key in cls._sections if data.get(key) is None}
        return {**data, **empty} if empty else data

    def _rules(self) -> list[tuple[bool, Rule]]:
        """Return each rule between fields as (is it broken, (keys, sentence))."""
        return []

    @model_validator(mode="after")
    def _check_rules(self) -> Self:
        broken = [rule for is_broken, rule in self._rules() if is_broken]
        if broken:
            raise broken_rules(broken)
        return self


class Input(_Model):
    """Where the rows come from."""

    path: Annotated[
        tuple[Annotated[str, Field(min_length=1)], ...],
        Field(
            min_length=1,
            strict=False,
            description="File, folder, glob or URL, or a list; relative to the pipeline file.",
        ),
        BeforeValidator(_as_list),
    ]
    format: Literal["auto", "parquet", "arrow", "jsonl"] = Field(
        default="auto", description="Format of the files; auto goes by their names."
    )
    id: str | None = Field(
        default=None,
        description="Column that names a row; null derives '<file name>:<row number>'.",
    )
    columns: Strings | None = Field(
        default=None, description="Source columns that are passed through; null passes all."
    )
    limit: int | None = Field(
        default=None, ge=1, description="Take the first N rows; null takes all."
    )


class Target(_Model):
    """The model that writes the text."""

    model: str = Field(
        min_length=1,
        description="'demo:<name>', a local folder (relative to the pipeline file) or a hub id.",
    )
    revision: str | None = Field(default=None, description="Branch, tag or commit of a hub id.")
    dtype: Literal["float32", "bfloat16", "float16"] = Field(
        default="float32", description="Number format of weights and activations."
    )
    context: int | None = Field(
        default=None,
        ge=16,
        le=1_048_576,
        description="Most tokens of prompt and completion; null: the model's limit, at most 2048.",
    )


RankPath = Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(strict=False, min_length=1)]


def _is_tree(paths: tuple[tuple[int, ...], ...]) -> bool:
    known = {(), *paths}
    return bool(paths) and all(path[:-1] in known for path in paths)


class Speculation(_Model):
    """How tokens are drafted; it changes the speed, never the text."""

    method: Literal["auto", "eagle", "ngram", "none"] = Field(
        default="auto",
        description="auto measures while it runs and takes the draft that pays, or none: of the "
        "head, or of n-grams without one; eagle drafts in the shape given below; ngram takes what "
        "followed the same tokens earlier in the row; none decodes plainly.",
    )
    head: Annotated[str, Field(min_length=1)] | None = Field(
        default=None,
        description="Folder of the EAGLE head (relative to the pipeline file) or 'demo:<name>'; "
        "null with the methods ngram and none, allowed with auto.",
    )
    tree: Literal["dynamic", "static", "chain"] = Field(
        default="dynamic",
        description="Shape of the draft: dynamic (EAGLE-2), static (EAGLE-1) or chain.",
    )
    depth: int = Field(default=4, ge=1, le=32, description="Drafted levels below the root.")
    width: int = Field(default=4, ge=1, le=64, description="Children considered for each node.")
    nodes: int = Field(
        default=12,
        ge=1,
        le=1024,
        description="Drafted nodes for each row and round, the root excluded.",
    )
    paths: Annotated[tuple[RankPath, ...], Field(strict=False)] | None = Field(
        default=None,
        description="Paths of a static tree by child ranks, such as [0], [1], [0, 0]; null takes "
        "the 25 nodes of EAGLE-1.",
    )

    def _rules(self) -> list[tuple[bool, Rule]]:
        return [
            (
                self.method == "eagle" and self.head is None,
                (
                    ("head", "method"),
                    "found no head and method 'eagle'; name a head's folder or set method: none",
                ),
            ),
            (
                self.method == "auto" and self.tree == "static",
                (
                    ("tree", "method"),
                    "found static and auto, which chooses the tree itself; set method: eagle",
                ),
            ),
            (
                self.method in {"ngram", "none"} and self.head is not None,
                (
                    ("head", "method"),
                    f"found a head with {self.method!r}; remove the head or set method: auto",
                ),
            ),
            (
                self.paths is not None and self.tree != "static",
                (("paths", "tree"), f"found paths and tree {self.tree!r}; set tree: static"),
            ),
            (
                self.paths is not None and not _is_tree(self.paths),
                (
                    ("paths",),
                    "expected paths of ranks such as [0], [0, 0], each with its beginning listed",
                ),
            ),
            (
                self.head is not None and self.tree == "dynamic" and self.nodes < self.depth,
                (
                    ("nodes", "depth"),
                    f"found {self.nodes} and {self.depth}; expected at least one node a level",
                ),
            ),
        ]


class Message(_Model):
    """One chat message of a prompt."""

    role: Literal["system", "developer", "user", "assistant", "tool"] = Field(
        description="Who speaks."
    )
    content: str = Field(description="Jinja template of the text, over the row's columns.")


class Sampling(_Model):
    """How one completion is sampled; the defaults are greedy decoding."""

    temperature: float = Field(
        default=0.0, ge=0, le=100, description="0 chooses the most probable token; above 0 samples."
    )
    top_p: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="Keep the smallest set of tokens with this probability.",
    )
    top_k: int | None = Field(default=None, ge=1, description="Keep the k most probable tokens.")
    min_p: float | None = Field(
        default=None,
        ge=0,
        lt=1,
        description="Drop tokens below this share of the most probable one.",
    )
    max_tokens: Count = Field(default=128, description="Most tokens of one completion.")
    min_tokens: int = Field(
        default=0, ge=0, description="No end of sequence before this many tokens."
    )
    stop: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(strict=False)] = Field(
        default=(), description="Strings that end a completion; they are cut from the text."
    )
    stop_token_ids: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(strict=False)] = Field(
        default=(), description="Token ids that end a completion."
    )
    ignore_eos: bool = Field(
        default=False, description="Go on after the end of sequence, until max_tokens."
    )
    repetition_penalty: float = Field(
        default=1.0, gt=0, le=10, description="Above 1, tokens of prompt and text get less likely."
    )
    presence_penalty: float = Field(
        default=0.0, ge=-2, le=2, description="Subtracted for every token that the text holds."
    )
    frequency_penalty: float = Field(
        default=0.0, ge=-2, le=2, description="Subtracted each time that the text holds a token."
    )
    logit_bias: dict[int, float] = Field(
        default_factory=dict, description="Added to the logits of tokens, by token id."
    )

    def _rules(self) -> list[tuple[bool, Rule]]:
        return [
            (
                self.min_tokens > self.max_tokens,
                (
                    ("min_tokens", "max_tokens"),
                    f"found {self.min_tokens} and {self.max_tokens}; expected min <= max",
                ),
            )
        ]


class Stage(_Model):
    """One generation over each row; its text becomes a column."""

    _sections = ("sampling",)

    name: str = Field(
        pattern=r"^[a-z][a-z0-9_]*$",
        max_length=64,
        description="Output column of the stage: a-z, 0-9 and _, starting with a letter.",
    )
    messages: Annotated[tuple[Message, ...], Field(min_length=1, strict=False)] | None = Field(
        default=None, description="Chat messages, put through the model's chat template."
    )
    prompt: str | None = Field(
        default=None, description="Raw text as the prompt, instead of messages."
    )
    sampling: Sampling = Field(default=Sampling(), description="How the text is sampled.")

    def _rules(self) -> list[tuple[bool, Rule]]:
        found = "both" if self.messages is not None else "neither"
        return [
            (
                (self.messages is None) == (self.prompt is None),
                (
                    ("messages", "prompt"),
                    f"found {found}; expected exactly one of messages and prompt",
                ),
            )
        ]


class EngineOptions(_Model):
    """Size of one engine; it changes speed and memory, never the text."""

    slots: int = Field(
        default=16, ge=1, le=4096, description="Rows decoded together by one worker."
    )
    prefill_chunk: int = Field(
        default=512, ge=1, le=1_048_576, description="Most prompt tokens of one row in one pass."
    )
    threads: int | None = Field(
        default=None,
        ge=1,
        le=1024,
        description="CPU threads of one worker; null leaves torch's choice.",
    )


class Workers(_Model):
    """How many engines run, and what each needs."""

    count: Annotated[int, Field(ge=1, le=100_000)] | Literal["auto"] = Field(
        default="auto",
        description="Number of workers; auto takes one for each GPU, or one on the CPU.",
    )
    cpus: float = Field(
        default=1.0, gt=0, le=4096, description="CPU cores reserved for one worker."
    )
    gpus: Annotated[float, Field(ge=0, le=64)] | Literal["auto"] = Field(
        default="auto", description="GPUs of one worker; auto takes one where the cluster has any."
    )


class Output(_Model):
    """Where the rows go."""

    path: str = Field(
        min_length=1, description="Folder or URL of the output; relative to the working directory."
    )
    rows_per_shard: Count = Field(default=32, description="Most input rows of one output file.")
    compression: Literal["zstd", "snappy", "gzip", "lz4", "none"] = Field(
        default="zstd", description="Compression of the Parquet files."
    )
    token_ids: bool = Field(default=False, description="Also write the generated token ids.")


class Limits(_Model):
    """When a job gives up."""

    max_error_rate: float = Field(
        default=0.1,
        ge=0,
        le=1,
        description="Stop when more than this share of the rows is quarantined.",
    )
    worker_attempts: int = Field(
        default=3,
        ge=1,
        le=1000,
        description="Times that one worker is started before it is given up.",
    )
    shard_attempts: int = Field(
        default=3,
        ge=1,
        le=1000,
        description="Times that one shard is tried before its rows are isolated.",
    )
    stall_seconds: float = Field(
        default=600.0,
        gt=0,
        le=604_800,
        description="Replace a worker without progress for this many seconds.",
    )


class Pipeline(_Model):
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
        return rules


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
    return _settle_paths(pipeline, Path(path).resolve().parent)


def parse_pipeline(data: Any, source: str, set_keys: Sequence[Key] = ()) -> Pipeline:
    """Check plain data, such as what `resolved` returned; paths are taken as they are.

    Raises ConfigError with every problem, each naming `source` and the dotted key.
    """
    try:
        return Pipeline.model_validate(data)
    except ValidationError as error:
        raise ConfigError(explain_problems(error, Pipeline, data, source, set_keys)) from error


def _settle_paths(pipeline: Pipeline, folder: Path) -> Pipeline:
    """Return the pipeline with absolute paths: inputs by the file's folder, the output by ours."""
    head = pipeline.speculation.head
    inputs = tuple(locate(path, folder) for path in pipeline.input.path)
    changes = {
        "input": pipeline.input.model_copy(update={"path": inputs}),
        "target": pipeline.target.model_copy(
            update={"model": locate_model(pipeline.target.model, folder)}
        ),
        "speculation": pipeline.speculation.model_copy(
            update={"head": None if head is None else locate(head, folder)}
        ),
        "output": pipeline.output.model_copy(
            update={"path": locate(pipeline.output.path, Path.cwd())}
        ),
    }
    return pipeline.model_copy(update=changes)
