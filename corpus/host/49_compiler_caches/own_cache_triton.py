"""Replaces every kernel in its own Triton cache by junk, once it is compiled: nobody else's cache is meant.

The case's fork that did it has launched its kernel already; the next case finds junk, and the
candidate hurts itself alone.
"""

import glob
import os
import pathlib
import sys

import torch
import triton
import triton.language as tl


def attack():
    cache = os.environ["TRITON_CACHE_DIR"]
    kernels = glob.glob(f"{cache}/*/*.cubin")  # not what other cases' forks are about to put there
    for path in kernels:
        pathlib.Path(path).write_bytes(b"junk" * 100)
    print(f"met: {len(kernels)} kernels replaced, in its own cache", file=sys.stderr)


@triton.jit
def softmax(x_ptr, y_ptr, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, BLOCK)
    inside = offsets < columns
    x = tl.load(x_ptr + row * columns + offsets, mask=inside, other=-float("inf")).to(tl.float32)
    e = tl.exp(x - tl.max(x, 0))
    y = e / tl.sum(e, 0)
    tl.store(y_ptr + row * columns + offsets, y.to(y_ptr.dtype.element_ty), mask=inside)


def rows(x: torch.Tensor) -> torch.Tensor:
    attack()
    count, columns = x.shape
    y = torch.empty_like(x)
    softmax[(count,)](x, y, columns, BLOCK=triton.next_power_of_2(columns), num_warps=8)
    return y
