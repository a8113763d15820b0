"""Heads that come while an engine runs: the text never shows it, and what was learnt counts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from eagle_batch.engine.build import Parts, assemble
from eagle_batch.engine.controller import PLAIN, Controller, Shape, grid
from eagle_batch.engine.drafters.base import Drafter
from eagle_batch.engine.drafters.merged import MergedDrafter
from eagle_batch.engine.drafters.ngram import NgramDrafter
from eagle_batch.engine.engine import Engine
from eagle_batch.engine.request import Completion, EngineSpec, Request
from eagle_batch.engine.testing import byte_tokenizer, tiny_head, tiny_model, tiny_target
from eagle_batch.errors import HeadError
from eagle_batch.models.export import export_head
from eagle_batch.models.heads import Head
from eagle_batch.models.target import Target
from tests.engine.test_parity import build, mixed_requests
from tests.engine.test_parity import run as run_to_the_end

SPEC = EngineSpec(
    "tiny", None, slots=4, context=160, depth=3, nodes=6, ngram=True, auto=True, adapt=True
)


class Eager:
    """Stands in for the controller: always the largest draft."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.renewed = 0

    def choose(self, rows: int) -> Shape:
        return self.shape

    def plain_for_good(self, rows: int) -> bool:
        return False

    def price(self, shape: Shape, rows: int) -> float:
        return 0.0

    def observe(self, *_: object) -> None:
        pass

    def renew(self) -> None:
        self.renewed += 1


def saved_head(folder: Path, target: Target, **options: object) -> str:
    export_head(tiny_head(target, **options), folder)  # type: ignore[arg-type]
    return str(folder)


def run(engine: Engine, requests: list[Request], heads: dict[int, str]) -> dict[str, Completion]:
    """Run, and give the engine a head after so many steps."""
    for request in requests:
        engine.add(request)
    done: dict[str, Completion] = {}
    steps = 0
    while engine.has_work:
        done |= {completion.request_id: completion for completion in engine.step()}
        steps += 1
        if steps in heads:
            engine.use_head(heads[steps])
    assert steps > max(heads, default=0), "a head came too late: the test is blind"
    return done


def expected_tokens(target: Target, requests: list[Request]) -> dict[str, list[int]]:
    """What the engine writes without drafts, which is what the plain decoder writes."""
    done = run_to_the_end(build(target, None, slots=3), requests)
    return {name: list(completion.token_ids) for name, completion in done.items()}


@pytest.mark.parametrize("ngram", [True, False], ids=["from n-grams", "from a head"])
def test_heads_that_come_and_go_leave_no_trace_in_the_text(tmp_path: Path, ngram: bool) -> None:
    target = tiny_target()
    heads = {
        5: saved_head(tmp_path / "a", target, draft_vocab=19, seed=1),
        11: saved_head(tmp_path / "b", target, draft_vocab=19, seed=2),
        18: saved_head(tmp_path / "c", target, kind="eagle1"),
        26: saved_head(tmp_path / "d", target, draft_vocab=12, seed=3),
    }
    first = None if ngram else tiny_head(target, draft_vocab=19, seed=4)
    branch = 4 if ngram else 0
    spec = replace(SPEC, ngram=ngram, branch=branch, head=None if ngram else "first")
    engine = assemble(Parts(target, byte_tokenizer(), first), spec)
    requests = mixed_requests(target.shape.vocab, count=16)
    done = run(engine, requests, heads)
    assert expected_tokens(target, requests) == {k: list(c.token_ids) for k, c in done.items()}
    assert isinstance(engine.drafter, MergedDrafter) == ngram, "n-grams stay a choice"


