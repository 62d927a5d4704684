"""Linear layer of 8-bit floating-point numbers for Hopper, in Gluon: persistent, by roles of warps.

A producer warp keeps a ring of tiles of both operands full by TMA; mbarriers say which stage is
full and which is free. Two consumer groups multiply 64 tokens each by wgmma from shared memory.
Hopper's tensor cores keep fewer digits of sums than float32 has: each 128 products are added up in
registers, by one group while the other multiplies. Of a tile of 256 outputs they do one half after
the other, so that partial sums need half as many registers. Such a tile is better than one of 128,
whose operands come from the L2 cache at 64 bytes per clock and SM, more than it gives; those of 256
at 48. The producer is in the next tile of the result while one is stored.

Where tiles are so few that half of the SMs or more would have none, and sums are long, sums are
split into parts, too. Float32 sums of all parts are one wide matrix, one part beside the other. A
second kernel, which is launched only then, adds them up in a fixed order, with the scales.

Pays from about a hundred tokens; fewer are bound by reading the weight once, see triton_tiles.py.
Hopper only; other GPUs need triton_tiles.py, too.
"""

import functools

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

OUTPUTS = 256  # of a tile: 128 sums and 64 partial ones a thread; 128 where tiles would be few
STAGES = 4  # of the ring, 48 KiB each
BAND = 8  # rows of tiles that are taken together: their operands are found in the L2 cache
TUNE = {"OUTPUTS": [128, 256], "STAGES": [3, 4], "BAND": [4, 8, 16]}

STEPS_LEAST = 8  # of a part, 128 products each: adding up parts takes as long as some steps
PARTS_MOST = 8

GROUP = gl.constexpr(64)  # tokens of a consumer: the rows of one wgmma
GROUPS = gl.constexpr(2)
AT_ONCE = gl.constexpr(128)  # outputs of one wgmma
SUMMED = gl.constexpr(128)  # of the summed dimension at a time: the width of a swizzle


@gluon.jit
def _tile(i, rows, columns, BAND: gl.constexpr):
    """Row and column of the i-th tile."""
    band = i // (BAND * columns)
    size = gl.minimum(rows - band * BAND, BAND)
    place = i % (BAND * columns)
    return band * BAND + place % size, place // size


@gluon.jit
def _begin_and_end(column, columns_of_part, summed_of_part, summed, SPLIT: gl.constexpr):
    """Of what is summed in a tile of this column. The columns of a part follow those of another."""
    begin, end = 0, summed
    if SPLIT:
        begin = column // columns_of_part * summed_of_part
        end = gl.minimum(begin + summed_of_part, summed)
    return begin, end


