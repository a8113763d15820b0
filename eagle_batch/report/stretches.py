"""What went on between the points of a run's series: speed, occupancy, gain and drafts by time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

#: Stretches that are told apart.
MOST = 60
PLAIN = "plain"


@dataclass(frozen=True, slots=True)
class Stretch:
    """The time between two points."""

    begin: float
    end: float
    tokens_per_s: float
    #: Share of the slots that held a row, and tokens that a row gained in a pass; None without any.
    occupancy: float | None
    length: float | None
    #: Passes of the target by the shape of their draft.
    passes: dict[str, int]

    @property
    def middle(self) -> float:
        """The moment that stands for it."""
        return (self.begin + self.end) / 2

    @property
    def favourite(self) -> str | None:
        """The shape of most passes."""
        return max(self.passes, key=lambda shape: self.passes[shape]) if self.passes else None

    @property
    def drafts(self) -> bool:
        """Whether most passes checked a draft."""
        return sum(self.passes.values()) > 2 * self.passes.get(PLAIN, 0)


def stretches(series: Sequence[dict[str, Any]], most: int = MOST) -> list[Stretch]:
    """Return at most so many stretches of about the same duration."""
    if len(series) < 2:
        return []
    distance = (series[-1]["at"] - series[0]["at"]) / most
    ends = [series[0]]
    for point in series[1:]:
        if point["at"] - ends[-1]["at"] >= distance > 0:
            ends.append(point)
    return [_between(before, after) for before, after in pairwise(ends)]


def switches(found: Sequence[Stretch]) -> list[float]:
    """Return the moments at which another shape became the favourite."""
    known = [stretch for stretch in found if stretch.favourite is not None]
    return [b.begin for a, b in pairwise(known) if a.favourite != b.favourite]


def by_use(passes: dict[str, int], most: int) -> list[str]:
    """Return the most used shapes; plain decoding comes first where it was used."""
    shapes = [shape for shape, count in Counter(passes).most_common(most) if count]
    return sorted(shapes, key=lambda shape: shape != PLAIN)


def shape_label(name: str) -> str:
    """Return a shape in words, from "plain" or "depth,width,nodes", with or without ",+branch"."""
    drafted, _, branch = name.partition(",+")
    beside = [f"branch of {branch}"] if branch else []
    sizes = drafted.split(",")
    if len(sizes) != 3:
        return name
    depth, width, nodes = sizes
    tree = f"chain of {depth}" if width == "1" else f"{nodes} nodes, depth {depth}"
    return ", ".join(beside if nodes == "0" else [tree, *beside])


def _between(before: dict[str, Any], after: dict[str, Any]) -> Stretch:
    seconds = max(after["at"] - before["at"], 1e-9)
    rows = after["row_passes"] - before["row_passes"]
    slots = after["slot_passes"] - before["slot_passes"]
    passes = {
        name: count - before["passes"].get(name, 0) for name, count in after["passes"].items()
    }
    return Stretch(
        begin=before["at"],
        end=after["at"],
        tokens_per_s=max(0, after["tokens"] - before["tokens"]) / seconds,
        occupancy=min(1.0, rows / slots) if slots > 0 else None,
        length=(after["round_tokens"] - before["round_tokens"]) / rows if rows > 0 else None,
        passes={name: count for name, count in passes.items() if count > 0},
    )
