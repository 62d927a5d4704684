"""A transposed convolution as one that is not: for each of `stride` results in a dimension it has
channels of its own, and results are then put between each other. Also called a sub-pixel
convolution (W. Shi et al., CVPR 2016, https://arxiv.org/abs/1609.05158).

cuDNN writes the result of a convolution where it is wanted, and torch offers no such form of a
transposed one: a plan would copy it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kagent.authoring.inductor.convolution_numbers import ConvolutionNumbers

MOST_PRODUCTS = 3.0
"""Products for each one of the transposed convolution: windows of all results are as wide as the
widest, and zeros fill the others.
"""


def without_transposition(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *numbers: Any,
) -> Any:
    """Compute a transposed convolution without dilation.

    Args:
        x: [N, C, X...], 1 to 3 dimensions of places.
        weight: [C, O / groups, K...].
        bias: [O], or None.
        *numbers: As `ConvolutionNumbers`.

    Returns:
        [N, O, (X - 1) · stride - 2 · padding + K + output_padding...]; NotImplemented for any other
        convolution, and where windows would be mostly zeros: torch goes on with it as it is.
    """
    window = weight.shape[2:]
    n = len(window)
    given = ConvolutionNumbers.of(n, *numbers)
    stride, padding, dilation, transposed, output_padding, groups = given
    known = all(type(k) is int for k in window)
    if not transposed or any(d != 1 for d in dilation) or not known:
        return NotImplemented
    # Result s·q + r is a sum over places q + d of x, times the weight's r + p - s·d: d from `first`
    # to `last` for one r or another, which are `width` places.
    each = list(zip(window, stride, padding, output_padding, strict=True))
    first = [-((k - 1 - p) // s) for k, s, p, _ in each]
    last = [(s - 1 + p) // s for _, s, p, _ in each]
    width = [b - a + 1 for a, b in zip(first, last, strict=True)]
    products = math.prod(s * m for s, m in zip(stride, width, strict=True))
    if products > MOST_PRODUCTS * math.prod(window):
        return NotImplemented
    more = [-((s + 2 * p - k - o) // s) for k, s, p, o in each]  # of results for each r than places
    around = [max(-a, b + q, 0) for a, b, q in zip(first, last, more, strict=True)]
    sums = torch.ops.aten.convolution(
        *(x, _for_each_remainder(weight, stride, padding, last, width, groups), None, [1] * n),
        *(around, [1] * n, False, [0] * n, groups),
    )
    for d in range(n):
        sums = sums.narrow(d + 2, first[d] + around[d], x.shape[d + 2] + more[d])
    some = [groups] if groups > 1 else []  # a plan's tensors have few dimensions
    g = len(some)
    y = sums.reshape(x.shape[0], *some, *stride, weight.shape[1], *sums.shape[2:])
    between = [axis for d in range(n) for axis in (n + 2 + g + d, 1 + g + d)]
    y = y.permute(*range(1 + g), n + 1 + g, *between)
    places = [q * s for q, s in zip(sums.shape[2:], stride, strict=True)]
    y = y.reshape(x.shape[0], groups * weight.shape[1], *places)
    for d, (k, s, p, o) in enumerate(each):
        y = y.narrow(d + 2, 0, (x.shape[d + 2] - 1) * s - 2 * p + k + o)
    return y if bias is None else y + bias.reshape(-1, *[1] * n)


def _for_each_remainder(
    weight: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    last: Sequence[int],
    width: Sequence[int],
    groups: int,
) -> Tensor:
    """The weight of a convolution that has all results, [product of strides · O, C / groups,
    width...], of each group those for all remainders.
    """
    n = len(width)
    ends: list[int] = []
    for k, s, p, b, m in zip(weight.shape[2:], stride, padding, last, width, strict=True):
        front = s * b - p
        ends = [front, s * m - k - front, *ends]
    split = [size for pair in zip(width, stride, strict=True) for size in pair]
    rows = weight.shape[0] // groups
    some = [groups] if groups > 1 else []
    g = len(some)
    whole = F.pad(weight, ends).reshape(*some, rows, weight.shape[1], *split)
    whole = whole.flip([2 + g + 2 * d for d in range(n)])
    remainders, places = [3 + g + 2 * d for d in range(n)], [2 + g + 2 * d for d in range(n)]
    order = [*range(g), *remainders, 1 + g, g, *places]
    return whole.permute(*order).reshape(-1, rows, *width)
