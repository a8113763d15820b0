"""`eagle-batch bench`: how much sooner is the text there with speculation?"""

from __future__ import annotations

import json
import os
import platform
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from eagle_batch.errors import ConfigError

if TYPE_CHECKING:
    from eagle_batch.bench.measure import DraftShape, Measurement
    from eagle_batch.engine.request import EngineSpec, SamplingParams
    from eagle_batch.pipeline import Pipeline


@click.command()
@click.argument("pipeline", type=click.Path())
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a field.")
@click.option(
    "--prompts",
    multiple=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="JSON lines with `prompt` or `turns`, instead of the first stage's prompts.",
)
@click.option("--rows", default=12, show_default=True, help="Prompts; of each file, if files.")
@click.option("--batch", default="1,4,16", show_default=True, help="Batch sizes, by commas.")
@click.option(
    "--draft",
    "drafts",
    multiple=True,
    metavar="SHAPE",
    help="auto, static, chain:DEPTH or dynamic:DEPTH,WIDTH,NODES.",
)
@click.option("--max-tokens", default=128, show_default=True, help="New tokens for each prompt.")
@click.option("--temperature", default=0.0, show_default=True, help="0 is greedy; else top_p 0.95.")
@click.option("--repeat", default=2, show_default=True, help="Runs of each shape, taken in turn.")
@click.option("--device", default="cpu", show_default=True, help="cpu, cuda, cuda:1 ...")
@click.option("--threads", default=None, type=int, help="CPU threads; all cores by default.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write records here.")
@click.option("--markdown", "markdown_path", type=click.Path(path_type=Path), help="And the table.")
def bench(  # noqa: PLR0913 - a command's options
    *,
    pipeline: str,
    overrides: tuple[str, ...],
    prompts: tuple[Path, ...],
    rows: int,
    batch: str,
    drafts: tuple[str, ...],
    max_tokens: int,
    temperature: float,
    repeat: int,
    device: str,
    threads: int | None,
    json_path: Path | None,
    markdown_path: Path | None,
) -> None:
    """Measure PIPELINE's target with and without its head, side by side.

    Every shape runs the same prompts in turn; the ratio to plain decoding is what counts.
    """
    from eagle_batch.bench.table import markdown, records
    from eagle_batch.engine.request import SamplingParams
    from eagle_batch.job.spec import pipeline_engine_spec
    from eagle_batch.pipeline import load_pipeline

    loaded = load_pipeline(pipeline, overrides)
    params = SamplingParams(
        temperature=temperature, top_p=0.95 if temperature else None, max_tokens=max_tokens
    )
    spec = pipeline_engine_spec(loaded, device=device, threads=threads or os.cpu_count())
    runs = _run(loaded, spec, _Choices(prompts, rows, _numbers(batch), drafts, params, repeat))
    table = markdown(runs)
    click.echo(table)
    if markdown_path is not None:
        markdown_path.write_text(table + "\n", encoding="utf-8")
    if json_path is not None:
        about = {**_about(loaded), "max_tokens": max_tokens, "temperature": temperature}
        json_path.write_text(json.dumps({**about, "results": records(runs)}, indent=1))


@dataclass(frozen=True, slots=True)
class _Choices:
    """What the options of the command ask for."""

    files: tuple[Path, ...]
    rows: int
    batches: list[int]
    drafts: tuple[str, ...]
    params: SamplingParams
    repeat: int


def _run(pipeline: Pipeline, spec: EngineSpec, choices: _Choices) -> list[Measurement]:
    from eagle_batch.bench.measure import measure
    from eagle_batch.engine.build import load_parts

    texts, special = _prompts(pipeline, choices)
    shapes = _shapes(choices.drafts, spec)
    parts = load_parts(spec)
    ids = [parts.tokenizer.encode(text, add_special_tokens=special) for text in texts]
    longest = max(map(len, ids)) + choices.params.max_tokens
    spec = replace(spec, context=min(longest, parts.target.shape.context))
    workload = (ids, choices.params, shapes, choices.repeat)
    return [
        result
        for batch in choices.batches
        for result in measure(
            parts, spec, *workload, batch, lambda text: click.echo(text, err=True)
        )
    ]


def _prompts(pipeline: Pipeline, choices: _Choices) -> tuple[list[str], bool]:
    """Return the prompts and whether the tokenizer adds its special tokens to them."""
    from eagle_batch.bench.prompts import file_prompts, pipeline_prompts
    from eagle_batch.data.describe import prepare

    plan, prompter = prepare(pipeline)
    if choices.files:
        files = choices.files
        return [t for path in files for t in file_prompts(path, prompter, choices.rows)], False
    texts = pipeline_prompts(pipeline, plan, prompter, choices.rows)
    return texts, prompter.adds_special_tokens(0)


def _shapes(drafts: tuple[str, ...], spec: EngineSpec) -> list[DraftShape]:
    from eagle_batch.bench.measure import DraftShape

    if spec.head is None:
        return []
    if not drafts:
        sizes = () if spec.tree == "static" else (spec.depth, spec.width, spec.nodes)
        own = DraftShape(spec.tree, *sizes)
        return [DraftShape.parse("chain:2"), own, DraftShape("auto")]
    try:
        return [DraftShape.parse(draft) for draft in drafts]
    except ValueError as error:
        raise ConfigError(f"--draft: {error}") from error


def _numbers(text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = [0]
    if min(numbers) < 1:
        raise ConfigError(f"--batch: found {text!r}, expected numbers such as 1,4,16")
    return numbers


def _about(pipeline: Pipeline) -> dict[str, Any]:
    from importlib.metadata import version

    return {
        "target": pipeline.target.model,
        "head": pipeline.speculation.head,
        "dtype": pipeline.target.dtype,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "versions": {name: version(name) for name in ("eagle-batch", "torch", "transformers")},
    }
