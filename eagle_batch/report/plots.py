"""The report's plots: small figures as SVG.

Their colours are CSS variables, so that they follow the page into dark mode; their text is text.
"""

from __future__ import annotations

import io
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from eagle_batch.report.stretches import PLAIN, Stretch, by_use, shape_label

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
    "#0a0006": "--c5",
    "#0a0007": "--c6",
    "#0a0008": "--c0",
}
INK, SOFT, RULE = "#010203", "#010204", "#010205"
SERIES = ("#0a0001", "#0a0002", "#0a0003", "#0a0004")
BAD = "#0a0005"
#: Plain decoding, then drafts, the most used first.
GREY = "#0a0008"
DRAFTS = ("#0a0001", "#0a0002", "#0a0003", "#0a0004", "#0a0006", "#0a0007")
#: Inches of a figure that is as wide as the page.
WIDE = (9.9, 3.6)
#: Lines of names above such a figure; width of a name and height of a line as shares of its axes.
NAME_LINES, NAME_WIDTH, NAME_HEIGHT = 2, 0.06, 0.085
#: Columns that a figure has room for at least, so that one alone is no wall.
FEW = 4
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
    return draw_figure(name, lambda figure: paint(figure.subplots()), (SIZE[0], height))


def draw_figure(name: str, paint: Callable[[Figure], None], size: tuple[float, float]) -> str:
    """Return a figure of one or more axes as SVG markup."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=size, layout="constrained")
        paint(figure)
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


def throughput(
    found: Sequence[Stretch],
    average: float,
    switched: Sequence[float],
    heads: Sequence[tuple[float, str]] = (),
) -> str:
    """Return tokens per second over time in two colours, above the shares of the draft shapes.

    Dotted lines mark the moments of `switched`, lines with a name those of `heads`.
    """

    def paint(figure: Figure) -> None:
        rate, drafts = figure.subplots(2, 1, sharex=True, height_ratios=(3.4, 1))
        _rates(rate, found, average)
        rate.set_ylim(bottom=0)
        rate.tick_params(labelbottom=False)
        for at in switched:
            for axes in (rate, drafts):
                axes.axvline(at, color=SOFT, linestyle=":", linewidth=1.0)
        _shares_over_time(drafts, found)
        _name_moments(rate, heads, found[-1].end)
        _time(drafts, found[-1].end)
        figure.legend(*rate.get_legend_handles_labels(), loc="outside upper left", ncols=3)
        figure.legend(*drafts.get_legend_handles_labels(), loc="outside lower left", ncols=7)

    return draw_figure("throughput", paint, WIDE)


def _name_moments(axes: Axes, moments: Sequence[tuple[float, str]], last: float) -> None:
    """Mark moments, their names above the axes; where many lie close, some have no name."""
    place, free = axes.get_xaxis_transform(), [float("-inf")] * NAME_LINES
    for at, name in moments:
        x = min(at, last)
        axes.axvline(x, color=SERIES[3], linewidth=1.4)
        line = next((n for n, begin in enumerate(free) if x >= begin), None)
        if line is not None:
            free[line] = x + NAME_WIDTH * last
            style: dict[str, Any] = {"fontsize": 8.5, "color": SERIES[3], "ha": "center"}
            axes.text(x, 1.02 + NAME_HEIGHT * line, name, transform=place, **style)


def _rates(axes: Axes, found: Sequence[Stretch], average: float) -> None:
    for drafted, colour, label in ((True, DRAFTS[0], "with drafts"), (False, GREY, "plain")):
        own = [stretch for stretch in found if stretch.drafts == drafted]
        widths = [stretch.end - stretch.begin for stretch in own]
        begins, heights = [s.begin for s in own], [s.tokens_per_s for s in own]
        if own:
            axes.bar(begins, heights, widths, align="edge", color=colour, alpha=0.35, linewidth=0)
            axes.plot([], [], color=colour, alpha=0.6, linewidth=6, label=label)
    edges = [found[0].begin, *(stretch.end for stretch in found)]
    axes.stairs([stretch.tokens_per_s for stretch in found], edges, color=INK, linewidth=1.1)
    text = f"average {average:,.1f}"
    axes.axhline(average, color=SERIES[1], linestyle="--", linewidth=1.3, label=text)
    axes.yaxis.set_major_formatter(FuncFormatter(_thousands))
    axes.set_ylabel("tokens/s")


def _shares_over_time(axes: Axes, found: Sequence[Stretch]) -> None:
    total: Counter[str] = sum((Counter(s.passes) for s in found), Counter())
    bottoms = np.zeros(len(found))
    widths = [stretch.end - stretch.begin for stretch in found]
    for shape, colour in _coloured(by_use(total, len(DRAFTS))):
        shares = [s.passes.get(shape, 0) / max(1, sum(s.passes.values())) for s in found]
        begins = [stretch.begin for stretch in found]
        # Edges in the bars' own colour close the hairlines between them.
        axes.bar(begins, shares, widths, bottoms, align="edge", color=colour, edgecolor=colour)
        axes.plot([], [], color=colour, linewidth=6, label=shape_label(shape))
        bottoms += shares
    rest = [
        max(0.0, 1 - bottom) if s.passes else 0.0 for bottom, s in zip(bottoms, found, strict=True)
    ]
    if max(rest) > 0.001:
        begins = [stretch.begin for stretch in found]
        axes.bar(begins, rest, widths, bottoms, align="edge", color=RULE, edgecolor=RULE)
        axes.plot([], [], color=RULE, linewidth=6, label="others")
    axes.set_ylim(0, 1)
    axes.set_yticks([])
    axes.set_ylabel("drafts")
    axes.grid(visible=False)


def _coloured(shapes: Sequence[str]) -> list[tuple[str, str]]:
    colours = iter(DRAFTS)
    return [(shape, GREY if shape == PLAIN else next(colours)) for shape in shapes]


def choices(rows: Sequence[tuple[str, dict[str, float]]], shapes: Sequence[str]) -> str:
    """Return the share of each shape, by what there was in the batch; the first on top."""

    def paint(axes: Axes) -> None:
        labels = [label for label, _ in rows]
        lefts = np.zeros(len(rows))
        for shape, colour in _coloured(shapes):
            shares = [share.get(shape, 0.0) for _, share in rows]
            text = shape_label(shape)
            axes.barh(labels, shares, 0.6, lefts, color=colour, linewidth=0, label=text)
            lefts += shares
        if min(lefts) < 0.999:
            axes.barh(labels, 1 - lefts, 0.6, lefts, color=RULE, linewidth=0, label="others")
        axes.invert_yaxis()
        axes.set_xlim(0, 1)
        axes.xaxis.set_major_formatter(FuncFormatter(_percent))
        axes.set_ylabel("rows in the batch")
        axes.grid(visible=False)
        axes.tick_params(axis="y", length=0)
        for side in ("left", "bottom"):
            axes.spines[side].set_visible(False)
        axes.figure.legend(loc="outside lower center", ncols=3)

    lines = -(-len(shapes) // 3)
    return draw("choices", paint, height=max(1.9, 0.75 + 0.36 * len(rows) + 0.22 * lines))


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
        axes.set_xlim(0.4, max(len(values), FEW) + 0.6)
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
        axes.set_ylim(max(len(items), 2) - 0.45, -0.55)
        if base is not None:
            axes.axvline(base, color=SOFT, linestyle="--", linewidth=1.0)
        axes.set_xlim(0, max(values) * 1.18 or 1.0)
        axes.grid(visible=False)
        axes.tick_params(length=0)
        axes.set_xticks([])
        axes.spines["bottom"].set_visible(False)

    return draw(name, paint, height=0.45 + 0.36 * max(len(items), 2))


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

    return draw(name, paint, height=1.25)


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
            axes.figure.legend(loc="outside upper right", ncols=4)

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


@dataclass(frozen=True, slots=True)
class Life:
    """When a worker was ready, gone for any reason, and lost, in seconds of the run."""

    name: str
    ready: float
    ended: float | None
    lost: float | None


def lanes(
    lives: Sequence[Life],
    helps: Sequence[tuple[str, float, float]],
    end: float,
) -> str:
    """Return a bar for the life of each worker, with a triangle where it was lost.

    `helps` (worker, from, to) are drawn within: it made rows of another's shard.
    """

    def paint(axes: Axes) -> None:
        places = {life.name: place for place, life in enumerate(lives)}
        for name, begun, ended in helps:
            style: dict[str, Any] = {"height": 0.25, "color": SERIES[1], "zorder": 3}
            axes.barh([places[name]], [ended - begun], left=begun, **style)
        for place, life in enumerate(lives):
            seconds = (end if life.ended is None else life.ended) - life.ready
            style = {"left": life.ready, "height": 0.55, "color": SERIES[2], "alpha": 0.8}
            axes.barh([place], [seconds], **style)
            if life.lost is not None:
                axes.plot([life.lost], [place], marker="v", markersize=8, color=BAD, clip_on=False)
        axes.set_yticks(range(len(lives)), [life.name for life in lives])
        axes.set_ylim(len(lives) - 0.4, -0.6)
        axes.set_ylabel("worker")
        axes.grid(visible=False, axis="y")
        axes.tick_params(axis="y", length=0)
        _time(axes, end)

    return draw("workers", paint, height=min(3.6, 0.75 + 0.3 * len(lives)))


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
