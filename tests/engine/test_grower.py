"""Trees grown in one compiled call against the same trees grown level by level."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from eagle_batch.engine.controller import Shape
from eagle_batch.engine.drafters import growing
from eagle_batch.engine.drafters.base import CommittedChain, DraftState
from eagle_batch.engine.drafters.eagle import EagleDrafter
from eagle_batch.engine.engine import Engine
from eagle_batch.engine.request import SamplingParams
from eagle_batch.engine.sampling import pack_params
from eagle_batch.engine.testing import tiny_head, tiny_target
from eagle_batch.engine.tree import DraftTree
from eagle_batch.models.cache import KeyValueCache
from eagle_batch.models.fused_head import fuse_head
from eagle_batch.models.heads import Head
from eagle_batch.models.target import Target
from tests.engine.test_parity import CONTEXT, decode_ids, mixed_requests, run

pytest.importorskip("numba")
Team: Any = pytest.importorskip("eagle_batch.models.team").Team
grower: Any = pytest.importorskip("eagle_batch.engine.drafters.grower")
tiles: Any = pytest.importorskip("eagle_batch.models.tiles")

SLOTS, CAPACITY = 4, 64
SAMPLED = SamplingParams(temperature=0.8)
NARROW = SamplingParams(temperature=1.3, top_k=5, top_p=0.7, min_p=0.02)
KINDS = {
    "greedy": [SamplingParams()],
    "sampled": [SAMPLED],
    "mixed": [SAMPLED, NARROW],
}


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target()


@pytest.fixture(params=[True, False], ids=["pairs", "singles"])
def products(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products that take bfloat16 in, where the processor has them, and those of float32."""
    if request.param and not tiles.PAIRS:
        pytest.skip("this processor has no products in bfloat16")
    monkeypatch.setattr(tiles, "PAIRS", request.param)


def fused(
    target: Target, *, dtype: torch.dtype = torch.float32, seed: int = 1, **changes: Any
) -> Head:
    """A head whose matrices are shared between three threads, in several units each."""
    options: dict[str, Any] = {"draft_vocab": 19, "intermediate": 64} | changes
    head = tiny_head(target, seed=seed, **options).to(dtype)
    head.bind(target.embed_weight_VH, target.lm_head_weight_VH)
    fuse_head(head, Team(3))
    return head


def drafter_of(head: Head, *, late: bool = False) -> EagleDrafter:
    """A drafter whose rows have committed tokens, each row a number of its own."""
    drafter = EagleDrafter(
        head, slots=SLOTS, capacity=CAPACITY, depth=4, width=3, nodes=9, late=late
    )
    generator = torch.Generator().manual_seed(5)
    features = torch.randn(SLOTS, 12, head.config.feature_width, generator=generator)
    tokens_BA = torch.randint(0, head.config.vocab, (SLOTS, 12), generator=generator)
    last_B = torch.tensor([11, 3, 7, 0])
    chain = CommittedChain(0, torch.zeros(SLOTS, dtype=torch.int64), last_B, 0)
    drafter.extend(chain, features.to(drafter.states_SH.dtype), tokens_BA)
    return drafter


def state_of(
    rows: int, first: int, params: list[SamplingParams], later: list[int] | None = None
) -> DraftState:
    """later: tokens of each row since `drafter_of`."""
    length_B = torch.tensor([12, 4, 8, 1]) + torch.tensor(later or [0] * SLOTS)
    length_B = length_B[first : first + rows]
    chosen = [params[row % len(params)] for row in range(rows)]
    return DraftState(
        first_row=first,
        root_B=torch.arange(rows) + 3,
        length_B=length_B,
        index_B=torch.arange(rows) * 5,
        params=pack_params(chosen, [77 + row for row in range(rows)], torch.device("cpu")),
        longest=int(length_B.max()),
    )


def both(drafter: EagleDrafter, state: DraftState) -> tuple[DraftTree, DraftTree]:
    """Draft in one call and level by level."""
    assert drafter._grower is not None
    with torch.inference_mode():
        at_once = drafter.draft(state)
        grower, drafter._grower = drafter._grower, None
        by_level = drafter.draft(state)
    drafter._grower = grower
    return at_once, by_level


def assert_same(found: DraftTree, expected: DraftTree) -> None:
    for field in fields(DraftTree):
        values = [getattr(tree, field.name) for tree in (found, expected)]
        same = torch.equal(*values) if isinstance(values[0], Tensor) else values[0] == values[1]
        assert same, field.name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "first"), [(1, 2), (4, 0)])
