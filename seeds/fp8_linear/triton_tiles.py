"""Linear layer of 8-bit floating-point numbers: tiles of the result in the tensor cores.

Few tokens get flat tiles, whose cost is reading the weight once; many get square ones, narrower
ones where there would be fewer than two for each SM. Programs take tiles in groups of rows, so that
operands are found in the L2 cache. Products of a tile are added up in float32 after each 128 of
them: Hopper's tensor cores keep fewer digits.
"""

import torch
import triton
import triton.language as tl

SUMMED = 128  # of the summed dimension at a time: a cache line of 8-bit numbers
OUTPUTS = 128  # of a tile of many tokens
MIDDLE_OUTPUTS = 64  # where tiles of OUTPUTS are too few to fill the GPU
FEW_OUTPUTS = 32  # of a tile of few tokens: narrow, so that many programs read at once
STAGES = 4  # tiles of operands in flight
GROUP = 8  # rows of tiles that are taken together
TUNE = {
    "SUMMED": [64, 128],
    "OUTPUTS": [128, 256],
    "FEW_OUTPUTS": [16, 32, 64],
    "STAGES": [3, 4, 5],
    "GROUP": [4, 8, 16],
}


@triton.jit(do_not_specialize=["tokens"])
def scaled_product(
    x_ptr,
    weight_ptr,
    scale_x_ptr,
    scale_weight_ptr,
    y_ptr,
    tokens,
    outputs,
    summed,
    TOKENS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    SUMMED: tl.constexpr,
    GROUP: tl.constexpr,
    STAGES: tl.constexpr,
):
    rows, columns = tl.cdiv(tokens, TOKENS), tl.cdiv(outputs, OUTPUTS)
    group = tl.program_id(0) // (GROUP * columns)
    size = min(rows - group * GROUP, GROUP)
    place = tl.program_id(0) % (GROUP * columns)
    token = (group * GROUP + place % size) * TOKENS + tl.arange(0, TOKENS)
    output = (place // size) * OUTPUTS + tl.arange(0, OUTPUTS)
    lane = tl.arange(0, SUMMED)
    # In 64 bits: operands may have more than 2^31 elements.
    x_at = x_ptr + token[:, None].to(tl.int64) * summed + lane[None, :]
    weight_at = weight_ptr + output[None, :].to(tl.int64) * summed + lane[:, None]
    total = tl.zeros([TOKENS, OUTPUTS], tl.float32)
    for start in tl.range(0, summed, SUMMED, num_stages=STAGES):
        inside = start + lane < summed
        x = tl.load(x_at, mask=(token < tokens)[:, None] & inside[None, :], other=0.0)
        valid = inside[:, None] & (output < outputs)[None, :]
        weight = tl.load(weight_at, mask=valid, other=0.0)
        total = tl.dot(x, weight, total, max_num_imprecise_acc=SUMMED)
        x_at += SUMMED
        weight_at += SUMMED
    y = total * (tl.load(scale_x_ptr) * tl.load(scale_weight_ptr))
    valid = (token < tokens)[:, None] & (output < outputs)[None, :]
    y_at = y_ptr + token[:, None].to(tl.int64) * outputs + output[None, :]
    tl.store(y_at, y.to(y_ptr.dtype.element_ty), mask=valid)


def fp8_linear(
    x: torch.Tensor, weight: torch.Tensor, scale_x: torch.Tensor, scale_weight: torch.Tensor
) -> torch.Tensor:
    tokens, summed = x.shape
    outputs = weight.shape[0]
    y = torch.empty((tokens, outputs), dtype=torch.bfloat16, device=x.device)
    few = tokens <= 64
    of_tile = min(max(triton.next_power_of_2(tokens), 16), 128)
    wide = FEW_OUTPUTS if few else OUTPUTS
    rows = triton.cdiv(tokens, of_tile)
    processors = torch.cuda.get_device_properties(x.device).multi_processor_count
    if not few and rows * triton.cdiv(outputs, wide) < 2 * processors:
        wide = MIDDLE_OUTPUTS
    programs = rows * triton.cdiv(outputs, wide)
    scaled_product[(programs,)](
        x,
        weight,
        scale_x,
        scale_weight,
        y,
        tokens,
        outputs,
        summed,
        TOKENS=of_tile,
        OUTPUTS=wide,
        SUMMED=SUMMED,
        GROUP=GROUP,
        STAGES=STAGES,
        num_warps=4 if few else 8,
    )
    return y
