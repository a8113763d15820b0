"""Processing of logits and the choice under noise, against slow definitions."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle_batch.engine.noise import gumbel
from eagle_batch.engine.request import SamplingParams, noise_key
from eagle_batch.engine.sampling import (
    RowParams,
    _choose_on_host,
    _noise,
    choose,
    choose_by_walking,
    filtered_logits,
    pack_params,
)
from eagle_batch.engine.testing import plain_choice, plain_distribution

CPU = torch.device("cpu")
EOS = torch.tensor([2])


def sampling_params() -> st.SearchStrategy[SamplingParams]:
    return st.builds(
        SamplingParams,
        temperature=st.sampled_from([0.0, 0.3, 0.7, 1.0, 2.5]),
        top_k=st.one_of(st.none(), st.integers(1, 40)),
        top_p=st.one_of(st.none(), st.floats(0.05, 1.0)),
        min_p=st.one_of(st.none(), st.floats(0.0, 0.6)),
        min_tokens=st.integers(0, 2),
    )


@settings(max_examples=60, deadline=None)
@given(rows=st.lists(sampling_params(), min_size=1, max_size=4), seed=st.integers(0, 2**31))
def test_a_batch_of_different_parameters_chooses_as_each_row_alone(
    rows: list[SamplingParams], seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn((len(rows), 3, 31), generator=generator) * 3
    index = torch.arange(3).expand(len(rows), 3)
    keys = [seed * 31 + row for row in range(len(rows))]
    chosen = choose(logits, index, pack_params(rows, keys, CPU), EOS)
    for row, params in enumerate(rows):
        for place in range(3):
            alone = logits[row, place].double().clone()
            if place < params.min_tokens:
                alone[2] = -math.inf
            assert int(chosen[row, place]) == plain_choice(alone, place, params, keys[row])


@settings(max_examples=40, deadline=None)
@given(rows=st.lists(sampling_params(), min_size=1, max_size=5), seed=st.integers(0, 2**31))
def test_walking_to_the_choice_and_sorting_for_it_agree(
    rows: list[SamplingParams], seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn((len(rows), 2, 400), generator=generator) * 2
    index = torch.arange(2).expand(len(rows), 2)
    packed = pack_params(rows, [seed + row for row in range(len(rows))], CPU)
    expected = _sorted_choice(logits, index, packed)
    assert torch.equal(expected, choose_by_walking(logits, index, packed))


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(sampling_params(), min_size=1, max_size=5),
    seed=st.integers(0, 2**31),
    vocab=st.sampled_from([3, 31, 400, 3001]),
)
def test_compiled_code_chooses_the_same_or_leaves_it(
    rows: list[SamplingParams], seed: int, vocab: int
) -> None:
    choosing = pytest.importorskip("eagle_batch.engine.choosing")
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn((len(rows), 2, vocab), generator=generator) * 2
    index = torch.arange(2).expand(len(rows), 2)
    packed = pack_params(rows, [seed + row for row in range(len(rows))], CPU)
    chosen = choosing.choose_compiled(logits, index, packed)
    decided = chosen != choosing.UNDECIDED
    assert torch.equal(choose_by_walking(logits, index, packed)[decided], chosen[decided])
    settled = _choose_on_host(logits, index, packed)
    assert torch.equal(settled, _sorted_choice(logits, index, packed))


def test_compiled_code_decides_nearly_always() -> None:
    choosing = pytest.importorskip("eagle_batch.engine.choosing")
    torch.manual_seed(5)
    params = [
        SamplingParams(temperature=0.7, top_p=0.95),
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=1.0, top_k=50, top_p=0.9),
        SamplingParams(temperature=1.3, min_p=0.05),
    ] * 50
    logits = (torch.randn(200, 1, 20_000) * 3).bfloat16()
    packed = pack_params(params, list(range(200)), CPU)
    index = torch.zeros(200, 1, dtype=torch.int64)
    chosen = choosing.choose_compiled(logits, index, packed)
    decided = chosen != choosing.UNDECIDED
    assert decided.float().mean() > 0.97
    assert torch.equal(choose_by_walking(logits, index, packed)[decided], chosen[decided])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_chosen_where_torch_would(value: float, temperature: float) -> None:
    """A chosen score that is not finite is how an overflow is noticed."""
    pytest.importorskip("numba")
    logits = torch.zeros(1, 1, 9)
    logits[..., 4:6] = value
    if value < 0:
        logits[:] = value
    packed = pack_params([SamplingParams(temperature=temperature)], [1], CPU)
    index = torch.zeros(1, 1, dtype=torch.int64)
    assert int(choose(logits, index, packed, EOS)) == (0 if value < 0 else 4)


def _sorted_choice(logits: torch.Tensor, index: torch.Tensor, packed: RowParams) -> torch.Tensor:
    scores = filtered_logits(logits, packed)
    return (scores + _noise(scores, index, packed)).argmax(-1)


@pytest.mark.parametrize("spread", [0.1, 4.0])
def test_the_nucleus_is_the_smallest_set_that_reaches_top_p(spread: float) -> None:
    torch.manual_seed(3)
    logits = torch.randn(5000) * spread
    params = [SamplingParams(temperature=1.0, top_p=p) for p in (0.05, 0.5, 0.95, 0.999)]
    kept = filtered_logits(logits.expand(4, 1, 5000), pack_params(params, [0] * 4, CPU)).isfinite()
    for row, one in enumerate(params):
        expected = plain_distribution(logits.double(), one) > 0
        # The last token of a nucleus may be decided by rounding; nothing else may.
        assert (kept[row, 0] ^ expected).sum() <= 1


def test_noise_is_standard_gumbel_and_independent_of_its_neighbours() -> None:
    keys = torch.arange(400)[:, None]
    noise = gumbel(keys, torch.arange(5)[None].expand(400, 5), torch.arange(100)).double()
    assert noise.mean() == pytest.approx(0.5772, abs=0.01)
    assert noise.std() == pytest.approx(math.pi / math.sqrt(6), abs=0.01)
    flat = noise.reshape(400, -1)
    for shifted in (flat.roll(1, 0), flat.roll(1, 1), flat.roll(100, 1), flat.roll(7, 1)):
        correlation = torch.corrcoef(torch.stack((flat.flatten(), shifted.flatten())))[0, 1]
        assert abs(float(correlation)) < 0.01


def test_noise_does_not_depend_on_what_else_is_asked_for() -> None:
    keys, index = torch.tensor([5, -9]), torch.tensor([0, 3])
    together = gumbel(keys, index, torch.arange(1000))
    alone = gumbel(keys[1:], index[1:], torch.tensor([17, 999]))
    assert torch.equal(together[1, [17, 999]], alone[0])


def test_sampled_tokens_follow_the_processed_distribution() -> None:
    torch.manual_seed(0)
    logits = torch.randn(12) * 1.5
    params = SamplingParams(temperature=0.8, top_p=0.9)
    draws = 20_000
    packed = pack_params(
        [params] * draws, [noise_key(0, str(i), 0, "s") for i in range(draws)], CPU
    )
    chosen = choose(
        logits.expand(draws, 1, 12), torch.zeros((draws, 1), dtype=torch.int64), packed, EOS
    )
    expected = plain_distribution(logits.double(), params)
    counts = Counter(chosen.flatten().tolist())
    assert set(counts) == {i for i, p in enumerate(expected.tolist()) if p > 0}
    chi_square = sum(
        (counts[i] - draws * p) ** 2 / (draws * p) for i, p in enumerate(expected.tolist()) if p > 0
    )
    # 99.99 % quantile for at most 11 degrees of freedom.
    assert chi_square < 37.4


def test_contradictory_parameters_are_refused_all_at_once() -> None:
    with pytest.raises(ValueError, match=r"temperature -1.*top_k 0.*top_p 1.5.*max_tokens 0"):
        SamplingParams(temperature=-1, top_k=0, top_p=1.5, max_tokens=0)


def test_noise_keys_tell_rows_samples_stages_and_seeds_apart() -> None:
    keys = {
        noise_key(seed, row, sample, stage)
        for seed in (0, 1)
        for row in ("1", "11", "a\udc80")
        for sample in (0, 1)
        for stage in ("q", "a")
    }
    assert len(keys) == 24
    assert all(-(2**63) <= key < 2**63 for key in keys)
