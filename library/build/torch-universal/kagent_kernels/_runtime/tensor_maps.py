"""TMA descriptors: how a kernel's bulk copies see a tensor."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class TensorMapArgument:
    """Result of `tensor_map`: a tensor and the way in which blocks of it are copied."""

    tensor: torch.Tensor
    box: tuple[int, ...]
    swizzle: int
    interleave: int
    l2_promotion: int
    element_strides: tuple[int, ...]
    oob_nan: bool


@dataclass(frozen=True, slots=True)
class Described:
    """A tensor map as the driver wants it: innermost dimension first, strides in bytes, one fewer
    than dimensions.
    """

    dtype: str
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    element_strides: tuple[int, ...]
    swizzle: int
    interleave: int
    l2_promotion: int
    oob_nan: bool


def described(value: TensorMapArgument) -> Described:
    """Describe a tensor without its address."""
    tensor, width = value.tensor, value.tensor.element_size()
    return Described(
        dtype=str(tensor.dtype).removeprefix("torch."),
        dims=tuple(reversed(tensor.shape)),
        strides=tuple(s * width for s in reversed(tensor.stride()[:-1])),
        box=tuple(reversed(value.box)),
        element_strides=tuple(reversed(value.element_strides)),
        swizzle=value.swizzle,
        interleave=value.interleave,
        l2_promotion=value.l2_promotion,
        oob_nan=value.oob_nan,
    )


def tensor_map(
    tensor: torch.Tensor,
    box: Sequence[int],
    *,
    swizzle: int = 0,
    interleave: int = 0,
    l2_promotion: int = 128,
    element_strides: Sequence[int] | None = None,
    oob_nan: bool = False,
) -> TensorMapArgument:
    """A TMA descriptor for a `const __grid_constant__ CUtensorMap` parameter (sm_90 and later).

    Args:
        tensor: 1 to 5 dimensions, the last contiguous.
        box: Elements per copy along each dimension of `tensor`, in its order; at most 256 each.
        swizzle: 0, 32, 64 or 128 bytes; the box's last dimension must not be wider.
        interleave: 0, 16 or 32 bytes.
        l2_promotion: 0, 64, 128 or 256 bytes.
        element_strides: Take every n-th element, per dimension.
        oob_nan: Fill with NaN outside of the tensor; zeros otherwise.

    Returns:
        The descriptor, as an argument of a launch or a field of a `struct`.

    Raises:
        ValueError: A value that the hardware does not take; the text says which and why.

    Example:
        Describe tiles of 64 rows and 64 columns, 128 bytes wide. Host code gives `tiles` to a
        kernel like any other argument:

            import torch

            x = torch.zeros(1024, 4096, dtype=torch.bfloat16)  # host code's own lies on the GPU
            tiles = tensor_map(x, (64, 64), swizzle=128)
    """
    sizes, rank = tuple(operator.index(b) for b in box), tensor.dim()
    steps = tuple(element_strides or (1,) * rank)
    width = tensor.element_size()
    if not 1 <= rank <= 5 or len(sizes) != rank or len(steps) != rank:
        raise ValueError(
            f"tensor_map of {rank} dimensions needs a box of as many sizes, 1 to 5; got {box}"
        )
    if tensor.stride(-1) != 1:
        raise ValueError(
            f"tensor_map needs a contiguous last dimension, its stride is {tensor.stride(-1)}"
        )
    if odd := [s * width for s in tensor.stride()[:-1] if s * width % 16]:
        raise ValueError(f"tensor_map needs strides of a multiple of 16 bytes, got {odd[0]}")
    if not all(1 <= b <= 256 for b in sizes):
        raise ValueError(
            f"tensor_map boxes have 1 to 256 elements along each dimension, got {sizes}"
        )
    if sizes[-1] * width % 16:
        raise ValueError(
            f"the box's last dimension has {sizes[-1] * width} bytes: use a multiple of 16"
        )
    if swizzle not in {0, 32, 64, 128} or (swizzle and sizes[-1] * width > swizzle):
        raise ValueError(
            f"swizzle {swizzle} with a box of {sizes[-1] * width} bytes: use 0, 32, 64 or 128, "
            "at least as wide as the box"
        )
    if interleave not in {0, 16, 32} or l2_promotion not in {0, 64, 128, 256}:
        raise ValueError("interleave is 0, 16 or 32 bytes; l2_promotion 0, 64, 128 or 256")
    return TensorMapArgument(tensor, sizes, swizzle, interleave, l2_promotion, steps, oob_nan)
