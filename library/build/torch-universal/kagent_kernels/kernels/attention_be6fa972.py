"""Attention for Hopper in Gluon: a producer warp that copies, consumer warp groups that compute.

A block has one producer warp and two or three consumer groups of 64 queries. The producer keeps
rings of key and value tiles full by TMA; mbarriers say which stage is full and which is free. A
consumer holds its scores, probabilities and output in registers. It issues the scores of the next
tile of keys and the output of this one back to back, and does the next tile's softmax while the
second product runs. The groups take turns at issuing, so that one multiplies while another
exponentiates.

Blocks are persistent, one per SM: the producer fetches the next tile of queries while the last
result is stored. Causal tiles have few keys or many. So a band of heads is worked on together, all
its longest tiles first, and blocks take them to and fro: who got the longest of one round gets the
shortest of the next one. Bands are as narrow as this lets blocks end together, for the L2 cache.
D is 64 or 128, Hopper only (wgmma); other GPUs need triton_flash.py.
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

TUNE = {
    "KEYS": [64, 128],
    "STAGES_64": [2, 3, 4],
    "GROUPS_CAUSAL_64": [2, 3],
    "TURNS_64": [True, False],
    "CHAINS_64": [1, 4],
}
# Of a tile. 64 halve the registers of scores, and double barriers and rescaling: 15 to 21 % slower
# at D = 128 on an H100.
KEYS = 128
STAGES = 2  # of each ring at D = 128: 192 KiB of shared memory with queries and results
STAGES_64 = 2  # the same at D = 64, whose tiles are half as large
GROUPS_CAUSAL_64 = 3  # consumers of a causal call at D = 64, where registers allow a third: slower
TURNS_64 = True  # whether the groups take turns at D = 64
# Parts of a row's maximum in a causal call at D = 64: their chains of instructions do not wait for
# each other. 0.4 to 1.3 % faster on an H200; 1 % slower at D = 128, and without a mask.
CHAINS_64 = 4
BAND_MOST = 33  # heads of a causal call that are worked on together, at most

GROUP = gl.constexpr(64)  # queries of a consumer: the rows of one wgmma


# -- which tile of queries a block does when -------------------------------------------------------


@gluon.jit
def _count(items):
    """How many items this block has, if each block takes one in turn."""
    return (items - gl.program_id(0) + gl.num_programs(0) - 1) // gl.num_programs(0)


@gluon.jit
def _item(k, tiles):
    """Tile of queries, and head, of this block's k-th item. A head's tiles are neighbours: its keys
    are read from memory once, then from L2.
    """
    i = gl.program_id(0) + k * gl.num_programs(0)
    head = i // tiles
    return i - head * tiles, head


@gluon.jit
def _item_of_band(place, first, heads, tiles):
    """Tile of queries, and head, of a place in a band of heads: the longest tiles come first."""
    shorter = place // heads
    return tiles - 1 - shorter, first + place - shorter * heads


@gluon.jit
def _key_tiles(tile, seq, ROWS: gl.constexpr, KEYS: gl.constexpr, CAUSAL: gl.constexpr):
    """How many tiles of keys the queries of a tile see."""
    seen = gl.minimum((tile + 1) * ROWS, seq) if CAUSAL else seq
    return (seen + KEYS - 1) // KEYS


# -- the producer ----------------------------------------------------------------------------------


@gluon.jit
def _fill(desc, at, ring, full, empty, n, STAGES: gl.constexpr):
    """Copy the n-th tile of a ring as soon as its stage is free. The first round waits for the
    phase before the first one, which counts as ended.
    """
    stage = n % STAGES
    mbarrier.wait(empty.index(stage), ((n // STAGES) & 1) ^ 1)
    mbarrier.expect(full.index(stage), desc.block_type.nbytes)
    tma.async_copy_global_to_shared(desc, at, full.index(stage), ring.index(stage))


@gluon.jit
def _copy(
    arguments,  # a tuple: every role has its own
    tile,
    head,
    item,
    n,  # tiles of values so far; keys are one ahead within an item
    KEYS: gl.constexpr,
    STAGES: gl.constexpr,
    GROUPS: gl.constexpr,
    CAUSAL: gl.constexpr,
):
    """Copy queries, keys and values in the order in which the consumers use them: the last tile of
    keys first, and the keys of the next tile ahead of the values of this one.
    """
    (q_desc, k_desc, v_desc, q_s, k_s, v_s, q_full, q_empty, k_full, k_empty, v_full, v_empty,
     seq, heads, group, _, _, _) = arguments  # fmt: skip
    ROWS: gl.constexpr = GROUP * GROUPS
    batch = head // heads
    q_head = head % heads
    kv_head = q_head // group
    last = _key_tiles(tile, seq, ROWS, KEYS, CAUSAL) - 1
    _fill(k_desc, [batch, kv_head, last * KEYS, 0], k_s, k_full, k_empty, n, STAGES)
    for w in gl.static_range(GROUPS):
        mbarrier.wait(q_empty.index(w), (item & 1) ^ 1)
        mbarrier.expect(q_full.index(w), q_desc.block_type.nbytes)
        at = tile * ROWS + w * GROUP
        tma.async_copy_global_to_shared(
            q_desc, [batch, q_head, at, 0], q_full.index(w), q_s.index(w)
        )
    for back in range(last):
        at = (last - back) * KEYS
        _fill(k_desc, [batch, kv_head, at - KEYS, 0], k_s, k_full, k_empty, n + 1, STAGES)
        _fill(v_desc, [batch, kv_head, at, 0], v_s, v_full, v_empty, n, STAGES)
        n += 1
    _fill(v_desc, [batch, kv_head, 0, 0], v_s, v_full, v_empty, n, STAGES)
    return n + 1


@gluon.jit
def _produce(
    arguments,
    KEYS: gl.constexpr,
    STAGES: gl.constexpr,
    GROUPS: gl.constexpr,
    CAUSAL: gl.constexpr,
):
    """Copy all items of this block."""
    tiles, all_heads, band = arguments[15:]
    n = 0
    if CAUSAL:
        item = 0
        column = gl.program_id(0)
        for first in range(0, all_heads, band):
            heads = gl.minimum(band, all_heads - first)
            for start in range(0, heads * tiles, gl.num_programs(0)):
                place = start + column
                column = gl.num_programs(0) - 1 - column
                if place < heads * tiles:
                    tile, head = _item_of_band(place, first, heads, tiles)
                    n = _copy(arguments, tile, head, item, n, KEYS, STAGES, GROUPS, CAUSAL)
                    item += 1
    else:
        for item in range(_count(tiles * all_heads)):
            tile, head = _item(item, tiles)
            n = _copy(arguments, tile, head, item, n, KEYS, STAGES, GROUPS, CAUSAL)


# -- a consumer ------------------------------------------------------------------------------------


@gluon.jit
def _of_lane(p, KEYS: gl.constexpr):
    """Sums of the columns that a thread has: four a row, which are added up when a tile ends."""
    return gl.sum(gl.sum(p.reshape([GROUP, KEYS // 8, 4, 2]), 3), 1)


@gluon.jit
def _highest(scores, KEYS: gl.constexpr, CHAINS: gl.constexpr):
    """Largest score of each row."""
    if CHAINS == 1:
        highest = gl.max(scores, 1)
    else:
        parts = gl.max(scores.reshape([GROUP, KEYS // (8 * CHAINS), CHAINS, 4, 2]), 1)
        highest = gl.max(gl.max(gl.max(parts, 1), 2), 1)
        highest = gl.convert_layout(highest, gl.SliceLayout(1, scores.type.layout))
    return highest


@gluon.jit
def _attend(
    arguments,
    tile,
    head,
    item,
    n,  # tiles of values so far, as in the producer
    turns,
    KEYS: gl.constexpr,
    D: gl.constexpr,
    STAGES: gl.constexpr,
    GROUPS: gl.constexpr,
    TURNS: gl.constexpr,
    CHAINS: gl.constexpr,
    CAUSAL: gl.constexpr,
    W: gl.constexpr,
):
    """Attention of the W-th 64 queries of a tile."""
    (o_desc, q_s, k_s, v_s, o_s, q_full, q_empty, k_full, k_empty, v_full, v_empty, turn,
     seq, heads, scale_log2, _, _, _) = arguments  # fmt: skip
    ROWS: gl.constexpr = GROUP * GROUPS
    NEXT: gl.constexpr = (W + 1) % GROUPS
    of_scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    of_output: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    of_left: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=of_output, k_width=2)
    dtype: gl.constexpr = k_s.dtype
    row0 = gl.arange(0, GROUP, layout=gl.SliceLayout(1, of_scores)) + W * GROUP
    col0 = gl.arange(0, KEYS, layout=gl.SliceLayout(0, of_scores))
    none = gl.zeros([GROUP, KEYS], gl.float32, layout=of_scores)
    q = q_s.index(W).reshape([GROUP, D])
    last = _key_tiles(tile, seq, ROWS, KEYS, CAUSAL) - 1

    # The last tile of keys comes first, and every row meets its mask there or in the next one:
    # ROWS may be more than KEYS, and then rows of the first groups may see nothing here.
    mbarrier.wait(q_full.index(W), item & 1)
    stage = n % STAGES
    mbarrier.wait(k_full.index(stage), (n // STAGES) & 1)
    keys = k_s.index(stage).reshape([KEYS, D]).permute((1, 0))
    scores = warpgroup_mma(q, keys, none, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(0, deps=[scores])
    mbarrier.arrive(k_empty.index(stage), count=1)
    row = row0 + tile * ROWS
    col = col0 + last * KEYS
    keep = col[None, :] < seq
    if CAUSAL:
        keep = keep & (col[None, :] <= row[:, None])
    scores = gl.where(keep, scores, -float("inf"))
    # A finite reference for rows that see nothing yet: exp2 of -inf less it is 0, not NaN.
    top = gl.maximum(_highest(scores, KEYS, CHAINS) * scale_log2, -1.0e30)
    p = gl.exp2(scores * scale_log2 - top[:, None])
    part = _of_lane(p, KEYS)
    acc = gl.zeros([GROUP, D], gl.float32, layout=of_output)
    left = gl.convert_layout(p.to(dtype), of_left)

    for back in range(1, last + 1):
        ahead = (n + 1) % STAGES
        mbarrier.wait(k_full.index(ahead), ((n + 1) // STAGES) & 1)
        if TURNS:
            mbarrier.wait(turn.index(W), turns & 1)
        keys = k_s.index(ahead).reshape([KEYS, D]).permute((1, 0))
        scores = warpgroup_mma(q, keys, none, use_acc=False, is_async=True)
        stage = n % STAGES
        mbarrier.wait(v_full.index(stage), (n // STAGES) & 1)
        values = v_s.index(stage).reshape([KEYS, D])
        acc = warpgroup_mma(left, values, acc, is_async=True)
        if TURNS:
            mbarrier.arrive(turn.index(NEXT), count=1)

        scores = warpgroup_mma_wait(1, deps=[scores])
        mbarrier.arrive(k_empty.index(ahead), count=1)
        if CAUSAL and ROWS > KEYS:  # noqa: SIM102 - decided while compiling, the next one not
            if back < (ROWS + KEYS - 1) // KEYS:
                col = col0 + (last - back) * KEYS
                scores = gl.where(col[None, :] <= row[:, None], scores, -float("inf"))
        higher = gl.maximum(top, _highest(scores, KEYS, CHAINS) * scale_log2)
        shrink = gl.exp2(top - higher)
        top = higher
        p = gl.exp2(scores * scale_log2 - top[:, None])
        of_part: gl.constexpr = gl.SliceLayout(1, part.type.layout)
        part = part * gl.convert_layout(shrink, of_part)[:, None] + _of_lane(p, KEYS)

        # The softmax must stay ahead of the final wait, else nothing overlaps. LLVM keeps it
        # there because the wait has `part` among its operands; ptxas, which would hoist the
        # wait above arithmetic that no register ties to it, because of the branch in this
        # barrier's wait. The barrier has been passed above, and costs one test.
        mbarrier.wait(v_full.index(stage), (n // STAGES) & 1)
        acc, left, part = warpgroup_mma_wait(0, deps=[acc, left, part])
        mbarrier.arrive(v_empty.index(stage), count=1)
        acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, of_output))[:, None]
        left = gl.convert_layout(p.to(dtype), of_left)
        n += 1
        turns += 1

    mbarrier.arrive(q_empty.index(W), count=1)
    stage = n % STAGES
    mbarrier.wait(v_full.index(stage), (n // STAGES) & 1)
    values = v_s.index(stage).reshape([KEYS, D])
    acc = warpgroup_mma(left, values, acc, is_async=True)
    acc, left = warpgroup_mma_wait(0, deps=[acc, left])
    mbarrier.arrive(v_empty.index(stage), count=1)
    n += 1

    total = gl.convert_layout(gl.sum(part, 1), gl.SliceLayout(1, of_scores))
    o = acc * gl.convert_layout(1.0 / total, gl.SliceLayout(1, of_output))[:, None]
    tma.store_wait(0)  # the last result has left the buffer
    o_s.index(W).reshape([GROUP, D]).store(o.to(dtype))
    fence_async_shared()  # TMA sees ordinary stores only behind this
    at = tile * ROWS + W * GROUP
    tma.async_copy_shared_to_global(o_desc, [head // heads, head % heads, at, 0], o_s.index(W))
    return n, turns


@gluon.jit
def _consume(
    arguments,
    KEYS: gl.constexpr,
    D: gl.constexpr,
    STAGES: gl.constexpr,
    GROUPS: gl.constexpr,
    TURNS: gl.constexpr,
    CHAINS: gl.constexpr,
    CAUSAL: gl.constexpr,
    W: gl.constexpr,
):
    """Attention of the W-th 64 queries of each tile of this block: the tiles of `_produce`."""
    turn = arguments[11]
    tiles, all_heads, band = arguments[15:]
    n = 0
    turns = 0
    if TURNS and W == GROUPS - 1:
        mbarrier.arrive(turn.index(0), count=1)  # the first group begins
    if CAUSAL:
        item = 0
        column = gl.program_id(0)
        for first in range(0, all_heads, band):
            heads = gl.minimum(band, all_heads - first)
            for start in range(0, heads * tiles, gl.num_programs(0)):
                place = start + column
                column = gl.num_programs(0) - 1 - column
                if place < heads * tiles:
                    tile, head = _item_of_band(place, first, heads, tiles)
                    n, turns = _attend(
                        arguments, tile, head, item, n, turns,
                        KEYS, D, STAGES, GROUPS, TURNS, CHAINS, CAUSAL, W,
                    )  # fmt: skip
                    item += 1
    else:
        for item in range(_count(tiles * all_heads)):
            tile, head = _item(item, tiles)
            n, turns = _attend(
                arguments, tile, head, item, n, turns,
                KEYS, D, STAGES, GROUPS, TURNS, CHAINS, CAUSAL, W,
            )  # fmt: skip
    tma.store_wait(0)


# One binary for all lengths and head counts; whether they are 1 or multiples of 16 changes nothing.
@gluon.jit(do_not_specialize=["seq", "heads", "group", "tiles", "all_heads", "band"])
def _attention(
    q_desc, k_desc, v_desc, o_desc, seq, heads, group, tiles, all_heads, band, scale_log2,
    KEYS: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, GROUPS: gl.constexpr,
    TURNS: gl.constexpr, CHAINS: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """Give the roles to warps."""
    dtype: gl.constexpr = q_desc.dtype
    q_s = gl.allocate_shared_memory(dtype, [GROUPS, 1, 1, GROUP, D], q_desc.layout)
    o_s = gl.allocate_shared_memory(dtype, [GROUPS, 1, 1, GROUP, D], o_desc.layout)
    k_s = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, KEYS, D], k_desc.layout)
    v_s = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, KEYS, D], v_desc.layout)
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [GROUPS, 1], barrier)
    q_empty = gl.allocate_shared_memory(gl.int64, [GROUPS, 1], barrier)
    turn = gl.allocate_shared_memory(gl.int64, [GROUPS, 1], barrier)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    for w in gl.static_range(GROUPS):
        mbarrier.init(q_full.index(w), count=1)
        mbarrier.init(q_empty.index(w), count=1)
        mbarrier.init(turn.index(w), count=1)
    for s in gl.static_range(STAGES):
        mbarrier.init(k_full.index(s), count=1)
        mbarrier.init(v_full.index(s), count=1)
        mbarrier.init(k_empty.index(s), count=GROUPS)
        mbarrier.init(v_empty.index(s), count=GROUPS)
    fence_async_shared()  # TMA sees the barriers

    consumed = (
        o_desc, q_s, k_s, v_s, o_s, q_full, q_empty, k_full, k_empty, v_full, v_empty, turn,
        seq, heads, scale_log2, tiles, all_heads, band,
    )  # fmt: skip
    produced = (
        q_desc, k_desc, v_desc, q_s, k_s, v_s, q_full, q_empty, k_full, k_empty, v_full, v_empty,
        seq, heads, group, tiles, all_heads, band,
    )  # fmt: skip
    # Registers: 64 x KEYS scores and 64 x D outputs are 64 + 64 a thread at 128, probabilities 32.
    # The 64 K of an SM bound what the groups may take together.
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (_consume, (consumed, KEYS, D, STAGES, GROUPS, TURNS, CHAINS, CAUSAL, 0)),
                (_consume, (consumed, KEYS, D, STAGES, GROUPS, TURNS, CHAINS, CAUSAL, 1)),
                (_produce, (produced, KEYS, STAGES, GROUPS, CAUSAL)),
            ],
            [4, 1],
            [240, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (consumed, KEYS, D, STAGES, GROUPS, TURNS, CHAINS, CAUSAL, 0)),
                (_consume, (consumed, KEYS, D, STAGES, GROUPS, TURNS, CHAINS, CAUSAL, 1)),
                (_consume, (consumed, KEYS, D, STAGES, GROUPS, TURNS, CHAINS, CAUSAL, 2)),
                (_produce, (produced, KEYS, STAGES, GROUPS, CAUSAL)),
            ],
            [4, 4, 1],
            [160, 160, 32],
        )


def _longest(band: int, tiles: int, heads: int, blocks: int) -> float:
    """Work of the block that has most, over the mean, where a band has so many heads.

    A tile of queries takes as long as its tiles of keys, and one more to begin and end.
    """
    heads = min(heads, 4 * band + heads % (2 * band))  # more bands repeat what two of them do
    work = [0] * blocks
    rounds = 0
    for first in range(0, heads, band):
        here = min(band, heads - first)
        for start in range(0, here * tiles, blocks):
            for place in range(start, min(start + blocks, here * tiles)):
                block = place - start if rounds % 2 == 0 else blocks - 1 - (place - start)
                work[block] += tiles - place // here + 1
            rounds += 1
    return max(work) * blocks / sum(work)


@functools.cache
def _band(tiles: int, heads: int, blocks: int) -> int:
    """The fewest heads of a band for which blocks end almost as nearly together as they can."""
    most = max(1, min(heads, BAND_MOST, 32 * blocks // tiles))  # more rounds than 32 are even
    longest = {n: _longest(n, tiles, heads, blocks) for n in range(1, most + 1)}
    least = min(longest.values())
    return next(n for n, time in longest.items() if time < least + 0.01)


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


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    """Attention of q [B, H, S, D] over k and v [B, Hkv, S, D], bf16 or fp16, D = 64 or 128.

    Inputs whose rows do not begin at multiples of 16 bytes are copied first.
    """
    if torch.cuda.get_device_capability(q.device)[0] != 9:
        raise RuntimeError("wgmma is Hopper's alone: use another kernel on this GPU")
    b, h, s, d = q.shape
    o = torch.empty(b, h, s, d, dtype=q.dtype, device=q.device)
    groups = GROUPS_CAUSAL_64 if d == 64 and causal else 2
    dtype = gl.bfloat16 if q.dtype == torch.bfloat16 else gl.float16

    def described(x, rows):
        block = [1, 1, rows, d]
        return TensorDescriptor.from_tensor(_for_tma(x), block, _layout(rows, d, dtype))

    tiles = triton.cdiv(s, 64 * groups)
    processors = torch.cuda.get_device_properties(q.device).multi_processor_count
    blocks = min(tiles * b * h, processors)
    _attention[(blocks,)](
        described(q, 64),
        described(k, KEYS),
        described(v, KEYS),
        described(o, 64),
        s,
        h,
        h // k.shape[1],
        tiles,
        b * h,
        _band(tiles, b * h, blocks) if causal else b * h,
        math.log2(math.e) / math.sqrt(d),
        KEYS=KEYS,
        D=d,
        STAGES=STAGES_64 if d == 64 else STAGES,
        GROUPS=groups,
        TURNS=TURNS_64 or d != 64,
        CHAINS=CHAINS_64 if d == 64 and causal else 1,
        CAUSAL=causal,
        num_warps=4,
    )
    return o
