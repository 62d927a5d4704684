"""cuda_slices where that is faster, gluon_hopper elsewhere."""

import functools
import torch
import triton
from .._runtime import cuda_kernel
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

M_SPLIT = 256  # rows of x: tokens; up to here the first kernel is faster
TUNE = {
    "M_SPLIT": [256, 5792],
    "WARPS": [8, 16],
    "RING_KIB": [64, 96, 128],
    "FETCH": [64, 128, 256],
    "OUTPUTS": [128, 256],
    "STAGES": [3, 4],
    "BAND": [4, 8, 16],
}


# -- cuda_slices --

WARPS = 16  # of a block: with 16 a thread has up to 128 registers
RING_KIB = 64  # weights on their way to an SM
FETCH = 128  # bytes that the L2 reads where 64 are asked for

TILE = 16  # outputs
PIECE = 128  # of the summed dimension
SHARED_KIB = 224  # of an SM: the ring, and the warps' sums of some tiles
MAX_CLUSTER = 4

SOURCE = r"""
#include <cuda_bf16.h>
#include <cuda_fp16.h>

__device__ __forceinline__ unsigned address(const void* p) {
  return static_cast<unsigned>(__cvta_generic_to_shared(p));
}
// 2 numbers of 8 bits, exactly.
__device__ __forceinline__ unsigned decode(unsigned short two) {
  unsigned pair;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"(two));
  return pair;
}
__device__ __forceinline__ unsigned decode_low(unsigned w) { return decode(w & 0xffff); }
__device__ __forceinline__ unsigned decode_high(unsigned w) { return decode(w >> 16); }

__device__ __forceinline__ void multiply_add(float (&c)[4], const unsigned (&a)[4], unsigned b0,
                                             unsigned b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// To `to`, from byte `at` on. Zeros where nothing is left of the row.
template <int BYTES, int FETCH>
__device__ __forceinline__ void copy_bytes(uint4* to, int at, const void* from, int left) {
#define COPY(HOW)                                                                                \
  asm volatile("{ .reg .pred none;\n setp.le.s32 none, %2, 0;\n cp.async." HOW                   \
               " [%0], [%1], %3, none; }"                                                        \
               :: "r"(address(to) + at), "l"(from), "r"(left), "n"(BYTES) : "memory")
  if constexpr (BYTES < 16)
    COPY("ca.shared.global");
  else if constexpr (FETCH == 256)
    COPY("cg.shared.global.L2::256B");
  else if constexpr (FETCH == 128)
    COPY("cg.shared.global.L2::128B");
  else
    COPY("cg.shared.global");
#undef COPY
}
// 16 bytes to shared memory in copies of WIDTH; those from `end` on are zeros.
template <int WIDTH, int FETCH>
__device__ __forceinline__ void copy_async(uint4* to, const unsigned char* from, int end) {
  if constexpr (WIDTH == 1) {                         // at any address, and at once
    unsigned word[4] = {};
#pragma unroll
    for (int i = 0; i < 16; ++i)
      if (i < end) word[i / 4] |= static_cast<unsigned>(from[i]) << (i % 4 * 8);
    *to = make_uint4(word[0], word[1], word[2], word[3]);
  } else {
#pragma unroll
    for (int i = 0; i < 16; i += WIDTH) copy_bytes<WIDTH, FETCH>(to, i, from + i, end - i);
  }
}
__device__ __forceinline__ void copy_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int PENDING>
__device__ __forceinline__ void copy_wait() {
  asm volatile("cp.async.wait_group %0;" :: "n"(PENDING) : "memory");
}

__device__ __forceinline__ unsigned cluster_rank() {
  unsigned rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
__device__ __forceinline__ void cluster_arrive() {
  __syncwarp();
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
template <int CLUSTER>
__device__ __forceinline__ void meet() {              // all threads that share tiles
  if constexpr (CLUSTER > 1) {
    cluster_arrive();
    cluster_wait();
  } else {
    __syncthreads();
  }
}
// From the same place in another block of the cluster.
__device__ __forceinline__ float4 load_remote(const float4* local, int rank) {
  float4 v;
  asm volatile(
      "{ .reg .b32 at;\n"
      "  mapa.shared::cluster.u32 at, %4, %5;\n"
      "  ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [at]; }"
      : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(address(local)), "r"(rank) : "memory");
  return v;
}

// The scaled sums of two tokens' two outputs: v of (token, output), (token + 1, output), and of the
// next output.
__device__ __forceinline__ void store(__nv_bfloat16* y, float4 v, float scale, int token,
                                      int output, int tokens, int outputs) {
  const float one[2] = {v.x * scale, v.y * scale}, other[2] = {v.z * scale, v.w * scale};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (token + i < tokens && output < outputs) {
      __nv_bfloat16* out = y + static_cast<long long>(token + i) * outputs + output;
      if (outputs % 2 == 0) {
        *reinterpret_cast<__nv_bfloat162*>(out) = __floats2bfloat162_rn(one[i], other[i]);
      } else {
        out[0] = __float2bfloat16_rn(one[i]);
        if (output + 1 < outputs) out[1] = __float2bfloat16_rn(other[i]);
      }
    }
  }
}

// EIGHTS: 8 tokens each. DEPTH: pieces of 2 KiB in a warp's ring. WIDTH: of a copy. VECTORS: x is
// read 16 bytes at a time. `held`: tiles between two sums over all warps.
template <int EIGHTS, int WARPS, int CLUSTER, int DEPTH, int WIDTH, int FETCH, bool VECTORS>
__global__ void __launch_bounds__(WARPS * 32, 1)
product_by_slices(const unsigned char* x, const unsigned char* weight, const float* scale_x,
                  const float* scale_weight, __nv_bfloat16* y, long long x_stride,
                  long long weight_stride, int tokens, int outputs, int summed, int held) {
  constexpr int THREADS = WARPS * 32;
  constexpr int TILE = 16;                            // outputs: the rows of an mma
  constexpr int PIECE = 128;                          // summed: twice 16 bytes of each of 4 lanes
  constexpr int PIECES = 2;                           // of a slice, whose x a warp has in registers
  constexpr int WORDS = 128;                          // of 16 bytes, of a piece of a tile
  extern __shared__ __align__(16) uint4 ring[];
  float4* sums = reinterpret_cast<float4*>(ring + WARPS * DEPTH * WORDS);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int g = lane / 4, t = lane % 4;
  const int rank = CLUSTER > 1 ? cluster_rank() : 0;
  const int first_token = blockIdx.y * 8 * EIGHTS;

  // The block's tiles, and the warp's pieces of the summed dimension.
  const int tiles = (outputs + TILE - 1) / TILE;
  const int teams = gridDim.x / CLUSTER, team = blockIdx.x / CLUSTER;
  const int begin = static_cast<int>(static_cast<long long>(tiles) * team / teams);
  const int end = static_cast<int>(static_cast<long long>(tiles) * (team + 1) / teams);
  const int pieces = (summed + PIECE - 1) / PIECE;
  const int part = rank * WARPS + warp;
  const int first = pieces * part / (CLUSTER * WARPS);
  const int last = pieces * (part + 1) / (CLUSTER * WARPS);

  // What is copied next: of `held` tiles, for each slice of the summed dimension, for each tile,
  // the slice's pieces. The mma's rows g and g + 8 are the outputs 2g and 2g + 1 of a tile, which
  // one store takes.
  uint4* of_warp = ring + warp * DEPTH * WORDS + lane;
  int next_begin = begin, next_end = min(begin + held, end), next_slice = first;
  int next_tile = first < last ? begin : end, next_piece = first;
  const unsigned char *from, *from_other;
  auto aim = [&]() {                                  // a row that is not there: any other
    const int output = next_tile * TILE + 2 * g;
    const unsigned char* start = weight + next_piece * PIECE + t * 16;
    from = start + min(output, outputs - 1) * weight_stride;
    from_other = start + min(output + 1, outputs - 1) * weight_stride;
  };
  aim();
  auto copy_next = [&](uint4* to) {
    if (next_tile < end) {
      const int left = summed - t * 16 - next_piece * PIECE;
      copy_async<WIDTH, FETCH>(to, from, left);
      copy_async<WIDTH, FETCH>(to + 64, from + 64, left - 64);
      copy_async<WIDTH, FETCH>(to + 32, from_other, left);
      copy_async<WIDTH, FETCH>(to + 96, from_other + 64, left - 64);
      from += PIECE;
      from_other += PIECE;
      if (++next_piece == min(next_slice + PIECES, last)) {
        if (++next_tile == next_end) {
          next_slice += PIECES;
          if (next_slice >= last) {
            next_slice = first;
            next_begin = next_end;
            next_end = min(next_end + held, end);
          }
          next_tile = next_begin;
        }
        next_piece = next_slice;
        aim();
      }
    }
    copy_commit();
  };

  // x of a slice: 16 numbers each. As they came, then as 16-bit numbers, in the weights' order.
  unsigned kept[EIGHTS][2 * PIECES][8];
  auto fetch_x = [&](int slice) {
#pragma unroll
    for (int i = 0; i < EIGHTS; ++i) {
      const int token = first_token + i * 8 + g;
      const unsigned char* row = x + token * x_stride;
#pragma unroll
      for (int p = 0; p < 2 * PIECES; ++p) {
        const int k = slice * PIECE + p * 64 + t * 16;
        unsigned(&u)[8] = kept[i][p];
#pragma unroll
        for (int j = 0; j < 4; ++j) u[2 * j] = 0;
        if constexpr (VECTORS) {
          if (token < tokens && k < summed) {
            const uint4 word = *reinterpret_cast<const uint4*>(row + k);
            u[0] = word.x;
            u[2] = word.y;
            u[4] = word.z;
            u[6] = word.w;
          }
        } else {
#pragma unroll
          for (int j = 0; j < 16; ++j)
            if (token < tokens && k + j < summed)
              u[j / 4 * 2] |= static_cast<unsigned>(row[k + j]) << (j % 4 * 8);
        }
      }
    }
  };
  auto arrange_x = [&]() {
#pragma unroll
    for (int i = 0; i < EIGHTS; ++i) {
#pragma unroll
      for (int p = 0; p < 2 * PIECES; ++p) {
        unsigned(&u)[8] = kept[i][p];
#pragma unroll
        for (int j = 0; j < 8; j += 2) {
          asm volatile("" : "+r"(u[j]));              // not before what stands before
          u[j + 1] = decode_high(u[j]);
          u[j] = decode_low(u[j]);
        }
      }
    }
  };
  fetch_x(first);                                     // before the weights, which take long
#pragma unroll 1
  for (int i = 0; i < DEPTH; ++i) copy_next(of_warp + i * WORDS);
  const float scale = *scale_x * *scale_weight;

  arrange_x();
  uint4* at = of_warp;                                // in the ring
#pragma unroll 1
  for (int round = begin; round < end; round += held) {
    const int round_end = min(round + held, end);
    int slice = first;
    do {                                              // once also where a warp has no piece
      if (last - first > PIECES && (round > begin || slice > first)) {
        fetch_x(slice);
        arrange_x();
      }
#pragma unroll 1
      for (int tile = round; tile < round_end; ++tile) {
        float4* to = sums + ((tile - round) * EIGHTS * WARPS + warp) * 32 + lane;
        float total[EIGHTS][4] = {};
#pragma unroll
        for (int p = 0; p < PIECES; ++p) {
          if (slice + p < last) {
            copy_wait<DEPTH - 1>();
#pragma unroll
            for (int h = 0; h < 2; ++h) {
              const uint4 one = at[h * 64], other = at[h * 64 + 32];
              const unsigned upper[4] = {one.x, one.y, one.z, one.w};
              const unsigned lower[4] = {other.x, other.y, other.z, other.w};
#pragma unroll
              for (int s = 0; s < 4; ++s) {
                const unsigned a[4] = {decode_low(upper[s]), decode_low(lower[s]),
                                       decode_high(upper[s]), decode_high(lower[s])};
#pragma unroll
                for (int i = 0; i < EIGHTS; ++i) {
                  const unsigned* b = kept[i][2 * p + h] + 2 * s;
                  multiply_add(total[i], a, b[0], b[1]);
                }
              }
            }
            copy_next(at);                            // this lane has read its place
            at = at == of_warp + (DEPTH - 1) * WORDS ? of_warp : at + WORDS;
          }
        }
#pragma unroll
        for (int i = 0; i < EIGHTS; ++i) {
          float4 v = make_float4(total[i][0], total[i][1], total[i][2], total[i][3]);
          if (slice > first) {
            const float4 before = to[i * WARPS * 32];
            v = make_float4(before.x + v.x, before.y + v.y, before.z + v.z, before.w + v.w);
          }
          to[i * WARPS * 32] = v;
        }
      }
      slice += PIECES;
    } while (slice < last);

    meet<CLUSTER>();
    const int count = (round_end - round) * EIGHTS * 32;
#pragma unroll 1
    for (int e = rank * THREADS + threadIdx.x; e < count; e += CLUSTER * THREADS) {
      const int output = (round + e / (32 * EIGHTS)) * TILE + e % 32 / 4 * 2;
      const int token = first_token + e / 32 % EIGHTS * 8 + e % 4 * 2;
      const float4* from = sums + e / 32 * WARPS * 32 + e % 32;
      float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 1
      for (int r = 0; r < CLUSTER; ++r) {
#pragma unroll (CLUSTER > 1 ? 4 : 8)
        for (int w = 0; w < WARPS; ++w) {
          const float4 u = CLUSTER > 1 ? load_remote(from + w * 32, r) : from[w * 32];
          v = make_float4(v.x + u.x, v.y + u.y, v.z + u.z, v.w + u.w);
        }
      }
      store(y, v, scale, token, output, tokens, outputs);
    }
    // The sums have been read, also by other blocks: they may be written, and the block may end.
    if (CLUSTER > 1 || round_end < end) meet<CLUSTER>();
  }
}
"""


