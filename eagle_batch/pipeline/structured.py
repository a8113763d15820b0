"""What the whole text of a stage must match: a JSON schema, a regular expression or a choice."""

from __future__ import annotations

import json
from typing import Annotated, Any

from pydantic import Field, JsonValue

from eagle_batch.engine import request
from eagle_batch.pipeline.base import Section
from eagle_batch.pipeline.problems import Rule

_KINDS = ("json_schema", "regex", "choice")


class Structured(Section):
    """Exactly one of a schema, a regular expression and a list of choices."""

    json_schema: dict[str, JsonValue] | None = Field(
        default=None,
        description="JSON schema of the text. An object with properties has no others unless it "
        "says so.",
    )
    regex: Annotated[str, Field(min_length=1)] | None = Field(
        default=None, description="Regular expression that the whole text matches."
    )
    choice: (
        Annotated[
            tuple[Annotated[str, Field(min_length=1)], ...], Field(strict=False, min_length=1)
        ]
        | None
    ) = Field(default=None, description="The text is one of these.")

    @property
    def request(self) -> request.Structured:
        """What an engine is asked for."""
        if self.regex is not None:
            return request.Structured("regex", self.regex)
        if self.choice is not None:
            return request.Structured("choice", json.dumps(self.choice))
        return request.Structured("json_schema", json.dumps(closed(self.json_schema)))

    def _rules(self) -> list[tuple[bool, Rule]]:
        given = [name for name in _KINDS if getattr(self, name) is not None]
        found = " and ".join(given) or "none"
        return [
            (
                len(given) != 1,
                (_KINDS, f"found {found}; expected exactly one of {', '.join(_KINDS)}"),
            )
        ]


def closed(schema: Any) -> Any:
    """Return a schema in which every object that lists properties allows no others.

    What JSON Schema leaves open a model would fill, with names that no declared column has. Objects
    that speak of further properties themselves are left alone, and so are the parts of an `allOf`,
    each of which knows only its share of the properties.
    """
    if isinstance(schema, list):
        return [closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    result = dict(schema)
    for key in ("items", "prefixItems", "anyOf", "oneOf"):
        if key in schema:
            result[key] = closed(schema[key])
    for key in ("properties", "$defs", "definitions"):
        if isinstance(schema.get(key), dict):
            result[key] = {name: closed(part) for name, part in schema[key].items()}
    opened = {"additionalProperties", "unevaluatedProperties", "patternProperties", "allOf"}
    if "properties" in schema and not opened & schema.keys():
        result["additionalProperties"] = False
    return result
