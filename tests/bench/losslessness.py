"""Is the text the same with every draft, in every batch? Lists divergences and their gaps.

    python -m tests.bench.losslessness --prompts mt_bench.jsonl --prompts gsm8k.jsonl --rows 100

Decodes the same prompts plainly and with a chain, EAGLE-1's tree, a dynamic tree, a draft model
(the target's own first layers) and n-grams, at several temperatures and batch sizes. The reference
is plain decoding at the first batch size. Where a text differs, the gap is that of the two best
processed scores, noise included, at the first place that differs: a near-tie may fall either way
when a sum is taken in another order, anything else is a fault. Exits with 1 where a gap is wide.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import click
import torch

from eagle_batch import demo
from eagle_batch.bench.prompts import questions
from eagle_batch.engine.build import Parts, assemble, load_parts
from eagle_batch.engine.engine import Engine
from eagle_batch.engine.noise import gumbel
from eagle_batch.engine.request import EngineSpec, Request, SamplingParams, noise_key
from eagle_batch.engine.sampling import filtered_logits, pack_params
from eagle_batch.training.check import prompt_ids

MODEL = "smollm2-135m-instruct"
#: Gaps of processed scores below which two orders of the same sums may choose differently.
NEAR = {"float32": 1e-3, "bfloat16": 0.5}
DRAFT_LAYERS = 6


@dataclass(frozen=True)
class Divergence:
    draft: str
    batch: int
    temperature: float
    row: int
    place: int
    gap: float


def drafts(spec: EngineSpec) -> dict[str, EngineSpec]:
    bare = replace(spec, head=None, draft=None)
    return {
        "off": bare,
        "chain": replace(spec, draft=None, tree="chain", depth=4),
        "static": replace(spec, draft=None, tree="static"),
        "dynamic": replace(spec, draft=None, depth=4, width=4, nodes=12),
        "draft model": replace(spec, head=None, depth=3, width=2, nodes=5),
        "n-gram": replace(bare, ngram=True, depth=4),
    }


def all_parts(spec: EngineSpec) -> tuple[Parts, EngineSpec]:
    """Load target and head, and the target's first layers as a draft model."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tempfile.mkdtemp(prefix="draft-")
    small = AutoModelForCausalLM.from_pretrained(spec.model, num_hidden_layers=DRAFT_LAYERS)
    small.save_pretrained(folder)
    AutoTokenizer.from_pretrained(spec.model).save_pretrained(folder)
    both = load_parts(spec)
    drafting = load_parts(replace(spec, head=None, draft=folder))
    return replace(both, draft=drafting.draft), replace(spec, draft=folder)


def encode(parts: Parts, paths: Sequence[Path], rows: int) -> list[tuple[int, ...]]:
    return [prompt_ids(parts.tokenizer, text) for path in paths for text in questions(path, rows)]


def key(row: int) -> int:
    return noise_key(0, str(row), 0, "lossless")


def decode(
    parts: Parts, spec: EngineSpec, prompts: Sequence[tuple[int, ...]], params: SamplingParams
) -> list[tuple[int, ...]]:
    return run(assemble(parts, spec), prompts, params)


def run(
    engine: Engine, prompts: Sequence[tuple[int, ...]], params: SamplingParams
) -> list[tuple[int, ...]]:
    for row, prompt in enumerate(prompts):
        engine.add(Request(str(row), prompt, params, key(row)))
    done: dict[int, tuple[int, ...]] = {}
    while engine.has_work:
        done |= {int(c.request_id): c.token_ids for c in engine.step()}
    return [done[row] for row in range(len(prompts))]


@torch.inference_mode()
def gap(
    parts: Parts, prompt: Sequence[int], said: Sequence[int], params: SamplingParams, row: int
) -> float:
    """Return how far apart the two best processed scores are behind a text."""
    ids = torch.tensor([[*prompt, *said]])
    cache = parts.target.new_cache(1, ids.shape[1] + 1)
    logits = parts.target.logits(parts.target._chunk(cache, ids, 0, ids.shape[1])[:, -1:])
    scores = filtered_logits(logits, pack_params([params], [key(row)], ids.device))[0, 0]
    if params.temperature > 0:
        place = torch.tensor(len(said))
        scores = scores + gumbel(torch.tensor(key(row)), place, torch.arange(len(scores)))
    best = scores.topk(2).values
    return float(best[0] - best[1])


