"""The engine: continuous batching over slots, one verb.

`step()` runs one round for all active rows: draft a tree, verify it with one pass of the target,
commit the accepted path, extend the drafter over it. Prompts that come into free slots go along in
the same pass, or have one of their own while most slots are empty.
Everything inside a round is tensor work on shapes that are fixed before it; the only
synchronisation reads the round's result. On the CPU, where looking at results is free, rows
may be verified with no more nodes than are worth it.

Shape legend: B active rows, N nodes with the root, R nodes of the pass (see `places`),
A = depth + 1 places of a path, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import astuple
from typing import Any

import torch
from torch import Tensor

from eagle_batch.engine.adjust import Adjustments
from eagle_batch.engine.calibration import PassTable, measure_passes
from eagle_batch.engine.clock import PhaseClock
from eagle_batch.engine.controller import PLAIN, Controller, Shape, Walk, grid
from eagle_batch.engine.counters import Counters
from eagle_batch.engine.drafters.base import CommittedChain, Drafter, DraftState
from eagle_batch.engine.ending import Decode, EndRules, scores_status
from eagle_batch.engine.logprobs import Logprobs, path_logprobs
from eagle_batch.engine.places import Places, all_nodes, used_nodes
from eagle_batch.engine.prefill import Group, Prefill
from eagle_batch.engine.request import Completion, EngineMetrics, Request, check_room
from eagle_batch.engine.sampling import best_tokens, choose
from eagle_batch.engine.sizing import Sizing
from eagle_batch.engine.slots import Row, Slots
from eagle_batch.engine.starts import Starts
from eagle_batch.engine.tree import DraftTree, root_tree
from eagle_batch.engine.verify import Verdict, walk, walk_stepwise
from eagle_batch.engine.waiting import Waiting
from eagle_batch.models.target import Pass, Target, TargetOutput

#: (name of a head, what drafts now) -> what drafts with that head: the same object, or another one.
TakeHead = Callable[[str, Drafter | None], Drafter]


class Engine:
    """One target, one optional drafter, `slots` rows; it works on the target's own device."""

    def __init__(  # noqa: PLR0913 - parts, then sizes
        self,
        target: Target,
        drafter: Drafter | None,
        tokenizer: Any,
        decode: Decode,
        *,
        slots: int,
        context: int,
        prefill_chunk: int = 512,
        auto: bool = False,
        take_head: TakeHead | None = None,
        room: int = 0,
        sizing: Sizing | None = None,
    ) -> None:
        """Allocate the slots.

        take_head, room: how a head that comes later is taken up, and the most nodes it may draft.
        sizing: why there are so many slots.
        """
        self.target = target
        self.drafter = drafter
        #: The target's tokenizer; grammars and bad words need it, and the engine's caller.
        self.tokenizer = tokenizer
        self.context = context
        #: Why there are so many slots, for people.
        self.sizing = "as asked" if sizing is None else sizing.why
        self._aux_layers = () if drafter is None else drafter.aux_layers
        self._fixed = PLAIN
        if drafter is not None:
            self._fixed = Shape(drafter.depth, drafter.width, drafter.nodes, drafter.branch)
        #: Whether the drafter takes in what is committed; not while plain decoding is sure to win.
        self._follows = drafter is not None
        self._take_head = take_head
        self._room = max(room, self._fixed.nodes + self._fixed.branch)
        self.cache = target.new_cache(slots, context + self._room + 2)
        self._controller: Controller | None = None
        if auto and drafter is not None:
            self._passes = self._calibrated()
            self._controller = self._new_controller()
        self._slots = Slots(slots, target.device)
        self._waiting = Waiting()
        #: Whether the last step had prompts and a round in one pass.
        self._joined = False
        self._ids: set[str] = set()
        self._eos_ids = torch.tensor(target.eos_token_ids, dtype=torch.int64, device=target.device)
        self._ends = EndRules(target.eos_token_ids, context, decode)
        self._clock = PhaseClock(target.device)
        self._counters = Counters(slots, self._fixed.reach)
        self._adjustments = Adjustments(target, tokenizer, self._slots)
        self._starts = Starts(self.cache, drafter, context)
        self._prefill = Prefill(
            target,
            drafter,
            self.cache,
            self._adjustments,
            self._eos_ids,
            prefill_chunk,
            self._starts,
        )

    def _calibrated(self) -> PassTable:
        """Return what passes of the target cost, measured before any row is here."""
        return measure_passes(self.target, self.cache, (1 + self._room) * self.cache.shape.slots)

    @property
    def slots(self) -> int:
        """Rows that are decoded together at most."""
        return self._slots.count

    @property
    def active(self) -> int:
        """Rows in slots."""
        return len(self._slots.rows)

    @property
    def waiting(self) -> int:
        """Requests that have no slot yet."""
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        """Whether `step` would do anything."""
        return bool(self._waiting or self._slots.rows)

    def metrics(self) -> EngineMetrics:
        """Return the counters since the engine was built."""
        return self._counters.snapshot(self._clock, self._prefill)

    def use_head(self, name: str) -> None:
        """Draft with another head from the next round on.

        A head like the one before takes its place, and running rows are drafted on from the keys
        of the old one; where the drafter is another, they are decoded plainly to their end.
        Raises HeadError where the head does not fit; the engine then goes on as before.
        """
        assert self._take_head is not None, "built for one head"
        assert self._controller is not None, "heads that come are measured"
        drafter = self._take_head(name, self.drafter)
        if drafter is self.drafter:
            self._controller.renew()
        else:
            self._draft_with(drafter)
        self._prefill.use(drafter)
        self._follows = True

    def _draft_with(self, drafter: Drafter) -> None:
        self._fixed = Shape(drafter.depth, drafter.width, drafter.nodes, drafter.branch)
        assert self._fixed.nodes + self._fixed.branch <= self._room, "the slots have no such room"
        self.drafter = drafter
        self._aux_layers = drafter.aux_layers
        self._controller = self._new_controller()
        self._counters.deepen(self._fixed.reach)
        for row in self._slots.rows:
            row.followed = False

    def _new_controller(self) -> Controller:
        # On the CPU a branch is cut to its worth in every row: no shorter one is a choice.
        shapes = grid(*astuple(self._fixed), fitted=self.target.device.type == "cpu")
        seconds = self._passes.seconds if self.target.can_trim else None
        return Controller(shapes, self._passes.ratio, pass_seconds=seconds)

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises RequestError when the row can never run: an empty prompt, or one that leaves no room.
        Raises ConfigError where its grammar cannot be compiled, and ValueError on a request id that
        is in the engine already (a bug of the caller).
        """
        if request.id in self._ids:
            raise ValueError(f"request id {request.id!r} is in the engine already")
        check_room(request, self.context)
        self._adjustments.check(request.params)
        self._ids.add(request.id)
        self._waiting.add(request)

    @torch.inference_mode()
    def step(self) -> list[Completion]:
        """Run one round, prefill waiting prompts, or both in one pass; return what finished."""
        with self._clock.step():
            decoding, admits = self.active, self._admits()
            shape = self._next_shape() if self._decodes(admits=admits) else None
            group = self._admit() if admits else None
            if shape is not None:
                self._round(shape, decoding, group)
            elif group is not None:
                with self._clock.phase("prefill"):
                    outputs = self._run_passes(group.last_passes)
                    logits = self.target.logits(self._prefill.last_hidden(group, outputs))
                self._begin(group, outputs, logits)
            self._joined = shape is not None and group is not None
            return self._release_finished()

    def _admits(self) -> bool:
        """Whether prompts are taken in now; a controller sees every other round undisturbed."""
        ready = bool(self._waiting) and self._slots.free > 0
        return ready and not (self._joined and self._controller is not None)

    def _decodes(self, *, admits: bool) -> bool:
        """Whether a round is run; prompts go first while most slots are empty and many wait."""
        filling = 2 * self.active < self.slots and self.active < self.waiting
        return self.active > 0 and not (admits and filling)

    def _admit(self) -> Group:
        """Put waiting prompts into slots; what is left of them is one pass."""
        first, follow = self.active, self._follows
        with self._clock.phase("prefill"):
            rows = self._prefill.admit(self._waiting, first, self._slots.free, follow=follow)
            self._slots.add(rows)
            for slot, row in enumerate(rows, start=first):
                self._adjustments.set_row(slot, row)
            return self._prefill.begin(rows, first, self._slots.params, follow=follow)

    def _begin(self, group: Group, outputs: Sequence[TargetOutput], logits_B1V: Tensor) -> None:
        """Let the rows of a group begin with what its last pass gave."""
        first, stop = group.first_slot, group.first_slot + len(group.rows)
        with self._clock.phase("prefill"):
            begun = self._prefill.end(group, outputs, logits_B1V)
            self._slots.root_S[first:stop] = begun.tokens_B
            self._slots.length_S[first:stop] = torch.tensor(
                [row.length for row in group.rows], device=self.target.device
            )
            self._slots.index_S[first:stop] = 1
            one_B = torch.ones_like(begun.tokens_B)
            self._adjustments.add(first, begun.tokens_B[:, None], one_B)
            emitted = torch.stack((begun.tokens_B, begun.status_B), dim=1).tolist()
        for place, (row, (token, status)) in enumerate(zip(group.rows, emitted, strict=True)):
            row.target_passes = 1
            self._append(row, [token], begun.logprobs, place, status)

    def _round(self, shape: Shape, rows: int, group: Group | None) -> None:
        """Run a round for the first rows, and the last pass of a group beside it."""
        state = self._state(rows, shape)
        if self.drafter is not None and shape != PLAIN:
            # What was put off over many rounds is no cost of this one.
            with self._clock.phase("draft"):
                self.drafter.prepare(state)
        start = time.perf_counter()
        walks, depths = self._run_round(state, shape, group)
        if self._controller is not None and group is None:
            self._controller.observe(shape, walks, time.perf_counter() - start)
        self._counters.add_round([len(walk) for walk in walks], depths, shape.name)

    def _next_shape(self) -> Shape:
        """Return the draft of the next round; plain without a drafter or where it does not pay."""
        if self.drafter is None:
            return PLAIN
        if self._controller is None:
            return self._fixed
        self._follows = self.drafter.late or not self._controller.plain_for_good(self.active)
        # A row that the drafter lost sight of would be drafted from stale features.
        if not self._follows or not all(row.followed for row in self._slots.rows):
            return PLAIN
        shape = self._controller.choose(self.active)
        if shape != PLAIN:
            self.drafter.use(shape)
        return shape

    def _run_round(
        self, state: DraftState, shape: Shape, group: Group | None
    ) -> tuple[list[Walk], list[int]]:
        """Draft, verify, commit, extend; return what rows accepted, and depths of drafts."""
        with self._clock.phase("draft"):
            if self.drafter is None or shape == PLAIN:
                tree = root_tree(state.root_B)
            else:
                tree = self.drafter.draft(state)
        tree_pass, places = self._tree_pass(state, tree, alone=group is None)
        passes = [tree_pass, *(group.last_passes if group is not None else ())]
        sizes = [each.tokens_BN.numel() for each in passes]
        with self._clock.phase("verify", prefill=sum(sizes[1:]) / sum(sizes)):
            output, *others = self._run_passes(passes)
        with self._clock.phase("verify"):
            logits_RV, first_B1V = self._logits(output, group, others)
            processed_RV = self._processed(logits_RV, places, tree, state)
            verdict = self._judge(state, tree, processed_RV, places)
            result = _round_result(tree, verdict, logits_RV, processed_RV, places)
            self._commit(state, tree, verdict)
        if self.drafter is not None and self._follows:
            with self._clock.phase("draft"):
                features_BNF = places.by_node(output.features_BNF.flatten(0, 1))
                self._extend(self.drafter, state, features_BNF, verdict)
        else:
            for row in self._slots.rows[: state.root_B.shape[0]]:
                row.followed = False
        # Here the host waits for the round, and nowhere before.
        logprobs = None
        if state.params.logprobs is not None:
            by_node_BNV = places.by_node(logits_RV)
            logprobs = path_logprobs(by_node_BNV, verdict, state.params.logprobs)
        depths = tree.depths
        walks = self._account(result.tolist(), depths, logprobs)
        if group is not None:
            self._begin(group, others, first_B1V)
        return walks, depths

    def _logits(
        self, output: TargetOutput, group: Group | None, others: Sequence[TargetOutput]
    ) -> tuple[Tensor, Tensor]:
        """Return the logits of a round, and of the places where prompts beside it end.

        Together: the output projection, which weighs as much as many layers, is read once.
        """
        B, N, H = output.hidden_BNH.shape
        hidden_RH = output.hidden_BNH.reshape(B * N, H)
        if group is not None:
            last_B1H = self._prefill.last_hidden(group, others)
            hidden_RH = torch.cat((hidden_RH, last_B1H[:, 0]))
        logits_RV = self.target.logits(hidden_RH)
        return logits_RV[: B * N], logits_RV[B * N :, None]

    def _processed(
        self, logits_RV: Tensor, places: Places, tree: DraftTree, state: DraftState
    ) -> Tensor:
        """Return the logits to choose from; rows of different lengths ask for no adjustment."""
        if not places.whole:
            return logits_RV
        logits_BNV = places.by_node(logits_RV)
        return self._adjustments.adjust(logits_BNV, 0, tree, state.params).flatten(0, 1)

    def _state(self, count: int, shape: Shape) -> DraftState:
        slots, rows = self._slots, slice(0, count)
        # Copies: the originals move on when the round commits.
        return DraftState(
            0,
            slots.root_S[rows].clone(),
            slots.length_S[rows].clone(),
            slots.index_S[rows].clone(),
            slots.params if count == self.active else slots.params.narrow(0, count),
            max(row.length for row in slots.rows[rows]),
            self._adjustments.guides.draft(0, count),
            0.0 if self._controller is None else self._controller.price(shape, count),
        )

    def _tree_pass(self, state: DraftState, tree: DraftTree, *, alone: bool) -> tuple[Pass, Places]:
        """Return the pass over the nodes of trees, and where they lie in it.

        alone: no prompts go along, which run by other kernels where they are long.
        """
        N = tree.tokens_BN.shape[1]
        write_BN = state.length_B[:, None] + torch.arange(N, device=state.length_B.device)
        positions_BN = state.length_B[:, None] + tree.depth_BN
        extent = _bucket(state.longest + N, self.cache.shape.capacity)
        step = self.cache.step(
            0, write_BN, state.length_B, tree.ancestors_BNN, positions_BN, extent
        )
        if tree.used_BN is None:
            return Pass(tree.tokens_BN, positions_BN, step), all_nodes(tree)
        padded = Pass(tree.tokens_BN.clamp(min=0), positions_BN, step)
        if alone and self.target.can_trim:
            trimmed = padded.trimmed(tree.used_BN)
            if self.target.trims(trimmed):
                return trimmed, used_nodes(tree)
        return padded, all_nodes(tree)

    def _run_passes(self, passes: Sequence[Pass]) -> list[TargetOutput]:
        # Nobody takes the features in while the drafter does not follow.
        return self.target.forward_together(passes, self._aux_layers if self._follows else ())

    def _judge(
        self, state: DraftState, tree: DraftTree, logits_RV: Tensor, places: Places
    ) -> Verdict:
        """Let the target choose at the nodes of the trees and walk down its choices."""
        params = state.params
        if not params.sampled and not places.whole:
            return walk(tree, places.by_node(best_tokens(logits_RV)[:, None])[..., 0])
        if not (params.sampled and params.host_looks):
            index_BN = state.index_B[:, None] + tree.depth_BN
            logits_BNV = places.by_node(logits_RV)
            return walk(tree, choose(logits_BNV, index_BN, params, self._eos_ids))

        def choose_at(rows_R: Tensor, nodes_R: Tensor, depth: int) -> Tensor:
            index_R1 = state.index_B[rows_R, None] + depth
            logits_R1V = logits_RV[places.place_BN[rows_R, nodes_R]][:, None]
            return choose(logits_R1V, index_R1, params.pick(rows_R), self._eos_ids)[:, 0]

        return walk_stepwise(tree, choose_at)

    def _commit(self, state: DraftState, tree: DraftTree, verdict: Verdict) -> None:
        """Keep the accepted path's keys and move every row's root, length and index on."""
        if tree.depth > 0:
            places = torch.arange(tree.depth + 1, device=verdict.path_BA.device)
            target_BA = state.length_B[:, None] + places
            # Places behind the accepted path copy onto themselves.
            behind = places > verdict.accepted_B[:, None]
            source_BA = torch.where(behind, target_BA, state.length_B[:, None] + verdict.path_BA)
            self.cache.keep(0, source_BA, target_BA)
        rows = slice(0, state.root_B.shape[0])
        gained_B = verdict.accepted_B + 1
        self._slots.root_S[rows] = verdict.tokens_BA.gather(1, verdict.accepted_B[:, None])[:, 0]
        self._adjustments.add(0, verdict.tokens_BA, gained_B)
        self._slots.length_S[rows] += gained_B
        self._slots.index_S[rows] += gained_B

    def _extend(
        self, drafter: Drafter, state: DraftState, features_BNF: Tensor, verdict: Verdict
    ) -> None:
        index = verdict.path_BA[..., None].expand(*verdict.path_BA.shape, features_BNF.shape[-1])
        features_BAF = features_BNF.gather(1, index)
        chain = CommittedChain(0, state.length_B, verdict.accepted_B, state.longest)
        drafter.extend(chain, features_BAF, verdict.tokens_BA)

    def _account(
        self, result: list[list[int]], depths: Sequence[int], logprobs: Logprobs | None
    ) -> list[Walk]:
        walks: list[Walk] = []
        rows = zip(self._slots.rows[: len(result)], result, strict=True)
        for place, (row, (count, status, *rest)) in enumerate(rows):
            places = len(rest) // 3
            tokens, orders, ranks = rest[:places], rest[places : 2 * places], rest[2 * places :]
            row.target_passes += 1
            row.drafted += depths[place]
            row.accepted += count
            row.length += count + 1
            walks.append(list(zip(orders, ranks, strict=True))[1 : count + 1])
            self._append(row, tokens[: count + 1], logprobs, place, status)
        return walks

    def _append(
        self,
        row: Row,
        tokens: Sequence[int],
        logprobs: Logprobs | None,
        place: int,
        status: int,
    ) -> None:
        taken = self._ends.append(row, tokens, status)
        self._counters.completion_tokens += taken
        if logprobs is not None and row.request.params.logprobs is not None:
            logprobs.extend(row, place, taken)

    def _release_finished(self) -> list[Completion]:
        done = [slot for slot, row in enumerate(self._slots.rows) if row.finish_reason is not None]
        completions = [self._ends.completion(self._slots.rows[slot]) for slot in done]
        for slot in reversed(done):
            self._release(slot)
        self._counters.rows += len(done)
        return completions

    def _release(self, slot: int) -> None:
        row = self._slots.rows[slot]
        self._ids.discard(row.request.id)
        last = self._slots.drop(slot)
        self._starts.ended(row, slot, last)
        if slot != last:
            # The row that ended keeps its keys in the free slot: its next text may go on there.
            length = max(row.length, self._slots.rows[slot].length)
            self.cache.swap_rows(slot, last, length)
            self._adjustments.move_row(last, slot)
            if self.drafter is not None:
                self.drafter.swap_rows(slot, last, length)
        if row.finish_reason == "overflow":
            self.cache.clear(last)


def _round_result(
    tree: DraftTree, verdict: Verdict, logits_RV: Tensor, processed_RV: Tensor, places: Places
) -> Tensor:
    """Pack what the host needs into one tensor `[B, 2 + 3 * A]`.

    Accepted, status, tokens, and the orders and ranks of the walked nodes.
    """
    path_BA = verdict.path_BA
    status_B = scores_status(
        places.along(logits_RV, path_BA, verdict.tokens_BA),
        places.along(processed_RV, path_BA, verdict.tokens_BA),
    )
    return torch.cat(
        (
            verdict.accepted_B[:, None],
            status_B[:, None],
            verdict.tokens_BA,
            tree.order_BN.gather(1, path_BA),
            tree.rank_BN.gather(1, path_BA),
        ),
        dim=1,
    )


def _bucket(extent: int, capacity: int, size: int = 32) -> int:
    """Round an extent up, so that rounds share few shapes."""
    return min(capacity, -(-extent // size) * size)
