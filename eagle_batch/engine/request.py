"""What goes into an engine and what comes out: frozen records, free of torch.

The job side of the house imports this module; it must stay light.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from eagle_batch.errors import Reason, RequestError

#: "overflow": the target's logits were not finite; "banned": the grammar, the bad words and the
#: biases left no token to choose. Either way the text is empty and the row is quarantined.
FinishReason = Literal["eos", "stop", "length", "context", "overflow", "banned"]


@dataclass(frozen=True, slots=True)
class Structured:
    """What the whole text of a completion must match."""

    kind: Literal["json_schema", "regex", "choice"]
    #: The schema as JSON, the regular expression, or a JSON list of the choices.
    text: str


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one completion is sampled; the defaults are greedy decoding of 128 tokens."""

    #: 0 chooses the most probable token; above 0 divides the logits.
    temperature: float = 0.0
    #: Keep the k most probable tokens (ties of the k-th kept); None keeps all.
    top_k: int | None = None
    #: Keep the smallest set of tokens whose probability reaches this (ties kept); None keeps all.
    top_p: float | None = None
    #: Drop tokens less probable than this share of the most probable one; None keeps all.
    min_p: float | None = None
    #: Most tokens generated, the end-of-sequence token included.
    max_tokens: int = 128
    #: No end-of-sequence token before this many tokens.
    min_tokens: int = 0
    #: Strings that end the completion; they are cut from the text.
    stop: tuple[str, ...] = ()
    #: Token ids that end the completion, beside the target's own end-of-sequence tokens.
    stop_token_ids: tuple[int, ...] = ()
    #: Go on after end-of-sequence tokens until `max_tokens`.
    ignore_eos: bool = False
    #: Above 1 makes tokens of prompt and text less likely (logits divided or multiplied by it).
    repetition_penalty: float = 1.0
    #: Subtracted from the logit of every token that the text holds.
    presence_penalty: float = 0.0
    #: Subtracted from a token's logit once for each time that the text holds it.
    frequency_penalty: float = 0.0
    #: (token id, what is added to its logit); minus infinity bans a token.
    logit_bias: tuple[tuple[int, float], ...] = ()
    #: Report log-probabilities of the chosen tokens and of this many best ones; None reports none.
    logprobs: int | None = None
    #: Text that is never written: no token is chosen that would complete one of these.
    bad_words: tuple[str, ...] = ()
    #: Choose only tokens that keep the text within a grammar, and end where the grammar may end.
    structured: Structured | None = None

    def __post_init__(self) -> None:
        problems = [text for bad, text in self._rules() if bad]
        if problems:
            raise ValueError("; ".join(problems))

    @property
    def penalised(self) -> bool:
        """Whether a choice depends on the tokens before it."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )

    def _rules(self) -> list[tuple[bool, str]]:
        return [
            (not 0.0 <= self.temperature <= 100.0, f"temperature {self.temperature} not in 0..100"),
            (self.top_k is not None and self.top_k < 1, f"top_k {self.top_k} is below 1"),
            (self.top_p is not None and not 0 < self.top_p <= 1, f"top_p {self.top_p} not in 0..1"),
            (self.min_p is not None and not 0 <= self.min_p < 1, f"min_p {self.min_p} not in 0..1"),
            (
                not 0 < self.repetition_penalty <= 10,
                f"repetition_penalty {self.repetition_penalty} not in 0..10",
            ),
            (
                not -2 <= self.presence_penalty <= 2,
                f"presence_penalty {self.presence_penalty} not in -2..2",
            ),
            (
                not -2 <= self.frequency_penalty <= 2,
                f"frequency_penalty {self.frequency_penalty} not in -2..2",
            ),
            (
                self.logprobs is not None and not 0 <= self.logprobs <= 20,
                f"logprobs {self.logprobs} not in 0..20",
            ),
            (self.max_tokens < 1, f"max_tokens {self.max_tokens} is below 1"),
            (self.min_tokens < 0, f"min_tokens {self.min_tokens} is below 0"),
            (
                self.min_tokens > self.max_tokens,
                f"min_tokens {self.min_tokens} is above max_tokens {self.max_tokens}",
            ),
            (
                "" in self.stop,
                "stop holds an empty string, which would end every completion at once",
            ),
            (
                any(not word.strip() for word in self.bad_words),
                "bad_words holds a blank string, which would ban every text",
            ),
            *self._contradictions(),
        ]

    def _contradictions(self) -> list[tuple[bool, str]]:
        banned = {token for token, bias in self.logit_bias if bias == -math.inf}
        never = sorted(banned & set(self.stop_token_ids))
        unread = [
            name
            for name in ("ignore_eos", "min_tokens", "stop", "stop_token_ids")
            if self.structured is not None and getattr(self, name)
        ]
        return [
            (bool(never), f"stop_token_ids {never} are banned by logit_bias"),
            (
                bool(unread),
                f"{', '.join(unread)} beside structured output, which ends where its grammar does",
            ),
        ]


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt to complete."""

    #: Handle, unique among the requests that are in the engine.
    id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    #: Address of this completion's noise, from `noise_key`.
    noise_key: int = 0
    #: Goes before those that are not: the next text of a row that is under way.
    ahead: bool = False


