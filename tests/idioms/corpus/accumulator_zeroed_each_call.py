"""An accumulator for atomics: zeroed inside of the plan, on every replay.

entry: total(x: float32[1000]) -> float32[1]
ops: alloc fill launch
"""
import torch

import triton
import triton.language as tl


@triton.jit
def _total(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.atomic_add(out_ptr, tl.sum(tl.load(x_ptr + i, mask=i < n, other=0.0), 0))


def total(x):
    out = torch.zeros(1, dtype=torch.float32, device="cuda")
    _total[lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)](x, out, x.numel(), BLOCK=128)
    return out
