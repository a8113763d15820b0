"""A smaller model that drafts: the same text as without it, and drafts that know the whole row."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from eagle_batch.engine.build import assemble, build_engine, load_parts
from eagle_batch.engine.drafters.draft_model import DraftModelDrafter
from eagle_batch.engine.engine import Engine
from eagle_batch.engine.request import EngineSpec, Request, SamplingParams
from eagle_batch.engine.testing import (
    byte_tokenizer,
    save_tiny_target,
    tiny_model,
    tiny_target,
)
from eagle_batch.engine.vocabularies import vocabulary_problem
from eagle_batch.errors import ConfigError
from eagle_batch.models.target import Target
from tests.engine.test_parity import CONTEXT, decode_ids, expected_tokens, mixed_requests, run

SHAPES = {"chain": (3, 1, 3), "tree": (4, 3, 10)}


def build(target: Target, draft: Target, shape: str, slots: int, **options: int | bool) -> Engine:
    depth, width, nodes = SHAPES[shape]
    drafter = DraftModelDrafter(
        draft,
        target_vocab=target.shape.vocab,
        slots=slots,
        capacity=CONTEXT + depth + 2,
        depth=depth,
        width=width,
        nodes=nodes,
    )
    return Engine(target, drafter, None, decode_ids, slots=slots, context=CONTEXT, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", list(SHAPES))
@pytest.mark.parametrize(("family", "layers", "slots"), [("llama", 2, 2), ("qwen3", 1, 5)])
def test_a_draft_model_leaves_no_trace_in_the_text(
    shape: str, family: str, layers: int, slots: int
) -> None:
    target = tiny_target()
    draft = tiny_target(family, layers=layers, seed=5, vocab=20)
    requests = mixed_requests(target.shape.vocab, count=10)
    for auto in (False, True):
        engine = build(target, draft, shape, slots, prefill_chunk=7, auto=auto)
        done = run(engine, requests)
        assert expected_tokens(requests) == {k: list(c.token_ids) for k, c in done.items()}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("slots", [1, 4])
def test_a_target_that_drafts_for_itself_is_always_right(temperature: float, slots: int) -> None:
    """Keys, positions and noise of both agree, over chunks, moves and shared prefixes."""
    target, draft = tiny_target(), tiny_target()
    shared = tuple(range(3, 20))
    params = SamplingParams(temperature=temperature, max_tokens=41, ignore_eos=True)
    requests = [
        Request(str(i), (*shared[: 5 * (i % 4)], 3 + i), replace(params, max_tokens=41 - 4 * i), i)
        for i in range(8)
    ]
    engine = build(target, draft, "chain", slots, prefill_chunk=6)
    done = run(engine, requests)
    assert expected_tokens(requests) == {k: list(c.token_ids) for k, c in done.items()}
    metrics = engine.metrics()
    assert metrics.accepted_at == metrics.drafted_at
    assert metrics.acceptance_length == 4.0


def test_an_engine_with_a_draft_model_is_built_from_its_spec(tmp_path: Path) -> None:
    target = str(save_tiny_target(tmp_path / "target"))
    draft = str(save_tiny_target(tmp_path / "draft", seed=3))
    spec = EngineSpec(model=target, head=None, draft=draft, slots=2, context=96, threads=1)
    parts = load_parts(spec)
    request = Request("a", tuple(byte_tokenizer().encode("Hello")), SamplingParams(max_tokens=20))
    texts = set()
    for tree in ("chain", "dynamic", "plain"):
        engine = assemble(parts, replace(spec, tree=tree, draft=None if tree == "plain" else draft))
        assert (engine.drafter is None) == (tree == "plain")
        texts.add(run(engine, [request])["a"].token_ids)
    assert len(texts) == 1


def test_a_draft_model_with_another_tokenizer_is_refused(tmp_path: Path) -> None:
    target, draft = save_tiny_target(tmp_path / "target"), tmp_path / "draft"
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["<more>"])
    tiny_model(vocab=len(tokenizer)).save_pretrained(draft)
    tokenizer.save_pretrained(draft)
    spec = EngineSpec(model=str(target), head=None, draft=str(draft), slots=1, context=64)
    with pytest.raises(ConfigError, match=r"another tokenizer than the target: 1 tokens differ"):
        build_engine(spec)
    assert vocabulary_problem({"a": 0, "b": 1}, {"a": 0, "b": 1}) is None
    swapped = vocabulary_problem({"a": 0, "b": 1}, {"a": 1, "b": 0}) or ""
    assert "2 tokens differ, 'a' for one is 0 in the target and 1 in the draft" in swapped
