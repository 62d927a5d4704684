"""Gradients of RMS norm: inputs, float64 reference, and what a user would call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
import math
from collections.abc import Sequence

import torch

INDEX_KINDS = ("uniform", "zipf", "sorted", "distinct", "same")


def draw_index(
    kind: str,
    shape: Sequence[int],
    count: int,
    generator: torch.Generator,
    device: torch.device,
) -> torch.Tensor:
    """Draw indices from 0 to `count - 1`.

    Args:
        kind: "uniform"; "zipf": the i-th most frequent one about 1/i as often as the first (words,
            popular experts); "sorted": uniform, in ascending order along the last dimension;
            "distinct": none twice; "same": one index everywhere (all writes collide).
        shape: Shape of the result.
        count: Number of values to choose from.
        generator: The source of chance.
        device: Where the result is.

    Returns:
        int64 of `shape`.

    Raises:
        ValueError: An unknown kind, or more distinct indices than there are.

    Example:
        Draw the classes of 8 rows, of 1000 classes:

            import torch

            generator = torch.Generator().manual_seed(0)
            target = draw_index("zipf", (8,), 1000, generator, torch.device("cpu"))
            assert target.shape == (8,) and target.dtype == torch.int64
    """
    if kind not in INDEX_KINDS:
        raise ValueError(f"no indices of kind {kind!r}: expected one of {', '.join(INDEX_KINDS)}")
    elements = math.prod(shape)
    if kind == "distinct":
        if elements > count:
            raise ValueError(f"{elements} distinct indices, and {count} to choose from")
        drawn = torch.randperm(count, generator=generator, device=device)[:elements]
        return drawn.reshape(tuple(shape))
    if kind == "zipf":
        position = torch.rand(tuple(shape), generator=generator, device=device, dtype=torch.float64)
        rank = ((count + 1) ** position - 1).long().clamp_(0, count - 1)
        first = torch.randint(count, (), generator=generator, device=device)
        return (rank + first) % count  # the frequent ones are not always the first
    many = torch.randint(
        count, () if kind == "same" else tuple(shape), generator=generator, device=device
    )
    if kind == "same":
        return many.expand(tuple(shape)).contiguous()
    return many.sort(-1).values if kind == "sorted" else many


def draw_as_counted(
    counts: Sequence[float],
    shape: Sequence[int],
    generator: torch.Generator,
    device: torch.device,
) -> torch.Tensor:
    """Draw indices from 0 to `len(counts) - 1`, each as often as it was counted somewhere.

    Such counts are tokens of each expert, or uses of each page.

    Args:
        counts: How often each index was seen. An index that was never seen is never drawn.
        shape: Shape of the result.
        generator: The source of chance.
        device: Where the result is.

    Returns:
        int64 of `shape`.

    Raises:
        ValueError: A count is negative, or all are 0.

    Example:
        Draw an expert for each of 8 tokens, the second one never and the third one mostly:

            import torch

            cpu = torch.device("cpu")
            generator = torch.Generator(cpu).manual_seed(0)
            experts = draw_as_counted([10, 0, 90], (8,), generator, cpu)
            assert set(experts.tolist()) <= {0, 2}
    """
    if not counts or min(counts) < 0 or not sum(counts) > 0:
        raise ValueError(f"{list(counts)[:8]}: expected counts of 0 or more, and one above 0")
    ends = torch.tensor([*counts], device=device, dtype=torch.float64).cumsum(0)
    position = torch.rand(tuple(shape), generator=generator, device=device, dtype=torch.float64)
    found = torch.searchsorted(ends, position * ends[-1], right=True)
    return found.clamp_(max=max(i for i, n in enumerate(counts) if n))


def draw_kinds(
    rows: int, count: int, generator: torch.Generator, device: torch.device
) -> torch.Tensor:
    """Draw a kind for each row, all kinds as often, but for one row more or less.

    Args:
        rows: Number of rows, M.
        count: Number of kinds. Of fewer rows each has another kind, any of them.
        generator: The source of chance.
        device: Where the result is.

    Returns:
        [M, 1] int64, from 0 to `count - 1`.

    Example:
        Draw one of 4 kinds for each of 10 rows:

            import torch

            cpu = torch.device("cpu")
            generator = torch.Generator(cpu).manual_seed(0)
            kinds = draw_kinds(10, 4, generator, cpu)
            assert kinds.shape == (10, 1)
            assert sorted(kinds.flatten().bincount().tolist()) == [2, 2, 3, 3]
    """
    order = torch.randperm(rows, generator=generator, device=device)
    first = torch.randint(count, (), generator=generator, device=device)
    return ((order + first) % count).unsqueeze(1)


def draw_rows(
    rows: int, one_of: int, generator: torch.Generator, device: torch.device
) -> torch.Tensor:
    """Choose one row of `one_of`, at least one of all.

    Args:
        rows: Number of rows, M.
        one_of: Rows for each one that is chosen.
        generator: The source of chance.
        device: Where the result is.

    Returns:
        [M, 1] bool, true for M / `one_of` rows, rounded up.

    Example:
        Choose rows that get a NaN:

            import torch

            cpu = torch.device("cpu")
            generator = torch.Generator(cpu).manual_seed(0)
            assert draw_rows(12, 8, generator, cpu).sum() == 2
            assert draw_rows(1, 8, generator, cpu).all()
    """
    order = torch.randperm(rows, generator=generator, device=device)
    return (order % one_of == 0).unsqueeze(1)


def plant(
    tensor: torch.Tensor,
    values: Sequence[float],
    share: float,
    generator: torch.Generator,
    *,
    where: torch.Tensor | None = None,
) -> None:
    """Overwrite some elements of a tensor in place, at least one of them.

    Args:
        tensor: Any shape, of numbers of 16 bits or more; with no elements it stays as it is.
        values: They are written, each as likely as the others.
        share: Of the elements, from 0 to 1.
        generator: The source of chance, on the tensor's device.
        where: Places that may be overwritten, bool of the tensor's shape; all of them by default,
            and one anywhere where it allows none.

    Example:
        Plant infinities and NaN among gradients:

            import math

            import torch

            generator = torch.Generator().manual_seed(0)
            grad = torch.zeros(8, 3)
            plant(grad, (math.inf, math.nan), 0.05, generator)
            assert not grad.isfinite().all()
    """
    if not tensor.numel():
        return
    shape, device = tensor.shape, tensor.device
    position = torch.rand(shape, generator=generator, device=device)
    if where is not None:
        position.masked_fill_(~where, 1.0)
    position.view(-1)[position.argmin()] = -1.0
    which = torch.randint(len(values), shape, generator=generator, device=device)
    for i, value in enumerate(values):
        tensor.masked_fill_((position < share) & (which == i), value)


def draw_attention(
    kind: str,
    queries: Sequence[int],
    key_heads: int,
    scale: float,
    dtype: torch.dtype,
    generator: torch.Generator,
    device: torch.device,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draw queries, keys and values of self-attention.

    Args:
        kind: "normal"; "shifted": a constant is added to every key, which moves all scores of a row
            by the same large amount; "sunk": that, and queries so low that scores are about -200;
            "mixed": each head of keys is normal, has scores that rise or fall evenly by 16 from the
            first key to the last, or scores about 10000 below the others in half of the keys, which
            are a window or every other block, never the first key.
        queries: Shape of the queries: batch B, heads H, sequence length S, head dimension D.
        key_heads: Heads of keys and values, Hkv; H is a multiple.
        scale: Deviation of the normal distribution.
        dtype: Of the results.
        generator: The source of chance.
        device: Where the results are.

    Returns:
        q: [B, H, S, D], k: [B, Hkv, S, D] and v: [B, Hkv, S, D].

    Raises:
        ValueError: An unknown kind.

    Example:
        Draw 8 heads of queries over 2 heads of keys, as `inputs` of a task does:

            import torch

            cpu = torch.device("cpu")
            generator = torch.Generator(cpu).manual_seed(0)
            shape, dtype = (1, 8, 128, 64), torch.bfloat16
            q, k, v = draw_attention("mixed", shape, 2, 1.0, dtype, generator, cpu)
            assert k.shape == (1, 2, 128, 64)
    """
    kinds = ("normal", "shifted", "sunk", "mixed")
    if kind not in kinds:
        raise ValueError(f"no attention of kind {kind!r}: expected one of {', '.join(kinds)}")
    b, h, s, d = queries

    def draw(heads: int, shift: float = 0.0) -> torch.Tensor:
        x = torch.empty(b, heads, s, d, dtype=dtype, device=device)
        return x.normal_(shift, scale, generator=generator)

    q = draw(h, -3.0 if kind == "sunk" else 0.0)
    k = draw(key_heads, 8.0 if kind in ("shifted", "sunk") else 0.0)
    v = draw(key_heads)
    if kind != "mixed":
        return q, k, v

    def whole(most: int) -> torch.Tensor:
        return torch.randint(most, (b, key_heads, 1), generator=generator, device=device)

    # The last dimension lifts or lowers all scores of a key. In the first one, every further
    # addition of a chain would be rounded as a large number's.
    lift = 64.0
    q[..., -1] = lift
    of_head, start, block = whole(5), whole(s), whole(5)
    key = torch.arange(s, device=device)
    ramp = torch.linspace(-8.0, 8.0, s, device=device)
    score = torch.where(of_head == 1, ramp, 0.0) + torch.where(of_head == 2, -ramp, 0.0)
    window = (key - start) % s < s // 2
    blocks = (key >> (block + 3)) % 2 == 1
    hidden = ((of_head == 3) & window) | ((of_head == 4) & blocks)
    hidden[..., 0] = False
    k[..., -1] = (score.masked_fill(hidden, -1e4) * (math.sqrt(d) / lift)).to(dtype)
    return q, k, v


