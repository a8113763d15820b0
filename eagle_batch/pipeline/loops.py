"""Which stages are gone through again: a loop is a run of stages, the last of which repeats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from eagle_batch.pipeline.problems import Rule

if TYPE_CHECKING:
    from eagle_batch.pipeline.stage import Stage


def loops(stages: Sequence[Stage]) -> dict[int, tuple[int, int]]:
    """Return the first and the last stage of the loop that each stage is in, if it is in one."""
    found: dict[int, tuple[int, int]] = {}
    names = [stage.name for stage in stages]
    for last, stage in enumerate(stages):
        if stage.repeat is not None:
            name = stage.repeat.first
            first = last if name is None else names.index(name)
            found |= dict.fromkeys(range(first, last + 1), (first, last))
    return found


def loop_rules(stages: Sequence[Stage]) -> list[tuple[bool, Rule]]:
    """Return the rules that a loop goes back, to a stage there is, and that loops are apart."""
    names = [stage.name for stage in stages]
    rules: list[tuple[bool, Rule]] = []
    end = -1
    for last, stage in enumerate(stages):
        if stage.repeat is None:
            continue
        key = f"stages.{last}.repeat.first"
        name = stage.name if stage.repeat.first is None else stage.repeat.first
        known = name in names[: last + 1]
        shown = ", ".join(names[: last + 1])
        rules.append((not known, ((key,), f"found {name!r}; expected one of {shown}")))
        inside = known and names.index(name) <= end
        rules.append((inside, ((key,), f"found {name!r}, which is in the loop before")))
        end = last
    return rules
