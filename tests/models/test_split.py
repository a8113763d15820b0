"""A target over several devices: which layer goes where, what crosses, and the same text."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
import torch

from eagle_batch.engine.engine import Engine
from eagle_batch.engine.request import Completion, SamplingParams
from eagle_batch.engine.testing import tiny_head, tiny_model
from eagle_batch.errors import ConfigError
from eagle_batch.models.placement import Placement, split_layers
from eagle_batch.models.split import SplitCache
from eagle_batch.models.target import Target, place_target, reference_logits
from tests.engine.test_parity import CONTEXT, build_drafter, decode_ids, mixed_requests, run
from tests.models.logical import logical_gpus


def fullest(layers: Sequence[int], devices: Sequence[int], home: int) -> int:
    last = max(devices)
    return max(
        sum(size for size, device in zip(layers, devices, strict=True) if device == each)
        + (home if each == last else 0)
        for each in set(devices)
    )


@pytest.mark.parametrize("seed", range(40))
def test_the_fullest_device_is_as_empty_as_any_split_makes_it(seed: int) -> None:
    """Against all ways to cut the layers."""
    rng = random.Random(seed)
    layers = [rng.choice([5, 5, 5, rng.randrange(1, 30)]) for _ in range(rng.randrange(1, 9))]
    devices, home = rng.randrange(1, len(layers) + 1), rng.choice([0, 7, 60])
    split = split_layers(layers, devices, home)
    assert sorted(set(split)) == list(range(devices))
    assert list(split) == sorted(split)
    ways = (
        [sum(cut <= layer for cut in cuts) for layer in range(len(layers))]
        for cuts in combinations(range(1, len(layers)), devices - 1)
    )
    assert fullest(layers, split, home) == min(fullest(layers, way, home) for way in ways)


def test_equal_layers_are_shared_out_and_the_home_gets_fewer() -> None:
    assert split_layers([10] * 6, 3, 0) == (0, 0, 1, 1, 2, 2)
    assert split_layers([10] * 6, 2, 20) == (0, 0, 0, 0, 1, 1)
    assert split_layers([10] * 80, 8, 0) == tuple(n // 10 for n in range(80))


def test_more_gpus_than_layers_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"workers.gpus: found 3 for a target of 2 layers"):
        split_layers([1, 1], 3, 0)


def split_target(gpus: int, family: str = "llama", **options: Any) -> Target:
    """Do what `load_target` does, on so many GPUs that are not there."""
    model = tiny_model(family, **options)
    devices = tuple(torch.device("cuda", number) for number in range(gpus))
    place_target(model, Placement(devices, columns=16))
    reference_NV = reference_logits(model)
    target = Target(model)
    target.check_parity(reference_NV)
    return target


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gemma3", "mixtral"])
def test_no_operation_of_a_pass_mixes_devices(family: str) -> None:
    """Parity with the model's own code runs passes of both, every operation watched."""
    with logical_gpus():
        target = split_target(3, family, window=8 if family.startswith("gemma") else None)
        cache = target.new_cache(2, 24)
    assert isinstance(cache, SplitCache)
    assert [part.device.index for part in cache.parts] == [0, 1, 2]
    assert sum(part.shape.layers for part in cache.parts) == target.shape.layers
    home = torch.device("cuda", 2)
    assert {target.device, target.embed_weight_VH.device, target.lm_head_weight_VH.device} == {home}


#: Short: every operation is watched.
SHORT = [
    SamplingParams(max_tokens=most, temperature=heat) for most, heat in ((4, 0), (7, 1), (6, 0))
]


def text(gpus: int, shape: str, family: str, kind: str) -> dict[str, Completion]:
    with logical_gpus():
        target = split_target(gpus, family)
        head = tiny_head(target, kind, draft_vocab=target.shape.vocab - 5).to(target.device)
        head.bind(target.embed_weight_VH, target.lm_head_weight_VH)
        engine = Engine(
            target,
            build_drafter(head, shape, 2),
            None,
            decode_ids,
            slots=2,
            context=CONTEXT,
            prefill_chunk=16,
        )
        asked = mixed_requests(target.shape.vocab, 3)
        done = run(engine, [replace(each, params=SHORT[n]) for n, each in enumerate(asked)])
    assert engine.metrics().verify_s > 0
    return done


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("shape", "family", "kind"),
    [
        ("tree", "llama", "eagle3"),
        ("chain", "gemma2", "eagle1"),
        ("tree", "mixtral", "eagle3"),
    ],
)
def test_an_engine_writes_the_same_on_one_device_and_on_three(
    shape: str, family: str, kind: str
) -> None:
    """Prompts, a row that leaves and makes room, drafts, the features that a head takes in."""
    one, three = (text(gpus, shape, family, kind) for gpus in (1, 3))
    assert {name: each.token_ids for name, each in three.items()} == {
        name: each.token_ids for name, each in one.items()
    }


def test_what_mixes_devices_is_seen() -> None:
    with logical_gpus():
        zero, one = torch.zeros(2, device="cuda:0"), torch.ones(2, device="cuda:1")
        assert (zero.to("cuda:1") + one).tolist() == [1.0, 1.0]
        with pytest.raises(AssertionError, match=r"add.* over .*cuda.*cuda"):
            zero + one
        with pytest.raises(AssertionError, match=r"add.* over .*cuda.*cpu"):
            one + torch.ones(2)
