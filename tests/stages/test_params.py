"""What a row says about its own sampling, and what it may not say."""

from __future__ import annotations

from typing import Any

import pytest

from eagle_batch.data.templates import compile_stages
from eagle_batch.engine.request import SamplingParams
from eagle_batch.errors import Reason, RequestError
from eagle_batch.pipeline import Stage
from eagle_batch.stages.params import row_params

EVERY_FIELD: dict[str, Any] = {
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "max_tokens": 33,
    "min_tokens": 2,
    "stop": ["x"],
    "stop_token_ids": [7],
    "ignore_eos": True,
    "repetition_penalty": 1.2,
    "presence_penalty": 0.3,
    "frequency_penalty": 0.4,
    "logit_bias": {5: 1.5},
    "bad_words": ["no", "never"],
}


def params(values: dict[str, Any], **fields: Any) -> SamplingParams:
    sampling = {name: "{{ " + name + " }}" for name in values}
    stage = Stage.model_validate({"name": "s", "prompt": "x", "sampling": sampling, **fields})
    return row_params(compile_stages((stage,))[0], values)


def test_a_row_may_set_every_field_of_sampling() -> None:
    found = params(EVERY_FIELD)
    for name, value in EVERY_FIELD.items():
        wanted = tuple(value) if isinstance(value, list) else value
        wanted = tuple(value.items()) if isinstance(value, dict) else wanted
        assert getattr(found, name) == wanted


@pytest.mark.parametrize(
    ("values", "fields", "message"),
    [
        ({"top_p": 7.0}, {}, "top_p: found 7;"),
        ({"min_tokens": 9, "max_tokens": 3}, {}, "expected min <= max"),
        ({"bad_words": [" "]}, {}, "bad_words.0"),
        ({"ignore_eos": True}, {"structured": {"regex": "a"}}, "ends where its grammar does"),
    ],
)
def test_a_row_that_contradicts_itself_or_its_stage_is_at_fault(
    values: dict[str, Any], fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        params(values, **fields)
    assert caught.value.reason is Reason.INVALID_SAMPLING
