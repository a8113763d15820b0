"""Kernels for decoding on the CPU: all layers of a model in one call.

At small batches a decoder layer is four products over weights that stream from memory, and some
forty small operators whose dispatch costs as much again. Here a team of threads walks through all
layers by itself, five phases a layer, and torch is not asked until the last is done. numba compiles
the kernels once for a machine and keeps the result in its cache; without numba the operators of
torch do the same work.

Weights, keys and values are float32, or bfloat16 as its bits in uint16; what products take in is
float32, or bfloat16 where the processor multiplies that with such weights; all else is float32.

Shape legend: L layers, R rows (tokens of the batch), H hidden size, I width of the feed-forward
layer, Q query heads, G key/value heads, D head size, P = D / 2 pairs of a rotation, X = (Q + 2 * G)
* D, S slots of the cache, C columns of a slot, B rows of the batch, N tokens of each at most, M
scratch columns, J = N * Q / G queries of a row and a group, T places that a token looks at, W
threads, A rows of the inputs of attention, K boundaries whose states are kept.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from eagle_batch.models.compiling import compiled
from eagle_batch.models.team import claim, finish, settle
from eagle_batch.models.tiles import blend, multiply

F32 = np.float32
_LOG2_E = F32(1.4426950408889634)
#: ln 2 in two parts, the first exact in a few bits, so that x - k * ln 2 loses nothing.
_LN2_HIGH, _LN2_LOW = F32(0.693359375), F32(-2.12194440e-4)
#: Adding it to a small float32 leaves the nearest integer in the low bits.
_ROUNDER = F32(12582912.0)

#: Sums may be reordered: they are dot products and means.
_SUMS = {"contract", "nsz", "reassoc", "arcp"}
#: The exponential depends on the order of its operations.
_EXACT = {"contract", "nsz"}
# A division by zero gives infinity, as in torch: a check for it would cost the vector units.
_kernel: Any = compiled(fastmath=_SUMS, error_model="numpy", nogil=True)
_exact: Any = compiled(fastmath=_EXACT, error_model="numpy", nogil=True)
_instruction: Any = intrinsic


@_instruction
def _scaled(_context, _product, _power):
    """Return product * 2^k, where the power is k + _ROUNDER."""

    def generate(_target, builder, _signature, arguments):
        bits = ir.IntType(32)
        exponent = builder.shl(builder.bitcast(arguments[1], bits), ir.Constant(bits, 23))
        total = builder.add(builder.bitcast(arguments[0], bits), exponent)
        return builder.bitcast(total, ir.FloatType())

    return types.float32(types.float32, types.float32), generate


@_instruction
def wide(_context, value):
    """Return an element as float32."""

    def generate(_target, builder, _signature, arguments):
        if value == types.float32:
            return arguments[0]
        bits = builder.zext(arguments[0], ir.IntType(32))
        return builder.bitcast(builder.shl(bits, ir.Constant(bits.type, 16)), ir.FloatType())

    return types.float32(value), generate


@_instruction
def narrow(_context, _value, like):
    """Return a float32 as an element of the kind of `like`, to nearest, ties to even."""

    def generate(_target, builder, _signature, arguments):
        if like == types.float32:
            return arguments[0]
        i32 = ir.IntType(32)
        bits = builder.bitcast(arguments[0], i32)
        odd = builder.and_(builder.lshr(bits, ir.Constant(i32, 16)), ir.Constant(i32, 1))
        rounded = builder.add(builder.add(bits, odd), ir.Constant(i32, 0x7FFF))
        return builder.trunc(builder.lshr(rounded, ir.Constant(i32, 16)), ir.IntType(16))

    return like(types.float32, like), generate


@_exact
def exponential(x):
    """Return e^x to a relative error of 1e-7, for x < 88; the polynomial is that of Cephes."""
    # This way round it keeps what is not a number.
    x = F32(-87.0) if x < F32(-87.0) else x  # noqa: FURB136
    power = x * _LOG2_E + _ROUNDER
    k = power - _ROUNDER
    f = x - k * _LN2_HIGH
    f = f - k * _LN2_LOW
    p = F32(1.9875691500e-4)
    p = p * f + F32(1.3981999507e-3)
    p = p * f + F32(8.3334519073e-3)
    p = p * f + F32(4.1665795894e-2)
    p = p * f + F32(1.6666665459e-1)
    p = p * f + F32(5.0000001201e-1)
    return _scaled(p * f * f + f + F32(1), power)


@_kernel
def normalise(x_RH, weight_H, eps, out_RH):
    """Write the root-mean-square norm of every row, times the weight."""
    for r in range(x_RH.shape[0]):
        normalise_row(x_RH, r, weight_H, eps, out_RH, r, 0)


@_kernel
def normalise_row(x_RH, r, weight_H, eps, out_QA, q, first):
    """Write the norm of row r, times the weight, into row q from column `first` on."""
    like, total = out_QA[0, 0], F32(0)
    for i in range(x_RH.shape[1]):
        x = wide(x_RH[r, i])
        total += x * x
    factor = F32(1) / np.sqrt(total / F32(x_RH.shape[1]) + eps)
    for i in range(x_RH.shape[1]):
        out_QA[q, first + i] = narrow(wide(x_RH[r, i]) * factor * weight_H[i], like)


@_kernel
def gate(both_R2C, rows, half, count, first, out_RI):
    """Write silu(gate) * up for `count` places; the gates of a row stand before place `half`."""
    like = out_RI[0, 0]
    for r in range(rows):
        for i in range(count):
            x = both_R2C[r, i]
            gated = x / (F32(1) + exponential(-x)) * both_R2C[r, half + i]
            out_RI[r, first + i] = narrow(gated, like)


class Place(NamedTuple):
    """Where the tokens of a pass stand."""

    #: float32 [T, P]; rotations, and int64 [R]; which of them is a token's.
    cos_TP: Any
    sin_TP: Any
    rotation_R: Any
    #: int64 [R]; where its keys and values go among the columns of all slots.
    column_R: Any
    #: int64 [B]; the slot of each row.
    slot_B: Any
    #: int64 [B + 1]; the tokens of row b are those from `begin[b]` on, before `begin[b + 1]`.
    begin_E: Any
    #: int64 [B]; committed columns of each row, which all its tokens see.
    base_B: Any
    #: int64 [B]; columns behind them that its tokens may see.
    extra_B: Any
    #: bool [B, N, M]; which of those a token sees, for the most tokens and columns of any row.
    visible_BNM: Any


# The loops below index arrays directly: every view that numba makes counts references, which costs
# more than a row of a head.


@_kernel
def rotate(qkv_RX, place, storage, layer, b, g, scale, q_JD):
    """Rotate the queries of a row and a group; put its keys, rotated, and values into the cache.

    The two elements of a rotation stand side by side; query heads come by their place in a group,
    then by group. Queries are scaled too.
    """
    begin, groups, size = place.begin_E[b], storage.shape[4], storage.shape[5]
    heads = qkv_RX.shape[1] // size - 2 * groups
    members = heads // groups
    like = storage[0, 0, 0, 0, 0, 0]
    for n in range(place.begin_E[b + 1] - begin):
        r = begin + n
        slot, column = divmod(place.column_R[r], storage.shape[2])
        # Padding may stand behind the last position that there is.
        t = min(place.rotation_R[r], place.cos_TP.shape[0] - 1)
        for p in range(size // 2):
            cos, sin = place.cos_TP[t, p], place.sin_TP[t, p]
            for m in range(members):
                at = (m * groups + g) * size + 2 * p
                x, y = qkv_RX[r, at] * scale, qkv_RX[r, at + 1] * scale
                q_JD[n * members + m, 2 * p] = x * cos - y * sin
                q_JD[n * members + m, 2 * p + 1] = y * cos + x * sin
            at = (heads + g) * size + 2 * p
            x, y = qkv_RX[r, at], qkv_RX[r, at + 1]
            storage[layer, slot, column, 0, g, 2 * p] = narrow(x * cos - y * sin, like)
            storage[layer, slot, column, 0, g, 2 * p + 1] = narrow(y * cos + x * sin, like)
            at += groups * size
            storage[layer, slot, column, 1, g, 2 * p] = narrow(qkv_RX[r, at], like)
            storage[layer, slot, column, 1, g, 2 * p + 1] = narrow(qkv_RX[r, at + 1], like)


@_kernel
def _address(storage, layer, slot, kind, g):
    """Return where the first key (kind 0) or value (1) of a slot and a group lies in memory."""
    steps = storage.strides
    place = layer * steps[0] + slot * steps[1] + kind * steps[3] + g * steps[4]
    return storage.ctypes.data + place


@_kernel
def _softmax(scores_JT, j, base, extra, visible_BNM, b, n):
    """Turn scores into weights in place; return what divides their weighted sum."""
    for m in range(extra):
        if not visible_BNM[b, n, m]:
            scores_JT[j, base + m] = F32(-1e30)
    highest = F32(-1e30)
    for t in range(base + extra):
        highest = max(highest, scores_JT[j, t])
    total = F32(0)
    for t in range(base + extra):
        weight = exponential(scores_JT[j, t] - highest)
        scores_JT[j, t] = weight
        total += weight
    for m in range(extra):
        if not visible_BNM[b, n, m]:
            scores_JT[j, base + m] = F32(0)
    return F32(1) / total


@_kernel
def attend(q_JD, place, storage, layer, b, g, scores_JT, sums_JD, out_RQ):
    """Write the attention output of the tokens of a row for the queries of a group.

    q: rotated and scaled. scores, sums: scratch. out: heads in the order of the queries.
    """
    begin, groups, size = place.begin_E[b], storage.shape[4], storage.shape[5]
    like = out_RQ[0, 0]
    tokens = place.begin_E[b + 1] - begin
    members = out_RQ.shape[1] // (groups * size)
    slot, base = place.slot_B[b], place.base_B[b]
    # What stands behind the end of a slot is padding, whose attention nobody reads.
    extra = min(place.extra_B[b], storage.shape[2] - base)
    queries, like_kept = tokens * members, storage[0, 0, 0, 0, 0, 0]
    multiply(
        _address(storage, layer, slot, 0, g),
        storage.strides[2],
        base + extra,
        q_JD.ctypes.data,
        q_JD.strides[0],
        queries,
        size,
        scores_JT.ctypes.data,
        scores_JT.strides[0],
        like_kept,
        q_JD[0, 0],
    )
    for j in range(queries):
        n = j // members
        scores_JT[j, base + extra] = _softmax(scores_JT, j, base, extra, place.visible_BNM, b, n)
    blend(
        _address(storage, layer, slot, 1, g),
        storage.strides[2],
        base + extra,
        size,
        scores_JT.ctypes.data,
        scores_JT.strides[0],
        queries,
        sums_JD.ctypes.data,
        sums_JD.strides[0],
        like_kept,
        storage.itemsize,
    )
    for j in range(queries):
        r, at = begin + j // members, (j % members * groups + g) * size
        for i in range(size):
            out_RQ[r, at + i] = narrow(sums_JD[j, i] * scores_JT[j, base + extra], like)


class Stack(NamedTuple):
    """The weights of all layers."""

    #: int64 [L, 4]; addresses of the matrices qkv, o, gate and up, down, `[outputs, inputs]` each.
    weights_L4: Any
    #: float32 [L, 2, H]; norms before attention and before the feed-forward layer.
    norms_L2H: Any
    #: float32 [L, X]; what is added to queries, keys and values, or [L, 0].
    bias_LX: Any
    eps: Any
    #: What the products of queries and keys are scaled with.
    scale: Any


class Buffers(NamedTuple):
    """Memory of a pass."""

    #: Inputs of products; the last of each thread.
    attended_RQ: Any
    gated_RI: Any
    inputs_WRA: Any
    #: All else is float32. Of each thread: a share of outputs; queries, scores and sums.
    qkv_RX: Any
    share_WRC: Any
    queries_WJD: Any
    scores_WJT: Any
    sums_WJD: Any


#: Outputs of a unit of work at most, and at least; all sizes are multiples of a tile's outputs.
SHARE, _LEAST_SHARE = 48, 12


@_kernel
def share(inputs):
    """Return how many outputs of a matrix make a unit of work: what stays in a core's cache."""
    return SHARE if inputs <= 768 else SHARE // 2 if inputs <= 1536 else SHARE // 4


