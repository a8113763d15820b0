"""`preview` and `estimate`: what a pipeline makes and takes, before anything is spent."""

from __future__ import annotations

import dataclasses
import json
import os
from typing import TYPE_CHECKING, Any

import click

from eagle_batch.cli.app import load, pipeline_arguments

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from eagle_batch.bench.estimate import Estimate, Interval
    from eagle_batch.job.local import LocalWorker, Made
    from eagle_batch.pipeline import Pipeline

_DEVICE = click.option(
    "--device", default="auto", show_default=True, help="auto, cpu, cuda, cuda:1 ..."
)


@click.command(short_help="Make a few rows in the terminal.")
@pipeline_arguments
@click.option(
    "-n", "count", type=click.IntRange(min=1), default=5, show_default=True, help="Input rows."
)
@_DEVICE
def preview(
    *, pipeline: str, overrides: tuple[str, ...], output: str | None, count: int, device: str
) -> None:
    """Make the first rows of PIPELINE and show them beside their prompts; nothing is written.

    The texts are those that `submit` makes.
    """
    from rich.console import Console

    from eagle_batch.data.describe import prepare
    from eagle_batch.job.local import first_rows

    loaded = load(pipeline, overrides, output)
    plan, _ = prepare(loaded)
    worker = _worker(loaded, device)
    made = worker.make(loaded, plan, first_rows(plan, count))
    console = Console()
    for row in made.rows.to_pylist():
        console.print(_shown(row, worker))
    for row in made.errors.to_pylist():
        console.print(f"row {row['id']}, sample {row['sample']}: quarantined in {row['stage']}:")
        console.print(f"  {row['reason']}: {row['message']}", markup=False)


def _worker(pipeline: Pipeline, device: str) -> LocalWorker:
    from eagle_batch.engine.build import device_named
    from eagle_batch.job.local import LocalWorker
    from eagle_batch.job.spec import build_real_engine

    found = device_named(device)
    threads = pipeline.engine.threads or (os.cpu_count() if found == "cpu" else None)
    return LocalWorker(build_real_engine, found, threads)


def _shown(row: dict[str, Any], worker: LocalWorker) -> RenderableType:
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    assert worker.engine is not None
    table = Table(expand=True, box=None, padding=(0, 2), show_lines=False)
    table.add_column("prompt", ratio=1, style="dim", overflow="fold")
    table.add_column("text", ratio=1, overflow="fold")
    for item in row["generation"]:
        prompt = worker.engine.prompt(item["seed"]).strip("\n")
        end = f"\n[{item['completion_tokens']} tokens, {item['finish_reason']}]"
        text = Text(_text(row, item)).append(end, style="dim")
        table.add_row(Text(prompt), Text(f"{item['stage']}:\n", style="bold green") + text)
    title = Text(f"{row['id']}  sample {row['sample']}", style="bold")
    return Panel(table, title=title, title_align="left")


def _text(row: dict[str, Any], item: dict[str, Any]) -> str:
    """Return what a generation wrote, where the row has it; those that were left out have none."""
    value = row.get(item["stage"])
    if not item.get("kept", True) or value is None:
        return "(not kept)"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


