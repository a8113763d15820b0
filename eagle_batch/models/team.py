"""A team of threads that shares the work of one pass, unit by unit.

A pass is a row of phases, each with a number of units. Every thread walks through all phases: it
claims units until none is left, and goes on when all of them are done. Nobody waits for a thread
that holds no unit, not even at the end, so a team is hardly slower than its first thread where the
other cores are busy with something else.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from eagle_batch.models.compiling import compiled

#: Bytes of a phase's counters: one line of the cache for claims, one for what is done.
_LINE, _PHASE = 64, 128
#: Looks at a counter before the processor is offered to others.
_LOOKS = 256

_instruction: Any = intrinsic
_kernel: Any = compiled(nogil=True)
_yield: Any = types.ExternalFunction("sched_yield", types.int32())


@_instruction
def _increment(_context, _address):
    """Add 1 to the counter at an address; return what it was."""

    def generate(_target, builder, _signature, arguments):
        counter = builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", counter, ir.IntType(64)(1), "acq_rel")

    return types.int64(types.int64), generate


@_instruction
def _read(_context, _address):
    """Return the counter at an address."""

    def generate(_target, builder, _signature, arguments):
        counter = builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())
        return builder.load_atomic(counter, "acquire", 8)

    return types.int64(types.int64), generate


@_kernel
def claim(counters, phase):
    """Return the next unit of a phase; there may be fewer units than that."""
    return _increment(counters + phase * _PHASE)


@_kernel
def finish(counters, phase):
    """Say that a claimed unit is done."""
    _increment(counters + phase * _PHASE + _LINE)


@_kernel
def settle(counters, phase, units):
    """Wait until all units of a phase are done."""
    looks = 0
    while _read(counters + phase * _PHASE + _LINE) < units:
        looks += 1
        if looks > _LOOKS:
            _yield()


class Team:
    """Threads that run a kernel together."""

    def __init__(self, workers: int) -> None:
        #: Threads, the caller's own among them.
        self.workers = workers
        self._helpers = ThreadPoolExecutor(workers - 1, "kernels") if workers > 1 else None

    def run(self, kernel: Any, phases: int, *arguments: Any) -> None:
        """Run `kernel(rank, counters, *arguments)` in every thread, until all phases are done.

        The kernel runs without the interpreter's lock; it may write only under a claim, and between
        two phases only what is its thread's own.
        """
        # Of this pass alone: a thread that comes late finds nothing left to claim.
        shared = np.zeros(phases * _PHASE, np.uint8)
        helpers = [
            self._helpers.submit(_help, kernel, rank, shared, arguments)
            for rank in range(1, self.workers)
            if self._helpers is not None
        ]
        kernel(0, shared.ctypes.data, *arguments)
        for helper in helpers:
            helper.cancel()


def _help(kernel: Any, rank: int, shared: Any, arguments: tuple[Any, ...]) -> None:
    """Run a kernel in another thread, which keeps alive what it may look at."""
    kernel(rank, shared.ctypes.data, *arguments)
