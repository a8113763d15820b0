"""The engine against the plain decoder: the same tokens in every batch, with every tree."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from eagle_batch.engine.controller import Shape, Walk, grid, would_accept
from eagle_batch.engine.drafters.base import CommittedChain, DraftState
from eagle_batch.engine.drafters.eagle import EagleDrafter
from eagle_batch.engine.drafters.ngram import NgramDrafter
from eagle_batch.engine.drafters.static import StaticEagleDrafter, check_paths
from eagle_batch.engine.engine import Engine
from eagle_batch.engine.request import Completion, Request, SamplingParams
from eagle_batch.engine.sampling import pack_params
from eagle_batch.engine.testing import FAMILIES, plain_decode, tiny_head, tiny_model, tiny_target
from eagle_batch.models.heads import Head
from eagle_batch.models.target import Target

CONTEXT = 160
SHAPES: dict[str, dict[str, Any]] = {
    "chain": {"depth": 3, "width": 1, "nodes": 3},
    "tree": {"depth": 3, "width": 4, "nodes": 10},
    "deep": {"depth": 6, "width": 2, "nodes": 9},
    "static": {},
}


def prompts(count: int, vocab: int, seed: int = 0) -> list[tuple[int, ...]]:
    rng = random.Random(seed)
    shared = [rng.randrange(3, vocab) for _ in range(14)]
    texts = [[rng.randrange(3, vocab) for _ in range(rng.randrange(1, 30))] for _ in range(count)]
    return [tuple(shared + text if i % 2 else text) for i, text in enumerate(texts)]


def decode_ids(token_ids: Sequence[int]) -> str:
    return "".join(chr(97 + token) for token in token_ids)


def build_drafter(head: Head, shape: str, slots: int) -> EagleDrafter:
    if shape == "static":
        return StaticEagleDrafter(head, slots=slots, capacity=CONTEXT + 2)
    sizes = SHAPES[shape]
    return EagleDrafter(head, slots=slots, capacity=CONTEXT + sizes["depth"] + 2, **sizes)


def build(
    target: Target, shape: str | None, slots: int, *, kind: str = "eagle3", **options: Any
) -> Engine:
    drafter = None
    if shape is not None:
        head = tiny_head(target, kind, draft_vocab=target.shape.vocab - 5, seed=2)
        drafter = build_drafter(head, shape, slots)
    return Engine(target, drafter, None, decode_ids, slots=slots, context=CONTEXT, **options)


def run(engine: Engine, requests: Sequence[Request]) -> dict[str, Completion]:
    for request in requests:
        engine.add(request)
    done: dict[str, Completion] = {}
    while engine.has_work:
        for completion in engine.step():
            assert completion.request_id not in done
            done[completion.request_id] = completion
    return done


def mixed_requests(vocab: int, count: int = 12) -> list[Request]:
    """Requests whose sampling differs from row to row, so that rows of one batch must not leak."""
    choices = [
        SamplingParams(max_tokens=24),
        SamplingParams(temperature=1.0, max_tokens=30),
        SamplingParams(temperature=0.7, top_p=0.9, max_tokens=17),
        SamplingParams(temperature=1.3, top_k=5, max_tokens=24, min_tokens=9),
        SamplingParams(temperature=0.9, min_p=0.1, max_tokens=24, ignore_eos=True),
        SamplingParams(temperature=1.0, top_k=7, top_p=0.8, min_p=0.05, max_tokens=20),
        SamplingParams(max_tokens=1),
        SamplingParams(temperature=2.0, max_tokens=40, stop_token_ids=(5, 6)),
        SamplingParams(repetition_penalty=1.3, max_tokens=24, logit_bias=((7, 1.5),)),
        SamplingParams(
            temperature=0.8,
            top_p=0.9,
            presence_penalty=0.7,
            frequency_penalty=0.4,
            max_tokens=24,
            logit_bias=((9, float("-inf")), (4, -1.0)),
        ),
    ]
    return [
        Request(str(i), prompt, choices[i % len(choices)], noise_key=7919 * i - 3)
        for i, prompt in enumerate(prompts(count, vocab))
    ]


def expected_tokens(
    requests: Sequence[Request], family: str = "llama", window: int | None = None
) -> dict[str, list[int]]:
    model = tiny_model(family, window=window)
    return {r.id: plain_decode(model, r.prompt_ids, r.params, r.noise_key) for r in requests}


@pytest.mark.parametrize("family", list(FAMILIES))
@pytest.mark.parametrize("shape", [None, "tree"])
def test_every_family_decodes_what_the_plain_decoder_does(family: str, shape: str | None) -> None:
    window = 12 if family in {"mistral", "gemma2", "gemma3"} else None
    target = tiny_target(family, window=window)
    requests = mixed_requests(target.shape.vocab)
    done = run(build(target, shape, slots=4), requests)
    assert expected_tokens(requests, family, window) == {
        k: list(c.token_ids) for k, c in done.items()
    }


@pytest.mark.parametrize("kind", ["eagle1", "eagle3"])
@pytest.mark.parametrize("shape", list(SHAPES))
@pytest.mark.parametrize("slots", [1, 3, 16])
def test_batch_head_and_tree_leave_no_trace_in_the_text(kind: str, shape: str, slots: int) -> None:
    target = tiny_target()
    requests = mixed_requests(target.shape.vocab, count=14)
    engine = build(target, shape, slots, kind=kind, prefill_chunk=7)
    done = run(engine, requests)
    assert expected_tokens(requests) == {k: list(c.token_ids) for k, c in done.items()}
    assert engine.metrics().acceptance_length > 1.05, "the random head never hit: the test is blind"


class ScriptedController:
    """Stands in for the controller: every shape in turn, and spells of giving speculation up."""

    def __init__(self) -> None:
        self._rounds = 0

    def choose(self, rows: int) -> Shape:
        shapes = grid(3, 4, 10)
        return shapes[self._rounds % len(shapes)]

    def price(self, shape: Shape, rows: int) -> float:
        return (0.0, 0.02, 0.3)[self._rounds % 3]

    def observe(self, shape: Shape, walks: Sequence[Walk], seconds: float) -> None:
        for walk in walks:
            assert would_accept(shape, shape, walk) == len(walk), (
                "more was accepted than was drafted"
            )
        assert seconds > 0
        self._rounds += 1

    def plain_for_good(self, rows: int) -> bool:
        return self._rounds // 25 % 2 == 1


@pytest.mark.parametrize("scripted", [False, True])
def test_changing_the_shape_in_every_round_leaves_no_trace_in_the_text(scripted: bool) -> None:
    target = tiny_target()
    requests = mixed_requests(target.shape.vocab, count=40)
    engine = build(target, "tree", slots=4, auto=True)
    if scripted:
        engine._controller = ScriptedController()  # type: ignore[assignment]
    done = run(engine, requests)
    assert expected_tokens(requests) == {k: list(c.token_ids) for k, c in done.items()}
    passes = dict(engine.metrics().passes_by_shape)
    assert sum(passes.values()) == engine.metrics().target_passes
    # Left to itself the controller times the rounds, and may soon have seen enough.
    assert len(passes) >= (5 if scripted else 2), "hardly any shape was tried: the test is blind"


def test_a_prefix_that_prompts_share_is_computed_once() -> None:
    target = tiny_target()
    shared = tuple(range(3, 23)) * 2
    requests = [
        Request(str(i), (*shared, 3 + i, 4), SamplingParams(max_tokens=12)) for i in range(9)
    ]
    engine = build(target, "tree", slots=4)
    done = run(engine, requests)
    assert expected_tokens(requests) == {k: list(c.token_ids) for k, c in done.items()}
    metrics = engine.metrics()
    assert metrics.prompt_tokens == 9 * 42
    assert metrics.cached_prompt_tokens >= 8 * 38


def test_samples_of_one_prompt_differ_and_repeat_exactly() -> None:
    target = tiny_target()
    params = SamplingParams(temperature=1.0, max_tokens=20, ignore_eos=True)
    requests = [Request(str(i), tuple(range(3, 23)), params, noise_key=i) for i in range(6)]
    first = {k: c.token_ids for k, c in run(build(target, "tree", slots=6), requests).items()}
    again = {k: c.token_ids for k, c in run(build(target, None, slots=2), requests).items()}
    assert first == again
    assert len(set(first.values())) == 6


def test_logprobs_are_those_of_the_unprocessed_distribution() -> None:
    target, model = tiny_target(), tiny_model()
    model.set_attn_implementation("eager")
    params = SamplingParams(temperature=1.1, max_tokens=15, ignore_eos=True, logprobs=3)
    requests = [
        Request("a", (3, 9, 4), params, noise_key=5),
        Request("b", (8, 8), SamplingParams(max_tokens=15, logprobs=0, presence_penalty=1.0)),
        Request("c", (5,), SamplingParams(max_tokens=5)),
    ]
    done = run(build(target, "tree", slots=3, prefill_chunk=2), requests)
    for request in requests[:2]:
        completion = done[request.id]
        ids = torch.tensor([[*request.prompt_ids, *completion.token_ids]])
        with torch.inference_mode():
            log_p = model(input_ids=ids, use_cache=False).logits[0]
        log_p = log_p.log_softmax(-1)[len(request.prompt_ids) - 1 : -1]
        expected = log_p.gather(1, ids[0, len(request.prompt_ids) :, None])[:, 0]
        assert completion.logprobs == pytest.approx(expected.tolist(), abs=1e-4)
        assert len(completion.logprobs or ()) == len(completion.token_ids)
    best = done["a"].top_logprobs or ()
    assert [len(place) for place in best] == [3] * 15
    assert done["b"].top_logprobs is None
    assert done["c"].logprobs is None


def test_counters_add_up() -> None:
    target = tiny_target()
    requests = mixed_requests(target.shape.vocab)
    engine = build(target, "tree", slots=4)
    done = run(engine, requests)
    metrics = engine.metrics()
    assert metrics.rows == len(requests)
    assert metrics.completion_tokens == sum(len(c.token_ids) for c in done.values())
    assert metrics.prompt_tokens == sum(c.prompt_tokens for c in done.values())
    assert metrics.row_passes == sum(c.target_passes - 1 for c in done.values())
    assert sum(metrics.accepted_at) == sum(c.accepted for c in done.values())
    assert metrics.round_tokens == metrics.row_passes + sum(metrics.accepted_at)
    assert list(metrics.accepted_at) == sorted(metrics.accepted_at, reverse=True)


def test_ngrams_find_what_repeats_and_leave_no_trace_in_the_text() -> None:
    target = tiny_target()
    # Greedy text of a tiny model repeats itself now and then, which is what n-grams are for.
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    greedy = [Request(f"g{i}", p, params) for i, p in enumerate(prompts(5, target.shape.vocab))]
    requests = mixed_requests(target.shape.vocab, count=20) + greedy
    for auto in (False, True):
        drafter = NgramDrafter(slots=3, capacity=CONTEXT, depth=4, device=target.device)
        engine = Engine(
            target, drafter, None, decode_ids, slots=3, context=CONTEXT, auto=auto, prefill_chunk=9
        )
        done = run(engine, requests)
        assert expected_tokens(requests) == {k: list(c.token_ids) for k, c in done.items()}
        if not auto:
            assert max(done[r.id].acceptance_length for r in greedy) > 1.2


def test_ngrams_take_the_latest_of_the_longest_matches() -> None:
    drafter = NgramDrafter(slots=1, capacity=30, depth=2, device=torch.device("cpu"))
    text = torch.tensor([[9, 1, 2, 3, 7, 7, 2, 3, 8, 8, 1, 2, 3]])
    zero = torch.tensor([0])
    chain = CommittedChain(0, zero, torch.tensor([11]), 0)
    drafter.extend(chain, torch.zeros(1), text[:, 1:])
    last = SamplingParams()
    state = DraftState(
        0, text[:, -1], torch.tensor([12]), zero, pack_params([last], [0], zero.device), 12
    )
    assert drafter.draft(state).tokens_BN.tolist() == [[3, 7, 7]]


def test_a_static_tree_of_one_path_drafts_what_a_chain_does() -> None:
    target = tiny_target()
    requests = mixed_requests(target.shape.vocab)
    head = tiny_head(target, draft_vocab=19)
    chain = EagleDrafter(head, slots=4, capacity=CONTEXT + 5, depth=3, width=1, nodes=3)
    paths = [(0,), (0, 0), (0, 0, 0)]
    static = StaticEagleDrafter(head, paths, slots=4, capacity=CONTEXT + 2)
    counts = []
    for drafter in (chain, static):
        engine = Engine(target, drafter, None, decode_ids, slots=4, context=CONTEXT)
        run(engine, requests)
        counts.append(engine.metrics().accepted_at)
    assert counts[0] == counts[1]


def test_paths_that_are_no_tree_are_refused() -> None:
    assert check_paths([(0, 1), (0,)]) == ((0,), (0, 1))
    for wrong in ([], [(0, 0)], [(0,), (1, 0)], [(-1,)], [()]):
        with pytest.raises(ValueError, match="expected paths of ranks"):
            check_paths(wrong)
