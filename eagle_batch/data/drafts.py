"""What drafts: the head or the draft model of a pipeline, as far as can be told without torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from eagle_batch.data.chat import model_folder
from eagle_batch.data.spelling import read_tokenizer
from eagle_batch.engine.vocabularies import vocabulary_problem
from eagle_batch.errors import ConfigError
from eagle_batch.pipeline import Pipeline
from eagle_batch.pipeline.locations import DEMO_PREFIX, is_demo


def draft_problems(pipeline: Pipeline) -> Iterator[str]:
    """Yield one line for each thing that is wrong with a pipeline's head or draft model."""
    speculation = pipeline.speculation
    if speculation.head is not None:
        yield from _head_problems(speculation.head)
    if speculation.draft is not None:
        yield from _model_problems(pipeline, speculation.draft)


def _model_problems(pipeline: Pipeline, draft: str) -> Iterator[str]:
    try:
        own = _vocabulary(model_folder(draft))
    except ConfigError as error:
        for problem in error.problems:
            yield "speculation.draft: " + problem.removeprefix("target.model: ")
        return
    try:
        targets = _vocabulary(model_folder(pipeline.target.model, pipeline.target.revision))
    except ConfigError:
        return  # The target's own line says what is wrong.
    if own is None or targets is None:
        return  # Only transformers can read these; the engine compares them when it starts.
    difference = vocabulary_problem(targets, own)
    if difference:
        yield f"speculation.draft: {draft}: {difference}"


def _vocabulary(folder: Path) -> dict[str, int] | None:
    tokenizer = read_tokenizer(folder)
    if tokenizer is None:
        return None
    found: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
    return found


def _head_problems(head: str) -> list[str]:
    if is_demo(head):
        return _demo_head_problems(head)
    folder = Path(head)
    if (folder / "config.json").is_file():
        return []
    found = "has no config.json" if folder.is_dir() else "is no folder"
    line = (
        f"speculation.head: {head} {found}; expected the folder of an EAGLE head; download or "
        "train one, or set speculation.method: none and remove the head"
    )
    return [line]


def _demo_head_problems(head: str) -> list[str]:
    from eagle_batch import demo

    try:
        demo.head_path(head.removeprefix(DEMO_PREFIX))
    except ConfigError as error:
        return [f"speculation.head: {problem}" for problem in error.problems]
    return []
