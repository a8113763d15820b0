"""The cards that tell how a run went: speed and phases, gains, occupancy, the drafts chosen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from eagle_batch.report import plots
from eagle_batch.report.output import OutputFacts
from eagle_batch.report.parts import Card, Column, Table, svg
from eagle_batch.report.progress import duration
from eagle_batch.report.stretches import Stretch, by_use, shape_label, switches

#: Draft shapes that are told apart, the most used ones, and switches that are marked.
MOST_SHAPES, MOST_SWITCHES = 6, 12


def throughput(facts: OutputFacts, found: Sequence[Stretch]) -> Iterator[Card]:
    """Show tokens a second, when drafts were checked, and when another shape took over."""
    if facts.metrics is None or len(found) < 3:
        return
    average, switched = facts.metrics["tokens_per_s"], switches(found)
    times = f"{len(switched)} times" if len(switched) != 1 else "once"
    note = "Tokens a second of the last run, and below the share of each draft among the passes."
    if switched:
        note += f" The draft of most passes changed {times}"
        note += "; dotted lines mark it." if len(switched) <= MOST_SWITCHES else "."
    marks = switched if len(switched) <= MOST_SWITCHES else []
    alt = f"{average:,.1f} tokens a second on average; draft changed {times}"
    heads = [(event["at"], f"head {event['version']}") for event in _switched(facts)]
    if heads:
        note += " A line with a number is a head that was trained beside the job and took over."
        alt += f"; {len(heads)} trained heads took over"
    drawn = plots.throughput(found, average, marks, heads)
    yield Card("Throughput", note, svg(drawn), alt, wide=True)


def _events(facts: OutputFacts) -> list[dict[str, Any]]:
    return list((facts.metrics or {}).get("adaptation", {}).get("events", []))


def _switched(facts: OutputFacts) -> list[dict[str, Any]]:
    return [event for event in _events(facts) if event["kind"] == "switch"]


def adaptation(facts: OutputFacts) -> Iterator[Card]:
    """Show what became of the head that was trained beside the job."""
    events = _events(facts)
    if not events:
        return
    names = ("learnt from", "seconds of training", "in use", "after training")
    numbers = (Column(name, number=True) for name in names)
    head = (Column("after", number=True), Column("what", text=True), *numbers)
    yield Card(
        "Adaptation",
        "Rounds of training beside the job. In use and after training: tokens a pass that a chain "
        "of drafts is expected to give on texts of this job that were held out; plain decoding "
        "gives 1. The head lies in the output's head/.",
        table=Table(head, tuple(map(_event_row, events))),
        wide=True,
    )


def _event_row(event: dict[str, Any]) -> tuple[str, ...]:
    if event["kind"] == "stopped":
        return (duration(event["at"]), event["text"], "", "", "", "")
    what = f"head {event['version']} took over" if event["kind"] == "switch" else "no gain, undone"
    before = "no head" if event["before"] is None else f"{event['before']:.2f}"
    numbers = (f"{event['tokens']:,} tokens", f"{event['seconds']:.0f}")
    return (duration(event["at"]), what, *numbers, before, f"{event['after']:.2f}")


def occupancy(found: Sequence[Stretch]) -> Iterator[Card]:
    """Show how full the batch was."""
    points = [(s.middle, s.occupancy) for s in found if s.occupancy is not None]
    if len(points) >= 3:
        yield Card(
            "Slots in use",
            "Share of the batch that held a row. It falls where rows run out, at the end.",
            svg(plots.over_time("occupancy", points, percent=True)),
            f"from {points[0][1]:.0%} to {points[-1][1]:.0%}",
        )


def gains(found: Sequence[Stretch]) -> Iterator[Card]:
    """Show how many tokens a pass gave a row."""
    points = [(s.middle, s.length) for s in found if s.length is not None]
    if len(points) >= 3:
        yield Card(
            "Tokens a target pass, over time",
            "What one row gains in one pass of the target; plain decoding gains 1.",
            svg(plots.over_time("lengths", points, colour=2)),
            f"from {points[0][1]:.2f} to {points[-1][1]:.2f}",
        )


def choices(facts: OutputFacts) -> Iterator[Card]:
    """Show what the controller chose by the rows in the batch; a fixed shape needs no picture."""
    passes = facts.metrics["engine"].get("passes_by_rows", []) if facts.metrics else []
    by_rows: dict[int, Counter[str]] = {}
    for kind, count in passes:
        rows, _, shape = kind.partition(" ")
        by_rows.setdefault(int(rows), Counter())[shape] += count
    total: Counter[str] = sum(by_rows.values(), Counter())
    if len(total) < 2:
        return
    shapes = by_use(total, MOST_SHAPES)
    lines = [
        (_rows_label(rows), {shape: count / found.total() for shape, count in found.items()})
        for rows, found in sorted(by_rows.items())
    ]
    shares = ((shape, total[shape] / total.total()) for shape in shapes)
    yield Card(
        "Drafts chosen, by rows in the batch",
        "Share of the passes at that occupancy that checked each draft. More rows leave the device "
        "less to spare for drafts.",
        svg(plots.choices(lines, shapes)),
        ", ".join(f"{shape_label(shape)} {share:.1%}" for shape, share in shares),
    )


def _rows_label(most: int) -> str:
    """Return the numbers of rows of a kind, which ends at a power of two."""
    least = most // 2 + 1
    return str(most) if least >= most else f"{least}-{most}"