def offsets(
    lengths: Sequence[int], device: torch.device, dtype: torch.dtype = torch.int64
) -> torch.Tensor:
    """Compute where each of several joined sequences starts, and where the last one ends.

    Args:
        lengths: Elements of each sequence.
        device: Where the result is.
        dtype: Integer type of the result.

    Returns:
        [len(lengths) + 1] in `dtype`, the first is 0.

    Example:
        Join sequences of 3, 0 and 2 elements:

            import torch

            cpu = torch.device("cpu")
            assert offsets([3, 0, 2], cpu).tolist() == [0, 3, 3, 5]
            assert segments([3, 0, 2], cpu).tolist() == [0, 0, 0, 2, 2]
    """
    joined = torch.tensor([0, *lengths], device=device, dtype=torch.int64)
    return joined.cumsum(0).to(dtype)


def segments(
    lengths: Sequence[int], device: torch.device, dtype: torch.dtype = torch.int64
) -> torch.Tensor:
    """Compute which of several joined sequences each element belongs to. See `offsets`.

    Args:
        lengths: Elements of each sequence.
        device: Where the result is.
        dtype: Integer type of the result.

    Returns:
        [sum(lengths)] in `dtype`, ascending.
    """
    each = torch.tensor([*lengths], device=device, dtype=torch.int64)
    return torch.repeat_interleave(each).to(dtype)
