"""Templates without end: stopped by counts, each the fault of its row, in no time."""

from __future__ import annotations

import time
from typing import Any

import pytest

from eagle_batch.data.templates import StageTemplate
from eagle_batch.errors import ConfigError, Reason, RequestError
from eagle_batch.pipeline import Stage


def render(prompt: str, **values: object) -> str:
    stage = Stage.model_validate({"name": "s", "prompt": prompt})
    return StageTemplate(0, stage).render(values)[0]["content"]


@pytest.mark.parametrize(
    "prompt",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% for a in range(9) recursive %}{{ loop(range(99999)) }}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(40) }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ 'x' * 999999999999 }}",
        "{{ [1] * 999999999 }}",
        "{{ (9 ** 99) ** 999 }}",
        "{{ 'x'.center(999999999) }}",
        "{{ 'x' | center(999999999) }}",
        "{{ 'x' | indent(999999999, true) }}",
        "{{ '%999999999d' | format(1) }}",
        "{{ '%*d' % (999999999, 1) }}",
        "{{ '{:>999999999}'.format(1) }}",
        "{% for a in range(99999) %}{{ 'x' * 999 }}{% endfor %}",
        (
            "{% set ns = namespace(t='x') %}{% for a in range(99) %}{% set ns.t = ns.t ~ ns.t %}"
            "{% endfor %}"
        ),
        (
            "{% set ns = namespace(t='x') %}{% for a in range(99) %}{% set ns.t = ns.t + ns.t %}"
            "{% endfor %}"
        ),
    ],
)
def test_a_template_without_end_is_stopped(prompt: str) -> None:
    begun = time.process_time()
    with pytest.raises(RequestError) as caught:
        render(prompt)
    assert caught.value.reason is Reason.TEMPLATE_ERROR
    assert time.process_time() - begun < 10


@pytest.mark.parametrize(
    ("prompt", "values", "text"),
    [
        (
            "{% for i in x %}{{ loop.index }}/{{ loop.length }} {% endfor %}",
            {"x": "ab"},
            "1/2 2/2 ",
        ),
        ("{% for i in x if i > 1 %}{{ i }}{% else %}none{% endfor %}", {"x": [1, 2, 3]}, "23"),
        ("{% for k, v in x.items() %}{{ k }}{{ v }}{% endfor %}", {"x": {"a": 1}}, "a1"),
        ("{% for i in x %}{% if loop.last %}{{ i }}{% endif %}{% endfor %}", {"x": [1, 2]}, "2"),
        ("{{ a ~ b }}{{ a + b }}{{ a * 2 }}", {"a": "x", "b": "y"}, "xyxyxx"),
        ("{{ n * n }} {{ '%05d' % n }} {{ '%s' | format(n) }}", {"n": 12345678}, None),
        ("{{ 'budget 123456789 grew 5%'.upper() }}", {}, "BUDGET 123456789 GREW 5%"),
        ("{{ 'a'.center(5) }}|{{ 'a' | center(5) }}", {}, "  a  |  a  "),
        (
            "{% for i in range(2) %}{% for j in x %}{{ j }}{% endfor %}{% endfor %}",
            {"x": "ab"},
            "abab",
        ),
    ],
)
def test_what_ends_is_rendered_as_jinja_does(
    prompt: str, values: dict[str, object], text: str | None
) -> None:
    from jinja2 import Environment

    wanted = Environment(autoescape=False).from_string(prompt).render(values)
    assert render(prompt, **values) == wanted
    assert text is None or wanted == text


@pytest.mark.parametrize("key", ["when", "sampling", "vote", "validators", "repeat"])
def test_expressions_run_in_the_same_sandbox(key: str) -> None:
    """An attribute of Python is out of reach, and a name that is not there is told beforehand."""
    bad = "''.__class__.__mro__"
    fields: dict[str, Any] = {
        "when": {"when": bad},
        "sampling": {"sampling": {"by_row": {"temperature": bad}}},
        "vote": {"samples": 2, "keep": "vote", "vote": {"expression": bad}},
        "validators": {"validators": [{"expression": bad}]},
        "repeat": {"repeat": {"until": bad}},
    }
    stage = Stage.model_validate({"name": "s", "prompt": "x", **fields[key]})
    template = StageTemplate(0, stage)
    names = {
        "when": "when",
        "sampling": "sampling.by_row.temperature",
        "vote": "vote.expression",
        "validators": "validators.0.expression",
        "repeat": "repeat.until",
    }
    with pytest.raises(RequestError, match=r"unsafe"):
        template.holds(names[key], {"s": "text"})


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"when": "topc == 1"}, "stages.0.when: found 'topc'"),
        ({"when": "s == 1"}, "stages.0.when: found 's', which is this stage itself"),
        ({"validators": [{"expression": "s + x"}]}, "stages.0.validators.0.expression: found 'x'"),
        ({"repeat": {"until": "later"}}, "stages.0.repeat.until: found 'later'"),
        (
            {"validators": [{"judge": {"prompt": "{{ s }} {{ y }}"}}]},
            "stages.0.validators.0.judge.prompt: found 'y'",
        ),
    ],
)
def test_names_of_expressions_are_checked_before_the_run(
    fields: dict[str, object], text: str
) -> None:
    stage = Stage.model_validate({"name": "s", "prompt": "x", **fields})
    [line] = StageTemplate(0, stage).problems(["topic"], ["s", "later"])
    assert line.startswith(text)


@pytest.mark.parametrize("text", ["a b", "a ==", "{{ a", "a | nope", "{% if a %}"])
def test_what_is_no_expression_is_told_beforehand(text: str) -> None:
    stage = Stage.model_validate({"name": "s", "prompt": "x", "when": text})
    with pytest.raises(ConfigError, match=r"stages.0.when: not a valid expression"):
        StageTemplate(0, stage)
