"""Prompts of a row keep the tokens of its own texts, and say what they would say anyway."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from eagle_batch.engine.request import Completion, SamplingParams
from eagle_batch.engine.testing import byte_tokenizer
from eagle_batch.job.spelling import Speller
from eagle_batch.stages.calls import Call, Record

END, USER, BEGIN = 2_000_000, 2_000_001, 2_000_002
SPECIAL = {"<end>": END, "<user>": USER, "<bos>": BEGIN}
AB = 2_000_010
#: What the tokenizer writes as one token; sampling may choose its letters instead.
MERGED = {"ab": AB, "abc": AB + 1, "\n<": AB + 2}
KNOWN = SPECIAL | MERGED


class Tokenizer:
    """The longest known piece first, else letters; special tokens are found before anything."""

    all_special_ids = tuple(SPECIAL.values())
    all_special_tokens = tuple(SPECIAL)
    added_tokens_decoder: Mapping[int, AddedToken] = {
        number: AddedToken(name, special=True) for name, number in SPECIAL.items()
    }

    def encode(self, text: str, *, add_special_tokens: bool) -> Sequence[int]:
        ids = [BEGIN] if add_special_tokens else []
        for part in re.split("(<end>|<user>)", text):
            pieces = [part] if part in SPECIAL else re.findall("abc|ab|\n<|.", part, re.DOTALL)
            ids += [KNOWN[piece] if piece in KNOWN else ord(piece) for piece in pieces]
        return ids

    def decode(
        self,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool,
        clean_up_tokenization_spaces: bool,
    ) -> str:
        names = {number: name for name, number in KNOWN.items()}
        kept = [n for n in token_ids if not (skip_special_tokens and n in SPECIAL.values())]
        return "".join(names.get(number) or chr(number) for number in kept)


def call(prompt: str, *, special: bool = False) -> Call:
    return Call(0, "one", prompt, special, SamplingParams())


def record(prompt: str, ids: Sequence[int], text: str, *, special: bool = False) -> Record:
    known = tuple(Tokenizer().encode(prompt, add_special_tokens=special))
    done = Completion("x", tuple(ids), text, "eos", 1, 1, 0, 0, prompt_ids=known)
    return Record(call(prompt, special=special), done, 0)


def letters(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def test_a_conversation_keeps_the_tokens_it_was_generated_as() -> None:
    """The tokenizer would write `ab` as one token; the slot holds two."""
    first = record("<user>Hi<end>", [*letters("ab"), END], "ab")
    prompt = "<user>Hi<end>ab<end><user>ab<end>"
    spelled = Speller(Tokenizer()).prompt_ids(call(prompt), [first])
    wanted = (*first.completion.prompt_ids, *letters("ab"), END, USER, AB, END)
    assert spelled == wanted
    second = record(prompt, [*letters("abc")], "abc")
    kept = Record(
        second.call,
        Completion(
            "y", second.completion.token_ids, "abc", "length", 1, 1, 0, 0, prompt_ids=wanted
        ),
        0,
    )
    third = Speller(Tokenizer()).prompt_ids(call(prompt + "abc<end>"), [first, kept])
    assert third == (*wanted, *letters("abc"), END)


@pytest.mark.parametrize(
    ("prompt", "ids", "text", "why"),
    [
        ("<user>a<end>abc", [*letters("ab"), END], "ab", "the text may grow together with `c`"),
        ("<user>b<end>ab<end>", [*letters("ab"), END], "ab", "it begins otherwise"),
        ("<user>a<end>a<end>", letters("ab"), "a", "a stop string cut it inside its tokens"),
        ("<user>a<end>ab<end>", [97, USER, 98], "ab", "the text lacks a special token it has"),
        ("<user>a<end>\ufffd<end>", letters("\ufffd"), "\ufffd", "it was cut in a character"),
        ("quoted: ab<end>", letters("ab"), "ab", "it is quoted, not gone on with"),
    ],
)
def test_whatever_does_not_go_on_is_spelled_anew(
    prompt: str, ids: list[int], text: str, why: str
) -> None:
    before = record("<user>a<end>", ids, text)
    wanted = tuple(Tokenizer().encode(prompt, add_special_tokens=False))
    assert Speller(Tokenizer()).prompt_ids(call(prompt), [before]) == wanted, why


def test_raw_prompts_are_spelled_as_the_tokenizer_does() -> None:
    before = record("a", letters("ab"), "ab", special=True)
    spelled = Speller(Tokenizer()).prompt_ids(call("aab<end>", special=True), [before])
    assert spelled == (BEGIN, ord("a"), AB, END)


@pytest.mark.parametrize(
    ("ids", "end", "wanted"),
    [
        (["a", "b", "<eom>"], "<|im_end|>", ["a", "b", "<|im_end|>"]),
        (["a", "b", "<turn>"], "<turn>", ["a", "b", "<turn>"]),
        (["a", "b", "<|im_end|>"], "<turn>", ["a", "b", "<turn>"]),
        (["a", "<eom>", "b"], "<|im_end|>", ["ab", "<|im_end|>"]),
        (["a", "b", "<turn>", "<eom>"], "<turn>", ["ab", "<turn>"]),
    ],
    ids=["ends as no prompt does", "unnamed end", "ends by a name", "inside", "two of them"],
)
def test_special_tokens_without_a_name_are_known(
    ids: list[str], end: str, wanted: list[str]
) -> None:
    """Tokenizers name one end of a text; models have more, and write them unasked."""
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([AddedToken(name, special=True) for name in ("<eom>", "<turn>")])
    tokenizer.add_tokens(["ab"])  # the tokenizer's spelling
    made = tokenizer.convert_tokens_to_ids(ids)
    assert not {"<eom>", "<turn>"} & set(tokenizer.all_special_tokens)
    begin = tuple(tokenizer.encode("<|im_start|>", add_special_tokens=False))
    done = Completion("x", tuple(made), "ab", "eos", 1, 1, 0, 0, prompt_ids=begin)
    before = Record(call("<|im_start|>"), done, 0)
    spelled = Speller(tokenizer).prompt_ids(call(f"<|im_start|>ab{end}"), [before])
    assert spelled == (*begin, *tokenizer.convert_tokens_to_ids(wanted))


def test_a_tokenizer_need_not_tell_what_was_added() -> None:
    class Silent(Tokenizer):
        @property
        def added_tokens_decoder(self) -> Mapping[int, AddedToken]:  # type: ignore[override]
            raise NotImplementedError

    before = record("<user>", [*letters("ab"), END], "ab")
    spelled = Speller(Silent()).prompt_ids(call("<user>ab<end>"), [before])
    assert spelled == (USER, *letters("ab"), END)


@pytest.mark.parametrize("kept", [0, 1, 2])
def test_of_candidates_with_one_text_the_kept_one_is_gone_on_with(kept: int) -> None:
    """The output shows its tokens."""
    spellings = [letters("abc"), [AB, ord("c")], [KNOWN["abc"]]]
    made = [record("<user>", [*ids, END], "abc") for ids in spellings]
    made[kept] = made[kept].keep(1.0)
    spelled = Speller(Tokenizer()).prompt_ids(call("<user>abc<end>"), made)
    assert spelled == (USER, *spellings[kept], END)


def test_a_longer_beginning_goes_before_a_kept_one() -> None:
    """A judge may go on with a text of which it is not yet known whether it is kept."""
    first = record("<user>", [*letters("ab"), END], "ab").keep(None)
    second = record("<user>ab<end>", [*letters("ab"), END], "ab")
    spelled = Speller(Tokenizer()).prompt_ids(call("<user>ab<end>ab<end>"), [first, second])
    assert spelled == (*second.completion.prompt_ids, *letters("ab"), END)


TEXTS = st.lists(st.sampled_from(["a", "b", "c", "ab", "abc", "\n", "<"]), max_size=6)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(TEXTS, TEXTS, st.booleans()), min_size=1, max_size=4))
def test_a_prompt_says_the_same_however_it_is_spelled(
    turns: list[tuple[list[str], list[str], bool]],
) -> None:
    """Decoding gives the prompt; what a slot holds is how it begins."""
    speller, tokenizer = Speller(Tokenizer()), Tokenizer()
    records: list[Record] = []
    prompt = ""
    for user, made, ended in turns:
        prompt += f"<user>{''.join(user)}<end>"
        ids = speller.prompt_ids(call(prompt), records)
        said = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        assert said == prompt
        for earlier in records:
            held = (*earlier.completion.prompt_ids, *earlier.completion.token_ids)
            assert ids[: len(held)] == held
        # Sampled: any pieces, merged or not.
        sampled = [n for piece in made for n in tokenizer.encode(piece, add_special_tokens=False)]
        done = Completion(
            "x",
            (*sampled, *([END] if ended else [])),
            "".join(made),
            "eos",
            1,
            1,
            0,
            0,
            prompt_ids=ids,
        )
        records.append(Record(call(prompt), done, 0))
        prompt += "".join(made) + "<end>"
