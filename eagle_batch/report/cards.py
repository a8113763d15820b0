"""The cards of a report: each a question, a plot or a table that answers it, and how to read it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from markupsafe import Markup

from eagle_batch.report import plots
from eagle_batch.report.output import Failures, OutputFacts
from eagle_batch.report.progress import duration
from eagle_batch.report.statistics import RowNote, RowStatistics

#: Characters of a text in a table.
CELL = 160
#: Stretches of the timeline whose averages are shown.
STRETCHES = 60
#: Draft shapes that are shown, the most used ones.
MOST_SHAPES = 8


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table."""

    name: str
    number: bool = False
    text: bool = False


@dataclass(frozen=True, slots=True)
class Table:
    """A table of texts."""

    head: tuple[Column, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Card:
    """One part of the page."""

    title: str
    note: str = ""
    svg: Markup | None = None
    #: What the plot shows, for those who do not see it.
    alt: str = ""
    table: Table | None = None
    wide: bool = False


def make_cards(facts: OutputFacts, statistics: RowStatistics, failures: Failures) -> list[Card]:
    """Return the cards for which there is something to show."""
    occupancy, acceptance = _over_time(facts)
    cards = [*_throughput(facts), *occupancy, *_positions(facts), *acceptance]
    cards += [*_time(facts), *_stages(statistics), *_lengths(statistics), *_workers(facts)]
    cards += _shapes(facts)
    cards += [*_failures(failures), *_worker_tables(facts)]
    return [*cards, *_notable(statistics), *_runs(facts)]


def _svg(markup: str) -> Markup:
    return Markup(markup)  # noqa: S704 - drawn by us; matplotlib escapes every label


def _throughput(facts: OutputFacts) -> Iterator[Card]:
    document = facts.metrics
    points = [(point["at"], point["tokens"]) for point in document["series"]] if document else []
    if document is None or len(points) < 3 or points[-1][0] <= points[0][0]:
        return
    average = document["tokens_per_s"]
    yield Card(
        "Throughput",
        "Generated tokens a second in the last run.",
        _svg(plots.throughput(points, average)),
        f"{average:,.1f} tokens a second on average",
    )


def _time(facts: OutputFacts) -> Iterator[Card]:
    share = facts.metrics["engine"]["time_share"] if facts.metrics else {}
    shares = [(name, value) for name, value in share.items() if value]
    if shares:
        yield Card(
            "Where the time went",
            "Of the engines' time: reading prompts, drafting, verifying, everything else.",
            _svg(plots.split("time", shares)),
            ", ".join(f"{name} {value:.1%}" for name, value in shares),
        )


def _positions(facts: OutputFacts) -> Iterator[Card]:
    rates = facts.metrics["engine"]["acceptance_at"] if facts.metrics else []
    if any(rates):
        yield Card(
            "Accepted by position",
            "Share of the rounds that drafted this position and had it accepted.",
            _svg(plots.shares("positions", rates)),
            ", ".join(f"position {n}: {rate:.0%}" for n, rate in enumerate(rates, 1)),
        )


def _stages(statistics: RowStatistics) -> Iterator[Card]:
    stages = [(stage.name, stage.acceptance) for stage in statistics.stages if stage.passes]
    if stages:
        yield Card(
            "Tokens a target pass, by stage",
            "The bonus token included. The line is plain decoding, 1.00.",
            _svg(plots.bars("stages", stages, ".2f", base=1.0)),
            ", ".join(f"{name} {value:.2f}" for name, value in stages),
        )


def _shapes(facts: OutputFacts) -> Iterator[Card]:
    """Show what the controller chose; a fixed shape needs no picture."""
    passes = facts.metrics["engine"].get("passes_by_shape", []) if facts.metrics else []
    total = sum(count for _, count in passes)
    if len(passes) < 2 or not total:
        return
    ordered = sorted(passes, key=lambda item: -item[1])[:MOST_SHAPES]
    shares = [(name, count / total) for name, count in ordered]
    yield Card(
        "Draft shapes",
        "Share of the target's passes that checked a draft of each shape; see speculation.method.",
        _svg(plots.bars("shapes", shares, ".1%")),
        ", ".join(f"{name} {share:.1%}" for name, share in shares),
    )


def _over_time(facts: OutputFacts) -> tuple[list[Card], list[Card]]:
    occupancy, acceptance = _differences(facts)
    if len(occupancy) < 3:
        return [], []
    slots = Card(
        "Slots in use",
        "Share of the batch that held a row. It falls where rows run out, at the end.",
        _svg(plots.over_time("occupancy", occupancy, percent=True)),
        f"from {occupancy[0][1]:.0%} to {occupancy[-1][1]:.0%}",
    )
    lengths = Card(
        "Tokens a target pass, over time",
        "What one row gains in one pass of the target.",
        _svg(plots.over_time("lengths", acceptance, colour=2)),
        f"from {acceptance[0][1]:.2f} to {acceptance[-1][1]:.2f}",
    )
    return [slots], [lengths]


def _differences(facts: OutputFacts) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """Return occupancy and acceptance of each stretch, from what was noted as averages so far.

    tokens / acceptance is the number of row passes, and that / occupancy the number of slot passes.
    """
    noted = facts.timeline["points"] if facts.timeline else []
    counts = []
    for point in noted:
        if point["acceptance_length"] and point["occupancy"]:
            rows = point["tokens"] / point["acceptance_length"]
            counts.append((point["at"], point["tokens"], rows, rows / point["occupancy"]))
    step = max(1, len(counts) // STRETCHES)
    occupancy, acceptance = [], []
    for before, after in pairwise(counts[::step]):
        at, tokens, rows, slots = (b - a for a, b in zip(before, after, strict=True))
        if at > 0 and rows > 0 and slots > 0:
            middle = before[0] + at / 2
            occupancy.append((middle, min(1.0, rows / slots)))
            acceptance.append((middle, tokens / rows))
    return occupancy, acceptance


def _lengths(statistics: RowStatistics) -> Iterator[Card]:
    series = [(stage.name, stage.lengths) for stage in statistics.stages if stage.rows]
    if not series:
        return
    ends = "; ".join(
        f"{stage.name}: " + ", ".join(f"{count:,} {end}" for end, count in stage.finishes.items())
        for stage in statistics.stages
    )
    some = _some(statistics.objects_read, statistics.objects)
    means = ", ".join(f"{name} {values.mean():.0f}" for name, values in series)
    yield Card(
        "Completion length",
        f"{some}Mean tokens: {means}. How they ended: {ends}.",
        _svg(plots.histogram("completions", series)),
        f"mean tokens {means}",
    )


def _workers(facts: OutputFacts) -> Iterator[Card]:
    timeline = facts.timeline
    if timeline is None or not timeline["points"]:
        return
    points = [(point["at"], point["workers"]) for point in timeline["points"]]
    marks = [remark["at"] for remark in timeline["remarks"] if _is_failure(remark["text"])]
    if points[-1][0] > 0:
        yield Card(
            "Workers ready",
            "A triangle marks a worker that was lost or did not start, or a shard that failed.",
            _svg(plots.workers(points, marks)),
            f"at most {max(count for _, count in points)}; {len(marks)} failures",
        )


def _worker_tables(facts: OutputFacts) -> Iterator[Card]:
    if facts.metrics is not None and facts.metrics["workers"]:
        head = _columns("worker", "where", "device", numbers=("rows", "tokens", "tokens/s"))
        rows = tuple(map(_worker_row, facts.metrics["workers"]))
        yield Card("Workers", table=Table(head, rows), wide=True)
    if facts.timeline is not None and facts.timeline["remarks"]:
        remarks = facts.timeline["remarks"]
        lines = tuple((duration(each["at"]), _cell(each["text"])) for each in remarks)
        columns = (Column("after", number=True), Column("what happened", text=True))
        yield Card("What happened", table=Table(columns, lines), wide=True)


def _is_failure(text: str) -> bool:
    return any(word in text for word in ("lost", "failed", "loses", "losing"))


def _worker_row(worker: dict[str, Any]) -> tuple[str, ...]:
    where = f"{worker['host']}, process {worker['pid']}"
    counts = (f"{worker['rows']:,}", f"{worker['tokens']:,}", f"{worker['tokens_per_s']:,.1f}")
    return (str(worker["worker"]), where, worker["device"], *counts)


def _failures(failures: Failures) -> Iterator[Card]:
    if not failures.counts:
        return
    ordered = failures.counts.most_common()
    yield Card(
        "Quarantined rows by reason",
        _some(failures.read, failures.objects)
        + "They are in errors/*.parquet, each with its input row.",
        _svg(plots.bars("reasons", [(r, float(n)) for r, n in ordered], ",.0f", bad=True)),
        ", ".join(f"{reason} {count:,}" for reason, count in ordered),
    )
    head = (Column("reason"), Column("rows", number=True), *_columns("first row", "stage"))
    rows = []
    for reason, count in ordered:
        row = failures.examples[reason]
        rows.append((reason, f"{count:,}", row["id"], row["stage"] or "", _cell(row["message"])))
    yield Card(
        "An example of each reason",
        table=Table((*head, Column("message", text=True)), tuple(rows)),
        wide=True,
    )


def _some(read: int, objects: int) -> str:
    return f"From {read:,} of {objects:,} shards. " if read < objects else ""


def _notable(statistics: RowStatistics) -> Iterator[Card]:
    for title, note, rows in (
        ("Slowest rows", "Most target passes, all stages together.", statistics.slowest),
        ("Lowest acceptance", "Fewest tokens a target pass.", statistics.lowest),
    ):
        if rows:
            yield Card(title, note, table=_row_table(rows), wide=True)


def _row_table(notes: tuple[RowNote, ...]) -> Table:
    head = _columns("row", numbers=("sample", "tokens", "passes", "tokens a pass"))
    rows = []
    for note in notes:
        numbers = (f"{note.tokens:,}", f"{note.passes:,}", f"{note.acceptance:.2f}")
        text = list(note.texts.values())[-1]
        rows.append((note.id, str(note.sample), *numbers, _cell(text)))
    name = list(notes[0].texts)[-1]
    return Table((*head, Column(name, text=True)), tuple(rows))


def _runs(facts: OutputFacts) -> Iterator[Card]:
    earlier = facts.metrics.get("earlier_runs", []) if facts.metrics else []
    if not earlier or facts.metrics is None:
        return
    head = _columns("run", "ended", numbers=("rows", "tokens", "tokens/s"))
    rows = tuple(
        (
            run["run"],
            run["state"].replace("_", " "),
            f"{run['rows_this_run']:,}",
            f"{run['engine']['completion_tokens']:,}",
            f"{run['tokens_per_s']:,.1f}",
        )
        for run in [*earlier, facts.metrics]
    )
    yield Card("Runs of this job", table=Table(head, rows), wide=True)


def _columns(*texts: str, numbers: tuple[str, ...] = ()) -> tuple[Column, ...]:
    return (*map(Column, texts), *(Column(name, number=True) for name in numbers))


def _cell(text: object) -> str:
    line = " ".join(str(text).split())
    return line if len(line) <= CELL else line[:CELL] + " …"
