"""What only shows after a while: memory, the end of the context, a head that overflows."""

from __future__ import annotations

import gc
import math
from typing import Any

import psutil
import pytest
import torch

from eagle_batch.engine.drafters.eagle import EagleDrafter
from eagle_batch.engine.drafters.merged import MergedDrafter
from eagle_batch.engine.drafters.ngram import NgramDrafter
from eagle_batch.engine.engine import Engine
from eagle_batch.engine.request import Request, SamplingParams, Structured
from eagle_batch.engine.testing import (
    byte_tokenizer,
    plain_decode,
    tiny_head,
    tiny_model,
    tiny_target,
)
from eagle_batch.models.heads import Head
from eagle_batch.models.target import Target
from tests.engine.test_parity import decode_ids, expected_tokens, mixed_requests, run

LIMIT = 512


def engine_of(target: Target, head: Head, *, slots: int = 3, context: int = 160) -> Engine:
    sizes: dict[str, Any] = {
        "slots": slots,
        "capacity": context + 6,
        "depth": 4,
        "width": 3,
        "nodes": 8,
    }
    ngram = NgramDrafter(slots=slots, capacity=context, depth=3, device=target.device)
    merged = MergedDrafter(EagleDrafter(head, **sizes), ngram)
    return Engine(target, merged, byte_tokenizer(), decode_ids, slots=slots, context=context)


def test_a_row_goes_on_to_the_last_token_of_the_targets_own_context() -> None:
    target = tiny_target()
    assert target.shape.context == LIMIT
    prompt = tuple(3 + n * n % 20 for n in range(LIMIT - 25))
    params = SamplingParams(max_tokens=400, ignore_eos=True)
    engine = engine_of(target, tiny_head(target), context=LIMIT)
    done = run(engine, [Request("a", prompt, params), Request("b", prompt[:-1], params)])
    for id_, text in (("a", prompt), ("b", prompt[:-1])):
        room = LIMIT - len(text)
        assert done[id_].finish_reason == "context"
        exact = SamplingParams(max_tokens=room, ignore_eos=True)
        assert list(done[id_].token_ids) == plain_decode(tiny_model(), text, exact)


def test_a_head_that_overflows_drafts_nonsense_and_changes_nothing() -> None:
    target = tiny_target()
    requests = mixed_requests(target.shape.vocab, count=12)
    for value in (math.nan, math.inf):
        head = tiny_head(target)
        with torch.no_grad():
            for parameter in head.parameters():
                parameter.flatten()[::7] = value
        done = run(engine_of(target, head), requests)
        assert expected_tokens(requests) == {k: list(c.token_ids) for k, c in done.items()}


@pytest.mark.exhaustive
def test_ten_thousand_rounds_do_not_grow_the_memory() -> None:
    tokenizer = byte_tokenizer()
    target = tiny_target(vocab=len(tokenizer))
    engine = engine_of(target, tiny_head(target))
    choices = [
        SamplingParams(max_tokens=60, ignore_eos=True),
        SamplingParams(max_tokens=40, temperature=1.0, top_p=0.9, logprobs=2, ignore_eos=True),
        SamplingParams(max_tokens=30, structured=Structured("regex", "[a-z ]{25}")),
        SamplingParams(max_tokens=30, bad_words=("ab", "xyz"), presence_penalty=0.5),
    ]
    process, sizes, added = psutil.Process(), [], 0
    while engine.metrics().target_passes < 10_000:
        while engine.waiting < 3:
            prompt = tuple(5 + (added * 7 + n * n) % 200 for n in range(5 + added % 60))
            engine.add(Request(str(added), prompt, choices[added % 4], noise_key=added))
            added += 1
        engine.step()
        if engine.metrics().target_passes % 1000 == 0:
            gc.collect()
            sizes.append((process.memory_info().rss, len(gc.get_objects())))
    # The first thousand rounds fill what is kept: prefixes, grammars, freed blocks.
    assert sizes[-1][0] - sizes[1][0] < 8 << 20, sizes
    assert sizes[-1][1] - sizes[1][1] < 2_000, sizes
