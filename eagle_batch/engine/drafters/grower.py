"""Growing the trees of a round on the CPU, compiled: all levels in one call of a team.

What `GrowingDrafter` does level by level with an EAGLE-3 head whose layer runs through kernels: a
small batch's level is a few products of a tenth of a millisecond, and the operators around them
take longer than they do.

Shape legend: B rows, K width, P parents of a level (1, then K), E = B * P their nodes, L levels, C
candidate records, H hidden size of the head, A = 2 * H, V target vocabulary, W draft vocabulary, M
scratch columns, T threads, N nodes of the tree with the root.
"""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from eagle_batch.engine.choosing import noise_of, scrambled, token_bits
from eagle_batch.engine.drafters.base import DraftState
from eagle_batch.engine.drafters.growing import CANDIDATES
from eagle_batch.engine.kernels import advance_row, best_of, insert, plant_row
from eagle_batch.engine.noise import place_words
from eagle_batch.engine.tree import DraftTree
from eagle_batch.models import kernels
from eagle_batch.models.cache import KeyValueCache
from eagle_batch.models.compiling import compiled
from eagle_batch.models.eagle3 import Eagle3Head
from eagle_batch.models.fused import elements
from eagle_batch.models.fused_head import FusedHeadLayer, FusedLinear
from eagle_batch.models.heads import Head
from eagle_batch.models.kernels import (
    exponential,
    multiply_all,
    normalise,
    normalise_row,
    run_layer,
)
from eagle_batch.models.team import claim, finish, settle

F32 = np.float32
_LOWEST = F32(-np.inf)
_kernel: Any = compiled(error_model="numpy", nogil=True)


class _Head(NamedTuple):
    """A head's weights."""

    stack: Any
    #: [V, H], float32 or the bits of bfloat16.
    embed_VH: Any
    #: float32 [3, H]; norms of embeddings, of states fed back, and before the output matrix.
    norms_3H: Any
    #: Address of the output matrix.
    lm_head: Any
    #: int64 [W]; the target id of each token that can be drafted.
    target_W: Any
    #: Whether the residual stream begins with the normed state.
    normed: Any
    #: float32 [C, D/2]; the rotations of all positions.
    cos_CP: Any
    sin_CP: Any


class _Rows(NamedTuple):
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


class _Memory(NamedTuple):
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
    begin_F: Any
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
    token_BC: Any
    score_BC: Any
    parent_BC: Any
    #: Of each thread: candidates under noise.
    value_TC: Any
    place_TC: Any


@_kernel
def _enter(counters, phase, level, head, rows, memory, capacity):
    """Put the frontier before the head's layer: a unit is a node."""
    width, hidden = memory.token_BK.shape[1], memory.x_EH.shape[1]
    units = memory.token_BK.size
    e = claim(counters, phase)
    while e < units:
        b, k = divmod(e, width)
        eps, norms, given = head.stack.eps, head.norms_3H, memory.given_EA
        normalise_row(head.embed_VH, memory.token_BK[b, k], norms[0], eps, given, e, 0)
        normalise_row(memory.state_EH, e, norms[1], eps, given, e, hidden)
        if head.normed:
            normalise_row(memory.state_EH, e, norms[1], eps, memory.x_EH, e, 0)
        else:
            memory.x_EH[e] = memory.state_EH[e]
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
        kept = c < rows.top_k_B[b] and before < rows.top_p_B[b] and not value < floor
        before += exponential(value - total)
        noise = noise_of(token_bits(rows.scrambled_V[token], factor, offset))
        values_C[c], token_C[c] = value + noise * temperature if kept else _LOWEST, token


