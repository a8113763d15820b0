"""One row's way through the stages, as a generator: it yields calls and is sent completions.

Nothing here waits, reads or writes. All calls of one yield run beside each other; the way goes on
when all of them are over. What comes of a row depends on the row alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from eagle_batch.data.checks import Text, Verdict
from eagle_batch.data.sandbox import is_null
from eagle_batch.engine.request import Completion, SamplingParams, noise_key
from eagle_batch.errors import Reason, RequestError
from eagle_batch.stages.calls import Call, Record
from eagle_batch.stages.choose import ALIKE, find_vote, highest, majority, mean_logprob, vote_of
from eagle_batch.stages.faults import BY_CHANCE, FaultFinder, fault_of
from eagle_batch.stages.graph import Graph, Step
from eagle_batch.stages.params import row_params, to_params

#: A text that a stage gives to a row; a list of them with `keep: all`, null where it is left out.
Texts = str | list[str] | None
#: A part of the way that makes texts and returns what it found.
Candidates = Generator[tuple[Call, ...], tuple[Completion, ...], "list[Candidate]"]


@dataclass(slots=True)
class Candidate:
    """A text that may be kept."""

    #: Place of its generation in the way's records.
    record: int
    call: Call
    text: str
    #: Of the last validator that gave one.
    score: float | None = None
    #: What the first validator that refuses it says, or what is wrong with it by itself.
    problem: str = ""
    reason: Reason = Reason.VALIDATION


@dataclass(slots=True)
class Walk:
    """Where one (row, sample) is and what it has."""

    graph: Graph
    row_id: str
    sample: int
    #: The row's own values, by column.
    columns: Mapping[str, object] = field(default_factory=dict)
    texts: dict[str, Texts] = field(default_factory=dict)
    #: Every generation, in the order they were asked for.
    records: list[Record] = field(default_factory=list)
    #: The stage it is in.
    stage: int = 0
    turn: int = 0
    #: (validator, whether it passed) -> texts.
    checked: Counter[tuple[str, bool]] = field(default_factory=Counter)

    def run(self) -> Generator[tuple[Call, ...], tuple[Completion, ...], None]:
        """Go through the stages; raises RequestError where the row cannot go on."""
        while self.stage < len(self.graph.steps):
            step = self.graph.steps[self.stage]
            seen = self.graph.seen(step, self.columns, self.texts, self.turn)
            if step.stage.when is None or step.template.holds("when", seen):
                yield from self._generate(step, seen)
            else:
                # A turn that leaves a stage out leaves the text of the turn before.
                self.texts.setdefault(step.stage.name, None)
            self.stage = self._next(step)
        self._decontaminate()

    def _decontaminate(self) -> None:
        known = self.graph.contamination
        for name in self.graph.looked_at if known is not None else ():
            self.stage = self.graph.names.index(name)
            texts = self.texts[name]
            for text in [texts] if isinstance(texts, str) else texts or ():
                run = known.find(text) if known is not None else None
                if run is not None:
                    line = f"{name} holds words of decontaminate.against: {run!r}"
                    raise RequestError(Reason.CONTAMINATED, line)

    def noise(self, call: Call) -> int:
        """Return the address of a call's noise."""
        return noise_key(self.graph.pipeline.seed, self.row_id, self.sample, call.noise_name)

    def _next(self, step: Step) -> int:
        repeat = step.stage.repeat
        if step.loop is None or repeat is None:
            return step.index + 1
        seen = self.graph.seen(step, self.columns, self.texts, self.turn)
        over = repeat.until is not None and step.template.holds("repeat.until", seen)
        if over or self.turn + 1 == repeat.at_most:
            self.turn = 0
            return step.index + 1
        self.turn += 1
        return step.loop[0]

    def _generate(
        self, step: Step, seen: Mapping[str, object]
    ) -> Generator[tuple[Call, ...], tuple[Completion, ...], None]:
        """Make the candidates of one stage, try those again that fail, and keep what is best."""
        stage = step.stage
        wanted = self.graph.pipeline.output.best_tokens
        best = wanted if wanted is not None or stage.keep != "best" else 0
        params = row_params(step.template, seen, logprobs=best)
        first = self._call(step, stage.name, seen, params)
        waiting = list(range(stage.samples))
        passed: list[Candidate] = []
        failed: list[Candidate] = []
        for attempt in range(stage.retry + 1):
            calls = tuple(_numbered(first, candidate, attempt) for candidate in waiting)
            made = yield from self._make(calls, step.fault_of)
            yield from self._check(step, made, seen)
            passed += [item for item in made if not item.problem]
            failed = [item for item in made if item.problem]
            waiting = [item.call.candidate for item in failed]
            if not waiting:
                break
        if not passed:
            raise RequestError(_failure(step, failed[-1]), _story(failed, stage.retry + 1))
        passed.sort(key=lambda item: item.call.candidate)
        self._keep(step, passed, seen)

    def _call(
        self,
        step: Step,
        name: str,
        seen: Mapping[str, object],
        params: SamplingParams,
        judge: int | None = None,
    ) -> Call:
        prompter = self.graph.prompter
        return Call(
            stage=step.index,
            name=name,
            prompt=prompter.render(step.index, seen, judge),
            special=prompter.adds_special_tokens(step.index, judge),
            params=params,
            turn=self.turn,
            ending=prompter.ending(step.index) if judge is None else "",
        )

    def _make(self, calls: tuple[Call, ...], fault_of: FaultFinder) -> Candidates:
        completions = yield calls
        made = []
        for call, completion in zip(calls, completions, strict=True):
            item = Candidate(len(self.records), call, completion.text)
            self.records.append(Record(call, completion, self.noise(call)))
            fault = fault_of(completion)
            if fault is not None:
                item.reason, item.problem = fault
                if item.reason not in BY_CHANCE:
                    raise RequestError(item.reason, item.problem)
            made.append(item)
        return made

    def _check(
        self, step: Step, made: Sequence[Candidate], seen: Mapping[str, object]
    ) -> Generator[tuple[Call, ...], tuple[Completion, ...], None]:
        """Ask the validators in their order; a text that one refuses is not put to the next."""
        for number, validator in enumerate(step.stage.validators):
            asked = [item for item in made if not item.problem]
            values = [{**seen, step.stage.name: item.text} for item in asked]
            if validator.judge is None:
                verdicts = [
                    step.checks.run(number, Text(item.text, self._tokens(item), known))
                    for item, known in zip(asked, values, strict=True)
                ]
            else:
                params = to_params(validator.judge.sampling)
                verdicts = yield from self._ask_judge(step, number, asked, values, params)
            for item, verdict in zip(asked, verdicts, strict=True):
                self._note(item, step.checks.label(number), verdict)

    def _ask_judge(
        self,
        step: Step,
        number: int,
        asked: Sequence[Candidate],
        values: Sequence[Mapping[str, object]],
        params: SamplingParams,
    ) -> Generator[tuple[Call, ...], tuple[Completion, ...], list[Verdict]]:
        if not asked:
            return []
        calls = []
        for item, known in zip(asked, values, strict=True):
            call = self._call(step, step.checks.label(number), known, params, number)
            calls.append(_numbered(call, item.call.candidate, item.call.attempt))
        made = yield from self._make(tuple(calls), fault_of)
        return [step.checks.judged(number, item.text) for item in made]

    def _tokens(self, item: Candidate) -> int:
        return len(self.records[item.record].completion.token_ids)

    def _note(self, item: Candidate, label: str, verdict: Verdict) -> None:
        self.checked[label, not verdict.problem] += 1
        item.score = item.score if verdict.score is None else verdict.score
        item.problem = f"{label}: {verdict.problem}" if verdict.problem else ""

    def _keep(self, step: Step, passed: Sequence[Candidate], seen: Mapping[str, object]) -> None:
        """Choose among the candidates and give the row its text."""
        for place, record in enumerate(self.records):
            if record.kept and record.call.stage == step.index:  # of the turn before
                self.records[place] = Record(record.call, record.completion, record.seed)
        if step.stage.keep == "all":
            kept = [(item, item.score) for item in passed]
            self.texts[step.stage.name] = [item.text for item in passed]
        else:
            place, score = self._choose(step, passed, seen)
            kept = [(passed[place], score)]
            self.texts[step.stage.name] = passed[place].text
        for item, score in kept:
            self.records[item.record] = self.records[item.record].keep(score)

    def _choose(
        self, step: Step, passed: Sequence[Candidate], seen: Mapping[str, object]
    ) -> tuple[int, float | None]:
        """Return the place of the candidate that is kept, and what it was chosen by."""
        match step.stage.keep:
            case "best":
                logprobs = [self.records[item.record].completion.logprobs for item in passed]
                means = [mean_logprob(item or ()) for item in logprobs]
                place = highest(means, alike=ALIKE)
                return place, means[place]
            case "score":
                scores = [_score(step, item) for item in passed]
                place = highest(scores)
                return place, scores[place]
            case "vote":
                return self._vote(step, passed, seen)
            case _:
                return 0, passed[0].score

    def _vote(
        self, step: Step, passed: Sequence[Candidate], seen: Mapping[str, object]
    ) -> tuple[int, float]:
        vote = step.stage.vote
        assert vote is not None
        if vote.regex is not None:
            votes = [find_vote(vote.regex, item.text) for item in passed]
        else:
            known = [{**seen, step.stage.name: item.text} for item in passed]
            values = [step.template.evaluate("vote.expression", each) for each in known]
            votes = [None if is_null(value) else vote_of(value) for value in values]
        won = majority(votes)
        if won is None:
            key = f"stages.{step.index}.vote"
            raise RequestError(
                _failure(step, passed[0]), f"{key}: none of {len(passed)} texts has a vote"
            )
        return won


def _numbered(call: Call, candidate: int, attempt: int) -> Call:
    return replace(call, candidate=candidate, attempt=attempt)


def _score(step: Step, item: Candidate) -> float:
    if item.score is None:
        text = f"stages.{step.index}.validators: none gave a score to choose by"
        raise RequestError(Reason.VALIDATOR_ERROR, text)
    return item.score


def _failure(step: Step, item: Candidate) -> Reason:
    return Reason.DROPPED if step.stage.otherwise == "drop" else item.reason


def _story(failed: Sequence[Candidate], attempts: int) -> str:
    problem = failed[-1].problem
    return f"{problem} (the last of {attempts} attempts)" if attempts > 1 else problem
