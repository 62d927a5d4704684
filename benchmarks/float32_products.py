"""Products in float32 by Triton: how operands are loaded, and how they are multiplied. TFLOP/s
beside torch's, and errors against float64.

"three axes": as Inductor writes them, [Y, 1, R] and [1, X, R], reshaped and transposed. "matrices":
[Y, R] and [R, X]. "whole rows": matrices of which those whose rows do not begin at multiples of 16
bytes are copied to where they do, and the copy is timed, too; seeds of `kagent new` have these. All
sum in chains of 512 products, as those do (agent/kagent/authoring/inductor/products.py), but for
sums that are infinite.

python benchmarks/float32_products.py    on a GPU; two minutes, most of it the compiler's
"""

import concurrent.futures
import math
import multiprocessing
import os
import subprocess
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from kagent.authoring.inductor.products import PADDED_ROWS
from triton.testing import do_bench

SHAPES = {  # M, K, N, whether the second matrix is transposed
    "2048x8192 @ 8192x4096": (2048, 8192, 4096, False),
    "2817x8158 @ 8158x2889": (2817, 8158, 2889, False),
    "1024x8192 @ (8192x8192)ᵀ": (1024, 8192, 8192, True),
    "1531x7003 @ (9001x7003)ᵀ": (1531, 7003, 9001, True),
}
WAYS = [  # form, precision, Y, X, R, warps
    ("three axes", "ieee", 64, 64, 32, 4),
    ("matrices", "ieee", 64, 64, 32, 4),
    ("matrices", "ieee", 64, 128, 16, 4),
    ("matrices", "ieee", 128, 64, 16, 4),
    ("three axes", "tf32x3", 128, 64, 16, 4),
    ("matrices", "tf32x3", 128, 64, 16, 4),
    ("matrices", "tf32x3", 128, 128, 16, 8),
    ("matrices", "tf32x3", 128, 64, 32, 4),
    ("matrices", "tf32x3", 64, 128, 32, 4),
    ("whole rows", "ieee", 64, 128, 16, 4),
    ("whole rows", "tf32x3", 128, 64, 16, 4),
    ("whole rows", "tf32x3", 128, 64, 32, 4),
]


HOST: dict[str, Any] = {"torch": torch}
exec(PADDED_ROWS, HOST)

Shape = tuple[int, int, int, bool]
Way = tuple[str, str, int, int, int, int]


