"""`eagle-batch bench`: how much sooner is the text there with speculation?"""

from __future__ import annotations

import functools
import json
import os
import platform
import shlex
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from eagle_batch.errors import ConfigError

if TYPE_CHECKING:
    from eagle_batch.bench.measure import DraftShape, Measurement
    from eagle_batch.bench.use import Workload
    from eagle_batch.engine.build import Parts
    from eagle_batch.engine.request import EngineSpec, SamplingParams
    from eagle_batch.pipeline import Pipeline


@click.command(short_help="Measure a target with and without its head.")
@click.argument("pipeline", type=click.Path())
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a field.")
@click.option(
    "--prompts",
    multiple=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="JSON lines with `prompt` or `turns`, instead of the first stage's prompts.",
)
@click.option(
    "--rows",
    default=None,
    type=click.IntRange(min=1),
    help="Prompts; of each file, if files. By default 12, and as many as the largest batch.",
)
@click.option("--batch", default="1,4,16", show_default=True, help="Batch sizes, by commas.")
@click.option(
    "--draft",
    "drafts",
    multiple=True,
    metavar="SHAPE",
    help="auto, static, ngram:DEPTH, chain:DEPTH or dynamic:DEPTH,WIDTH,NODES; the last two "
    "with +N for an n-gram branch of at most N nodes.",
)
@click.option("--max-tokens", default=128, show_default=True, help="New tokens for each prompt.")
@click.option("--temperature", default=0.0, show_default=True, help="0 is greedy; else top_p 0.95.")
@click.option("--repeat", default=2, show_default=True, help="Runs of each shape, taken in turn.")
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda, cuda:1 ...")
@click.option("--threads", default=None, type=int, help="CPU threads; all cores by default.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write records here.")
@click.option(
    "--markdown", "markdown_path", type=click.Path(path_type=Path), help="Write the page."
)
@click.option(
    "--picture",
    type=click.Path(path_type=Path),
    help="Draw speed and acceptance to this file: .svg, .png or .pdf.",
)
def bench(  # noqa: PLR0913 - a command's options
    *,
    pipeline: str,
    overrides: tuple[str, ...],
    prompts: tuple[Path, ...],
    rows: int | None,
    batch: str,
    drafts: tuple[str, ...],
    max_tokens: int,
    temperature: float,
    repeat: int,
    device: str,
    threads: int | None,
    json_path: Path | None,
    markdown_path: Path | None,
    picture: Path | None,
) -> None:
    """Measure PIPELINE's target with and without its draft, side by side.

    Every shape runs the same prompts in turn; the ratio to plain decoding is what counts. MFU is
    the share of the device's arithmetic that useful tokens took, memory the share of its
    bandwidth that reading the weights took in verification.
    """
    from eagle_batch.engine.build import device_named
    from eagle_batch.engine.request import SamplingParams
    from eagle_batch.job.spec import pipeline_engine_spec
    from eagle_batch.pipeline import load_pipeline

    _check_picture(picture)
    loaded = load_pipeline(pipeline, overrides)
    params = SamplingParams(
        temperature=temperature, top_p=0.95 if temperature else None, max_tokens=max_tokens
    )
    spec = pipeline_engine_spec(
        loaded, device=device_named(device), threads=threads or os.cpu_count()
    )
    batches = _numbers(batch)
    choices = _Choices(prompts, rows or max(12, *batches), batches, drafts, params, repeat)
    runs, workload, peak = _run(loaded, spec, choices)
    about = _about(loaded) | {"max_tokens": max_tokens, "temperature": temperature, "device": peak}
    _write(runs, workload, about, _Files(json_path, markdown_path, picture))


@dataclass(frozen=True, slots=True)
class _Files:
    """Where results go, beside the terminal."""

    json: Path | None
    markdown: Path | None
    picture: Path | None