@pytest.mark.parametrize("shape", [(1, 2, 2), (3, 1, 3), (4, 3, 9), (3, 3, 5)], ids=str)
@pytest.mark.usefixtures("products")
def test_one_call_grows_what_the_levels_grow(
    target: Target, kind: str, rows: int, first: int, shape: tuple[int, int, int]
) -> None:
    """Shapes change from round to round over the same memory."""
    drafter = drafter_of(fused(target))
    for each in (Shape(*shape), Shape(4, 3, 9), Shape(*shape)):
        drafter.use(each)
        found, expected = both(drafter, state_of(rows, first, KINDS[kind]))
        assert_same(found, expected)
        assert len(found.tokens_BN.unique()) > rows


@pytest.mark.parametrize("kind", KINDS)
def test_one_call_leaves_out_what_the_levels_leave_out(target: Target, kind: str) -> None:
    drafter = drafter_of(fused(target))
    whole, _ = both(drafter, state_of(4, 0, KINDS[kind]))
    found, expected = both(drafter, replace(state_of(4, 0, KINDS[kind]), price=0.1))
    assert_same(found, expected)
    assert found.used_BN is not None
    assert 4 < int(found.used_BN.sum()) < found.tokens_BN.numel()
    assert torch.equal(found.tokens_BN[found.used_BN], whole.tokens_BN[found.used_BN])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("products")
def test_a_head_in_bfloat16_grows_nearly_the_same(target: Target, kind: str) -> None:
    """Embeddings and the states of the first level are rounded after their norm in one of them."""
    drafter = drafter_of(fused(target, dtype=torch.bfloat16))
    found, expected = both(drafter, state_of(4, 0, KINDS[kind]))
    same = (found.tokens_BN == expected.tokens_BN).float().mean()
    assert same > 0.85


