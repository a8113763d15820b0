"""What is there of a prompt is not computed again, and leaves no trace in the text."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import takewhile
from typing import Any

import pytest
import torch

from eagle_batch.engine import starts
from eagle_batch.engine.drafters.base import Drafter
from eagle_batch.engine.drafters.draft_model import DraftModelDrafter
from eagle_batch.engine.drafters.eagle import EagleDrafter
from eagle_batch.engine.drafters.merged import MergedDrafter
from eagle_batch.engine.drafters.ngram import NgramDrafter
from eagle_batch.engine.engine import Engine
from eagle_batch.engine.prefix import PrefixStore, SharedPrefix, common_length
from eagle_batch.engine.request import Completion, Request, SamplingParams
from eagle_batch.engine.slots import Row
from eagle_batch.engine.starts import Starts, TokenTable, placed
from eagle_batch.engine.testing import plain_decode, tiny_head, tiny_model, tiny_target
from eagle_batch.models.cache import CacheShape, KeyValueCache
from eagle_batch.models.target import Target
from tests.engine.test_parity import CONTEXT, decode_ids

STAGES, TURN, LAYERS = 3, 5, 4
ROOM: dict[str, Any] = {"capacity": CONTEXT + 8, "depth": 3, "width": 3, "nodes": 7}
DRAFTERS: dict[str, Callable[[Target, int], Drafter | None]] = {
    "plain": lambda _target, _slots: None,
    "tree": lambda target, slots: EagleDrafter(
        tiny_head(target, draft_vocab=19), slots=slots, **ROOM
    ),
    "eagle1": lambda target, slots: EagleDrafter(tiny_head(target, "eagle1"), slots=slots, **ROOM),
    "model": lambda target, slots: DraftModelDrafter(
        tiny_target(layers=2, seed=4), target_vocab=target.shape.vocab, slots=slots, **ROOM
    ),
    "merged": lambda target, slots: MergedDrafter(
        EagleDrafter(tiny_head(target, draft_vocab=19), slots=slots, **ROOM),
        NgramDrafter(slots=slots, capacity=CONTEXT, depth=2, device=target.device),
    ),
}
SAMPLING = [
    SamplingParams(max_tokens=6),
    SamplingParams(temperature=1.0, max_tokens=8),
    SamplingParams(temperature=0.8, top_p=0.9, max_tokens=4, repetition_penalty=1.2),
]


def first_request(row: int) -> Request:
    """A row's first stage: instructions that all rows share, then what is its own."""
    rng = random.Random(row)
    own = [rng.randrange(3, 24) for _ in range(rng.randrange(1, 12))]
    prompt = (*range(3, 23), *own)
    return Request(f"{row}/0", prompt, SAMPLING[row % len(SAMPLING)], noise_key=100 * row)


def next_request(request: Request, completion: Completion) -> Request | None:
    """The stage after: in odd rows it goes on with the text, in even ones it quotes it."""
    row, stage = map(int, request.id.split("/"))
    if stage + 1 == STAGES:
        return None
    turn = [(7 * stage + n) % 20 + 3 for n in range(TURN)]
    if row % 2:
        prompt = (*request.prompt_ids, *completion.token_ids, *turn)
    else:
        prompt = (*range(22, 2, -1), *turn, *completion.token_ids, stage + 3)
    key = request.noise_key + stage + 1
    return replace(request, id=f"{row}/{stage + 1}", prompt_ids=prompt, noise_key=key, ahead=True)


def flow(engine: Engine, rows: int) -> tuple[dict[str, Request], dict[str, Completion]]:
    """Run rows through their stages as a worker does."""
    asked: dict[str, Request] = {}
    done: dict[str, Completion] = {}
    begun = iter(range(rows))
    while True:
        while engine.waiting < engine.slots and (row := next(begun, None)) is not None:
            asked[f"{row}/0"] = first_request(row)
            engine.add(asked[f"{row}/0"])
        if not engine.has_work:
            return asked, done
        for completion in engine.step():
            done[completion.request_id] = completion
            request = next_request(asked[completion.request_id], completion)
            if request is not None:
                asked[request.id] = request
                engine.add(request)


