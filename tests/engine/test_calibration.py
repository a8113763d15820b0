"""The cost of passes: a table from points, and points from a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

from eagle_batch.engine import calibration
from eagle_batch.engine import engine as engine_module
from eagle_batch.engine.calibration import PassTable, measure_passes
from eagle_batch.engine.drafters.draft_model import DraftModelDrafter
from eagle_batch.engine.engine import Engine
from eagle_batch.engine.request import Completion, Request, SamplingParams
from eagle_batch.engine.testing import tiny_target
from eagle_batch.models.target import Target, TargetOutput


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


class Device:
    """A clock that only the passes of one target move on."""

    def __init__(self, cost: Callable[[int], float]) -> None:
        self.now = 0.0
        self._cost = cost

    def perf_counter(self) -> float:
        return self.now

    def slow(self, target: Target) -> Target:
        forward = target.forward

        def timed(tokens_BN: Tensor, *rest: Any) -> TargetOutput:
            self.now += self._cost(tokens_BN.numel())
            return forward(tokens_BN, *rest)

        vars(target)["forward"] = timed
        return target


def decode(device: Device) -> tuple[Engine, dict[str, tuple[int, ...]]]:
    """Decode two rows on a device, with a draft that is always right."""
    target, model = device.slow(tiny_target()), tiny_target()
    sizes = {"slots": 2, "capacity": 130, "depth": 3, "width": 1, "nodes": 3}
    drafter = DraftModelDrafter(model, target_vocab=target.shape.vocab, **sizes)
    engine = Engine(target, drafter, None, str, slots=2, context=120, auto=True)
    for row in range(2):
        params = SamplingParams(max_tokens=60, ignore_eos=True, temperature=0.5 * row)
        engine.add(Request(str(row), (3, 4, 5 + row), params, noise_key=row))
    done: list[Completion] = []
    while engine.has_work:
        done += engine.step()
    return engine, {each.request_id: each.token_ids for each in done}


def test_unlike_devices_have_tables_of_their_own_and_write_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A pass of many tokens costs one device as much as a pass of one, the other far more."""
    devices = {
        "memory-bound": Device(lambda tokens: 0.015),
        "compute-bound": Device(lambda tokens: 0.003 * tokens**1.3),
    }
    texts, used, ratios = {}, {}, {}
    for name, device in devices.items():
        monkeypatch.setattr(calibration, "time", device)
        monkeypatch.setattr(engine_module, "time", device)
        engine, texts[name] = decode(device)
        used[name] = dict(engine.metrics().passes_by_shape)
        assert engine._controller is not None
        ratios[name] = engine._controller._passes(8, 1)
    assert ratios == {"memory-bound": pytest.approx(1), "compute-bound": pytest.approx(8**1.3)}
    assert max(used["memory-bound"], key=used["memory-bound"].__getitem__) != "plain"
    assert max(used["compute-bound"], key=used["compute-bound"].__getitem__) == "plain"
    assert texts["memory-bound"] == texts["compute-bound"]