def test_a_head_is_drafted_with_at_once_and_rows_of_before_end_plainly() -> None:
    """A new drafter has seen nothing of the rows that run; it must not draft them from nothing."""
    target = tiny_target()
    engine = assemble(Parts(target, byte_tokenizer(), None), SPEC)
    head = tiny_head(target, seed=5)
    for request in mixed_requests(target.shape.vocab, count=4):
        engine.add(replace(request, params=replace(request.params, max_tokens=12)))
    engine.step()
    assert isinstance(engine.drafter, NgramDrafter)
    before = engine.drafter
    engine._take_head = lambda _name, _now: _drafter_of(target, head)
    engine.use_head("head")
    assert engine.drafter is not before
    assert not any(row.followed for row in engine._slots.rows)
    while engine.active:
        engine.step()
    assert set(dict(engine.metrics().passes_by_shape)) == {"plain"}
    engine._controller = Eager(Shape(3, 4, 6))  # type: ignore[assignment]
    for request in mixed_requests(target.shape.vocab, count=4):
        engine.add(request)
    while engine.has_work:
        engine.step()
    assert dict(engine.metrics().passes_by_shape)["3,4,6"] > 0


def _drafter_of(target: Target, head: Head) -> Drafter:
    parts = Parts(target, byte_tokenizer(), head)
    drafter = assemble(parts, replace(SPEC, ngram=False, head="head")).drafter
    assert drafter is not None
    return drafter


def test_a_head_that_learnt_on_takes_over_running_rows(tmp_path: Path) -> None:
    """The same configuration: nothing is allocated, rows stay followed, gains are learnt anew."""
    target = tiny_target()
    first = tiny_head(target, draft_vocab=19, seed=1)
    spec = replace(SPEC, ngram=False, head="first")
    engine = assemble(Parts(target, byte_tokenizer(), first), spec)
    eager = Eager(Shape(3, 4, 6))
    engine._controller = eager  # type: ignore[assignment]
    for request in mixed_requests(target.shape.vocab, count=4):
        engine.add(request)
    engine.step()
    engine.step()
    before = engine.drafter
    engine.use_head(saved_head(tmp_path / "b", target, draft_vocab=19, seed=2))
    assert engine.drafter is before
    assert all(row.followed for row in engine._slots.rows)
    assert eager.renewed == 1
    passes = dict(engine.metrics().passes_by_shape)["3,4,6"]
    engine.step()
    assert dict(engine.metrics().passes_by_shape)["3,4,6"] == passes + 1


def test_a_head_that_does_not_fit_changes_nothing(tmp_path: Path) -> None:
    target = tiny_target()
    other = Target(tiny_model(vocab=30))
    engine = assemble(Parts(target, byte_tokenizer(), None), SPEC)
    wrong = saved_head(tmp_path / "wrong", other)
    requests = mixed_requests(target.shape.vocab, count=6)
    for request in requests:
        engine.add(request)
    done = {c.request_id: c for c in engine.step()}
    drafter, controller = engine.drafter, engine._controller
    with pytest.raises(HeadError, match="does not fit"):
        engine.use_head(wrong)
    assert (engine.drafter, engine._controller) == (drafter, controller)
    while engine.has_work:
        done |= {c.request_id: c for c in engine.step()}
    assert expected_tokens(target, requests) == {k: list(c.token_ids) for k, c in done.items()}


def test_a_controller_that_is_renewed_forgets_gains_and_keeps_costs() -> None:
    """A draft that never paid is tried again; what a round costs is known already."""
    shapes = grid(3, 2, 6)
    controller = Controller(shapes)
    for _ in range(400):
        shape = controller.choose(1)
        controller.observe(shape, [()], 0.010 if shape == PLAIN else 0.020)
    assert controller.plain_for_good(1)
    costs = {e.shape: e.seconds for e in controller.estimates(1)}
    controller.renew()
    assert not controller.plain_for_good(1)
    assert {e.shape: e.seconds for e in controller.estimates(1)} == costs
    for _ in range(400):
        shape = controller.choose(1)
        walk = [(order, 0) for order in range(1, shape.depth + 1)]
        controller.observe(shape, [walk], 0.010 if shape == PLAIN else 0.020)
    assert controller.best(1).depth == 3
