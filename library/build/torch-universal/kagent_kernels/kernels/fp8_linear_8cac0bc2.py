"""triton_tiles where that is faster, gluon_hopper elsewhere."""

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

M_SPLIT = 256  # rows of x: tokens; up to here the first kernel is faster
TUNE = {
    "M_SPLIT": [256, 5792],
    "SUMMED": [64, 128],
    "OUTPUTS": [128, 256],
    "FEW_OUTPUTS": [16, 32, 64],
    "STAGES": [3, 4, 5],
    "GROUP": [4, 8, 16],
    "OUTPUTS_GLUON_HOPPER": [128, 256],
    "STAGES_GLUON_HOPPER": [3, 4],
    "BAND": [4, 8, 16],
}


# -- triton_tiles --

SUMMED = 128  # of the summed dimension at a time: a cache line of 8-bit numbers
OUTPUTS = 128  # of a tile of many tokens
MIDDLE_OUTPUTS = 64  # where tiles of OUTPUTS are too few to fill the GPU
FEW_OUTPUTS = 64  # of a tile of few tokens: narrow, so that many programs read at once
STAGES = 5  # tiles of operands in flight
GROUP = 16  # rows of tiles that are taken together


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


def _fp8_linear_tiles(
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


# -- gluon_hopper --

OUTPUTS_GLUON_HOPPER = 256  # of a tile: 128 sums and 64 partial ones a thread; 128 where tiles would be few
STAGES_GLUON_HOPPER = 4  # of the ring, 48 KiB each
BAND = 16  # rows of tiles that are taken together: their operands are found in the L2 cache

STEPS_LEAST = 8  # of a part, 128 products each: adding up parts takes as long as some steps
PARTS_MOST = 8

GROUP_GLUON_HOPPER = gl.constexpr(64)  # tokens of a consumer: the rows of one wgmma
GROUPS = gl.constexpr(2)
AT_ONCE = gl.constexpr(128)  # outputs of one wgmma
SUMMED_GLUON_HOPPER = gl.constexpr(128)  # of the summed dimension at a time: the width of a swizzle


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
        for at in range(begin, end, SUMMED_GLUON_HOPPER):
            stage = n % STAGES
            # The first round waits for the phase before the first one, which counts as ended.
            mbarrier.wait(empty.index(stage), ((n // STAGES) & 1) ^ 1)
            mbarrier.expect(
                full.index(stage), x_desc.block_type.nbytes + weight_desc.block_type.nbytes
            )
            tma.async_copy_global_to_shared(
                x_desc, [row * GROUP_GLUON_HOPPER * GROUPS, at], full.index(stage), x_s.index(stage)
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
    none = gl.zeros([GROUP_GLUON_HOPPER, AT_ONCE], gl.float32, layout=layout)
    scale = gl.load(scale_x_ptr) * gl.load(scale_weight_ptr)
    n = 0  # steps so far, as in the producer
    for i in range(gl.program_id(0), rows * columns, gl.num_programs(0)):
        row, column = _tile(i, rows, columns, BAND)
        first = row * GROUP_GLUON_HOPPER * GROUPS + W * GROUP_GLUON_HOPPER
        left = gl.zeros([GROUP_GLUON_HOPPER, AT_ONCE], gl.float32, layout=layout)
        right = gl.zeros([GROUP_GLUON_HOPPER, AT_ONCE], gl.float32, layout=layout)
        begin, end = _begin_and_end(column, columns_of_part, summed_of_part, summed, SPLIT)
        for _ in range(begin, end, SUMMED_GLUON_HOPPER):
            stage = n % STAGES
            mbarrier.wait(full.index(stage), (n // STAGES) & 1)
            x = x_s.index(stage).slice(GROUP_GLUON_HOPPER * W, GROUP_GLUON_HOPPER, dim=0)
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
                token = first + gl.arange(0, GROUP_GLUON_HOPPER, layout=gl.SliceLayout(1, layout))[:, None]
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
    x_s = gl.allocate_shared_memory(dtype, [STAGES, GROUP_GLUON_HOPPER * GROUPS, SUMMED_GLUON_HOPPER], x_desc.layout)
    weight_s = gl.allocate_shared_memory(dtype, [STAGES, OUTPUTS, SUMMED_GLUON_HOPPER], weight_desc.layout)
    y_s = gl.allocate_shared_memory(y_desc.dtype, [GROUPS, GROUP_GLUON_HOPPER, AT_ONCE], y_desc.layout)
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


def _for_tma(x: torch.Tensor) -> torch.Tensor:
    """The matrix, or a copy where TMA cannot read it: it wants a base that is a multiple of 16."""
    return x.clone() if x.data_ptr() % 16 else x


def _fp8_linear_gluon_hopper(
    x: torch.Tensor, weight: torch.Tensor, scale_x: torch.Tensor, scale_weight: torch.Tensor
) -> torch.Tensor:
    """The product of x [M, K] and weight [N, K] in float8_e4m3fn; K is a multiple of 16."""
    if torch.cuda.get_device_capability(x.device)[0] != 9:
        raise RuntimeError("wgmma is Hopper's alone: use another kernel on this GPU")
    tokens, summed = x.shape
    outputs = weight.shape[0]
    y = torch.empty((tokens, outputs), dtype=torch.bfloat16, device=x.device)

    def described(matrix, block, dtype):
        layout = gl.NVMMASharedLayout.get_default_for(block, dtype)
        return TensorDescriptor.from_tensor(matrix, block, layout)

    processors = torch.cuda.get_device_properties(x.device).multi_processor_count
    rows, wide = triton.cdiv(tokens, 128), OUTPUTS_GLUON_HOPPER
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
        STAGES=STAGES_GLUON_HOPPER,
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


def fp8_linear(x: torch.Tensor, weight: torch.Tensor, scale_x: torch.Tensor, scale_weight: torch.Tensor) -> torch.Tensor:
    if x.shape[0] <= M_SPLIT:
        return _fp8_linear_tiles(x, weight, scale_x, scale_weight)
    return _fp8_linear_gluon_hopper(x, weight, scale_x, scale_weight)
