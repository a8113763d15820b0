"""Log-probabilities of emitted tokens, taken from the target's unprocessed distribution.

Shape legend: B rows, N nodes with the root, A places of a path, K best tokens, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from eagle_batch.engine.slots import Row
from eagle_batch.engine.verify import Verdict


@dataclass(frozen=True, slots=True)
class Logprobs:
    """What one pass has to say about the places of every row, on the host."""

    #: [B][A]; of the token at each place.
    chosen: list[list[float]]
    #: [B][A][K]; ids and values of the best tokens at each place, best first.
    best_ids: list[list[list[int]]]
    best: list[list[list[float]]]

    def extend(self, row: Row, place: int, count: int) -> None:
        """Append the first `count` places of one row of the pass."""
        wanted = row.request.params.logprobs or 0
        row.logprobs.extend(self.chosen[place][:count])
        for ids, values in zip(self.best_ids[place][:count], self.best[place][:count], strict=True):
            row.top_logprobs.append(tuple(zip(ids[:wanted], values[:wanted], strict=True)))


def path_logprobs(logits_BNV: Tensor, verdict: Verdict, count: int) -> Logprobs:
    """Return log-probabilities along the accepted paths."""
    index = verdict.path_BA[..., None].expand(*verdict.path_BA.shape, logits_BNV.shape[-1])
    return place_logprobs(logits_BNV.gather(1, index), verdict.tokens_BA, count)


def place_logprobs(logits_BAV: Tensor, tokens_BA: Tensor, count: int) -> Logprobs:
    """Return the log-probabilities of given tokens and of the `count` best ones at each place."""
    log_p = logits_BAV.float().log_softmax(-1)
    chosen = log_p.gather(-1, tokens_BA[..., None])[..., 0]
    best = log_p.topk(count)
    return Logprobs(chosen.tolist(), best.indices.tolist(), best.values.tolist())
