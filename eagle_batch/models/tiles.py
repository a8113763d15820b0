"""Dot products of a few rows of a weight with a few rows of activations, in vector registers.

A weight is read as it lies in memory, `[outputs, inputs]`, and once for up to eight rows: what so
few take is what it takes to read the weight. The sum of an output runs over the inputs
in one order whatever the number of rows, so what a token gets does not depend on its neighbours.

Weights are float32, or bfloat16 as its bits in uint16; activations and sums are float32. Places in
memory are addresses, and steps between rows are bytes: a view of an array costs more than a tile.
"""

from __future__ import annotations

from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import literally, njit, types  # type: ignore[attr-defined]
from numba.core import cgutils
from numba.extending import intrinsic

#: Elements of a vector register.
LANES = 16 if llvm.get_host_cpu_features().get("avx512f") else 8
#: The inputs of a weight must be a multiple of this.
INPUTS = 16

_I8, _I16, _I32, _I64, _F32 = *(ir.IntType(bits) for bits in (8, 16, 32, 64)), ir.FloatType()
_FLOATS, _INTS, _HALVES = (ir.VectorType(kind, LANES) for kind in (_F32, _I32, _I16))
_kernel: Any = njit(nogil=True, cache=True)
_literal: Any = intrinsic(prefer_literal=True)


@_literal
def _tile(_context, outputs, rows, _w, _w_step, _x, _x_step, _inputs, _out, _out_step, like):
    """Write `out[r, o] = w[o] . x[r]` for so many outputs and rows, both constants."""

    def generate(context, builder, _signature, arguments):
        _, _, w, w_step, x, x_step, inputs, out, out_step, _ = arguments
        # Copies of the function around it would only be compiled for long.
        builder.function.attributes.add("noinline")
        emit = _Emitter(builder, 4 if like == types.float32 else 2)
        columns, lines = range(outputs.literal_value), range(rows.literal_value)
        sums = emit.sums(
            [emit.place(w, w_step, o) for o in columns],
            [emit.place(w, w_step, len(columns) + o) for o in columns],
            [emit.place(x, x_step, r) for r in lines],
            inputs,
        )
        for r in lines:
            for o in columns:
                emit.store_total(emit.place(out, out_step, r), o, sums[r * len(columns) + o])
        return context.get_dummy_value()

    return types.void(outputs, rows, *[types.int64] * 7, like), generate


class _Emitter:
    """Writes the instructions of a tile."""

    def __init__(self, builder, size):
        self._builder = builder
        #: Bytes of an element of the weight.
        self._size = size

    def place(self, address, step, count):
        return self._builder.add(address, self._builder.mul(step, _I64(count)))

    def sums(self, weights, ahead, activations, inputs):
        """Run over the inputs, a register at a time; return the sums, row by row.

        ahead: rows that are needed next. There are more than the hardware follows by itself.
        """
        builder = self._builder
        before = builder.block
        body, after = builder.append_basic_block("inputs"), builder.append_basic_block("sums")
        builder.branch(body)
        builder.position_at_end(body)
        k = builder.phi(_I64)
        sums = [builder.phi(_FLOATS) for _ in range(len(weights) * len(activations))]
        self._prefetch(ahead, k)
        found = self._step(weights, activations, k, sums)
        following = builder.add(k, _I64(LANES))
        k.add_incoming(_I64(0), before)
        k.add_incoming(following, body)
        for each, value in zip(sums, found, strict=True):
            each.add_incoming(_FLOATS([0.0] * LANES), before)
            each.add_incoming(value, body)
        builder.cbranch(builder.icmp_signed("<", following, inputs), body, after)
        builder.position_at_end(after)
        return found

    def store_total(self, row, o, lanes):
        """Store the sum over the lanes as output o of a row."""
        kind = ir.FunctionType(_F32, [_F32, _FLOATS])
        add = self._function(f"llvm.vector.reduce.fadd.v{LANES}f32", kind)
        total = self._builder.call(add, [_F32(-0.0), lanes], fastmath=("reassoc",))
        self._builder.store(total, self._pointer(row, _I64(4 * o), _F32), align=4)

    def _step(self, weights, activations, k, sums):
        """Multiply and add one register of inputs."""
        multiply_add = self._function(
            f"llvm.fma.v{LANES}f32", ir.FunctionType(_FLOATS, [_FLOATS] * 3)
        )
        at = self._builder.mul(k, _I64(self._size))
        loaded = [self._weight(w, at) for w in weights]
        found = []
        for r, row in enumerate(activations):
            x = self._load(row, self._builder.mul(k, _I64(4)), _FLOATS, 4)
            of_row = sums[r * len(weights) :]
            found += [
                self._builder.call(multiply_add, [w, x, s])
                for w, s in zip(loaded, of_row, strict=False)
            ]
        return found

    def _weight(self, row, at):
        if self._size == 4:
            return self._load(row, at, _FLOATS, 4)
        bits = self._builder.zext(self._load(row, at, _HALVES, 2), _INTS)
        return self._builder.bitcast(self._builder.shl(bits, _INTS([16] * LANES)), _FLOATS)

    def _prefetch(self, rows, k):
        kind = ir.FunctionType(ir.VoidType(), [_I8.as_pointer(), *[_I32] * 3])
        fetch = self._function("llvm.prefetch.p0", kind)
        at = self._builder.mul(k, _I64(self._size))
        for row in rows:
            # To read, for all caches, data.
            self._builder.call(fetch, [self._pointer(row, at, _I8), _I32(0), _I32(3), _I32(1)])

    def _load(self, row, at, kind, align):
        return self._builder.load(self._pointer(row, at, kind), align=align)

    def _pointer(self, row, at, kind):
        return self._builder.inttoptr(self._builder.add(row, at), kind.as_pointer())

    def _function(self, name, kind):
        return cgutils.get_or_insert_function(self._builder.module, kind, name)


