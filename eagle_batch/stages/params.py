"""How the texts of one stage are sampled, by the file and by what a row says for itself."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import ValidationError

from eagle_batch.data.sandbox import is_null
from eagle_batch.data.templates import StageTemplate
from eagle_batch.engine.request import SamplingParams
from eagle_batch.errors import Reason, RequestError
from eagle_batch.pipeline import Sampling
from eagle_batch.pipeline.problems import explain_problems
from eagle_batch.pipeline.structured import Structured


def to_params(
    sampling: Sampling, structured: Structured | None = None, *, logprobs: int | None = None
) -> SamplingParams:
    """Return the engine's form of what the file says, whatever a row says.

    `logprobs` is how many best tokens are reported beside each chosen one; None reports nothing.
    """
    values = sampling.fixed()
    values["logit_bias"] = tuple(sampling.logit_bias.items())
    request = None if structured is None else structured.request
    return SamplingParams(**values, structured=request, logprobs=logprobs)


def row_params(
    template: StageTemplate, values: Mapping[str, object], *, logprobs: int | None = None
) -> SamplingParams:
    """Return how one row's text is sampled.

    Raises RequestError: invalid_sampling where the row's values are no such setting.
    """
    sampling = template.stage.sampling
    key = f"stages.{template.index}.sampling"
    found = {name: _value(template, name, values, key) for name in sampling.by_row}
    try:
        settled = Sampling.model_validate({**sampling.fixed(), **found})
    except ValidationError as error:
        lines = explain_problems(error, Sampling, found, key)
        raise RequestError(Reason.INVALID_SAMPLING, "; ".join(lines)) from error
    try:
        return to_params(settled, template.stage.structured, logprobs=logprobs)
    except ValueError as error:  # Values that contradict each other or the stage's structure.
        raise RequestError(Reason.INVALID_SAMPLING, f"{key}: {error}") from error


def _value(template: StageTemplate, name: str, values: Mapping[str, object], key: str) -> object:
    value = template.evaluate(f"sampling.by_row.{name}", values)
    if is_null(value):
        text = f"{key}.{name}: found null; expected a value, or a default in the expression"
        raise RequestError(Reason.INVALID_SAMPLING, text)
    # A column of whole numbers with nulls is one of floats, in pandas.
    return int(value) if isinstance(value, float) and value.is_integer() else value
