"""Ctrl-C and SIGTERM: the first asks the job to stop, the second ends the process at once."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self

from eagle_batch.errors import ExitCode

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """While entered, turns the first signal into `requested`; used by the main thread only."""

    def __init__(self) -> None:
        self.requested = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._handle) for number in SIGNALS}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002 - signature
        if self.requested:
            # Objects are put whole or not at all, so nothing is torn by going now.
            os._exit(ExitCode.INTERRUPTED)
        self.requested = True
