"""The controller against a simulated engine whose costs and acceptance are known."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache

import pytest

from eagle_batch.engine.controller import (
    PLAIN,
    Controller,
    PassRatio,
    Shape,
    grid,
    would_accept,
)

SHAPES = grid(4, 4, 12)
Cost = Callable[[Shape, int], float]


def draw(rng: random.Random, acceptance: float) -> list[tuple[int, int]]:
    """Return where the target's next tokens lie in a boundless tree: order and rank, by level."""
    walk, order = [], 0
    for _ in range(SHAPES[-1].depth):
        if rng.random() < acceptance:
            rank = 0
        elif rng.random() < 0.5:
            rank = rng.randint(1, 3)
        else:
            break
        order += 1 + rng.randint(0, 1) + 2 * rank
        walk.append((order, rank))
    return walk


def taken(shape: Shape, walk: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the part of a walk that a draft holds."""
    for level, (order, rank) in enumerate(walk):
        too_late = shape.width > 1 and order > shape.nodes
        if level == shape.depth or rank >= shape.width or too_late:
            return walk[:level]
    return walk


@cache
def gain(shape: Shape, acceptance: float) -> float:
    """Tokens that a row gains on average."""
    rng = random.Random(1)
    return 1 + sum(len(taken(shape, draw(rng, acceptance))) for _ in range(20_000)) / 20_000


def finished(
    shape: Shape, rows: int, acceptance: float, rng: random.Random
) -> list[list[tuple[int, int]]]:
    """Return the walks of one round."""
    return [taken(shape, draw(rng, acceptance)) for _ in range(rows)]


def memory_bound(shape: Shape, rows: int) -> float:
    """A pass costs the same for few and many tokens; drafting a level costs a tenth of it."""
    return 1.0 + 0.1 * shape.depth + 0.01 * rows * (1 + shape.nodes)


def compute_bound(shape: Shape, rows: int) -> float:
    """Every verified token costs; a tree only burns time."""
    return 0.2 + 0.2 * rows * (1 + shape.nodes) + 0.05 * shape.depth * rows


def simulate(
    cost: Cost,
    acceptance: float,
    rows: int,
    rounds: int,
    seed: int = 0,
    passes: PassRatio | None = None,
) -> float:
    """Return tokens per second of the controller's choices over so many rounds."""
    rng = random.Random(seed)
    controller = Controller(SHAPES, passes)
    tokens, seconds = 0.0, 0.0
    for _ in range(rounds):
        shape = controller.choose(rows)
        spent = cost(shape, rows) * rng.uniform(0.9, 1.1)
        walks = finished(shape, rows, acceptance, rng)
        controller.observe(shape, walks, spent)
        tokens, seconds = tokens + rows + sum(map(len, walks)), seconds + spent
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


@pytest.mark.parametrize("acceptance", [0.2, 0.5, 0.8])
def test_a_short_job_learns_from_one_trial_of_the_largest_tree(acceptance: float) -> None:
    """300 rounds of one row, about as many as four short answers take."""
    rate = simulate(memory_bound, acceptance, 1, 300)
    fixed = {shape: gain(shape, acceptance) / memory_bound(shape, 1) for shape in SHAPES}
    assert rate >= 0.9 * max(fixed.values())


def calibrated(tokens: int, reference: int) -> float:
    """The ratio of passes in the compute-bound world."""
    return (0.2 + 0.2 * tokens) / (0.2 + 0.2 * reference)


@pytest.mark.parametrize("acceptance", [0.2, 0.5, 0.8])
@pytest.mark.parametrize("rows", [8, 32])
def test_a_short_job_on_a_full_batch_loses_nothing_to_trials(acceptance: float, rows: int) -> None:
    """120 rounds: one batch of answers, on a device whose every token costs."""
    rate = simulate(compute_bound, acceptance, rows, 120, passes=calibrated)
    assert rate >= 0.95 * rows / compute_bound(PLAIN, rows)
    assert rate > simulate(compute_bound, acceptance, rows, 120)


@pytest.mark.parametrize("acceptance", [0.3, 0.7])
def test_what_a_large_tree_accepts_tells_what_each_smaller_one_would(acceptance: float) -> None:
    controller, rng = Controller(SHAPES), random.Random(3)
    largest = SHAPES[-1]
    for _ in range(4000):
        controller.observe(largest, finished(largest, 1, acceptance, rng), 1.0)
    for found in controller.estimates(1):
        assert found.tokens_per_row == pytest.approx(gain(found.shape, acceptance), rel=0.12)


@pytest.mark.parametrize("seed", range(4))
def test_it_finds_out_when_texts_become_easy_to_foresee(seed: int) -> None:
    """The draft in use says nothing of larger ones; surveys do."""
    rng, controller = random.Random(seed), Controller(SHAPES)
    ideal = seconds = 0.0
    best = min(memory_bound(shape, 1) / gain(shape, 0.9) for shape in SHAPES)
    for number in range(3600):
        shape = controller.choose(1)
        walks = finished(shape, 1, 0.9, rng) if number >= 600 else [[]]
        controller.observe(shape, walks, memory_bound(shape, 1))
        if number >= 2600:
            ideal += best * gain(shape, 0.9)
            seconds += memory_bound(shape, 1)
    assert ideal / seconds > 0.95


def test_a_node_has_its_price() -> None:
    """In tokens that the batch makes while a pass gets longer by a node in every row."""

    def seconds(tokens: int) -> float:
        return 0.2 + 0.2 * tokens

    controller, rng = Controller(SHAPES, calibrated, pass_seconds=seconds), random.Random(0)
    assert controller.price(Shape(2, 1, 2), 8) == 0
    for _ in range(300):
        shape = controller.choose(8)
        controller.observe(shape, finished(shape, 8, 0.2, rng), compute_bound(shape, 8))
    assert controller.best(8) == PLAIN
    # A pass over 16 tokens instead of 8 costs 0.2 * 8 more than 0.2 + 0.2 * 8, all for 8 tokens.
    assert controller.price(PLAIN, 8) == pytest.approx(1.6 / 1.8, rel=0.02)
    assert controller.price(Shape(2, 1, 2), 8) == pytest.approx(1.6 / 1.8, rel=0.02)
    assert Controller(SHAPES, calibrated).price(PLAIN, 8) == 0


def test_it_follows_the_batch_as_it_drains() -> None:
    """A tree pays for one row, not for thirty-two; what a row gains is learned only once."""
    controller, rng = Controller(SHAPES), random.Random(0)

    def run(rows: int, rounds: int) -> Shape:
        for _ in range(rounds):
            shape = controller.choose(rows)
            spent = 1.0 + 0.1 * shape.depth + 0.08 * rows * (1 + shape.nodes)
            controller.observe(shape, finished(shape, rows, 0.8, rng), spent)
        return controller.best(rows)

    assert run(32, 400).nodes <= 2
    assert run(1, 400).nodes >= 3


def test_an_unmeasured_size_is_inferred_from_a_measured_one() -> None:
    controller = Controller([PLAIN, Shape(2, 1, 2)])
    for _ in range(20):
        controller.observe(PLAIN, [[]] * 16, 1.0)
        controller.observe(Shape(2, 1, 2), [[(1, 0)]] * 16, 1.5)
    for seconds in (9.0, 0.5):  # the first round of a size is cold
        controller.observe(PLAIN, [[]], seconds)
    found = {e.shape: e.seconds for e in controller.estimates(1)}
    assert found[Shape(2, 1, 2)] == pytest.approx(0.75)


def test_speculation_is_given_up_only_when_nothing_comes_near() -> None:
    hopeless, useful = Controller(SHAPES), Controller(SHAPES)
    for controller, cost in ((hopeless, compute_bound), (useful, memory_bound)):
        assert not controller.plain_for_good(8)
        for _ in range(300):
            shape = controller.choose(8)
            controller.observe(shape, finished(shape, 8, 0.3, random.Random(0)), cost(shape, 8))
    assert hopeless.plain_for_good(8)
    assert not useful.plain_for_good(8)


def test_the_grid_holds_plain_and_the_given_shape_and_nothing_larger() -> None:
    for depth, width, nodes in ((1, 1, 1), (4, 4, 12), (6, 2, 9), (8, 10, 60)):
        shapes = grid(depth, width, nodes)
        assert shapes[0] == PLAIN
        assert len(set(shapes)) == len(shapes)
        assert all(s.depth <= depth and s.nodes <= max(nodes, depth) for s in shapes)
    assert Shape(4, 4, 12) in grid(4, 4, 12)


def test_a_walk_down_tree_and_branch_tells_what_smaller_ones_would_have_gained() -> None:
    """Nodes of a branch come behind those of the tree, and it begins at the root."""
    ran = Shape(3, 4, 6, 5)
    walk = [(1, 0), (3, 1), (8, 0), (9, 0)]
    held = {
        Shape(3, 4, 6, 2): 2,
        Shape(0, 0, 0, 5): 4,
        Shape(0, 0, 0, 3): 3,
        Shape(1, 4, 2, 5): 4,
        Shape(3, 4, 6): 2,
        Shape(3, 1, 3): 1,
        Shape(2, 4, 2): 1,
    }
    assert {shape: would_accept(shape, ran, walk) for shape in held} == held
    # In the tree alone: whether a branch went the same way is not known.
    assert would_accept(Shape(0, 0, 0, 5), ran, walk[:2]) == 0
    assert would_accept(Shape(2, 4, 3, 5), ran, walk[:2]) == 2


@pytest.mark.parametrize("rows", [1, 8])
def test_a_branch_that_pays_is_found(rows: int) -> None:
    """The head is right in one of four, a repeated text all along the branch in one of two."""
    rng, shapes = random.Random(0), grid(4, 4, 12, 8)
    controller = Controller(shapes)
    tokens = seconds = 0.0
    for _ in range(2000):
        shape = controller.choose(rows)
        walks = []
        for _ in range(rows):
            repeats = rng.random() < 0.5
            along = [(shape.nodes + 2 + place, 0) for place in range(shape.branch)]
            walks.append(along if repeats else taken(shape, draw(rng, 0.25)))
        spent = 1.0 + 0.02 * rows * (1 + shape.tokens)
        controller.observe(shape, walks, spent)
        tokens, seconds = tokens + rows + sum(map(len, walks)), seconds + spent
    branch = (1 + 0.5 * 8) / (1.0 + 0.02 * rows * 9)
    assert tokens / seconds / rows > 0.93 * branch


@pytest.mark.parametrize("sizes", [(1, 32), (32, 16), (8, 4, 2)])
def test_plain_decoding_is_known_at_every_number_of_rows(sizes: tuple[int, ...]) -> None:
    """What it costs with some rows says nothing of what it costs with others."""
    controller, rng = Controller(SHAPES, calibrated), random.Random(0)
    for rows in sizes:
        for _ in range(60):
            shape = controller.choose(rows)
            cost = compute_bound(shape, rows)
            controller.observe(shape, finished(shape, rows, 0.3, rng), cost)
        assert controller.best(rows) == PLAIN
