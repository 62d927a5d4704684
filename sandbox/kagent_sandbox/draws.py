"""Inputs that tasks have in common: what reference.py may import for its `inputs`.

    from kagent_sandbox.draws import draw_as_counted, draw_attention, draw_index, offsets, segments
    from kagent_sandbox.draws import break_rows, draw_around, draw_huge, draw_kinds, draw_masks
    from kagent_sandbox.draws import draw_moments, draw_rows, draw_runs, draw_weights, plant
    from kagent_sandbox.draws import round_coarsely

An exported library has these functions in its copy of reference.py.
"""

from __future__ import annotations

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


def break_rows(tensor: torch.Tensor, one_of: int, generator: torch.Generator) -> None:
    """Overwrite one element of one row of `one_of` with NaN, in place, in at least one row.

    Args:
        tensor: [M, ...] of floating-point numbers; elements of a row follow each other in memory.
        one_of: Rows for each one that is broken.
        generator: The source of chance, on the tensor's device.

    Example:
        Break one query of 4, of any head:

            import torch

            generator = torch.Generator().manual_seed(0)
            q = torch.zeros(1, 2, 6, 64)
            break_rows(q.flatten(0, 2), 4, generator)
            assert q.isnan().sum() == q.isnan().any(-1).sum() == 3
    """
    rows = tensor.view(len(tensor), -1)
    count, size = rows.shape
    broken = draw_rows(count, one_of, generator, tensor.device)
    at = torch.randint(size, (count, 1), generator=generator, device=tensor.device)
    rows.scatter_(1, at, rows.gather(1, at).masked_fill_(broken, torch.nan))


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


def draw_masks(
    mask: torch.Tensor, generator: torch.Generator, *, empty: bool = True
) -> torch.Tensor:
    """Draw some rows of a mask anew: at random, all true, and all false.

    Args:
        mask: Truth values, or numbers that are 0 or 1; the last dimension is a row.
        generator: The source of chance, on the mask's device.
        empty: Whether rows may be all false. Otherwise random ones have a true value.

    Returns:
        A tensor of the same shape and dtype; about a third of its rows, or a quarter, are as given.

    Example:
        Draw rows of a causal mask anew:

            import torch

            generator = torch.Generator().manual_seed(0)
            mask = draw_masks(torch.ones(64, 64).bool().tril(), generator)
            assert mask.all(1).any() and not mask.any(1).all()
    """
    if not mask.numel():
        return mask
    rows = mask.reshape(-1, mask.shape[-1] if mask.dim() else 1)
    count, columns = rows.shape
    kind = draw_kinds(count, 4 if empty else 3, generator, mask.device)
    random = torch.rand((count, columns), generator=generator, device=mask.device)
    drawn = (random < 0.5) | (random == random.amin(1, keepdim=True))
    # Half of those have one run of true values up to an end, as padding on one side leaves it.
    place = torch.arange(columns, device=mask.device)
    begin = (random[:, :1] * columns).long()
    runs = torch.where(random[:, -1:] < 0.5, place >= begin, place <= begin)
    drawn = torch.where(draw_kinds(count, 2, generator, mask.device) == 0, drawn, runs)
    changed = torch.where(kind == 1, drawn, kind == 2)
    return torch.where(kind == 0, rows, changed.to(mask.dtype)).reshape(mask.shape)


