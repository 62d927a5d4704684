"""Gradients of attention for Hopper in Gluon: one sweep of five products, dq added up in memory.

A block has a tile of 128 keys and walks over the queries that see them, of all heads that read
them. A producer warp copies by TMA; two consumer groups own 64 keys each, and keep their dk and dv
in registers. Scores are transposed ([keys, queries]), so that probabilities, and what dq and dk are
made of, are left operands of products as they are. For dq the groups exchange the latter through
shared memory. Each multiplies for one half of the head dimension, and adds the result to a sum in
memory, in float32. Numbers lie there in the order of a warp's registers: four of a thread side by
side, and those of its 32 threads, 512 bytes that an instruction adds up.

Two short kernels fill and read that memory: the log-sum-exp in base 2, the sums of grad · o and
zeros for dq before; dq scaled and rounded after. Sums in memory come in any order: dq differs in
its last bits from run to run.

At D = 128 and many queries they do so for the first and the last heads alone. For the others a
block of the sweep does it while its own keys arrive: these bytes move while the products of other
blocks run. It finishes a part of the head that is `distance` behind, and prepares a part of the one
that is `distance` ahead. Counts in memory say of a head how many blocks have prepared it, and how
many have added to its dq. torch.zeros resets them in each call, in a graph's replays, too.

Blocks wait for others there, and cannot hang, whatever the order in which a GPU starts them. A
block takes its tile by a ticket: the number of blocks that took one before. It waits only for what
blocks of heads behind its own do, so of smaller tickets: they have started, and a block that has
started stays until it ends. Of those that have not ended, the one with the smallest ticket waits
for nobody. So one goes on at any time, and the others after it.

A group computes while a product of its own runs: probabilities while that of values and grad does,
what dq is made of while dv's does. At D = 128 with a mask it adds to dq while dk's does. Otherwise
dk's product comes before that of dq, so that the group waits for the other one less, and the stage
is free earlier: faster there, slower with the mask. No product runs when a round ends: that makes
ptxas serialise all of them (C7512). D is 64 or 128, Hopper only (wgmma); other GPUs need
triton_two_sweeps.py.
"""

import functools
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

STAGES = 2  # tiles of queries and of gradients in flight, a power of two: 4 do not fit at D = 128
ROWS_AT_ONCE = 32  # of the kernels before and after
BESIDE_FROM = 2048  # queries from which on blocks of the sweep do their work at D = 128
AHEAD = 264  # blocks between one that prepares, or adds up, and one that uses that
TUNE = {
    "ROWS_AT_ONCE": [16, 32, 64],
    "BESIDE_FROM": [1024, 2048, 1 << 20],
    "AHEAD": [132, 264, 396],
}

_meet = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier  # the name before 3.7
GROUP = gl.constexpr(64)  # keys of a consumer: the rows of one wgmma
QUERIES = gl.constexpr(64)  # of a tile: 128 do not fit the registers, at D = 64 neither
GROUPS = gl.constexpr(2)
ROWS_BESIDE = gl.constexpr(64)  # that the first four warps prepare, or finish, at once
LOG2_E = gl.constexpr(1.4426950408889634)


# -- before and after ------------------------------------------------------------------------------


