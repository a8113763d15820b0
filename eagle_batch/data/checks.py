"""What the validators of a stage say of a text, judges aside, which need a generation."""

from __future__ import annotations

import importlib
import json
import math
import re
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from eagle_batch.data.language import language_of, unknown_languages
from eagle_batch.data.sandbox import is_null
from eagle_batch.data.templates import StageTemplate
from eagle_batch.errors import ConfigError, Reason, RequestError
from eagle_batch.pipeline import Judge, Length, Validator

#: Lines of a validator's traceback that are kept.
_TRACEBACK_LINES = 20
_INSTALL = "install it with: pip install 'eagle-batch[quality]'"


@dataclass(frozen=True, slots=True)
class Text:
    """A text that is checked."""

    text: str
    tokens: int
    #: What its stage sees, and the text by the stage's name.
    values: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one validator says."""

    #: What is wrong; empty where nothing is.
    problem: str = ""
    score: float | None = None


Check = Callable[[Text], Verdict]


class StageChecks:
    """The validators of one stage, compiled."""

    def __init__(self, template: StageTemplate) -> None:
        """Compile; raises ConfigError for a function, schema or language that is not there."""
        self.template = template
        self.validators = template.stage.validators
        problems: list[str] = []
        self._checks: list[Check | None] = []
        for number, validator in enumerate(self.validators):
            key = f"stages.{template.index}.validators.{number}.{validator.kind}"
            try:
                self._checks.append(_compile(template, number, validator))
            except ConfigError as error:
                problems += [f"{key}: {problem}" for problem in error.problems]
        if problems:
            raise ConfigError(problems)

    def label(self, number: int) -> str:
        """Return what a validator is called in messages, metrics and the output."""
        return f"{self.template.stage.name}.{number}.{self.validators[number].kind}"

    def run(self, number: int, text: Text) -> Verdict:
        """Return what a validator that is no judge says of a text.

        Raises RequestError (validator_error), with the traceback, where the validator fails.
        """
        check = self._checks[number]
        assert check is not None
        try:
            verdict = check(text)
        except RequestError:
            raise
        except Exception as error:
            # A validator is foreign code over foreign text: what it raises is the row's fault.
            raise RequestError(Reason.VALIDATOR_ERROR, self._raised(number, error)) from error
        return self.settle(number, verdict)

    def settle(self, number: int, verdict: Verdict) -> Verdict:
        """Return the verdict once its score is held against `at_least`."""
        least = self.validators[number].at_least
        if verdict.problem or least is None:
            return verdict
        if verdict.score is None:
            return Verdict(f"found no score; expected at least {least:g}")
        if verdict.score >= least:
            return verdict
        return Verdict(f"scored {verdict.score:g}; expected at least {least:g}", verdict.score)

    def judged(self, number: int, text: str) -> Verdict:
        """Return what a judge's text says."""
        judge = self.validators[number].judge
        assert judge is not None
        return self.settle(number, _judged(judge, text))

    def _raised(self, number: int, error: Exception) -> str:
        lines = "".join(traceback.format_exception(error)).splitlines()
        kept = "\n".join(lines[-_TRACEBACK_LINES:])
        return f"{self.label(number)}: {type(error).__name__}: {error}\n{kept}"


def check_stages(templates: Sequence[StageTemplate]) -> tuple[StageChecks, ...]:
    """Compile the validators of all stages; raises ConfigError with the problems of all."""
    problems: list[str] = []
    checks: list[StageChecks] = []
    for template in templates:
        try:
            checks.append(StageChecks(template))
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    return tuple(checks)


def _judged(judge: Judge, text: str) -> Verdict:
    found = re.search(judge.score, text)
    number = (found[1] if found.re.groups else found[0]) if found else None
    with suppress(ValueError):
        score = float(number or "")
        if math.isfinite(score):
            return Verdict(score=score)
    return Verdict(f"the judge wrote no score: {_shown(text)}")


