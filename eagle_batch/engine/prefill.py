"""Prefill: prompts into slots, in chunks, and only what no slot holds yet.

A group of prompts runs chunk by chunk through the target, in one pass of several rectangles, and
over the head's own slots. The last chunk of a prompt yields its first token. A group's last pass is
left to the engine, which joins it to the round of the rows that are being decoded.

Shape legend: B prompts of a group, N places of a chunk, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eagle_batch.engine.adjust import Adjustments
from eagle_batch.engine.drafters.base import CommittedChain, Drafter
from eagle_batch.engine.ending import FINE, scores_status
from eagle_batch.engine.logprobs import Logprobs, place_logprobs
from eagle_batch.engine.sampling import RowParams, choose
from eagle_batch.engine.slots import Row
from eagle_batch.engine.starts import Start, Starts, TokenTable
from eagle_batch.engine.waiting import Waiting
from eagle_batch.models.cache import Cache, causal_visibility
from eagle_batch.models.target import Pass, Target, TargetOutput

#: Tokens of one pass; bounds the memory of a prefill.
_MAX_TOKENS = 4096
#: Places of a rectangle of prompts for each token in it; what is more uneven is several of them.
_MOST_PADDING = 1.25
#: Tokens that are worth waiting for another prompt which computes them: about those of a round.
_WORTH_WAITING = 32


class Prefill:
    """Runs prompts through the target and the drafter."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        cache: Cache,
        adjustments: Adjustments,
        eos_ids: Tensor,
        chunk: int,
        starts: Starts,
    ) -> None:
        self._target = target
        self._drafter = drafter
        self._cache = cache
        self._adjustments = adjustments
        self._eos_ids = eos_ids
        self._chunk = chunk
        self._starts = starts
        self.prompt_tokens = 0
        self.cached_tokens = 0

    def use(self, drafter: Drafter) -> None:
        """Show prompts to another drafter, or one that has learnt; it knows no starts yet."""
        self._drafter = drafter
        self._starts.use(drafter)

    def admit(self, waiting: Waiting, first_slot: int, free: int, *, follow: bool) -> list[Row]:
        """Take requests off the queue for the slots from the first on; return their rows by slot.

        follow: whether the drafter takes the prompts in too.
        """
        group = _Candidates(self._chunk, free, self._cache.shape.capacity)
        while waiting and len(group.rows) < free:
            row = Row(waiting.first, followed=follow)
            start = self._starts.find(row.request.prompt_ids, follow=follow)
            if not group.takes(row, start):
                break
            waiting.take()
        # Neighbours of about the same width make a rectangle.
        rows = sorted(group.rows, key=lambda item: len(item[0].request.prompt_ids) - item[1].length)
        return self._starts.bring(rows, first_slot)

    def begin(
        self, rows: Sequence[Row], first_slot: int, params: RowParams, *, follow: bool
    ) -> Group:
        """Prefill rows into consecutive slots, all but the last pass, which the group holds.

        follow: whether the drafter takes the prompts in too.
        """
        group = Group(
            rows=rows,
            prompts=[row.request.prompt_ids for row in rows],
            starts=[row.length for row in rows],
            first_slot=first_slot,
            drafter=self._drafter if follow else None,
            params=params.narrow(first_slot, first_slot + len(rows)),
            tokens_B=torch.zeros(len(rows), dtype=torch.int64, device=self._target.device),
            status_B=torch.full((len(rows),), FINE, device=self._target.device),
            hidden_BH=self._target.embed_weight_VH.new_zeros(len(rows), self._target.shape.hidden),
        )
        for offset in range(0, group.longest, self._chunk):
            if group.chunk is not None:
                aux_layers = () if group.drafter is None else group.drafter.aux_layers
                outputs = self._target.forward_together(group.chunk.passes, aux_layers)
                logits_B1V = self._target.logits(self.last_hidden(group, outputs))
                self._take_in(group, outputs, logits_B1V)
            group.chunk = self._next_chunk(group, offset, min(self._chunk, group.longest - offset))
        return group

    def last_hidden(self, group: Group, outputs: Sequence[TargetOutput]) -> Tensor:
        """Keep what the passes of a group's chunk gave where prompts end in it.

        Returns what is known of the ends of all its prompts, `[B, 1, H]`.
        """
        assert group.chunk is not None
        hidden_BNH = group.chunk.spread([output.hidden_BNH for output in outputs])
        last_B, ends_B = _ends(group, group.chunk)
        B, N, H = hidden_BNH.shape
        place_B1H = last_B.clamp(0, N - 1)[:, None, None].expand(B, 1, H)
        hidden_BH = hidden_BNH.gather(1, place_B1H)[:, 0]
        group.hidden_BH.copy_(torch.where(ends_B[:, None], hidden_BH, group.hidden_BH))
        return group.hidden_BH[:, None]

    def end(self, group: Group, outputs: Sequence[TargetOutput], logits_B1V: Tensor) -> Begun:
        """Take in what a group's last passes gave; return the first tokens.

        logits_B1V: the target's logits of `last_hidden`.
        """
        self._take_in(group, outputs, logits_B1V)
        for slot, row in enumerate(group.rows, start=group.first_slot):
            self._starts.begun(slot, row, row.length)
            self.cached_tokens += row.length
            row.length = len(row.request.prompt_ids)
            self.prompt_tokens += row.length
        logprobs = None
        if group.params.logprobs is not None:
            logprobs = place_logprobs(logits_B1V, group.tokens_B[:, None], group.params.logprobs)
        return Begun(group.tokens_B, group.status_B, logprobs)

    def _next_chunk(self, group: Group, offset: int, width: int) -> _Chunk:
        """Lay out places offset .. offset + width of every prompt, in few rectangles."""
        bases = [start + offset for start in group.starts]
        pairs = zip(group.prompts, bases, strict=True)
        spans = rectangles([min(width, len(prompt) - base) for prompt, base in pairs])
        passes = [
            self._pass(group.first_slot + s.first, group.prompts[s.rows], bases[s.rows], s.width)
            for s in spans
        ]
        return _Chunk(passes, spans, offset, bases, width)

    def _pass(
        self, slot: int, prompts: Sequence[Sequence[int]], bases: Sequence[int], width: int
    ) -> Pass:
        device = self._target.device
        base_B = torch.tensor(bases, device=device)
        positions_BN = base_B[:, None] + torch.arange(width, device=device)
        visible = causal_visibility(len(bases), width, device)
        extent = min(max(bases) + width, self._cache.shape.capacity)
        step = self._cache.step(slot, positions_BN, base_B, visible, positions_BN, extent)
        return Pass(_padded(prompts, bases, width, device), positions_BN, step)

    def _take_in(self, group: Group, outputs: Sequence[TargetOutput], logits_B1V: Tensor) -> None:
        """Choose for the prompts that end in a group's chunk; let the drafter follow all of it."""
        chunk = group.chunk
        assert chunk is not None
        width, device = chunk.width, self._target.device
        base_B = torch.tensor(chunk.bases, device=device)
        last_B, ends_B = _ends(group, chunk)
        self._first_tokens(group, logits_B1V, ends_B)
        if group.drafter is not None:
            features_BNF = chunk.spread([output.features_BNF for output in outputs])
            tokens_B = _padded(group.prompts, chunk.bases, 1, device)[:, 0]
            next_BN = _padded(group.prompts, [base + 1 for base in chunk.bases], width, device)
            # The token after a prompt's last one is the token just chosen.
            place_BN = torch.arange(width, device=device)[None] == last_B[:, None]
            next_BN = torch.where(place_BN, group.tokens_B[:, None], next_BN)
            chain = CommittedChain(
                group.first_slot,
                base_B,
                last_B.clamp(0, width - 1),
                max(chunk.bases),
                ends_B,
                before_B=tokens_B if chunk.offset == 0 else None,
            )
            group.drafter.extend(chain, features_BNF, next_BN)

    def _first_tokens(self, group: Group, logits_B1V: Tensor, ends_B: Tensor) -> None:
        processed = self._adjustments.adjust(logits_B1V, group.first_slot, None, group.params)
        first_B1 = torch.zeros_like(group.tokens_B)[:, None]
        chosen_B1 = choose(processed, first_B1, group.params, self._eos_ids)
        place_B11 = chosen_B1[..., None]
        status_B1 = scores_status(
            logits_B1V.gather(-1, place_B11)[..., 0], processed.gather(-1, place_B11)[..., 0]
        )
        group.tokens_B.copy_(torch.where(ends_B, chosen_B1[:, 0], group.tokens_B))
        group.status_B.copy_(torch.where(ends_B, status_B1, group.status_B))


