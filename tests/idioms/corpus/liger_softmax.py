"""Liger's softmax: a decorator that makes arguments contiguous, settings by size, autograd.Function.

entry: softmax(x: bfloat16[4,33,1000]) -> bfloat16[4,33,1000]
ops: alloc launch
"""
import functools

import torch

import triton
import triton.language as tl

MAX_FUSED_SIZE = 65536


def ensure_contiguous(fn):
    @functools.wraps(fn)
    def wrapper(ctx, *args, **kwargs):
        def maybe_to_contiguous(x):
            return x.contiguous() if isinstance(x, torch.Tensor) else x

        args = [maybe_to_contiguous(arg) for arg in args]
        kwargs = {k: maybe_to_contiguous(v) for k, v in kwargs.items()}
        return fn(ctx, *args, **kwargs)

    return wrapper


def calculate_settings(n):
    BLOCK_SIZE = triton.next_power_of_2(n)
    if BLOCK_SIZE > MAX_FUSED_SIZE:
        raise RuntimeError(f"Cannot launch Triton kernel since n = {n} exceeds {MAX_FUSED_SIZE}.")
    num_warps = 4
    if BLOCK_SIZE >= 32768:
        num_warps = 32
    elif BLOCK_SIZE >= 8192:
        num_warps = 16
    elif BLOCK_SIZE >= 2048:
        num_warps = 8
    return BLOCK_SIZE, num_warps


@triton.jit
def _softmax_single_block_forward_kernel(Y_ptr, Y_row_stride, X_ptr, X_row_stride, n_cols, BLOCK_SIZE: tl.constexpr):
    row_id = tl.program_id(0)
    offs = tl.arange(0, BLOCK_SIZE)
    mask = offs < n_cols
    x = tl.load(X_ptr + row_id * X_row_stride + offs, mask=mask, other=-float("inf"), cache_modifier=".ca")
    m = tl.max(x, axis=0)
    e = tl.exp((x - m).to(tl.float32))
    tl.store(Y_ptr + row_id * Y_row_stride + offs, e / tl.sum(e, axis=0), mask=mask, cache_modifier=".cs")


class LigerSoftmaxFunction(torch.autograd.Function):
    @staticmethod
    @ensure_contiguous
    def forward(ctx, input_):
        *batch, n_cols = input_.shape
        x2d = input_.contiguous().view(-1, n_cols)
        n_rows = x2d.shape[0]
        BLOCK_SIZE, num_warps = calculate_settings(n_cols)
        y2d = torch.empty_like(x2d)
        _softmax_single_block_forward_kernel[(n_rows,)](y2d, y2d.stride(0), x2d, x2d.stride(0), n_cols,
                                                        BLOCK_SIZE=BLOCK_SIZE, num_warps=num_warps)
        ctx.save_for_backward(y2d)
        return y2d.view(*batch, n_cols)


class LigerSoftmax(torch.nn.Module):
    def forward(self, x):
        return LigerSoftmaxFunction.apply(x)


def softmax(x):
    return LigerSoftmax()(x)
