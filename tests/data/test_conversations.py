"""Multi-turn columns, few-shot examples, template options and begun answers.

The oracle is transformers' own `apply_chat_template` over a tokenizer with the same template.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import PreTrainedTokenizerFast

from eagle_batch.data.describe import check, describe
from eagle_batch.data.prompts import make_prompter
from eagle_batch.engine.testing import byte_tokenizer
from eagle_batch.errors import ConfigError, RequestError
from eagle_batch.pipeline import Pipeline
from tests.data.support import CHATML, make_pipeline, write_model

#: As Qwen3 does: a switch for thinking, tools in front, thoughts before a last answer.
THINKING = (
    "{%- if tools %}{{ '<|im_start|>system\n' + (tools | tojson) + '<|im_end|>\n' }}{%- endif %}"
    "{%- for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}"
    "{%- if message.role == 'assistant' and loop.last %}{{ '<think>\n\n</think>\n\n' }}{%- endif %}"
    "{{ message.content.strip() + '<|im_end|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}"
    "{%- endif %}{%- endif %}"
)
TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello, שלום 你好 😀"},
    {"role": "assistant", "content": "Hi."},
    {"role": "user", "content": "Why is the sky blue?"},
]
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"q": "é"}}}]


def oracle(template: str, messages: list[dict[str, Any]], **options: Any) -> str:
    tokenizer: PreTrainedTokenizerFast = byte_tokenizer()
    tokenizer.chat_template = template
    if not options.get("continue_final_message"):
        options["add_generation_prompt"] = True
    text = tokenizer.apply_chat_template(messages, tokenize=False, **options)
    assert isinstance(text, str)
    return text


def pipeline(folder: Path, stage: dict[str, Any], template: str = CHATML) -> Pipeline:
    """A pipeline of one stage over rows that have a conversation."""
    table = pa.table({"id": ["a"], "talk": [TURNS], "topic": ["rain"], "shots": [TURNS[1:3]]})
    pq.write_table(table, folder / "topics.parquet")
    made = make_pipeline(folder, {"stages": [{"name": "text", **stage}]})
    write_model(folder / "model", template)
    return made


def rendered(made: Pipeline, **values: Any) -> str:
    row = {"talk": TURNS, "topic": "rain", "shots": TURNS[1:3], **values}
    return make_prompter(made).render(0, row)


@pytest.mark.parametrize("template", [CHATML, THINKING])
def test_a_column_of_turns_is_put_through_the_template(tmp_path: Path, template: str) -> None:
    made = pipeline(tmp_path, {"messages": "{{ talk }}"}, template)
    assert describe(made).first_prompt == rendered(made) == oracle(template, TURNS)


def test_turns_stand_between_messages_as_examples_do(tmp_path: Path) -> None:
    system, ask = TURNS[0], {"role": "user", "content": "About {{ topic }}?"}
    made = pipeline(tmp_path, {"messages": [system, {"turns": "shots[:2]"}, ask]})
    whole = [system, *TURNS[1:3], {"role": "user", "content": "About rain?"}]
    assert rendered(made) == oracle(CHATML, whole)


def test_options_reach_the_template(tmp_path: Path) -> None:
    options = {"enable_thinking": False, "tools": TOOLS}
    made = pipeline(tmp_path, {"messages": "talk", "template_options": options}, THINKING)
    assert rendered(made) == oracle(THINKING, TURNS, enable_thinking=False, tools=TOOLS)
    assert rendered(made) != rendered(pipeline(tmp_path, {"messages": "talk"}, THINKING))


@pytest.mark.parametrize("template", [CHATML, THINKING])
@pytest.mark.parametrize("start", ["The {{ topic }}", "Sure:\n1."])
def test_an_answer_that_is_begun_goes_on_where_it_stops(
    tmp_path: Path, template: str, start: str
) -> None:
    made = pipeline(tmp_path, {"messages": "{{ talk }}", "prefill": start}, template)
    begun = start.replace("{{ topic }}", "rain")
    messages = [*TURNS, {"role": "assistant", "content": begun}]
    assert rendered(made) == oracle(template, messages, continue_final_message=True)
    assert rendered(made).endswith(begun)


def test_other_forms_of_turns_are_read(tmp_path: Path) -> None:
    made = pipeline(tmp_path, {"messages": "{{ talk }}"})
    share = [{"from": "system", "value": "S"}, {"from": "human", "value": "Q"}]
    share += [{"from": "gpt", "value": "A"}, {"from": "human", "value": "B"}]
    roles = ("system", "user", "assistant", "user")
    plain = [{"role": r, "content": turn["value"]} for r, turn in zip(roles, share, strict=True)]
    assert rendered(made, talk=share) == oracle(CHATML, plain)
    parts = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    ]
    assert rendered(made, talk=parts) == oracle(CHATML, [{"role": "user", "content": "ab"}])
    nulls = [{"role": "user", "content": "a", "name": None}]
    assert rendered(made, talk=nulls) == oracle(CHATML, [{"role": "user", "content": "a"}])


@pytest.mark.parametrize(
    ("talk", "message"),
    [
        (None, "stages.0.messages.0.turns: found null; expected a list of messages"),
        ("hello", "found str 'hello'; expected a list of messages"),
        ([], "the list of messages is empty"),
        (["hello"], "turn 0 is str; expected role and content"),
        (
            [{"role": "user", "content": "a"}, {"role": "user", "content": None}],
            "turn 1 has no content",
        ),
        ([{"content": "a"}], "turn 0 has no role"),
        ([{"role": 3, "content": "a"}], "turn 0: its role is int"),
        ([{"role": "user", "content": 5}], "turn 0: its content is int"),
        (
            [{"role": "user", "content": [{"type": "image_url"}]}],
            "a part of type image_url; expected parts",
        ),
        ([{"role": "user", "content": "\ud83d"}], "turn 0: character 0 is half of a character"),
    ],
)
def test_a_conversation_that_is_none_is_the_row_s_fault(
    tmp_path: Path, talk: Any, message: str
) -> None:
    made = pipeline(tmp_path, {"messages": "{{ talk }}"})
    with pytest.raises(RequestError) as caught:
        rendered(made, talk=talk)
    assert message in caught.value.message


@pytest.mark.parametrize(
    ("stage", "message"),
    [
        ({"messages": "{{ tlak }}"}, "messages.0.turns: found 'tlak', which is neither a column"),
        ({"messages": "{{ talk"}, "messages.0.turns: not a valid expression"),
        ({"messages": "talk", "prefill": "{{ x }}"}, "stages.0.prefill: found 'x'"),
        (
            {"messages": "talk", "template_options": {"enable_thinkin": True}},
            "template_options.enable_thinkin: the chat template of",
        ),
        (
            {"messages": "talk", "template_options": {"enable_thinkin": True}},
            "did you mean 'enable_thinking'? expected one of enable_thinking, tools",
        ),
        ({"messages": "talk", "template_options": {"messages": []}}, "does not use it"),
    ],
)
def test_a_wrong_prompt_is_told_before_anything_runs(
    tmp_path: Path, stage: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        check(pipeline(tmp_path, stage, THINKING))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("stage", "message"),
    [
        ({"messages": [{"turns": "talk", "role": "user"}]}, "found it beside turns"),
        (
            {"messages": [{"role": "user"}]},
            "messages.0.content: is missing; expected role and content",
        ),
        ({"messages": [{}]}, "is missing; expected role and content, or turns"),
        ({"prompt": "x", "prefill": "y"}, "a raw prompt has no chat template"),
        ({"magpie": True, "prefill": "y"}, "a user's turn has no answer to begin"),
    ],
)
def test_parts_of_a_prompt_that_exclude_each_other_are_told(
    tmp_path: Path, stage: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        pipeline(tmp_path, stage)
    assert message in str(caught.value)
