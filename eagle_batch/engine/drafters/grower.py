"""Growing the trees of a round on the CPU in one compiled call.

What `EagleDrafter` does level by level for any head, for an EAGLE-3 head whose layer runs through
kernels. Shape legend: see `kernels`.
"""

from __future__ import annotations

from functools import cache
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eagle_batch.engine.choosing import scrambled
from eagle_batch.engine.controller import Shape
from eagle_batch.engine.drafters import kernels
from eagle_batch.engine.drafters.arrears import Rest
from eagle_batch.engine.drafters.base import DraftState
from eagle_batch.engine.drafters.growing import CANDIDATES
from eagle_batch.engine.noise import place_words
from eagle_batch.engine.tree import DraftTree, marked, tree_arrays, unfilled_tree
from eagle_batch.models.cache import KeyValueCache
from eagle_batch.models.eagle3 import Eagle3Head
from eagle_batch.models.fused import activations, elements
from eagle_batch.models.fused_head import FusedHeadLayer, FusedLinear
from eagle_batch.models.heads import Head

F32 = np.float32


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
        fc = getattr(head, "fc", None)
        #: Whether it runs the head over what rows are behind with, too.
        self.follows = (
            isinstance(fc, FusedLinear)
            # Of odd widths it would read beyond the rows of its matrix.
            and activations([fc.matrix]) == self._stack.takes
            and head.input_norm is None
            and not head.fc_norm
        )
        fuses = fc if self.follows else None
        bias = None if fuses is None else fuses.matrix.bias
        self._head = kernels.Head(
            stack=self._stack.weights,
            embed_VH=elements(head.embed_VH.detach().contiguous()),
            norms_3H=torch.stack([norm.detach().float() for norm in norms]).numpy(),
            lm_head=lm_head.matrix.address,
            fc=0 if fuses is None else fuses.matrix.address,
            fc_bias=torch.empty(0).numpy() if bias is None else bias.detach().float().numpy(),
            target_W=target_ids_W.numpy(),
            normed=head.config.norm_before_residual,
            cos_DQ=rotations.cos_TP.numpy(),
            sin_DQ=rotations.sin_TP.numpy(),
        )
        self._memory: dict[str, Any] = {}
        #: What products take in.
        self._given = np.uint16 if self._stack.takes == torch.bfloat16 else F32
        self._hidden = hidden

    def grow(
        self, state: DraftState, states_SH: Tensor, rest: Rest | None, shape: Shape
    ) -> DraftTree:
        """Return the trees that `GrowingDrafter.draft` grows.

        But for greedy rows beside sampled ones: the log-chances of their candidates are exact here.

        states_SH: what each slot drafts from; brought up to date where rows are behind.
        rest: what they are behind with, for a grower that `follows`.
        """
        batch, depth, width = len(state.root_B), shape.depth, shape.width
        tree = unfilled_tree(batch, shape.nodes + 1, depth)
        behind = self._behind(rest, batch)
        looking = max(width, int(behind.count_B.max()))
        size = max(batch * width, len(behind.x_RH))
        storage, buffers = self._stack.room(self._cache, size, looking)
        self._stack.team.run(
            kernels.grow,
            kernels.BEFORE + kernels.PHASES * depth + kernels.AFTER,
            depth,
            self._head,
            self._rows(state, depth),
            behind,
            elements(states_SH),
            self._room(batch, width, depth),
            storage,
            buffers,
            self._stack.kind,
            F32(state.least),
            *tree_arrays(tree),
        )
        return marked(tree)

    def _behind(self, rest: Rest | None, batch: int) -> kernels.Behind:
        """Return what rows are behind with, and memory for it."""
        counts, starts = ([0] * batch,) * 2 if rest is None else (rest.counts, rest.starts)
        rows, longest = sum(counts), max(counts)
        width = 0 if rest is None else rest.features_SCF.shape[2]
        features = torch.zeros(1, 1, 0) if rest is None else rest.features_SCF
        tokens = torch.zeros(1, 1, dtype=torch.int64) if rest is None else rest.tokens_SC
        return kernels.Behind(
            features_SDF=elements(features),
            token_SD=tokens.numpy(),
            start_B=np.array(starts),
            begin_Z=np.concatenate(([0], np.cumsum(counts))),
            count_B=np.array(counts),
            visible_BNN=np.broadcast_to(_causal(longest), (batch, longest, longest)).copy(),
            rotation_R=self._take("rotations", np.int64, rows),
            column_R=self._take("columns", np.int64, rows),
            feature_RF=self._take("features", self._given, rows, width),
            given_RA=self._take("givens", self._given, rows, 2 * self._hidden),
            fused_RH=self._take("fused", F32, rows, self._hidden),
            x_RH=self._take("stream", F32, rows, self._hidden),
        )

    def _rows(self, state: DraftState, depth: int) -> kernels.Rows:
        batch, params = len(state.root_B), state.params
        words_LB2 = np.empty((0, batch, 2), np.uint32)
        if params.sampled:
            index_LB = state.index_B + torch.arange(depth)[:, None]
            words = place_words(params.noise_key_B.expand_as(index_LB), index_LB)
            words_LB2 = torch.stack(words, dim=-1).numpy().view(np.uint32)
        return kernels.Rows(
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

    def _room(self, batch: int, width: int, depth: int) -> kernels.Memory:
        """Return memory for trees of a shape; its scores are zero."""
        nodes, children = batch * width, (batch, width, width)
        records = (batch, width + (depth - 1) * width**2)
        frontier, threads = (batch, width), self._stack.team.workers
        candidates = (threads, min(CANDIDATES, self._draft_vocab))
        memory = kernels.Memory(
            x_EH=self._take("x", F32, nodes, self._hidden),
            state_EH=self._take("state", F32, nodes, self._hidden),
            given_EA=self._take("given", self._given, nodes, 2 * self._hidden),
            logits_EW=self._take("logits", F32, nodes, self._draft_vocab),
            rotation_E=self._take("rotation", np.int64, nodes),
            column_E=self._take("column", np.int64, nodes),
            begin_Z=np.arange(0, nodes + 1, width),
            extra_B=self._take("extra", np.int64, batch),
            gain_BKK=self._take("gain", F32, *children),
            child_BKK=self._take("child", np.int64, *children),
            token_BK=self._take("token", np.int64, *frontier),
            score_BK=self._take("score", F32, *frontier),
            record_BK=self._take("record", np.int64, *frontier),
            pick_BK=self._take("pick", np.int64, *frontier),
            best_BK=self._take("best", F32, *frontier),
            visible_2BKM=self._take("visible", np.bool_, 2, batch, width, depth * width),
            token_BX=self._take("tokens", np.int64, *records),
            score_BX=self._take("scores", F32, *records),
            parent_BX=self._take("parents", np.int64, *records),
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


@cache
def _causal(tokens: int) -> Any:
    return np.tri(tokens, dtype=np.bool_)


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
