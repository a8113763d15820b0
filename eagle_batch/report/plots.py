"""The report's plots: small figures as SVG.

Their colours are CSS variables, so that they follow the page into dark mode; their text is text.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from itertools import cycle
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

#: Placeholder colour in the figure -> CSS variable in the page.
COLOURS = {
    "#010203": "--ink",
    "#010204": "--soft",
    "#010205": "--rule",
    "#0a0001": "--c1",
    "#0a0002": "--c2",
    "#0a0003": "--c3",
    "#0a0004": "--c4",
    "#0a0005": "--bad",
}
INK, SOFT, RULE = "#010203", "#010204", "#010205"
SERIES = ("#0a0001", "#0a0002", "#0a0003", "#0a0004")
BAD = "#0a0005"
#: Inches of one figure; a point is a CSS pixel and a third.
SIZE = (4.7, 2.55)
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "eagle-batch",
    "font.size": 9.0,
    "text.color": INK,
    "axes.labelcolor": SOFT,
    "axes.edgecolor": RULE,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.titlesize": 9.0,
    "grid.color": RULE,
    "grid.linewidth": 0.6,
    "xtick.color": RULE,
    "ytick.color": RULE,
    "xtick.labelcolor": SOFT,
    "ytick.labelcolor": SOFT,
    "legend.frameon": False,
    "legend.labelcolor": SOFT,
    "legend.fontsize": 8.5,
    "lines.linewidth": 1.8,
}


def draw(name: str, paint: Callable[[Axes], None], height: float = SIZE[1]) -> str:
    """Return one figure as SVG markup; `name` makes its ids unique within a page."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(SIZE[0], height), layout="constrained")
        paint(figure.subplots())
        out = io.StringIO()
        nothing: dict[str, Any] = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(out, format="svg", transparent=True, metadata=nothing)
    return _inline(out.getvalue(), name)