@dataclass(frozen=True, slots=True)
class Completion:
    """One finished request."""

    request_id: str
    #: Generated tokens, a final end-of-sequence or stop token included.
    token_ids: tuple[int, ...]
    #: Decoded text without special tokens, cut before a stop string.
    text: str
    finish_reason: FinishReason
    prompt_tokens: int
    #: Forward passes of the target that produced tokens of this row; prefill counts as one.
    target_passes: int
    #: Tokens that were drafted for this row along the deepest path of each round's tree.
    drafted: int
    #: Drafted tokens that the target accepted.
    accepted: int
    #: How many drafted tokens each pass put into `token_ids`. The target's own token follows them;
    #: only the last pass may end without it, where the text ended among the drafted ones.
    accepted_by_pass: tuple[int, ...] = ()
    #: Log-probability of each token under the unprocessed distribution, where it was asked for.
    logprobs: tuple[float, ...] | None = None
    #: The best tokens at each place with their log-probabilities, where they were asked for.
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] | None = None
    #: Whether the text satisfies the grammar that was asked for; one cut by a length may not.
    complete: bool = True
    #: The prompt's tokens, special ones included.
    prompt_ids: tuple[int, ...] = ()

    @property
    def acceptance_length(self) -> float:
        """Tokens for each target pass, the bonus token included."""
        return len(self.token_ids) / max(1, self.target_passes)


#: Rows decoded together where nobody says how many.
DEFAULT_SLOTS = 16
#: Most nodes of an n-gram branch beside a tree where nobody says how many.
DEFAULT_BRANCH = 16


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """Everything that an engine is built from; all names are resolved."""

    #: Folder of the target, or a hub id.
    model: str
    #: Folder of the head; None decodes plainly.
    head: str | None
    revision: str | None = None
    #: Folder or hub id of a smaller model that drafts, instead of a head.
    draft: str | None = None
    dtype: str = "float32"
    device: str = "cpu"
    #: Devices of that kind that hold the target's layers; above 1 only on "cuda".
    gpus: int = 1
    #: "dynamic" (EAGLE-2), "static" (EAGLE-1) or "chain".
    tree: str = "dynamic"
    #: Drafted levels below the root.
    depth: int = 4
    #: Children considered for each node.
    width: int = 4
    #: Drafted nodes for each row and round, the root excluded.
    nodes: int = 12
    #: Without a head, draft what followed the same tokens earlier in the row.
    ngram: bool = False
    #: Most nodes of an n-gram branch beside the tree of a head or draft model; 0 has none.
    branch: int = 0
    #: Choose the shape of each round while running, the one above being the largest.
    auto: bool = False
    #: A head, or another one, may come while the engine runs; needs `auto`.
    adapt: bool = False
    #: Paths of a static tree by child ranks; none takes the tree of EAGLE-1.
    paths: tuple[tuple[int, ...], ...] = ()
    #: Rows decoded together.
    slots: int = DEFAULT_SLOTS
    #: Have as many slots as memory and speed allow instead, found out when the engine is built.
    fit_slots: bool = False
    #: Most tokens of prompt and completion in one slot; None takes the target's limit, at most
    #: 2048.
    context: int | None = None
    #: Most tokens of one prompt in one prefill pass.
    prefill_chunk: int = 512
    #: CPU threads of the engine; None leaves torch's choice.
    threads: int | None = None
    #: "own", or "vllm".
    kind: str = "own"
    #: GPUs that hold the target together; vllm only.
    tensor_parallel: int = 1

    @property
    def reach(self) -> int:
        """Most drafted tokens that a row can gain in a round."""
        return max(self.depth, self.branch)

    def with_head(self, name: str) -> EngineSpec:
        """Return what drafts with this head, with the branch that there is to be beside one."""
        return replace(self, head=name, ngram=False)