def _compile(template: StageTemplate, number: int, validator: Validator) -> Check | None:
    checks: dict[str, Callable[[], Check | None]] = {
        "regex": lambda: _regex(validator.regex or ""),
        "length": lambda: _length(validator.length or Length(min_characters=0)),
        "json_schema": lambda: _json_schema(validator.json_schema or {}),
        "language": lambda: _language(validator.language or ()),
        "expression": lambda: _expression(template, number),
        "python": lambda: _python(validator.python or ""),
        "judge": lambda: None,
    }
    return checks[validator.kind]()


def _regex(pattern: str) -> Check:
    compiled = re.compile(pattern)

    def check(text: Text) -> Verdict:
        found = compiled.search(text.text)
        return Verdict("" if found else f"found {_shown(text.text)}; expected a match")

    return check


def _length(bounds: Length) -> Check:
    limits = (
        ("characters", bounds.min_characters, bounds.max_characters),
        ("tokens", bounds.min_tokens, bounds.max_tokens),
    )

    def check(text: Text) -> Verdict:
        counts = {"characters": len(text.text), "tokens": text.tokens}
        for what, least, most in limits:
            if least is not None and counts[what] < least:
                return Verdict(f"found {counts[what]} {what}; expected at least {least}")
            if most is not None and counts[what] > most:
                return Verdict(f"found {counts[what]} {what}; expected at most {most}")
        return Verdict()

    return check


def _json_schema(schema: dict[str, Any]) -> Check:
    try:
        import jsonschema
    except ImportError as error:
        raise ConfigError(f"needs jsonschema; {_INSTALL}") from error
    kind = jsonschema.validators.validator_for(schema)
    try:
        kind.check_schema(schema)
    except jsonschema.SchemaError as error:
        raise ConfigError(f"this is no JSON schema: {error.message}") from error
    validator = kind(schema)

    def check(text: Text) -> Verdict:
        try:
            value = json.loads(text.text)
        except (ValueError, RecursionError) as error:
            return Verdict(f"found {_shown(text.text)}, which is no JSON ({error})")
        wrong = jsonschema.exceptions.best_match(validator.iter_errors(value))
        return Verdict("" if wrong is None else f"{wrong.json_path}: {_shown(wrong.message)}")

    return check


def _language(wanted: Sequence[str]) -> Check:
    try:
        unknown = unknown_languages(wanted)
    except ImportError as error:
        raise ConfigError(f"needs py3langid; {_INSTALL}") from error
    if unknown:
        raise ConfigError(f"found {', '.join(unknown)}; expected ISO 639-1 codes such as en, de")

    def check(text: Text) -> Verdict:
        found = language_of(text.text)
        wrong = f"found {found}; expected {' or '.join(wanted)}"
        return Verdict("" if found in wanted else wrong)

    return check


def _expression(template: StageTemplate, number: int) -> Check:
    key = f"validators.{number}.expression"

    def check(text: Text) -> Verdict:
        value = template.evaluate(key, text.values)
        return _verdict(False if is_null(value) else value, truthy=True)

    return check


def _python(name: str) -> Check:
    module, _, function = name.partition(":")
    try:
        called = getattr(importlib.import_module(module), function)
    except Exception as error:
        raise ConfigError(
            f"{name} cannot be imported: {type(error).__name__}: {error}; the module must be "
            "installed, or lie beside the pipeline file, here and where the workers run"
        ) from error
    if not callable(called):
        raise ConfigError(f"{name} is no function")

    def check(text: Text) -> Verdict:
        return _verdict(called(text.text, dict(text.values)), truthy=False)

    return check


def _verdict(value: object, *, truthy: bool) -> Verdict:
    """Read what an expression or a function returns: yes or no, a score, or what is wrong."""
    if isinstance(value, bool):
        return Verdict("" if value else "it says no")
    if isinstance(value, int | float) and math.isfinite(value):
        return Verdict(score=float(value))
    if truthy:
        return Verdict("" if value else "it says no")
    if isinstance(value, str):
        return Verdict(value or "it says no")
    raise TypeError(f"returned {value!r}; expected true, false, a finite number or what is wrong")


def _shown(text: str, limit: int = 100) -> str:
    return repr(text if len(text) <= limit else text[:limit] + "...")
