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
    kept.define(
        "window_products(Tensor windows, Tensor weight, Tensor? bias, int groups) -> Tensor"
    )
    kept.impl("window_products", _shaped, "Meta")
    lowering.register_lowering(torch.ops.kagent.window_products.default, type_promotion_kind=None)(
        _lower
    )
    return kept


def window_products(
    windows: Tensor, weight: Tensor, bias: Tensor | None, groups: int = 1
) -> Tensor:
    """Sums over the channels of a group and over windows.

    Args:
        windows: [N, C, places..., window...].
        weight: [O, C / groups, window...].
        bias: [O]; added to the sums.
        groups: Groups of channels, and of results; the first results are of the first group.

    Returns:
        [N, O, places...].
    """
    install()
    found: Tensor = torch.ops.kagent.window_products(windows, weight, bias, groups)
    return found


def _shaped(windows: Tensor, weight: Tensor, _bias: Tensor | None, _groups: int) -> Tensor:
    n = weight.dim() - 2
    return windows.new_empty([windows.shape[0], weight.shape[0], *windows.shape[2 : 2 + n]])


def _lower(windows: Any, weight: Any, bias: Any, groups: int) -> Any:
    from torch._inductor import ir, lowering
    from torch._inductor.runtime.hints import ReductionHint
    from torch._inductor.virtualized import ops
    from torch.utils._sympy.functions import FloorDiv

    sizes, (outputs, channels, *window) = windows.get_size(), weight.get_size()
    n = len(window)
    # What rearranges it would be computed for each block of results.
    weight = ir.ExternKernel.require_contiguous(ir.ExternKernel.realize_input(weight))
    batch, places, rows = sizes[0], sizes[2 : 2 + n], FloorDiv(outputs, groups)
    load, load_weight = windows.make_loader(), weight.make_loader()
    dtype = windows.get_dtype()

    def operand(value: Any) -> Any:
        """A 16-bit number as it was stored: Inductor computes with such in float32."""
        if dtype in (torch.float16, torch.bfloat16):
            return ops.to_dtype(value, dtype, use_compute_types=False)
        return value

    def inner(index: Any, reduced: Any) -> Any:
        sample, row, place = index
        channel, *at = _parts(reduced[0], [channels, *window])
        here = _parts(place, places)
        out, source = row, channel
        if groups > 1:
            sample, group = _parts(sample, [batch, groups])
            out, source = group * rows + row, group * channels + channel
        one, other = load_weight([out, channel, *at]), load([sample, source, *here, *at])
        return ops.dot(operand(one), operand(other))

    found = ir.Reduction.create(
        device=windows.get_device(),
        dst_dtype=dtype,
        src_dtype=dtype,
        inner_fn=inner,
        ranges=[batch * groups, rows, math.prod(places)],
        reduction_ranges=[channels * math.prod(window)],
        reduction_type="dot",
        reduction_hint=ReductionHint.DEFAULT,
        input_node=windows,
    )
    found.realize()
    if bias is not None:
        found = lowering.view(found, [batch, outputs, math.prod(places)])
        found = lowering.add(found, lowering.view(bias, [1, outputs, 1]))
        found.realize()
    size = [batch, outputs, *places]
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
