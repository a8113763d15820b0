"""Grammar masks for the places of a batch: each node of a tree by the state of its own path.

Rows without a grammar cost nothing. With one, the drafted tokens are read by the host once a round,
and once more a drafted level, since the grammars live there.

Shape legend: B rows, N nodes with the root, K nodes of a frontier, R guided places, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from eagle_batch.engine.grammars import Bits, Guide, Path
from eagle_batch.engine.slots import Slots
from eagle_batch.engine.tree import DraftTree


class Guides:
    """Applies the grammars of the rows in slots to their logits."""

    def __init__(self, slots: Slots) -> None:
        self._slots = slots

    def mask(self, logits_BNV: Tensor, first_row: int, tree: DraftTree | None) -> Tensor:
        """Return the logits with everything banned that leaves a row's grammar."""
        guides = self._guides(first_row, logits_BNV.shape[0])
        if not any(guides):
            return logits_BNV
        paths = [[()]] * len(guides) if tree is None or tree.depth == 0 else _paths(tree)
        rows, nodes, bits = _asked(guides, paths)
        if not bits:
            return logits_BNV
        allowed_RV = _unpack(bits, logits_BNV.shape[-1], logits_BNV.device)
        places = (
            torch.tensor(rows, device=logits_BNV.device),
            torch.tensor(nodes, device=logits_BNV.device),
        )
        kept_RV = logits_BNV[places].masked_fill(~allowed_RV, -torch.inf)
        return logits_BNV.index_put(places, kept_RV)

    def draft(self, first_row: int, rows: int) -> DraftGuide | None:
        """Return the grammars for a draft that grows level by level; None where no row has one."""
        guides = self._guides(first_row, rows)
        return DraftGuide(guides) if any(guides) else None

    def _guides(self, first_row: int, rows: int) -> list[Guide | None]:
        return [row.guide for row in self._slots.rows[first_row : first_row + rows]]


class DraftGuide:
    """Says which tokens a drafter need not bother to propose."""

    def __init__(self, guides: Sequence[Guide | None]) -> None:
        self._guides = guides
        self._paths: list[list[Path]] = [[()] for _ in guides]

    def ban(self, logits_BKV: Tensor, token_ids_V: Tensor) -> Tensor:
        """Return draft logits without the tokens that would leave a row's grammar.

        token_ids_V: target id of each draft token.
        """
        rows, nodes, bits = _asked(self._guides, self._paths)
        if not bits:
            return logits_BKV
        device = logits_BKV.device
        allowed_RV = _unpack(bits, 8 * len(bits[0]), device)[:, token_ids_V]
        places = (torch.tensor(rows, device=device), torch.tensor(nodes, device=device))
        return logits_BKV.index_put(places, logits_BKV[places].masked_fill(~allowed_RV, -torch.inf))

    def grow(self, parents_BK: Tensor, tokens_BK: Tensor) -> None:
        """Move on to a new frontier; parents are places of the frontier before it."""
        grown = torch.stack((parents_BK.expand_as(tokens_BK), tokens_BK), dim=-1).tolist()
        self._paths = [
            [(*paths[parent], token) for parent, token in row]
            for paths, row in zip(self._paths, grown, strict=True)
        ]


def _asked(
    guides: Sequence[Guide | None], paths: Sequence[Sequence[Path]]
) -> tuple[list[int], list[int], list[Bits]]:
    """Return row, node and permitted tokens of every place that some grammar has a say in."""
    rows, nodes, bits = [], [], []
    for row, guide in enumerate(guides):
        for node, path in enumerate(paths[row] if guide is not None else ()):
            assert guide is not None
            found = guide.allowed(path)
            if found is not None:
                rows.append(row)
                nodes.append(node)
                bits.append(found)
    return rows, nodes, bits


def _paths(tree: DraftTree) -> list[list[Path]]:
    """Return the drafted tokens on the way to every node, the root's own token left out."""
    found = []
    for row in torch.stack((tree.parents_BN, tree.tokens_BN), dim=-1).tolist():
        paths: list[Path] = [()]
        for parent, token in row[1:]:
            paths.append((*paths[parent], token))
        found.append(paths)
    return found


def _unpack(bits: Sequence[Bits], vocab: int, device: torch.device) -> Tensor:
    """Return packed bits as bool `[R, vocab]`; they travel to the device packed."""
    packed = torch.from_numpy(np.stack(bits)).to(device)
    shifts = torch.arange(8, dtype=torch.uint8, device=device)
    return ((packed[..., None] >> shifts) & 1).flatten(1)[:, :vocab].bool()
