"""An engine whose text follows from prompt and noise key alone, in no time; it can also die."""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

from eagle_batch.engine.request import Completion, EngineMetrics, EngineSpec, Request
from eagle_batch.errors import ConfigError, HeadError, Reason, RequestError
from eagle_batch.job.spec import AddedToken

#: Prompts that contain one of these words do what it says.
KILL, RAISE, HANG, LONG, OVERFLOW = "{kill}", "{raise}", "{hang}", "{long}", "{overflow}"

#: What a process writes to its log before it dies of KILL.
LAST_WORDS = "terminate called: the device is gone"


class FakeTokenizer:
    """One token a byte."""

    all_special_ids: Sequence[int] = ()
    all_special_tokens: Sequence[str] = ()
    added_tokens_decoder: Mapping[int, AddedToken] = {}

    def encode(self, text: str, *, add_special_tokens: bool) -> Sequence[int]:
        return ([1] if add_special_tokens else []) + list(text.encode())

    def decode(
        self,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool,
        clean_up_tokenization_spaces: bool,
    ) -> str:
        """Four letters a token, as in `fake_text`."""
        return "".join(f"{token:04}" for token in token_ids)


def fake_text(prompt: bytes, noise_key: int, tokens: int) -> str:
    """The oracle: what this engine writes, whoever asks, whenever."""
    seed = prompt + noise_key.to_bytes(8, "little", signed=True)
    return hashlib.sha256(seed).hexdigest()[: 4 * tokens]


def fake_logprobs(text: str) -> tuple[float, ...]:
    """The log-probabilities of its tokens, four characters each."""
    return tuple(-int(text[n : n + 4], 16) / 65536 for n in range(0, len(text), 4))


class FakeEngine:
    """Rows take as many steps as their prompt's length says, so that they end out of order."""

    def __init__(self, spec: EngineSpec) -> None:
        self.tokenizer = FakeTokenizer()
        self.spec = spec
        self._waiting: deque[Request] = deque()
        self._active: list[tuple[Request, int]] = []
        self._total = EngineMetrics(drafted_at=(0,), accepted_at=(0,))
        #: What the heads held that were taken up.
        self.heads: list[str] = []
        #: Most requests that waited for a slot at once.
        self.most_waiting = 0
        self.step_s = float(os.environ.get("FAKE_STEP_S", "0"))

    @property
    def slots(self) -> int:
        return self.spec.slots

    @property
    def sizing(self) -> str:
        return "as asked"

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._active)

    def add(self, request: Request) -> None:
        if LONG in _prompt(request):
            raise RequestError(Reason.PROMPT_TOO_LONG, "the prompt is too long")
        taken = {item.id for item in self._waiting} | {item.id for item, _ in self._active}
        assert request.id not in taken
        self._waiting.append(request)
        self.most_waiting = max(self.most_waiting, len(self._waiting))

    def step(self) -> list[Completion]:
        time.sleep(self.step_s)
        while self._waiting and len(self._active) < self.slots:
            request = self._waiting.popleft()
            self._active.append((request, 1 + len(request.prompt_ids) % 3))
        for request, _ in self._active:
            _misbehave(_prompt(request))
        self._active = [(request, left - 1) for request, left in self._active]
        done = [request for request, left in self._active if left == 0]
        self._active = [(request, left) for request, left in self._active if left > 0]
        completions = [_complete(request) for request in done]
        self._account(completions)
        return completions

    def metrics(self) -> EngineMetrics:
        return self._total

    def use_head(self, name: str) -> None:
        """Heads that cannot be read are refused, as by a real engine."""
        if not Path(name, "model.safetensors").is_file():
            raise HeadError(f"{name}: not a folder")
        self.heads.append(Path(name, "model.safetensors").read_text())

    def _account(self, completions: list[Completion]) -> None:
        for item in completions:
            self._total = self._total + EngineMetrics(
                rows=1,
                prompt_tokens=item.prompt_tokens,
                completion_tokens=len(item.token_ids),
                target_passes=1,
                row_passes=1,
                round_tokens=len(item.token_ids),
                drafted_at=(2,),
                accepted_at=(1,),
                slot_passes=self.slots,
                verify_s=0.002,
                draft_s=0.001,
            )


def _prompt(request: Request) -> str:
    return bytes(request.prompt_ids).decode()


def _misbehave(prompt: str) -> None:
    if KILL in prompt:
        print(LAST_WORDS, file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    if RAISE in prompt:
        raise RuntimeError("the device is gone")
    if HANG in prompt:
        time.sleep(3600)


def _complete(request: Request) -> Completion:
    tokens = min(4, request.params.max_tokens)
    prompt = bytes(request.prompt_ids)
    text = fake_text(prompt.removeprefix(b"\x01"), request.noise_key, tokens)
    return Completion(
        request_id=request.id,
        token_ids=tuple(range(tokens)),
        text=text,
        logprobs=None if request.params.logprobs is None else fake_logprobs(text),
        top_logprobs=_best(request.params.logprobs, tokens) if request.params.logprobs else None,
        finish_reason="overflow" if OVERFLOW in prompt.decode() else "length",
        prompt_tokens=len(prompt),
        prompt_ids=request.prompt_ids,
        target_passes=2,
        drafted=4,
        accepted=2,
        # One token of the prefill; then the rest, of which the last is the target's own.
        accepted_by_pass=(0, max(0, tokens - 2)) if tokens > 1 else (0,),
    )


def _best(count: int, tokens: int) -> tuple[tuple[tuple[int, float], ...], ...]:
    """As many best tokens at each place: ids from 0 on, each half as likely as the one before."""
    return tuple(tuple((n, -float(n)) for n in range(count)) for _ in range(tokens))


def build_fake(spec: EngineSpec) -> FakeEngine:
    """The engine factory of tests; importable, so that actors find it by name."""
    return FakeEngine(spec)


def build_refused(spec: EngineSpec) -> FakeEngine:
    raise ConfigError(f"speculation.head: does not fit {spec.model}")


def build_broken(spec: EngineSpec) -> FakeEngine:
    raise RuntimeError("no kernel image is available")


def build_quick_to_die(spec: EngineSpec) -> FakeEngine:
    os.kill(os.getpid(), signal.SIGKILL)
    return FakeEngine(spec)


def build_slow(spec: EngineSpec) -> FakeEngine:
    """Slow enough that a test can interfere."""
    engine = FakeEngine(spec)
    engine.step_s = 0.15
    return engine


def build_slow_once(marker: str, spec: EngineSpec) -> FakeEngine:
    """The first worker to come is slow, the others are ten times as fast."""
    engine = FakeEngine(spec)
    engine.step_s = 0.02
    with contextlib.suppress(FileExistsError), Path(marker).open("x"):
        engine.step_s = 0.2
    return engine