def _write(
    runs: list[Measurement], workload: Workload, about: dict[str, Any], files: _Files
) -> None:
    from eagle_batch.bench.summary import summarise
    from eagle_batch.bench.table import page, records

    summary = summarise(runs, about["device"]["kind"])
    text, found = page(runs, workload, summary, about), records(runs, workload)
    click.echo(text)
    if files.markdown is not None:
        files.markdown.write_text(text + "\n", encoding="utf-8")
    if files.json is not None:
        crossing = summary.break_even.batch if summary.break_even else None
        values = {"headline": summary.headline, "advice": summary.advice, "break_even": crossing}
        files.json.write_text(json.dumps({**about, **values, "results": found}, indent=1))
    if files.picture is not None:
        from eagle_batch.bench.picture import save_picture

        save_picture(files.picture, found, summary)


def _check_picture(picture: Path | None) -> None:
    """Refuse before hours of measuring what could not be drawn after them."""
    formats = {".svg", ".png", ".pdf"}
    if picture is not None and picture.suffix not in formats:
        raise ConfigError(f"--picture: found {picture}; expected .svg, .png or .pdf at its end")


@dataclass(frozen=True, slots=True)
class _Choices:
    """What the options of the command ask for."""

    files: tuple[Path, ...]
    rows: int
    batches: list[int]
    drafts: tuple[str, ...]
    params: SamplingParams
    repeat: int


def _run(
    pipeline: Pipeline, spec: EngineSpec, choices: _Choices
) -> tuple[list[Measurement], Workload, dict[str, Any]]:
    """Return the measurements, what they are compared with, and the device's peak."""
    from eagle_batch.bench.measure import measure
    from eagle_batch.engine.build import load_parts

    texts, special = _prompts(pipeline, choices)
    shapes = _shapes(choices.drafts, spec)
    parts = load_parts(spec)
    ids = [parts.tokenizer.encode(text, add_special_tokens=special) for text in texts]
    longest = max(map(len, ids)) + choices.params.max_tokens
    spec = replace(spec, context=min(longest, parts.target.shape.context))
    say = functools.partial(click.echo, err=True)
    workload, peak = _workload(parts, spec)
    inputs = (ids, choices.params, shapes, choices.repeat)
    return (
        [m for batch in choices.batches for m in measure(parts, spec, *inputs, batch, say)],
        workload,
        peak,
    )


def _workload(parts: Parts, spec: EngineSpec) -> tuple[Workload, dict[str, Any]]:
    from eagle_batch.bench.use import WIDTHS, Workload
    from eagle_batch.engine.peaks import find_peak
    from eagle_batch.models.size import model_size

    size, peak = model_size(parts.target.config), find_peak(spec.device, spec.dtype)
    read = size.read * WIDTHS[spec.dtype]
    named = {"kind": spec.device, "name": peak.device, "source": peak.source}
    numbers = {"flops": peak.flops, "bytes_per_s": peak.bytes_per_s}
    return Workload(size.computed, read, peak.flops, peak.bytes_per_s), named | numbers


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

    model = spec.head or spec.draft
    if not drafts and model is None:
        return [DraftShape.parse("ngram:4")]
    if not drafts:
        sizes = () if spec.tree == "static" else (spec.depth, spec.width, spec.nodes)
        own = DraftShape(spec.tree, *sizes)
        return [DraftShape.parse("chain:2"), own, DraftShape("auto")]
    try:
        shapes = [DraftShape.parse(draft) for draft in drafts]
    except ValueError as error:
        raise ConfigError(f"--draft: {error}") from error
    for shape in shapes:
        if model is None and shape.tree in {"chain", "dynamic", "static"}:
            raise ConfigError(
                f"--draft {shape.name}: the pipeline has neither head nor draft model"
            )
        if spec.head is None and shape.tree == "static":
            raise ConfigError("--draft static: a static tree needs a head")
    return shapes


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
        "draft": pipeline.speculation.draft,
        "dtype": pipeline.target.dtype,
        "command": shlex.join(["eagle-batch", *sys.argv[1:]]),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "versions": {name: version(name) for name in ("eagle-batch", "torch", "transformers")},
    }
