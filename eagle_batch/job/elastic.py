"""An engine that halves its slots when the memory is full, and goes on.

The requests that were under way are given to the smaller engine, which begins them again: their
text does not depend on the number of slots. Only with one slot left is running out of memory final.
"""

from __future__ import annotations

import gc
import sys
from dataclasses import replace

from eagle_batch.engine.request import Completion, EngineMetrics, EngineSpec, Request
from eagle_batch.job.spec import EngineFactory, EngineLike, Tokenizer

#: What torch says, beside the classes that it has for it on some devices.
SAID = ("out of memory", "not enough memory", "can't allocate memory")


def is_out_of_memory(error: Exception) -> bool:
    """Tell whether an exception says that the device's or the host's memory is full."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and any(text in str(error).lower() for text in SAID)


class ElasticEngine:
    """See `eagle_batch.job.spec.EngineLike`."""

    def __init__(self, build: EngineFactory, spec: EngineSpec) -> None:
        """Build an engine, with fewer slots than asked for where the memory is too small."""
        self._make = build
        self._spec = spec
        #: Every request in the engine, in the order they came.
        self._requests: dict[str, Request] = {}
        #: Counters of the engines before.
        self._before = EngineMetrics()
        #: What is to be told to the user.
        self.notices: list[str] = []
        self._engine: EngineLike | None = None
        self._rebuild()

    @property
    def _now(self) -> EngineLike:
        assert self._engine is not None
        return self._engine

    @property
    def tokenizer(self) -> Tokenizer:
        """The target's tokenizer."""
        return self._now.tokenizer

    @property
    def slots(self) -> int:
        """Rows that are decoded together at most, now."""
        return self._now.slots

    @property
    def sizing(self) -> str:
        """Why there are so many slots, for people."""
        return self._now.sizing

    @property
    def waiting(self) -> int:
        """Requests that have no slot yet."""
        return self._now.waiting

    @property
    def has_work(self) -> bool:
        """Whether `step` would do anything."""
        return self._now.has_work

    def add(self, request: Request) -> None:
        """Queue a request; raises RequestError when the row can never run."""
        self._now.add(request)
        self._requests[request.id] = request

    def step(self) -> list[Completion]:
        """Do one piece of work; return what finished, which is nothing when the memory was full."""
        try:
            completions = self._now.step()
        except Exception as error:
            if not is_out_of_memory(error) or self.slots == 1:
                raise
            message = _first_line(error)
        else:
            for completion in completions:
                self._requests.pop(completion.request_id, None)
            return completions
        # Out of the handler: the exception's frames hold the tensors that are to be freed.
        self._before = self._before + self._now.metrics()
        self._halve(message, self.slots)
        self._rebuild()
        for request in self._requests.values():
            self._now.add(request)
        return []

    def metrics(self) -> EngineMetrics:
        """Return the counters since the first engine was built."""
        return self._before + self._now.metrics()

    def use_head(self, name: str) -> bool:
        """Draft with another head from now on; return False where that cannot be."""
        try:
            self._now.use_head(name)
        except Exception as error:  # noqa: BLE001 - no row may be lost over a head
            self.notices.append(f"the head {name} is not used: {_first_line(error)}")
            return False
        self._spec = self._spec.with_head(name)
        return True

    def _rebuild(self) -> None:
        while self._engine is None:
            try:
                self._engine = self._make(self._spec)
            except Exception as error:
                if not is_out_of_memory(error) or self._spec.slots == 1:
                    raise
                message = _first_line(error)
            else:
                if self._spec.fit_slots:
                    self.notices.append(f"engine.slots: auto took {self.slots}: {self.sizing}")
                return
            self._halve(message, self._spec.slots)

    def _halve(self, message: str, slots: int) -> None:
        self._engine = None
        _free()
        self._spec = replace(self._spec, slots=slots // 2, fit_slots=False)
        self.notices.append(
            f"out of memory ({message}): goes on with {self._spec.slots} slots; set engine.slots "
            "or target.context lower to begin with what fits"
        )


def _first_line(error: Exception) -> str:
    text = str(error).strip().split("\n")[0][:200]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _free() -> None:
    """Give back what nobody holds; torch is asked only where an engine has loaded it."""
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()
