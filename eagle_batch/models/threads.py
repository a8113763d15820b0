"""Compiled kernels on the threads that torch has already.

torch and oneDNN share one pool of OpenMP threads, which wait for work in a busy loop. A second
pool, such as numba's own, would fight with it for every core. So a kernel asks the very OpenMP
library that torch has loaded to run it; where there is none, it runs on the caller's thread alone.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any

import torch
from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

#: Name that compiled kernels call, so that they are the same with OpenMP and without.
_FORK = "eagle_batch_fork"
_WORK = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_instruction: Any = intrinsic


@ctypes.CFUNCTYPE(None, _WORK, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
def _alone(work, data, _threads, _flags):
    """Stand in for `GOMP_parallel`."""
    work(data)


def _find_fork():
    """Return `GOMP_parallel` of torch's OpenMP library: fn(data) on so many threads at once."""
    for path in sorted((Path(torch.__file__).parent / "lib").glob("libgomp*")):
        try:
            return ctypes.CDLL(str(path), mode=os.RTLD_NOLOAD | os.RTLD_NOW).GOMP_parallel
        except (OSError, AttributeError):  # not the one in use
            continue
    return _alone


_fork = _find_fork()
binding.add_symbol(_FORK, ctypes.cast(_fork, ctypes.c_void_p).value)


@_instruction
def on_threads(typing_context, work, arguments, count, threads):
    """Call work(arguments, worker, item) once for every item below `count`.

    Items go to whichever thread is free next. worker: less than `threads`; no two threads have the
    same at a time.
    """
    inner = work.get_call_type(typing_context, (arguments, types.intp, types.intp), {})

    def generate(context, builder, _signature, values):
        frame = _Frame(builder, values[1].type)
        compiled = work.dispatcher.get_compile_result(inner)
        context.active_code_library.add_linking_library(compiled.library)
        function = context.declare_function(builder.module, compiled.fndesc)

        def call(inside, argument, worker, item):
            context.call_conv.call_function(
                inside, function, types.none, inner.args, (argument, worker, item)
            )

        body = _worker(builder.module, frame, call)
        frame.fill(builder, values[1], values[2])
        _call_fork(builder, body, frame, values[3])
        return context.get_dummy_value()

    return types.void(work, arguments, count, threads), generate


class _Frame:
    """What all threads share: the next worker and item, how many items there are, the arguments."""

    WORKER, ITEM, COUNT, ARGUMENTS = range(4)

    def __init__(self, builder, argument):
        self.word = ir.IntType(64)
        self.type = ir.LiteralStructType((self.word, self.word, self.word, argument))
        self.place = cgutils.alloca_once(builder, self.type)

    def part(self, builder, place, index):
        """Return a pointer to one of the parts."""
        i32 = ir.IntType(32)
        return builder.gep(place, (ir.Constant(i32, 0), ir.Constant(i32, index)))

    def fill(self, builder, argument, count):
        """Set everything at the start of a call."""
        zero = ir.Constant(self.word, 0)
        for index, value in enumerate((zero, zero, count, argument)):
            builder.store(value, self.part(builder, self.place, index))


def _worker(module, frame, call):
    """Return what each thread runs: it takes items until none is left."""
    kind = ir.FunctionType(ir.VoidType(), (cgutils.voidptr_t,))
    function = ir.Function(module, kind, module.get_unique_name("on_thread"))
    function.linkage = "internal"
    entry, head, body, end = (
        function.append_basic_block(name) for name in ("entry", "head", "body", "end")
    )
    builder = ir.IRBuilder(entry)
    place = builder.bitcast(function.args[0], frame.type.as_pointer())

    def take(index):
        one = ir.Constant(frame.word, 1)
        return builder.atomic_rmw("add", frame.part(builder, place, index), one, "monotonic")

    worker = take(frame.WORKER)
    count = builder.load(frame.part(builder, place, frame.COUNT))
    argument = builder.load(frame.part(builder, place, frame.ARGUMENTS))
    builder.branch(head)
    builder.position_at_end(head)
    item = take(frame.ITEM)
    builder.cbranch(builder.icmp_signed("<", item, count), body, end)
    builder.position_at_end(body)
    call(builder, argument, worker, item)
    builder.branch(head)
    builder.position_at_end(end)
    builder.ret_void()
    return function


def _call_fork(builder, body, frame, threads):
    i32 = ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), (body.type, cgutils.voidptr_t, i32, i32))
    fork = cgutils.get_or_insert_function(builder.module, kind, _FORK)
    data = builder.bitcast(frame.place, cgutils.voidptr_t)
    builder.call(fork, (body, data, builder.trunc(threads, i32), ir.Constant(i32, 0)))