from torch.nn import functional as F

if TYPE_CHECKING:
    from kagent_sandbox.data.case import Case

CHUNK_ELEMENTS = 1 << 25  # float64 temporaries of the reference stay near 1 GiB


def inputs(case: Case, generator: torch.Generator, device: torch.device) -> dict[str, torch.Tensor]:
    """Draw x: [M, N], times the case's scale; grad: [M, N], normal; and weight: [N], about 1.

    Distributions of x: `normal`; `mixed` gives each row a kind of its own: normal, zeros, few
    values, rising along the row, one entry 4 times as large as the others, a thousandth of
    normal (so that eps counts), 30 times normal; in some rows grad is 0. `nonfinite` is `mixed`
    with a NaN in grad in some rows: dx is NaN in all of such a row, dweight in the NaN's column.
    """
    rows, columns = int(case.dims["M"]), int(case.dims["N"])
    dtype = getattr(torch, case.dtype)
    weight = torch.randn(columns, generator=generator, device=device).mul_(0.2).add_(1.0)
    x = torch.empty((rows, columns), dtype=dtype, device=device)
    grad = torch.empty_like(x).normal_(generator=generator)
    given = {"grad": grad, "x": x, "weight": weight.to(dtype)}
    if case.inputs == "normal":  # in one pass: every timed execution has such inputs of its own
        x.normal_(0.0, case.scale, generator=generator)
        return given
    if case.inputs not in ("mixed", "nonfinite"):
        raise ValueError(f"rms_norm_backward knows no distribution {case.inputs!r}")
    wide = torch.randn((rows, columns), generator=generator, device=device) * case.scale
    kind = draw_kinds(rows, 8, generator, device)
    at = torch.randint(columns, (rows, 1), generator=generator, device=device)
    # Of a larger one, dx is what is left of two products that are near each other by chance.
    spiked = wide.scatter(1, at, 4.0 * case.scale)
    ramp = torch.linspace(-4, 4, columns, device=device).expand(rows, columns)
    few = (wide / case.scale).round() * case.scale
    others = (wide * 0, few, ramp, spiked, wide / 1000, wide * 30)
    for i, other in enumerate(others):
        wide = torch.where(kind == i, other, wide)
    x.copy_(wide)
    grad.masked_fill_(kind == 6, 0.0)
    if case.inputs == "nonfinite":
        broken = draw_rows(rows, 8, generator, device)
        grad.scatter_(1, at, grad.gather(1, at).masked_fill_(broken, torch.nan))
    return given


