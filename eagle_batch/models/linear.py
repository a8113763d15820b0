"""Linear layers for decoding: weights re-laid once for the device's fastest kernel.

On the CPU a product with few rows is twice as fast over a weight that oneDNN has blocked
beforehand as over a plain one. On other devices the plain weight is what their libraries want, and
so do our own kernels (see `fused`).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eagle_batch.models.shelf import Shelf

#: Rows that the blocked layout is chosen for; a round of a small batch has about as many.
_TYPICAL_ROWS = 16
#: Rows below which a blocked product takes longer than with this many (oneDNN 3.12, AVX-512).
_LEAST_ROWS = 4


class DecodingLinear(nn.Module):
    """`x @ weight.T + bias` without gradients, in the type of x.

    shelf: keep the weight there in its plain layout, which kernels read at `address`; without one
    nobody may.
    """

    def __init__(
        self, weight: Tensor, bias: Tensor | None = None, *, shelf: Shelf | None = None
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
        #: Whether oneDNN multiplies: over a plain weight too it is faster than what torch has else.
        self._onednn = is_blockable(weight)
        self._blocked = self._onednn and shelf is None
        if shelf is not None:
            self._weight = shelf.put(weight)
        else:
            self._weight = block(weight) if self._blocked else weight.detach().contiguous()
        #: Whether torch multiplies these numbers fast only after it has widened them.
        self._widens = weight.device.type == "cpu" and weight.dtype == torch.bfloat16
        self._widens = self._widens and not self._onednn

    @property
    def address(self) -> int:
        """Where the plain weight lies in memory."""
        return self.plain.data_ptr()

    @property
    def plain(self) -> Tensor:
        """The plain weight."""
        assert not self._blocked, "a blocked weight has a layout that only oneDNN knows"
        return self._weight

    @property
    def sample(self) -> Tensor:
        """Some of the plain weight's elements, `[in]`."""
        return self.plain[0]

    def forward(self, x: Tensor) -> Tensor:
        """Return the product; `[..., in] -> [..., out]`."""
        if self._onednn:
            return _onednn_product(x, self._weight, self.bias)
        if self._widens:
            bias = None if self.bias is None else self.bias.float()
            return F.linear(x.float(), self._weight.float(), bias).to(x.dtype)
        return F.linear(x, self._weight, self.bias)

    @property
    def least_rows(self) -> int:
        """Rows that a product should have: with fewer it takes longer than with so many."""
        return _LEAST_ROWS if self._blocked else 1

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """Return `residual + self(x)`, in one kernel where the types allow."""
        if residual.dtype != x.dtype or self.bias is not None or self._widens:
            return residual + self(x)  # type: ignore[no-any-return]
        if not self._onednn:
            return torch.addmm(residual, x, self._weight.t())
        return _onednn_sum(x, residual, self._weight)


def _onednn_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    product: Tensor = torch.ops.mkldnn._linear_pointwise(  # noqa: SLF001 - its public name
        x, weight, bias, "none", [], ""
    )
    return product


def _onednn_sum(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
    total: Tensor = torch.ops.mkldnn._linear_pointwise.binary(  # noqa: SLF001 - its public name
        x, residual, weight, None, "add"
    )
    return total


def is_blockable(weight: Tensor) -> bool:
    """Whether oneDNN has a faster layout for a weight on this machine."""
    if weight.device.type != "cpu" or not _has_onednn():
        return False
    if weight.dtype == torch.bfloat16:
        return has_bfloat16()
    return weight.dtype == torch.float32


def has_bfloat16() -> bool:
    """Whether this processor computes in bfloat16, which others emulate many times slower."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())  # noqa: SLF001 - its public name


def _has_onednn() -> bool:
    return bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]


def block(weight: Tensor) -> Tensor:
    """Return a copy of a weight in oneDNN's blocked layout."""
    blocked: Tensor = torch.ops.mkldnn._reorder_linear_weight(  # noqa: SLF001 - its public name
        weight.detach().contiguous(), _TYPICAL_ROWS
    )
    return blocked


def replace_linears(module: nn.Module) -> None:
    """Swap every `nn.Linear` below a module for a `DecodingLinear`, one at a time.

    The plain weight of each goes as soon as its successor exists: memory grows by one layer.
    """
    for name, child in list(module.named_children()):
        if type(child) is nn.Linear:
            setattr(module, name, DecodingLinear(child.weight, child.bias))
        else:
            replace_linears(child)
