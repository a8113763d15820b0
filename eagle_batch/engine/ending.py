"""When a completion ends, decided token by token on the host, and what its text is.

A round may accept tokens beyond an end; they are cut here, so that nothing after an end-of-sequence
token, a stop or the length is ever emitted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from eagle_batch.engine.request import Completion, FinishReason
from eagle_batch.engine.slots import Row

Decode = Callable[[Sequence[int]], str]

#: What `scores_status` says of a row's choices.
FINE = 1
_FAULTS: dict[int, FinishReason] = {0: "overflow", 2: "banned"}


def scores_status(logits_BA: Tensor, processed_BA: Tensor) -> Tensor:
    """Return for each row FINE, 0 where a chosen logit is not finite, 2 where all were banned.

    Both are the scores of the chosen tokens along a path, before and after adjustment. A NaN
    anywhere wins the argmax, so the chosen logit tells of its whole place; where the best adjusted
    score is minus infinity, there was nothing to choose from.
    """
    banned_B = (processed_BA == -torch.inf).any(1).long()
    return (1 + banned_B).masked_fill(~logits_BA.isfinite().all(1), 0)


class EndRules:
    """Applies length, end-of-sequence, stop ids and stop strings to new tokens."""

    def __init__(self, eos_ids: Sequence[int], context: int, decode: Decode) -> None:
        self._eos_ids = frozenset(eos_ids)
        self._context = context
        self._decode = decode

    def append(self, row: Row, tokens: Sequence[int], status: int) -> int:
        """Append the tokens of one pass until the row ends; return how many were taken.

        status: what `scores_status` says of the choices; all are dropped unless it is FINE.
        """
        if status != FINE:
            row.finish_reason = _FAULTS[status]
            return 0
        taken = self._take(row, tokens)
        # The last of a pass is the target's own; those before it were drafted.
        row.accepted_by_pass.append(min(taken, len(tokens) - 1))
        return taken

    def _take(self, row: Row, tokens: Sequence[int]) -> int:
        for taken, token in enumerate(tokens, start=1):
            row.tokens.append(token)
            if row.guide is not None:
                row.guide.advance((token,))
            row.finish_reason = self._reason(row, token)
            if row.finish_reason is not None:
                return taken
        return len(tokens)

    def completion(self, row: Row) -> Completion:
        """Return the finished row as the caller sees it."""
        assert row.finish_reason is not None
        text = "" if row.finish_reason in {"overflow", "banned"} else self._text(row)
        return Completion(
            request_id=row.request.id,
            token_ids=tuple(row.tokens),
            text=text,
            finish_reason=row.finish_reason,
            prompt_tokens=len(row.request.prompt_ids),
            target_passes=row.target_passes,
            drafted=row.drafted,
            accepted=row.accepted,
            accepted_by_pass=tuple(row.accepted_by_pass),
            logprobs=None if row.request.params.logprobs is None else tuple(row.logprobs),
            top_logprobs=tuple(row.top_logprobs) if row.request.params.logprobs else None,
            complete=row.guide is None or row.guide.complete,
            prompt_ids=row.request.prompt_ids,
        )

    def _text(self, row: Row) -> str:
        text = self._decode(row.tokens)
        return text if row.text_end is None else text[: row.text_end]

    def _reason(self, row: Row, token: int) -> FinishReason | None:
        params = row.request.params
        count = len(row.tokens)
        if count >= params.min_tokens:
            if token in self._eos_ids and not params.ignore_eos:
                return "eos"
            if token in params.stop_token_ids or self._stops(row):
                return "stop"
        if count >= params.max_tokens:
            return "length"
        if len(row.request.prompt_ids) + count >= self._context:
            return "context"
        return None

    def _stops(self, row: Row) -> bool:
        """Look for a stop string in the text so far; it may begin in the middle of a token."""
        stops = row.request.params.stop
        if not stops:
            return False
        text = self._decode(row.tokens)
        ends = [at for stop in stops if (at := text.find(stop)) >= 0]
        if ends:
            row.text_end = min(ends)
        return bool(ends)
