"""Gradients of attention for Hopper in Gluon: one sweep of five products, dq added up in memory.

A block has a tile of 128 keys and walks over the queries that see them, of all heads that read
them. A producer warp copies by TMA; two consumer groups own 64 keys each, and keep their dk and dv
in registers. Scores are transposed ([keys, queries]), so that probabilities, and what dq and dk are
made of, are left operands of products as they are. For dq the groups exchange the latter through
shared memory. Each multiplies for one half of the head dimension, and adds the result to a sum in
memory, in float32. Numbers lie there in the order of a thread's registers, four side by side.

Two short kernels fill and read that memory: the log-sum-exp in base 2, the sums of grad · o and
zeros for dq before; dq scaled and rounded after. Sums in memory come in any order: dq differs in
its last bits from run to run.

A group computes while a product of its own runs: probabilities while that of values and grad does,
what dq is made of while dv's does, and it adds to dq while dk's does. No product runs when a round
ends: that makes ptxas serialise all of them (C7512). D is 64 or 128, Hopper only (wgmma); other
GPUs need triton_two_sweeps.py.
"""

import math

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

STAGES = 2  # tiles of queries and of gradients in flight, a power of two
ROWS_AT_ONCE = 32  # of the kernels before and after
TUNE = {"STAGES": [2, 4], "ROWS_AT_ONCE": [16, 32, 64]}

GROUP = gl.constexpr(64)  # keys of a consumer: the rows of one wgmma
QUERIES = gl.constexpr(64)  # of a tile: 128 do not fit the registers, at D = 64 neither
GROUPS = gl.constexpr(2)
LOG2_E = gl.constexpr(1.4426950408889634)


# -- before and after ------------------------------------------------------------------------------


@gluon.jit
def _in_order_of_registers(x):
    """Put those of each 16 columns side by side that a thread has of a wgmma's result."""
    ROWS: gl.constexpr = x.shape[0]
    COLUMNS: gl.constexpr = x.shape[1]
    x = x.reshape([ROWS, COLUMNS // 16, 2, 4, 2]).permute([0, 1, 3, 2, 4])
    return x.reshape([ROWS, COLUMNS])


@gluon.constexpr_function
def _layout_of_sums(rows, columns):
    """Layout of a wgmma's result in that order: four columns of a thread are neighbours."""
    registers = [[0, 1], [0, 2], [8, 0]] + [[0, n] for n in (16, 32) if n < columns]
    lanes = [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0]], [], [rows, columns])


