"""Stretches of a run are differences of its points."""

from __future__ import annotations

import pytest

from eagle_batch.report.stretches import by_use, shape_label, stretches, switches


def point(at: float, tokens: int, passes: dict[str, int], rows: int = 0, slots: int = 0) -> dict:
    counts = {"units": 0, "row_passes": rows, "slot_passes": slots, "round_tokens": tokens}
    return {"at": at, "tokens": tokens, "passes": passes} | counts


SERIES = [
    point(0.0, 0, {}),
    point(10.0, 100, {"plain": 10}, 20, 40),
    point(20.0, 400, {"plain": 10, "2,1,2": 10}, 60, 80),
    point(30.0, 400, {"plain": 10, "2,1,2": 10}, 60, 80),
    point(40.0, 500, {"plain": 21, "2,1,2": 20}, 80, 120),
]


def test_each_has_its_own_speed_gain_occupancy_and_drafts() -> None:
    found = stretches(SERIES)
    assert [each.tokens_per_s for each in found] == [10.0, 30.0, 0.0, 10.0]
    assert [each.length for each in found] == [5.0, 7.5, None, 5.0]
    assert [each.occupancy for each in found] == [0.5, 1.0, None, 0.5]
    assert [each.drafts for each in found] == [False, True, False, False]
    assert [each.favourite for each in found] == ["plain", "2,1,2", None, "plain"]


def test_a_switch_is_where_another_shape_has_most_passes() -> None:
    assert switches(stretches(SERIES)) == [10.0, 30.0]


def test_many_points_become_few_stretches_that_lose_no_token() -> None:
    series = [point(n * 0.5, 7 * n, {"plain": n}) for n in range(1000)]
    found = stretches(series, most=20)
    assert 15 <= len(found) <= 20
    total = sum(each.tokens_per_s * (each.end - each.begin) for each in found)
    assert total == pytest.approx(7 * 999, rel=0.06)
    assert stretches(series[:1]) == []


def test_shapes_are_named_in_words_and_ordered_by_use() -> None:
    names = [shape_label(name) for name in ("plain", "3,1,3", "4,4,12")]
    assert names == ["plain", "chain of 3", "12 nodes, depth 4"]
    names = [shape_label(name) for name in ("0,0,0,+8", "2,1,2,+4", "4,4,12,+8")]
    assert names == ["branch of 8", "chain of 2, branch of 4", "12 nodes, depth 4, branch of 8"]
    assert by_use({"a": 1, "plain": 2, "b": 9, "c": 0}, 6) == ["plain", "b", "a"]
