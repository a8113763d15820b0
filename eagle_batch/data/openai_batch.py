"""Requests in the OpenAI batch format: one a line, `custom_id` and the `body` of a chat completion.

Each becomes a row whose columns are the body's parameters, with the defaults that the OpenAI API
has. What could not be done for a request is told before anything runs, with its line.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from eagle_batch.data.conversations import conversation
from eagle_batch.data.groups import Group, Scan
from eagle_batch.data.jsonl import block, parse, scan_lines
from eagle_batch.data.lines import Lines
from eagle_batch.data.shapes import ShapeError

URL = "/v1/chat/completions"
_TURN = pa.struct([("role", pa.string()), ("content", pa.string()), ("name", pa.string())])
SCHEMA = pa.schema(
    [
        ("custom_id", pa.string()),
        ("requested_model", pa.string()),
        ("messages", pa.list_(_TURN)),
        ("temperature", pa.float64()),
        ("top_p", pa.float64()),
        ("max_tokens", pa.int64()),
        ("stop", pa.list_(pa.string())),
        ("presence_penalty", pa.float64()),
        ("frequency_penalty", pa.float64()),
    ]
)
#: Parameters of the body that become columns, with the API's default.
_NUMBERS = {
    "temperature": 1.0,
    "top_p": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
#: Parameters without influence on the text; they are left out.
_WITHOUT_INFLUENCE = {
    *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"),
    *("stream", "stream_options"),
}
#: Parameters that have another place here, and the values that say nothing.
_ELSEWHERE: dict[str, tuple[tuple[object, ...], str]] = {
    "n": ((1,), "samples of the pipeline"),
    "seed": ((), "seed of the pipeline"),
    "tools": (([],), "template_options.tools of a stage"),
    "tool_choice": (("none", "auto"), "template_options of a stage"),
    "response_format": (({"type": "text"},), "structured of a stage"),
    "logit_bias": (({},), "sampling.logit_bias of a stage"),
    "logprobs": ((False,), "output.logprobs"),
    "top_logprobs": ((0,), "output.logprobs"),
}


def scan(path: str, rows_per_shard: int) -> Scan:
    """Read a file once, and check every request.

    Raises DataError with the first lines that are no requests, or ask for what is not to be had.
    """
    return Scan(SCHEMA, scan_lines(path, rows_per_shard, lambda line: _no_value(request(line))))


def read(lines: Lines, path: str, group: Group, schema: pa.Schema) -> pa.Table:
    """Return one block as a table of exactly the columns of `schema`."""
    rows = [request(line) for line in block(lines, path, group)]
    return pa.Table.from_pylist(rows, schema=SCHEMA).select(schema.names)


def request(line: bytes) -> dict[str, Any]:
    """Return the row of one request; raises ValueError where it is none that can be met."""
    item = parse(line)
    name, body = item.get("custom_id"), item.get("body")
    if not isinstance(name, str) or not name:
        raise ShapeError(f"custom_id: found {name!r}; expected text")
    if item.get("url", URL) != URL:
        raise ShapeError(f"url: found {item['url']!r}; expected {URL}")
    if not isinstance(body, dict):
        raise ShapeError("body: is missing; expected the parameters of a chat completion")
    given = {key: value for key, value in body.items() if value is not None}
    return {
        "custom_id": name,
        "requested_model": given.pop("model", None),
        "messages": _messages(given.pop("messages", None)),
        **{key: _number(key, given.pop(key, usual)) for key, usual in _NUMBERS.items()},
        "max_tokens": _most_tokens(given),
        "stop": _stops(given.pop("stop", [])),
        **_nothing_left(given),
    }


def _messages(value: object) -> list[dict[str, Any]]:
    turns = conversation(value, "body.messages")
    for number, turn in enumerate(turns):
        further = sorted(set(turn) - {"role", "content", "name"})
        if further:
            raise ShapeError(f"body.messages: turn {number}: {further[0]} is not supported")
    return turns


def _number(key: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ShapeError(f"body.{key}: found {value!r}; expected a number")
    return float(value)


def _most_tokens(given: dict[str, Any]) -> int | None:
    found = [given.pop(key, None) for key in ("max_completion_tokens", "max_tokens")]
    value = next((item for item in found if item is not None), None)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise ShapeError(f"body.max_tokens: found {value!r}; expected a whole number from 1 on")
    return value


def _stops(value: object) -> list[str]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(item, str) and item for item in stops):
        raise ShapeError(f"body.stop: found {value!r}; expected a text or a list of texts")
    return stops


def _nothing_left(given: Mapping[str, Any]) -> dict[str, Any]:
    for key, value in given.items():
        usual, place = _ELSEWHERE.get(key, ((), ""))
        if key in _WITHOUT_INFLUENCE or value in usual:
            continue
        hint = f"set {place} for the whole file" if place else "remove it"
        raise ShapeError(f"body.{key}: cannot be set by a request here; {hint}")
    return {}


def _no_value(_: object) -> None:
    """Take a value and leave it: a request was checked."""
