"""Convolutions as products of matrices in the loops of Inductor: `tl.dot` over the places of a
window, which are read where they lie.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor


@functools.cache
def install() -> Any:
    """Declare the operation, as long as what is returned lives, and have Inductor know it.

    Inductor is imported here and below: who only wants sums in loops need not wait for it.
    """
    from torch._inductor import lowering

    library: Any = torch.library  # torch declares no types of its methods
    kept = library.Library("kagent", "FRAGMENT")
    kept.define("window_products(Tensor windows, Tensor weight, Tensor? bias) -> Tensor")
    kept.impl("window_products", _shaped, "Meta")
    lowering.register_lowering(torch.ops.kagent.window_products.default, type_promotion_kind=None)(
        _lower
    )
    return kept


def window_products(windows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Sums over channels and windows.

    Args:
        windows: [N, C, places..., window...].
        weight: [O, C, window...].
        bias: [O]; added to the sums.

    Returns:
        [N, O, places...].
    """
    install()
    found: Tensor = torch.ops.kagent.window_products(windows, weight, bias)
    return found


def _shaped(windows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:  # noqa: ARG001
    n = weight.dim() - 2
    return windows.new_empty([windows.shape[0], weight.shape[0], *windows.shape[2 : 2 + n]])


def _lower(windows: Any, weight: Any, bias: Any) -> Any:
    from torch._inductor import ir, lowering
    from torch._inductor.runtime.hints import ReductionHint
    from torch._inductor.virtualized import ops

    sizes, window = windows.get_size(), weight.get_size()[2:]
    n = len(window)
    batch, channels, places = sizes[0], sizes[1], sizes[2 : 2 + n]
    load, load_weight = windows.make_loader(), weight.make_loader()
    dtype = windows.get_dtype()

    def operand(value: Any) -> Any:
        """A 16-bit number as it was stored: Inductor computes with such in float32."""
        if dtype in (torch.float16, torch.bfloat16):
            return ops.to_dtype(value, dtype, use_compute_types=False)
        return value

    def inner(index: Any, reduced: Any) -> Any:
        sample, out, place = index
        channel, *at = _parts(reduced[0], [channels, *window])
        here = _parts(place, places)
        one, other = load_weight([out, channel, *at]), load([sample, channel, *here, *at])
        return ops.dot(operand(one), operand(other))

    found = ir.Reduction.create(
        device=windows.get_device(),
        dst_dtype=dtype,
        src_dtype=dtype,
        inner_fn=inner,
        ranges=[batch, weight.get_size()[0], math.prod(places)],
        reduction_ranges=[channels * math.prod(window)],
        reduction_type="dot",
        reduction_hint=ReductionHint.DEFAULT,
        input_node=windows,
    )
    found.realize()
    if bias is not None:
        found = lowering.add(found, lowering.view(bias, [1, weight.get_size()[0], 1]))
        found.realize()
    size = [batch, weight.get_size()[0], *places]
    strides = [math.prod(size[i + 1 :]) for i in range(len(size))]
    return lowering.as_strided(found, size, strides)


def _parts(index: Any, sizes: Any) -> list[Any]:
    """Places in several dimensions of a place in all of them together."""
    from torch.utils._sympy.functions import FloorDiv, ModularIndexing

    parts = []
    for size in reversed(sizes[1:]):
        parts.append(ModularIndexing(index, 1, size))
        index = FloorDiv(index, size)
    return [index, *reversed(parts)]