@gluon.jit
def _in_order_of_columns(x):
    """Undo that."""
    ROWS: gl.constexpr = x.shape[0]
    COLUMNS: gl.constexpr = x.shape[1]
    x = x.reshape([ROWS, COLUMNS // 16, 4, 2, 2]).permute([0, 1, 3, 2, 4])
    return x.reshape([ROWS, COLUMNS])


@gluon.jit(do_not_specialize=["seq", "padded", "heads"])
def _prepare(
    grad_ptr, o_ptr, lse_ptr, of_row_ptr, dq_sum_ptr, seq, padded, heads,
    stride_gb, stride_gh, stride_gs, stride_ob, stride_oh, stride_os, stride_lb, stride_lh,
    ROWS: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    """Of each query the log-sum-exp in base 2 and the sum of grad · o; zeros for dq. Of queries
    past the end, which fill the last tile, all are 0.
    """
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    row = gl.program_id(0) * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    dim = gl.arange(0, D, layout=gl.SliceLayout(0, layout))
    at = gl.program_id(1)
    batch = (at // heads).to(gl.int64)
    head = (at % heads).to(gl.int64)
    wide = row.to(gl.int64)
    inside = row < seq
    grad_row = wide * stride_gs + batch * stride_gb + head * stride_gh
    o_row = wide * stride_os + batch * stride_ob + head * stride_oh
    grad = gl.load(grad_ptr + grad_row[:, None] + dim[None, :], mask=inside[:, None], other=0.0)
    o = gl.load(o_ptr + o_row[:, None] + dim[None, :], mask=inside[:, None], other=0.0)
    lse = gl.load(lse_ptr + batch * stride_lb + head * stride_lh + row, mask=inside, other=0.0)
    delta = gl.sum(grad.to(gl.float32) * o.to(gl.float32), 1)
    of_row = of_row_ptr + at.to(gl.int64) * (2 * padded) + row
    gl.store(of_row, lse * LOG2_E)
    gl.store(of_row + padded, delta)
    to: gl.constexpr = gl.BlockedLayout([1, 4], [128 // D, D // 4], [4, 1], [1, 0])
    row = gl.program_id(0) * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, to))
    dim = gl.arange(0, D, layout=gl.SliceLayout(0, to))
    dq_row = (at.to(gl.int64) * padded + row) * D
    zeros = gl.zeros([ROWS, D], gl.float32, layout=to)
    gl.store(dq_sum_ptr + dq_row[:, None] + dim[None, :], zeros)


@gluon.jit(do_not_specialize=["seq", "padded"])
def _finish(dq_sum_ptr, dq_ptr, seq, padded, scale, ROWS: gl.constexpr, D: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [128 // D, D // 4], [4, 1], [1, 0])
    row = gl.program_id(0) * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    dim = gl.arange(0, D, layout=gl.SliceLayout(0, layout))
    head = gl.program_id(1).to(gl.int64)
    of_row = (head * padded + row) * D
    dq = gl.load(dq_sum_ptr + of_row[:, None] + dim[None, :])
    to: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    dq = gl.convert_layout(_in_order_of_columns(dq * scale).to(dq_ptr.dtype.element_ty), to)
    row = gl.program_id(0) * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, to))
    dim = gl.arange(0, D, layout=gl.SliceLayout(0, to))
    of_row = (head * seq + row) * D
    gl.store(dq_ptr + of_row[:, None] + dim[None, :], dq, mask=(row < seq)[:, None])


# -- the sweep -------------------------------------------------------------------------------------


@gluon.jit
def _queries(padded, CAUSAL: gl.constexpr):
    """First of the queries of a head that see the block's keys; how many they are, with those that
    fill the last tile; and the one to begin with, counted from the first. Blocks begin at different
    ones, so that they add to different places of dq.
    """
    first = gl.program_id(0) * GROUP * GROUPS
    begin = first if CAUSAL else 0
    start = 0 if CAUSAL else first
    return begin, padded - begin, start


@gluon.jit
def _produce(arguments, D: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr):
    (q_desc, grad_desc, k_desc, v_desc, of_row_desc, q_s, grad_s, lse_s, delta_s, k_s, v_s, own,
     full, empty, heads, group, padded) = arguments  # fmt: skip
    HALF: gl.constexpr = D // 2
    first = gl.program_id(0) * GROUP * GROUPS
    key_heads = heads // group
    batch = gl.program_id(1) // key_heads
    key_head = gl.program_id(1) % key_heads
    own_bytes: gl.constexpr = (k_desc.block_type.nbytes + v_desc.block_type.nbytes) * 2 * GROUPS
    mbarrier.expect(own.index(0), own_bytes)
    for w in gl.static_range(GROUPS):
        for half in gl.static_range(2):
            at = [batch, key_head, first + w * GROUP, half * HALF]
            tma.async_copy_global_to_shared(k_desc, at, own.index(0), k_s.index(2 * w + half))
            tma.async_copy_global_to_shared(v_desc, at, own.index(0), v_s.index(2 * w + half))
    begin, seen, start = _queries(padded, CAUSAL)
    in_stage: gl.constexpr = 2 * (
        q_desc.block_type.nbytes + grad_desc.block_type.nbytes + of_row_desc.block_type.nbytes
    )
    member = 0
    for n in range(seen // QUERIES * group):
        stage = n & (STAGES - 1)
        ready = full.index(stage)
        head = key_head * group + member
        row = (batch * heads + head) * 2
        # The first round waits for the phase before the first one, which counts as ended.
        mbarrier.wait(empty.index(stage), (n // STAGES & 1) ^ 1)
        mbarrier.expect(ready, in_stage)
        for half in gl.static_range(2):
            at = [batch, head, begin + start, half * HALF]
            to = 2 * stage + half
            tma.async_copy_global_to_shared(q_desc, at, ready, q_s.index(to))
            tma.async_copy_global_to_shared(grad_desc, at, ready, grad_s.index(to))
        tma.async_copy_global_to_shared(
            of_row_desc, [row, begin + start], ready, lse_s.index(stage)
        )
        tma.async_copy_global_to_shared(
            of_row_desc, [row + 1, begin + start], ready, delta_s.index(stage)
        )
        start += QUERIES
        ends = start >= seen
        member = gl.where(ends, member + 1, member)
        member = gl.where(member == group, 0, member)
        start = gl.where(ends, 0, start)


@gluon.jit
def _causal(p, ahead, layout: gl.constexpr):
    """Zeros for queries that do not see a key. `ahead` is the first query less the first key.

    A thread's columns are 8 numbers apart. Of these the compiler makes constants, where it would
    keep a register for each column of the matrix itself.
    """
    p = p.reshape([GROUP, QUERIES // 8, 4, 2])
    of_p: gl.constexpr = p.type.layout
    of_three: gl.constexpr = gl.SliceLayout(3, of_p)
    of_two: gl.constexpr = gl.SliceLayout(2, of_three)
    key = gl.arange(0, GROUP, layout=gl.SliceLayout(1, of_two))
    eight = gl.arange(0, QUERIES // 8, layout=gl.SliceLayout(0, of_two))
    pair = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, of_three)))
    one = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, of_p))))
    ahead = ahead + (2 * pair[None, None, :] - key[:, None, None])
    ahead = (ahead + 8 * eight[None, :, None])[:, :, :, None] + one[None, None, None, :]
    return gl.convert_layout(gl.where(ahead >= 0, p, 0.0).reshape([GROUP, QUERIES]), layout)


@gluon.jit
def _consume(
    arguments,
    D: gl.constexpr,
    STAGES: gl.constexpr,
    CAUSAL: gl.constexpr,
    W: gl.constexpr,
):
    """Compute dk and dv of the W-th 64 keys of the tile, and the W-th half of what dq gets."""
    (dk_desc, dv_desc, dq_sum_ptr, q_s, grad_s, lse_s, delta_s, k_s, v_s, slope_s, own, full, empty,
     exchanged, seq, heads, group, padded) = arguments  # fmt: skip
    HALF: gl.constexpr = D // 2
    SCALE: gl.constexpr = D**-0.5
    of_scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, QUERIES, 16])
    of_output: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    of_left: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=of_output, k_width=2)
    dtype: gl.constexpr = k_s.dtype
    first = gl.program_id(0) * GROUP * GROUPS
    key_heads = heads // group
    batch = gl.program_id(1) // key_heads
    key_head = gl.program_id(1) % key_heads
    col = first + W * GROUP + gl.arange(0, GROUP, layout=gl.SliceLayout(1, of_scores))
    no_scores = gl.zeros([GROUP, QUERIES], gl.float32, layout=of_scores)
    no_dq = gl.zeros([QUERIES, HALF], gl.float32, layout=of_output)
    dk_a = gl.zeros([GROUP, HALF], gl.float32, layout=of_output)
    dk_b = gl.zeros([GROUP, HALF], gl.float32, layout=of_output)
    dv_a = gl.zeros([GROUP, HALF], gl.float32, layout=of_output)
    dv_b = gl.zeros([GROUP, HALF], gl.float32, layout=of_output)
    k_a = k_s.index(2 * W).reshape([GROUP, HALF])
    k_b = k_s.index(2 * W + 1).reshape([GROUP, HALF])
    v_a = v_s.index(2 * W).reshape([GROUP, HALF])
    v_b = v_s.index(2 * W + 1).reshape([GROUP, HALF])
    keys_0 = k_s.index(W).reshape([GROUP, HALF])
    keys_1 = k_s.index(2 + W).reshape([GROUP, HALF])
    of_sum: gl.constexpr = _layout_of_sums(QUERIES, HALF)
    place = gl.arange(0, QUERIES, layout=gl.SliceLayout(1, of_sum))[:, None] * D
    place += gl.arange(0, HALF, layout=gl.SliceLayout(0, of_sum))[None, :]
    dq_at = dq_sum_ptr + (batch * heads + key_head * group).to(gl.int64) * padded * D + W * HALF
    begin, seen, start = _queries(padded, CAUSAL)
    dq_at = dq_at + begin * D + place
    row = start  # of the group's dq, from there
    mbarrier.wait(own.index(0), 0)
    for n in range(seen // QUERIES * group):
        stage = n & (STAGES - 1)
        q_a = q_s.index(2 * stage).reshape([QUERIES, HALF])
        q_b = q_s.index(2 * stage + 1).reshape([QUERIES, HALF])
        grad_a = grad_s.index(2 * stage).reshape([QUERIES, HALF])
        grad_b = grad_s.index(2 * stage + 1).reshape([QUERIES, HALF])
        mbarrier.wait(full.index(stage), n // STAGES & 1)
        scores = warpgroup_mma(k_a, q_a.permute((1, 0)), no_scores, use_acc=False, is_async=True)
        scores = warpgroup_mma(k_b, q_b.permute((1, 0)), scores, is_async=True)
        slope = warpgroup_mma(v_a, grad_a.permute((1, 0)), no_scores, use_acc=False, is_async=True)
        slope = warpgroup_mma(v_b, grad_b.permute((1, 0)), slope, is_async=True)
        scores = warpgroup_mma_wait(2, deps=[scores])
        p = gl.exp2(scores * (SCALE * LOG2_E) - lse_s.index(stage).load(of_scores))
        # Keys past the end have rows of zeros, and yet the exponential may be infinite.
        if CAUSAL:
            if start < (W + 1) * GROUP:
                p = _causal(p, start - W * GROUP, of_scores)
        elif first + GROUP * GROUPS > seq:
            p = gl.where((col < seq)[:, None], p, 0.0)
        probabilities = gl.convert_layout(p.to(dtype), of_left)
        dv_a = warpgroup_mma(probabilities, grad_a, dv_a, is_async=True)
        dv_b = warpgroup_mma(probabilities, grad_b, dv_b, is_async=True)
        slope = warpgroup_mma_wait(2, deps=[slope])
        slope = (p * (slope - delta_s.index(stage).load(of_scores))).to(dtype)

        # The other group reads the last but one of these before it arrives for the last one.
        exchange = n & 1
        slope_s.index(GROUPS * exchange + W).store(slope)
        fence_async_shared()  # wgmma sees ordinary stores only behind this
        mbarrier.arrive(exchanged.index(exchange), count=1)
        mbarrier.wait(exchanged.index(exchange), n // 2 & 1)
        slope_0 = slope_s.index(GROUPS * exchange).permute((1, 0))
        slope_1 = slope_s.index(GROUPS * exchange + 1).permute((1, 0))
        dq = warpgroup_mma(slope_0, keys_0, no_dq, use_acc=False, is_async=True)
        dq = warpgroup_mma(slope_1, keys_1, dq, is_async=True)
        left = gl.convert_layout(slope, of_left)
        dk_a = warpgroup_mma(left, q_a, dk_a, is_async=True)
        dk_b = warpgroup_mma(left, q_b, dk_b, is_async=True)
        dq, dv_a, dv_b, probabilities = warpgroup_mma_wait(2, deps=[dq, dv_a, dv_b, probabilities])
        ordered = gl.convert_layout(_in_order_of_registers(dq), of_sum)
        gl.atomic_add(dq_at + row * D, ordered, sem="relaxed")
        dk_a, dk_b, left = warpgroup_mma_wait(0, deps=[dk_a, dk_b, left])
        mbarrier.arrive(empty.index(stage), count=1)
        start += QUERIES
        row += QUERIES
        if CAUSAL:
            row = gl.where(start == seen, row + begin, row)  # the next member's first one
            start = gl.where(start == seen, 0, start)
        else:
            row = gl.where(row == seen * group, 0, row)
    # The group's own values are read by nobody now. The keys are by the other group, until it, too,
    # has done its last round: it gets there after its last arrival.
    v_a.store(dv_a.to(dtype))
    v_b.store(dv_b.to(dtype))
    fence_async_shared()
    for half in gl.static_range(2):
        at = [0, gl.program_id(1), gl.program_id(0) * GROUP * GROUPS + W * GROUP, half * HALF]
        tma.async_copy_shared_to_global(dv_desc, at, v_s.index(2 * W + half))
    tma.store_wait(0)
    v_a.store((dk_a * SCALE).to(dtype))
    v_b.store((dk_b * SCALE).to(dtype))
    fence_async_shared()
    for half in gl.static_range(2):
        at = [0, gl.program_id(1), gl.program_id(0) * GROUP * GROUPS + W * GROUP, half * HALF]
        tma.async_copy_shared_to_global(dk_desc, at, v_s.index(2 * W + half))
    tma.store_wait(0)


# One binary for all lengths and head counts; whether they are 1 or multiples of 16 changes nothing.
@gluon.jit(do_not_specialize=["seq", "heads", "group", "padded"])
def _sweep(
    q_desc, grad_desc, k_desc, v_desc, dk_desc, dv_desc, of_row_desc, dq_sum_ptr, seq, heads, group,
    padded,
    D: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """Give the roles to warps."""
    dtype: gl.constexpr = q_desc.dtype
    HALF: gl.constexpr = D // 2
    k_s = gl.allocate_shared_memory(dtype, [2 * GROUPS, 1, 1, GROUP, HALF], k_desc.layout)
    v_s = gl.allocate_shared_memory(dtype, [2 * GROUPS, 1, 1, GROUP, HALF], v_desc.layout)
    q_s = gl.allocate_shared_memory(dtype, [2 * STAGES, 1, 1, QUERIES, HALF], q_desc.layout)
    grad_s = gl.allocate_shared_memory(dtype, [2 * STAGES, 1, 1, QUERIES, HALF], grad_desc.layout)
    lse_s = gl.allocate_shared_memory(gl.float32, [STAGES, 1, QUERIES], of_row_desc.layout)
    delta_s = gl.allocate_shared_memory(gl.float32, [STAGES, 1, QUERIES], of_row_desc.layout)
    of_slope: gl.constexpr = gl.NVMMASharedLayout.get_default_for([GROUP, QUERIES], dtype)
    slope_s = gl.allocate_shared_memory(dtype, [2 * GROUPS, GROUP, QUERIES], of_slope)
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    own = gl.allocate_shared_memory(gl.int64, [1, 1], barrier)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    exchanged = gl.allocate_shared_memory(gl.int64, [2, 1], barrier)
    mbarrier.init(own.index(0), count=1)
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(empty.index(s), count=GROUPS)
    for s in gl.static_range(2):
        mbarrier.init(exchanged.index(s), count=GROUPS)
    fence_async_shared()  # TMA sees the barriers
    consumed = (
        dk_desc, dv_desc, dq_sum_ptr, q_s, grad_s, lse_s, delta_s, k_s, v_s, slope_s, own, full,
        empty, exchanged, seq, heads, group, padded,
    )  # fmt: skip
    produced = (
        q_desc, grad_desc, k_desc, v_desc, of_row_desc, q_s, grad_s, lse_s, delta_s, k_s, v_s, own,
        full, empty, heads, group, padded,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (_consume, (consumed, D, STAGES, CAUSAL, 0)),
            (_consume, (consumed, D, STAGES, CAUSAL, 1)),
            (_produce, (produced, D, STAGES, CAUSAL)),
        ],
        [4, 1],
        [240, 24],
    )


def _for_tma(x: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy where TMA cannot read it: it wants multiples of 16 bytes."""
    bytes_ = [stride * x.element_size() for stride in x.stride()[:-1]]
    if x.data_ptr() % 16 or any(n % 16 for n in bytes_) or x.stride(-1) != 1:
        return x.clone(memory_format=torch.contiguous_format)
    return x


def attention_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q: [B, H, S, D], k and v: [B, Hkv, S, D], bf16 or fp16, D = 64 or 128.

    grad and o are like q, lse is [B, H, S] float32. Inputs whose rows do not begin at multiples of
    16 bytes are copied first; the last dimension of o must be contiguous.
    """
    if torch.cuda.get_device_capability(q.device)[0] != 9:
        raise RuntimeError("wgmma is Hopper's alone: use another kernel on this GPU")
    b, h, s, d = q.shape
    hkv = k.shape[1]
    dq = torch.empty(b, h, s, d, dtype=q.dtype, device=q.device)
    dk = torch.empty(b, hkv, s, d, dtype=q.dtype, device=q.device)
    dv = torch.empty(b, hkv, s, d, dtype=q.dtype, device=q.device)
    dtype = gl.bfloat16 if q.dtype == torch.bfloat16 else gl.float16
    grad, q, k, v = (_for_tma(x) for x in (grad, q, k, v))
    padded = triton.cdiv(s, 64) * 64
    of_row = torch.empty(b * h * 2, padded, dtype=torch.float32, device=q.device)
    dq_sum = torch.empty(b * h, padded, d, dtype=torch.float32, device=q.device)

    def described(x):
        block = [1, 1, 64, d // 2]
        layout = gl.NVMMASharedLayout.get_default_for(block, dtype)
        return TensorDescriptor.from_tensor(x, block, layout)

    block = [1, 64]
    layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    of_row_desc = TensorDescriptor.from_tensor(of_row, block, layout)
    scale = 1 / math.sqrt(d)
    fills = (padded // ROWS_AT_ONCE, b * h)
    _prepare[fills](
        grad,
        o,
        lse,
        of_row,
        dq_sum,
        s,
        padded,
        h,
        *grad.stride()[:3],
        *o.stride()[:3],
        *lse.stride()[:2],
        ROWS=ROWS_AT_ONCE,
        D=d,
        num_warps=4,
    )
    _sweep[(triton.cdiv(s, 128), b * hkv)](
        *(described(x) for x in (q, grad, k, v)),
        *(described(x.view(1, b * hkv, s, d)) for x in (dk, dv)),
        of_row_desc,
        dq_sum,
        s,
        h,
        h // hkv,
        padded,
        D=d,
        STAGES=STAGES,
        CAUSAL=causal,
        num_warps=4,
    )
    _finish[fills](dq_sum, dq, s, padded, scale, ROWS=ROWS_AT_ONCE, D=d, num_warps=4)
    return dq, dk, dv