def _inline(svg: str, name: str) -> str:
    """Return the `svg` element alone, with ids of its own, CSS colours and the page's font."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r'\1 role="presentation"', svg, count=1)
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = re.sub(r'(href="|url\()#', rf"\1#{name}-", svg)
    svg = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font: \1px var(--font)", svg)
    for colour, variable in COLOURS.items():
        svg = svg.replace(colour, f"var({variable})")
    return re.sub(r"<style.*?</style>", "", svg, flags=re.DOTALL)


def throughput(points: Sequence[tuple[float, int]], average: float) -> str:
    """Return tokens per second over time, from (seconds, tokens so far)."""
    middles, rates = _rates(points)

    def paint(axes: Axes) -> None:
        axes.fill_between(middles, rates, color=SERIES[0], alpha=0.15, linewidth=0)
        axes.plot(middles, rates, color=SERIES[0], label="tokens/s")
        axes.axhline(average, color=SERIES[1], linestyle="--", linewidth=1.3, label="average")
        axes.set_ylim(bottom=0)
        _time(axes, middles[-1])
        axes.yaxis.set_major_formatter(FuncFormatter(_thousands))
        axes.legend(loc="lower right", ncols=2)

    return draw("throughput", paint)


def _rates(points: Sequence[tuple[float, int]], most: int = 60) -> tuple[list[float], list[float]]:
    """Return middles and rates of at most so many stretches of equal length."""
    first, last = points[0][0], points[-1][0]
    at = np.array([point[0] for point in points])
    total = np.array([point[1] for point in points], dtype=float)
    edges = np.linspace(first, last, min(most, len(points)))
    counts = np.interp(edges, at, total)
    rates = np.diff(counts) / np.maximum(np.diff(edges), 1e-9)
    return list((edges[:-1] + edges[1:]) / 2), list(rates)


def over_time(
    name: str, points: Sequence[tuple[float, float]], *, colour: int = 0, percent: bool = False
) -> str:
    """Return one quantity over time."""

    def paint(axes: Axes) -> None:
        axes.plot([p[0] for p in points], [p[1] for p in points], color=SERIES[colour])
        axes.set_ylim(0, 1.05 if percent else 1.15 * max(p[1] for p in points) or 1.0)
        if percent:
            axes.yaxis.set_major_formatter(FuncFormatter(_percent))
        _time(axes, points[-1][0])

    return draw(name, paint)


def shares(name: str, values: Sequence[float]) -> str:
    """Return columns of shares, by position."""

    def paint(axes: Axes) -> None:
        places = range(1, len(values) + 1)
        bars = axes.bar(places, values, color=SERIES[0], width=0.62)
        axes.bar_label(bars, [f"{value:.0%}" for value in values], padding=2, fontsize=8.5)
        axes.set_ylim(0, min(1.12, max(values) * 1.25 + 0.02))
        axes.yaxis.set_major_formatter(FuncFormatter(_percent))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlabel("drafted position")
        axes.grid(visible=False, axis="x")

    return draw(name, paint)


def bars(
    name: str,
    items: Sequence[tuple[str, float]],
    form: str,
    *,
    base: float | None = None,
    bad: bool = False,
) -> str:
    """Return horizontal bars, the first on top, each with its value; `base` is marked by a line."""

    def paint(axes: Axes) -> None:
        labels, values = [item[0] for item in items], [item[1] for item in items]
        drawn = axes.barh(labels, values, color=BAD if bad else SERIES[2], height=0.55)
        texts = [format(value, form) for value in values]
        axes.bar_label(drawn, texts, padding=4, fontsize=8.5)
        axes.invert_yaxis()
        if base is not None:
            axes.axvline(base, color=SOFT, linestyle="--", linewidth=1.0)
        axes.set_xlim(0, max(values) * 1.18 or 1.0)
        axes.grid(visible=False)
        axes.tick_params(length=0)
        axes.set_xticks([])
        axes.spines["bottom"].set_visible(False)

    return draw(name, paint, height=max(1.1, 0.62 + 0.38 * len(items)))


def split(name: str, items: Sequence[tuple[str, float]]) -> str:
    """Return one bar that is divided in shares, with a legend that states them."""

    def paint(axes: Axes) -> None:
        left = 0.0
        for (label, share), colour in zip(items, SERIES, strict=False):
            text = f"{label} {share:.1%}"
            axes.barh([0], [share], left=left, color=colour, height=0.5, label=text)
            left += share
        axes.set_xlim(0, 1)
        axes.set_ylim(-0.4, 0.4)
        axes.set_axis_off()
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, 0.0), ncols=2)

    return draw(name, paint, height=1.35)


def histogram(name: str, series: Sequence[tuple[str, np.ndarray]]) -> str:
    """Return how many rows have how many tokens, one outline for each series."""
    highest = max(int(values.max()) for _, values in series if len(values))
    edges = np.linspace(0, highest + 1, min(41, highest + 2))

    def paint(axes: Axes) -> None:
        for (label, values), colour in zip(series, cycle(SERIES), strict=False):
            axes.hist(values, bins=list(edges), color=colour, alpha=0.35, label=label)
            axes.hist(values, bins=list(edges), color=colour, histtype="step", linewidth=1.5)
        axes.set_xlabel("tokens of a completion")
        axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
        axes.yaxis.set_major_formatter(FuncFormatter(_thousands))
        if len(series) > 1:
            axes.legend(loc="upper right")

    return draw(name, paint)


def workers(points: Sequence[tuple[float, int]], marks: Sequence[float]) -> str:
    """Return the workers that were ready over time, with a mark for each thing that went wrong."""

    def paint(axes: Axes) -> None:
        at, count = [p[0] for p in points], [p[1] for p in points]
        axes.fill_between(at, count, step="post", color=SERIES[2], alpha=0.2, linewidth=0)
        axes.step(at, count, where="post", color=SERIES[2])
        levels = np.interp(marks, at, count)
        axes.plot(marks, levels, linestyle="", marker="v", markersize=8, color=BAD)
        axes.set_ylim(0, max(count) * 1.25 + 0.2)
        axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
        _time(axes, points[-1][0])

    return draw("workers", paint)


def _time(axes: Axes, last: float) -> None:
    units = ((180, 1, "seconds"), (10_800, 60, "minutes"), (float("inf"), 3600, "hours"))
    unit, word = next((unit, word) for most, unit, word in units if last < most)
    axes.set_xlim(0, max(last, 1e-3))
    axes.xaxis.set_major_locator(_UnitLocator(unit))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value / unit:g}"))
    axes.set_xlabel(word)


class _UnitLocator(MaxNLocator):
    """Round numbers of a unit, on an axis of seconds."""

    def __init__(self, unit: int) -> None:
        super().__init__(6, steps=[1, 2, 5, 10])
        self._unit = unit

    def tick_values(self, vmin: float, vmax: float) -> Any:
        """Return the places of the ticks, in seconds."""
        return np.asarray(super().tick_values(vmin / self._unit, vmax / self._unit)) * self._unit


def _percent(value: float, _: object) -> str:
    return f"{value:.0%}"


def _thousands(value: float, _: object) -> str:
    return f"{value:,.0f}" if value >= 10 or value == int(value) else f"{value:g}"
