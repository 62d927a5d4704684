"""A step of AdamW over the elements in order, whatever the shape: a block for each program.

Bound by memory: four reads and three writes. Each program works out the step's own numbers for
itself, in float64, since 1 - beta2^step cancels in the first steps.
"""

import math

import torch
import triton
import triton.language as tl

BLOCK = 1024
NUM_WARPS = 4
TUNE = {"BLOCK": [512, 1024, 2048, 4096], "NUM_WARPS": [2, 4, 8]}


@triton.jit
def adamw_flat(
    param_ptr,
    grad_ptr,
    exp_avg_ptr,
    exp_avg_sq_ptr,
    lr_ptr,
    step_ptr,
    count,
    BETA1: tl.constexpr,
    BETA2: tl.constexpr,
    LOG_BETA1: tl.constexpr,
    LOG_BETA2: tl.constexpr,
    EPS: tl.constexpr,
    WEIGHT_DECAY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    lr = tl.load(lr_ptr).to(tl.float64)
    step = tl.load(step_ptr).to(tl.float64)
    size = (lr / (1.0 - tl.exp(step * LOG_BETA1))).to(tl.float32)
    inverse_root = (1.0 / tl.sqrt(1.0 - tl.exp(step * LOG_BETA2))).to(tl.float32)
    kept = (1.0 - lr * WEIGHT_DECAY).to(tl.float32)

    # In 64 bits: more than 2^31 elements fit a large GPU.
    start = tl.program_id(0).to(tl.int64) * BLOCK
    offsets = start + tl.arange(0, BLOCK)
    # A mask whose end is no multiple of 16 elements is loaded element by element: full blocks have
    # none.
    if start + BLOCK <= count:
        _update(
            param_ptr,
            grad_ptr,
            exp_avg_ptr,
            exp_avg_sq_ptr,
            offsets,
            None,
            size,
            inverse_root,
            kept,
            BETA1,
            BETA2,
            EPS,
        )
    else:
        _update(
            param_ptr,
            grad_ptr,
            exp_avg_ptr,
            exp_avg_sq_ptr,
            offsets,
            offsets < count,
            size,
            inverse_root,
            kept,
            BETA1,
            BETA2,
            EPS,
        )


@triton.jit
def _update(
    param_ptr,
    grad_ptr,
    exp_avg_ptr,
    exp_avg_sq_ptr,
    offsets,
    inside,
    size,
    inverse_root,
    kept,
    BETA1: tl.constexpr,
    BETA2: tl.constexpr,
    EPS: tl.constexpr,
):
    grad = tl.load(grad_ptr + offsets, mask=inside).to(tl.float32)
    m = tl.load(exp_avg_ptr + offsets, mask=inside)
    v = tl.load(exp_avg_sq_ptr + offsets, mask=inside)
    param = tl.load(param_ptr + offsets, mask=inside).to(tl.float32)
    m = BETA1 * m + (1.0 - BETA1) * grad
    v = BETA2 * v + (1.0 - BETA2) * grad * grad
    param = param * kept - size * (m / (tl.sqrt(v) * inverse_root + EPS))
    tl.store(exp_avg_ptr + offsets, m, mask=inside)
    tl.store(exp_avg_sq_ptr + offsets, v, mask=inside)
    tl.store(param_ptr + offsets, param.to(param_ptr.dtype.element_ty), mask=inside)


def adamw(
    param: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    lr: torch.Tensor,
    step: torch.Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
) -> None:
    count = param.numel()
    adamw_flat[(triton.cdiv(count, BLOCK),)](
        param,
        grad,
        exp_avg,
        exp_avg_sq,
        lr,
        step,
        count,
        BETA1=beta1,
        BETA2=beta2,
        LOG_BETA1=math.log(beta1),
        LOG_BETA2=math.log(beta2),
        EPS=eps,
        WEIGHT_DECAY=weight_decay,
        BLOCK=BLOCK,
        num_warps=NUM_WARPS,
    )