@_kernel
def _take_best(values_C, token_C, gain_K, child_K):
    """Write the highest values as log-chances among all of them, and their tokens."""
    highest, total, width = np.max(values_C), F32(0), gain_K.shape[0]
    gain_K[:], child_K[:] = _LOWEST, token_C[0]
    for c in range(values_C.shape[0]):
        total += exponential(values_C[c] - highest)
        if values_C[c] > gain_K[width - 1]:
            insert(gain_K, child_K, width - 1, values_C[c], token_C[c])
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
        found = (memory.score_BC, memory.pick_BK, memory.best_BK, seen)
        advance_row(b, parents, frontier, above, first, found)
        for c in range(parents * width):
            memory.token_BC[b, first + c] = memory.child_BKK[b, c // width, c % width]
            memory.parent_BC[b, first + c] = memory.record_BK[b, c // width] if level else -1
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
def _plant(counters, phase, rows, memory, tree, ancestor_BNN):
    """Make the trees: a unit is a row of the batch."""
    records = (memory.token_BC, memory.score_BC, memory.parent_BC)
    units, width = memory.token_BK.shape
    b = claim(counters, phase)
    while b < units:
        plant_row(b, records, rows.root_B[b], width, tree, ancestor_BNN)
        finish(counters, phase)
        b = claim(counters, phase)
    settle(counters, phase, units)


#: Phases of a level, and of the end.
_PHASES, _LAST = 9, 1


@_kernel
def _grow(rank, counters, depth, head, rows, memory, storage, buffers, kind, tree, ancestor_BNN):
    """Grow the trees of all rows by so many levels and keep their best nodes; see `Team.run`.

    x: the states that the rows draft from. score: zeros.
    """
    batch, width = memory.token_BK.shape
    for level in range(depth):
        phase, parents = _PHASES * level, width if level else 1
        x_EH = memory.x_EH[: batch * parents]
        if level:
            _enter(counters, phase, level, head, rows, memory, storage.shape[2])
            place = kernels.Place(
                head.cos_CP,
                head.sin_CP,
                memory.rotation_E,
                memory.column_E,
                rows.slot_B,
                memory.begin_F,
                rows.length_B,
                memory.extra_B,
                memory.visible_2BKM[level & 1],
            )
            stack, given = head.stack, memory.given_EA
            run_layer(
                rank, counters, phase + 1, stack, 0, place, storage, buffers, x_EH, given, kind
            )
        normed = buffers.inputs_WRA[rank]
        normalise(x_EH, head.norms_3H[2], head.stack.eps, normed)
        nodes, hidden = x_EH.shape
        multiply_all(
            counters, phase + 6, head.lm_head, normed, nodes, hidden, memory.logits_EW, kind
        )
        _rank(rank, counters, phase + 7, level, parents, head, rows, memory)
        _advance(counters, phase + 8, level, parents, memory)
    _plant(counters, _PHASES * depth, rows, memory, tree, ancestor_BNN)


class Grower:
    """Grows trees with one head over one cache; owns the memory between the levels."""

    def __init__(self, head: Head, cache: KeyValueCache, target_ids_W: Tensor) -> None:
        """Begin with a head that `is_growable`."""
        assert isinstance(head, Eagle3Head)
        layer, lm_head = _fused_parts(head)
        assert layer is not None
        assert lm_head is not None
        assert head.embed_VH is not None
        self._cache, self._stack = cache, layer.stack
        self._vocab, hidden = head.embed_VH.shape
        self._draft_vocab = len(target_ids_W)
        rotations = layer.rotations.at(torch.zeros(1, 1, dtype=torch.int64), cache.shape.capacity)
        norms = (head.input_layernorm, head.hidden_norm, head.norm)
        self._head = _Head(
            stack=self._stack.weights,
            embed_VH=elements(head.embed_VH.detach().contiguous()),
            norms_3H=torch.stack([norm.detach().float() for norm in norms]).numpy(),
            lm_head=lm_head.matrix.address,
            target_W=target_ids_W.numpy(),
            normed=head.config.norm_before_residual,
            cos_CP=rotations.cos_TP.numpy(),
            sin_CP=rotations.sin_TP.numpy(),
        )
        self._memory: dict[str, Any] = {}
        self._hidden = hidden

    def grow(
        self, state: DraftState, states_BH: Tensor, depth: int, width: int, nodes: int
    ) -> DraftTree:
        """Return trees of the best `nodes`, as `GrowingDrafter.draft` does."""
        batch, N = states_BH.shape[0], nodes + 1
        memory = self._room(batch, width, depth)
        memory.x_EH[:batch] = states_BH.float().numpy()
        tokens, parents, depths, orders, ranks = torch.empty((5, batch, N), dtype=torch.int64)
        ancestors_BNN = torch.empty((batch, N, N), dtype=torch.bool)
        storage, buffers = self._stack.room(self._cache, batch * width, width)
        self._stack.team.run(
            _grow,
            _PHASES * depth + _LAST,
            depth,
            self._head,
            self._rows(state, depth),
            memory,
            storage,
            buffers,
            self._stack.kind,
            tuple(field.numpy() for field in (tokens, parents, depths, orders, ranks)),
            ancestors_BNN.numpy(),
        )
        return DraftTree(tokens, parents, ancestors_BNN, depths, orders, ranks, depth)

    def _rows(self, state: DraftState, depth: int) -> _Rows:
        batch, params = len(state.root_B), state.params
        words_LB2 = np.empty((0, batch, 2), np.uint32)
        if params.sampled:
            index_LB = state.index_B + torch.arange(depth)[:, None]
            words = place_words(params.noise_key_B.expand_as(index_LB), index_LB)
            words_LB2 = torch.stack(words, dim=-1).numpy().view(np.uint32)
        return _Rows(
            slot_B=np.arange(state.first_row, state.first_row + batch),
            length_B=_plain(state.length_B),
            root_B=_plain(state.root_B),
            temperature_B=_plain(params.temperature_B),
            top_k_B=_plain(params.top_k_B),
            top_p_B=_plain(params.top_p_B),
            min_p_B=_plain(params.min_p_B),
            words_LB2=words_LB2,
            scrambled_V=scrambled(self._vocab),
        )

    def _room(self, batch: int, width: int, depth: int) -> _Memory:
        """Return memory for trees of a shape; its scores are zero."""
        nodes, children = batch * width, (batch, width, width)
        records = (batch, width + (depth - 1) * width**2)
        frontier, threads = (batch, width), self._stack.team.workers
        candidates = (threads, min(CANDIDATES, self._draft_vocab))
        given = np.uint16 if self._stack.takes == torch.bfloat16 else F32
        memory = _Memory(
            x_EH=self._take("x", F32, nodes, self._hidden),
            state_EH=self._take("state", F32, nodes, self._hidden),
            given_EA=self._take("given", given, nodes, 2 * self._hidden),
            logits_EW=self._take("logits", F32, nodes, self._draft_vocab),
            rotation_E=self._take("rotation", np.int64, nodes),
            column_E=self._take("column", np.int64, nodes),
            begin_F=np.arange(0, nodes + 1, width),
            extra_B=self._take("extra", np.int64, batch),
            gain_BKK=self._take("gain", F32, *children),
            child_BKK=self._take("child", np.int64, *children),
            token_BK=self._take("token", np.int64, *frontier),
            score_BK=self._take("score", F32, *frontier),
            record_BK=self._take("record", np.int64, *frontier),
            pick_BK=self._take("pick", np.int64, *frontier),
            best_BK=self._take("best", F32, *frontier),
            visible_2BKM=self._take("visible", np.bool_, 2, batch, width, depth * width),
            token_BC=self._take("tokens", np.int64, *records),
            score_BC=self._take("scores", F32, *records),
            parent_BC=self._take("parents", np.int64, *records),
            value_TC=self._take("values", F32, *candidates),
            place_TC=self._take("places", np.int64, *candidates),
        )
        memory.score_BK[:] = 0
        return memory

    def _take(self, name: str, kind: Any, *shape: int) -> Any:
        """Return an array that is allocated anew only where a larger one is wanted than ever."""
        size = prod(shape)
        had = self._memory.get(name)
        if had is None or had.size < size:
            had = self._memory[name] = np.empty(size, kind)
        return had[:size].reshape(shape)


def _plain(values_B: Tensor) -> Any:
    """Return an array of one layout: for another, numba would compile the kernel anew."""
    return values_B.contiguous().numpy()


def is_growable(head: Head) -> bool:
    """Whether the kernels know all that a head does: EAGLE-3 in its usual form, laid out for them.

    Others draft level by level.
    """
    layer, lm_head = _fused_parts(head)
    return (
        isinstance(head, Eagle3Head)
        and layer is not None
        and lm_head is not None
        and lm_head.matrix.bias is None
        and not head.config.norm_output
        and head.config.logit_scale == 1.0
    )


def _fused_parts(head: Head) -> tuple[FusedHeadLayer | None, FusedLinear | None]:
    """Return the layer and the output matrix of a head as far as kernels run them."""
    layer, lm_head = (getattr(head, name, None) for name in ("layer", "lm_head"))
    return (
        layer if isinstance(layer, FusedHeadLayer) else None,
        lm_head if isinstance(lm_head, FusedLinear) else None,
    )
