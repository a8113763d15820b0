"""Templates over rows: what they see, what is refused before the run, what is a row's own fault."""

from __future__ import annotations

import datetime as dt
import decimal
from pathlib import Path
from typing import Any

import pytest

from eagle_batch.data.prompts import make_prompter
from eagle_batch.data.templates import StageTemplate, compile_stages
from eagle_batch.errors import ConfigError, Reason, RequestError
from eagle_batch.pipeline import Stage, load_pipeline
from tests.data.support import CHATML, make_pipeline, write_model, write_pipeline


def stage(prompt: str, name: str = "s") -> Stage:
    return Stage.model_validate({"name": name, "prompt": prompt})


def render(prompt: str, **values: Any) -> str:
    return StageTemplate(0, stage(prompt)).render(values)[0]["content"]


@pytest.mark.parametrize(
    ("prompt", "values", "expected"),
    [
        ("About {{ x }}.", {"x": "a < b & 'c'"}, "About a < b & 'c'."),
        ("{{ x }}", {"x": "{{ y }} {% raw %}"}, "{{ y }} {% raw %}"),
        ("{{ x }}", {"x": "😀 مرحبا 中文 \u202eabc"}, "😀 مرحبا 中文 \u202eabc"),
        ("{{ x }}", {"x": 1.5}, "1.5"),
        ("{{ x }}", {"x": decimal.Decimal("1.50")}, "1.50"),
        ("{{ x }}", {"x": dt.date(2024, 2, 3)}, "2024-02-03"),
        ("{{ x.year }}", {"x": dt.date(2024, 2, 3)}, "2024"),
        ("{{ x.a[1].b }}", {"x": {"a": [0, {"b": "deep"}]}}, "deep"),
        ("{{ x | tojson }}", {"x": {"é": [None, "<"]}}, '{"é": [null, "<"]}'),
        ("{{ row['a b.c'] }}", {"a b.c": 3}, "3"),
        ("{{ row.x }}", {"x": 3}, "3"),
        ("{% for k in row %}{{ k }},{% endfor %}", {"x": 1, "y": 2}, "x,y,"),
        ("{{ row }}", {"row": "a column of this name"}, "a column of this name"),
        ("{% if x %}yes{% else %}no{% endif %}", {"x": None}, "no"),
        ("{% if x is none %}none{% endif %}", {"x": None}, "none"),
        ("{% if x == none %}none{% endif %}", {"x": None}, "none"),
        ("{% if x is not none %}{{ x }}{% endif %}", {"x": 0}, "0"),
        ("{{ x or 'nothing' }}", {"x": None}, "nothing"),
        ("{{ x | default('nothing', true) }}", {"x": None}, "nothing"),
        ("{{ x.y or 'nothing' }}", {"x": {"y": None}}, "nothing"),
        ("{{ x | select | list | length }}", {"x": [None, 1]}, "1"),
        ("a\n", {}, "a"),
        ("{{ x }}", {"x": "y" * 100_000}, "y" * 100_000),
    ],
)
def test_rendering(prompt: str, values: dict[str, Any], expected: str) -> None:
    assert render(prompt, **values) == expected


@pytest.mark.parametrize(
    ("prompt", "values"),
    [
        ("{{ x }}", {"x": None}),
        ("{{ x | upper }}", {"x": None}),
        ("{{ x ~ 'a' }}", {"x": None}),
        ("{{ 'a' + x }}", {"x": None}),
        ("{{ '%s' | format(x) }}", {"x": None}),
        ("{{ '{}'.format(x) }}", {"x": None}),
        ("{{ [x] | join }}", {"x": None}),
        ("{{ [x] }}", {"x": None}),
        ("{{ x.y }}", {"x": None}),
        ("{{ x.y }}", {"x": {"y": None}}),
        ("{{ x[0] }}", {"x": [None]}),
        ("{{ x.nope }}", {"x": {"y": 1}}),
        ("{{ none }}", {}),
        ("{{ x }}", {"x": b"\xff"}),
        ("{{ 1 / x }}", {"x": 0}),
        ("{{ x + 1 }}", {"x": "a"}),
        ("{% for i in x %}{% endfor %}", {"x": 5}),
        ("{% for i in range(x) %}{% endfor %}", {"x": 10**9}),
        ("{{ x.__class__.__mro__ }}", {"x": "a"}),
        ("{{ x.append(1) }}", {"x": [1]}),
        ("{{ ''.__class__ }}", {}),
    ],
)
def test_a_row_that_makes_no_text_is_a_template_error_of_the_row(
    prompt: str, values: dict[str, Any]
) -> None:
    with pytest.raises(RequestError) as caught:
        render(prompt, **values)
    assert caught.value.reason is Reason.TEMPLATE_ERROR
    assert caught.value.message.startswith("stages.0.prompt: ")


def test_half_a_character_is_invalid_text_and_not_an_exception_of_the_encoder() -> None:
    with pytest.raises(RequestError) as caught:
        render("ab{{ x }}", x="\ud83d")
    assert caught.value.reason is Reason.INVALID_TEXT
    assert "character 2" in caught.value.message


def test_an_empty_raw_prompt_is_its_own_reason(tmp_path: Path) -> None:
    pipeline = make_pipeline(tmp_path, {"stages": [{"name": "s", "prompt": "{{ topic }}"}]})
    prompter = make_prompter(pipeline)
    assert prompter.render(0, {"topic": "x"}) == "x"
    assert prompter.adds_special_tokens(0)
    with pytest.raises(RequestError) as caught:
        prompter.render(0, {"topic": ""})
    assert caught.value.reason is Reason.EMPTY_PROMPT