@pytest.mark.parametrize("kind", KINDS)
def test_the_best_of_a_larger_vocabulary_are_candidates(
    target: Target, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (growing, grower):
        monkeypatch.setattr(module, "CANDIDATES", 6)
    assert_same(*both(drafter_of(fused(target)), state_of(4, 0, KINDS[kind])))


def test_what_a_filter_refuses_is_drafted_last_and_only_once(target: Target) -> None:
    """The target's own filter may keep it."""
    drafter = drafter_of(fused(target))
    only = SamplingParams(temperature=1.0, top_k=1)
    found, expected = both(drafter, state_of(4, 0, [only]))
    for tree in (found, expected):
        for row in range(4):
            nodes = (tree.parents_BN[row, 1:].tolist(), tree.tokens_BN[row, 1:].tolist())
            edges = list(zip(*nodes, strict=True))
            assert len(set(edges)) == len(edges)
    first = found.order_BN == 1
    assert torch.equal(found.tokens_BN[first], expected.tokens_BN[expected.order_BN == 1])


@pytest.mark.parametrize(
    "changes",
    [{"fc_bias": True, "qkv_bias": True}, {"draft_vocab": None}, {"norm_before_residual": True}],
    ids=["biases", "whole vocabulary", "normed residual"],
)
def test_usual_variants_of_heads_grow_in_one_call(target: Target, changes: dict[str, Any]) -> None:
    at_once, by_level = (drafter_of(fused(target, **changes), late=True) for _ in range(2))
    assert at_once._grower is not None
    assert at_once._grower.follows
    by_level._grower = None
    state = state_of(4, 0, KINDS["greedy"])
    with torch.inference_mode():
        assert_same(at_once.draft(state), by_level.draft(state))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.usefixtures("products")
def test_rows_that_are_behind_catch_up_in_the_same_call(target: Target, dtype: torch.dtype) -> None:
    """Some by many tokens, some by none, and all of them go on from where they are now."""
    bound = 1e-4 if dtype == torch.float32 else 0.2
    near: dict[str, Any] = {"rtol": bound, "atol": bound}
    at_once, by_level = (drafter_of(fused(target, dtype=dtype), late=True) for _ in range(2))
    assert at_once._grower is not None
    assert at_once._grower.follows
    by_level._grower = None
    generator = torch.Generator().manual_seed(8)
    for turn in range(3):
        state = state_of(4, 0, KINDS["greedy"], later=[turn, 3 * turn, 0, 2 * turn])
        with torch.inference_mode():
            found, expected = at_once.draft(state), by_level.draft(state)
        torch.testing.assert_close(at_once.states_SH, by_level.states_SH, **near)
        stores = [cast("KeyValueCache", each.cache).store for each in (at_once, by_level)]
        for row, length in enumerate(state.length_B.tolist()):
            kept = [store[:, row, :length] for store in stores]
            torch.testing.assert_close(*kept, **near)
        if dtype == torch.float32:
            assert_same(found, expected)
        features = torch.randn(4, 4, 3 * target.shape.hidden, generator=generator).to(dtype)
        tokens_BA = torch.randint(0, target.shape.vocab, (4, 4), generator=generator)
        chain = CommittedChain(0, state.length_B, torch.tensor([0, 2, 0, 1]), 12)
        for each in (at_once, by_level):
            each.extend(chain, features, tokens_BA)


def test_features_of_another_kind_than_the_layer_takes_are_fused_by_themselves(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where only the features' width is no multiple of a register of pairs."""
    with monkeypatch.context() as patch:
        patch.setattr(grower, "activations", lambda _: torch.float64)
        apart = drafter_of(fused(target), late=True)
    together, state = drafter_of(fused(target), late=True), state_of(4, 0, KINDS["greedy"])
    assert apart._grower is not None
    assert not apart._grower.follows
    with torch.inference_mode():
        assert_same(apart.draft(state), together.draft(state))


@pytest.mark.parametrize("changes", [{}, {"norm_before_fc": True}], ids=["follows", "does not"])
def test_an_engine_accepts_the_same_drafts(target: Target, changes: dict[str, Any]) -> None:
    """Rows come and go, wait with their head,."""
    requests = mixed_requests(target.shape.vocab, count=16)
    told, grown = [], 0
    for compiled in (True, False):
        head = fused(target, **changes)
        drafter = EagleDrafter(
            head, slots=3, capacity=CONTEXT + 8, depth=3, width=3, nodes=7, late=True
        )
        assert drafter._grower is not None
        assert drafter._grower.follows == (not changes)
        if not compiled:
            drafter._grower = None
        engine = Engine(target, drafter, None, decode_ids, slots=3, context=CONTEXT)
        done = run(engine, requests)
        told.append({name: (c.token_ids, c.accepted_by_pass) for name, c in done.items()})
        grown += sum(sum(c.accepted_by_pass) for c in done.values())
    assert told[0] == told[1]
    assert grown > 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_that_overflowed_still_makes_a_tree(target: Target, kind: str) -> None:
    drafter = drafter_of(fused(target))
    drafter.states_SH[1] = torch.nan
    found, expected = both(drafter, state_of(4, 0, KINDS[kind]))
    assert bool((found.tokens_BN >= 0).all())
    assert bool((found.tokens_BN < target.shape.vocab).all())
    for row in (0, 2, 3):
        assert torch.equal(found.tokens_BN[row], expected.tokens_BN[row])


def test_a_slot_without_room_keeps_its_committed_keys(target: Target) -> None:
    """Near the end of a slot, nodes go where padding goes."""
    drafter = drafter_of(fused(target))
    store = cast("KeyValueCache", drafter.cache).store
    state, full = state_of(1, 0, KINDS["greedy"]), drafter.cache.shape.capacity - 2
    before = store[:, :, :full].clone()
    length_B = torch.tensor([full])
    crowded = DraftState(0, state.root_B, length_B, state.index_B, state.params, full)
    assert drafter._grower is not None
    with torch.inference_mode():
        drafter.draft(crowded)
    assert torch.equal(store[:, :, :full], before)


@pytest.mark.parametrize(
    "changes", [{"norm_output": True}, {"logit_scale": 2.0}], ids=["norm_output", "logit_scale"]
)
def test_heads_of_rarer_kinds_grow_level_by_level(target: Target, changes: dict[str, Any]) -> None:
    drafter = drafter_of(fused(target, **changes))
    assert drafter._grower is None
    assert drafter.draft(state_of(4, 0, KINDS["greedy"])).depth == 4


def test_another_head_is_grown_with_from_then_on(target: Target) -> None:
    drafter, state = drafter_of(fused(target)), state_of(4, 0, KINDS["greedy"])
    before = both(drafter, state)[0]
    assert drafter.take(fused(target, seed=9))
    found, expected = both(drafter, state)
    assert_same(found, expected)
    assert not torch.equal(found.tokens_BN, before.tokens_BN)
