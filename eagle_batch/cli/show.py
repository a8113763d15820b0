"""The commands that look at what a job left: `show`, `report`, and the file's `reference`."""

from __future__ import annotations

import click


@click.command(short_help="Show rows and how they were decoded.")
@click.argument("output")
@click.option("--row", metavar="ID", help="Only the samples of this input row.")
@click.option("--where", metavar="EXPR", help="Only rows for which this holds; see above.")
@click.option(
    "--sort", metavar="MEASURE", help="By a measure or a column, lowest first; e.g. acceptance."
)
@click.option("--descending", is_flag=True, help="With --sort: highest first.")
@click.option(
    "-n",
    "limit",
    type=click.IntRange(min=1),
    default=5,
    show_default=True,
    help="Most rows that are shown.",
)
@click.option(
    "--spans/--no-spans",
    default=True,
    help="Colour what was drafted, in outputs with output.spans (the default), or do not.",
)
def show(
    *,
    output: str,
    row: str | None,
    where: str | None,
    sort: str | None,
    descending: bool,
    limit: int,
    spans: bool,
) -> None:
    """Show rows of an OUTPUT: their columns, their texts and how they were decoded.

    EXPR compares columns and measures: 'answer.acceptance < 1.5 and field == "Physics"'. Measures
    are tokens, prompt_tokens, passes, drafted, accepted and acceptance, of the whole row or behind
    a stage's name. Also: and, or, not, in [...], is None, contains(answer, "sun"),
    startswith(answer, "The"), length(answer), and column("any name").
    """
    from rich.console import Console

    from eagle_batch.job.store import open_store
    from eagle_batch.report.output import read_facts
    from eagle_batch.report.rows import Query, find_rows, show_rows

    store = open_store(output)
    facts = read_facts(store)
    found = find_rows(store, facts, Query(row, where, sort, descending, limit))
    show_rows(Console(), found, facts, spans=spans)
    if not found:
        click.echo(f"no such row among the {facts.rows:,} of {facts.output}")


@click.command()
@click.argument("output")
@click.option(
    "--price",
    type=click.FloatRange(min=0, min_open=True),
    help="Price of one worker-hour (a GPU-hour, on GPUs): adds the cost of a million tokens.",
)
def report(*, output: str, price: float | None) -> None:
    """Make report.html and the data set card of an OUTPUT anew."""
    from eagle_batch.job.store import open_store
    from eagle_batch.report.write import write_reports

    store = open_store(output)
    for key in write_reports(store, price):
        click.echo(f"{store.name}/{key}")


@click.command(short_help="Print every field of a pipeline file.")
def reference() -> None:
    """Print a pipeline file with every field, its default and what it means."""
    from eagle_batch.pipeline.reference import reference_yaml

    click.echo(reference_yaml(), nl=False)
