"""Validators, choices and the sampling of a row: small things, each against what it says."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from eagle_batch.data.checks import StageChecks, Text
from eagle_batch.data.templates import StageTemplate
from eagle_batch.engine.request import SamplingParams
from eagle_batch.errors import ConfigError, Reason, RequestError
from eagle_batch.pipeline import Stage
from eagle_batch.stages.choose import ALIKE, find_vote, highest, majority, vote_of
from eagle_batch.stages.params import row_params
from tests.job.fake_job import load_job, read_errors, write_job
from tests.stages.test_graph import rows, run, stage

FUNCTIONS = """
def short(text, row):
    return len(text) < row["n"]

def score(text, row):
    return 7

def why(text, row):
    return "it is blue"

def nothing(text, row):
    pass

def broken(text, row):
    return {}["missing"]

constant = 3
"""


@pytest.fixture
def functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "text_checks.py").write_text(FUNCTIONS)
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("text_checks", None)


def checks(*validators: dict[str, Any]) -> StageChecks:
    values = {"name": "s", "prompt": "x", "validators": list(validators)}
    return StageChecks(StageTemplate(0, Stage.model_validate(values)))


def problem(validator: dict[str, Any], text: str, tokens: int = 3, **values: Any) -> str:
    return checks(validator).run(0, Text(text, tokens, {**values, "s": text})).problem


SCHEMA = {"type": "object", "required": ["a"], "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("validator", "text", "wrong"),
    [
        ({"regex": r"\d"}, "a1", ""),
        ({"regex": r"^\d"}, "a1", "found 'a1'; expected a match"),
        ({"length": {"min_characters": 2, "max_characters": 4}}, "abc", ""),
        ({"length": {"min_characters": 4}}, "abc", "found 3 characters; expected at least 4"),
        ({"length": {"max_characters": 2}}, "abc", "found 3 characters; expected at most 2"),
        ({"length": {"min_tokens": 4}}, "abc", "found 3 tokens; expected at least 4"),
        ({"length": {"max_tokens": 2}}, "abc", "found 3 tokens; expected at most 2"),
        ({"json_schema": SCHEMA}, '{"a": 1}', ""),
        ({"json_schema": SCHEMA}, '{"a": "1"}', "$.a: \"'1' is not of type 'integer'\""),
        ({"json_schema": {}}, "{", "which is no JSON"),
        ({"json_schema": {}}, "[" * 100_000, "which is no JSON"),
        ({"language": "en"}, "This is a sentence about the weather.", ""),
        ({"language": ["de", "fr"]}, "Dies ist ein Satz über das Wetter.", ""),
        ({"language": "en"}, "Dies ist ein Satz über das Wetter.", "found de; expected en"),
        ({"language": "en"}, "123", "found und; expected en"),
        ({"expression": "s | length > n"}, "abc", ""),
        ({"expression": "s | length > n + 9"}, "abc", "it says no"),
        ({"expression": "null_column"}, "abc", "it says no"),
        ({"expression": "n", "at_least": 2}, "abc", ""),
        ({"expression": "n", "at_least": 3}, "abc", "scored 2; expected at least 3"),
    ],
)
def test_what_a_validator_says(validator: dict[str, Any], text: str, wrong: str) -> None:
    found = problem(validator, text, n=2, null_column=None)
    assert wrong in found
    assert bool(wrong) == bool(found)


@pytest.mark.usefixtures("functions")
@pytest.mark.parametrize(
    ("name", "wrong", "score"),
    [("short", "", None), ("score", "", 7.0), ("why", "it is blue", None)],
)
def test_what_a_python_function_says(name: str, wrong: str, score: float | None) -> None:
    verdict = checks({"python": f"text_checks:{name}"}).run(0, Text("ab", 1, {"n": 5}))
    assert (verdict.problem, verdict.score) == (wrong, score)


@pytest.mark.usefixtures("functions")
@pytest.mark.parametrize(("name", "text"), [("broken", "KeyError"), ("nothing", "returned None")])
def test_a_validator_that_raises_is_the_rows_fault_with_its_traceback(
    name: str, text: str, tmp_path: Path
) -> None:
    run(tmp_path / "job", [stage("one", validators=[{"python": f"text_checks:{name}"}])])
    assert rows(tmp_path / "job") == []
    for error in read_errors(tmp_path / "job/out"):
        assert error["reason"] == "validator_error"
        assert text in error["message"]
        assert "Traceback" in error["message"]
        assert ("text_checks.py" in error["message"]) == (name == "broken")


@pytest.mark.usefixtures("functions")
@pytest.mark.parametrize(
    ("validator", "text"),
    [
        (
            {"python": "text_checks:gone"},
            "validators.0.python: text_checks:gone cannot be imported",
        ),
        ({"python": "no_such_module:f"}, "ModuleNotFoundError"),
        ({"python": "text_checks:constant"}, "is no function"),
        ({"json_schema": {"type": "nope"}}, "validators.0.json_schema: this is no JSON schema"),
        ({"language": "klingon"}, "found klingon; expected ISO 639-1 codes"),
    ],
)
def test_a_validator_that_cannot_work_is_told_before_the_run(
    validator: dict[str, Any], text: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_job(write_job(tmp_path, ["a"], stages=[stage("one", validators=[validator])]))
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"validators": [{"regex": "("}]}, "which is no regular expression"),
        ({"validators": [{}]}, "found none; expected exactly one of regex"),
        ({"validators": [{"regex": "a", "language": "en"}]}, "found regex and language"),
        ({"validators": [{"regex": "a", "at_least": 1}]}, "expected one of expression, python"),
        ({"validators": [{"length": {}}]}, "found no bound"),
        ({"validators": [{"length": {"min_tokens": 3, "max_tokens": 2}}]}, "expected min <= max"),
        ({"validators": [{"judge": {}}]}, "exactly one of messages and prompt"),
        ({"validate": []}, "did you mean 'validators'?"),
        ({"retry": 1}, "found it without validators"),
        ({"retry": 1, "validators": [{"regex": "a"}], "sampling": {}}, "found temperature 0"),
        ({"samples": 2}, "expected best, vote, score or all"),
        ({"keep": "best"}, "expected several samples"),
        ({"samples": 2, "keep": "vote"}, "expected `vote` with keep: vote"),
        ({"samples": 2, "keep": "score"}, "found no validator with a score"),
        ({"samples": 2, "keep": "best", "vote": {"regex": "a"}}, "found one of them"),
        ({"repeat": {"first": "two"}}, "found 'two'; expected one of one"),
        ({"repeat": {"at_most": 0}}, "at least 1"),
        ({"sampling": {"heat": "{{ n }}"}}, "unknown field"),
        ({"sampling": {"by_row": {"heat": "n"}}}, "found heat; expected one of temperature"),
        ({"sampling": {"temperature": "hot"}}, "expected a number"),
    ],
)
def test_a_stage_that_cannot_be_meant_is_refused(
    fields: dict[str, Any], text: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_job(write_job(tmp_path, ["a"], stages=[stage("one", **fields)]))
    assert text in str(caught.value)


def test_loops_must_be_apart(tmp_path: Path) -> None:
    stages = [
        stage("a"),
        stage("b", repeat={"first": "a"}),
        stage("c", repeat={"first": "b"}),
    ]
    with pytest.raises(
        ConfigError, match=r"stages.2.repeat.first: found 'b', which is in the loop"
    ):
        load_job(write_job(tmp_path, ["a"], stages=stages))


def test_candidates_that_are_as_good_are_chosen_by_their_number() -> None:
    assert highest([1.0, 3.0, 3.0]) == 1
    assert highest([-1.00005, -1.0, -2.0], alike=ALIKE) == 0
    assert highest([-1.1, -1.0], alike=ALIKE) == 1
    assert majority(["a", "b", "b", "a"]) == (0, 0.5)
    assert majority([None, "b", "a", "b"]) == (1, 0.5)
    assert majority([None, None]) is None
    assert find_vote(r"is (\d+)", "is 1, no, is 2") == "2"
    assert find_vote(r"\d+", "none") is None
    assert vote_of(1) == vote_of(1.0) != vote_of("1")


def sampling(values: dict[str, Any], **row: Any) -> SamplingParams:
    made = Stage.model_validate({"name": "s", "prompt": "x", "sampling": values})
    return row_params(StageTemplate(0, made), row)


def test_a_row_sets_its_own_sampling() -> None:
    values = {"temperature": "{{ heat }}", "max_tokens": "{{ 2 * n }}", "top_p": 0.9}
    params = sampling(values, heat=0.5, n=4)
    assert (params.temperature, params.max_tokens, params.top_p) == (0.5, 8, 0.9)
    assert sampling({"by_row": {"max_tokens": "n"}}, n=64.0).max_tokens == 64
    assert sampling({"stop": "{{ ends }}"}, ends=["a", "b"]).stop == ("a", "b")


@pytest.mark.parametrize(
    ("values", "row", "text"),
    [
        ({"temperature": "{{ heat }}"}, {"heat": -1.0}, "temperature: found -1; expected a number"),
        ({"temperature": "{{ heat }}"}, {"heat": None}, "temperature: found null"),
        ({"temperature": "{{ heat }}"}, {"heat": "hot"}, "expected a number"),
        ({"max_tokens": "{{ n }}"}, {"n": 1.5}, "expected a whole number"),
        ({"min_tokens": "{{ n }}"}, {"n": 500}, "expected min <= max"),
    ],
)
def test_a_row_whose_sampling_is_none_is_quarantined(
    values: dict[str, Any], row: dict[str, Any], text: str
) -> None:
    with pytest.raises(RequestError) as caught:
        sampling(values, **row)
    assert caught.value.reason is Reason.INVALID_SAMPLING
    assert text in caught.value.message
    assert caught.value.message.startswith("stages.0.sampling")
