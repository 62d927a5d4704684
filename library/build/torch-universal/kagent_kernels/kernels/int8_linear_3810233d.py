"""triton_split where that is faster, gluon_hopper elsewhere."""

import functools
import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

M_SPLIT = 32  # rows of x: tokens, 1 to 64; up to here the first kernel is faster
TUNE = {
    "M_SPLIT": [4, 32],
    "OUTPUTS": [16, 32, 64, 128],
    "SUMMED": [64, 128, 256],
    "STAGES": [2, 3, 4, 5],
    "NUM_WARPS": [2, 4, 8],
    "PROGRAMS_PER_SM": [2, 4, 8],
    "GROUPS_FEW": [2, 4],
    "GROUPS_MANY": [2, 4],
    "RING_KIB": [96, 144, 192],
}


# -- triton_split --

OUTPUTS = 32  # of a program: few, so that many programs read at once
SUMMED = 128  # bytes of a row of the weight at a time: a cache line
STAGES = 4  # tiles in flight
NUM_WARPS = 4
PROGRAMS_PER_SM = 4


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


def _int8_linear_split(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
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


# -- gluon_hopper --

GROUPS_FEW = 2  # consumers of a block for up to 16 tokens
GROUPS_MANY = 4  # and for more
RING_KIB = 192

GROUP = gl.constexpr(64)  # outputs of a consumer: the rows of one wgmma
SUMMED_GLUON_HOPPER = gl.constexpr(128)  # of the summed dimension at a time: the width of a swizzle


@gluon.jit
def _fetch(arguments, GROUPS: gl.constexpr, STAGES: gl.constexpr):
    x_desc, weight_desc, x_s, weight_s, full, empty, tiles, tiles_of_part = arguments
    first = gl.program_id(1) * tiles_of_part
    for n in range(gl.minimum(tiles - first, tiles_of_part)):
        stage = n % STAGES
        at = (first + n) * SUMMED_GLUON_HOPPER
        # The first round waits for the phase before the first one, which counts as ended.
        mbarrier.wait(empty.index(stage), ((n // STAGES) & 1) ^ 1)
        ready = full.index(stage)
        mbarrier.expect(ready, x_desc.block_type.nbytes + weight_desc.block_type.nbytes)
        output = gl.program_id(0) * GROUP * GROUPS
        tma.async_copy_global_to_shared(weight_desc, [output, at], ready, weight_s.index(stage))
        tma.async_copy_global_to_shared(x_desc, [0, at], ready, x_s.index(stage))


@gluon.jit
def _multiply(
    arguments,
    TOKENS: gl.constexpr,
    GROUPS: gl.constexpr,
    STAGES: gl.constexpr,
    WHOLE: gl.constexpr,
    W: gl.constexpr,
):
    """The W-th 64 outputs of the block: their part, or, if that is the whole, their result."""
    (y_ptr, scale_ptr, x_s, weight_s, full, empty, tiles, tiles_of_part, tokens,
     outputs) = arguments  # fmt: skip
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TOKENS, 16])
    of_left: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=layout, k_width=2)
    first = gl.program_id(1) * tiles_of_part
    total = gl.zeros([GROUP, TOKENS], gl.float32, layout=layout)
    for n in range(gl.minimum(tiles - first, tiles_of_part)):
        stage = n % STAGES
        mbarrier.wait(full.index(stage), (n // STAGES) & 1)
        weight = weight_s.index(stage).slice(GROUP * W, GROUP, dim=0).load(of_left).to(x_s.dtype)
        total = warpgroup_mma(weight, x_s.index(stage).permute((1, 0)), total, is_async=True)
        total, weight = warpgroup_mma_wait(0, deps=[total, weight])
        mbarrier.arrive(empty.index(stage), count=1)
    output = gl.program_id(0) * GROUP * GROUPS + W * GROUP
    output += gl.arange(0, GROUP, layout=gl.SliceLayout(1, layout))
    token = gl.arange(0, TOKENS, layout=gl.SliceLayout(0, layout))[None, :]
    valid = (output < outputs)[:, None] & (token < tokens)
    if WHOLE:
        scale = gl.load(scale_ptr + output, mask=output < outputs, other=0.0).to(gl.float32)
        total = total * scale[:, None]
    else:
        y_ptr += gl.program_id(1).to(gl.int64) * tokens * outputs
    at = y_ptr + token * outputs + output[:, None]
    gl.store(at, total.to(y_ptr.dtype.element_ty), mask=valid)


# One binary for all sizes.
@gluon.jit(do_not_specialize=["tiles", "tiles_of_part", "tokens", "outputs"])
def _part_of_product(
    x_desc, weight_desc, y_ptr, scale_ptr, tiles, tiles_of_part, tokens, outputs,
    TOKENS: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr, WHOLE: gl.constexpr,
):  # fmt: skip
    """Give the roles to warps."""
    x_s = gl.allocate_shared_memory(x_desc.dtype, [STAGES, TOKENS, SUMMED_GLUON_HOPPER], x_desc.layout)
    weight_s = gl.allocate_shared_memory(
        gl.int8, [STAGES, GROUP * GROUPS, SUMMED_GLUON_HOPPER], weight_desc.layout
    )
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(empty.index(s), count=GROUPS)
    fence_async_shared()  # TMA sees the barriers
    used = (
        y_ptr, scale_ptr, x_s, weight_s, full, empty, tiles, tiles_of_part, tokens, outputs,
    )  # fmt: skip
    fetched = (x_desc, weight_desc, x_s, weight_s, full, empty, tiles, tiles_of_part)
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (_multiply, (used, TOKENS, GROUPS, STAGES, WHOLE, 0)),
                (_multiply, (used, TOKENS, GROUPS, STAGES, WHOLE, 1)),
                (_fetch, (fetched, GROUPS, STAGES)),
            ],
            [4, 1],
            [232, 40],
        )
    else:
        gl.warp_specialize(
            [
                (_multiply, (used, TOKENS, GROUPS, STAGES, WHOLE, 0)),
                (_multiply, (used, TOKENS, GROUPS, STAGES, WHOLE, 1)),
                (_multiply, (used, TOKENS, GROUPS, STAGES, WHOLE, 2)),
                (_multiply, (used, TOKENS, GROUPS, STAGES, WHOLE, 3)),
                (_fetch, (fetched, GROUPS, STAGES)),
            ],
            [4, 4, 4, 1],
            [112, 112, 112, 24],
        )


@gluon.jit(do_not_specialize=["count", "outputs"])
def _scaled_sum(
    part_ptr, scale_ptr, y_ptr, count, outputs, PARTS: gl.constexpr, BLOCK: gl.constexpr
):
    """Add up parts, which are all on their way at once."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    at = gl.program_id(0) * BLOCK + gl.arange(0, BLOCK, layout=layout)
    inside = at < count
    parts = ()
    for i in gl.static_range(PARTS):
        part = gl.load(part_ptr + i * count + at, mask=inside, other=0.0)
        parts = parts + (part,)  # noqa: RUF005 - no unpacking in Gluon
    total = parts[0]
    for i in gl.static_range(1, PARTS):
        total += parts[i]
    scale = gl.load(scale_ptr + at % outputs, mask=inside, other=0.0).to(gl.float32)
    gl.store(y_ptr + at, (total * scale).to(y_ptr.dtype.element_ty), mask=inside)


@functools.cache
def _layout(rows: int, columns: int, dtype: gl.dtype) -> gl.NVMMASharedLayout:
    """Of tiles of a matrix. Asked once: an answer takes longer than a launch."""
    return gl.NVMMASharedLayout.get_default_for([rows, columns], dtype)


def _for_tma(x: torch.Tensor) -> torch.Tensor:
    """The matrix, or a copy where TMA cannot read it: rows begin at multiples of 16 bytes."""
    width = 16 // x.element_size()
    if x.data_ptr() % 16 or x.stride(0) % width:
        copy = torch.empty(
            (x.shape[0], triton.cdiv(x.shape[1], width) * width), dtype=x.dtype, device=x.device
        )[:, : x.shape[1]]
        return copy.copy_(x)
    return x


def _int8_linear_gluon_hopper(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The product of x [M, K], bf16 or fp16, and weight [N, K] int8, for up to 64 tokens."""
    if torch.cuda.get_device_capability(x.device)[0] != 9:
        raise RuntimeError("wgmma is Hopper's alone: use another kernel on this GPU")
    tokens, summed = x.shape
    outputs = weight.shape[0]
    y = torch.empty((tokens, outputs), dtype=x.dtype, device=x.device)
    rows = max(triton.next_power_of_2(tokens), 16)
    groups = GROUPS_FEW if rows == 16 else GROUPS_MANY
    processors = torch.cuda.get_device_properties(x.device).multi_processor_count
    columns, tiles = triton.cdiv(outputs, 64 * groups), triton.cdiv(summed, 128)
    wanted = min(max(processors // columns, 1), tiles, 16)
    tiles_of_part = triton.cdiv(tiles, wanted)
    parts = triton.cdiv(tiles, tiles_of_part)
    to = y
    if parts > 1:
        to = torch.empty((parts, tokens, outputs), dtype=torch.float32, device=x.device)

    def described(matrix, rows, dtype):
        layout = _layout(rows, 128, dtype)
        return TensorDescriptor.from_tensor(_for_tma(matrix), [rows, 128], layout)

    _part_of_product[(columns, parts)](
        described(x, rows, gl.bfloat16 if x.dtype == torch.bfloat16 else gl.float16),
        described(weight, 64 * groups, gl.int8),
        to,
        scale,
        tiles,
        tiles_of_part,
        tokens,
        outputs,
        TOKENS=rows,
        GROUPS=groups,
        STAGES=RING_KIB * 1024 // (128 * (64 * groups + 2 * rows)),
        WHOLE=parts == 1,
        num_warps=4,
    )
    if parts > 1:
        count = tokens * outputs
        _scaled_sum[(triton.cdiv(count, 256),)](
            to, scale, y, count, outputs, PARTS=parts, BLOCK=256, num_warps=4
        )
    return y


def int8_linear(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    if x.shape[0] <= M_SPLIT:
        return _int8_linear_split(x, weight, scale)
    return _int8_linear_gluon_hopper(x, weight, scale)