class _Candidates:
    """Rows that are to be prefilled in one pass."""

    def __init__(self, chunk: int, most: int, context: int) -> None:
        self.rows: list[tuple[Row, Start]] = []
        self._chunk = chunk
        self._prompts = TokenTable(most, context)
        self._tokens = 0

    def takes(self, row: Row, start: Start) -> bool:
        """Take a row in unless it is better off with the next group.

        It is where it shares much more with a row of this group than is known: it copies that then.
        """
        prompt, count = row.request.prompt_ids, len(self.rows)
        tokens = self._tokens + min(self._chunk, len(prompt) - start.length)
        if count:
            shared = int(self._prompts.common(prompt, count).max())
            if tokens > _MAX_TOKENS or shared - start.length > _WORTH_WAITING:
                return False
        self._prompts.set(count, prompt)
        self.rows.append((row, start))
        self._tokens = tokens
        return True


@dataclass(frozen=True, slots=True)
class Begun:
    """What a prefill yields for each of its rows."""

    #: int64 [B]; the first generated token.
    tokens_B: Tensor
    #: int64 [B]; what `scores_status` says of the choice.
    status_B: Tensor
    logprobs: Logprobs | None


@dataclass(frozen=True, slots=True)
class Rectangle:
    """Rows of a group, first to stop, that are padded to one width."""

    first: int
    stop: int
    width: int

    @property
    def rows(self) -> slice:
        """The rows as a slice of the group's."""
        return slice(self.first, self.stop)


