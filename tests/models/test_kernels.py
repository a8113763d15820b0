"""The fused CPU kernels against the operators of torch that they stand for."""

from __future__ import annotations

from itertools import product
from threading import Event
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from eagle_batch.engine.testing import tiny_head, tiny_target
from eagle_batch.models.cache import CacheShape, CacheStep, KeyValueCache, causal_visibility
from eagle_batch.models.fused import FusedProduct, activations, elements, rows_of
from eagle_batch.models.fused_head import fuse_head, is_fusible_head
from eagle_batch.models.heads import StepAttention
from eagle_batch.models.linear import DecodingLinear
from eagle_batch.models.packed import PackedDecoder
from eagle_batch.models.shelf import Shelf
from eagle_batch.models.target import Pass

numba: Any = pytest.importorskip("numba")
kernels: Any = pytest.importorskip("eagle_batch.models.kernels")

team: Any = pytest.importorskip("eagle_batch.models.team")
tiles: Any = pytest.importorskip("eagle_batch.models.tiles")

HEADS, GROUPS, SIZE = 6, 2, 16
TYPES = [torch.float32, torch.bfloat16]
PAIRS = pytest.param(
    torch.bfloat16,
    torch.bfloat16,
    marks=pytest.mark.skipif(not tiles.PAIRS, reason="this processor has no products in bfloat16"),
)
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2}


def close(actual: Tensor, expected: Tensor) -> None:
    bound = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual, expected.to(actual.dtype), rtol=bound, atol=bound)


def multiplied(weight: Tensor, x: Tensor) -> Tensor:
    """Return `x @ weight.T` by tiles; a row behind the result must stay as it is."""
    (outputs, inputs), rows = weight.shape, x.shape[0]
    out = torch.full((rows + 1, outputs), 7.0)
    tiles.multiply(
        weight.data_ptr(),
        inputs * weight.element_size(),
        outputs,
        x.data_ptr(),
        x.stride(0) * x.element_size(),
        rows,
        inputs,
        out.data_ptr(),
        outputs * 4,
        elements(weight[0])[0],
        elements(x[0])[0],
    )
    assert (out[rows] == 7.0).all()
    return out[:rows]


@pytest.mark.parametrize(("dtype", "taken"), [*((each, torch.float32) for each in TYPES), PAIRS])
@pytest.mark.parametrize(("outputs", "inputs"), [(49, 64), (96, 576), (7, 32)])
def test_tiles_multiply_and_a_row_does_not_depend_on_its_neighbours(
    dtype: torch.dtype, taken: torch.dtype, outputs: int, inputs: int
) -> None:
    weight, x = torch.randn(outputs, inputs).to(dtype), torch.randn(19, inputs).to(taken)
    expected = x.double() @ weight.double().t()
    alone = torch.cat([multiplied(weight, row[None]) for row in x])
    for rows in range(1, len(x) + 1):
        found = multiplied(weight, x[:rows])
        torch.testing.assert_close(found.double(), expected[:rows], rtol=1e-5, atol=1e-4)
        assert torch.equal(found, alone[:rows]), "sums were added in another order"


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("count", "size"), [(1, 16), (7, 80), (50, 128)])
def test_tiles_blend_values_for_any_number_of_rows(
    dtype: torch.dtype, count: int, size: int
) -> None:
    # Values lie apart: others are between them.
    values = torch.randn(count, 3, size).to(dtype)[:, 1]
    weights = torch.randn(15, count)
    expected = weights.double() @ values.double()
    for rows in range(1, len(weights) + 1):
        out = torch.full((rows + 1, size), 7.0)
        tiles.blend(
            values.data_ptr(),
            values.stride(0) * values.element_size(),
            count,
            size,
            weights.data_ptr(),
            weights.stride(0) * 4,
            rows,
            out.data_ptr(),
            size * 4,
            elements(values[0])[0],
            values.element_size(),
        )
        torch.testing.assert_close(out[:rows].double(), expected[:rows], rtol=1e-5, atol=1e-4)
        assert (out[rows] == 7.0).all()


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("dtype", TYPES)
def test_a_team_multiplies_with_a_matrix(dtype: torch.dtype, workers: int) -> None:
    weight, bias = torch.randn(1000, 64).to(dtype), torch.randn(1000)
    matrix = DecodingLinear(weight, bias, shelf=Shelf())
    fused = FusedProduct(matrix, team.Team(workers))
    for rows in (1, 6, 70):
        x = torch.randn(rows, 64)
        expected = x.to(activations([matrix])).float() @ weight.float().t() + bias
        torch.testing.assert_close(fused.forward(x), expected, rtol=1e-4, atol=1e-4)


