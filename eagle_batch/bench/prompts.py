"""The prompts of a benchmark: a pipeline's own first stage, or files of questions."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path

from eagle_batch.data.plan import Plan
from eagle_batch.data.prompts import Prompter
from eagle_batch.data.rows import RowReader
from eagle_batch.errors import ConfigError
from eagle_batch.pipeline import Pipeline

Encode = Callable[[str], Sequence[int]]


def pipeline_prompts(pipeline: Pipeline, plan: Plan, prompter: Prompter, count: int) -> list[str]:
    """Return the rendered prompts of the first rows in the first stage."""
    reader = RowReader(pipeline, plan, prompter.stages)
    texts: list[str] = []
    for shard in plan.shards:
        rows = reader.read(shard)
        texts += [prompter.render(0, rows.values(i)) for i in range(len(rows.ids))]
        if len(texts) >= count:
            break
    return texts[:count]


def file_prompts(path: Path, prompter: Prompter, count: int) -> list[str]:
    """Return chat prompts for the questions of a JSON lines file.

    A line has `prompt`, or `turns` of which the first is taken. Raises ConfigError naming the line.
    """
    if prompter.chat is None:
        raise ConfigError(f"{path}: the pipeline has no chat stage, so questions make no prompts")
    chat = prompter.chat
    return [chat.render([{"role": "user", "content": q}]) for q in questions(path, count)]


def questions(path: Path, count: int) -> list[str]:
    """Return the first questions of a JSON lines file; see `file_prompts`."""
    try:
        with path.open(encoding="utf-8") as lines:
            first = list(islice(lines, count))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read as JSON lines: {error}") from error
    return [_question(path, number, line) for number, line in enumerate(first, start=1)]


def _question(path: Path, number: int, line: str) -> str:
    try:
        row = json.loads(line)
        question = row["prompt"] if "prompt" in row else row["turns"][0]
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise ConfigError(
            f"{path}:{number}: expected a JSON object with `prompt` or `turns`, found {line[:60]!r}"
        ) from error
    return str(question)