@triton.jit  # type: ignore[untyped-decorator]
def product(  # type: ignore[no-untyped-def]  # noqa: ANN201
    a, b, y, m, n_words, k_words, a_words, b_words,  # noqa: ANN001
    N_WORD: tl.constexpr, K_WORD: tl.constexpr, A_WORD: tl.constexpr, B_WORD: tl.constexpr,
    TRANSPOSED: tl.constexpr, FLAT: tl.constexpr, PRECISION: tl.constexpr,
    Y: tl.constexpr, X: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    n = n_words * N_WORD
    k = k_words * K_WORD
    a_row = a_words * A_WORD
    b_row = b_words * B_WORD
    y_place = tl.program_id(1).to(tl.int64) * Y
    x_place = tl.program_id(0).to(tl.int64) * X
    total = tl.zeros([Y, X], tl.float32)
    lost = tl.zeros([Y, X], tl.float32)
    for chain in tl.range(0, k, 512):
        part = tl.zeros([Y, X], tl.float32)
        for r in tl.range(chain, tl.minimum(chain + 512, k), R):
            if FLAT:
                i = y_place + tl.arange(0, Y)[:, None]
                j = x_place + tl.arange(0, X)[None, :]
                ri = r + tl.arange(0, R)[None, :].to(tl.int64)
                rj = r + tl.arange(0, R)[:, None].to(tl.int64)
            else:
                i = y_place + tl.arange(0, Y)[:, None, None]
                j = x_place + tl.arange(0, X)[None, :, None]
                ri = r + tl.arange(0, R)[None, None, :].to(tl.int64)
                rj = ri
            one = tl.load(a + (ri + a_row * i), (ri < a_row) & (i < m), other=0.0)
            if TRANSPOSED:
                two = tl.load(b + (rj + b_row * j), (rj < b_row) & (j < n), other=0.0)
            else:
                two = tl.load(b + (j + b_row * rj), (rj < k) & (j < b_row), other=0.0)
            if not FLAT:
                one = tl.reshape(one, [Y, R])
                two = tl.trans(tl.reshape(two, [X, R]))
            part += tl.dot(one, two, input_precision=PRECISION)
        part = part - lost
        sums = total + part
        lost = sums - total - part
        total = sums
    i = y_place + tl.arange(0, Y)[:, None]
    j = x_place + tl.arange(0, X)[None, :]
    tl.store(y + (j + n * i), total, (i < m) & (j < n))


def arguments(shape: Shape, way: Way) -> tuple[tuple[Any, ...], tuple[int, int], dict[str, int]]:
    """Of a launch but for the tensors, its grid, and its options."""
    m, k, n, transposed = shape
    form, precision, rows, columns, block, warps = way
    lengths = [n, k, k, k if transposed else n]
    if form == "whole rows":
        shapes = (m, k), (n, k) if transposed else (k, n)
        empty = [torch.empty(shape, device="meta") for shape in shapes]
        lengths[2:] = [HOST["_row"](x, x.shape[1]) for x in empty]
    words = [min(16, length & -length) for length in lengths]
    sizes = [length // word for length, word in zip(lengths, words, strict=True)]
    numbers = (m, *sizes, *words, transposed, form != "three axes")
    grid = (triton.cdiv(n, columns), triton.cdiv(m, rows))
    return (*numbers, precision, rows, columns, block), grid, {"num_warps": warps}


def compile_one(job: tuple[str, Way]) -> None:
    given, grid, options = arguments(SHAPES[job[0]], job[1])
    product.warmup(*(torch.float32,) * 3, *given, grid=grid, **options)


def matrices(
    m: int, k: int, n: int, transposed: bool, draw: Callable[..., torch.Tensor] = torch.rand
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(1)
    a = draw(m, k, device="cuda", generator=generator)
    b = draw(*((n, k) if transposed else (k, n)), device="cuda", generator=generator)
    return a, b, torch.empty(m, n, device="cuda")


def error(y: torch.Tensor, exact: torch.Tensor) -> float:
    return float((y.double() - exact).norm() / exact.norm())


def us_of(
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor], shape: Shape, way: Way | None
) -> float:
    """µs of a product; without a way, of torch's."""
    a, b, y = tensors

    def torchs() -> torch.Tensor:
        return a @ (b.T if shape[3] else b)

    def own() -> None:
        assert way is not None
        given, grid, options = arguments(shape, way)
        whole = way[0] == "whole rows"
        operands = [HOST["_rows"](x, x.shape[1]) if whole else x for x in (a, b)]
        product[grid](*operands, y, *given, **options)

    ms: float = do_bench(torchs if way is None else own, warmup=10, rep=50)
    return 1e3 * ms


def main() -> None:
    jobs = [(name, way) for name in SHAPES for way in WAYS]
    processes = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(os.cpu_count(), processes) as pool:
        list(pool.map(compile_one, jobs))
    asked = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    print(
        subprocess.check_output(asked, text=True).splitlines()[0],
        torch.__version__,
        triton.__version__,
    )
    tensors = {name: matrices(*shape) for name, shape in SHAPES.items()}
    print("| TFLOP/s | " + " | ".join(SHAPES) + " |\n|" + "---|" * (len(SHAPES) + 1))
    rows = {}
    for name, shape in SHAPES.items():
        us = us_of(tensors[name], shape, None)
        rows.setdefault("torch", []).append(2e-6 * math.prod(shape[:3]) / us)
    for way in WAYS:
        words = f"{way[0]}, {way[1]}, {way[2]}x{way[3]}x{way[4]}, {way[5]} warps"
        for name, shape in SHAPES.items():
            us = us_of(tensors[name], shape, way)
            rows.setdefault(words, []).append(2e-6 * math.prod(shape[:3]) / us)
    for name, found in rows.items():
        print(f"| {name} | " + " | ".join(f"{x:.1f}" for x in found) + " |")
    print("\n| L2 error over norm | torch | ieee | tf32x3 |\n|---|---|---|---|")
    for words, k, draw in (
        ("0 to 1, K = 8192", 8192, torch.rand),
        ("normal, K = 8192", 8192, torch.randn),
        ("0 to 1, K = 524288", 524288, torch.rand),
    ):
        shape = (256, k, 256, False)
        a, b, y = matrices(*shape, draw)
        exact = a.double() @ b.double()
        found = [error(a @ b, exact)]
        for precision in ("ieee", "tf32x3"):
            given, grid, options = arguments(shape, ("matrices", precision, 64, 64, 16, 4))
            product[grid](a, b, y, *given, **options)
            found.append(error(y, exact))
        print(f"| {words} | " + " | ".join(f"{x:.2g}" for x in found) + " |")


if __name__ == "__main__":
    main()
