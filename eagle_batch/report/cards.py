"""The cards of a report: each a question, a plot or a table that answers it, and how to read it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from eagle_batch.report import plots
from eagle_batch.report.output import Failures, OutputFacts
from eagle_batch.report.over_time import adaptation, choices, gains, occupancy, throughput
from eagle_batch.report.parts import Card, Column, Table, svg
from eagle_batch.report.progress import counted, duration
from eagle_batch.report.statistics import RowNote, RowStatistics
from eagle_batch.report.stretches import stretches

#: Characters of a text in a table.
CELL = 160
#: Workers that have a bar of their own; of more, their number is drawn.
MOST_LANES = 12


def make_cards(facts: OutputFacts, statistics: RowStatistics, failures: Failures) -> list[Card]:
    """Return the cards for which there is something to show."""
    found = stretches(facts.metrics["series"] if facts.metrics else [])
    cards = [*throughput(facts, found), *adaptation(facts), *_positions(facts), *gains(found)]
    cards += [*choices(facts), *occupancy(found), *_stages(statistics), *_time(facts)]
    cards += [*_lengths(statistics), *_workers(facts), *_failures(failures)]
    return [*cards, *_worker_tables(facts), *_notable(statistics), *_runs(facts)]


def _time(facts: OutputFacts) -> Iterator[Card]:
    share = facts.metrics["engine"]["time_share"] if facts.metrics else {}
    shares = [(name, value) for name, value in share.items() if value]
    if shares:
        yield Card(
            "Where the time went",
            "Of the engines' time: reading prompts, drafting, verifying, everything else.",
            svg(plots.split("time", shares)),
            ", ".join(f"{name} {value:.1%}" for name, value in shares),
        )


def _positions(facts: OutputFacts) -> Iterator[Card]:
    rates = facts.metrics["engine"]["acceptance_at"] if facts.metrics else []
    if any(rates):
        yield Card(
            "Accepted by position",
            "Share of the rounds that drafted this position and had it accepted.",
            svg(plots.shares("positions", rates)),
            ", ".join(f"position {n}: {rate:.0%}" for n, rate in enumerate(rates, 1)),
        )


def _stages(statistics: RowStatistics) -> Iterator[Card]:
    stages = [(stage.name, stage.acceptance) for stage in statistics.stages if stage.passes]
    if stages:
        yield Card(
            "Tokens a target pass, by stage",
            "The bonus token included. The line is plain decoding, 1.00.",
            svg(plots.bars("stages", stages, ".2f", base=1.0)),
            ", ".join(f"{name} {value:.2f}" for name, value in stages),
        )


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
        svg(plots.histogram("completions", series)),
        f"mean tokens {means}",
    )


def _workers(facts: OutputFacts) -> Iterator[Card]:
    document, timeline = facts.metrics, facts.timeline
    if document is None or not document["workers"]:
        return
    remarks = timeline["remarks"] if timeline else []
    marks = [remark["at"] for remark in remarks if _is_failure(remark["text"])]
    points = [(point["at"], point["workers"]) for point in timeline["points"]] if timeline else []
    note = "A triangle marks a worker that was lost"
    alt = f"{counted(len(document['workers']), 'worker')}; {counted(len(marks), 'failure')}"
    if len(document["workers"]) <= MOST_LANES:
        lives = list(map(_life, document["workers"]))
        helps = _helps(document)
        parts = " An orange stretch: it made rows of a shard that took another longer."
        image = svg(plots.lanes(lives, helps, document["seconds"]))
        yield Card("Workers", f"{note}.{parts if helps else ''}", image, alt)
    elif points and points[-1][0] > 0:
        text = f"{note} or did not start, or a shard that failed."
        yield Card("Workers ready", text, svg(plots.workers(points, marks)), alt)


def _life(worker: dict[str, Any]) -> plots.Life:
    # An output of an older version calls every end a loss.
    ended = worker.get("ended_at", worker["lost_at"])
    return plots.Life(str(worker["worker"]), worker["ready_at"], ended, worker["lost_at"])


def _helps(document: dict[str, Any]) -> list[tuple[str, float, float]]:
    """Return when each worker made rows of another's shard."""
    end = document["seconds"]
    return [
        (
            str(each["worker"]),
            each["begun_at"],
            end if each["ended_at"] is None else each["ended_at"],
        )
        for each in document.get("loans", [])
    ]


def _worker_tables(facts: OutputFacts) -> Iterator[Card]:
    if facts.metrics is not None and facts.metrics["workers"]:
        head = _columns("worker", "where", "device", numbers=("rows", "tokens", "tokens/s"))
        rows = tuple(map(_worker_row, facts.metrics["workers"]))
        yield Card("What each worker made", table=Table(head, rows), wide=True)
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
        _some(failures.read, failures.objects) + "They are in errors/, each with its input row.",
        svg(plots.bars("reasons", [(r, float(n)) for r, n in ordered], ",.0f", bad=True)),
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