@numba.njit(nogil=True)
def _count_units(rank: Any, counters: Any, units: Any, done_U: Any, by_W: Any) -> None:
    for phase in range(3):
        unit = team.claim(counters, phase)
        while unit < units:
            # A unit sees what the phase before left.
            done_U[unit] += done_U[unit] == phase and done_U[units - 1 - unit] >= phase
            by_W[rank] += 1
            team.finish(counters, phase)
            unit = team.claim(counters, phase)
        team.settle(counters, phase, units)


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_a_team_does_every_unit_once_and_a_phase_after_the_other(workers: int) -> None:
    threads = team.Team(workers)
    for _ in range(50):
        done, by = np.zeros(40, np.int64), np.zeros(workers, np.int64)
        threads.run(_count_units, 3, 40, done, by)
        assert (done == 3).all()
        assert by.sum() == 3 * 40


def test_nobody_waits_for_a_helper_that_does_not_come() -> None:
    threads = team.Team(2)
    busy = Event()
    threads._helpers.submit(busy.wait)
    try:
        done, by = np.zeros(40, np.int64), np.zeros(2, np.int64)
        threads.run(_count_units, 3, 40, done, by)
        assert by.tolist() == [120, 0]
    finally:
        busy.set()


def test_the_exponential_is_right_to_the_last_bits() -> None:
    x = np.linspace(-86, 80, 20_001).astype(np.float32)
    values = np.array([kernels.exponential(each) for each in x], np.float64)
    expected = np.exp(x.astype(np.float64))
    assert np.abs(values / expected - 1).max() < 2e-7


def test_rows_are_normalised() -> None:
    x, weight, out = torch.randn(5, 48), torch.randn(48), torch.zeros(5, 48)
    kernels.normalise(x.numpy(), weight.numpy(), np.float32(1e-5), out.numpy())
    close(out, F.rms_norm(x, (48,), weight, 1e-5))


def test_gates_are_applied() -> None:
    both, out = 8 * torch.randn(5, 2 * 40), torch.zeros(5, 50)
    kernels.gate(both.numpy(), 5, 40, 38, 7, out.numpy())
    gate, up = both.chunk(2, dim=-1)
    close(out[:, 7:45], (F.silu(gate) * up)[:, :38])
    assert (out[:, :7] == 0).all()
    assert (out[:, 45:] == 0).all()


def test_what_is_not_a_number_stays_so() -> None:
    x, out = torch.tensor([[1.0, torch.nan]]), torch.zeros(1, 2)
    kernels.normalise(x.numpy(), np.ones(2, np.float32), np.float32(0), out.numpy())
    assert out.isnan().all()
    both, out = torch.tensor([[torch.nan, 1.0, 2.0, torch.inf]]), torch.zeros(1, 2)
    kernels.gate(both.numpy(), 1, 2, 2, 0, out.numpy())
    assert not out.isfinite().any()


def place_of(step: CacheStep, angles_RP: Tensor) -> Any:
    """Return where the tokens of a pass stand, as the kernels take it."""
    return kernels.Place(
        angles_RP.cos().numpy(),
        angles_RP.sin().numpy(),
        np.arange(len(angles_RP)),
        step.index_R.numpy(),
        *rows_of(step),
    )


def attended(cache: KeyValueCache, step: CacheStep, qkv_RX: Tensor, angles_RP: Tensor) -> Tensor:
    """Return the attention output by kernels, `[R, HEADS * SIZE]`."""
    out = torch.full((qkv_RX.shape[0] + 2, HEADS * SIZE), 5.0)
    queries = step.visible_BNM.shape[1] * HEADS // GROUPS
    q_JD, sums_JD = np.zeros((2, queries, SIZE), np.float32)
    # Whatever is written beyond the places of a query shows in the guard behind them.
    scores_JT = np.full((queries + 1, cache.shape.capacity + 1), 7.0, np.float32)
    store, place = elements(cache.store), place_of(step, angles_RP)
    for b, g in product(range(step.base_B.shape[0]), range(GROUPS)):
        scale = np.float32(SIZE**-0.5)
        kernels.rotate(qkv_RX.numpy(), place, store, 0, b, g, scale, q_JD)
        kernels.attend(q_JD, place, store, 0, b, g, scores_JT, sums_JD, out.numpy())
    assert (scores_JT[-1] == 7.0).all()
    assert (out[-2:] == 5.0).all()
    return out[:-2]


def new_cache(slots: int, capacity: int, dtype: torch.dtype) -> KeyValueCache:
    shape = CacheShape(1, slots, capacity, GROUPS, SIZE)
    cache = KeyValueCache(shape, dtype=dtype, device=torch.device("cpu"))
    cache.store.normal_()
    return cache