@gluon.jit
def _fetch(
    arguments,
    OUTPUTS: gl.constexpr,
    STAGES: gl.constexpr,
    BAND: gl.constexpr,
    SPLIT: gl.constexpr,
):
    (x_desc, weight_desc, x_s, weight_s, full, empty,
     rows, columns, columns_of_part, summed_of_part, summed) = arguments  # fmt: skip
    n = 0  # steps so far, of all tiles: the barriers count on
    for i in range(gl.program_id(0), rows * columns, gl.num_programs(0)):
        row, column = _tile(i, rows, columns, BAND)
        begin, end = _begin_and_end(column, columns_of_part, summed_of_part, summed, SPLIT)
        if SPLIT:
            column %= columns_of_part
        for at in range(begin, end, SUMMED):
            stage = n % STAGES
            # The first round waits for the phase before the first one, which counts as ended.
            mbarrier.wait(empty.index(stage), ((n // STAGES) & 1) ^ 1)
            mbarrier.expect(
                full.index(stage), x_desc.block_type.nbytes + weight_desc.block_type.nbytes
            )
            tma.async_copy_global_to_shared(
                x_desc, [row * GROUP * GROUPS, at], full.index(stage), x_s.index(stage)
            )
            tma.async_copy_global_to_shared(
                weight_desc, [column * OUTPUTS, at], full.index(stage), weight_s.index(stage)
            )
            n += 1


@gluon.jit
def _multiply(
    arguments,
    OUTPUTS: gl.constexpr,
    STAGES: gl.constexpr,
    BAND: gl.constexpr,
    BY_TMA: gl.constexpr,
    SPLIT: gl.constexpr,
    W: gl.constexpr,
):
    """The W-th 64 tokens of each tile."""
    (y_desc, y_ptr, scale_x_ptr, scale_weight_ptr, x_s, weight_s, y_s, full, empty,
     rows, columns, columns_of_part, summed_of_part, summed,
     tokens, outputs) = arguments  # fmt: skip
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, AT_ONCE, 32])
    none = gl.zeros([GROUP, AT_ONCE], gl.float32, layout=layout)
    scale = gl.load(scale_x_ptr) * gl.load(scale_weight_ptr)
    n = 0  # steps so far, as in the producer
    for i in range(gl.program_id(0), rows * columns, gl.num_programs(0)):
        row, column = _tile(i, rows, columns, BAND)
        first = row * GROUP * GROUPS + W * GROUP
        left = gl.zeros([GROUP, AT_ONCE], gl.float32, layout=layout)
        right = gl.zeros([GROUP, AT_ONCE], gl.float32, layout=layout)
        begin, end = _begin_and_end(column, columns_of_part, summed_of_part, summed, SPLIT)
        for _ in range(begin, end, SUMMED):
            stage = n % STAGES
            mbarrier.wait(full.index(stage), (n // STAGES) & 1)
            x = x_s.index(stage).slice(GROUP * W, GROUP, dim=0)
            weight = weight_s.index(stage).slice(0, AT_ONCE, dim=0).permute((1, 0))
            part = warpgroup_mma(x, weight, none, use_acc=False, is_async=True)
            part = warpgroup_mma_wait(0, deps=[part])
            if AT_ONCE == OUTPUTS:
                mbarrier.arrive(empty.index(stage), count=1)
            left += part
            if AT_ONCE < OUTPUTS:
                weight = weight_s.index(stage).slice(AT_ONCE, AT_ONCE, dim=0).permute((1, 0))
                part = warpgroup_mma(x, weight, none, use_acc=False, is_async=True)
                part = warpgroup_mma_wait(0, deps=[part])
                mbarrier.arrive(empty.index(stage), count=1)
                right += part
            n += 1
        for half in gl.static_range(OUTPUTS // AT_ONCE):
            y = right if half else left
            if not SPLIT:
                y = (y * scale).to(gl.bfloat16)
            at = column * OUTPUTS + half * AT_ONCE
            if BY_TMA:
                tma.store_wait(0)  # the last result has left the buffer
                y_s.index(W).store(y)
                fence_async_shared()  # TMA sees ordinary stores only behind this
                tma.async_copy_shared_to_global(y_desc, [first, at], y_s.index(W))
            else:
                token = first + gl.arange(0, GROUP, layout=gl.SliceLayout(1, layout))[:, None]
                output = at + gl.arange(0, AT_ONCE, layout=gl.SliceLayout(0, layout))[None, :]
                # In 64 bits: results may have more than 2^31 elements.
                place = y_ptr + token.to(gl.int64) * outputs + output
                gl.store(place, y, mask=(token < tokens) & (output < outputs))
    if BY_TMA:
        tma.store_wait(0)


# One binary for all numbers of tokens.
@gluon.jit(
    do_not_specialize=[
        "rows", "columns", "columns_of_part", "summed_of_part", "summed", "tokens", "outputs",
    ]
)  # fmt: skip
def _scaled_product(
    x_desc, weight_desc, y_desc, y_ptr, scale_x_ptr, scale_weight_ptr,
    rows, columns, columns_of_part, summed_of_part, summed, tokens, outputs,
    OUTPUTS: gl.constexpr, STAGES: gl.constexpr, BAND: gl.constexpr, BY_TMA: gl.constexpr,
    SPLIT: gl.constexpr,
):  # fmt: skip
    """Give the roles to warps."""
    dtype: gl.constexpr = x_desc.dtype
    x_s = gl.allocate_shared_memory(dtype, [STAGES, GROUP * GROUPS, SUMMED], x_desc.layout)
    weight_s = gl.allocate_shared_memory(dtype, [STAGES, OUTPUTS, SUMMED], weight_desc.layout)
    y_s = gl.allocate_shared_memory(y_desc.dtype, [GROUPS, GROUP, AT_ONCE], y_desc.layout)
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(empty.index(s), count=GROUPS)
    fence_async_shared()  # TMA sees the barriers

    multiplied = (
        y_desc, y_ptr, scale_x_ptr, scale_weight_ptr, x_s, weight_s, y_s, full, empty,
        rows, columns, columns_of_part, summed_of_part, summed, tokens, outputs,
    )  # fmt: skip
    fetched = (
        x_desc, weight_desc, x_s, weight_s, full, empty,
        rows, columns, columns_of_part, summed_of_part, summed,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (_multiply, (multiplied, OUTPUTS, STAGES, BAND, BY_TMA, SPLIT, 0)),
            (_multiply, (multiplied, OUTPUTS, STAGES, BAND, BY_TMA, SPLIT, 1)),
            (_fetch, (fetched, OUTPUTS, STAGES, BAND, SPLIT)),
        ],
        [4, 1],
        [232, 40],
    )


@gluon.jit(do_not_specialize=["tokens"])
def _scaled_sum(
    part_ptr, y_ptr, scale_x_ptr, scale_weight_ptr, outputs, width, tokens, PARTS: gl.constexpr
):
    """Add up parts, which are all on their way at once. They are as wide as whole tiles: only what
    is stored has an end. A thread has 16 bytes of each part.
    """
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0])
    token = gl.program_id(0) * 4 + gl.arange(0, 4, layout=gl.SliceLayout(1, layout))[:, None]
    output = gl.program_id(1) * 128 + gl.arange(0, 128, layout=gl.SliceLayout(0, layout))[None, :]
    part_at = part_ptr + token * (PARTS * width) + output
    parts = ()
    for i in gl.static_range(PARTS):
        part = gl.load(part_at + i * width, mask=token < tokens, other=0.0)
        parts = parts + (part,)  # noqa: RUF005 - no unpacking in Gluon
    total = parts[0]
    for i in gl.static_range(1, PARTS):
        total += parts[i]
    y = (total * (gl.load(scale_x_ptr) * gl.load(scale_weight_ptr))).to(gl.bfloat16)
    gl.store(y_ptr + token * outputs + output, y, mask=(token < tokens) & (output < outputs))


@functools.cache
def _layout(rows: int, columns: int, dtype: gl.dtype) -> gl.NVMMASharedLayout:
    """Of tiles of a matrix. Asked once: an answer takes longer than a launch."""
    return gl.NVMMASharedLayout.get_default_for([rows, columns], dtype)


def _for_tma(x: torch.Tensor) -> torch.Tensor:
    """The matrix, or a copy where TMA cannot read it: it wants a base that is a multiple of 16."""
    return x.clone() if x.data_ptr() % 16 else x


def fp8_linear(
    x: torch.Tensor, weight: torch.Tensor, scale_x: torch.Tensor, scale_weight: torch.Tensor
) -> torch.Tensor:
    """The product of x [M, K] and weight [N, K] in float8_e4m3fn; K is a multiple of 16."""
    if torch.cuda.get_device_capability(x.device)[0] != 9:
        raise RuntimeError("wgmma is Hopper's alone: use another kernel on this GPU")
    tokens, summed = x.shape
    outputs = weight.shape[0]
    y = torch.empty((tokens, outputs), dtype=torch.bfloat16, device=x.device)

    def described(matrix, block, dtype):
        return TensorDescriptor.from_tensor(matrix, block, _layout(*block, dtype))

    processors = torch.cuda.get_device_properties(x.device).multi_processor_count
    rows, wide = triton.cdiv(tokens, 128), OUTPUTS
    if rows * triton.cdiv(outputs, wide) < processors:
        wide = 128
    columns = triton.cdiv(outputs, wide)
    steps = triton.cdiv(summed, 128)
    wanted = min(processors // (rows * columns), steps // STEPS_LEAST, PARTS_MOST)
    steps_of_part = triton.cdiv(steps, max(wanted, 1))
    parts = triton.cdiv(steps, steps_of_part)  # none is empty
    split = parts > 1
    # Rows that TMA stores begin at multiples of 16 bytes: those of parts are as wide as tiles.
    by_tma = split or outputs % 8 == 0
    to = y
    if split:
        to = torch.empty((tokens, parts * columns * wide), dtype=torch.float32, device=x.device)
    elif not by_tma:
        to = y.new_empty((64, 128))  # not stored to
    _scaled_product[(min(rows * columns * parts, processors),)](
        described(_for_tma(x), [128, 128], gl.float8e4nv),
        described(_for_tma(weight), [wide, 128], gl.float8e4nv),
        described(to, [64, 128], gl.float32 if split else gl.bfloat16),
        y,
        scale_x,
        scale_weight,
        rows,
        columns * parts,
        columns,
        steps_of_part * 128,
        summed,
        tokens,
        outputs,
        OUTPUTS=wide,
        STAGES=STAGES,
        BAND=BAND,
        BY_TMA=by_tma,
        SPLIT=split,
        num_warps=4,
    )
    if split:
        _scaled_sum[(triton.cdiv(tokens, 4), columns)](
            to, y, scale_x, scale_weight, outputs, columns * wide, tokens, PARTS=parts, num_warps=4
        )
    return y