@_kernel
def multiply_part(w, row, outputs, inputs, x_RA, rows, out_RC, first, kind):
    """Multiply with `outputs` rows of the matrix at `w`; write from column `first` on."""
    step = inputs * kind.itemsize
    out = out_RC.ctypes.data + first * out_RC.itemsize
    multiply(
        w + row * step,
        step,
        outputs,
        x_RA.ctypes.data,
        x_RA.strides[0],
        rows,
        inputs,
        out,
        out_RC.strides[0],
        kind[0],
        x_RA[0, 0],
    )


@_kernel
def _project(rank, counters, phase, stack, layer, buffers, x_RH, given_RA, kind):
    """Write queries, keys and values of all rows."""
    rows, outputs = x_RH.shape[0], buffers.qkv_RX.shape[1]
    given = layer == 0 and given_RA.shape[0] > 0
    inputs = given_RA.shape[1] if given else x_RH.shape[1]
    x_RA = given_RA if given else buffers.inputs_WRA[rank]
    size = share(inputs)
    units = -(-outputs // size)
    unit = claim(counters, phase)
    if unit < units and not given:
        normalise(x_RH, stack.norms_L2H[layer, 0], stack.eps, x_RA)
    while unit < units:
        first = unit * size
        count, w = min(size, outputs - first), stack.weights_L4[layer, 0]
        multiply_part(w, first, count, inputs, x_RA, rows, buffers.qkv_RX, first, kind)
        if stack.bias_LX.shape[1]:
            for r in range(rows):
                for o in range(first, first + count):
                    buffers.qkv_RX[r, o] += stack.bias_LX[layer, o]
        finish(counters, phase)
        unit = claim(counters, phase)
    settle(counters, phase, units)


@_kernel
def _look(rank, counters, phase, stack, layer, place, storage, buffers):
    """Attend: a unit is a row and a group."""
    groups = storage.shape[4]
    units = place.base_B.shape[0] * groups
    unit = claim(counters, phase)
    queries, scores = buffers.queries_WJD[rank], buffers.scores_WJT[rank]
    sums = buffers.sums_WJD[rank]
    while unit < units:
        b, g = divmod(unit, groups)
        rotate(buffers.qkv_RX, place, storage, layer, b, g, stack.scale, queries)
        attend(queries, place, storage, layer, b, g, scores, sums, buffers.attended_RQ)
        finish(counters, phase)
        unit = claim(counters, phase)
    settle(counters, phase, units)


@_kernel
def _add(rank, counters, phase, w, inputs_RA, buffers, x_RH, kind):
    """Add the product of a matrix to the residual stream."""
    (rows, outputs), inputs = x_RH.shape, inputs_RA.shape[1]
    size, part_RC = share(inputs), buffers.share_WRC[rank]
    units = -(-outputs // size)
    unit = claim(counters, phase)
    while unit < units:
        first = unit * size
        count = min(size, outputs - first)
        multiply_part(w, first, count, inputs, inputs_RA, rows, part_RC, 0, kind)
        for r in range(rows):
            for o in range(count):
                x_RH[r, first + o] += part_RC[r, o]
        finish(counters, phase)
        unit = claim(counters, phase)
    settle(counters, phase, units)


@_kernel
def _feed(rank, counters, phase, stack, layer, buffers, x_RH, kind):
    """Write what the feed-forward layer multiplies last: silu(gate) * up."""
    (rows, inputs), outputs = x_RH.shape, buffers.gated_RI.shape[1]
    x_RA, part_RC = buffers.inputs_WRA[rank], buffers.share_WRC[rank]
    # The gates of a unit and what they gate are two parts of the matrix.
    size, w = max(share(inputs) // 2, _LEAST_SHARE), stack.weights_L4[layer, 2]
    units = -(-outputs // size)
    unit = claim(counters, phase)
    if unit < units:
        normalise(x_RH, stack.norms_L2H[layer, 1], stack.eps, x_RA)
    while unit < units:
        first = unit * size
        count = min(size, outputs - first)
        multiply_part(w, first, count, inputs, x_RA, rows, part_RC, 0, kind)
        multiply_part(w, outputs + first, count, inputs, x_RA, rows, part_RC, size, kind)
        gate(part_RC, rows, size, count, first, buffers.gated_RI)
        finish(counters, phase)
        unit = claim(counters, phase)
    settle(counters, phase, units)


@_kernel
def _keep(counters, phase, boundary, x_RH, keep_K, kept_RF):
    """Keep the residual stream where somebody asks for it at this boundary."""
    rows, hidden = x_RH.shape
    for k in range(keep_K.shape[0]):
        if keep_K[k] == boundary:
            if claim(counters, phase) == 0:
                for r in range(rows):
                    for i in range(hidden):
                        kept_RF[r, k * hidden + i] = x_RH[r, i]
                finish(counters, phase)
            settle(counters, phase, 1)


#: Phases of a layer.
PHASES = 6


@_kernel
def score(rank, counters, phase, w, norm_H, eps, buffers, x_RH, out_RO, kind):
    """Multiply the norm of the residual stream with the matrix at an address."""
    (rows, inputs), x_RA, unit = x_RH.shape, buffers.inputs_WRA[rank], claim(counters, phase)
    if unit * share(inputs) < out_RO.shape[1]:
        normalise(x_RH, norm_H, eps, x_RA)
    _multiply_from(unit, counters, phase, w, x_RA, rows, inputs, out_RO, kind)


@_kernel
def run_layer(rank, counters, phase, stack, layer, place, storage, buffers, x_RH, given_RA, kind):
    """Run the residual stream through one layer: five phases from `phase` on; see `decode`."""
    weights_4 = stack.weights_L4[layer]
    _project(rank, counters, phase, stack, layer, buffers, x_RH, given_RA, kind)
    _look(rank, counters, phase + 1, stack, layer, place, storage, buffers)
    _add(rank, counters, phase + 2, weights_4[1], buffers.attended_RQ, buffers, x_RH, kind)
    _feed(rank, counters, phase + 3, stack, layer, buffers, x_RH, kind)
    _add(rank, counters, phase + 4, weights_4[3], buffers.gated_RI, buffers, x_RH, kind)


@_kernel
def decode(rank, counters, stack, place, storage, buffers, x_RH, given_RA, keep_K, kept_RF, kind):
    """Run the residual stream `x` through all layers, in place; put keys and values into the cache.

    counters: of the team. storage: `[L, S, C, 2, G, D]`. given: what the attention of the first
    layer takes in; empty for the norm of x, as in all other layers. keep: boundaries, k being the
    input of layer k, whose states go to `kept`, one behind the other. kind: any elements of the
    kind of the weights.
    """
    for layer in range(stack.weights_L4.shape[0]):
        phase = PHASES * layer
        _keep(counters, phase, layer, x_RH, keep_K, kept_RF)
        run_layer(
            rank, counters, phase + 1, stack, layer, place, storage, buffers, x_RH, given_RA, kind
        )


@_kernel
def product(_rank, counters, w, x_RA, out_RO, kind):
    """Write `x @ w.T` for the matrix at an address, in float32; one phase of a team."""
    multiply_all(counters, 0, w, x_RA, out_RO, kind)


@_kernel
def multiply_all(counters, phase, w, x_RA, out_RO, kind):
    """Multiply all rows with the matrix at an address."""
    (rows, inputs), unit = x_RA.shape, claim(counters, phase)
    _multiply_from(unit, counters, phase, w, x_RA, rows, inputs, out_RO, kind)


@_kernel
def _multiply_from(unit, counters, phase, w, x_RA, rows, inputs, out_RO, kind):
    """Multiply rows with the matrix at an address, from a claimed unit on."""
    outputs, size = out_RO.shape[1], share(inputs)
    units = -(-outputs // size)
    while unit < units:
        first = unit * size
        count = min(size, outputs - first)
        multiply_part(w, first, count, inputs, x_RA, rows, out_RO, first, kind)
        finish(counters, phase)
        unit = claim(counters, phase)
    settle(counters, phase, units)
