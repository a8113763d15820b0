"""Memory for weights in huge pages.

What kernels read of a weight is read once a pass. In pages of 4 KiB the processor spends a third of
that time on finding out where the next page lies, and it does not read ahead across their borders.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

#: Bytes of a piece of memory; numpy asks for huge pages where a piece is large.
_PIECE = 32 * 2**20
#: Bytes of a line of the cache, at which weights begin.
_LINE = 64


class Shelf:
    """Holds weights side by side in a few large pieces of memory."""

    def __init__(self) -> None:
        self._piece = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def put(self, weight: Tensor) -> Tensor:
        """Return a contiguous copy of a weight on the CPU that lies on the shelf."""
        size = weight.nbytes
        if self._used + size > len(self._piece):
            memory = np.empty(max(_PIECE, size + _LINE), np.uint8)
            self._piece = torch.from_numpy(memory)
            self._used = -memory.ctypes.data % _LINE
        place = self._piece[self._used : self._used + size]
        self._used += -(-size // _LINE) * _LINE
        return place.view(weight.dtype).view(weight.shape).copy_(weight.detach())