@dataclass(frozen=True, slots=True)
class EngineMetrics:
    """Counters since the engine was built; they add and subtract."""

    rows: int = 0
    prompt_tokens: int = 0
    #: Prompt tokens that were not computed because a slot or a shared prefix held them.
    cached_prompt_tokens: int = 0
    completion_tokens: int = 0
    #: Verification passes of the target, whatever the batch.
    target_passes: int = 0
    #: Sum over those passes of the rows that took part.
    row_passes: int = 0
    #: Tokens that those passes produced, before anything was cut at an end.
    round_tokens: int = 0
    #: Rows whose round offered a draft at depth 1, 2, ... and rows that accepted it.
    drafted_at: tuple[int, ...] = ()
    accepted_at: tuple[int, ...] = ()
    #: Sum over passes of the slots there are; with `row_passes` it gives the share in use.
    slot_passes: int = 0
    #: Verification passes by the shape of their draft, "plain" or "depth,width,nodes", with
    #: ",+nodes" where it might have an n-gram branch of so many.
    passes_by_shape: tuple[tuple[str, int], ...] = ()
    #: The same by "rows shape", rows being the highest of its kind: 1, 2, 4, 8, ...
    passes_by_rows: tuple[tuple[str, int], ...] = ()
    prefill_s: float = 0.0
    draft_s: float = 0.0
    verify_s: float = 0.0
    host_s: float = 0.0

    @property
    def acceptance_length(self) -> float:
        """Tokens that one row gains in one target pass, the bonus token included."""
        return self.round_tokens / self.row_passes if self.row_passes else 0.0

    @property
    def occupancy(self) -> float:
        """Share of the slots that held a row, over all passes."""
        return self.row_passes / self.slot_passes if self.slot_passes else 0.0

    def __add__(self, other: EngineMetrics) -> EngineMetrics:
        return self._combine(other, 1)

    def __sub__(self, other: EngineMetrics) -> EngineMetrics:
        return self._combine(other, -1)

    def _combine(self, other: EngineMetrics, sign: int) -> EngineMetrics:
        values: dict[str, Any] = {}
        for item in fields(self):
            mine, theirs = getattr(self, item.name), getattr(other, item.name)
            if item.name in {"passes_by_shape", "passes_by_rows"}:
                values[item.name] = _combine_by_name(mine, theirs, sign)
            elif isinstance(mine, tuple):
                values[item.name] = _combine_by_depth(mine, theirs, sign)
            else:
                values[item.name] = mine + sign * theirs
        return EngineMetrics(**values)


def _combine_by_depth(a: tuple[int, ...], b: tuple[int, ...], sign: int) -> tuple[int, ...]:
    depth = max(len(a), len(b))
    padded = zip(a + (0,) * (depth - len(a)), b + (0,) * (depth - len(b)), strict=True)
    return tuple(x + sign * y for x, y in padded)


def _combine_by_name(
    a: tuple[tuple[str, int], ...], b: tuple[tuple[str, int], ...], sign: int
) -> tuple[tuple[str, int], ...]:
    mine, theirs = dict(a), dict(b)
    return tuple(
        (name, mine.get(name, 0) + sign * theirs.get(name, 0)) for name in sorted({*mine, *theirs})
    )


def check_room(request: Request, context: int) -> None:
    """Raise RequestError when a prompt is empty, or leaves no room for an answer in the context."""
    count = len(request.prompt_ids)
    if count == 0:
        raise RequestError(Reason.EMPTY_PROMPT, "the prompt has no tokens")
    if count >= context:
        raise RequestError(
            Reason.PROMPT_TOO_LONG,
            f"the prompt has {count} tokens; the context holds {context} "
            "and needs one for the answer",
        )


def noise_key(seed: int, row_id: str, sample: int, stage: str) -> int:
    """Return the 64-bit address of one completion's noise (signed, as torch's int64 holds it).

    The same (job seed, row id, sample index, stage) always gives the same key, whatever the batch,
    the worker or the attempt, so that a resumed or re-run row repeats its text.
    """
    text = "\x1f".join((str(seed), row_id, str(sample), stage))
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)