def _width(*multiples: int) -> int:
    """Bytes of a copy of cp.async, all of them within a row; 1 where it has none."""
    width = 16
    while any(n % width for n in multiples):
        width //= 2
    return 1 if width == 2 else width


def _teams(tiles: int, pieces: int, processors: int) -> tuple[int, int]:
    """Blocks of a cluster, and clusters: such that the SMs have about equally many tiles."""
    best, found = 0.0, (1, 1)
    cluster = 1
    while cluster <= min(MAX_CLUSTER, processors) and (cluster == 1 or cluster * WARPS <= pieces):
        # A part of the chip may hold no whole number of such clusters.
        teams = max(1, min(tiles, processors // cluster - (3 if cluster > 2 else 0)))
        busy = tiles * cluster / (triton.cdiv(tiles, teams) * processors)
        if busy > 1.1 * best:  # reading sums of other blocks takes time, too
            best, found = busy, (cluster, teams)
        cluster *= 2
    return found


def _fp8_linear_slices(
    x: torch.Tensor, weight: torch.Tensor, scale_x: torch.Tensor, scale_weight: torch.Tensor
) -> torch.Tensor:
    if torch.cuda.get_device_capability(x.device)[0] not in (9, 10):
        raise RuntimeError("needs clusters and 224 KiB of shared memory: use another kernel here")
    tokens, summed = x.shape
    outputs = weight.shape[0]
    y = torch.empty((tokens, outputs), dtype=torch.bfloat16, device=x.device)
    x_stride = x.stride(0) if tokens > 1 else 0
    weight_stride = weight.stride(0) if outputs > 1 else 0
    of_x = _width(summed, x_stride, x.storage_offset())
    of_weight = _width(summed, weight_stride, weight.storage_offset())
    strides = x_stride, weight_stride
    sizes = tokens, outputs, summed

    eights = 1 if tokens <= 8 or of_weight == 1 else 2
    groups = triton.cdiv(tokens, 8 * eights)
    processors = torch.cuda.get_device_properties(x.device).multi_processor_count
    tiles, pieces = triton.cdiv(outputs, TILE), triton.cdiv(summed, PIECE)
    # Groups of tokens have the same tiles at the same time: one of them reads memory.
    cluster, teams = _teams(tiles, pieces, max(1, processors // groups))
    depth = RING_KIB // (2 * WARPS)
    most = triton.cdiv(tiles, teams)  # of a block
    held = (SHARED_KIB - RING_KIB) * 2 // (WARPS * eights)
    held = triton.cdiv(most, triton.cdiv(most, held))
    vectors = "true" if of_x == 16 else "false"
    kernel = cuda_kernel(
        f"product_by_slices<{eights}, {WARPS}, {cluster}, {depth}, {of_weight}, {FETCH}, "
        f"{vectors}>",
        SOURCE,
    )
    kernel.launch(
        (teams * cluster, groups),
        (WARPS * 32,),
        x,
        weight,
        scale_x,
        scale_weight,
        y,
        *strides,
        *sizes,
        held,
        shared=WARPS * (depth * 2048 + held * eights * 512),
        cluster=(cluster, 1) if cluster > 1 else None,
    )
    return y


# -- gluon_hopper --

OUTPUTS = 256  # of a tile: 128 sums and 64 partial ones a thread; 128 where tiles would be few
STAGES = 4  # of the ring, 48 KiB each
BAND = 8  # rows of tiles that are taken together: their operands are found in the L2 cache

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


def fp8_linear(x: torch.Tensor, weight: torch.Tensor, scale_x: torch.Tensor, scale_weight: torch.Tensor) -> torch.Tensor:
    if x.shape[0] <= M_SPLIT:
        return _fp8_linear_slices(x, weight, scale_x, scale_weight)
    return _fp8_linear_gluon_hopper(x, weight, scale_x, scale_weight)
