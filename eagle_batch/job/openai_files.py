"""An output as the two files of an OpenAI batch: one line a request, in the order of the input.

`output.jsonl` has a chat completion for each row, with a choice for each of its samples, and
`error.jsonl` the rows of which a sample was quarantined. Together they name every id once.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Any

from eagle_batch.data.forms import Form
from eagle_batch.data.schema import ERROR_SCHEMA
from eagle_batch.data.spelling import Spelling
from eagle_batch.errors import ConfigError, LedgerError
from eagle_batch.job.ledger import Identity
from eagle_batch.job.objects import DATA, ERRORS, find, read_table
from eagle_batch.job.openai_logprobs import choice_logprobs
from eagle_batch.job.store import Store
from eagle_batch.pipeline.problems import suggestion

OUTPUT, ERROR = "output.jsonl", "error.jsonl"
#: How a text ended -> what the API calls that.
_REASONS = {"eos": "stop", "stop": "stop", "length": "length", "context": "length"}


@dataclass(frozen=True, slots=True)
class Line:
    """One line of one of the two files."""

    file: str
    text: str


def lines(
    store: Store, identity: Identity, stage: str | None = None, spelling: Spelling | None = None
) -> Iterator[Line]:
    """Yield the lines of both files, shard by shard.

    `stage` is the stage whose text is the answer; None takes the last one. With `spelling` the
    choices have their `logprobs`. Raises ConfigError for a stage that there is not, LedgerError
    where an object is missing or damaged.
    """
    names = [item["name"] for item in identity.resolved["stages"]]
    wanted = stage or names[-1]
    if wanted not in names:
        raise ConfigError(
            f"--stage: found {stage!r}; {suggestion(str(stage), names)}expected one of "
            f"{', '.join(names)}"
        )
    form = identity.form
    for key in sorted(store.list(DATA)):
        rows, lost = _rows(store, form, key)
        failed = {row["id"]: row for row in reversed(lost)}
        for row_id, group in groupby(rows, key=itemgetter("id")):
            samples = list(group)
            if row_id not in failed:
                yield Line(OUTPUT, json.dumps(_answer(identity, samples, wanted, spelling)))
        for row_id, row in sorted(failed.items()):
            yield Line(ERROR, json.dumps(_failure(identity, row_id, row)))


def _rows(store: Store, form: Form, key: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the rows of a shard, and those that are in the error table."""
    listed = f"{ERRORS}/{key.rpartition('/')[2]}"
    found, errors = find(store, form, key), store.get(listed)
    for name, gone in ((key, found is None), (listed, errors is None)):
        if gone:
            raise LedgerError(f"{store.name}: {name} is gone; `eagle-batch verify` tells more")
    assert found is not None
    assert errors is not None
    lost = read_table(form, listed, errors, ERROR_SCHEMA)
    return found.table.to_pylist(), lost.to_pylist()


def _answer(
    identity: Identity, samples: list[dict[str, Any]], stage: str, spelling: Spelling | None
) -> dict[str, Any]:
    row_id = samples[0]["id"]
    made = [_generation(row, stage) for row in samples]
    prompt = made[0]["prompt_tokens"] if made[0] else 0
    completion = sum(item["completion_tokens"] for item in made if item)
    usage = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }
    body = {
        "id": f"chatcmpl-{_digest(identity, row_id)}",
        "object": "chat.completion",
        "created": int(identity.started),
        "model": samples[0]["model"],
        "choices": [
            _choice(row, item, stage, spelling) for row, item in zip(samples, made, strict=True)
        ],
        "usage": usage,
    }
    response = {"status_code": 200, "request_id": f"req_{_digest(identity, row_id)}", "body": body}
    return _line(identity, row_id) | {"response": response, "error": None}


def _choice(
    row: dict[str, Any], made: dict[str, Any] | None, stage: str, spelling: Spelling | None
) -> dict[str, Any]:
    value = row[stage]
    text = value if value is None or isinstance(value, str) else json.dumps(value)
    likely = None
    if made is not None and spelling is not None:
        likely = choice_logprobs(row, stage, spelling, made["finish_reason"])
    return {
        "index": row["sample"],
        "message": {"role": "assistant", "content": text, "refusal": None},
        "logprobs": likely,
        "finish_reason": _REASONS[made["finish_reason"]] if made else "stop",
    }


def _generation(row: dict[str, Any], stage: str) -> dict[str, Any] | None:
    """Return how the text came about; None where a condition left the stage out."""
    kept = [item for item in row["generation"] if item["stage"] == stage and item.get("kept", True)]
    return kept[-1] if kept else None


def _failure(identity: Identity, row_id: str, row: dict[str, Any]) -> dict[str, Any]:
    error = {"code": row["reason"], "message": row["message"]}
    return _line(identity, row_id) | {"response": None, "error": error}


def _line(identity: Identity, row_id: str) -> dict[str, Any]:
    return {"id": f"batch_req_{_digest(identity, row_id)}", "custom_id": row_id}


def _digest(identity: Identity, row_id: str) -> str:
    """Return the same name for the same row of the same job."""
    text = f"{identity.fingerprint}\x1f{row_id}".encode("utf-8", "surrogatepass")
    return hashlib.sha256(text).hexdigest()[:24]
