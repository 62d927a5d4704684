"""The numbers that `aten.convolution` takes after its tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple


class ConvolutionNumbers(NamedTuple):
    """Numbers of a convolution, in their order.

    Attributes:
        stride: A number for each dimension, as all lists here.
        padding: Places that are added on both sides; of a transposed one, results that are left
            out there.
        dilation: Places from one number of a window to the next.
        transposed: Whether it is a transposed convolution.
        output_padding: Results that are added on one side of a transposed one.
        groups: Groups of channels.
    """

    stride: list[int]
    padding: list[int]
    dilation: list[int]
    transposed: bool
    output_padding: list[int]
    groups: int

    @classmethod
    def of(cls, dimensions: int, *given: Any) -> ConvolutionNumbers:
        """The numbers as torch passes them, of which a list may have one for all dimensions."""
        numbers: Any = (for_each(dimensions, n) if isinstance(n, Sequence) else n for n in given)
        return cls(*numbers)


def for_each(dimensions: int, numbers: Sequence[int]) -> list[int]:
    """A number for each dimension, where torch takes one for all of them, too."""
    return list(numbers) * (dimensions if len(numbers) == 1 else 1)
