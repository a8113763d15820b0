"""Finding rows of an output and showing them on a terminal."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from eagle_batch.errors import ConfigError
from eagle_batch.report.measures import MEASURES, with_measures
from eagle_batch.report.output import Objects, OutputFacts, read_table
from eagle_batch.report.spans import coloured, legend, share_drafted, stage_spans
from eagle_batch.report.where import filter_rows, parse_where

#: Columns that are not shown with the input's.
HIDDEN = ("id", "sample", "generation", "model", "head", "token_ids", "logprobs", "spans")


@dataclass(frozen=True, slots=True)
class Query:
    """Which rows, in which order, and how many."""

    row: str | None = None
    where: str | None = None
    #: A measure; None keeps the order of the input.
    sort: str | None = None
    #: Highest first.
    descending: bool = False
    limit: int = 5


def find_rows(store: Objects, facts: OutputFacts, query: Query) -> list[dict[str, Any]]:
    """Return the rows that a query asks for; reads no more objects than it must.

    Raises ConfigError for a query that names what is not there.
    """
    found: pa.Table | None = None
    for table in _tables(store, facts):
        part = _matching(table, query)
        found = part if found is None else pa.concat_tables([found, part])
        found = _first(found, query)
        if query.sort is None and found.num_rows >= query.limit:
            break
    return [] if found is None else found.to_pylist()


def _tables(store: Objects, facts: OutputFacts) -> Iterator[pa.Table]:
    for key in facts.data_keys:
        yield with_measures(read_table(store, key), facts.stages).replace_schema_metadata(None)


def _matching(table: pa.Table, query: Query) -> pa.Table:
    if query.row is not None:
        table = table.filter(pc.field("id") == query.row)
    if query.where is not None:
        table = filter_rows(table, parse_where(query.where, table.column_names))
    return table


def _first(table: pa.Table, query: Query) -> pa.Table:
    if query.sort is not None:
        if query.sort not in table.column_names:
            raise ConfigError(f"--sort: found {query.sort!r}; expected one of {_sortable(table)}")
        order = "descending" if query.descending else "ascending"
        keys = [(query.sort, order), ("id", "ascending"), ("sample", "ascending")]
        table = table.sort_by(keys)
    return table.slice(0, query.limit)


def _sortable(table: pa.Table) -> str:
    numbers = (pa.types.is_integer, pa.types.is_floating, pa.types.is_string)
    fields = [field for field in table.schema if any(test(field.type) for test in numbers)]
    return ", ".join(field.name for field in fields)


def show_rows(
    console: Console, rows: Sequence[dict[str, Any]], facts: OutputFacts, *, spans: bool = True
) -> None:
    """Print rows, one frame each: what came in, what was written, and how it came about.

    Drafted spans are coloured, or marked where there are no colours, if the output has `spans`.
    """
    colour = console.color_system is not None
    for row in rows:
        title = Text(f"{row['id']}  sample {row['sample']}", style="bold")
        shown = row if spans else row | {"spans": None}
        parts = _parts(shown, facts, colour=colour)
        console.print(Panel(Group(*parts), title=title, title_align="left"))


def _parts(row: dict[str, Any], facts: OutputFacts, *, colour: bool) -> Iterator[RenderableType]:
    names = list(row)
    passed = names[: names.index("generation")]
    for name in passed:
        if name not in (*HIDDEN, *facts.stages):
            yield Text.assemble((f"{name}: ", "cyan"), str(row[name]))
    for name in facts.stages:
        yield Text()
        # A column of a JSON schema holds values; spans count the characters of what was written.
        characters = stage_spans(row, name) if isinstance(row[name], str) else None
        if characters is None:
            yield Text(name, style="bold cyan")
            yield from _texts(row[name])
        else:
            drafted = f"  {share_drafted(characters):.0%} drafted"
            yield Text.assemble((name, "bold cyan"), (drafted, "dim"))
            yield coloured(row[name], characters, colour=colour)
    yield Text()
    yield _numbers(row)
    if row.get("spans"):
        yield legend(colour=colour)


def _texts(value: Any) -> Iterator[Text]:
    """Yield a stage's text or value, or each of those that it kept."""
    if isinstance(value, list):
        for number, item in enumerate(value):
            yield Text.assemble((f"{number}: ", "dim"), _written(item))
    else:
        yield Text(_written(value))


def _written(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _numbers(row: dict[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("stage")
    for name in (*MEASURES, "finish"):
        table.add_column(name.replace("_", " "), justify="right")
    for item in row["generation"]:
        counts = (
            item["completion_tokens"],
            item["prompt_tokens"],
            item["target_passes"],
            item["drafted"],
            item["accepted"],
        )
        length = item["completion_tokens"] / max(1, item["target_passes"])
        texts = [f"{count:,}" for count in counts]
        finish = item["finish_reason"] + ("" if item.get("kept", True) else ", not kept")
        table.add_row(item["stage"], *texts, f"{length:.2f}", finish)
    return table