def build(target: Target, drafter: str, slots: int, chunk: int = 512) -> Engine:
    return Engine(
        target,
        DRAFTERS[drafter](target, slots),
        None,
        decode_ids,
        slots=slots,
        context=CONTEXT,
        prefill_chunk=chunk,
    )


@pytest.mark.parametrize(
    ("drafter", "slots"),
    [
        *[(name, slots) for name in ("plain", "tree") for slots in (1, 3, 16)],
        *[(name, 3) for name in ("eagle1", "model", "merged")],
    ],
)
def test_stages_say_the_same_with_and_without_reuse(
    drafter: str, slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tiny_target(layers=LAYERS)
    rows = 17 if slots == 16 else 4
    engine = build(target, drafter, slots, chunk=11)
    asked, done = flow(engine, rows)
    with monkeypatch.context() as patch:
        patch.setattr(starts, "MIN_SHARED_TOKENS", 10**6)
        anew = build(target, drafter, slots)
        _, wanted = flow(anew, rows)
    tokens = {name: completion.token_ids for name, completion in done.items()}
    assert tokens == {name: completion.token_ids for name, completion in wanted.items()}
    model = tiny_model(layers=LAYERS)
    for request in [asked["1/2"], asked["2/1"]]:
        by_hand = plain_decode(model, request.prompt_ids, request.params, request.noise_key)
        assert list(tokens[request.id]) == by_hand
    mine, theirs = engine.metrics(), anew.metrics()
    # A head that began from other features than it should would be right less often. (What n-grams
    # draft where they reach the end of a text is what stood in the slot before.)
    if drafter != "merged":
        assert mine.accepted_at == theirs.accepted_at
        assert mine.row_passes == theirs.row_passes
    assert (drafter == "plain") == (sum(mine.accepted_at) == 0)
    assert theirs.cached_prompt_tokens == 0
    assert (
        mine.prompt_tokens == theirs.prompt_tokens == sum(len(r.prompt_ids) for r in asked.values())
    )
    assert mine.prompt_tokens - mine.cached_prompt_tokens < 0.6 * mine.prompt_tokens


@pytest.mark.parametrize("slots", [1, 2])
def test_a_row_that_goes_on_computes_its_new_turn_only(slots: int) -> None:
    engine = build(tiny_target(), "tree", slots)
    requests = [
        replace(first_request(row), prompt_ids=tuple(3 + (n * row + n) % 20 for n in range(30)))
        for row in (1, 3, 5)
    ]
    asked = {request.id: request for request in requests}
    for request in requests:
        engine.add(request)
    while engine.has_work:
        for completion in engine.step():
            following = next_request(asked[completion.request_id], completion)
            if following is not None:
                asked[following.id] = following
                engine.add(following)
    metrics = engine.metrics()
    # The turn, and two tokens: the last of the text has no keys yet, the one before no successor.
    computed = 3 * 30 + 3 * (STAGES - 1) * (TURN + 2)
    assert metrics.prompt_tokens - metrics.cached_prompt_tokens <= computed


def test_nothing_grows_over_ten_thousand_rows() -> None:
    shape = CacheShape(layers=1, slots=4, capacity=64, kv_heads=1, head_dim=1)
    cache = KeyValueCache(shape, dtype=torch.float32, device=torch.device("cpu"))
    known = Starts(cache, None, 64)
    rng = random.Random(0)
    beginnings = [tuple(rng.randrange(99) for _ in range(30)) for _ in range(40)]
    most = reused = 0
    for number in range(10_000):
        prompt = (*rng.choice(beginnings), *(rng.randrange(99) for _ in range(9)))
        row = Row(Request(str(number), prompt, SamplingParams()), tokens=[1, 2, 3])
        start = known.find(prompt, follow=True)
        slot = number % 4
        assert known.bring([(row, start)], slot) == [row]
        known.begun(slot, row, row.length)
        known.ended(row, slot, 3)
        reused += start.length
        most = max(most, known._store.tokens)
    assert 0 < most <= 2 * 64
    assert len(known._store._entries) <= 2 * 64 // 30
    assert reused > 10_000
    kept = known._store._entries.values()
    held = sum(part.numel() for each in kept for part in each.target_columns)
    assert held == 2 * known._store.tokens


def test_a_prefix_that_no_slot_holds_any_more_is_kept() -> None:
    engine = build(tiny_target(), "tree", 1)
    params = SamplingParams(max_tokens=2)
    for row in range(8):  # Two stages whose prompts begin differently, in one slot.
        for stage, shared in enumerate((range(3, 23), range(22, 2, -1))):
            prompt = (*shared, 3 + row, 4 + stage)
            engine.add(Request(f"{row}/{stage}", prompt, params))
            engine.step()
            while engine.has_work:
                engine.step()
    metrics = engine.metrics()
    # Each prefix is computed with the first prompt, and kept when the second shows that it recurs.
    assert metrics.cached_prompt_tokens == 6 * 2 * 19


def test_a_row_whose_logits_overflowed_is_no_start() -> None:
    engine = build(tiny_target(), "plain", 1)
    prompt = tuple(range(3, 23))
    engine.add(Request("a", prompt, SamplingParams(max_tokens=3)))
    while engine.has_work:
        engine.step()
        for row in engine._slots.rows:
            row.finish_reason = "overflow"
            engine._release_finished()
    engine.add(Request("b", prompt, SamplingParams(max_tokens=3)))
    engine.step()
    assert engine.metrics().cached_prompt_tokens == 0


def test_common_starts_are_those_found_token_by_token() -> None:
    rng = random.Random(1)
    table = TokenTable(5, 12)
    for _ in range(200):
        rows = [tuple(rng.randrange(2) for _ in range(rng.randrange(0, 14))) for _ in range(5)]
        wanted = tuple(rng.randrange(2) for _ in range(rng.randrange(1, 14)))
        for place, row in enumerate(rows):
            table.set(place, row)
        by_hand = [
            sum(1 for _ in takewhile(lambda p: p[0] == p[1], zip(row, wanted, strict=False)))
            for row in rows
        ]
        assert [common_length(row, wanted) for row in rows] == by_hand
        assert table.common(wanted).tolist() == [min(count, 12) for count in by_hand]


def test_each_row_gets_the_slot_that_holds_its_start_where_it_can() -> None:
    for sources in ([7, 9, 8, 3, 8], [-1, -1], [6, 6, 6], [7, 6], []):
        slots = range(6, 6 + len(sources))
        order = placed(sources, slots)
        assert sorted(order) == list(range(len(sources)))
        for source in {source for source in sources if source in slots}:
            assert sources[order[source - 6]] == source


def test_the_store_keeps_what_was_used_last_within_its_size() -> None:
    store = PrefixStore(30)
    columns = (torch.zeros(1),)
    for first in range(3):
        store.put(SharedPrefix((first, *range(9)), columns, None))
    assert store.match((0, *range(9), 5), drafted=False) is not None
    store.put(SharedPrefix((3, *range(9)), columns, None))
    store.put(SharedPrefix((3, *range(9)), columns, None))
    assert store.tokens == 30
    found = [store.match((first, 0, 1), drafted=False) for first in range(4)]
    assert [item is not None and item[1] for item in found] == [3, 0, 3, 3]
    assert store.match((0, 0, 1), drafted=True) is None
    store.put(SharedPrefix(tuple(range(31)), columns, None))
    assert store.tokens == 0
