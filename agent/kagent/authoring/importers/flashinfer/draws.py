"""Draws of inputs by what they are for: offsets of sequences, places in a cache, expert numbers.

The text of these functions goes into the reference.py of imported tasks, which thereby stand by
themselves. So each one needs torch, the functions here and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch


def normal(
    shape: Sequence[int],
    dtype: torch.dtype,
    scale: float,
    generator: torch.Generator,
    device: torch.device,
) -> torch.Tensor:
    """Values of a normal distribution of deviation `scale`. A tensor of over 2^26 elements repeats
    a draw of 16777213, a prime, which no row's length divides.
    """
    count = math.prod(shape)
    drawn = min(count, 16_777_213) if count > 1 << 26 else count
    x = torch.empty(drawn, dtype=torch.float32, device=device).normal_(
        0.0, scale, generator=generator
    )
    x = x.to(dtype)
    if drawn < count:
        whole = torch.empty(count, dtype=dtype, device=device)
        for start in range(0, count, drawn):
            whole[start : start + drawn] = x[: count - start]
        x = whole
    return x.reshape(shape)


def uniform(
    shape: Sequence[int],
    dtype: torch.dtype,
    low: float,
    high: float,
    generator: torch.Generator,
    device: torch.device,
) -> torch.Tensor:
    """Values that lie evenly between two."""
    x = torch.empty(shape, dtype=torch.float32, device=device)
    return x.uniform_(low, high, generator=generator).to(dtype)


def unit_rows(x: torch.Tensor) -> torch.Tensor:
    """Rows of length 1."""
    return torch.nn.functional.normalize(x.float(), dim=-1).to(x.dtype)


def rotations(
    shape: Sequence[int], dtype: torch.dtype, generator: torch.Generator, device: torch.device
) -> torch.Tensor:
    """Cosines of random angles in the first half of each row, their sines in the second."""
    half = (*shape[:-1], shape[-1] // 2)
    angles = uniform(half, torch.float32, -math.pi, math.pi, generator, device)
    return torch.cat((angles.cos(), angles.sin()), -1).to(dtype)


def distinct(
    shape: Sequence[int], dtype: torch.dtype, generator: torch.Generator, device: torch.device
) -> torch.Tensor:
    """Multiples of 1/16 around 0 in random order, no two alike in a row: no ties for a top-k."""
    order = torch.rand(*shape, generator=generator, device=device).argsort(-1)
    return ((order - shape[-1] // 2) / 16).to(dtype)


def offsets(
    count: int,
    total: int,
    least: torch.Tensor | int,
    first_is_empty: bool,
    dtype: torch.dtype,
    generator: torch.Generator,
    device: torch.device,
) -> torch.Tensor:
    """Starts of `count` sequences of random lengths, the first 0, and the end of the last: `total`.

    Args:
        count: Number of sequences.
        total: Sum of their lengths.
        least: The shortest length, or each one's, [count].
        first_is_empty: Whether the first sequence gets no more than its shortest length.
        dtype: Dtype of the offsets.
        generator: Source of the lengths.
        device: Where the offsets lie.

    Returns:
        [count + 1] offsets.

    Raises:
        ValueError: The sequences do not fit.
    """
    shortest = torch.zeros(count, dtype=torch.int64, device=device) + least
    spare = total - int(shortest.sum())
    if spare < 0:
        raise ValueError(f"{count} sequences need {total - spare} elements, and there are {total}")
    ends = torch.randint(spare + 1, (count - 1,), generator=generator, device=device).sort().values
    if first_is_empty:
        ends[:1] = 0
    edges = torch.nn.functional.pad(ends, (1, 0))
    lengths = torch.nn.functional.pad(ends, (0, 1), value=spare) - edges + shortest
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(dtype)


def last_page_lengths(
    starts: torch.Tensor,
    page_size: int,
    least: torch.Tensor | int,
    dtype: torch.dtype,
    generator: torch.Generator,
) -> torch.Tensor:
    """Tokens in each sequence's last page: 0 where it has none.

    Args:
        starts: Offsets of sequences in pages, [B + 1].
        page_size: Tokens per page.
        least: The fewest tokens of a sequence, or of each, [B].
        dtype: Dtype of the result.
        generator: Source of the numbers.

    Returns:
        [B] numbers from 1 to `page_size`.
    """
    pages = starts.diff().long()
    low = (least - (pages - 1) * page_size).clamp(1, page_size)
    share = torch.rand(len(pages), generator=generator, device=starts.device)
    lengths = low + (share * (page_size + 1 - low)).long().clamp(max=page_size - low)
    return (lengths * (pages > 0)).to(dtype)


def places(
    shape: Sequence[int],
    size: int,
    dtype: torch.dtype,
    generator: torch.Generator,
    device: torch.device,
) -> torch.Tensor:
    """Numbers below `size` in random order, all different in a row as far as there are enough."""
    count = shape[-1]
    if count <= size and math.prod(shape) // max(1, count) * size <= 1 << 24:
        order = torch.rand(*shape[:-1], size, generator=generator, device=device).argsort(-1)
        return order[..., :count].to(dtype)
    return torch.randint(size, tuple(shape), generator=generator, device=device).to(dtype)


def padded(found: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Numbers with -1 behind a random part of each row, [..., N]: padding."""
    count = found.shape[-1]
    kept = torch.randint(
        1, count + 1, (*found.shape[:-1], 1), generator=generator, device=found.device
    )
    kept.view(-1)[0] = count
    return found.masked_fill(torch.arange(count, device=found.device) >= kept, -1)


def packed_experts(
    shape: Sequence[int], experts: int, generator: torch.Generator, device: torch.device
) -> torch.Tensor:
    """Expert numbers in the high 16 bits, their weights as bfloat16 in the low ones, int32."""
    number = places(shape, experts, torch.int32, generator, device)
    weight = torch.rand(*shape, generator=generator, device=device).softmax(-1).bfloat16()
    return (number << 16) | (weight.view(torch.int16).to(torch.int32) & 0xFFFF)