@pytest.mark.parametrize("tokens", [1, 3, 7])
@pytest.mark.parametrize("dtype", TYPES)
def test_attention_sees_the_committed_columns_and_the_path_of_a_node(
    dtype: torch.dtype, tokens: int
) -> None:
    rows, capacity, first = 3, 40, 1
    cache, other = (new_cache(rows + first, capacity, dtype) for _ in range(2))
    other.store.copy_(cache.store)
    base_B = torch.tensor([0, 9, 30])
    visible_BNM = torch.rand(rows, tokens, tokens) < 0.5
    visible_BNM |= torch.eye(tokens, dtype=torch.bool)
    write_BN = base_B[:, None] + torch.arange(tokens)
    where = (first, write_BN, base_B, visible_BNM, write_BN, capacity)
    qkv_RXD = torch.randn(rows * tokens, HEADS + 2 * GROUPS, SIZE)
    angles_RP = torch.randn(rows * tokens, SIZE // 2)
    turned = torch.polar(torch.ones_like(angles_RP), angles_RP)[:, None]
    pairs = torch.view_as_complex(qkv_RXD.unflatten(-1, (-1, 2)))
    rotated = torch.view_as_real(pairs * turned).flatten(-2).to(dtype)
    kv_R2GD = torch.stack((rotated[:, HEADS:-GROUPS], qkv_RXD[:, -GROUPS:].to(dtype)), dim=1)
    expected = CacheStep(other, *where).attend_packed(
        0, rotated[:, :HEADS].contiguous(), kv_R2GD, SIZE**-0.5, None
    )

    found = attended(cache, CacheStep(cache, *where), qkv_RXD.flatten(1), angles_RP)
    close(found.to(dtype), expected)
    close(cache.store, other.store)


def test_values_are_rounded_to_the_nearest_with_ties_to_even() -> None:
    values = torch.tensor([1.0, 1.00390625, 1.01171875, -3.0e-3, 1e30, 0.0, 7.1, 65504.0])
    qkv_RX = values.repeat((HEADS + 2 * GROUPS) * SIZE // len(values))[None]
    cache, zero = new_cache(1, 8, torch.bfloat16), torch.zeros(1, 1, dtype=torch.int64)
    step = cache.step(0, zero, zero[0], torch.ones(1, 1, 1, dtype=torch.bool), zero, 8)
    attended(cache, step, qkv_RX, torch.zeros(1, SIZE // 2))
    assert torch.equal(
        cache.store[0, 0, 0], qkv_RX[0, : 2 * GROUPS * SIZE].view(2, GROUPS, -1).bfloat16()
    )


def test_padding_behind_the_end_of_a_slot_is_not_looked_at() -> None:
    capacity, tokens = 12, 5
    cache = new_cache(1, capacity, torch.float32)
    base_B, visible = (
        torch.tensor([capacity - 2]),
        causal_visibility(1, tokens, torch.device("cpu")),
    )
    write_BN = base_B[:, None] + torch.arange(tokens)
    step = cache.step(0, write_BN, base_B, visible, write_BN, capacity)
    ones_RX = torch.ones(tokens, (HEADS + 2 * GROUPS) * SIZE)
    assert attended(cache, step, ones_RX, torch.zeros(tokens, SIZE // 2)).isfinite().all()


def both_ways(decoder: PackedDecoder, run: Any) -> tuple[Any, Any]:
    """Return what a pass gives with the kernels and without them."""
    fused, decoder._fused = decoder._fused, None
    try:
        plain = run()
    finally:
        decoder._fused = fused
    assert fused is not None
    return run(), plain


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize(("rows", "tokens"), [(1, 1), (2, 5), (5, 4), (64, 1), (1, 31)])
def test_a_pass_gives_the_same_features_and_cache_with_kernels_and_without(
    family: str, rows: int, tokens: int
) -> None:
    target = tiny_target(family)
    decoder = target._packed
    assert decoder is not None
    base_B = torch.arange(rows) % 11
    write_BN = base_B[:, None] + torch.arange(tokens)
    tokens_BN = torch.randint(0, target.shape.vocab, (rows, tokens))
    visible = causal_visibility(rows, tokens, torch.device("cpu"))

    def run() -> tuple[Tensor, Tensor, Tensor]:
        torch.manual_seed(1)
        cache = target.new_cache(rows, 32)
        assert isinstance(cache, KeyValueCache)
        cache.store.normal_()
        step = cache.step(0, write_BN, base_B, visible, write_BN, 32)
        output = target.forward(tokens_BN, write_BN, step, (0, 1))
        return output.hidden_BNH, output.features_BNF, cache.store

    with torch.inference_mode():
        fused, plain = both_ways(decoder, run)
    for actual, expected in zip(fused, plain, strict=True):
        torch.testing.assert_close(actual, expected, rtol=2e-5, atol=2e-5)


def test_passes_in_one_give_the_same_with_kernels_and_without() -> None:
    target = tiny_target()
    decoder = target._packed
    assert decoder is not None
    tree = torch.rand(3, 4, 4) < 0.5
    tree |= torch.eye(4, dtype=torch.bool)
    shapes = [(0, 3, 4, tree), (4, 1, 29, None), (3, 1, 1, None), (5, 2, 9, None)]

    def run() -> list[Tensor]:
        torch.manual_seed(1)
        cache = target.new_cache(7, 48)
        assert isinstance(cache, KeyValueCache)
        cache.store.normal_()
        passes = []
        for slot, rows, tokens, seen in shapes:
            base_B = torch.randint(0, 19, (rows,))
            places_BN = base_B[:, None] + torch.arange(tokens)
            chain = causal_visibility(rows, tokens, target.device)
            visible = chain if seen is None else seen
            step = cache.step(slot, places_BN, base_B, visible, places_BN, 48)
            tokens_BN = torch.randint(0, target.shape.vocab, (rows, tokens))
            passes.append(Pass(tokens_BN, places_BN, step))
        outputs = target.forward_together(passes, (0, 1))
        return [x for each in outputs for x in (each.hidden_BNH, each.features_BNF)] + [cache.store]

    with torch.inference_mode():
        fused, plain = both_ways(decoder, run)
    for actual, expected in zip(fused, plain, strict=True):
        torch.testing.assert_close(actual, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("kind", ["eagle1", "eagle3"])
def test_a_fused_head_beside_a_target_in_bfloat16_reads_its_own_states(kind: str) -> None:
    """They are float32, and the target's output matrix, which some heads share, is not."""
    target = tiny_target()
    head = tiny_head(target, kind).bfloat16()
    head.bind(target.embed_weight_VH, target.lm_head_weight_VH)
    assert target.team is not None
    fuse_head(head, target.team)
    shape = CacheShape(1, 1, 16, head.config.kv_heads, head.config.head_dim)
    cache = KeyValueCache(shape, dtype=torch.bfloat16, device=target.device)
    tokens_BN = torch.tensor([[5]])
    state = head.fuse(torch.randn(1, 1, head.config.feature_width).bfloat16())
    for place in range(3):
        at_BN = torch.tensor([[place]])
        visible = causal_visibility(1, 1, target.device)
        step = cache.step(0, at_BN, at_BN[:, 0], visible, at_BN, 16)
        state = head(tokens_BN, state, at_BN, StepAttention(step, shape.head_dim**-0.5))
        assert head.logits(state).isfinite().all()


@pytest.mark.parametrize("kind", ["eagle1", "eagle3"])
@pytest.mark.parametrize(("rows", "tokens"), [(1, 1), (3, 4), (2, 40)])
@pytest.mark.parametrize(
    ("pairs", "bound"),
    # What products take in is rounded to eight bits.
    [(False, 1e-4), pytest.param(True, 5e-2, marks=PAIRS.marks)],
)
def test_a_fused_head_predicts_what_its_modules_do(
    monkeypatch: pytest.MonkeyPatch, kind: str, rows: int, tokens: int, pairs: bool, bound: float
) -> None:
    monkeypatch.setattr(tiles, "PAIRS", pairs)
    target = tiny_target()
    plain, fused = tiny_head(target, kind), tiny_head(target, kind)
    with torch.no_grad():
        for head in (plain, fused):
            for parameter in head.parameters():
                parameter.copy_(parameter.bfloat16())
    assert target.team is not None
    assert is_fusible_head(fused, target.device)
    fuse_head(fused, target.team)
    tokens_BN = torch.randint(0, target.shape.vocab, (rows, tokens))
    features = torch.randn(rows, tokens, plain.config.feature_width)
    positions_BN = torch.tensor([7, 0, 3][:rows])[:, None] + torch.arange(tokens)
    visible = causal_visibility(rows, tokens, target.device)
    found = []
    for head in (plain, fused):
        size = head.config.head_dim
        cache = KeyValueCache(
            CacheShape(1, rows, 64, head.config.kv_heads, size),
            dtype=torch.float32,
            device=target.device,
        )
        outputs = []
        # The second pass sees the keys and values of the first.
        for base_B in (positions_BN[:, 0], positions_BN[:, -1] + 1):
            write_BN = base_B[:, None] + torch.arange(tokens)
            fits = write_BN.clamp(max=63)
            step = cache.step(0, fits, base_B, visible, fits, 64)
            attend = StepAttention(step, size**-0.5)
            out = head(tokens_BN, head.fuse(features), fits, attend)
            outputs.append(head.logits(out))
        found.append(torch.cat(outputs))
    torch.testing.assert_close(found[1], found[0], rtol=bound, atol=bound)
