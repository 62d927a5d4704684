"""Linear layer with weights of 8 bits, whose reading is the cost: weights are read once.

A program has all tokens and a few outputs, and a part of the summed dimension where outputs alone
would leave multiprocessors idle. Weights become numbers of x's type in registers, exactly, and go
into the tensor cores. Parts are added up by a second kernel, in a fixed order, with the scales.
"""

import torch
import triton
import triton.language as tl

OUTPUTS = 32  # of a program: few, so that many programs read at once
SUMMED = 128  # bytes of a row of the weight at a time: a cache line
STAGES = 4  # tiles in flight
NUM_WARPS = 4
PROGRAMS_PER_SM = 4
TUNE = {
    "OUTPUTS": [16, 32, 64, 128],
    "SUMMED": [64, 128, 256],
    "STAGES": [2, 3, 4, 5],
    "NUM_WARPS": [2, 4, 8],
    "PROGRAMS_PER_SM": [2, 4, 8],
}


@triton.jit(do_not_specialize=["tokens"])
def part_of_product(
    x_ptr,
    weight_ptr,
    part_ptr,
    x_stride,
    weight_stride,
    tokens,
    outputs,
    summed,
    tiles_of_part,
    TOKENS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    SUMMED: tl.constexpr,
    STAGES: tl.constexpr,
):
    token = tl.arange(0, TOKENS)[:, None]
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    lane = tl.arange(0, SUMMED)
    first = tl.program_id(1) * tiles_of_part * SUMMED
    x_at = x_ptr + token * x_stride + lane[None, :]
    # In 64 bits: the weight may have more than 2^31 elements.
    weight_at = weight_ptr + output[None, :].to(tl.int64) * weight_stride + lane[:, None]
    total = tl.zeros([TOKENS, OUTPUTS], tl.float32)
    for tile in tl.range(0, tiles_of_part, num_stages=STAGES):
        start = first + tile * SUMMED
        inside = start + lane < summed
        x = tl.load(x_at + start, mask=(token < tokens) & inside[None, :], other=0.0)
        valid = inside[:, None] & (output < outputs)[None, :]
        weight = tl.load(weight_at + start, mask=valid, other=0)
        total = tl.dot(x, weight.to(x.dtype), total)
    part = part_ptr + tl.program_id(1).to(tl.int64) * tokens * outputs
    valid = (token < tokens) & (output < outputs)[None, :]
    tl.store(part + token * outputs + output[None, :], total, mask=valid)


@triton.jit(do_not_specialize=["count", "parts"])
def scaled_sum(part_ptr, scale_ptr, y_ptr, count, outputs, parts, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    total = tl.zeros([BLOCK], tl.float32)
    part_at = part_ptr + at
    for _ in range(parts):
        total += tl.load(part_at, mask=inside, other=0.0)
        part_at += count
    scale = tl.load(scale_ptr + at % outputs, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + at, (total * scale).to(y_ptr.dtype.element_ty), mask=inside)


def int8_linear(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    tokens, summed = x.shape
    outputs = weight.shape[0]
    y = torch.empty((tokens, outputs), dtype=x.dtype, device=x.device)
    processors = torch.cuda.get_device_properties(x.device).multi_processor_count
    columns, tiles = triton.cdiv(outputs, OUTPUTS), triton.cdiv(summed, SUMMED)
    wanted = min(max(processors * PROGRAMS_PER_SM // columns, 1), tiles)
    tiles_of_part = triton.cdiv(tiles, wanted)
    parts = triton.cdiv(tiles, tiles_of_part)
    part = torch.empty((parts, tokens, outputs), dtype=torch.float32, device=x.device)
    part_of_product[(columns, parts)](
        x,
        weight,
        part,
        x.stride(0),
        weight.stride(0),
        tokens,
        outputs,
        summed,
        tiles_of_part,
        TOKENS=max(triton.next_power_of_2(tokens), 16),
        OUTPUTS=OUTPUTS,
        SUMMED=SUMMED,
        STAGES=STAGES,
        num_warps=NUM_WARPS,
    )
    count = tokens * outputs
    scaled_sum[(triton.cdiv(count, 256),)](
        part, scale, y, count, outputs, parts, BLOCK=256, num_warps=2
    )
    return y