def draw_weights(vector: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Multiply the elements of a vector by 1, by 0.001, by 100 or by -1.

    A vector has one number for each column of a matrix, such as a weight: no row of it is larger
    than others, and what it is multiplied with may be normalised. Large ones show what overflows
    behind them, negative ones what was a maximum before and is a minimum behind them.

    Args:
        vector: Floating-point numbers, [N].
        generator: The source of chance, on the vector's device.

    Returns:
        [N] of the same dtype; about a quarter of the elements are as given.

    Example:
        Draw weights of three magnitudes, and of either sign:

            import torch

            generator = torch.Generator().manual_seed(0)
            found = draw_weights(torch.ones(30), generator)
            assert found.unique().numel() == 4
    """
    factors = torch.tensor([1.0, 1e-3, 100.0, -1.0], dtype=vector.dtype, device=vector.device)
    kind = draw_kinds(len(vector), len(factors), generator, vector.device)
    return vector * factors[kind.flatten()]


def draw_wide(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Draw whole numbers of either sign and of all magnitudes that a dtype has, and zeros.

    Numbers like an example's, 0 to 99 say, do not show who computes in fewer bits, divides as C
    does, or begins a maximum at 0. Of 64 bits 30 are used: sums and products of two do not
    overflow.

    Args:
        tensor: Whole numbers; their shape and dtype are taken.
        generator: The source of chance, on the tensor's device.

    Example:
        Draw what needs a product of 64 bits:

            import torch

            generator = torch.Generator().manual_seed(0)
            found = draw_wide(torch.ones(99, dtype=torch.int64), generator)
            assert found.min() < -(2**20) and found.max() > 2**20
    """
    info, device = torch.iinfo(tensor.dtype), tensor.device
    bits = min(30, info.bits - bool(info.min))
    power = torch.rand(tensor.shape, generator=generator, device=device, dtype=torch.float64)
    drawn = (2.0 ** (power * bits)).long()
    sign = torch.randint(8, tensor.shape, generator=generator, device=device)
    drawn = torch.where(sign == 0, 0, torch.where(sign % 2 == 1, drawn, -drawn))
    return (drawn if info.min else drawn.abs()).clamp(info.min, info.max).to(tensor.dtype)


def round_coarsely(tensor: torch.Tensor) -> torch.Tensor:
    """Round to few numbers, so that elements of several tensors are often equal.

    They are multiples of an eighth of a power of two, of that below the largest magnitude: sums and
    products of some are exact, so that equal ones are equal in any precision.

    Args:
        tensor: Floating-point numbers of 16 bits or more, in any shape.

    Returns:
        A tensor of the same shape and dtype; infinities and NaN are as they were.

    Example:
        Make numbers that are often equal:

            import torch

            generator = torch.Generator().manual_seed(0)
            x, y = (round_coarsely(torch.randn(8, 64, generator=generator)) for _ in range(2))
            assert 0.02 < (x == y).double().mean() < 0.5
    """
    if not tensor.numel():
        return tensor
    finite = tensor.isfinite()
    numbers = tensor.double().where(finite, 0.0)
    largest = numbers.abs().amax().clamp(min=torch.finfo(tensor.dtype).tiny)
    step = largest.log2().floor().exp2() / 8
    return ((numbers / step).round() * step).to(tensor.dtype).where(finite, tensor)


def draw_around(
    tensor: torch.Tensor, thresholds: dict[float, int], generator: torch.Generator
) -> torch.Tensor:
    """Draw numbers around thresholds in the place of elements of a tensor.

    They are at a threshold, next to it on both sides, and away from it by a third of its magnitude
    (of 1, where it is 0): half of it would often be a tie where numbers are rounded to whole ones.
    Each row has one threshold; in every other row all elements are one number, in the others half
    of them are drawn. Of fewer than 4 rows for each threshold, each element has a threshold of its
    own.

    Args:
        tensor: Floating-point numbers of any shape; the last dimension is a row.
        thresholds: For each threshold the least distance from it, in machine epsilons. Where it is
            0, numbers are at the threshold and one epsilon away.
        generator: The source of chance, on the tensor's device.

    Returns:
        A tensor of the same shape and dtype.

    Example:
        Draw at 6, where a ReLU6 changes, and beside it:

            import torch

            generator = torch.Generator().manual_seed(0)
            x = draw_around(torch.zeros(8, 64), {6.0: 0}, generator)
            assert set(x.unique().tolist()) > {0.0, 4.0, 6.0, 8.0}
    """
    if not tensor.numel():
        return tensor
    rows = tensor.reshape(-1, tensor.shape[-1] if tensor.dim() else 1)
    shape, device, count = rows.shape, tensor.device, len(thresholds)
    alike = len(rows) >= 4 * count
    kind = draw_kinds(len(rows) if alike else rows.numel(), count, generator, device)
    table = torch.tensor([*thresholds.items()], dtype=torch.float64, device=device)
    at, least = table[kind.reshape(len(rows), -1)].unbind(-1)
    one = (draw_kinds(len(rows), 2, generator, device) == 0) & alike
    side = torch.randint(-2, 3, shape, generator=generator, device=device)
    side = torch.where(one, side[:, :1], side)
    side = torch.where((side == 0) & (least > 0), 1, side)
    near = least.clamp(min=1.0) * torch.finfo(tensor.dtype).eps
    away = side.sign() * torch.where(side.abs() == 2, 1 / 3, near)
    largest = torch.finfo(tensor.dtype).max  # a number beyond the last one is that
    drawn = at + away * torch.where(at == 0, 1.0, at.abs())
    drawn = drawn.clamp(-largest, largest).to(tensor.dtype)
    half = torch.rand(shape, generator=generator, device=device) < 0.5
    return torch.where(one | half, drawn, rows).reshape(tensor.shape)


def draw_runs(
    shape: Sequence[int],
    one_of: int,
    longest: int,
    generator: torch.Generator,
    device: torch.device,
) -> torch.Tensor:
    """Choose a run of neighbours in one row of `one_of`, at least in one row.

    Lengths are even in the logarithm; a run that meets the end of its row goes on at the beginning.

    Args:
        shape: [..., N], rows are along the last dimension.
        one_of: Rows for each one that has a run.
        longest: Elements of the longest run, from 1 to N.
        generator: The source of chance.
        device: Where the result is.

    Returns:
        bool of `shape`, true in runs.

    Example:
        Choose neighbours that get no gradient:

            import torch

            cpu = torch.device("cpu")
            generator = torch.Generator(cpu).manual_seed(0)
            runs = draw_runs((8, 64), 4, 32, generator, cpu)
            assert runs.any(1).sum() == 2
            assert runs.sum(1).max() <= 32
    """
    rows, columns = math.prod(shape[:-1]), shape[-1]
    at = draw_rows(rows, one_of, generator, device).flatten().nonzero().flatten()
    chance = torch.rand((2, len(at), 1), generator=generator, device=device, dtype=torch.float64)
    length, first = ((longest + 1) ** chance[0]).long(), (columns * chance[1]).long()
    runs = torch.zeros((rows, columns), dtype=torch.bool, device=device)
    runs[at] = (torch.arange(columns, device=device) - first) % columns < length
    return runs.reshape(tuple(shape))


def draw_huge(
    shape: Sequence[int],
    most: float,
    dtype: torch.dtype,
    generator: torch.Generator,
    device: torch.device,
) -> torch.Tensor:
    """Draw large finite numbers of both signs, up to a largest one.

    Each row has a power of two of its own, evenly from 2^10 to the largest number's; of a quarter
    of the rows, some elements are the largest number, or its negative.

    Args:
        shape: M rows and N columns.
        most: The largest number, 2^11 or more.
        dtype: Of the result.
        generator: The source of chance.
        device: Where the result is.

    Returns:
        [M, N] in `dtype`.

    Example:
        Draw up to the largest number of bfloat16:

            import torch

            cpu = torch.device("cpu")
            generator = torch.Generator(cpu).manual_seed(0)
            largest = torch.finfo(torch.bfloat16).max
            x = draw_huge((8, 64), largest, torch.bfloat16, generator, cpu)
            assert x.isfinite().all()
            assert x.abs().min() >= 2.0**10
            assert x.max() == largest or x.min() == -largest
    """
    rows, columns = shape
    order = torch.randperm(rows, generator=generator, device=device, dtype=torch.float64)
    share = (order / max(1, rows - 1)).unsqueeze(1)
    power = 10 + (math.log2(most) - 11) * (share if rows > 1 else share + 1)
    size = torch.rand((2, rows, columns), generator=generator, device=device, dtype=torch.float64)
    wide = power.exp2() * (1 + size[0]) * torch.where(size[1] < 0.5, -1.0, 1.0)
    huge = wide.clamp(-most, most).to(dtype)  # rounded up, none may be an infinity
    huge.clamp_(-torch.finfo(dtype).max, torch.finfo(dtype).max)
    where = draw_rows(rows, 4, generator, device).expand(rows, columns)
    plant(huge, (most, -most), 1 / 64, generator, where=where)
    return huge


def draw_moments(
    kind: str,
    shape: Sequence[int],
    scale: float,
    dtype: torch.dtype,
    generator: torch.Generator,
    device: torch.device,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draw a parameter's gradient and both of its moments, as Adam has them.

    The gradient is normal, the first moment a tenth of that, the second of the size of its square.
    Single elements, runs in a row of 8 and whole rows of 16 are without gradient in one of three
    ways: all three are 0, as of embeddings that no token has used; the gradient alone is, as of
    those that this step has not used; or both moments are, as of those that are used first now.

    Args:
        kind: "normal"; "first": both moments are 0 everywhere; "still": the gradient is; and
            "nonfinite": NaN, +inf and -inf here and there in the gradient, as an overflow leaves
            them, and NaN elsewhere in each of the moments.
        shape: Of each result; a row is along the last dimension.
        scale: Deviation of the gradient.
        dtype: Of the gradient; moments are float32.
        generator: The source of chance.
        device: Where the results are.

    Returns:
        The gradient, the first moment and the second one.

    Raises:
        ValueError: An unknown kind.

    Example:
        Draw those of a matrix:

            import torch

            cpu = torch.device("cpu")
            generator = torch.Generator(cpu).manual_seed(0)
            shape, dtype = (32, 64), torch.bfloat16
            grad, exp_avg, exp_avg_sq = draw_moments("normal", shape, 1.0, dtype, generator, cpu)
            assert ((grad == 0) & (exp_avg_sq > 0)).any()
    """
    kinds = ("normal", "first", "still", "nonfinite")
    if kind not in kinds:
        raise ValueError(f"no moments of kind {kind!r}: expected one of {', '.join(kinds)}")

    def normal(of: torch.dtype, deviation: float) -> torch.Tensor:
        empty = torch.empty(tuple(shape), dtype=of, device=device)
        return empty.normal_(0.0, deviation, generator=generator)

    grad, exp_avg = normal(dtype, scale), normal(torch.float32, 0.1 * scale)
    # Not next to 0, where a parameter would move by many times its own size.
    exp_avg_sq = normal(torch.float32, scale).square_().clamp_min_(0.01 * scale**2)
    rows = math.prod(shape[:-1])
    for empty in ((grad, exp_avg, exp_avg_sq), (grad,), (exp_avg, exp_avg_sq)):
        at = torch.rand(tuple(shape), generator=generator, device=device) < 1 / 32
        if rows >= 8 or shape[-1] >= 64:
            # A row of few elements that are not 0 has no mean to hold one against that cancels.
            longest = shape[-1] // 2 if len(empty) == 3 else shape[-1]
            at |= draw_runs(shape, 8, longest, generator, device)
        if rows >= 16:
            at |= draw_rows(rows, 16, generator, device).reshape(*shape[:-1], 1)
        for tensor in empty:
            tensor.masked_fill_(at, 0.0)
    if kind == "first":
        exp_avg.zero_()
        exp_avg_sq.zero_()
    elif kind == "still":
        grad.zero_()
    elif kind == "nonfinite":
        plant(grad, (torch.inf, -torch.inf, torch.nan), 0.06, generator)
        for moment in (exp_avg, exp_avg_sq):  # not in one of two that are 0 together
            plant(moment, (torch.nan,), 0.02, generator, where=moment != 0)
    return grad, exp_avg, exp_avg_sq


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
            are a window or every other block, never the first key; "huge": normal, with values
            times a power of two from 2^10 to 2^100 (not for float16).
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
    kinds = ("normal", "shifted", "sunk", "mixed", "huge")
    if kind not in kinds:
        raise ValueError(f"no attention of kind {kind!r}: expected one of {', '.join(kinds)}")
    b, h, s, d = queries

    def draw(heads: int, shift: float = 0.0) -> torch.Tensor:
        x = torch.empty(b, heads, s, d, dtype=dtype, device=device)
        return x.normal_(shift, scale, generator=generator)

    q = draw(h, -3.0 if kind == "sunk" else 0.0)
    k = draw(key_heads, 8.0 if kind in ("shifted", "sunk") else 0.0)
    v = draw(key_heads)
    if kind == "huge":
        power = torch.randint(10, 101, (1,), generator=generator, device=device)
        v.mul_(power.float().exp2().to(dtype))
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


def break_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, generator: torch.Generator
) -> None:
    """Plant NaN in place in some queries, in one key of some heads, and in the first value of some.

    All of such a query's row is NaN, and the rows of all queries of such a key; of such a value all
    rows are in its column.

    Args:
        q: Queries, [B, H, S, D].
        k: Keys, [B, Hkv, S, D].
        v: Values, likewise.
        causal: Whether a query sees no later keys. Then the first key is broken: torch adds -inf to
            the scores of others in some layouts of its inputs, which leaves NaN. Values that a
            query does not see stay: times a probability of 0, some kernels have NaN.
        generator: The source of chance, on the tensors' device.

    Example:
        Break heads of causal attention:

            import torch

            generator = torch.Generator().manual_seed(0)
            q, k, v = (torch.zeros(1, heads, 64, 8) for heads in (4, 2, 2))
            break_attention(q, k, v, True, generator)
            assert q.isnan().any()
            assert not k[:, :, 1:].isnan().any()
            assert v[:, :, 0].isnan().any()
    """
    keys = k[:, :, :1] if causal else k
    break_rows(q.flatten(0, 2), 32, generator)
    break_rows(keys.flatten(0, 1), 4, generator)
    break_rows(v[:, :, 0].flatten(0, 1), 4, generator)


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
