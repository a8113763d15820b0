"""What it is worth that drafts are ranked under the row's own noise, at temperature 1.

    python -m tests.bench.noise_ranking --prompts mt_bench.jsonl --prompts gsm8k.jsonl --rows 8

The same trees over the same prompts, three times: greedily, sampled with drafts that know the noise
by which the target will choose, and sampled with the draft's likeliest tokens, which is what a
drafter without addressed noise proposes. The sampled texts are the same either way; how many tokens
a pass yields is not.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from eagle_batch import demo
from eagle_batch.engine.build import Parts, assemble, load_parts
from eagle_batch.engine.drafters.base import DraftState
from eagle_batch.engine.request import EngineSpec, SamplingParams
from eagle_batch.engine.sampling import pack_params
from eagle_batch.engine.tree import DraftTree
from tests.bench.losslessness import MODEL, encode, run

#: Name, and tree, depth, width and nodes.
TREES = {
    "chain of 5": ("chain", 5, 1, 5),
    "tree of 5 nodes": ("dynamic", 3, 4, 5),
    "tree of 12 nodes": ("dynamic", 4, 4, 12),
}


class Unaware:
    """A drafter that is told that all rows are greedy; all else is the wrapped one's."""

    def __init__(self, drafter: Any) -> None:
        self._drafter = drafter

    def __getattr__(self, name: str) -> Any:
        """Return what the wrapped drafter has."""
        return getattr(self._drafter, name)

    def draft(self, state: DraftState) -> DraftTree:
        """Draft the likeliest tokens."""
        rows = len(state.root_B)
        greedy = pack_params([SamplingParams()] * rows, [0] * rows, state.root_B.device)
        return self._drafter.draft(replace(state, params=greedy))


def decode(
    parts: Parts,
    spec: EngineSpec,
    prompts: Sequence[tuple[int, ...]],
    params: SamplingParams,
    *,
    aware: bool = True,
) -> tuple[list[tuple[int, ...]], float]:
    """Return the texts, and the tokens that a pass yielded in the mean."""
    engine = assemble(parts, spec)
    if not aware:
        engine.drafter = Unaware(engine.drafter)
    texts = run(engine, prompts, params)
    return texts, engine.metrics().acceptance_length


def compare(
    parts: Parts, spec: EngineSpec, prompts: Sequence[tuple[int, ...]], params: SamplingParams
) -> dict[str, float]:
    """Return the tokens a pass of one tree: greedy, aware of the noise, and not."""
    greedy = replace(params, temperature=0.0, top_p=None)
    _, cold = decode(parts, spec, prompts, greedy)
    texts, aware = decode(parts, spec, prompts, params)
    same, unaware = decode(parts, spec, prompts, params, aware=False)
    assert texts == same, "a draft has changed a text"
    return {"greedy": cold, "aware": aware, "unaware": unaware}


@click.command()
@click.option("--prompts", "paths", multiple=True, required=True, type=click.Path(path_type=Path))
@click.option("--rows", default=8, show_default=True, help="Prompts of each file.")
@click.option("--max-tokens", default=128, show_default=True)
@click.option("--temperature", default=1.0, show_default=True)
@click.option("--top-p", default=0.95, show_default=True)
@click.option("--slots", default=8, show_default=True)
@click.option("--threads", default=None, type=int)
@click.option("--json", "json_path", type=click.Path(path_type=Path))
def main(
    *,
    paths: Sequence[Path],
    rows: int,
    max_tokens: int,
    temperature: float,
    top_p: float,
    slots: int,
    threads: int | None,
    json_path: Path | None,
) -> None:
    """Print tokens a pass of each tree, greedy, aware of the noise, and not."""
    spec = EngineSpec(
        model=str(demo.fetch()), head=str(demo.head_path(MODEL)), threads=threads, slots=slots
    )
    parts = load_parts(spec)
    prompts = encode(parts, paths, rows)
    spec = replace(spec, context=max(map(len, prompts)) + max_tokens)
    params = SamplingParams(temperature=temperature, top_p=top_p, max_tokens=max_tokens)
    found = {}
    click.echo(
        f"| draft | greedy | temperature {temperature:g}: aware | unaware | aware / greedy |"
    )
    click.echo("|---|---|---|---|---|")
    for name, (tree, depth, width, nodes) in TREES.items():
        shaped = replace(spec, tree=tree, depth=depth, width=width, nodes=nodes)
        found[name] = each = compare(parts, shaped, prompts, params)
        share = each["aware"] / each["greedy"]
        click.echo(
            f"| {name} | {each['greedy']:.2f} | {each['aware']:.2f} | {each['unaware']:.2f} "
            f"| {share:.2f} |"
        )
    if json_path is not None:
        json_path.write_text(json.dumps(found, indent=1), "utf-8")


if __name__ == "__main__":
    main()
