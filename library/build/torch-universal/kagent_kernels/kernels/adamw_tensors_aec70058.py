"""A step of AdamW over tensors of different sizes in one launch: a chunk of one for each program.

The chunks of all tensors are numbered one after the other, and a program finds its own from where
each tensor's end: small tensors cost no launch, and fill the SMs that large ones leave idle at
their end. Bound by memory: four reads and three writes. Each program works out the step's own
numbers for itself, in float64, since 1 - beta2^step cancels in the first steps.
"""

import math

import torch
import triton
import triton.language as tl

BLOCK = 512
NUM_WARPS = 4
TUNE = {"BLOCK": [512, 1024, 2048, 4096], "NUM_WARPS": [2, 4, 8]}


@triton.jit
def _update(
    param_ptr,
    grad_ptr,
    exp_avg_ptr,
    exp_avg_sq_ptr,
    count,
    chunk,
    size,
    inverse_root,
    kept,
    BETA1: tl.constexpr,
    BETA2: tl.constexpr,
    EPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # In 64 bits: more than 2^31 elements fit a large GPU.
    start = chunk.to(tl.int64) * BLOCK
    offsets = start + tl.arange(0, BLOCK)
    # A mask whose end is no multiple of 16 elements is loaded element by element: full blocks have
    # none.
    if start + BLOCK <= count:
        _update_block(
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
        _update_block(
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
def _update_block(
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


@triton.jit
def adamw_chunks(
    wide_ptr,
    square_ptr,
    gain_ptr,
    bias_ptr,
    grad_wide_ptr,
    grad_square_ptr,
    grad_gain_ptr,
    grad_bias_ptr,
    exp_avg_wide_ptr,
    exp_avg_square_ptr,
    exp_avg_gain_ptr,
    exp_avg_bias_ptr,
    exp_avg_sq_wide_ptr,
    exp_avg_sq_square_ptr,
    exp_avg_sq_gain_ptr,
    exp_avg_sq_bias_ptr,
    lr_ptr,
    step_ptr,
    wide_count,
    square_count,
    gain_count,
    bias_count,
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
    kept = (1.0 - lr * WEIGHT_DECAY).to(tl.float32)  # of matrices; gain and bias do not decay

    chunk = tl.program_id(0)
    wide_end = tl.cdiv(wide_count, BLOCK)
    square_end = wide_end + tl.cdiv(square_count, BLOCK)
    gain_end = square_end + tl.cdiv(gain_count, BLOCK)
    if chunk < wide_end:
        _update(
            wide_ptr,
            grad_wide_ptr,
            exp_avg_wide_ptr,
            exp_avg_sq_wide_ptr,
            wide_count,
            chunk,
            size,
            inverse_root,
            kept,
            BETA1,
            BETA2,
            EPS,
            BLOCK,
        )
    elif chunk < square_end:
        _update(
            square_ptr,
            grad_square_ptr,
            exp_avg_square_ptr,
            exp_avg_sq_square_ptr,
            square_count,
            chunk - wide_end,
            size,
            inverse_root,
            kept,
            BETA1,
            BETA2,
            EPS,
            BLOCK,
        )
    elif chunk < gain_end:
        _update(
            gain_ptr,
            grad_gain_ptr,
            exp_avg_gain_ptr,
            exp_avg_sq_gain_ptr,
            gain_count,
            chunk - square_end,
            size,
            inverse_root,
            1.0,
            BETA1,
            BETA2,
            EPS,
            BLOCK,
        )
    else:
        _update(
            bias_ptr,
            grad_bias_ptr,
            exp_avg_bias_ptr,
            exp_avg_sq_bias_ptr,
            bias_count,
            chunk - gain_end,
            size,
            inverse_root,
            1.0,
            BETA1,
            BETA2,
            EPS,
            BLOCK,
        )


def adamw_tensors(
    wide: torch.Tensor,
    square: torch.Tensor,
    gain: torch.Tensor,
    bias: torch.Tensor,
    grad_wide: torch.Tensor,
    grad_square: torch.Tensor,
    grad_gain: torch.Tensor,
    grad_bias: torch.Tensor,
    exp_avg_wide: torch.Tensor,
    exp_avg_square: torch.Tensor,
    exp_avg_gain: torch.Tensor,
    exp_avg_bias: torch.Tensor,
    exp_avg_sq_wide: torch.Tensor,
    exp_avg_sq_square: torch.Tensor,
    exp_avg_sq_gain: torch.Tensor,
    exp_avg_sq_bias: torch.Tensor,
    lr: torch.Tensor,
    step: torch.Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
) -> None:
    counts = [t.numel() for t in (wide, square, gain, bias)]
    adamw_chunks[(sum(triton.cdiv(n, BLOCK) for n in counts),)](
        wide,
        square,
        gain,
        bias,
        grad_wide,
        grad_square,
        grad_gain,
        grad_bias,
        exp_avg_wide,
        exp_avg_square,
        exp_avg_gain,
        exp_avg_bias,
        exp_avg_sq_wide,
        exp_avg_sq_square,
        exp_avg_sq_gain,
        exp_avg_sq_bias,
        lr,
        step,
        *counts,
        BETA1=beta1,
        BETA2=beta2,
        LOG_BETA1=math.log(beta1),
        LOG_BETA2=math.log(beta2),
        EPS=eps,
        WEIGHT_DECAY=weight_decay,
        BLOCK=BLOCK,
        num_warps=NUM_WARPS,
    )