@gluon.jit
def _in_order_of_registers(x):
    """Order a wgmma's result so that four numbers of a thread are side by side, and those of its
    warp's threads.
    """
    ROWS: gl.constexpr = x.shape[0]
    COLUMNS: gl.constexpr = x.shape[1]
    x = x.reshape([ROWS // 16, 2, 8, COLUMNS // 16, 2, 4, 2]).permute([0, 3, 1, 2, 5, 4, 6])
    return x.reshape([ROWS, COLUMNS])


@gluon.constexpr_function
def _layout_of_sums(rows, columns):
    """Layout of a wgmma's result in that order."""
    bits = [[0, 1 << n] for n in range(columns.bit_length() - 1)]
    bits += [[1 << n, 0] for n in range(rows.bit_length() - 1)]
    registers = bits[:2] + bits[7:-2]
    return gl.DistributedLinearLayout(registers, bits[2:7], bits[-2:], [], [rows, columns])


@gluon.jit
def _in_order_of_columns(x):
    """Undo that."""
    ROWS: gl.constexpr = x.shape[0]
    COLUMNS: gl.constexpr = x.shape[1]
    x = x.reshape([ROWS // 16, COLUMNS // 16, 2, 8, 4, 2, 2]).permute([0, 2, 3, 1, 5, 4, 6])
    return x.reshape([ROWS, COLUMNS])


@gluon.jit
def _prepare_rows(prepared, at, first, ROWS: gl.constexpr, D: gl.constexpr):
    """Of each query the log-sum-exp in base 2 and the sum of grad · o; zeros for dq. Of queries
    past the end, which fill the last tile, all are 0.
    """
    (grad_ptr, o_ptr, lse_ptr, of_row_ptr, dq_sum_ptr, seq, padded, heads,
     stride_gb, stride_gh, stride_gs, stride_ob, stride_oh, stride_os, stride_lb,
     stride_lh) = prepared  # fmt: skip
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    row = first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    dim = gl.arange(0, D, layout=gl.SliceLayout(0, layout))
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
    row = first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, to))
    dim = gl.arange(0, D, layout=gl.SliceLayout(0, to))
    dq_row = (at.to(gl.int64) * padded + row) * D
    zeros = gl.zeros([ROWS, D], gl.float32, layout=to)
    gl.store(dq_sum_ptr + dq_row[:, None] + dim[None, :], zeros)


@gluon.jit
def _finish_rows(
    dq_sum_ptr, dq_ptr, seq, padded, scale, at, first, ROWS: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    """Scale and round what dq adds up to. The first-level cache may have what was there before.
    A tile of queries lies there as its two halves of the head dimension.
    """
    HALF: gl.constexpr = D // 2
    head = at.to(gl.int64)
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [128 // HALF, HALF // 4], [4, 1], [1, 0])
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))[:, None] * HALF
    dim = gl.arange(0, HALF, layout=gl.SliceLayout(0, layout))[None, :]
    to: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HALF, HALF // 8], [4, 1], [1, 0])
    to_row = first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, to))
    to_dim = gl.arange(0, HALF, layout=gl.SliceLayout(0, to))[None, :]
    tile = dq_sum_ptr + (head * padded + first // QUERIES * QUERIES) * D + first % QUERIES * HALF
    for half in gl.static_range(2):
        dq = gl.load(tile + half * QUERIES * HALF + row + dim, cache_modifier=".cg")
        dq = gl.convert_layout(_in_order_of_columns(dq * scale).to(dq_ptr.dtype.element_ty), to)
        of_row = (head * seq + to_row) * D + half * HALF
        gl.store(dq_ptr + of_row[:, None] + to_dim, dq, mask=(to_row < seq)[:, None])


@gluon.jit(do_not_specialize=["seq", "padded", "heads"])
def _prepare(
    grad_ptr, o_ptr, lse_ptr, of_row_ptr, dq_sum_ptr, seq, padded, heads,
    stride_gb, stride_gh, stride_gs, stride_ob, stride_oh, stride_os, stride_lb, stride_lh,
    ROWS: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    prepared = (
        grad_ptr, o_ptr, lse_ptr, of_row_ptr, dq_sum_ptr, seq, padded, heads,
        stride_gb, stride_gh, stride_gs, stride_ob, stride_oh, stride_os, stride_lb, stride_lh,
    )  # fmt: skip
    _prepare_rows(prepared, gl.program_id(1), gl.program_id(0) * ROWS, ROWS, D)


@gluon.jit(do_not_specialize=["seq", "padded", "first"])
def _finish(dq_sum_ptr, dq_ptr, seq, padded, first, scale, ROWS: gl.constexpr, D: gl.constexpr):
    at = first + gl.program_id(1)
    _finish_rows(dq_sum_ptr, dq_ptr, seq, padded, scale, at, gl.program_id(0) * ROWS, ROWS, D)


# -- beside the sweep ------------------------------------------------------------------------------


@gluon.jit
def _await(count_ptr):
    """Until all blocks of a head have counted."""
    while gl.atomic_add(count_ptr, 0, sem="acquire") < gl.num_programs(0):
        pass


@gluon.jit
def _beside(prepared, block, pair, dq_ptr, counts_ptr, distance, group, scale, D: gl.constexpr):
    """Finish this block's part of the head of keys that is `distance` behind, and prepare that of
    the one ahead.
    """
    dq_sum_ptr = prepared[4]
    seq = prepared[5]
    padded = prepared[6]
    total = gl.num_programs(1)
    first = block * (GROUP * GROUPS)
    end = gl.minimum(first + GROUP * GROUPS, padded)
    if pair >= distance:
        behind = pair - distance
        _await(counts_ptr + total + behind)
        for member in range(group):
            for row in range(first, end, ROWS_BESIDE):
                at = behind * group + member
                _finish_rows(dq_sum_ptr, dq_ptr, seq, padded, scale, at, row, ROWS_BESIDE, D)
    ahead = pair + distance
    if ahead < total:
        for member in range(group):
            for row in range(first, end, ROWS_BESIDE):
                _prepare_rows(prepared, ahead * group + member, row, ROWS_BESIDE, D)
        _meet()
        gl.atomic_add(counts_ptr + ahead, 1, sem="release")


# -- the sweep -------------------------------------------------------------------------------------


@gluon.jit
def _place(ticket):
    """Tile and head of keys of this block."""
    return ticket % gl.num_programs(0), ticket // gl.num_programs(0)


@gluon.jit
def _queries(block, padded, CAUSAL: gl.constexpr):
    """First of the queries of a head that see the block's keys; how many they are, with those that
    fill the last tile; and the one to begin with, counted from the first. Blocks begin at different
    ones, so that they add to different places of dq.
    """
    first = block * GROUP * GROUPS
    begin = first if CAUSAL else 0
    start = 0 if CAUSAL else first
    return begin, padded - begin, start


@gluon.jit
def _copy_own(k_desc, v_desc, batch, key_head, block, own, k_s, v_s):
    """The block's keys and values."""
    HALF: gl.constexpr = k_desc.block_type.shape[3]
    bytes_: gl.constexpr = (k_desc.block_type.nbytes + v_desc.block_type.nbytes) * 2 * GROUPS
    mbarrier.expect(own.index(0), bytes_)
    for w in gl.static_range(GROUPS):
        for half in gl.static_range(2):
            at = [batch, key_head, block * GROUP * GROUPS + w * GROUP, half * HALF]
            tma.async_copy_global_to_shared(k_desc, at, own.index(0), k_s.index(2 * w + half))
            tma.async_copy_global_to_shared(v_desc, at, own.index(0), v_s.index(2 * w + half))


@gluon.jit
def _produce(
    arguments, D: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr, BESIDE: gl.constexpr
):
    (q_desc, grad_desc, k_desc, v_desc, of_row_desc, of_row_ptr, q_s, grad_s, lse_s, delta_s, k_s,
     v_s, own, full, empty, heads, group, padded, counts_ptr, distance,
     ticket) = arguments  # fmt: skip
    HALF: gl.constexpr = D // 2
    block, pair = _place(ticket)
    key_heads = heads // group
    batch = pair // key_heads
    key_head = pair % key_heads
    if not BESIDE:
        _copy_own(k_desc, v_desc, batch, key_head, block, own, k_s, v_s)
    begin, seen, start = _queries(block, padded, CAUSAL)
    in_stage: gl.constexpr = 2 * (q_desc.block_type.nbytes + grad_desc.block_type.nbytes)
    of_rows: gl.constexpr = 0 if BESIDE else 2 * of_row_desc.block_type.nbytes
    if BESIDE:  # noqa: SIM102 - decided while compiling, the next one not
        if pair >= distance:
            _await(counts_ptr + pair)
    lanes: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [1, 1], [1, 0])
    lane = gl.arange(0, QUERIES, layout=gl.SliceLayout(0, lanes))[None, :]
    member = 0
    for n in range(seen // QUERIES * group):
        stage = n & (STAGES - 1)
        ready = full.index(stage)
        head = key_head * group + member
        row = (batch * heads + head) * 2
        # The first round waits for the phase before the first one, which counts as ended.
        mbarrier.wait(empty.index(stage), (n // STAGES & 1) ^ 1)
        mbarrier.expect(ready, in_stage + of_rows)
        for half in gl.static_range(2):
            at = [batch, head, begin + start, half * HALF]
            to = 2 * stage + half
            tma.async_copy_global_to_shared(q_desc, at, ready, q_s.index(to))
            tma.async_copy_global_to_shared(grad_desc, at, ready, grad_s.index(to))
        if BESIDE:  # TMA would need a fence of proxies behind what other blocks stored
            of_row = of_row_ptr + row.to(gl.int64) * padded + (begin + start) + lane
            lse_s.index(stage).store(gl.load(of_row))
            delta_s.index(stage).store(gl.load(of_row + padded))
            mbarrier.arrive(ready, count=1)
        else:
            at = [row, begin + start]
            tma.async_copy_global_to_shared(of_row_desc, at, ready, lse_s.index(stage))
            at = [row + 1, begin + start]
            tma.async_copy_global_to_shared(of_row_desc, at, ready, delta_s.index(stage))
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
    LATE: gl.constexpr,
    W: gl.constexpr,
):
    """Compute dk and dv of the W-th 64 keys of the tile, and the W-th half of what dq gets."""
    (dk_desc, dv_desc, dq_sum_ptr, q_s, grad_s, lse_s, delta_s, k_s, v_s, slope_s, own, full, empty,
     exchanged, seq, heads, group, padded, ticket) = arguments  # fmt: skip
    HALF: gl.constexpr = D // 2
    SCALE: gl.constexpr = D**-0.5
    of_scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, QUERIES, 16])
    of_output: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    of_left: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=of_output, k_width=2)
    dtype: gl.constexpr = k_s.dtype
    block, pair = _place(ticket)
    first = block * GROUP * GROUPS
    key_heads = heads // group
    batch = pair // key_heads
    key_head = pair % key_heads
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
    place = gl.arange(0, QUERIES, layout=gl.SliceLayout(1, of_sum))[:, None] * HALF
    place += gl.arange(0, HALF, layout=gl.SliceLayout(0, of_sum))[None, :]
    dq_at = dq_sum_ptr + (batch * heads + key_head * group).to(gl.int64) * padded * D
    begin, seen, start = _queries(block, padded, CAUSAL)
    dq_at = dq_at + begin * D + W * QUERIES * HALF + place
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
        left = gl.convert_layout(slope, of_left)
        if LATE:
            dk_a = warpgroup_mma(left, q_a, dk_a, is_async=True)
            dk_b = warpgroup_mma(left, q_b, dk_b, is_async=True)
        mbarrier.wait(exchanged.index(exchange), n // 2 & 1)
        slope_0 = slope_s.index(GROUPS * exchange).permute((1, 0))
        slope_1 = slope_s.index(GROUPS * exchange + 1).permute((1, 0))
        dq = warpgroup_mma(slope_0, keys_0, no_dq, use_acc=False, is_async=True)
        dq = warpgroup_mma(slope_1, keys_1, dq, is_async=True)
        if LATE:
            dk_a, dk_b, left, dv_a, dv_b, probabilities = warpgroup_mma_wait(
                2, deps=[dk_a, dk_b, left, dv_a, dv_b, probabilities]
            )
            mbarrier.arrive(empty.index(stage), count=1)
            dq = warpgroup_mma_wait(0, deps=[dq])
        else:
            dk_a = warpgroup_mma(left, q_a, dk_a, is_async=True)
            dk_b = warpgroup_mma(left, q_b, dk_b, is_async=True)
            dq, dv_a, dv_b, probabilities = warpgroup_mma_wait(
                2, deps=[dq, dv_a, dv_b, probabilities]
            )
        ordered = gl.convert_layout(_in_order_of_registers(dq), of_sum)
        gl.atomic_add(dq_at + row * D, ordered, sem="relaxed")
        if not LATE:
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
        at = [0, pair, first + W * GROUP, half * HALF]
        tma.async_copy_shared_to_global(dv_desc, at, v_s.index(2 * W + half))
    tma.store_wait(0)
    v_a.store((dk_a * SCALE).to(dtype))
    v_b.store((dk_b * SCALE).to(dtype))
    fence_async_shared()
    for half in gl.static_range(2):
        at = [0, pair, first + W * GROUP, half * HALF]
        tma.async_copy_shared_to_global(dk_desc, at, v_s.index(2 * W + half))
    tma.store_wait(0)


# One binary for all lengths and head counts; whether they are 1 or multiples of 16 changes nothing.
@gluon.jit(do_not_specialize=["seq", "padded", "heads", "group", "distance"])
def _sweep(
    q_desc, grad_desc, k_desc, v_desc, dk_desc, dv_desc, of_row_desc,
    grad_ptr, o_ptr, lse_ptr, of_row_ptr, dq_sum_ptr, seq, padded, heads,
    stride_gb, stride_gh, stride_gs, stride_ob, stride_oh, stride_os, stride_lb, stride_lh,
    dq_ptr, counts_ptr, group, distance, scale,
    D: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr, BESIDE: gl.constexpr,
    LATE: gl.constexpr,
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
        mbarrier.init(full.index(s), count=2 if BESIDE else 1)
        mbarrier.init(empty.index(s), count=GROUPS)
    for s in gl.static_range(2):
        mbarrier.init(exchanged.index(s), count=GROUPS)
    fence_async_shared()  # TMA sees the barriers
    ticket = gl.program_id(1) * gl.num_programs(0) + gl.program_id(0)
    if BESIDE:
        ticket = gl.atomic_add(counts_ptr + 2 * gl.num_programs(1), 1, sem="relaxed")
    block, pair = _place(ticket)
    if BESIDE:
        key_heads = heads // group
        _copy_own(k_desc, v_desc, pair // key_heads, pair % key_heads, block, own, k_s, v_s)
        prepared = (
            grad_ptr, o_ptr, lse_ptr, of_row_ptr, dq_sum_ptr, seq, padded, heads,
            stride_gb, stride_gh, stride_gs, stride_ob, stride_oh, stride_os, stride_lb, stride_lh,
        )  # fmt: skip
        _beside(prepared, block, pair, dq_ptr, counts_ptr, distance, group, scale, D)

    consumed = (
        dk_desc, dv_desc, dq_sum_ptr, q_s, grad_s, lse_s, delta_s, k_s, v_s, slope_s, own, full,
        empty, exchanged, seq, heads, group, padded, ticket,
    )  # fmt: skip
    produced = (
        q_desc, grad_desc, k_desc, v_desc, of_row_desc, of_row_ptr, q_s, grad_s, lse_s, delta_s,
        k_s, v_s, own, full, empty, heads, group, padded, counts_ptr, distance, ticket,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (_consume, (consumed, D, STAGES, CAUSAL, LATE, 0)),
            (_consume, (consumed, D, STAGES, CAUSAL, LATE, 1)),
            (_produce, (produced, D, STAGES, CAUSAL, BESIDE)),
        ],
        [4, 1],
        [240, 24],
    )
    if BESIDE:  # all roles have ended, and added to dq
        _meet()
        gl.atomic_add(counts_ptr + gl.num_programs(1) + pair, 1, sem="release")


@functools.cache
def _layout(rows: int, columns: int, dtype: gl.dtype) -> gl.NVMMASharedLayout:
    """Of tiles of all heads. Asked once: an answer takes longer than a launch."""
    return gl.NVMMASharedLayout.get_default_for([1, 1, rows, columns], dtype)


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
        return TensorDescriptor.from_tensor(x, block, _layout(64, d // 2, dtype))

    layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    of_row_desc = TensorDescriptor.from_tensor(of_row, [1, 64], layout)
    blocks = triton.cdiv(s, 128)
    total = b * hkv
    distance = total  # what lies as far ahead or behind is done by the kernels before and after
    if d == 128 and s >= BESIDE_FROM:
        distance = min(triton.cdiv(AHEAD, blocks), total)
    beside = distance < total
    group = h // hkv
    rows = (padded // ROWS_AT_ONCE, distance * group)
    counts = torch.zeros(2 * total + 1 if beside else 1, dtype=torch.int32, device=q.device)
    scale = 1 / math.sqrt(d)
    prepared = (
        *(grad, o, lse, of_row, dq_sum, s, padded, h),
        *(*grad.stride()[:3], *o.stride()[:3], *lse.stride()[:2]),
    )
    _prepare[rows](*prepared, ROWS=ROWS_AT_ONCE, D=d, num_warps=4)
    _sweep[(blocks, total)](
        *(described(x) for x in (q, grad, k, v)),
        *(described(x.view(1, b * hkv, s, d)) for x in (dk, dv)),
        of_row_desc,
        *prepared,
        dq,
        counts,
        group,
        distance,
        scale,
        D=d,
        STAGES=STAGES,
        CAUSAL=causal,
        BESIDE=beside,
        LATE=not causal or d == 64,
        num_warps=4,
    )
    first = (total - distance) * group
    _finish[rows](dq_sum, dq, s, padded, first, scale, ROWS=ROWS_AT_ONCE, D=d, num_warps=4)
    return dq, dk, dv
