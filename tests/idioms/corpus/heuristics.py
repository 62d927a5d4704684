"""@triton.heuristics under @triton.autotune.

entry: double(x: float32[1000]) -> float32[1000]
ops: alloc launch
configs: 2
"""
import torch

import triton
import triton.language as tl


@triton.autotune(configs=[triton.Config({}, num_warps=w) for w in (4, 8)], key=["n"], reset_to_zero=["y_ptr"])
@triton.heuristics({"BLOCK": lambda args: triton.next_power_of_2(args["n"]), "EVEN": lambda args: args["n"] % args["BLOCK"] == 0})
@triton.jit
def _double(x_ptr, y_ptr, n, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if EVEN:
        tl.store(y_ptr + i, tl.load(x_ptr + i) * 2)
    else:
        tl.store(y_ptr + i, tl.load(x_ptr + i, mask=i < n) * 2, mask=i < n)


def double(x):
    y = torch.empty_like(x)
    _double[(1,)](x, y, x.numel())
    return y
