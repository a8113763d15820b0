"""Run the same prompts through several draft shapes, in turn, and count.

All shapes share one loaded target. They run one after the other, repetition by repetition, so that
a machine whose speed drifts slows all of them alike; ratios are what to read.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from eagle_batch.engine.build import Parts, assemble
from eagle_batch.engine.request import EngineMetrics, EngineSpec, Request, SamplingParams, noise_key

_N = "[1-9][0-9]*"
_DRAFT = re.compile(
    rf"(?P<bare>plain|auto|static)|ngram:(?P<alone>{_N})"
    rf"|(chain:(?P<levels>{_N})|dynamic:(?P<depth>{_N}),(?P<width>{_N}),(?P<nodes>{_N}))"
    rf"(\+(?P<branch>{_N}))?"
)


@dataclass(frozen=True, slots=True)
class DraftShape:
    """One way to draft; `tree` "none" is plain decoding."""

    tree: str
    depth: int = 0
    width: int = 0
    nodes: int = 0
    #: Most nodes of an n-gram branch beside a chain or a dynamic tree.
    branch: int = 0

    @property
    def name(self) -> str:
        """Short name for tables, as `parse` reads it."""
        if self.tree == "none":
            return "plain"
        if self.tree in {"static", "auto"}:
            return self.tree
        beside = f"+{self.branch}" if self.branch else ""
        if self.tree in {"chain", "ngram"}:
            return f"{self.tree}:{self.depth}{beside}"
        return f"{self.tree}:{self.depth},{self.width},{self.nodes}{beside}"

    @classmethod
    def parse(cls, text: str) -> DraftShape:
        """Read `plain`, `auto`, `static`, `chain:D`, `ngram:D` or `dynamic:DEPTH,WIDTH,NODES`.

        `+N` behind a chain or a dynamic tree is an n-gram branch of at most N nodes beside it.
        Raises ValueError on anything else.
        """
        found = _DRAFT.fullmatch(text)
        if found is None:
            raise ValueError(
                f"{text!r} is none of plain, auto, static, chain:DEPTH[+BRANCH], ngram:DEPTH, "
                "dynamic:DEPTH,WIDTH,NODES[+BRANCH]"
            )
        if found["bare"]:
            return PLAIN if found["bare"] == "plain" else cls(found["bare"])
        branch = int(found["branch"] or 0)
        if found["nodes"]:
            depth, width, nodes = (int(found[name]) for name in ("depth", "width", "nodes"))
            return cls("dynamic", depth, width, nodes, branch)
        tree, levels = text.split(":", maxsplit=1)[0], int(found["alone"] or found["levels"])
        return cls(tree, levels, 1, levels, branch)

    def applied(self, spec: EngineSpec, slots: int) -> EngineSpec:
        """Return a spec with this shape and so many slots."""
        if self.tree == "none":
            return replace(spec, head=None, draft=None, ngram=False, branch=0, slots=slots)
        if self.tree == "ngram":
            plain = replace(spec, head=None, draft=None, branch=0, slots=slots, auto=False)
            return replace(plain, ngram=True, depth=self.depth)
        if self.tree == "auto":
            # The pipeline's own sizes are the largest that are chosen from.
            return replace(spec, tree="dynamic", slots=slots, auto=True)
        spec = replace(spec, tree=self.tree, slots=slots, branch=self.branch, auto=False)
        if self.tree == "static":
            return spec
        spec = replace(spec, depth=self.depth)
        return replace(spec, width=self.width, nodes=self.nodes)


PLAIN = DraftShape("none")


@dataclass(frozen=True, slots=True)
class Measurement:
    """What one shape did at one batch size, over all repetitions."""

    shape: DraftShape
    batch: int
    tokens: int
    seconds: float
    metrics: EngineMetrics
    #: Rows whose tokens equal those of plain decoding, out of `rows`.
    identical: int
    rows: int

    @property
    def tokens_per_second(self) -> float:
        """Output tokens per second, prefill included."""
        return self.tokens / self.seconds


#: New tokens of each row of a warm-up.
_WARM_TOKENS = 4


@dataclass(slots=True)
class _Tally:
    tokens: int = 0
    seconds: float = 0.0
    metrics: EngineMetrics = field(default_factory=EngineMetrics)


def measure(  # noqa: PLR0913, PLR0917 - a workload and where it runs
    parts: Parts,
    spec: EngineSpec,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    shapes: Sequence[DraftShape],
    repeat: int,
    batch: int,
    say: Callable[[str], None] = lambda _: None,
) -> list[Measurement]:
    """Run every shape `repeat` times at one batch size; plain decoding is always the first."""
    shapes = [PLAIN, *(shape for shape in shapes if shape != PLAIN)]
    tallies = {shape: _Tally() for shape in shapes}
    texts: dict[DraftShape, dict[str, tuple[int, ...]]] = {}
    for shape in shapes:
        _warm_up(parts, shape.applied(spec, batch), prompts[:batch], params)
    for turn in range(repeat):
        for shape in shapes:
            say(f"batch {batch}, {shape.name}, run {turn + 1} of {repeat}")
            texts[shape] = _run(parts, shape.applied(spec, batch), prompts, params, tallies[shape])
    plain = texts[PLAIN]
    return [
        Measurement(
            shape,
            batch,
            tallies[shape].tokens,
            tallies[shape].seconds,
            tallies[shape].metrics,
            sum(plain[row] == tokens for row, tokens in texts[shape].items()),
            len(plain),
        )
        for shape in shapes
    ]


def _warm_up(
    parts: Parts, spec: EngineSpec, prompts: Sequence[Sequence[int]], params: SamplingParams
) -> None:
    """Let kernels be compiled and memory be allocated before the clock starts."""
    few = replace(params, max_tokens=min(params.max_tokens, _WARM_TOKENS), min_tokens=0)
    # What a controller would choose to run first says nothing of what it runs later.
    _run(parts, replace(spec, auto=False), prompts, few, _Tally())


def _run(
    parts: Parts,
    spec: EngineSpec,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    tally: _Tally,
) -> dict[str, tuple[int, ...]]:
    engine = assemble(parts, spec)
    for row, prompt in enumerate(prompts):
        engine.add(Request(str(row), tuple(prompt), params, noise_key(0, str(row), 0, "bench")))
    done: dict[str, tuple[int, ...]] = {}
    start = time.perf_counter()
    while engine.has_work:
        done |= {completion.request_id: completion.token_ids for completion in engine.step()}
    tally.seconds += time.perf_counter() - start
    tally.metrics += engine.metrics()
    tally.tokens += engine.metrics().completion_tokens
    return done
