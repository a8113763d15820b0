"""What makes a finished completion unfit for its column: the row is quarantined with the reason."""

from __future__ import annotations

from collections.abc import Callable

from eagle_batch.data.typed import value_problem
from eagle_batch.engine.request import Completion
from eagle_batch.errors import Reason
from eagle_batch.pipeline import Stage

Fault = tuple[Reason, str]


def fault_finder(stage: Stage) -> Callable[[Completion], Fault | None]:
    """Return how to tell what is wrong with a completion of a stage."""

    def find(completion: Completion) -> Fault | None:
        after = f"after {len(completion.token_ids)} tokens"
        if completion.finish_reason == "overflow":
            return Reason.GENERATION_OVERFLOW, f"the model gave no finite scores {after}"
        if completion.finish_reason == "banned":
            text = f"structured, bad_words and logit_bias left no token to choose {after}"
            return Reason.NOTHING_ALLOWED, text
        if not completion.complete:
            text = f"the text ended by {completion.finish_reason} {after}, inside its structure"
            return Reason.INCOMPLETE_STRUCTURE, text
        problem = None if stage.structured is None else value_problem(stage, completion.text)
        return None if problem is None else (Reason.OUT_OF_RANGE, problem)

    return find
