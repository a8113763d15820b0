"""The stages of a pipeline, compiled once and gone through by every row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from eagle_batch.data.checks import StageChecks, check_stages
from eagle_batch.data.contamination import Contamination
from eagle_batch.data.prompts import Prompter
from eagle_batch.data.templates import StageTemplate
from eagle_batch.pipeline import TURN_VARIABLE, Pipeline, Stage
from eagle_batch.pipeline.loops import loops
from eagle_batch.stages.faults import FaultFinder, fault_finder


@dataclass(frozen=True, slots=True)
class Step:
    """One stage."""

    index: int
    template: StageTemplate
    checks: StageChecks
    #: Tells what is wrong with a completion, whatever the validators say.
    fault_of: FaultFinder
    #: First and last stage of the loop that it is in.
    loop: tuple[int, int] | None

    @property
    def stage(self) -> Stage:
        """What the file says."""
        return self.template.stage

    @property
    def ends_loop(self) -> bool:
        """Whether the loop may go back from here."""
        return self.loop is not None and self.index == self.loop[1]


class Graph:
    """Every stage with its templates, validators and loop."""

    def __init__(self, pipeline: Pipeline, prompter: Prompter) -> None:
        """Compile; raises ConfigError with the problems of all validators."""
        self.pipeline = pipeline
        self.prompter = prompter
        self.names = tuple(stage.name for stage in pipeline.stages)
        self.steps = _steps(pipeline, prompter)
        section = pipeline.decontaminate
        self.looked_at = section.stages if section is not None else ()
        self.contamination = Contamination(section) if section is not None else None

    def seen(
        self, step: Step, columns: Mapping[str, object], texts: Mapping[str, object], turn: int
    ) -> dict[str, object]:
        """Return what a stage's templates see: columns, earlier texts and those of its loop."""
        if step.loop is None:
            return {**columns, **{name: texts[name] for name in self.names[: step.index]}}
        known = {name: texts.get(name) for name in self.names[: step.loop[1] + 1]}
        return {TURN_VARIABLE: turn + 1, **columns, **known}


def _steps(pipeline: Pipeline, prompter: Prompter) -> tuple[Step, ...]:
    found = loops(pipeline.stages)
    pairs = zip(prompter.stages, check_stages(prompter.stages), strict=True)
    return tuple(
        Step(index, template, checks, fault_finder(template.stage), found.get(index))
        for index, (template, checks) in enumerate(pairs)
    )
