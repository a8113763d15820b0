"""Chat templates, character for character as transformers renders them."""

from __future__ import annotations

import datetime as dt
import json
import re
from pathlib import Path
from typing import Any

import pytest
from jinja2 import TemplateError

from eagle_batch.data.chat import ChatTemplate, model_folder
from eagle_batch.data.prompts import make_prompter
from eagle_batch.errors import ConfigError, Reason, RequestError
from tests.data.support import CHATML, make_pipeline, write_model

LLAMA_2 = (
    "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}"
    "{% set system_message = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}"
    "{% set system_message = false %}{% endif %}{% for message in loop_messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}"
    "{% endif %}{% if loop.index0 == 0 and system_message != false %}"
    "{% set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + message['content'] %}"
    "{% else %}{% set content = message['content'] %}{% endif %}"
    "{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ ' '  + content.strip() + ' ' + eos_token }}"
    "{% endif %}{% endfor %}"
)
LLAMA_3 = """{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = strftime_now("%d %b %Y") %}
{%- endif %}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {%- if loop.first %}{{- "Today Date: " + date_string + "\\n" }}{%- endif %}
    {{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}{% for message in messages %}"
    "{% if (message['role'] == 'assistant') %}{% set role = 'model' %}{% else %}"
    "{% set role = message['role'] %}{% endif %}"
    "{{ '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{'<start_of_turn>model\\n'}}{% endif %}"
)
BLOCKS = """{% for message in messages %}
    {% if message['role'] == 'assistant' %}
        {% generation %}
{{ message['content'] }}
        {% endgeneration %}
        {% continue %}
    {% endif %}
    {% set ns = namespace(n=loop.index, d=dict(a=1)) %}
    {% set ns.n = ns.n + 1 %}
{{ ns.n }}{{ message | tojson(indent=1) }}{{ {"<é>": tools} | tojson }}
    {% if loop.index == 3 %}{% break %}{% endif %}
{% endfor %}
{% if add_generation_prompt %}>{% endif %}
"""
STYLES = {"chatml": CHATML, "llama2": LLAMA_2, "llama3": LLAMA_3, "gemma": GEMMA, "blocks": BLOCKS}

CHATS: list[list[dict[str, str]]] = [
    [{"role": "user", "content": ' Hi <b> & "you" 😀\n'}],
    [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "three {{ bos_token }}"},
    ],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "مرحبا"}],
    [{"role": "user", "content": ""}],
    [{"role": "assistant", "content": "first"}],
]


def write_tokenizer(folder: Path, template: str, **config: Any) -> Path:
    """Write a folder that transformers itself loads as a tokenizer."""
    from tokenizers import Tokenizer, models

    write_model(folder, template, tokenizer_class="PreTrainedTokenizerFast", **config)
    vocabulary = {"<s>": 0, "</s>": 1, "<pad>": 2}
    Tokenizer(models.WordLevel(vocabulary, unk_token="<s>")).save(str(folder / "tokenizer.json"))
    return folder


@pytest.mark.parametrize("chat", CHATS, ids=range(len(CHATS)))
@pytest.mark.parametrize("style", STYLES)
def test_prompts_equal_those_of_transformers(
    tmp_path: Path, style: str, chat: list[dict[str, str]]
) -> None:
    from transformers import AutoTokenizer

    folder = write_tokenizer(tmp_path / "model", STYLES[style], pad_token="<pad>")
    theirs = AutoTokenizer.from_pretrained(folder)
    ours = ChatTemplate.load(folder)
    refused = expected = ""
    try:
        expected = theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    except TemplateError as error:
        refused = str(error)
    if refused:
        with pytest.raises(RequestError, match=re.escape(refused)):
            ours.render(chat)
    else:
        assert ours.render(chat) == expected


def test_some_of_these_chats_are_refused_and_most_are_not(tmp_path: Path) -> None:
    """The comparison above would pass if everything were refused."""
    refused = 0
    for style, template in STYLES.items():
        chat_template = ChatTemplate.load(write_model(tmp_path / style, template))
        for chat in CHATS:
            try:
                chat_template.render(chat)
            except RequestError:
                refused += 1
    assert refused == 2


LLAMA_3_HI = (
    "<s><|start_header_id|>user<|end_header_id|>\n\nToday Date: 03 Feb 2024\nHi<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n"
)


@pytest.mark.parametrize(
    ("style", "expected"),
    [
        ("chatml", "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"),
        ("llama2", "<s>[INST] Hi [/INST]"),
        ("llama3", LLAMA_3_HI),
        ("gemma", "<s><start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n"),
    ],
)
def test_well_known_styles(tmp_path: Path, style: str, expected: str) -> None:
    folder = write_model(tmp_path / "model", STYLES[style])
    chat = ChatTemplate.load(folder, lambda: dt.datetime(2024, 2, 3, tzinfo=dt.UTC))
    assert chat.render([{"role": "user", "content": "Hi"}]) == expected
    assert chat.uses_clock == (style == "llama3")


@pytest.mark.slow
@pytest.mark.parametrize("chat", CHATS, ids=range(len(CHATS)))
def test_the_demo_target_is_prompted_as_transformers_prompts_it(
    demo_target: Path, chat: list[dict[str, str]]
) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(demo_target)
    expected = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    text = ChatTemplate.load(demo_target).render(chat)
    assert text == expected
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    assert tokenizer(text, add_special_tokens=False)["input_ids"] == ids


USES_TOKENS = "{{ bos_token }}|{{ eos_token }}|{{ pad_token }}|{{ unk_token }}"


@pytest.mark.parametrize(
    ("config", "extra", "expected"),
    [
        ({"pad_token": None, "unk_token": "<u>"}, {}, "<s>|</s>||<u>"),
        ({"pad_token": {"content": "<p>", "lstrip": False}}, {}, "<s>|</s>|<p>|"),
        ({}, {"pad_token": {"content": "<p>"}, "eos_token": "<e>"}, "<s>|<e>|<p>|"),
        ({"added_tokens_decoder": {}}, {"pad_token": "<p>"}, "<s>|</s>||"),
    ],
)
def test_special_tokens_are_read_in_every_layout(
    tmp_path: Path, config: dict[str, Any], extra: dict[str, Any], expected: str
) -> None:
    folder = write_model(tmp_path / "model", USES_TOKENS, **config)
    if extra:
        (folder / "special_tokens_map.json").write_text(json.dumps(extra))
    assert ChatTemplate.load(folder).render([{"role": "user", "content": "x"}]) == expected


@pytest.mark.parametrize(
    "found",
    [
        "inside",
        [{"name": "rag", "template": "no"}, {"name": "default", "template": "inside"}],
        {"default": "inside", "tool_use": "no"},
    ],
)
def test_a_template_inside_the_tokenizer_configuration_is_found(tmp_path: Path, found: Any) -> None:
    folder = write_model(tmp_path / "model", None, chat_template=found)
    assert ChatTemplate.load(folder).text == "inside"
    (folder / "chat_template.jinja").write_text("beside")
    assert ChatTemplate.load(folder).text == "beside"


def test_a_model_without_a_template_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no chat template.*give the stages a prompt"):
        ChatTemplate.load(write_model(tmp_path / "model", None))


def test_a_broken_template_or_configuration_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the chat template is not valid"):
        ChatTemplate.load(write_model(tmp_path / "a", "{% if %}"))
    folder = write_model(tmp_path / "b")
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json is not valid JSON"):
        ChatTemplate.load(folder)


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.__class__.__base__.__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{% set ns = namespace(__class__=1) %}",
        "{{ namespace.__init__.__globals__ }}",
    ],
)
def test_a_template_cannot_leave_the_sandbox(tmp_path: Path, template: str) -> None:
    chat = ChatTemplate.load(write_model(tmp_path / "model", template))
    with pytest.raises(RequestError) as caught:
        chat.render([{"role": "user", "content": "x"}])
    assert caught.value.reason is Reason.TEMPLATE_ERROR


def test_roles_that_the_model_does_not_know_are_told_before_the_run(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    write_model(tmp_path / "gemma", GEMMA)
    pipeline = make_pipeline(
        tmp_path, {"target.model": "gemma", "stages": [{"name": "q", "messages": messages}]}
    )
    lines = make_prompter(pipeline).problems()
    assert len(lines) == 1
    assert lines[0].startswith("stages.0.messages: found the roles system, user; ")
    assert "System role not supported" in lines[0]


def test_a_folder_that_is_no_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no folder; expected the folder of a model"):
        model_folder(str(tmp_path / "nope"))
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        model_folder(str(tmp_path))


def test_a_hub_id_that_cannot_be_had_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ConfigError, match="'owner/nope' is no folder beside the pipeline file"):
        model_folder("owner/nope")
