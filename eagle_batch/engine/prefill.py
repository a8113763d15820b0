"""Prefill: prompts into slots, in chunks, and only what no slot holds yet.

A group of prompts runs padded to the longest, chunk by chunk, through the target and over the
head's own slots. The last chunk of a prompt yields its first token.

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
from eagle_batch.engine.prefix import MIN_SHARED_TOKENS
from eagle_batch.engine.sampling import RowParams, choose
from eagle_batch.engine.slots import Row
from eagle_batch.engine.starts import Start, Starts, TokenTable
from eagle_batch.engine.waiting import Waiting
from eagle_batch.models.cache import KeyValueCache, causal_visibility
from eagle_batch.models.target import Target

#: Places (prompts x chunk) of one pass; bounds the memory of a prefill.
_MAX_PLACES = 4096
#: Places of a group for each token in it, and places that are always few enough: a prompt that is
#: much longer than the others has a pass of its own, which costs less than padding all of them.
_MOST_PADDING, _FEW_PLACES = 1.5, 64


class Prefill:
    """Runs prompts through the target and the drafter."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        cache: KeyValueCache,
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
        return self._starts.bring(group.rows, first_slot)

    def run(
        self, rows: Sequence[Row], first_slot: int, params: RowParams, *, follow: bool
    ) -> Begun:
        """Prefill rows into consecutive slots and choose their first tokens.

        follow: whether the drafter takes the prompts in too.
        """
        starts = [row.length for row in rows]
        group = _Group(
            prompts=[row.request.prompt_ids for row in rows],
            starts=starts,
            first_slot=first_slot,
            drafter=self._drafter if follow else None,
            params=params.narrow(first_slot, first_slot + len(rows)),
            tokens_B=torch.zeros(len(rows), dtype=torch.int64, device=self._target.device),
            status_B=torch.full((len(rows),), FINE, device=self._target.device),
            hidden_BH=self._target.embed_weight_VH.new_zeros(len(rows), self._target.shape.hidden),
        )
        for offset in range(0, group.longest, self._chunk):
            self._run_chunk(group, offset, min(self._chunk, group.longest - offset))
        for slot, row in enumerate(rows, start=first_slot):
            self._starts.begun(slot, row, row.length)
            self.cached_tokens += row.length
            row.length = len(row.request.prompt_ids)
            self.prompt_tokens += row.length
        logprobs = None
        if params.logprobs is not None:
            logits_B1V = self._target.logits(group.hidden_BH[:, None])
            logprobs = place_logprobs(logits_B1V, group.tokens_B[:, None], params.logprobs)
        return Begun(group.tokens_B, group.status_B, logprobs)

    def _run_chunk(self, group: _Group, offset: int, width: int) -> None:
        """Run places offset .. offset + width of every prompt; fill in the rows that end here."""
        device = self._target.device
        bases = [start + offset for start in group.starts]
        base_B = torch.tensor(bases, device=device)
        positions_BN = base_B[:, None] + torch.arange(width, device=device)
        visible = causal_visibility(len(bases), width, device)
        extent = min(max(bases) + width, self._cache.shape.capacity)
        step = self._cache.step(
            group.first_slot, positions_BN, base_B, visible, positions_BN, extent
        )
        aux_layers = () if group.drafter is None else group.drafter.aux_layers
        tokens_BN = _padded(group.prompts, bases, width, device)
        output = self._target.forward(tokens_BN, positions_BN, step, aux_layers)
        last_B = torch.tensor([len(p) - 1 for p in group.prompts], device=device) - base_B
        ends_B = (last_B >= 0) & (last_B < width)
        self._first_tokens(group, output.hidden_BNH, last_B, ends_B)
        if group.drafter is not None:
            next_BN = _padded(group.prompts, [base + 1 for base in bases], width, device)
            # The token after a prompt's last one is the token just chosen.
            place_BN = torch.arange(width, device=device)[None] == last_B[:, None]
            next_BN = torch.where(place_BN, group.tokens_B[:, None], next_BN)
            chain = CommittedChain(
                group.first_slot,
                base_B,
                last_B.clamp(0, width - 1),
                max(bases),
                ends_B,
                before_B=tokens_BN[:, 0] if offset == 0 else None,
            )
            group.drafter.extend(chain, output.features_BNF, next_BN)

    def _first_tokens(
        self, group: _Group, hidden_BNH: Tensor, last_B: Tensor, ends_B: Tensor
    ) -> None:
        B, N, H = hidden_BNH.shape
        place = last_B.clamp(0, N - 1)[:, None, None].expand(B, 1, H)
        hidden_B1H = hidden_BNH.gather(1, place)
        logits_B1V = self._target.logits(hidden_B1H)
        processed = self._adjustments.adjust(logits_B1V, group.first_slot, None, group.params)
        first_B1 = torch.zeros_like(last_B)[:, None]
        chosen_B1 = choose(processed, first_B1, group.params, self._eos_ids)
        place_B11 = chosen_B1[..., None]
        status_B1 = scores_status(
            logits_B1V.gather(-1, place_B11)[..., 0], processed.gather(-1, place_B11)[..., 0]
        )
        group.tokens_B.copy_(torch.where(ends_B, chosen_B1[:, 0], group.tokens_B))
        group.status_B.copy_(torch.where(ends_B, status_B1, group.status_B))
        group.hidden_BH.copy_(torch.where(ends_B[:, None], hidden_B1H[:, 0], group.hidden_BH))


class _Candidates:
    """Rows that are to be prefilled in one pass."""

    def __init__(self, chunk: int, most: int, context: int) -> None:
        self.rows: list[tuple[Row, Start]] = []
        self._chunk = chunk
        self._prompts = TokenTable(most, context)
        self._tokens = self._longest = 0

    def takes(self, row: Row, start: Start) -> bool:
        """Take a row in unless it is better off with the next group.

        It is where it shares more with a row of this group than is known: it copies that then.
        """
        prompt, count = row.request.prompt_ids, len(self.rows)
        new = len(prompt) - start.length
        tokens, longest = self._tokens + new, max(self._longest, new)
        places = min(longest, self._chunk) * (count + 1)
        if count:
            shared = int(self._prompts.common(prompt, count).max())
            wide = places > max(_FEW_PLACES, _MOST_PADDING * tokens)
            if wide or places > _MAX_PLACES or shared - start.length > MIN_SHARED_TOKENS:
                return False
        self._prompts.set(count, prompt)
        self.rows.append((row, start))
        self._tokens, self._longest = tokens, longest
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
class _Group:
    """Prompts that are prefilled together; the tensors are filled in as the prompts end."""

    prompts: Sequence[Sequence[int]]
    #: Tokens of each prompt that are there already.
    starts: Sequence[int]
    first_slot: int
    drafter: Drafter | None
    params: RowParams
    tokens_B: Tensor
    status_B: Tensor
    #: Hidden state of each prompt's last token.
    hidden_BH: Tensor

    @property
    def longest(self) -> int:
        """Most tokens that any prompt still needs."""
        return max(len(p) - s for p, s in zip(self.prompts, self.starts, strict=True))


def _padded(
    prompts: Sequence[Sequence[int]], bases: Sequence[int], width: int, device: torch.device
) -> Tensor:
    """Return tokens base .. base + width of every prompt, int64 `[B, width]`, zero-padded."""
    parts = [prompt[base : base + width] for prompt, base in zip(prompts, bases, strict=True)]
    rows = [[*part, *([0] * (width - len(part)))] for part in parts]
    return torch.tensor(rows, dtype=torch.int64, device=device)
