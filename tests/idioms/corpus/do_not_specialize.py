"""Arguments that are not specialised, helper functions, constexpr globals, int64 and None arguments.

entry: scale(x: float32[1000]) -> float32[1000]
ops: alloc launch
check: [getattr(a, "type", None) for a in plan.launches[0].args][2:5] == ["i32", "f32", "i64"]
"""
import torch

import triton
import triton.language as tl

BLOCK: tl.constexpr = tl.constexpr(256)


@triton.jit
def _helper(v, s):
    return v * s


@triton.jit(do_not_specialize=["n"], do_not_specialize_on_alignment=["x_ptr"])
def _scale(x_ptr, y_ptr, n, s, big, bias_ptr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    v = _helper(tl.load(x_ptr + i, mask=i < n), s)
    if bias_ptr is not None:
        v += tl.load(bias_ptr)
    tl.store(y_ptr + i, v + big % 2, mask=i < n)


def scale(x):
    y = torch.empty_like(x)
    _scale[(triton.cdiv(x.numel(), 256),)](x, y, 1, 0.5, 1 << 40, None)
    return y
