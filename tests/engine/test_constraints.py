"""Structured output and bad words: the same text on every draft, never one that is forbidden."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import jsonschema
import pytest
import regex

from eagle_batch.engine.bad_words import word_tokens
from eagle_batch.engine.drafters.base import Drafter
from eagle_batch.engine.drafters.eagle import EagleDrafter
from eagle_batch.engine.drafters.ngram import NgramDrafter
from eagle_batch.engine.drafters.static import StaticEagleDrafter
from eagle_batch.engine.engine import Engine
from eagle_batch.engine.grammars import Grammars, grammar_problem
from eagle_batch.engine.request import Completion, Request, SamplingParams, Structured
from eagle_batch.engine.testing import (
    EOS,
    byte_tokenizer,
    plain_decode,
    tiny_head,
    tiny_model,
    tiny_target,
)
from eagle_batch.errors import ConfigError
from eagle_batch.models.target import Target

TOKENIZER = byte_tokenizer()
VOCAB = len(TOKENIZER)
CONTEXT = 160
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
JSON = Structured("json_schema", json.dumps(SCHEMA))
DATE = Structured("regex", "(19|20)[0-9]{2}-(0[1-9]|1[0-2])( [a-c]{2,9})?")
COLOUR = Structured("choice", json.dumps(["red", "reddish", "green", 'say "blue"', "vermilion é"]))


def drafters(target: Target, slots: int) -> dict[str, Drafter | None]:
    head = tiny_head(target, draft_vocab=VOCAB - 20)
    sizes: dict[str, Any] = {"slots": slots, "capacity": CONTEXT + 8}
    return {
        "plain": None,
        "chain": EagleDrafter(head, **sizes, depth=3, width=1, nodes=3),
        "tree": EagleDrafter(head, **sizes, depth=4, width=3, nodes=10),
        "static": StaticEagleDrafter(head, **sizes),
        "ngram": NgramDrafter(slots=slots, capacity=CONTEXT, depth=4, device=target.device),
    }


def run(engine: Engine, requests: Sequence[Request]) -> dict[str, Completion]:
    for request in requests:
        engine.add(request)
    done: dict[str, Completion] = {}
    while engine.has_work:
        done |= {completion.request_id: completion for completion in engine.step()}
    return done


def decode(ids: Sequence[int]) -> str:
    return str(TOKENIZER.decode(list(ids), skip_special_tokens=True))


def requests() -> list[Request]:
    """Structured rows, free rows and rows with bad words side by side."""
    choices = [
        SamplingParams(structured=JSON, max_tokens=90, temperature=1.0),
        SamplingParams(structured=DATE, max_tokens=30),
        SamplingParams(max_tokens=12, temperature=0.8, top_p=0.9),
        SamplingParams(structured=COLOUR, max_tokens=30, temperature=1.5, top_k=9),
        SamplingParams(structured=DATE, max_tokens=30, temperature=2.0, repetition_penalty=1.3),
        SamplingParams(max_tokens=24, bad_words=("a", "th", "xyz"), ignore_eos=True),
        SamplingParams(structured=JSON, max_tokens=90, bad_words=("1", "0", "ee")),
    ]
    texts = ["Who? ", "When was it, ", "Tell me more", "Which colour ", "x", "a thing", "Someone: "]
    return [
        Request(str(i), tuple(TOKENIZER.encode(text)), params, noise_key=31 * i + 5)
        for i, (text, params) in enumerate(zip(texts, choices, strict=True))
    ]


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target(vocab=VOCAB)


@pytest.fixture(scope="module")
def expected() -> dict[str, list[int]]:
    model = tiny_model(vocab=VOCAB)
    return {
        r.id: plain_decode(model, r.prompt_ids, r.params, r.noise_key, tokenizer=TOKENIZER)
        for r in requests()
    }


@pytest.mark.parametrize("shape", ["plain", "chain", "tree", "static", "ngram"])
@pytest.mark.parametrize("slots", [1, 5])
def test_no_draft_and_no_batch_changes_what_a_grammar_lets_through(
    target: Target, expected: dict[str, list[int]], shape: str, slots: int
) -> None:
    drafter = drafters(target, slots)[shape]
    engine = Engine(target, drafter, TOKENIZER, decode, slots=slots, context=CONTEXT)
    done = run(engine, requests())
    assert {k: list(c.token_ids) for k, c in done.items()} == expected
    for id_ in ("0", "6"):
        jsonschema.validate(json.loads(done[id_].text), SCHEMA)
    for id_ in ("1", "4"):
        assert regex.fullmatch(DATE.text, done[id_].text)
    assert done["3"].text in json.loads(COLOUR.text)
    assert all(done[k].complete and done[k].finish_reason == "eos" for k in "01346")
    if shape in {"chain", "tree", "static"}:
        # Forced characters are the only candidates that are left, so they are always drafted.
        assert done["0"].acceptance_length > 1.5


def test_a_guide_permits_what_a_regular_expression_may_still_become() -> None:
    """Against partial matches of another regular-expression engine, over all short texts of it."""
    pattern = "(ab|a)c*d{1,2}|x[^a-d]"
    guide = Grammars(TOKENIZER, VOCAB, [EOS]).guide(Structured("regex", pattern))
    letters = {TOKENIZER.encode(c)[0]: c for c in "abcdxyz"}
    todo: list[tuple[int, ...]] = [()]
    for path in todo:
        bits = guide.allowed(path)
        text = "".join(letters[token] for token in path)
        if regex.fullmatch(pattern, text, partial=True) is None:
            assert bits is None
            continue
        assert bits is not None
        permitted = {t for t in range(VOCAB) if bits[t // 8] >> (t % 8) & 1}
        assert (EOS in permitted) == (regex.fullmatch(pattern, text) is not None)
        for token, letter in letters.items():
            may = regex.fullmatch(pattern, text + letter, partial=True) is not None
            assert (token in permitted) == may, text + letter
        todo += [(*path, token) for token in letters if len(path) < 4]


def test_a_text_that_is_cut_before_its_grammar_may_end_says_so(target: Target) -> None:
    engine = Engine(target, None, TOKENIZER, decode, slots=2, context=CONTEXT)
    short = SamplingParams(structured=DATE, max_tokens=5)
    exact = SamplingParams(structured=Structured("regex", "[0-9]{5}x*"), max_tokens=5)
    done = run(engine, [Request("a", (5,), short), Request("b", (5,), exact)])
    assert (done["a"].finish_reason, done["a"].complete) == ("length", False)
    assert done["b"].complete


def test_a_row_that_may_say_nothing_ends_alone(target: Target) -> None:
    engine = Engine(
        target, drafters(target, 2)["tree"], TOKENIZER, decode, slots=2, context=CONTEXT
    )
    choice = Structured("choice", '["ab"]')
    stuck = SamplingParams(structured=choice, bad_words=("b",), max_tokens=9)
    free = SamplingParams(structured=choice, max_tokens=9)
    done = run(engine, [Request("stuck", (9,), stuck), Request("free", (9,), free)])
    assert (done["stuck"].finish_reason, done["stuck"].text) == ("banned", "")
    assert done["free"].text == "ab"


@pytest.mark.parametrize(
    ("structured", "reason"),
    [
        (Structured("regex", "(ab"), "unclosed group"),
        (Structured("regex", "a(?=b)"), "look-around"),
        (Structured("json_schema", '{"type": "objet"}'), "objet"),
        (Structured("json_schema", '{"not": {"type": "null"}}'), "Unimplemented keys"),
        (Structured("json_schema", "[1"), "EOF while parsing"),
    ],
)
def test_a_grammar_that_does_not_compile_is_refused(
    target: Target, structured: Structured, reason: str
) -> None:
    assert reason.lower() in (grammar_problem(structured) or "").lower()
    engine = Engine(target, None, TOKENIZER, decode, slots=1, context=CONTEXT)
    with pytest.raises(ConfigError, match=f"structured.{structured.kind}: cannot be compiled"):
        engine.add(Request("a", (5,), SamplingParams(structured=structured)))
    assert not engine.has_work


def test_what_a_grammar_makes_meaningless_is_refused_all_at_once() -> None:
    with pytest.raises(ValueError, match=r"ignore_eos, min_tokens, stop beside.*"):
        SamplingParams(structured=DATE, ignore_eos=True, min_tokens=3, stop=("x",))
    with pytest.raises(ValueError, match=r"bad_words holds a blank.*; stop_token_ids \[7\] are"):
        SamplingParams(
            bad_words=(" ",), stop_token_ids=(7, 8), logit_bias=((7, float("-inf")), (8, -1.0))
        )


def test_bad_words_are_banned_with_and_without_a_space_before() -> None:
    assert word_tokens(TOKENIZER, ("ab",)) == (
        tuple(TOKENIZER.encode("ab")),
        tuple(TOKENIZER.encode(" ab")),
    )