def rectangles(widths: Sequence[int]) -> list[Rectangle]:
    """Cut rows of these widths into rectangles with little padding; rows without width are in none.

    Rows lie in slots side by side, so that a rectangle has neighbours only.
    """
    found: list[Rectangle] = []
    tokens = 0
    for row, width in enumerate(widths):
        if width <= 0:
            continue
        last = found[-1] if found else None
        if last is not None and last.stop == row:
            wider = Rectangle(last.first, row + 1, max(last.width, width))
            places = wider.width * (wider.stop - wider.first)
            if places <= _MOST_PADDING * (tokens + width):
                found[-1], tokens = wider, tokens + width
                continue
        found.append(Rectangle(row, row + 1, width))
        tokens = width
    return found


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Some places of every prompt of a group."""

    passes: list[Pass]
    #: The rows of each pass.
    spans: list[Rectangle]
    #: From where on, counted from what is there of each prompt; the same in each prompt.
    offset: int
    bases: Sequence[int]
    width: int

    def spread(self, parts: Sequence[Tensor]) -> Tensor:
        """Lay what the passes gave side by side, `[B, width, _]`; zero where nothing ran."""
        whole = parts[0].new_zeros(len(self.bases), self.width, parts[0].shape[-1])
        for span, part in zip(self.spans, parts, strict=True):
            whole[span.rows, : span.width] = part
        return whole


@dataclass(slots=True)
class Group:
    """Prompts that are prefilled together; the tensors are filled in as the prompts end."""

    rows: Sequence[Row]
    prompts: list[tuple[int, ...]]
    #: Tokens of each prompt that are there already.
    starts: Sequence[int]
    first_slot: int
    drafter: Drafter | None
    params: RowParams
    tokens_B: Tensor
    status_B: Tensor
    #: Hidden state of each prompt's last token.
    hidden_BH: Tensor
    #: What runs next.
    chunk: _Chunk | None = None

    @property
    def last_passes(self) -> list[Pass]:
        """What the engine runs, in one pass."""
        assert self.chunk is not None
        return self.chunk.passes

    @property
    def longest(self) -> int:
        """Most tokens that any prompt still needs."""
        return max(len(p) - s for p, s in zip(self.prompts, self.starts, strict=True))


def _ends(group: Group, chunk: _Chunk) -> tuple[Tensor, Tensor]:
    """Return where each prompt's last token is from a chunk's start on, and whether in it."""
    pairs = zip(group.prompts, chunk.bases, strict=True)
    lasts = [len(prompt) - 1 - base for prompt, base in pairs]
    last_B = torch.tensor(lasts, device=group.tokens_B.device)
    return last_B, (last_B >= 0) & (last_B < chunk.width)


def _padded(
    prompts: Sequence[Sequence[int]], bases: Sequence[int], width: int, device: torch.device
) -> Tensor:
    """Return tokens base .. base + width of every prompt, int64 `[B, width]`, zero-padded."""
    parts = [prompt[base : base + width] for prompt, base in zip(prompts, bases, strict=True)]
    rows = [[*part, *([0] * (width - len(part)))] for part in parts]
    return torch.tensor(rows, dtype=torch.int64, device=device)
