"""Products of a few rows with a few others in vector registers: dot products and weighted sums.

A weight is read as it lies in memory, `[outputs, inputs]`, and once for up to eight rows: what so
few take is what it takes to read the weight. The sum of an output runs over the inputs
in one order whatever the number of rows, so what a token gets does not depend on its neighbours.

Weights are float32, or bfloat16 as its bits in uint16. Activations are float32, or bfloat16 too
where the weights are and the processor multiplies pairs of them itself; sums are float32. Places in
memory are addresses, and steps between rows are bytes: a view of an array costs more than a tile.
"""

from __future__ import annotations

from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import literally, types  # type: ignore[attr-defined]
from numba.core import cgutils
from numba.extending import intrinsic

from eagle_batch.models.compiling import compiled

#: Elements of a vector register.
LANES = 16 if llvm.get_host_cpu_features().get("avx512f") else 8
#: The inputs of a weight must be a multiple of this.
INPUTS = 16
#: Whether the processor adds up products of pairs in bfloat16, and inputs must be a multiple of
#: what for that.
PAIRS, PAIR_INPUTS = bool(llvm.get_host_cpu_features().get("avx512bf16")), 2 * 16


class _Brain(ir.Type):  # type: ignore[misc]
    """The type bfloat, which llvmlite has no name for."""

    def _to_string(self):
        return "bfloat"


_I8, _I16, _I32, _I64, _F32 = *(ir.IntType(bits) for bits in (8, 16, 32, 64)), ir.FloatType()
_FLOATS, _INTS, _HALVES = (ir.VectorType(kind, LANES) for kind in (_F32, _I32, _I16))
_BRAINS = ir.VectorType(_Brain(), 2 * LANES)
#: Rows of activations that a tile has at most.
MOST_ROWS = 8
#: Outputs of a tile by its rows. Sums in flight hide the latency of each, and all must fit the
#: registers, of which AVX-512 has 32 and others 16.
_BY_1, _BY_2, _BY_3, _BY_4, _BY_5, _BY_6, _BY_7, _BY_8 = (
    (12, 6, 6, 4, 4, 4, 3, 3) if LANES == 16 else (12, 6, 4, 3, 2, 2, 1, 1)
)
#: Rows of a weight by which memory is read ahead of the sums.
_AHEAD = 24
#: Vectors and rows of a tile of weighted sums.
_ACROSS, _DOWN = 4, 6 if LANES == 16 else 3
_kernel: Any = compiled(nogil=True)
_literal: Any = intrinsic(prefer_literal=True)


@_literal
def _tile(
    _context, outputs, rows, _w, _w_step, _x, _x_step, _inputs, _out, _out_step, like, x_like
):
    """Write `out[r, o] = w[o] . x[r]` for so many outputs and rows, both constants."""

    def generate(context, builder, _signature, arguments):
        _, _, w, w_step, x, x_step, inputs, out, out_step, _, _ = arguments
        # Copies of the function around it would only be compiled for long.
        builder.function.attributes.add("noinline")
        emit = _emitter(builder, like, x_like)
        columns, lines = range(outputs.literal_value), range(rows.literal_value)
        sums = emit.sums(
            [emit.place(w, w_step, o) for o in columns],
            [emit.place(w, w_step, _AHEAD + o) for o in columns],
            [emit.place(x, x_step, r) for r in lines],
            inputs,
        )
        for r in lines:
            of_row = sums[r * len(columns) : (r + 1) * len(columns)]
            emit.store_totals(emit.place(out, out_step, r), of_row)
        return context.get_dummy_value()

    return types.void(outputs, rows, *[types.int64] * 7, like, x_like), generate


def _emitter(builder, like, x_like):
    """Return what writes a tile for weights and activations of these kinds."""
    if x_like != types.float32:
        assert like == x_like, "only weights in bfloat16 meet activations in bfloat16"
        return _PairEmitter(builder, 2)
    return _Emitter(builder, 4 if like == types.float32 else 2)