def reference(
    *, grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of x, [M, N], and of weight, [N], in float64.

    With s = 1 / sqrt(mean(x²) + eps), n = x · s and h = grad · weight, dx is
    s (h - n · mean(h · n)), the means over each row; dweight is the sum of grad · n over the rows.
    """
    dx = torch.empty(x.shape, dtype=torch.float64, device=x.device)
    dweight = torch.zeros(x.shape[1], dtype=torch.float64, device=x.device)
    rows = max(1, CHUNK_ELEMENTS // x.shape[1])
    for g, source, result in zip(grad.split(rows), x.split(rows), dx.split(rows), strict=True):
        wide = source.double()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        normed, h = wide * scale, g * weight.double()
        torch.mul(scale, h - normed * (h * normed).mean(-1, keepdim=True), out=result)
        dweight += (g * normed).sum(0)
    return dx, dweight


def reference_rows(
    rows: tuple[torch.Tensor, torch.Tensor],
    *,
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `reference` has: some rows of dx, [R, N], and dweight as one row, [1, N], in float64.

    `rows[0]` are the numbers of dx's rows, [R] int64. dweight of 16-bit inputs is a product of
    float32 numbers that is added up in float64: far finer than what it is held against.
    """
    some, _ = reference(grad=grad[rows[0]], x=x[rows[0]], weight=weight, eps=eps)
    work = torch.float64 if x.dtype == torch.float32 else torch.float32
    dweight = torch.zeros(x.shape[1], dtype=torch.float64, device=x.device)
    step = max(1, CHUNK_ELEMENTS // x.shape[1])
    for g, source in zip(grad.split(step), x.split(step), strict=True):
        wide = source.to(work)
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        dweight += wide.mul_(scale).mul_(g).sum(0, dtype=torch.float64)
    return some, dweight[None]


def eager(
    *, grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Torch's own function and its gradients by autograd: [M, N] and [N] in x's dtype."""
    with torch.enable_grad():
        leaf, w = x.detach().requires_grad_(), weight.detach().requires_grad_()
        y = F.rms_norm(leaf, (x.shape[1],), w, eps)
        dx, dweight = torch.autograd.grad(y, (leaf, w), grad)
    return dx, dweight


def experts() -> Mapping[str, Callable[..., tuple[torch.Tensor, torch.Tensor]]]:
    """None: expert libraries take what their forward pass has kept."""
    return {}
