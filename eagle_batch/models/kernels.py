"""Fused kernels for decoding on the CPU: what stands between the matrix products, in one call each.

At small batches a decoder layer is four products over weights that stream from memory, and some
forty small operators whose dispatch costs as much again. These kernels replace the forty by four
calls. numba compiles them once for a machine and keeps the result in its cache; without numba the
operators of torch do the same work.

Elements are float32, or bfloat16 as its bits in uint16; all arithmetic is float32.

Shape legend: R rows (tokens of the batch), H hidden size, I width of the feed-forward layer, Q
query heads, G key/value heads, X = Q + 2 * G, D head size, S * C storage columns of the cache, B
rows of the batch, N = R / B tokens of each, M scratch columns, T places that a token looks at.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

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
_kernel: Any = njit(fastmath=_SUMS, error_model="numpy", cache=True)
_exact: Any = njit(fastmath=_EXACT, error_model="numpy", cache=True)
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
def _wide(_context, value):
    """Return an element as float32."""

    def generate(_target, builder, _signature, arguments):
        if value == types.float32:
            return arguments[0]
        bits = builder.zext(arguments[0], ir.IntType(32))
        return builder.bitcast(builder.shl(bits, ir.Constant(bits.type, 16)), ir.FloatType())

    return types.float32(value), generate


@_instruction
def _narrow(_context, _value, like):
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
        x, out = x_RH[r], out_RH[r]
        total = F32(0)
        for i in range(x.shape[0]):
            total += x[i] * x[i]
        factor = F32(1) / np.sqrt(total / F32(x.shape[0]) + eps)
        for i in range(x.shape[0]):
            out[i] = _narrow(x[i] * factor * weight_H[i], out[0])


@_kernel
def gate(gate_up_R2I, out_RI):
    """Write silu(gate) * up; both stand in one row, the gate first."""
    both = gate_up_R2I.reshape(out_RI.shape[0], 2, out_RI.shape[1])
    for r in range(out_RI.shape[0]):
        for i in range(out_RI.shape[1]):
            x = _wide(both[r, 0, i])
            y = x / (F32(1) + exponential(-x)) * _wide(both[r, 1, i])
            out_RI[r, i] = _narrow(y, both[0, 0, 0])


@_kernel
def rotate(qkv_RXP2, cos_RP, sin_RP, storage_CGP2, place_R, q_RQP2):
    """Rotate queries into `q`; rotate keys, and put keys and values into the cache.

    The two elements of a rotation stand side by side, P = D / 2 pairs in a head. storage: one
    layer of the cache, `[S * C, 2, G, P, 2]`.
    """
    heads, groups, pairs = q_RQP2.shape[1], storage_CGP2.shape[2], cos_RP.shape[1]
    for r in range(cos_RP.shape[0]):
        for h in range(heads):
            for p in range(pairs):
                a, b = _wide(qkv_RXP2[r, h, p, 0]), _wide(qkv_RXP2[r, h, p, 1])
                q_RQP2[r, h, p, 0] = a * cos_RP[r, p] - b * sin_RP[r, p]
                q_RQP2[r, h, p, 1] = b * cos_RP[r, p] + a * sin_RP[r, p]
        c = place_R[r]
        for g in range(groups):
            k, v = heads + g, heads + groups + g
            for p in range(pairs):
                like = qkv_RXP2[r, v, p, 0]
                a, b = _wide(qkv_RXP2[r, k, p, 0]), _wide(qkv_RXP2[r, k, p, 1])
                x, y = a * cos_RP[r, p] - b * sin_RP[r, p], b * cos_RP[r, p] + a * sin_RP[r, p]
                storage_CGP2[c, 0, g, p, 0] = _narrow(x, like)
                storage_CGP2[c, 0, g, p, 1] = _narrow(y, like)
                storage_CGP2[c, 1, g, p, 0] = like
                storage_CGP2[c, 1, g, p, 1] = qkv_RXP2[r, v, p, 1]


# The loops below index arrays directly: every view that numba makes counts references, which costs
# more than a row of a head.


@_kernel
def _score(q_JGD, columns, scores_JGT):
    """Write q . k for every query and column; columns come four at a time, each read once."""
    count, groups, size = columns.shape[0], columns.shape[2], columns.shape[3]
    for block in range(count // 4):
        t = 4 * block
        for g in range(groups):
            for j in range(q_JGD.shape[0]):
                w, x, y, z = F32(0), F32(0), F32(0), F32(0)
                for i in range(size):
                    q = q_JGD[j, g, i]
                    w += q * _wide(columns[t, 0, g, i])
                    x += q * _wide(columns[t + 1, 0, g, i])
                    y += q * _wide(columns[t + 2, 0, g, i])
                    z += q * _wide(columns[t + 3, 0, g, i])
                scores_JGT[j, g, t] = w
                scores_JGT[j, g, t + 1] = x
                scores_JGT[j, g, t + 2] = y
                scores_JGT[j, g, t + 3] = z
    for t in range(count - count % 4, count):
        for g in range(groups):
            for j in range(q_JGD.shape[0]):
                total = F32(0)
                for i in range(size):
                    total += q_JGD[j, g, i] * _wide(columns[t, 0, g, i])
                scores_JGT[j, g, t] = total


@_kernel
def _softmax(scores_JGT, j, g, scale, base, extra, visible_BNM, b, n):
    """Turn scores into weights in place; put what divides their weighted sum behind them."""
    for m in range(extra):
        if not visible_BNM[b, n, m]:
            scores_JGT[j, g, base + m] = F32(-1e30)
    highest = F32(-1e30)
    for t in range(base + extra):
        highest = max(highest, scores_JGT[j, g, t])
    total = F32(0)
    for t in range(base + extra):
        weight = exponential((scores_JGT[j, g, t] - highest) * scale)
        scores_JGT[j, g, t] = weight
        total += weight
    for m in range(extra):
        if not visible_BNM[b, n, m]:
            scores_JGT[j, g, base + m] = F32(0)
    scores_JGT[j, g, base + extra] = F32(1) / total


@_kernel
def _mix(weights_JGT, columns, sums_JGD):
    """Write the weighted sums of the values, four columns at a time."""
    count, groups, size = columns.shape[0], columns.shape[2], columns.shape[3]
    sums_JGD[:] = F32(0)
    for block in range(count // 4):
        t = 4 * block
        for g in range(groups):
            for j in range(sums_JGD.shape[0]):
                w, x = weights_JGT[j, g, t], weights_JGT[j, g, t + 1]
                y, z = weights_JGT[j, g, t + 2], weights_JGT[j, g, t + 3]
                for i in range(size):
                    sums_JGD[j, g, i] += (
                        w * _wide(columns[t, 1, g, i])
                        + x * _wide(columns[t + 1, 1, g, i])
                        + y * _wide(columns[t + 2, 1, g, i])
                        + z * _wide(columns[t + 3, 1, g, i])
                    )
    for t in range(count - count % 4, count):
        for g in range(groups):
            for j in range(sums_JGD.shape[0]):
                w = weights_JGT[j, g, t]
                for i in range(size):
                    sums_JGD[j, g, i] += w * _wide(columns[t, 1, g, i])


@_kernel
def attend(q_RQD, storage_SC, first, base_B, visible_BNM, scale, scores_JGT, sums_JGD, out_PX):
    """Write the attention output of every token, its heads one after the other.

    q: query heads by their place in a group, then by group. storage: one layer of the cache, `[S,
    C, 2, G, D]`; the rows of the batch begin at slot `first`. A token sees the `base` committed
    columns of its row, and of the M behind them those that `visible` names. scores, sums: scratch,
    float32, for the J = N * Q / G queries of a row and a group.
    """
    rows, heads, size = q_RQD.shape
    groups, tokens = storage_SC.shape[3], visible_BNM.shape[1]
    members = heads // groups
    q_BJGD = q_RQD.reshape(rows // tokens, tokens * members, groups, size)
    out_PJGD = out_PX.reshape(out_PX.shape[0], members, groups, size)
    for b in range(rows // tokens):
        base = base_B[b]
        # What stands behind the end of a slot is padding, whose attention nobody reads.
        extra = min(visible_BNM.shape[2], storage_SC.shape[1] - base)
        columns = storage_SC[first + b][: base + extra]
        _score(q_BJGD[b], columns, scores_JGT)
        for j in range(tokens * members):
            for g in range(groups):
                _softmax(scores_JGT, j, g, scale, base, extra, visible_BNM, b, j // members)
        _mix(scores_JGT, columns, sums_JGD[: tokens * members])
        for j in range(tokens * members):
            row, member = b * tokens + j // members, j % members
            for g in range(groups):
                factor = scores_JGT[j, g, base + extra]
                for i in range(size):
                    mixed = sums_JGD[j, g, i] * factor
                    out_PJGD[row, member, g, i] = _narrow(mixed, out_PJGD[0, 0, 0, 0])
