"""Prompts run in the same pass as the rows that are being decoded, and nobody notices."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from eagle_batch.engine.controller import Shape
from eagle_batch.engine.engine import Engine
from eagle_batch.engine.prefill import Group, Rectangle, rectangles
from eagle_batch.engine.testing import tiny_target
from eagle_batch.models.cache import Cache, KeyValueCache, causal_visibility
from eagle_batch.models.target import Pass, TargetOutput
from tests.engine.test_parity import ScriptedController, build, mixed_requests, run


def chain(cache: Cache, first: int, base: int, tokens_BN: Tensor) -> Pass:
    B, N = tokens_BN.shape
    base_B = torch.full((B,), base)
    places_BN = base_B[:, None] + torch.arange(N)
    visible = causal_visibility(B, N, tokens_BN.device)
    step = cache.step(first, places_BN, base_B, visible, places_BN, base + N)
    return Pass(tokens_BN, places_BN, step)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
@pytest.mark.parametrize("aux_layers", [(), (1, 3)])
@torch.inference_mode()
def test_passes_in_one_give_what_each_gives_alone(family: str, aux_layers: tuple[int, ...]) -> None:
    target = tiny_target(family)
    before = torch.tensor([[3, 4, 5, 6, 7], [8, 9, 10, 11, 12]])
    new = [torch.tensor([[13, 14, 15], [16, 17, 18]]), torch.tensor([[19, 20, 21, 22, 3, 5, 7]])]
    outputs: list[list[TargetOutput]] = []
    stores = []
    for together in (True, False):
        cache = target.new_cache(3, 16)
        target.forward_together([chain(cache, 0, 0, before)])
        passes = [chain(cache, 0, 5, new[0]), chain(cache, 2, 0, new[1])]
        if together:
            outputs.append(target.forward_together(passes, aux_layers))
        else:
            alone = (
                target.forward(p.tokens_BN, p.positions_BN, p.step, aux_layers) for p in passes
            )
            outputs.append(list(alone))
        assert isinstance(cache, KeyValueCache)
        stores.append(cache.store)
    torch.testing.assert_close(stores[0], stores[1], rtol=1e-5, atol=1e-5)
    for mine, alone in zip(*outputs, strict=True):
        torch.testing.assert_close(mine.hidden_BNH, alone.hidden_BNH, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(mine.features_BNF, alone.features_BNF, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("controlled", [False, True])
def test_prompts_go_along_with_a_round(controlled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    joined: list[bool] = []
    groups: list[int] = []
    one_round, begin = Engine._round, Engine._begin

    def counted(self: Engine, shape: Shape, rows: int, group: Group | None) -> None:
        joined.append(group is not None)
        one_round(self, shape, rows, group)

    def begun(
        self: Engine, group: Group, outputs: Sequence[TargetOutput], logits_B1V: Tensor
    ) -> None:
        groups.append(len(group.rows))
        begin(self, group, outputs, logits_B1V)

    monkeypatch.setattr(Engine, "_round", counted)
    monkeypatch.setattr(Engine, "_begin", begun)
    target = tiny_target()
    engine = build(target, "tree", slots=4, auto=controlled)
    if controlled:
        engine._controller = ScriptedController()  # type: ignore[assignment]
    done = run(engine, mixed_requests(target.shape.vocab, count=16))
    assert len(done) == sum(groups) == 16
    # The first prompts find no row that is decoded, nor do those that come when most rows ended.
    assert sum(joined) > len(groups) // 2
    if controlled:
        assert (True, True) not in set(pairwise(joined)), "the controller could not time a round"


def test_the_output_projection_is_read_once_for_a_round_and_the_prompts_beside_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = tiny_target()
    engine = build(target, None, slots=4)
    read: list[int] = []
    logits = target.logits

    def counted(hidden: Tensor) -> Tensor:
        read.append(hidden.shape[:-1].numel())
        return logits(hidden)

    monkeypatch.setattr(target, "logits", counted)
    joined = 0
    requests = mixed_requests(target.shape.vocab, count=16)
    for request in requests:
        engine.add(replace(request, params=replace(request.params, logprobs=None)))
    while engine.has_work:
        read.clear()
        before, waiting = engine.active, engine.waiting
        engine.step()
        if engine._joined:
            joined += 1
            assert read == [before + waiting - engine.waiting]
    assert joined > 4


def test_prompts_are_cut_into_rectangles_with_little_padding() -> None:
    assert rectangles([9, 10, 10, 40]) == [Rectangle(0, 3, 10), Rectangle(3, 4, 40)]
    rng = random.Random(2)
    for _ in range(200):
        widths = [rng.choice((0, -3, 1, rng.randrange(1, 90))) for _ in range(rng.randrange(1, 9))]
        found = rectangles(widths)
        rows = [row for each in found for row in range(each.first, each.stop)]
        assert rows == [row for row, width in enumerate(widths) if width > 0]
        for each in found:
            inside = widths[each.rows]
            assert max(inside) == each.width
            assert each.width * len(inside) <= 1.25 * sum(inside)