class _Emitter:
    """Writes the instructions of a tile whose activations are float32."""

    #: Inputs that one step multiplies.
    width = LANES

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

        def turn(places, sums):
            (k,) = places
            self._prefetch(ahead, k)
            return self._step(weights, activations, k, sums)

        many = len(weights) * len(activations)
        return self._loop(many, inputs, [(_I64(0), _I64(self.width))], turn)

    def blend(self, vectors, values, step, count, weights):
        """Run over the rows of values; return their weighted sums, row by row."""

        def turn(places, sums):
            t, value = places
            size = _I64(self._size * LANES)
            loaded = [self._weight(value, self._builder.mul(size, _I64(v))) for v in range(vectors)]
            factors = [self._spread(row, t) for row in weights]
            return [
                self._multiply_add(loaded[i % vectors], factors[i // vectors], each)
                for i, each in enumerate(sums)
            ]

        counters = [(_I64(0), _I64(1)), (values, step)]
        return self._loop(vectors * len(weights), count, counters, turn)

    def _loop(self, many, stop, counters, turn):
        """Add up so many sums, turn by turn, until the first counter is not below the stop.

        counters: start and step of each. turn: counters and sums -> the sums after it.
        """
        builder = self._builder
        before = builder.block
        body, after = builder.append_basic_block("turn"), builder.append_basic_block("sums")
        builder.branch(body)
        builder.position_at_end(body)
        places = [builder.phi(_I64) for _ in counters]
        sums = [builder.phi(_FLOATS) for _ in range(many)]
        found = turn(places, sums)
        following = [
            builder.add(place, step) for place, (_, step) in zip(places, counters, strict=True)
        ]
        starts = [*(start for start, _ in counters), *[_FLOATS([0.0] * LANES)] * many]
        for each, start, end in zip(places + sums, starts, following + found, strict=True):
            each.add_incoming(start, before)
            each.add_incoming(end, body)
        builder.cbranch(builder.icmp_signed("<", following[0], stop), body, after)
        builder.position_at_end(after)
        return found

    def _spread(self, row, t):
        """Load element t of a row into all lanes."""
        value = self._load(row, self._builder.mul(t, _I64(4)), _F32, 4)
        single = self._builder.insert_element(_FLOATS(ir.Undefined), value, _I32(0))
        return self._picked(single, single, [0] * LANES)

    def store_totals(self, place, sums):
        """Store the sum over the lanes of each, side by side.

        Neighbours are added, then sums of two, and so on: in the same order for any number of sums.
        """
        for first in range(LANES, len(sums), LANES):
            to = self._builder.add(place, _I64(4 * first))
            self.store_totals(to, sums[first : first + LANES])
        sums = sums[:LANES]
        vectors, lanes = sums, LANES
        while lanes > 1:
            vectors = [self._halved(vectors[at : at + 2]) for at in range(0, len(vectors), 2)]
            lanes //= 2
        (totals,) = vectors
        self.store(place, self._picked(totals, totals, range(len(sums))))

    def store(self, place, vector):
        self._builder.store(vector, self._pointer(place, _I64(0), vector.type), align=4)

    def _halved(self, pair):
        """Add the neighbours of one or two vectors; return the sums of both in one vector."""
        first, second = pair[0], pair[-1]
        even = self._picked(first, second, range(0, 2 * LANES, 2))
        odd = self._picked(first, second, range(1, 2 * LANES, 2))
        return self._builder.fadd(even, odd)

    def _picked(self, first, second, lanes):
        mask = ir.VectorType(_I32, len(lanes))(list(lanes))
        return self._builder.shuffle_vector(first, second, mask)

    def _step(self, weights, activations, k, sums):
        """Multiply and add one register of inputs."""
        at = self._builder.mul(k, _I64(self._size))
        loaded = [self._weight(w, at) for w in weights]
        found = []
        for r, row in enumerate(activations):
            x = self._activation(row, k)
            of_row = sums[r * len(weights) :]
            found += [self._multiply_add(w, x, s) for w, s in zip(loaded, of_row, strict=False)]
        return found

    def _multiply_add(self, weight, x, total):
        kind = ir.FunctionType(_FLOATS, [_FLOATS] * 3)
        return self._builder.call(self._function(f"llvm.fma.v{LANES}f32", kind), [weight, x, total])

    def _activation(self, row, k):
        return self._load(row, self._builder.mul(k, _I64(4)), _FLOATS, 4)

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
            # To read, for the second cache, data: more may be under way to it than to the first.
            self._builder.call(fetch, [self._pointer(row, at, _I8), _I32(0), _I32(2), _I32(1)])

    def _load(self, row, at, kind, align):
        return self._builder.load(self._pointer(row, at, kind), align=align)

    def _pointer(self, row, at, kind):
        return self._builder.inttoptr(self._builder.add(row, at), kind.as_pointer())

    def _function(self, name, kind):
        return cgutils.get_or_insert_function(self._builder.module, kind, name)


class _PairEmitter(_Emitter):
    """Writes the instructions of a tile of bfloat16 alone: two products an element of a sum."""

    width = 2 * LANES

    def _multiply_add(self, weight, x, total):
        kind = ir.FunctionType(_FLOATS, [_FLOATS, _BRAINS, _BRAINS])
        name = f"llvm.x86.avx512bf16.dpbf16ps.{32 * LANES}"
        return self._builder.call(self._function(name, kind), [total, weight, x])

    def _activation(self, row, k):
        return self._load(row, self._builder.mul(k, _I64(2)), _BRAINS, 2)

    def _weight(self, row, at):
        return self._load(row, at, _BRAINS, 2)


@_kernel
def _across(tile, rows, w, step, outputs, x, x_step, inputs, out, out_step, like, x_like):
    """Multiply so many rows, a constant, with as many outputs as fill tiles; return how many."""
    o = 0
    while o <= outputs - tile:
        at, to, n, r = w + o * step, out + 4 * o, literally(tile), literally(rows)
        _tile(n, r, at, step, x, x_step, inputs, to, out_step, like, x_like)
        o += tile
    return o


@_kernel
def _multiply_block(rows, w, step, outputs, x, x_step, inputs, out, out_step, like, x_like):
    """Multiply up to eight rows; return for how many outputs."""
    if rows == 1:
        done = _across(_BY_1, 1, w, step, outputs, x, x_step, inputs, out, out_step, like, x_like)
    elif rows == 2:
        done = _across(_BY_2, 2, w, step, outputs, x, x_step, inputs, out, out_step, like, x_like)
    elif rows == 3:
        done = _across(_BY_3, 3, w, step, outputs, x, x_step, inputs, out, out_step, like, x_like)
    elif rows == 4:
        done = _across(_BY_4, 4, w, step, outputs, x, x_step, inputs, out, out_step, like, x_like)
    elif rows == 5:
        done = _across(_BY_5, 5, w, step, outputs, x, x_step, inputs, out, out_step, like, x_like)
    elif rows == 6:
        done = _across(_BY_6, 6, w, step, outputs, x, x_step, inputs, out, out_step, like, x_like)
    elif rows == 7:
        done = _across(_BY_7, 7, w, step, outputs, x, x_step, inputs, out, out_step, like, x_like)
    else:
        done = _across(_BY_8, 8, w, step, outputs, x, x_step, inputs, out, out_step, like, x_like)
    return done


@_literal
def _blend_tile(
    _context, vectors, rows, _values, _step, _count, _weights, _w_step, _out, _out_step, like
):
    """Write `out[r] = sum of weights[r, t] * values[t]` for so many vectors and rows, constants."""

    def generate(context, builder, _signature, arguments):
        _, _, values, step, count, weights, w_step, out, out_step, _ = arguments
        builder.function.attributes.add("noinline")
        emit = _Emitter(builder, 4 if like == types.float32 else 2)
        columns, lines = range(vectors.literal_value), range(rows.literal_value)
        sums = emit.blend(
            len(columns), values, step, count, [emit.place(weights, w_step, r) for r in lines]
        )
        for r in lines:
            for v in columns:
                to = builder.add(emit.place(out, out_step, r), _I64(4 * LANES * v))
                emit.store(to, sums[r * len(columns) + v])
        return context.get_dummy_value()

    return types.void(vectors, rows, *[types.int64] * 7, like), generate


@_kernel
def multiply(w, step, outputs, x, x_step, rows, inputs, out, out_step, like, x_like):
    """Write `out = x @ w.T` for `outputs` rows of a weight and `rows` rows of activations.

    w, x, out: addresses of the first elements; steps in bytes. like, x_like: an element of the
    weight and of the activations.
    """
    row = 0
    while row < rows:
        # Blocks of like height, since high ones do most with what they load.
        blocks = -(-(rows - row) // MOST_ROWS)
        count = -(-(rows - row) // blocks)
        a, to = x + row * x_step, out + row * out_step
        done = _multiply_block(
            count, w, step, outputs, a, x_step, inputs, to, out_step, like, x_like
        )
        for o in range(done, outputs):
            for r in range(count):
                place, y = to + r * out_step + 4 * o, a + r * x_step
                _tile(1, 1, w + o * step, step, y, 0, inputs, place, 0, like, x_like)
        row += count


@_kernel
def _blend_rows(vectors, values, step, count, weights, w_step, rows, out, out_step, like):
    """Blend some vectors of the values, a constant, for all rows."""
    n, row = literally(vectors), 0
    while row < rows:
        at, to = weights + row * w_step, out + row * out_step
        if rows - row >= _DOWN:
            _blend_tile(n, _DOWN, values, step, count, at, w_step, to, out_step, like)
            row += _DOWN
        elif rows - row >= 3:
            _blend_tile(n, 3, values, step, count, at, w_step, to, out_step, like)
            row += 3
        else:
            _blend_tile(n, 1, values, step, count, at, w_step, to, out_step, like)
            row += 1


@_kernel
def blend(values, step, count, size, weights, w_step, rows, out, out_step, like, width):
    """Write `out = weights @ values` for `count` values of `size` elements, one at least.

    values, weights, out: addresses of the first elements; steps in bytes. like: an element of the
    values; width: its bytes.
    """
    done = 0
    while done < size:
        at, to = values + done * width, out + 4 * done
        if size - done >= _ACROSS * LANES:
            _blend_rows(_ACROSS, at, step, count, weights, w_step, rows, to, out_step, like)
            done += _ACROSS * LANES
        else:
            _blend_rows(1, at, step, count, weights, w_step, rows, to, out_step, like)
            done += LANES
