"""TF32, in which torch computes convolutions of float32 on a GPU unless it is told not to, and
products where it is told to.

Which of cuDNN's algorithms it takes, in TF32 or in float32, is decided in each process by sizes and
free memory. So torch's own error in such an operation is what TF32 makes of it, even where this
process's eager was luckier than the kernel that is held against it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

_CONVOLUTIONS = frozenset({"convolution", "convolution_backward"})
_RECURRENT = frozenset({"_cudnn_rnn", "_cudnn_rnn_backward"})
_PRODUCTS = frozenset(
    {
        *("mm", "addmm", "_addmm_activation", "bmm", "baddbmm", "addbmm"),
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_efficient_attention_backward",
    }
)


def may_use_tf32(func: Any, args: Sequence[Any]) -> bool:
    """Whether torch lets a GPU compute an operation on float32 in TF32, by its settings now."""
    name = getattr(func, "overloadpacket", func).__name__  # operators that take functions have none
    backends: Any = torch.backends  # torch declares no types of these
    if name in _CONVOLUTIONS:
        settings = backends.cudnn.conv
    elif name in _RECURRENT:
        settings = backends.cudnn.rnn
    elif name in _PRODUCTS:
        settings = backends.cuda.matmul
    else:
        return False
    return settings.fp32_precision == "tf32" and any(
        isinstance(a, torch.Tensor) and a.dtype == torch.float32 for a in args
    )


class InTf32(TorchDispatchMode):
    """Has operations that a GPU may compute in TF32 get operands of its 10 bits after the point.

    Bits are cut off, as tensor cores do: the error is at least that of rounding, and has its bias.
    Products of such operands are exact in float32, whatever computes them.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.used = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Run the operation."""
        if may_use_tf32(func, args):
            self.used = True
            args = pytree.tree_map(_cut, args)
        return func(*args, **(kwargs or {}))


def _cut(operand: Any) -> Any:
    if not isinstance(operand, torch.Tensor) or operand.dtype != torch.float32:
        return operand
    return (operand.contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32)
