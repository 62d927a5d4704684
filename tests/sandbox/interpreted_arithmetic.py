"""Run with TRITON_INTERPRET=1: Triton's repaired interpreter against torch.

Prints the names of the checks that hold.
"""

import torch
import triton
import triton.language as tl
from kagent_sandbox.judge.interpreter_worker import repair

N = 4096


@triton.jit
def convert(x_ptr, y_ptr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(y_ptr + i, tl.load(x_ptr + i).to(y_ptr.dtype.element_ty))


@triton.jit
def arithmetic(a_ptr, b_ptr, y_ptr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    a, b = tl.load(a_ptr + i), tl.load(b_ptr + i)
    one = tl.full((BLOCK,), 1.0, tl.bfloat16)
    tl.store(y_ptr + i, tl.where(a > b, a * b - a, tl.maximum(-a, b) + one))


@triton.jit
def plus(a, b):
    return a + b


@triton.jit
def larger(a, b):
    return tl.where(a > b, a, b)


@triton.jit
def larger_by_branch(a, b):
    result = b
    if a > b:
        result = a
    return result


@triton.jit
def welford(mean_a, m2_a, n_a, mean_b, m2_b, n_b):
    n = n_a + n_b
    delta = mean_b - mean_a
    return mean_a + delta * n_b / n, m2_a + m2_b + delta * delta * n_a * n_b / n, n


@triton.jit
def second(a, b):
    return b


@triton.jit
def reduce_all(x_ptr, y_ptr, BLOCK: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, BLOCK))
    mean, m2, n = tl.reduce((x, x * 0, x * 0 + 1), 0, welford)
    tl.store(y_ptr + 0, tl.reduce(x, 0, plus))
    tl.store(y_ptr + 1, tl.reduce(x, 0, larger))
    tl.store(y_ptr + 2, tl.reduce(x, 0, larger_by_branch))
    tl.store(y_ptr + 3, mean)
    tl.store(y_ptr + 4, m2 / n)
    tl.store(y_ptr + 5, tl.reduce(x, 0, second))
    tl.store(y_ptr + 6, tl.sum(x))
    tl.store(y_ptr + 7, tl.max(x))


@triton.jit
def reduce_largest(x_ptr, y_ptr, BRANCHES: tl.constexpr, BLOCK: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, BLOCK))
    if BRANCHES:
        tl.store(y_ptr, tl.reduce(x, 0, larger_by_branch))
    else:
        tl.store(y_ptr, tl.reduce(x, 0, larger))


@triton.jit
def reduce_columns(x_ptr, y_ptr, z_ptr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    i, j = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    x = tl.load(x_ptr + i[:, None] * COLUMNS + j)
    tl.store(y_ptr + j, tl.sum(x, 0))
    tl.store(z_ptr + tl.arange(0, 1)[:, None] * COLUMNS + j, tl.reduce(x, 0, plus, keep_dims=True))


@triton.jit
def scan(x_ptr, y_ptr, z_ptr, w_ptr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i)
    tl.store(y_ptr + i, tl.cumsum(x, 0))
    tl.store(z_ptr + i, tl.associative_scan(x, 0, plus, reverse=True))
    tl.store(w_ptr + i, tl.associative_scan(x, 0, second))


@triton.jit
def count(index_ptr, y_ptr, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    index = tl.load(index_ptr + at, at < n)
    tl.atomic_add(y_ptr + index, tl.full([1], 1.0, tl.float32), at < n)  # one value for all


def holds(name, found, expected, rtol=0.0):
    torch.testing.assert_close(found, expected, rtol=rtol, atol=0, equal_nan=True)
    print(name)  # noqa: T201 - the test's answer


def main():
    repair()
    generator = torch.Generator().manual_seed(1)
    wide = 100 * torch.randn(N, generator=generator, dtype=torch.float64)
    narrow = wide.bfloat16()

    for dtype in (torch.float64, torch.float32, torch.float16, torch.int32, torch.int64):
        name = str(dtype).removeprefix("torch.")
        source = wide.to(dtype)
        found = torch.empty(N, dtype=torch.bfloat16)
        convert[(1,)](source, found, BLOCK=N)
        holds(f"{name} to bfloat16", found, source.bfloat16())
        found = torch.empty(N, dtype=dtype)
        convert[(1,)](narrow, found, BLOCK=N)
        holds(f"bfloat16 to {name}", found, narrow.to(dtype))

    other = narrow.roll(1)
    found = torch.empty(N, dtype=torch.bfloat16)
    arithmetic[(1,)](narrow, other, found, BLOCK=N)
    expected = torch.where(
        narrow > other, narrow * other - narrow, torch.maximum(-narrow, other) + 1
    )
    holds("arithmetic of bfloat16", found, expected)

    # So many that adding them one after the other would err by more than 1e-6.
    x = 1 + torch.rand(1 << 14, generator=generator, dtype=torch.float64).float()
    found = torch.empty(8)
    reduce_all[(1,)](x, found, BLOCK=1 << 14)
    exact = x.double()
    holds(
        "reductions",
        found.double()[[0, 6, 3, 4]],
        torch.stack([exact.sum(), exact.sum(), exact.mean(), exact.var(correction=0)]),
        1e-6,
    )
    holds(
        "reductions that round nothing",
        found[[1, 2, 5, 7]],
        torch.stack([x.max(), x.max(), x[-1], x.max()]),
    )

    for branches in (False, True):
        found = torch.empty((), dtype=torch.bfloat16)
        reduce_largest[(1,)](narrow, found, BRANCHES=branches, BLOCK=N)
        holds(f"the largest bfloat16, branches={branches}", found, narrow.max())

    matrix = x.reshape(1 << 12, 4)
    sums, folded = torch.empty(4), torch.empty(4)
    reduce_columns[(1,)](matrix, sums, folded, ROWS=1 << 12, COLUMNS=4)
    holds("sums of columns", sums.double(), matrix.double().sum(0), 1e-6)
    holds("a reduction of columns", folded.double(), matrix.double().sum(0), 1e-6)

    forward, backward, last = (torch.empty(1 << 14) for _ in range(3))
    scan[(1,)](x, forward, backward, last, BLOCK=1 << 14)
    holds("cumulative sums", forward.double(), x.double().cumsum(0), 1e-6)
    holds("a scan from the end", backward.double(), x.double().flip(0).cumsum(0).flip(0), 1e-6)
    holds("a scan keeps the order", last, x)

    index, found = torch.arange(100) // 3, torch.zeros(40)
    count[(1,)](index, found, 100, BLOCK=128)
    holds("one value is added at many places", found, torch.bincount(index, minlength=40).float())


if __name__ == "__main__":
    main()
