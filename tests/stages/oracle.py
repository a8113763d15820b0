"""The plain, slow reading of a stage graph: one text after the other, nothing shared with the flow.

It knows the fake engine's texts, the documented address of the noise, and Python's own `eval` in
the place of the sandbox.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from tests.job.fake_engine import fake_logprobs, fake_text


class LostError(Exception):
    """The row does not come out."""


def address(seed: int, row: str, sample: int, stage: str, *place: int) -> int:
    """The documented address: the plain stage name, or `name@turn.candidate.attempt`."""
    name = stage if not any(place) else f"{stage}@{'.'.join(map(str, place))}"
    text = "\x1f".join((str(seed), row, str(sample), name))
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def fill(template: str, names: dict[str, Any]) -> str:
    """Print names; to print a null is an error, unless a default stands behind it."""

    def value(found: re.Match[str]) -> str:
        name, default = found.groups()
        if names[name] is None and default is None:
            raise LostError("template_error")
        return str(names[name] or "" if default else names[name])

    return re.sub(r"\{\{ (\w+)( or '')? \}\}", value, template)


@dataclass
class Reading:
    """One (row, sample), read through all stages."""

    stages: list[dict[str, Any]]
    row: str
    sample: int
    columns: dict[str, Any]
    seed: int = 3
    texts: dict[str, Any] = field(default_factory=dict)
    calls: list[tuple[Any, ...]] = field(default_factory=list)

    def run(self) -> dict[str, Any]:
        place = turn = 0
        names = [stage["name"] for stage in self.stages]
        while place < len(self.stages):
            stage = self.stages[place]
            known = dict.fromkeys(names) | self.columns | self.texts | {"turn": turn + 1}
            if eval(stage.get("when", "True"), {}, known):
                self.texts[stage["name"]] = self.stage(stage, known, turn)
            else:
                self.texts.setdefault(stage["name"], None)
            repeat = stage.get("repeat")
            if repeat:
                known = known | self.texts
                if turn + 1 < repeat["at_most"] and not eval(repeat.get("until", "0"), {}, known):
                    turn += 1
                    place = names.index(repeat.get("first", stage["name"]))
                    continue
                turn = 0
            place += 1
        return self.texts

    def write(self, name: str, prompt: str, tokens: int, *place: int) -> str:
        key = address(self.seed, self.row, self.sample, name, *place)
        text = fake_text(prompt.encode(), key, min(4, tokens))
        self.calls.append((name, *place, text))
        return text

    def stage(self, stage: dict[str, Any], known: dict[str, Any], turn: int) -> Any:
        passed = []
        for candidate in range(stage.get("samples", 1)):
            for attempt in range(stage.get("retry", 0) + 1):
                prompt, tokens = fill(stage["prompt"], known), stage["sampling"]["max_tokens"]
                text = self.write(stage["name"], prompt, tokens, turn, candidate, attempt)
                good, score = self.good(stage, text, known, (turn, candidate, attempt))
                if good:
                    passed.append((text, score))
                    break
        if not passed:
            raise LostError(stage.get("otherwise", "quarantine"))
        return self.chosen(stage, passed)

    def good(
        self, stage: dict[str, Any], text: str, known: dict[str, Any], place: tuple[int, ...]
    ) -> tuple[bool, float | None]:
        score = None
        for number, validator in enumerate(stage.get("validators", [])):
            if "regex" in validator and not re.search(validator["regex"], text):
                return False, score
            if "expression" in validator:
                value = eval(validator["expression"], {}, known | {stage["name"]: text})
                if isinstance(value, bool):
                    if not value:
                        return False, score
                else:
                    score = float(value)
            if "judge" in validator:
                judge = validator["judge"]
                prompt = fill(judge["prompt"], known | {stage["name"]: text})
                name = f"{stage['name']}.{number}.judge"
                verdict = self.write(name, prompt, judge["sampling"]["max_tokens"], *place)
                found = re.search(r"\d+", verdict)
                if found is None:
                    return False, score
                score = float(found[0])
            if "at_least" in validator and (score is None or score < validator["at_least"]):
                return False, score
        return True, score

    def chosen(self, stage: dict[str, Any], passed: list[tuple[str, float | None]]) -> Any:
        texts = [text for text, _ in passed]
        match stage.get("keep"):
            case "all":
                return texts
            case "score":
                return max(passed, key=lambda item: item[1])[0]  # type: ignore[arg-type, return-value]
            case "best":
                return max(texts, key=lambda text: sum(fake_logprobs(text)) / (len(text) / 4))
            case "vote":
                votes = [re.findall(stage["vote"]["regex"], text) for text in texts]
                counts = Counter(vote[-1] for vote in votes if vote)
                if not counts:
                    raise LostError(stage.get("otherwise", "quarantine"))
                most = max(counts.values())
                return next(
                    text
                    for text, vote in zip(texts, votes, strict=True)
                    if vote and counts[vote[-1]] == most
                )
            case _:
                return texts[0]
