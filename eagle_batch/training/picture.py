"""The curve of a training run as a picture: held-out acceptance by position, and the loss."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_GREY, _BLUES = "#57606a", ("#123f8c", "#2f6fde", "#7aa5ee", "#a9c5f5", "#cfdff9")


def draw_curve(path: Path, curve: Sequence[dict[str, Any]]) -> None:
    """Draw the records of `curve.jsonl` to an SVG file; a reader never sees half of it."""
    import matplotlib as mpl
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    steps = [record["step"] for record in curve]
    style: dict[Any, Any] = {"svg.hashsalt": "eagle-batch", "font.size": 9.0}
    style |= {"axes.spines.top": False, "axes.titlelocation": "left", "axes.titlesize": 10.0}
    with mpl.rc_context(style):
        figure = Figure(figsize=(7.5, 3.4), layout="constrained")
        accepted = figure.subplots()
        for place, alphas in enumerate(_by_position(curve)):
            colour = _BLUES[min(place, len(_BLUES) - 1)]
            accepted.plot(steps, alphas, color=colour, marker=".", label=f"draft {place + 1}")
        accepted.set_ylim(bottom=0)
        accepted.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        accepted.set_title(_title(curve))
        accepted.set_xlabel("step")
        accepted.set_ylabel("accepted, held out")
        loss = accepted.twinx()
        loss.plot(steps, [r["loss"] for r in curve], color=_GREY, linestyle=":", label="loss")
        loss.set_ylabel("loss", color=_GREY)
        lines = [*accepted.get_lines(), *loss.get_lines()]
        names = [str(line.get_label()) for line in lines]
        accepted.legend(lines, names, loc="lower right", frameon=False)
        partial = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        figure.savefig(partial, format="svg", metadata={"Date": None})
    partial.replace(path)


def _by_position(curve: Sequence[dict[str, Any]]) -> list[tuple[float, ...]]:
    return list(zip(*(record["acceptance"] for record in curve), strict=True))


def _title(curve: Sequence[dict[str, Any]]) -> str:
    newest = curve[-1]
    text = f"{newest['step']:,} steps in {newest['seconds'] / 60:.1f} minutes"
    length = newest["chain_length"]
    return text if length is None else f"{text}: {length:.2f} tokens a pass on greedy texts"
