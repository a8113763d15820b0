"""What makes a finished completion unfit for its column: the row is quarantined with the reason."""

from __future__ import annotations

from collections.abc import Callable

from eagle_batch.data.typed import value_problem
from eagle_batch.engine.request import Completion
from eagle_batch.errors import Reason
from eagle_batch.pipeline import Stage

Fault = tuple[Reason, str]
FaultFinder = Callable[[Completion], Fault | None]

#: Faults of one text: another one of the same prompt may be without.
BY_CHANCE = frozenset({Reason.INCOMPLETE_STRUCTURE, Reason.OUT_OF_RANGE})


def fault_finder(stage: Stage) -> FaultFinder:
    """Return how to tell what is wrong with a completion of a stage."""

    def find(completion: Completion) -> Fault | None:
        fault = fault_of(completion)
        if fault is not None or stage.structured is None:
            return fault
        problem = value_problem(stage, completion.text)
        return None if problem is None else (Reason.OUT_OF_RANGE, problem)

    return find


def fault_of(completion: Completion) -> Fault | None:
    """Return what is wrong with a completion, whatever asked for it."""
    after = f"after {len(completion.token_ids)} tokens"
    if completion.finish_reason == "overflow":
        return Reason.GENERATION_OVERFLOW, f"the model gave no finite scores {after}"
    if completion.finish_reason == "banned":
        text = f"structured, bad_words and logit_bias left no token to choose {after}"
        return Reason.NOTHING_ALLOWED, text
    if not completion.complete:
        text = f"the text ended by {completion.finish_reason} {after}, inside its structure"
        return Reason.INCOMPLETE_STRUCTURE, text
    return None
