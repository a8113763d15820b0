"""This engine, plainly or with a draft: `python -m tests.bench.sides.ours SPEC.json`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from eagle_batch.bench.measure import DraftShape
from eagle_batch.engine.build import Parts, assemble, load_parts
from eagle_batch.engine.request import (
    DEFAULT_BRANCH,
    EngineSpec,
    Request,
    SamplingParams,
    noise_key,
)
from tests.bench.sides.work import Run, Work, main


class Side:
    """One loaded target, and its head if there is a draft."""

    def __init__(self, work: Work) -> None:
        shape = DraftShape.parse(work.draft)
        spec = EngineSpec(
            model=work.model,
            head=work.head,
            dtype=work.dtype,
            threads=work.threads,
            depth=4,
            width=4,
            nodes=12,
            branch=DEFAULT_BRANCH,
            context=work.context,
        )
        self._work, self._shape, self._spec = work, shape, shape.applied(spec, 1)
        self._parts: Parts = load_parts(self._spec)

    def run(self, prompts: list[list[int]], batch: int, tokens: int) -> Run:
        """Decode all prompts greedily, `batch` at a time, rows following one another."""
        engine: Any = assemble(self._parts, replace(self._spec, slots=batch))
        params = SamplingParams(max_tokens=tokens)
        for row, prompt in enumerate(prompts):
            key = noise_key(0, str(row), 0, "bench")
            engine.add(Request(str(row), tuple(prompt), params, key))
        texts: dict[str, list[int]] = {}
        while engine.has_work:
            texts |= {done.request_id: list(done.token_ids) for done in engine.step()}
        return Run(
            [texts[str(row)] for row in range(len(prompts))],
            None if self._shape.tree == "none" else engine.metrics().acceptance_length,
        )


if __name__ == "__main__":
    main(Side)
