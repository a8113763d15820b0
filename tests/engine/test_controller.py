"""The controller against a simulated engine whose costs and acceptance are known."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from eagle_batch.engine.controller import PLAIN, Controller, Shape, grid

SHAPES = grid(4, 4, 12)
Cost = Callable[[Shape, int], float]


def gain(shape: Shape, acceptance: float) -> float:
    """Tokens a row gains: a chain accepts with `acceptance` a level, a tree somewhat more."""
    rate = min(0.95, acceptance * (1.0 + 0.25 * (shape.width > 1) * shape.nodes / 12))
    return sum(rate**level for level in range(shape.depth + 1))


def memory_bound(shape: Shape, rows: int) -> float:
    """A pass costs the same for few and many tokens; drafting a level costs a tenth of it."""
    return 1.0 + 0.1 * shape.depth + 0.01 * rows * (1 + shape.nodes)


def compute_bound(shape: Shape, rows: int) -> float:
    """Every verified token costs; a tree only burns time."""
    return 0.2 + 0.2 * rows * (1 + shape.nodes) + 0.05 * shape.depth * rows


def simulate(cost: Cost, acceptance: float, rows: int, rounds: int, seed: int = 0) -> float:
    """Return tokens per second of the controller's choices over so many rounds."""
    rng = random.Random(seed)
    controller = Controller(SHAPES)
    tokens, seconds = 0.0, 0.0
    for _ in range(rounds):
        shape = controller.choose(rows)
        spent = cost(shape, rows) * rng.uniform(0.9, 1.1)
        mean = gain(shape, acceptance)
        emitted = sum(int(mean) + (rng.random() < mean % 1) for _ in range(rows))
        controller.observe(shape, rows, emitted, spent)
        tokens, seconds = tokens + emitted, seconds + spent
    return tokens / seconds


@pytest.mark.parametrize("cost", [memory_bound, compute_bound])
@pytest.mark.parametrize("acceptance", [0.1, 0.4, 0.7, 0.9])
@pytest.mark.parametrize("rows", [1, 4, 32])
def test_it_comes_near_the_best_fixed_shape_and_never_loses_to_plain(
    cost: Cost, acceptance: float, rows: int
) -> None:
    """6,000 rounds, trials and probes included."""
    rate = simulate(cost, acceptance, rows, 6000)
    fixed = {shape: rows * gain(shape, acceptance) / cost(shape, rows) for shape in SHAPES}
    assert rate >= 0.95 * max(fixed.values())
    assert rate >= 0.98 * fixed[PLAIN]


def test_it_follows_the_batch_as_it_drains() -> None:
    """A tree pays for one row, not for thirty-two; what a row gains is learned only once."""
    controller = Controller(SHAPES)

    def run(rows: int, rounds: int) -> Shape:
        for _ in range(rounds):
            shape = controller.choose(rows)
            spent = 1.0 + 0.1 * shape.depth + 0.08 * rows * (1 + shape.nodes)
            controller.observe(shape, rows, round(rows * gain(shape, 0.8)), spent)
        return controller.best(rows)

    assert run(32, 400).nodes <= 2
    assert run(1, 400).nodes >= 3


def test_an_unmeasured_size_is_inferred_from_a_measured_one() -> None:
    controller = Controller([PLAIN, Shape(2, 1, 2)])
    for _ in range(20):
        controller.observe(PLAIN, 16, 16, 1.0)
        controller.observe(Shape(2, 1, 2), 16, 32, 1.5)
    for seconds in (9.0, 0.5):  # the first round of a size is cold
        controller.observe(PLAIN, 1, 1, seconds)
    found = {e.shape: e.seconds for e in controller.estimates(1)}
    assert found[Shape(2, 1, 2)] == pytest.approx(0.75)


def test_speculation_is_given_up_only_when_nothing_comes_near() -> None:
    hopeless, useful = Controller(SHAPES), Controller(SHAPES)
    for controller, cost in ((hopeless, compute_bound), (useful, memory_bound)):
        assert not controller.plain_for_good(8)
        for _ in range(300):
            shape = controller.choose(8)
            controller.observe(shape, 8, round(8 * gain(shape, 0.3)), cost(shape, 8))
    assert hopeless.plain_for_good(8)
    assert not useful.plain_for_good(8)


def test_the_grid_holds_plain_and_the_given_shape_and_nothing_larger() -> None:
    for depth, width, nodes in ((1, 1, 1), (4, 4, 12), (6, 2, 9), (8, 10, 60)):
        shapes = grid(depth, width, nodes)
        assert shapes[0] == PLAIN
        assert len(set(shapes)) == len(shapes)
        assert all(s.depth <= depth and s.nodes <= max(nodes, depth) for s in shapes)
    assert Shape(4, 4, 12) in grid(4, 4, 12)