@pytest.mark.parametrize(
    ("prompt", "names"),
    [
        ("{{ topc }}", {"topc": "did you mean 'topic'? expected one of a b, q, topic"}),
        ("{{ row['a c'] }}", {"a c": "did you mean 'a b'?"}),
        ("{{ row.nope }}", {"nope": "expected one of"}),
        ("{{ q }} {{ topic }} {{ row['a b'] }} {{ range(3) }}", {}),
        ("{% set y = 1 %}{{ y }}{% for z in [1] %}{{ z }}{{ loop.index }}{% endfor %}", {}),
        ("{% if topic %}{{ missing }}{% endif %}", {"missing": "neither a column nor"}),
        ("{{ me }}", {"me": "which is this stage itself"}),
        ("{{ later }}", {"later": "which is a later stage; move it before this one"}),
        ("{{ topic.anything }}", {}),
    ],
)
def test_names_are_checked_before_the_run(prompt: str, names: dict[str, str]) -> None:
    template = StageTemplate(1, stage(prompt, "me"))
    lines = template.problems(["topic", "a b"], ["q", "me", "later"])
    assert len(lines) == len(names)
    for line, (name, text) in zip(lines, names.items(), strict=True):
        assert line.startswith(f"stages.1.prompt: found {name!r}")
        assert text in line


def test_a_message_is_named_by_its_place() -> None:
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "{{ x }}"}]
    template = StageTemplate(0, Stage.model_validate({"name": "q", "messages": messages}))
    assert template.problems([], ["q"])[0].startswith("stages.0.messages.1.content: found 'x'")


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("{{ x", "not a valid template in line 1"),
        ("a\n{% if x %}", "not a valid template in line 2"),
        ("{{ x | nope }}", "No filter named 'nope'"),
        ("{{ x | random }}", "No filter named 'random'"),
        ("{% if x is nope %}{% endif %}", "No test named 'nope'"),
        ("{% if false %}\n{{ x | nope }}{% endif %}", "in line 2 of the text: No filter named"),
        ("{% nope %}", "unknown tag 'nope'"),
        ("{{ " + "(" * 3000 + ")" * 3000 + " }}", "nested too deeply"),
    ],
)
def test_an_invalid_template_is_a_config_error_with_key_and_line(prompt: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compile_stages([stage("ok"), stage(prompt)])
    assert str(caught.value).startswith("stages.1.prompt: ")
    assert message in str(caught.value)


def test_random_text_is_not_to_be_had() -> None:
    lines = StageTemplate(0, stage("{{ lipsum() }}")).problems([], ["s"])
    assert lines[0].startswith("stages.0.prompt: found 'lipsum'")


@pytest.mark.parametrize(
    ("prompt", "columns"),
    [
        ("{{ b }} {{ a }}", ("a", "b")),
        ("{{ row['c d'] }}", ("c d",)),
        ("{{ row.a }}", ("a",)),
        ("{{ row.items() }}", ("a", "b", "c d")),
        ("{% for k in row %}{{ row[k] }}{% endfor %}", ("a", "b", "c d")),
        ("nothing", ()),
    ],
)
def test_only_the_columns_that_a_template_uses_are_read(
    prompt: str, columns: tuple[str, ...]
) -> None:
    assert StageTemplate(0, stage(prompt)).columns(("a", "b", "c d")) == columns


def test_a_later_stage_sees_earlier_text(tmp_path: Path) -> None:
    prompter = make_prompter(make_pipeline(tmp_path))
    values = {"topic": "rain"}
    assert prompter.render(0, values) == (
        "<|im_start|>user\nAsk about rain.<|im_end|>\n<|im_start|>assistant\n"
    )
    assert prompter.render(1, {**values, "question": "Why {{ rain }}?"}) == (
        "<|im_start|>user\nWhy {{ rain }}?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert not prompter.adds_special_tokens(1)


CHAT_FORMS = {
    "chatml": (CHATML, "<|im_start|>user\n", "<|im_end|>"),
    "llama": (
        (
            "{{ bos_token }}{% for m in messages %}<|h|>{{ m.role }}<|e|>\n\n{{ m.content | trim }}"
            "<|eot|>{% endfor %}{% if add_generation_prompt %}<|h|>assistant<|e|>{% endif %}"
        ),
        "<s><|h|>user<|e|>\n\n",
        "<|eot|>",
    ),
    "mistral": (
        (
            "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} "
            "[/INST]{% else %}{{ m.content }}</s>{% endif %}{% endfor %}"
        ),
        "<s>[INST] ",
        "[/INST]",
    ),
    "default system": (
        (
            "{% if messages[0].role != 'system' %}<|s|>Be kind.<|/s|>{% endif %}"
            "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}\n{% endfor %}"
        ),
        "<|s|>Be kind.<|/s|><|user|>",
        "",
    ),
}


@pytest.mark.parametrize("form", CHAT_FORMS)
def test_an_invented_turn_begins_where_the_template_puts_the_users_text(
    form: str, tmp_path: Path
) -> None:
    text, begin, end = CHAT_FORMS[form]
    stages = [{"name": "ask", "magpie": True}]
    path = write_pipeline(tmp_path, {"stages": stages, "input": {"rows": 5}})
    write_model(tmp_path / "model", text)
    prompter = make_prompter(load_pipeline(path))
    assert (prompter.render(0, {}), prompter.ending(0)) == (begin, end)
    assert not prompter.adds_special_tokens(0)


def test_an_invented_turn_stands_behind_the_messages(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "Speak of {{ topic }}."}]
    stages = [{"name": "ask", "magpie": True, "messages": messages}]
    prompter = make_prompter(make_pipeline(tmp_path, {"stages": stages}))
    assert prompter.problems() == []
    assert prompter.render(0, {"topic": "rain"}) == (
        "<|im_start|>system\nSpeak of rain.<|im_end|>\n<|im_start|>user\n"
    )
