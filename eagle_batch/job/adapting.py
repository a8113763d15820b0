"""When a head is trained beside a job, and what came of it: events in, rounds out.

Pure: it reads no clock and starts nothing. Rounds come at growing distances, since each doubling of
the texts is worth about as much as the one before; their time in all is a share of the job's.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from eagle_batch.pipeline import Adapt
from eagle_batch.training.learnt import Learnt

#: Where the head lies in an output.
HEAD = "head"
WEIGHTS = f"{HEAD}/model.safetensors"
#: Times the tokens between the first rounds that lie between later ones at most.
MOST_TIMES = 16
#: Seconds below which a round is not worth its start.
LEAST_S = 2.0
#: Texts below which there is too little to learn from and to hold out.
LEAST_TEXTS = 24
#: Tokens of texts that one report carries: the fastest worker writes some thousand a second.
MOST_REPORTED = 1 << 14
#: Tokens of texts that wait for a round, prompts included; the oldest go first.
MOST_WAITING = 1 << 20


def head_place(output: str) -> str:
    """Return where the head of an output lies, as a pipeline names it."""
    return f"{output.rstrip('/')}/{HEAD}"


@dataclass(frozen=True, slots=True)
class Text:
    """One completion of the job with its prompt, as token ids."""

    #: int32, the prompt first.
    ids: bytes
    prompt_tokens: int

    @classmethod
    def of(cls, prompt: Sequence[int], completion: Sequence[int]) -> Text:
        """Pack token ids, which pickles a hundred times faster."""
        return cls(array("i", [*prompt, *completion]).tobytes(), len(prompt))

    @property
    def tokens(self) -> tuple[int, ...]:
        """All token ids."""
        return tuple(memoryview(self.ids).cast("i"))

    @property
    def size(self) -> int:
        """Tokens of prompt and completion."""
        return len(self.ids) // array("i").itemsize

    @property
    def completion_tokens(self) -> int:
        """Tokens of the completion."""
        return self.size - self.prompt_tokens


class Texts:
    """A worker's finished completions since its last report, as many as a report may carry."""

    def __init__(self) -> None:
        self._kept: list[Text] = []
        self._room = MOST_REPORTED

    def keep(self, prompt: Sequence[int], completion: Sequence[int]) -> None:
        """Keep a completion, where it is long enough to learn from and there is room."""
        size = len(prompt) + len(completion)
        if len(completion) > 1 and size <= self._room:
            self._room -= size
            self._kept.append(Text.of(prompt, completion))

    def take(self) -> tuple[Text, ...]:
        """Return what was kept, and begin anew."""
        kept, self._kept, self._room = tuple(self._kept), [], MOST_REPORTED
        return kept


@dataclass(frozen=True, slots=True)
class Round:
    """What a trainer is to learn from, and how long it may take."""

    texts: tuple[Text, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class Switch:
    """Something that happened to the head of a job, as reports show it."""

    #: Seconds of the run.
    at: float
    #: "switch", "round" (one without a gain), or "stopped".
    kind: str
    #: For people.
    text: str
    #: Number of the head in use from now on; 0 without one.
    version: int
    tokens: int = 0
    seconds: float = 0.0
    before: float | None = None
    after: float | None = None


class Adaptation:
    """Owns the texts that wait, the budget that is left, and the number of the head in use."""

    def __init__(self, budget: Adapt, version: int = 0) -> None:
        """Begin; version 1 is the head that an earlier run left in the output."""
        self.version = version
        self.stopped = False
        self.events: list[Switch] = []
        self._budget = budget
        self._waiting: deque[Text] = deque()
        self._waiting_tokens = 0
        #: Completion tokens since the last round, since the beginning, and until the next round.
        self._fresh = self._seen = 0
        self._distance = budget.tokens
        self._spent = 0.0
        self._busy = False

    @property
    def busy(self) -> bool:
        """Whether a round runs."""
        return self._busy

    def take(self, texts: Sequence[Text]) -> None:
        """Keep finished texts for the next round."""
        if self.stopped:
            return
        for text in texts:
            self._waiting.append(text)
            self._waiting_tokens += text.size
            self._fresh += text.completion_tokens
        while self._waiting_tokens > MOST_WAITING:
            self._waiting_tokens -= self._waiting.popleft().size

    def next_round(self, at: float, left: float | None) -> Round | None:
        """Return a round that is to begin now, `at` seconds into a run of which `left` remain.

        None while one runs, too little was written, the budget is used up, or the end is near.
        """
        if self.stopped or self._busy or left is None or self._fresh < self._distance:
            return None
        if len(self._waiting) < LEAST_TEXTS:
            return None
        # What is learnt must serve for as long as it took to learn.
        seconds = min(self._budget.share * (at + left) - self._spent, left / 2)
        if seconds < LEAST_S:
            return None
        self._busy = True
        texts = tuple(self._waiting)
        self._waiting.clear()
        self._seen += self._fresh
        self._waiting_tokens = self._fresh = 0
        return Round(texts, seconds)

    def learnt(self, found: Learnt, at: float) -> Switch:
        """Take in the end of a round."""
        self._busy = False
        self._spent += found.seconds
        most = MOST_TIMES * self._budget.tokens
        self._distance = min(max(self._budget.tokens, self._seen), most)
        if found.used:
            self.version += 1
        elif found.before is not None:
            # More of the same teaches little more.
            self._distance = 2 * most
        kind = "switch" if found.used else "round"
        return self._note(at, kind, _described(found, self.version), found)

    def failed(self, reason: str, at: float) -> Switch:
        """Take in that the trainer is gone: nothing more is learnt in this run."""
        self.stopped = True
        self._waiting.clear()
        kept = f"head {self.version} stays in use" if self.version else "drafts stay as they are"
        return self._note(at, "stopped", f"adaptation stopped, the job goes on, {kept}: {reason}")

    def _note(self, at: float, kind: str, text: str, found: Learnt | None = None) -> Switch:
        event = Switch(at, kind, text, self.version)
        if found is not None:
            event = replace(event, tokens=found.tokens, seconds=found.seconds)
            event = replace(event, before=found.before, after=found.after)
        self.events.append(event)
        return event


def _described(found: Learnt, version: int) -> str:
    gain = f"{found.after:.2f} tokens a pass expected on held-out texts"
    if found.before is not None:
        gain += f" (before {found.before:.2f})"
    cost = f"learnt from {found.tokens:,} tokens, {found.seconds:.0f} s"
    if found.used:
        return f"adaptation: head {version} is used from now on: {gain}; {cost}"
    return f"adaptation: no gain worth a switch: {gain}; {cost}"
