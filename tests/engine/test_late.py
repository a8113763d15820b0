"""A head that catches up late drafts what one that follows at once does, and costs less."""

from __future__ import annotations

from typing import Any

import pytest

from eagle_batch.engine.controller import PLAIN, Shape
from eagle_batch.engine.drafters.eagle import EagleDrafter
from eagle_batch.engine.drafters.merged import MergedDrafter
from eagle_batch.engine.drafters.ngram import NgramDrafter
from eagle_batch.engine.drafters.static import StaticEagleDrafter
from eagle_batch.engine.engine import Engine
from eagle_batch.engine.request import Completion
from eagle_batch.engine.testing import tiny_head, tiny_target
from eagle_batch.models.target import Target
from tests.engine.test_parity import CONTEXT, decode_ids, mixed_requests, run

SLOTS = 3


class Turns:
    """Stands in for the controller: some plain rounds, then some with a draft, and again."""

    def __init__(self, shape: Shape, plain: int, drafted: int) -> None:
        self._turns = [PLAIN] * plain + [shape] * drafted
        self._round = 0

    def choose(self, rows: int) -> Shape:
        self._round += 1
        return self._turns[self._round % len(self._turns)]

    def plain_for_good(self, rows: int) -> bool:
        return False

    def price(self, shape: Shape, rows: int) -> float:
        return 0.0

    def observe(self, *_: object) -> None:
        pass


def build(target: Target, kind: str, *, late: bool, turns: tuple[int, int]) -> Engine:
    sizes: dict[str, Any] = {"slots": SLOTS, "capacity": CONTEXT + 8, "late": late}
    head = tiny_head(target, "eagle1" if kind == "eagle1" else "eagle3")
    drafter: Any = EagleDrafter(head, **sizes, depth=3, width=3, nodes=7)
    if kind == "static":
        drafter = StaticEagleDrafter(head, **sizes)
    if kind == "merged":
        branch = NgramDrafter(slots=SLOTS, capacity=CONTEXT, depth=2, device=target.device)
        drafter = MergedDrafter(drafter, branch)
    shape = Shape(drafter.depth, drafter.width, drafter.nodes, drafter.branch)
    engine = Engine(target, drafter, None, decode_ids, slots=SLOTS, context=CONTEXT)
    engine._controller = Turns(shape, *turns)  # type: ignore[assignment]
    return engine


def told(done: dict[str, Completion]) -> dict[str, Any]:
    return {name: (c.token_ids, c.drafted, c.accepted_by_pass) for name, c in done.items()}


@pytest.mark.parametrize("turns", [(0, 1), (3, 2), (25, 4)], ids=["always", "often", "seldom"])
@pytest.mark.parametrize("kind", ["eagle3", "eagle1", "static", "merged"])
def test_what_is_put_off_changes_no_draft(kind: str, turns: tuple[int, int]) -> None:
    """Rows come and go meanwhile, share prompts, and move between slots."""
    target = tiny_target()
    requests = mixed_requests(target.shape.vocab, count=16)
    late, at_once = (
        told(run(build(target, kind, late=late, turns=turns), requests)) for late in (True, False)
    )
    assert at_once == late
    assert any(drafted for _, drafted, _ in late.values())
    assert any(sum(accepted) for _, _, accepted in late.values())


@pytest.mark.parametrize("late", [True, False])
def test_rounds_without_a_draft_run_no_head(late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = 0
    original = EagleDrafter._run

    def counted(*args: Any) -> Any:
        nonlocal runs
        runs += 1
        return original(*args)

    monkeypatch.setattr(EagleDrafter, "_run", counted)
    target = tiny_target()
    run(
        build(target, "eagle3", late=late, turns=(1, 0)),
        mixed_requests(target.shape.vocab, count=6),
    )
    assert (runs == 0) == late
