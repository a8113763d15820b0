"""Kernels that grow the trees of a round on the CPU: all levels in one call of a team.

At small batches a level is a few products of a tenth of a millisecond, and operators around them
take longer than they do. First the head runs over the tokens that were committed since the last
draft, then it grows the trees, and at last their best nodes are picked.

Shape legend: B rows, R tokens that the head is behind with, N those of a row at most, F width of
the target's features, K width, P parents of a level (1, then K), E = B * K nodes of a level at
most, L levels, X candidate records, H hidden size of the head, A = 2 * H, V target vocabulary, W
draft vocabulary, M scratch columns, T threads, C candidates under noise, S slots, D positions of a
slot, Q pairs of a rotation, Z = B + 1.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from eagle_batch.engine.choosing import noise_of, token_bits
from eagle_batch.engine.kernels import advance_row, best_of, insert, plant_row
from eagle_batch.models import kernels
from eagle_batch.models.compiling import compiled
from eagle_batch.models.kernels import (
    exponential,
    multiply_all,
    narrow,
    normalise_row,
    run_layer,
    score,
    wide,
)
from eagle_batch.models.team import claim, finish, settle

F32 = np.float32
_LOWEST = F32(-np.inf)
_kernel: Any = compiled(error_model="numpy", nogil=True)


class Head(NamedTuple):
    """A head's weights."""

    stack: Any
    #: [V, H], float32 or the bits of bfloat16.
    embed_VH: Any
    #: float32 [3, H]; norms of embeddings, of states fed back, and before the output matrix.
    norms_3H: Any
    #: Addresses of the output matrix, and of the one that fuses features (0 where there is none).
    lm_head: Any
    fc: Any
    #: float32 [H], or [0]; what is added to fused features.
    fc_bias: Any
    #: int64 [W]; the target id of each token that can be drafted.
    target_W: Any
    #: Whether the residual stream begins with the normed state.
    normed: Any
    #: float32 [D, Q]; the rotations of all positions.
    cos_DQ: Any
    sin_DQ: Any


class Rows(NamedTuple):
    """Where the rows stand and how they choose."""

    #: int64 [B]; slots, committed tokens, roots.
    slot_B: Any
    length_B: Any
    root_B: Any
    temperature_B: Any
    top_k_B: Any
    top_p_B: Any
    min_p_B: Any
    #: uint32 [L, B, 2], see `noise.place_words`; no levels where all rows are greedy.
    words_LB2: Any
    scrambled_V: Any


class Behind(NamedTuple):
    """Committed tokens that the head has not run over."""

    #: What the target made of all tokens, float32 or the bits of bfloat16, and what followed them.
    features_SDF: Any
    token_SD: Any
    #: int64 [B]; the first token of each row, and int64 [Z]; which of the R are a row's.
    start_B: Any
    begin_Z: Any
    #: int64 [B]; how many those of each row are.
    count_B: Any
    #: bool [B, N, N]; causal.
    visible_BNN: Any
    #: int64 [R]; see `kernels.Place`.
    rotation_R: Any
    column_R: Any
    #: What products take in: features, and what the layer's attention does. Else float32.
    feature_RF: Any
    given_RA: Any
    fused_RH: Any
    x_RH: Any


class Memory(NamedTuple):
    """What the levels leave for each other."""

    #: float32; the residual stream, and the states that the next level begins with.
    x_EH: Any
    state_EH: Any
    #: What the layer's attention takes in.
    given_EA: Any
    logits_EW: Any
    #: int64; see `kernels.Place`.
    rotation_E: Any
    column_E: Any
    begin_Z: Any
    extra_B: Any
    #: Children of the nodes: log-chances and target ids.
    gain_BKK: Any
    child_BKK: Any
    #: The nodes that are expanded next: see `growing._Frontier`.
    token_BK: Any
    score_BK: Any
    record_BK: Any
    pick_BK: Any
    best_BK: Any
    #: bool [2, B, K, M]; scratch columns that they see: of this level and of the next.
    visible_2BKM: Any
    #: All candidates: tokens, scores, parents.
    token_BX: Any
    score_BX: Any
    parent_BX: Any
    #: Of each thread: candidates under noise.
    value_TC: Any
    place_TC: Any


@_kernel
def _put(head, token, state_EH, e, given_EA, x_EH):
    """Put a token and the state that it is paired with before the head's layer."""
    eps, norms, hidden = head.stack.eps, head.norms_3H, x_EH.shape[1]
    normalise_row(head.embed_VH, token, norms[0], eps, given_EA, e, 0)
    normalise_row(state_EH, e, norms[1], eps, given_EA, e, hidden)
    if head.normed:
        normalise_row(state_EH, e, norms[1], eps, x_EH, e, 0)
    else:
        x_EH[e] = state_EH[e]


