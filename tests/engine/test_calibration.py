"""The cost of passes: a table from points, and points from a model."""

from __future__ import annotations

import pytest

from eagle_batch.engine.calibration import PassTable, measure_passes
from eagle_batch.engine.testing import tiny_target


@pytest.mark.parametrize(
    ("tokens", "reference", "ratio"),
    [(1, 1, 1.0), (4, 1, 1.0), (6, 4, 2.0), (8, 4, 3.0), (2, 8, 1 / 3), (16, 8, 2.0), (80, 8, 10)],
)
def test_a_ratio_is_linear_between_points_and_beyond(
    tokens: int, reference: int, ratio: float
) -> None:
    table = PassTable([(1, 0.1), (4, 0.1), (8, 0.3)])
    assert table.ratio(tokens, reference) == pytest.approx(ratio)


def test_passes_of_a_target_are_timed_up_to_the_largest_round() -> None:
    target = tiny_target()
    cache = target.new_cache(3, 64)
    points = list(measure_passes(target, cache, 48).points)
    assert [size for size, _ in points] == [1, 6, 9, 18, 33, 66]
    seconds = [each for _, each in points]
    assert seconds == sorted(seconds)
    assert seconds[0] > 0


def test_a_pass_has_no_more_tokens_than_the_cache_holds() -> None:
    target = tiny_target()
    points = measure_passes(target, target.new_cache(1, 20), 500).points
    assert [size for size, _ in points] == [1, 4, 8]
