"""The fused CPU kernels against the operators of torch that they stand for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from eagle_batch.engine.testing import tiny_target
from eagle_batch.models.cache import CacheShape, KeyValueCache, causal_visibility
from eagle_batch.models.fused import MOST_ROWS, elements
from eagle_batch.models.packed import PackedDecoder

kernels: Any = pytest.importorskip("eagle_batch.models.kernels")

HEADS, GROUPS, SIZE = 6, 2, 16
TYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2}


def close(actual: Tensor, expected: Tensor) -> None:
    bound = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual, expected.to(actual.dtype), rtol=bound, atol=bound)


def test_the_exponential_is_right_to_the_last_bits() -> None:
    x = np.linspace(-86, 80, 20_001).astype(np.float32)
    values = np.array([kernels.exponential(each) for each in x], np.float64)
    expected = np.exp(x.astype(np.float64))
    assert np.abs(values / expected - 1).max() < 2e-7


@pytest.mark.parametrize("dtype", TYPES)
def test_rows_are_normalised(dtype: torch.dtype) -> None:
    x, weight, out = torch.randn(5, 48), torch.randn(48), torch.zeros(5, 48, dtype=dtype)
    kernels.normalise(x.numpy(), weight.numpy(), np.float32(1e-5), elements(out))
    close(out, F.rms_norm(x, (48,), weight, 1e-5))


@pytest.mark.parametrize("dtype", TYPES)
def test_gates_are_applied(dtype: torch.dtype) -> None:
    both = (8 * torch.randn(5, 2 * 40)).to(dtype)
    out = torch.zeros(5, 40, dtype=dtype)
    kernels.gate(elements(both), elements(out))
    gate, up = both.float().chunk(2, dim=-1)
    close(out, F.silu(gate) * up)


def test_bfloat16_is_rounded_to_the_nearest_with_ties_to_even() -> None:
    values = torch.tensor([1.0, 1.00390625, 1.01171875, -3.0e-3, 1e30, 0.0, 7.1, 65504.0])
    one, out = torch.ones(1, 1), torch.zeros(1, 1, dtype=torch.bfloat16)
    for value in values:
        # The norm of a row of one element is its weight.
        kernels.normalise(one.numpy(), value[None].numpy(), np.float32(0), elements(out))
        assert out.item() == value.bfloat16().item()


def test_what_is_not_a_number_stays_so() -> None:
    x, out = torch.tensor([[1.0, torch.nan]]), torch.zeros(1, 2)
    kernels.normalise(x.numpy(), np.ones(2, np.float32), np.float32(0), out.numpy())
    assert out.isnan().all()
    both, out = torch.tensor([[torch.nan, 1.0, 2.0, torch.inf]]), torch.zeros(1, 2)
    kernels.gate(both.numpy(), out.numpy())
    assert not out.isfinite().any()


@pytest.mark.parametrize("tokens", [1, 3, 7])
@pytest.mark.parametrize("dtype", TYPES)
def test_attention_sees_the_committed_columns_and_the_path_of_a_node(
    dtype: torch.dtype, tokens: int
) -> None:
    rows, capacity, first = 3, 40, 1
    cache = KeyValueCache(
        CacheShape(1, rows + first, capacity, GROUPS, SIZE), dtype=dtype, device=torch.device("cpu")
    )
    cache.store.normal_()
    base_B = torch.tensor([0, 9, 30])
    visible_BNM = torch.rand(rows, tokens, tokens) < 0.5
    visible_BNM |= torch.eye(tokens, dtype=torch.bool)
    write_BN = base_B[:, None] + torch.arange(tokens)
    step = cache.step(first, write_BN, base_B, visible_BNM, write_BN, capacity)
    q_RHD = torch.randn(rows * tokens, HEADS, SIZE)
    expected = step.look_packed(0, q_RHD.to(dtype), SIZE**-0.5, None)

    out = torch.full((rows * tokens + 2, HEADS * SIZE), 5.0, dtype=dtype)
    queries = tokens * HEADS // GROUPS
    kernels.attend(
        q_RHD.to(dtype).float().numpy(),
        elements(cache.store[0]),
        first,
        base_B.numpy(),
        visible_BNM.numpy(),
        np.float32(SIZE**-0.5),
        np.zeros((queries, GROUPS, capacity + 1), np.float32),
        np.zeros((queries, GROUPS, SIZE), np.float32),
        elements(out),
    )
    close(out[:-2], expected)
    assert (out[-2:] == 5.0).all(), "rows of padding are nobody's"


def test_padding_behind_the_end_of_a_slot_is_not_looked_at() -> None:
    capacity, tokens = 12, 5
    cache = KeyValueCache(
        CacheShape(1, 1, capacity, GROUPS, SIZE), dtype=torch.float32, device=torch.device("cpu")
    )
    cache.store.normal_()
    queries = tokens * HEADS // GROUPS
    # Whatever is written beyond the arrays shows in the guards behind them.
    scores = np.full((queries + 1, GROUPS, capacity + 1), 7.0, np.float32)
    out = torch.zeros(tokens, HEADS * SIZE)
    kernels.attend(
        np.ones((tokens, HEADS, SIZE), np.float32),
        elements(cache.store[0]),
        0,
        np.array([capacity - 2]),
        causal_visibility(1, tokens, torch.device("cpu")).numpy(),
        np.float32(1.0),
        scores,
        np.zeros((queries, GROUPS, SIZE), np.float32),
        elements(out),
    )
    assert (scores[-1] == 7.0).all()
    assert out.isfinite().all()


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
@pytest.mark.parametrize(("rows", "tokens"), [(1, 1), (2, 5), (5, 4), (MOST_ROWS, 1)])
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
        cache.store.normal_()
        step = cache.step(0, write_BN, base_B, visible, write_BN, 32)
        output = target.forward(tokens_BN, write_BN, step, (0, 1))
        return output.hidden_BNH, output.features_BNF, cache.store

    with torch.inference_mode():
        fused, plain = both_ways(decoder, run)
    for actual, expected in zip(fused, plain, strict=True):
        torch.testing.assert_close(actual, expected, rtol=2e-5, atol=2e-5)