@_kernel
def _collect(counters, phase, rows, behind, capacity):
    """Gather the features that the head is behind with: a unit is a row of the batch."""
    units, like = rows.length_B.shape[0], behind.feature_RF[0, 0]
    b = claim(counters, phase)
    while b < units:
        slot = rows.slot_B[b]
        for n in range(behind.count_B[b]):
            r = behind.begin_Z[b] + n
            place = min(behind.start_B[b] + n, behind.features_SDF.shape[1] - 1)
            for f in range(behind.feature_RF.shape[1]):
                behind.feature_RF[r, f] = narrow(wide(behind.features_SDF[slot, place, f]), like)
            behind.rotation_R[r], behind.column_R[r] = place, slot * capacity + place
        finish(counters, phase)
        b = claim(counters, phase)
    settle(counters, phase, units)


@_kernel
def _join(counters, phase, head, rows, behind):
    """Put the tokens that the head is behind with before its layer: a unit is one of them."""
    units = behind.fused_RH.shape[0]
    r = claim(counters, phase)
    while r < units:
        b = 0
        while behind.begin_Z[b + 1] <= r:
            b += 1
        place = behind.rotation_R[r]
        for i in range(head.fc_bias.shape[0]):
            behind.fused_RH[r, i] += head.fc_bias[i]
        token = behind.token_SD[rows.slot_B[b], place]
        _put(head, token, behind.fused_RH, r, behind.given_RA, behind.x_RH)
        finish(counters, phase)
        r = claim(counters, phase)
    settle(counters, phase, units)


@_kernel
def _follow(rank, counters, head, rows, behind, storage, buffers, kind):
    """Run the head over what it is behind with: eight phases."""
    _collect(counters, 0, rows, behind, storage.shape[2])
    multiply_all(counters, 1, head.fc, behind.feature_RF, behind.fused_RH, kind)
    _join(counters, 2, head, rows, behind)
    place = kernels.Place(
        head.cos_DQ,
        head.sin_DQ,
        behind.rotation_R,
        behind.column_R,
        rows.slot_B,
        behind.begin_Z,
        behind.start_B,
        behind.count_B,
        behind.visible_BNN,
    )
    stack, x_RH, given_RA = head.stack, behind.x_RH, behind.given_RA
    run_layer(rank, counters, 3, stack, 0, place, storage, buffers, x_RH, given_RA, kind)


@_kernel
def _begin(counters, phase, rows, behind, state_SH, x_EH):
    """Let rows draft from where the head is now: a unit is a row of the batch."""
    units, like = rows.length_B.shape[0], state_SH[0, 0]
    b = claim(counters, phase)
    while b < units:
        slot = rows.slot_B[b]
        for i in range(x_EH.shape[1]):
            if behind.count_B[b] > 0:
                x_EH[b, i] = behind.x_RH[behind.begin_Z[b + 1] - 1, i]
                state_SH[slot, i] = narrow(x_EH[b, i], like)
            else:
                x_EH[b, i] = wide(state_SH[slot, i])
        finish(counters, phase)
        b = claim(counters, phase)
    settle(counters, phase, units)


@_kernel
def _enter(counters, phase, level, head, rows, memory, capacity):
    """Put the frontier before the head's layer: a unit is a node."""
    width, units = memory.token_BK.shape[1], memory.token_BK.size
    e = claim(counters, phase)
    while e < units:
        b, k = divmod(e, width)
        token = memory.token_BK[b, k]
        _put(head, token, memory.state_EH, e, memory.given_EA, memory.x_EH)
        place = rows.length_B[b] + (level - 1) * width + k
        memory.column_E[e] = rows.slot_B[b] * capacity + min(place, capacity - 1)
        memory.rotation_E[e] = rows.length_B[b] + level - 1
        finish(counters, phase)
        e = claim(counters, phase)
    settle(counters, phase, units)


@_kernel
def _rank(rank, counters, phase, level, parents, head, rows, memory):
    """Find the likeliest children: a unit is a node."""
    units = rows.length_B.shape[0] * parents
    e = claim(counters, phase)
    while e < units:
        b, p = divmod(e, parents)
        gain_K, child_K = memory.gain_BKK[b, p], memory.child_BKK[b, p]
        if rows.words_LB2.shape[0] and rows.temperature_B[b] > 0:
            values, places = memory.value_TC[rank], memory.place_TC[rank]
            total = best_of(memory.logits_EW[e], values, places)
            _perturb(rows, b, level, head, values, places, total)
            _take_best(values, places, gain_K, child_K)
        else:
            total = best_of(memory.logits_EW[e], gain_K, child_K)
            for k in range(gain_K.shape[0]):
                gain_K[k], child_K[k] = gain_K[k] - total, head.target_W[child_K[k]]
        for k in range(gain_K.shape[0]):
            # What has no log-chance (the head overflowed) is the least likely.
            gain_K[k] = _LOWEST if np.isnan(gain_K[k]) else gain_K[k]
        finish(counters, phase)
        e = claim(counters, phase)
    settle(counters, phase, units)


