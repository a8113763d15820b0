"""Everything a worker needs to know before it gets its first lease."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from eagle_batch.data.plan import Plan
from eagle_batch.data.weights import fetch_hub, fetch_url, node_lock
from eagle_batch.engine.request import (
    DEFAULT_BRANCH,
    DEFAULT_SLOTS,
    Completion,
    EngineMetrics,
    EngineSpec,
    Request,
)
from eagle_batch.errors import ModelError
from eagle_batch.pipeline import Pipeline
from eagle_batch.pipeline.fingerprint import COMMIT
from eagle_batch.pipeline.locations import DEMO_PREFIX, is_demo, is_hub_id, is_url


class AddedToken(Protocol):
    """A token that is found in a text before the text is cut into others."""

    @property
    def content(self) -> str:
        """How it is written."""

    @property
    def special(self) -> bool:
        """Whether texts are decoded without it."""


class Tokenizer(Protocol):
    """The part of a tokenizer that a worker uses."""

    @property
    def all_special_ids(self) -> Sequence[int]:
        """Ids of special tokens that have a name: the end, the padding."""

    @property
    def all_special_tokens(self) -> Sequence[str]:
        """How they are written in prompts, in the same order."""

    @property
    def added_tokens_decoder(self) -> Mapping[int, AddedToken]:
        """Added tokens by id, special ones without a name among them.

        Raises NotImplementedError where the kind of tokenizer cannot tell.
        """

    def encode(self, text: str, *, add_special_tokens: bool) -> Sequence[int]:
        """Return the token ids of a text."""

    def decode(
        self,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool,
        clean_up_tokenization_spaces: bool,
    ) -> str:
        """Return the text of token ids."""


class EngineLike(Protocol):
    """The part of an engine that a worker uses; tests bring a quick one."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The target's tokenizer."""

    @property
    def slots(self) -> int:
        """Rows that are decoded together at most."""

    @property
    def sizing(self) -> str:
        """Why there are so many slots, for people."""

    @property
    def waiting(self) -> int:
        """Requests that have no slot yet."""

    @property
    def has_work(self) -> bool:
        """Whether `step` would do anything."""

    def add(self, request: Request) -> None:
        """Queue a request; raises RequestError when the row can never run."""

    def step(self) -> list[Completion]:
        """Do one piece of work; return what finished."""

    def metrics(self) -> EngineMetrics:
        """Return the counters since the engine was built."""

    def use_head(self, name: str) -> None:
        """Draft with another head from now on; for engines that were built to adapt."""


EngineFactory = Callable[[EngineSpec], EngineLike]


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """What is the same for every worker of a job; pickled once for each."""

    pipeline: Pipeline
    plan: Plan
    #: Unix time of the job's first start: the clock of chat templates that print a date.
    started: float
    device: str
    #: CPU threads of the engine; None leaves torch's choice.
    threads: int | None
    build: EngineFactory
    #: Folders of the user's own modules.
    modules: tuple[str, ...] = ()


def engine_spec(spec: WorkerSpec) -> EngineSpec:
    """Return what a worker's engine is built from; see `pipeline_engine_spec`."""
    return pipeline_engine_spec(_pinned(spec), device=spec.device, threads=spec.threads)


def _pinned(spec: WorkerSpec) -> Pipeline:
    """Return the pipeline with the commit that was planned; the branch of a hub id may move."""
    known, target = spec.plan.target, spec.pipeline.target
    if not known.startswith(COMMIT):
        return spec.pipeline
    pinned = target.model_copy(update={"revision": known.removeprefix(COMMIT)})
    return spec.pipeline.model_copy(update={"target": pinned})


def _slots(pipeline: Pipeline) -> int:
    """Return the slots that are asked for, the default where the engine is to choose."""
    slots = pipeline.engine.slots
    return DEFAULT_SLOTS if slots == "auto" else slots


def pipeline_engine_spec(pipeline: Pipeline, *, device: str, threads: int | None) -> EngineSpec:
    """Return what a pipeline's engine is built from, names resolved on the machine that asks.

    Raises ConfigError where a demo target or head is not on this machine.
    """
    tree = pipeline.speculation
    options = EngineSpec(
        model=_model(pipeline),
        head=_head(tree.head),
        revision=pipeline.target.revision,
        dtype=pipeline.target.dtype,
        device=device,
        gpus=_gpus(pipeline, device),
        slots=_slots(pipeline),
        fit_slots=pipeline.engine.slots == "auto",
        context=pipeline.target.context,
        prefill_chunk=pipeline.engine.prefill_chunk,
        threads=threads,
        kind=pipeline.engine.kind,
        tensor_parallel=pipeline.engine.tensor_parallel,
    )
    return replace(
        options,
        tree=tree.tree,
        depth=tree.depth,
        width=tree.width,
        nodes=tree.nodes,
        paths=tree.paths or (),
        auto=tree.method in {"auto", "ngram"},
        # vllm does not leave out a draft that does not pay, so that it must be asked for.
        ngram=tree.head is None
        and tree.draft is None
        and tree.method in ({"auto", "ngram"} if pipeline.engine.kind == "own" else {"ngram"}),
        branch=_branch(pipeline),
        draft=None if tree.draft is None else _resolved(tree.draft),
        adapt=tree.adapt is not None,
    )


def _branch(pipeline: Pipeline) -> int:
    """Return the nodes of an n-gram branch; where shapes are chosen, it is a choice by default."""
    speculation = pipeline.speculation
    if speculation.ngram_branch is not None:
        return speculation.ngram_branch
    beside = speculation.head or speculation.draft or speculation.adapt
    chosen = speculation.method == "auto" and pipeline.engine.kind == "own"
    return DEFAULT_BRANCH if beside is not None and chosen else 0


def _gpus(pipeline: Pipeline, device: str) -> int:
    """Return over how many devices our engine puts the target's layers."""
    gpus = pipeline.workers.gpus
    splits = device == "cuda" and pipeline.engine.kind == "own" and gpus != "auto"
    return max(1, int(gpus)) if splits else 1


def build_real_engine(spec: EngineSpec) -> EngineLike:
    """Build the engine that generates; loads torch, which nothing else on the job's side does."""
    if spec.kind == "vllm":
        from eagle_batch.engine.peer import build_vllm_engine

        return build_vllm_engine(spec)
    from eagle_batch.engine.build import build_engine

    return build_engine(spec)


def _model(pipeline: Pipeline) -> str:
    return _resolved(pipeline.target.model, pipeline.target.revision)


def _resolved(name: str, revision: str | None = None) -> str:
    """Return the folder of a target on this node, fetched at most once for all its workers."""
    if is_demo(name):
        from eagle_batch import demo

        return str(demo.resolve(name.removeprefix(DEMO_PREFIX)))
    if is_url(name):
        return str(fetch_url(name))
    if Path(name).is_dir() or not is_hub_id(name):
        return name
    try:
        return str(fetch_hub(name, revision))
    except Exception as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise ModelError(f"{name!r} cannot be had from the hub: {reason}") from error


def _head(name: str | None) -> str | None:
    if name is None:
        return None
    if is_demo(name):
        from eagle_batch import demo

        return str(demo.head_path(name.removeprefix(DEMO_PREFIX)))
    if Path(name).is_dir():
        return name
    from eagle_batch.models.headfiles import resolve_head

    with node_lock(f"head-{hashlib.sha256(name.encode()).hexdigest()[:16]}"):
        return str(resolve_head(name))