def differences(
    texts: Sequence[tuple[int, ...]], reference: Sequence[tuple[int, ...]]
) -> Iterator[tuple[int, int]]:
    """Yield row and first place of every text that differs."""
    for row, (text, wanted) in enumerate(zip(texts, reference, strict=True)):
        if text != wanted:
            pairs = enumerate(zip(text, wanted, strict=False))
            same = min(len(text), len(wanted))
            yield row, next((place for place, (a, b) in pairs if a != b), same)


def compare(
    parts: Parts,
    spec: EngineSpec,
    prompts: Sequence[tuple[int, ...]],
    params: SamplingParams,
    batches: Sequence[int],
) -> tuple[list[Divergence], int]:
    """Return the divergences from plain decoding at one temperature, and the texts compared."""
    found: list[Divergence] = []
    compared = 0
    reference: list[tuple[int, ...]] | None = None
    for batch in batches:
        for name, shape in drafts(spec).items():
            texts = decode(parts, replace(shape, slots=batch), prompts, params)
            if reference is None:
                reference = texts
                continue
            compared += len(texts)
            new = [
                Divergence(
                    name,
                    batch,
                    params.temperature,
                    row,
                    place,
                    gap(parts, prompts[row], reference[row][:place], params, row),
                )
                for row, place in differences(texts, reference)
            ]
            found += new
            click.echo(
                f"T {params.temperature}, batch {batch}, {name}: {len(texts) - len(new)} of "
                f"{len(texts)} the same",
                err=True,
            )
    return found, compared


@click.command()
@click.option("--prompts", "paths", multiple=True, required=True, type=click.Path(path_type=Path))
@click.option("--rows", default=4, show_default=True, help="Prompts of each file.")
@click.option("--max-tokens", default=128, show_default=True)
@click.option("--batch", default="1,7,32", show_default=True)
@click.option(
    "--temperature", default="0,0.7,1.0", show_default=True, help="Above 0 with top_p 0.95."
)
@click.option("--dtype", default="float32", show_default=True)
@click.option("--threads", default=None, type=int)
@click.option("--json", "json_path", type=click.Path(path_type=Path))
def main(
    *,
    paths: Sequence[Path],
    rows: int,
    max_tokens: int,
    batch: str,
    temperature: str,
    dtype: str,
    threads: int | None,
    json_path: Path | None,
) -> None:
    """Compare every draft with plain decoding."""
    spec = EngineSpec(
        model=str(demo.fetch()), head=str(demo.head_path(MODEL)), dtype=dtype, threads=threads
    )
    parts, spec = all_parts(spec)
    prompts = encode(parts, paths, rows)
    spec = replace(spec, context=max(map(len, prompts)) + max_tokens)
    found: list[Divergence] = []
    total = 0
    for each in map(float, temperature.split(",")):
        params = SamplingParams(
            temperature=each, top_p=0.95 if each else None, max_tokens=max_tokens
        )
        new, compared = compare(parts, spec, prompts, params, [int(b) for b in batch.split(",")])
        found, total = found + new, total + compared
    click.echo(f"{dtype}: {total - len(found)} of {total} texts the same as plain decoding")
    for item in sorted(found, key=lambda d: -d.gap):
        click.echo(json.dumps(asdict(item)))
    if json_path is not None:
        record: dict[str, Any] = {"dtype": dtype, "texts": total, "prompts": len(prompts)}
        json_path.write_text(json.dumps(record | {"divergences": [asdict(d) for d in found]}))
    sys.exit(int(any(item.gap > NEAR[dtype] for item in found)))


if __name__ == "__main__":
    main()
