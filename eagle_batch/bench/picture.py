"""A picture of a benchmark: speed by batch, gain by batch, acceptance by position."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from eagle_batch.bench.summary import Summary

COLOURS = ("#57606a", "#2f6fde", "#c2660a", "#16876a", "#8a4fd0", "#b3357a")
STYLE: dict[Any, Any] = {
    "svg.hashsalt": "eagle-batch",
    "font.size": 9.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.titlesize": 10.0,
    "axes.titlelocation": "left",
    "grid.color": "#e3e6ea",
    "axes.edgecolor": "#b8bfc7",
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "lines.markersize": 5.0,
}


def save_picture(path: Path, records: list[dict[str, Any]], summary: Summary) -> None:
    """Draw the records of a benchmark to a file, in the format that its name ends with."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(10.5, 3.4), layout="constrained")
        speed, gain, accepted = figure.subplots(1, 3)
        _by_batch(speed, records, "tokens_per_second", skip_plain=False)
        speed.set_title("Tokens a second")
        speed.set_ylim(bottom=0)
        speed.legend(loc="best", fontsize=8)
        _by_batch(gain, records, "ratio", skip_plain=True)
        _mark_break_even(gain, summary)
        _positions(accepted, records)
        figure.suptitle(summary.headline, x=0.01, ha="left", fontsize=11, fontweight="bold")
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)


def _names(records: list[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(record["draft"] for record in records))


def _by_batch(axes: Axes, records: list[dict[str, Any]], key: str, *, skip_plain: bool) -> None:
    for name, colour in zip(_names(records), COLOURS, strict=False):
        if skip_plain and name == "plain":
            continue
        own = [record for record in records if record["draft"] == name]
        points = [record["batch"] for record in own], [record[key] for record in own]
        axes.plot(*points, marker="o", color=colour, label=name)
    batches = sorted({record["batch"] for record in records})
    axes.set_xscale("log", base=2)
    axes.set_xticks(batches, [f"{batch}" for batch in batches])
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("rows in the batch")


def _mark_break_even(axes: Axes, summary: Summary) -> None:
    axes.set_title("Against plain decoding")
    axes.axhline(1.0, color=COLOURS[0], linestyle="--", linewidth=1.2)
    low, high = axes.get_ylim()
    axes.set_ylim(min(low, 0.9), max(high, 1.1))
    crossing = summary.break_even and summary.break_even.batch
    if crossing:
        axes.axvline(crossing, color="#cf2f3a", linestyle=":", linewidth=1.2)
        text = f" break-even\n about {crossing:.2g} rows"
        axes.annotate(text, (crossing, axes.get_ylim()[1]), va="top", fontsize=8, color="#cf2f3a")


def _positions(axes: Axes, records: list[dict[str, Any]]) -> None:
    """Draw the acceptance of each draft at its smallest batch: it hardly depends on the batch."""
    axes.set_title("Accepted by position")
    for name, colour in zip(_names(records), COLOURS, strict=False):
        own = [record for record in records if record["draft"] == name and record["accepted_at"]]
        if own:
            rates = own[0]["accepted_at"]
            axes.plot(range(1, len(rates) + 1), rates, marker="o", color=colour, label=name)
            axes.set_xticks(range(1, max(len(rates), int(axes.get_xlim()[1])) + 1))
    axes.set_ylim(0, 1)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0%}"))
    axes.set_xlabel("drafted position")
