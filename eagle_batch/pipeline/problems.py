"""Turning what pydantic found wrong with a file into lines for people.

Every line reads: where (file and dotted key), what was found, what was expected, what to do.
"""

from __future__ import annotations

import difflib
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticCustomError

from eagle_batch.pipeline.overrides import Key, dotted

#: A broken rule between fields: the keys it names, relative to their model, and the sentence.
Rule = tuple[tuple[str, ...], str]


def broken_rules(rules: Sequence[Rule]) -> PydanticCustomError:
    """Return the error that a model validator raises for rules between its fields."""
    return PydanticCustomError("rules", "rules between fields are broken", {"rules": tuple(rules)})


def explain_problems(
    error: ValidationError,
    model: type[BaseModel],
    data: Any,
    source: str,
    set_keys: Sequence[Key] = (),
) -> list[str]:
    """Return one line a problem; a key that the command line set is named after `--set`."""
    found: dict[tuple[Key, ...], list[str]] = {}
    for details in error.errors(include_url=False):
        for keys, text in _explain(details, model, data):
            found.setdefault(keys, []).append(text)
    return [f"{_where(keys, source, set_keys)}: {_merge(texts)}" for keys, texts in found.items()]


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return "did you mean 'x'? " for a name that resembles a known one, else nothing."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"did you mean {close[0]!r}? " if close else ""


def shown(value: Any, limit: int = 80) -> str:
    """Return a value as it is quoted in a message: short, on one line, always printable."""
    text = ascii(value) if _has_surrogates(value) else repr(value)
    text = {"True": "true", "False": "false", "None": "null"}.get(text, text)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def _has_surrogates(value: Any) -> bool:
    try:
        repr(value).encode()
    except UnicodeEncodeError:
        return True
    return False


def _explain(
    details: ErrorDetails, model: type[BaseModel], data: Any
) -> list[tuple[tuple[Key, ...], str]]:
    kind = details["type"]
    if kind == "rules":
        return [_rule_line(rule, details["loc"]) for rule in details["ctx"]["rules"]]
    if kind == "too_short" and len(details["input"]) > 0:
        return []  # Pydantic counts the items that passed; those that did not have their own line.
    key = _real_key(details["loc"], data, missing=kind == "missing")
    if kind == "extra_forbidden":
        return [((key,), _unknown(key, details["input"], model))]
    field = _field(model, key)
    if kind == "missing":
        return [((key,), "is missing; expected " + _described(field, "a value"))]
    return [
        ((key,), f"found {shown(details['input'])}; expected {_expected(details)}{_hint(field)}")
    ]


def _rule_line(rule: Rule, model_key: Key) -> tuple[tuple[Key, ...], str]:
    names, text = rule
    return tuple((*model_key, *name.split(".")) for name in names), text


def _unknown(key: Key, value: Any, model: type[BaseModel]) -> str:
    parent = _model_at(model, key[:-1])
    known = list(parent.model_fields) if parent else []
    return (
        f"unknown field (found {shown(value, 40)}); {suggestion(str(key[-1]), known)}"
        f"expected one of {', '.join(known)}"
    )


#: What was expected, by pydantic's code of the error; other codes keep pydantic's own words.
_EXPECTED = {
    "greater_than": "a number above {gt}",
    "greater_than_equal": "a number of at least {ge}",
    "less_than": "a number below {lt}",
    "less_than_equal": "a number of at most {le}",
    "finite_number": "a finite number",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "string_unicode": "text that can be written as UTF-8",
    "string_too_short": "text that is not empty",
    "string_too_long": "text of at most {max_length} characters",
    "string_pattern_mismatch": "text that matches {pattern}",
    "tuple_type": "a list",
    "too_short": "a list that is not empty",
    "model_type": "a mapping of keys",
    "literal_error": "{expected}",
    "invalid_key": "a key that is text",
}


def _expected(details: ErrorDetails) -> str:
    template = _EXPECTED.get(details["type"])
    if template is None:
        return "that " + details["msg"][:1].lower() + details["msg"][1:]
    return template.format(**details.get("ctx", {}))


def _merge(texts: list[str]) -> str:
    """Join the branches of a union: "found 0; expected a or b"."""
    heads = {text.partition("; ")[0] for text in texts}
    if len(texts) == 1 or len(heads) > 1:
        return "; ".join(dict.fromkeys(texts))
    head, _, first = texts[0].partition("; ")
    rest = [text.partition("; ")[2].removeprefix("expected ") for text in texts[1:]]
    wanted, bracket, hint = first.partition(" (")
    rest = [text.partition(" (")[0] for text in rest]
    return f"{head}; {' or '.join(dict.fromkeys([wanted, *rest]))}{bracket}{hint}"


def _hint(field: FieldInfo | None) -> str:
    return f" ({field.description.rstrip('.')})" if field and field.description else ""


def _described(field: FieldInfo | None, default: str) -> str:
    description = (field.description if field else None) or default
    return description[:1].lower() + description[1:].rstrip(".")


def _where(keys: tuple[Key, ...], source: str, set_keys: Sequence[Key]) -> str:
    names = [[str(part) for part in key] for key in keys]
    changed = [[str(part) for part in key] for key in set_keys]
    by_option = any(name[: len(item)] == item for name in names for item in changed)
    place = "--set" if by_option else source
    label = " and ".join(dotted(key) for key in keys if key)
    return f"{place}: {label}" if label else place


def _real_key(loc: tuple[int | str, ...], data: Any, *, missing: bool) -> Key:
    """Cut from pydantic's location what is no key of the file, such as the branch of a union."""
    key: list[str | int] = []
    node = data
    for position, part in enumerate(loc):
        last = position == len(loc) - 1
        if isinstance(node, Mapping) and (part in node or (missing and last)):
            node = node.get(part)
        elif isinstance(node, list | tuple) and isinstance(part, int) and part < len(node):
            node = node[part]
        else:
            break
        key.append(part)
    return tuple(key)


def _field(model: type[BaseModel], key: Key) -> FieldInfo | None:
    for length in range(len(key), 0, -1):
        parent = _model_at(model, key[: length - 1])
        if parent and str(key[length - 1]) in parent.model_fields:
            return parent.model_fields[str(key[length - 1])]
    return None


def _model_at(model: type[BaseModel], key: Key) -> type[BaseModel] | None:
    """Return the model whose fields live under `key`."""
    current: type[BaseModel] | None = model
    for part in key:
        if isinstance(part, int):
            continue
        field = current.model_fields.get(part) if current else None
        current = _inner_model(field.annotation) if field else None
    return current


def _inner_model(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    inner = (_inner_model(argument) for argument in typing.get_args(annotation))
    return next((found for found in inner if found), None)