@_kernel
def _perturb(rows, b, level, head, values_C, token_C, total):
    """Filter the best logits of a node and add the row's noise; ids become the target's.

    See `sampling.filtered_candidates` and `GrowingDrafter._likeliest`.
    """
    temperature, before = rows.temperature_B[b], F32(0)
    floor = values_C[0] + np.log(rows.min_p_B[b]) * temperature
    factor, offset = rows.words_LB2[level, b, 0], rows.words_LB2[level, b, 1]
    for c in range(values_C.shape[0]):
        value, token = values_C[c], head.target_W[token_C[c]]
        inside = rows.top_p_B[b] >= 1 or before < rows.top_p_B[b]
        kept = c < rows.top_k_B[b] and inside and not value < floor
        before += exponential(value - total)
        noise = noise_of(token_bits(rows.scrambled_V[token], factor, offset))
        values_C[c], token_C[c] = value + noise * temperature if kept else _LOWEST, token


@_kernel
def _take_best(values_C, token_C, gain_K, child_K):
    """Write the highest values as log-chances among all of them, and their tokens."""
    highest, total, width = np.max(values_C), F32(0), gain_K.shape[0]
    for c in range(values_C.shape[0]):
        total += exponential(values_C[c] - highest)
        # What was filtered out is still a guess: no two children are the same.
        if c < width or values_C[c] > gain_K[width - 1]:
            insert(gain_K, child_K, min(c, width - 1), values_C[c], token_C[c])
    for k in range(width):
        gain_K[k] -= highest + np.log(total)


@_kernel
def _advance(counters, phase, level, parents, memory):
    """Score the children and pick the next frontier of them: a unit is a row of the batch."""
    units, width = memory.token_BK.shape
    above, first = level * width, width + (level - 1) * width * width if level else 0
    b = claim(counters, phase)
    while b < units:
        frontier = (memory.gain_BKK, memory.score_BK, memory.visible_2BKM[level & 1])
        seen = memory.visible_2BKM[1 - (level & 1)]
        found = (memory.score_BX, memory.pick_BK, memory.best_BK, seen)
        advance_row(b, parents, frontier, above, first, found)
        for c in range(parents * width):
            memory.token_BX[b, first + c] = memory.child_BKK[b, c // width, c % width]
            memory.parent_BX[b, first + c] = memory.record_BK[b, c // width] if level else -1
        for k in range(width):
            c = memory.pick_BK[b, k]
            memory.token_BK[b, k] = memory.child_BKK[b, c // width, c % width]
            memory.score_BK[b, k] = memory.best_BK[b, k]
            memory.record_BK[b, k] = first + c
            memory.state_EH[b * width + k] = memory.x_EH[b * parents + c // width]
        memory.extra_B[b] = above + width
        finish(counters, phase)
        b = claim(counters, phase)
    settle(counters, phase, units)


@_kernel
def _plant(counters, phase, rows, memory, least, tree, ancestor_BNN):
    """Make the trees: a unit is a row of the batch."""
    records = (memory.token_BX, memory.score_BX, memory.parent_BX)
    units, width = memory.token_BK.shape
    b = claim(counters, phase)
    while b < units:
        plant_row(b, records, rows.root_B[b], width, least, tree, ancestor_BNN)
        finish(counters, phase)
        b = claim(counters, phase)
    settle(counters, phase, units)


#: Phases before all levels, of each of them, and after them.
BEFORE, PHASES, AFTER = 9, 9, 1


@_kernel
def grow(
    rank,
    counters,
    depth,
    head,
    rows,
    behind,
    state_SH,
    memory,
    storage,
    buffers,
    kind,
    least,
    tree,
    ancestor_BNN,
):
    """Grow the trees of all rows by so many levels and keep their best nodes; see `Team.run`.

    state: what rows draft from; those that the head is behind with get a new one. score: zeros.
    least: see `plant`.
    """
    batch, width = memory.token_BK.shape
    if behind.x_RH.shape[0] > 0:
        _follow(rank, counters, head, rows, behind, storage, buffers, kind)
    _begin(counters, 8, rows, behind, state_SH, memory.x_EH)
    stack = head.stack
    for level in range(depth):
        phase, parents = BEFORE + PHASES * level, width if level else 1
        x_EH = memory.x_EH[: batch * parents]
        if level:
            _enter(counters, phase, level, head, rows, memory, storage.shape[2])
            place = kernels.Place(
                head.cos_DQ,
                head.sin_DQ,
                memory.rotation_E,
                memory.column_E,
                rows.slot_B,
                memory.begin_Z,
                rows.length_B,
                memory.extra_B,
                memory.visible_2BKM[level & 1],
            )
            given = memory.given_EA
            run_layer(
                rank, counters, phase + 1, stack, 0, place, storage, buffers, x_EH, given, kind
            )
        norm_H, out_EW, w = head.norms_3H[2], memory.logits_EW, head.lm_head
        score(rank, counters, phase + 6, w, norm_H, stack.eps, buffers, x_EH, out_EW, kind)
        _rank(rank, counters, phase + 7, level, parents, head, rows, memory)
        _advance(counters, phase + 8, level, parents, memory)
    _plant(counters, BEFORE + PHASES * depth, rows, memory, least, tree, ancestor_BNN)