@_kernel
def _across(tile, rows, w, step, outputs, x, x_step, inputs, out, out_step, like):
    """Multiply so many rows, a constant, with as many outputs as fill tiles; return how many."""
    o = 0
    while o <= outputs - tile:
        place, to = w + o * step, out + 4 * o
        _tile(literally(tile), literally(rows), place, step, x, x_step, inputs, to, out_step, like)
        o += tile
    return o


@_kernel
def _multiply_block(rows, w, step, outputs, x, x_step, inputs, out, out_step, like):
    """Multiply up to eight rows; return for how many outputs."""
    # Eight to twelve sums are in flight, which hides the latency of each, and fit the registers.
    if rows == 1:
        done = _across(12, 1, w, step, outputs, x, x_step, inputs, out, out_step, like)
    elif rows == 2:
        done = _across(6, 2, w, step, outputs, x, x_step, inputs, out, out_step, like)
    elif rows == 3:
        done = _across(4, 3, w, step, outputs, x, x_step, inputs, out, out_step, like)
    elif rows == 4:
        done = _across(3, 4, w, step, outputs, x, x_step, inputs, out, out_step, like)
    elif rows == 5:
        done = _across(2, 5, w, step, outputs, x, x_step, inputs, out, out_step, like)
    elif rows == 6:
        done = _across(2, 6, w, step, outputs, x, x_step, inputs, out, out_step, like)
    elif rows == 7:
        done = _across(1, 7, w, step, outputs, x, x_step, inputs, out, out_step, like)
    else:
        done = _across(1, 8, w, step, outputs, x, x_step, inputs, out, out_step, like)
    return done


@_kernel
def multiply(w, step, outputs, x, x_step, rows, inputs, out, out_step, like):
    """Write `out = x @ w.T` for `outputs` rows of a weight and `rows` rows of activations.

    w, x, out: addresses of the first elements; steps in bytes. like: an element of the weight.
    """
    row = 0
    while row < rows:
        # Up to eight rows wait for the weight together; more are computed four by four.
        count = rows - row if rows - row <= 8 else 4
        a, to = x + row * x_step, out + row * out_step
        done = _multiply_block(count, w, step, outputs, a, x_step, inputs, to, out_step, like)
        for o in range(done, outputs):
            for r in range(count):
                place = to + r * out_step + 4 * o
                _tile(1, 1, w + o * step, step, a + r * x_step, 0, inputs, place, 0, like)
        row += count
