"""Where completions end, and what is refused or reported before and after."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from eagle_batch.engine.drafters.eagle import EagleDrafter
from eagle_batch.engine.engine import Engine
from eagle_batch.engine.prefix import common_length
from eagle_batch.engine.request import Completion, EngineMetrics, Request, SamplingParams
from eagle_batch.engine.testing import (
    EOS,
    byte_tokenizer,
    plain_decode,
    tiny_head,
    tiny_model,
    tiny_target,
)
from eagle_batch.errors import ModelError, Reason, RequestError
from eagle_batch.models.target import Target, reference_logits


def make_engine(
    target: Target,
    *,
    context: int = 96,
    decode: Callable[..., str] | None = None,
    draft_vocab: int | None = None,
) -> Engine:
    head = tiny_head(target, draft_vocab=draft_vocab)
    drafter = EagleDrafter(head, slots=3, capacity=context + 8, depth=4, width=3, nodes=10)
    letters = decode or (lambda ids: "".join(chr(97 + token) for token in ids))
    return Engine(target, drafter, None, letters, slots=3, context=context)


def complete(engine: Engine, *requests: Request) -> list[Completion]:
    for request in requests:
        engine.add(request)
    done: list[Completion] = []
    while engine.has_work:
        done.extend(engine.step())
    return sorted(done, key=lambda c: c.request_id)


def free_run(prompt: tuple[int, ...], count: int) -> list[int]:
    params = SamplingParams(max_tokens=count, ignore_eos=True)
    return plain_decode(tiny_model(), prompt, params)


PROMPT = (3, 9, 4, 11)


def test_nothing_is_emitted_after_the_end_of_sequence() -> None:
    target = tiny_target()
    free = free_run(PROMPT, 30)
    target.eos_token_ids = (free[7],)
    first = free.index(free[7])
    (done,) = complete(make_engine(target), Request("a", PROMPT, SamplingParams(max_tokens=30)))
    assert done.token_ids == tuple(free[: first + 1])
    assert done.finish_reason == "eos"


@pytest.mark.parametrize("most", [1, 2, 7, 23])
def test_each_pass_says_how_many_drafted_tokens_it_put_into_the_text(most: int) -> None:
    params = SamplingParams(max_tokens=most, ignore_eos=True)
    done = complete(make_engine(tiny_target()), *(Request(str(n), (n,), params) for n in range(6)))
    for each in done:
        passes = each.accepted_by_pass
        assert (passes[0], len(passes)) == (0, each.target_passes)
        # Each pass adds a token of the target's own, unless the text ended before it.
        cut = sum(passes) + len(passes) - len(each.token_ids)
        assert cut in ({0, 1} if passes[-1] else {0})
        assert sum(passes[:-1]) <= sum(passes) <= each.accepted
    if most == 23:
        assert any(sum(each.accepted_by_pass) for each in done)
        assert any(0 in each.accepted_by_pass[1:] for each in done)


def test_a_stop_string_across_token_borders_cuts_the_text_before_it() -> None:
    target = tiny_target()
    free = free_run(PROMPT, 30)
    text = "".join(chr(97 + token) for token in free)
    stop = text[10:13]
    (done,) = complete(
        make_engine(target),
        Request("a", PROMPT, SamplingParams(max_tokens=30, ignore_eos=True, stop=(stop, "ZZ"))),
    )
    end = text.find(stop)
    assert done.text == text[:end]
    assert done.token_ids == tuple(free[: end + 3])
    assert done.finish_reason == "stop"


def test_length_and_context_end_a_row_exactly() -> None:
    target = tiny_target()
    long = SamplingParams(max_tokens=500, ignore_eos=True)
    short = SamplingParams(max_tokens=5, ignore_eos=True)
    by_context, by_length = complete(
        make_engine(target, context=40), Request("a", PROMPT, long), Request("b", PROMPT, short)
    )
    assert (len(by_context.token_ids), by_context.finish_reason) == (36, "context")
    assert (len(by_length.token_ids), by_length.finish_reason) == (5, "length")
    assert list(by_context.token_ids) == free_run(PROMPT, 36)


def test_a_prompt_that_leaves_no_room_and_an_empty_one_are_the_rows_fault() -> None:
    engine = make_engine(tiny_target(), context=40)
    with pytest.raises(RequestError, match="40 tokens; the context holds 40") as caught:
        engine.add(Request("a", (3,) * 40, SamplingParams()))
    assert caught.value.reason is Reason.PROMPT_TOO_LONG
    with pytest.raises(RequestError) as caught:
        engine.add(Request("b", (), SamplingParams()))
    assert caught.value.reason is Reason.EMPTY_PROMPT
    assert not engine.has_work


def test_a_request_id_cannot_be_in_the_engine_twice() -> None:
    engine = make_engine(tiny_target())
    engine.add(Request("a", PROMPT, SamplingParams()))
    with pytest.raises(ValueError, match="'a' is in the engine already"):
        engine.add(Request("a", PROMPT, SamplingParams()))


def test_logits_that_overflow_end_their_row_and_no_other() -> None:
    target = tiny_target()
    # A token that is never drafted: it is the prompt that has it.
    drafted = tiny_head(target, draft_vocab=target.shape.vocab - 1).draft_to_target
    assert drafted is not None
    (poisoned,) = set(range(target.shape.vocab)) - set(drafted.tolist())
    with torch.no_grad():
        target.embed_weight_VH[poisoned] = float("nan")
    engine = make_engine(target, draft_vocab=target.shape.vocab - 1)
    bad, good = complete(
        engine,
        Request("bad", (3, poisoned, 4), SamplingParams(max_tokens=8)),
        Request("good", PROMPT, SamplingParams(max_tokens=8)),
    )
    assert (bad.finish_reason, bad.text) == ("overflow", "")
    assert good.finish_reason != "overflow"
    assert list(good.token_ids) == plain_decode(tiny_model(), PROMPT, SamplingParams(max_tokens=8))
    # The next row of its slot must not find what is not a number, be it masked.
    assert engine.cache.store.isfinite().all()  # type: ignore[attr-defined]


def test_a_family_whose_forward_pass_we_do_not_reproduce_is_refused() -> None:
    model = tiny_model()
    reference = reference_logits(model)
    target = Target(model)
    target._logit_factor = 1.5
    with pytest.raises(ModelError, match="differs from the model's own"):
        target.check_parity(reference)


def test_memory_of_an_engine_does_not_grow_with_rounds() -> None:
    target = tiny_target()
    engine = make_engine(target)
    sizes = set()
    for i in range(120):
        engine.add(
            Request(str(i), (*PROMPT, 3 + i % 9), SamplingParams(max_tokens=20, ignore_eos=True))
        )
    while engine.has_work:
        engine.step()
        sizes.add((engine.cache.bytes, engine._starts._store.tokens))
    assert len({cache for cache, _ in sizes}) == 1
    assert max(kept for _, kept in sizes) <= 2 * engine.context
    assert not engine._ids


def test_metrics_add_and_subtract() -> None:
    a = EngineMetrics(rows=1, drafted_at=(3, 2), accepted_at=(2,), verify_s=0.5)
    b = EngineMetrics(rows=2, drafted_at=(1,), accepted_at=(1, 1), verify_s=0.25)
    assert (a + b).drafted_at == (4, 2)
    c = EngineMetrics(passes_by_shape=(("1,1,1", 2), ("plain", 1)))
    d = EngineMetrics(passes_by_shape=(("plain", 4),))
    assert (c + d).passes_by_shape == (("1,1,1", 2), ("plain", 5))
    assert (a + b) - b == EngineMetrics(rows=1, drafted_at=(3, 2), accepted_at=(2, 0), verify_s=0.5)
    assert EngineMetrics().acceptance_length == 0.0


def test_the_byte_tokenizer_reads_back_what_it_wrote() -> None:
    tokenizer = byte_tokenizer()
    text = "héllo 🌍 \n"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert tokenizer.eos_token_id == EOS


def test_common_length_counts_leading_tokens() -> None:
    assert common_length((1, 2, 3), (1, 2, 4, 5)) == 2
    assert common_length((), (1,)) == 0