@click.command(short_help="State tokens, hours and cost from a sample.")
@pipeline_arguments
@click.option(
    "-n",
    "count",
    type=click.IntRange(min=2),
    default=None,
    help="Rows of the sample; by default four for each slot of the engine, at least 32.",
)
@click.option("--workers", type=click.IntRange(min=1), help="Workers that run beside each other.")
@click.option(
    "--price-per-hour",
    "price",
    type=click.FloatRange(min=0, min_open=True),
    help="Price of one worker-hour (a GPU-hour, on GPUs).",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@_DEVICE
def estimate(  # noqa: PLR0913 - a command's options
    *,
    pipeline: str,
    overrides: tuple[str, ...],
    output: str | None,
    count: int | None,
    workers: int | None,
    price: float | None,
    as_json: bool,
    device: str,
) -> None:
    """Make a sample of PIPELINE's rows on this machine; state what the whole job will take.

    Rows are drawn evenly from the whole input, by the seed. Intervals are 95 % bootstrap intervals
    over rows: they know how much rows differ, not how much machines do.
    """
    from eagle_batch.bench import estimate as arithmetic
    from eagle_batch.data.describe import prepare
    from eagle_batch.job.local import rows_at
    from eagle_batch.pipeline.draws import drawn

    loaded = load(pipeline, overrides, output)
    plan, _ = prepare(loaded)
    slots = loaded.engine.slots
    # Nobody knows yet how many auto will take; the sample says whether they were all in use.
    count = min(count or (64 if slots == "auto" else max(32, 4 * slots)), plan.rows)
    worker = _worker(loaded, device)
    made = worker.make(loaded, plan, rows_at(plan, drawn(loaded.seed, plan.rows, count)))
    tokens, prompts = _by_row(made, count)
    planned = loaded.workers.count
    beside = workers or (planned if isinstance(planned, int) else 1)
    found = arithmetic.estimate(plan.rows, tokens, prompts, made.tokens_per_s, beside, price)
    if as_json:
        click.echo(json.dumps({**dataclasses.asdict(found), **_conditions(made)}))
        return
    from rich.console import Console

    console = Console()
    console.print(_table(found))
    for note in _notes(made, found):
        console.print(note, style="dim")


def _by_row(made: Made, count: int) -> tuple[list[int], list[int]]:
    """Return generated tokens and prompt tokens of each input row; lost rows have what is known."""
    tokens: dict[str, int] = {}
    prompts: dict[str, int] = {}
    columns = (made.rows.column(name).to_pylist() for name in ("id", "generation"))
    for name, items in zip(*columns, strict=True):
        tokens[name] = tokens.get(name, 0) + sum(item["completion_tokens"] for item in items)
        prompts[name] = prompts.get(name, 0) + sum(item["prompt_tokens"] for item in items)
    lost = count - len(tokens)
    return [*tokens.values(), *[0] * lost], [*prompts.values(), *[0] * lost]


def _conditions(made: Made) -> dict[str, Any]:
    return {"quarantined": made.errors.num_rows, "slots_full": made.full}


def _table(found: Estimate) -> Table:
    from rich.table import Table

    table = Table(title=f"Estimate from {found.sampled:,} of {found.rows:,} rows")
    table.title_justify = "left"
    for name in ("", "", "from", "to"):
        table.add_column(name, justify="left" if not name and not table.columns else "right")
    table.add_row("generated tokens", *_numbers(found.tokens, ",.0f"))
    table.add_row("prompt tokens", *_numbers(found.prompt_tokens, ",.0f"))
    table.add_row("tokens/s of one worker", f"{found.tokens_per_s:,.1f}", "", "")
    table.add_row("worker-hours", *_numbers(found.worker_hours, ",.3f"))
    table.add_row(f"hours on {found.workers:,} workers", *_numbers(found.hours, ",.3f"))
    if found.cost is not None:
        table.add_row("cost", *_numbers(found.cost, ",.2f"))
    return table


def _numbers(interval: Interval, form: str) -> list[str]:
    return [format(value, form) for value in (interval.value, interval.low, interval.high)]


def _notes(made: Made, found: Estimate) -> list[str]:
    notes = ["from, to: 95 % bootstrap interval over rows; machines may differ by more."]
    if not made.full:
        notes.append(
            "The sample was too small to keep every slot busy, so that a job is faster than this: "
            "raise -n."
        )
    if made.errors.num_rows:
        share = made.errors.num_rows / (made.errors.num_rows + made.rows.num_rows)
        [reason, *_] = made.errors.column("reason").to_pylist()
        notes.append(f"{share:.0%} of the sample was quarantined, first for: {reason}.")
    if found.sampled == found.rows:
        notes.append("The sample is the whole input.")
    return notes
