"""Rows of all chunks, split in training and held-out, drawn as padded batches of similar length.

Rows are never packed into one sequence, so no text can attend to another.
Shape legend: B texts, N tokens of the longest one, F width of the features, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from eagle_batch.models.heads import Head
from eagle_batch.training.features import Chunk, groups_of_similar_length
from eagle_batch.training.samples import Sample, is_held_out

#: Batches whose rows are sorted by length together; more pads less, fewer shuffles better.
_POOL_BATCHES = 32


@dataclass(frozen=True, slots=True)
class Batch:
    """Texts padded on the right, with the target's hidden states."""

    tokens_BN: Tensor
    aux_BNF: Tensor
    last_BNH: Tensor
    #: Most probable token after each position.
    top_BN: Tensor
    #: Position j counts when the token after it belongs to the text: 1 in the completion.
    completion_BN: Tensor
    prompt_BN: Tensor

    def to(self, device: torch.device) -> Batch:
        """Return the batch on a device."""
        return Batch(*(getattr(self, name).to(device) for name in Batch.__slots__))


class Dataset:
    """Training and held-out rows over memory-mapped chunks; an index names a row of all chunks."""

    def __init__(
        self, chunks: Sequence[Chunk], held_out: float, scale_F: Tensor | None = None
    ) -> None:
        self.chunks = chunks
        self.scale_F = scale_F
        self._rows = [
            (c, r) for c, chunk in enumerate(chunks) for r in range(len(chunk.starts) - 1)
        ]
        held = [is_held_out(self.sample(i), held_out) for i in range(len(self._rows))]
        self.training = [i for i, out in enumerate(held) if not out]
        self.validation = [i for i, out in enumerate(held) if out]

    def sample(self, index: int) -> Sample:
        """Return the tokens of one row."""
        chunk, span = self._span(index)
        row = self._rows[index][1]
        return Sample(tuple(chunk.tokens_T[span].tolist()), int(chunk.prompt_lengths[row]))

    def length(self, index: int) -> int:
        """Return the number of tokens of one row."""
        _, span = self._span(index)
        return int(span.stop - span.start)

    def completion_tokens(self) -> Tensor:
        """Return every completion token of the training rows, one after another."""
        parts = []
        for index in self.training:
            chunk, span = self._span(index)
            prompt = int(chunk.prompt_lengths[self._rows[index][1]])
            parts.append(chunk.tokens_T[span.start + prompt : span.stop])
        return torch.cat(parts)

    def epoch(self, seed: int, number: int, batch_tokens: int) -> list[list[int]]:
        """Return the batches of one epoch: same seed and number, same batches, on any machine."""
        generator = np.random.default_rng([seed, number])
        order = [self.training[i] for i in generator.permutation(len(self.training))]
        mean = sum(map(self.length, order)) / len(order)
        pool = max(1, int(_POOL_BATCHES * batch_tokens / mean))
        batches = []
        for start in range(0, len(order), pool):
            rows = order[start : start + pool]
            groups = groups_of_similar_length([self.length(i) for i in rows], batch_tokens)
            batches += [[rows[i] for i in group] for group in groups]
        return [batches[i] for i in generator.permutation(len(batches))]

    def batch(self, rows: Sequence[int]) -> Batch:
        """Gather rows into one padded batch; features are divided by the scale, if there is one."""
        spans = [self._span(i) for i in rows]
        aux = pad_sequence([c.aux_TF[s] for c, s in spans], batch_first=True)
        tokens_BN = pad_sequence([c.tokens_T[s].long() for c, s in spans], batch_first=True)
        lengths = torch.tensor([s.stop - s.start for _, s in spans])
        prompts = torch.tensor([int(self.chunks[c].prompt_lengths[r]) for c, r in self._at(rows)])
        j = torch.arange(tokens_BN.shape[1])
        text_BN = j < lengths[:, None] - 1
        completion_BN = text_BN & (j >= prompts[:, None] - 1)
        return Batch(
            tokens_BN=tokens_BN,
            aux_BNF=aux.float() if self.scale_F is None else aux / self.scale_F,
            last_BNH=pad_sequence([c.last_TH[s] for c, s in spans], batch_first=True),
            top_BN=pad_sequence([c.top_T[s].long() for c, s in spans], batch_first=True),
            completion_BN=completion_BN,
            prompt_BN=text_BN & ~completion_BN,
        )

    def _at(self, rows: Sequence[int]) -> list[tuple[int, int]]:
        return [self._rows[i] for i in rows]

    def _span(self, index: int) -> tuple[Chunk, slice]:
        number, row = self._rows[index]
        chunk = self.chunks[number]
        return chunk, slice(int(chunk.starts[row]), int(chunk.starts[row + 1]))


def feature_scale(chunks: Sequence[Chunk], most_tokens: int = 20000) -> Tensor:
    """Return the root-mean-square of each feature dimension.

    Some dimensions of a residual stream are a hundred times larger than the others;
    divided by this, all of them learn at one rate. The first token of a text, whose state is an
    outlier by orders of magnitude, is left out. The scale folds into fc when the head is exported.
    """
    total, count = torch.zeros(chunks[0].aux_TF.shape[1]), 0
    for chunk in chunks:
        part = chunk.aux_TF[: most_tokens - count].float().square()
        keep = torch.ones(len(part), dtype=torch.bool)
        keep[chunk.starts[chunk.starts < len(part)]] = False
        total += part[keep].sum(dim=0)
        count += int(keep.sum())
        if count >= most_tokens:
            break
    return (total / max(1, count)).sqrt().clamp(min=1e-3)


@torch.no_grad()
def rescale_fc(head: Head, scale_F: Tensor | None) -> None:
    """Rescale the columns of fc, so that it reads features that were divided by `scale_F`."""
    if scale_F is not None:
        weight: Tensor = head.fc.weight  # type: ignore[union-attr, assignment]
        weight.mul_(scale_F.to(weight.device))
