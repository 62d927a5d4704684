"""cuda_slices where that is faster, gluon_hopper elsewhere."""

import functools
import torch
import triton
from .._runtime import cuda_kernel
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

M_SPLIT = 32  # rows of x: tokens, 1 to 64; up to here the first kernel is faster
TUNE = {
    "M_SPLIT": [4, 32],
    "WARPS": [8, 16],
    "RING_KIB": [64, 96, 128],
    "FETCH": [64, 128, 256],
    "GROUPS_FEW": [2, 4],
    "GROUPS_MANY": [2, 4],
    "RING_KIB_GLUON_HOPPER": [96, 144, 192],
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
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ void from_float(float x, __half& y) { y = __float2half_rn(x); }
__device__ __forceinline__ void from_float(float x, __nv_bfloat16& y) {
  y = __float2bfloat16_rn(x);
}

// A constant that the compiler does not know: one that it knows it would load anew for each use, as
// an instruction takes one of two.
template <unsigned BITS>
__device__ __forceinline__ unsigned opaque() {
  unsigned bits;
  asm volatile("mov.u32 %0, %1;" : "=r"(bits) : "n"(BITS));
  return bits;
}

// Bytes 0 and 2 of 4 as numbers; shifted by 8, bytes 1 and 3.
template <typename T> struct Bytes;
template <> struct Bytes<__nv_bfloat16> {
  unsigned digits = opaque<0x007f007f>(), sign = opaque<0x00800080>();
  // 128 plus the low 7 bits, less 128 or, with the sign bit, 256: both are exact.
  __device__ unsigned operator()(unsigned w) const {
    const unsigned a = (w & digits) | 0x43004300u, b = (w & sign) | 0x43004300u;
    const __nv_bfloat162 d = __hsub2(*reinterpret_cast<const __nv_bfloat162*>(&a),
                                     *reinterpret_cast<const __nv_bfloat162*>(&b));
    return *reinterpret_cast<const unsigned*>(&d);
  }
};
template <> struct Bytes<__half> {
  unsigned low = opaque<0x00ff00ff>();
  // 1024 plus 128 plus the number, less 1152.
  __device__ unsigned operator()(unsigned w) const {
    const unsigned a = (w & low) ^ 0x64806480u, b = 0x64806480u;
    const __half2 d = __hsub2(*reinterpret_cast<const __half2*>(&a),
                              *reinterpret_cast<const __half2*>(&b));
    return *reinterpret_cast<const unsigned*>(&d);
  }
};

__device__ __forceinline__ void multiply_add(float (&c)[4], const unsigned (&a)[4], unsigned b0,
                                             unsigned b1, __nv_bfloat16) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void multiply_add(float (&c)[4], const unsigned (&a)[4], unsigned b0,
                                             unsigned b1, __half) {
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
__device__ __forceinline__ void copy_async(uint4* to, const signed char* from, int end) {
  if constexpr (WIDTH == 1) {                         // at any address, and at once
    unsigned word[4] = {};
#pragma unroll
    for (int i = 0; i < 16; ++i)
      if (i < end) word[i / 4] |= static_cast<unsigned char>(from[i]) << (i % 4 * 8);
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

// EIGHTS: 8 tokens each. DEPTH: pieces of 2 KiB in a warp's ring. WIDTH: of a copy. VECTORS: x is
// read 16 bytes at a time. `held`: tiles between two sums over all warps.
template <typename T, int EIGHTS, int WARPS, int CLUSTER, int DEPTH, int WIDTH, int FETCH,
          bool VECTORS>
__global__ void __launch_bounds__(WARPS * 32, 1)
product_by_slices(const T* x, const signed char* weight, const T* scale, T* y,
                  long long x_stride, long long weight_stride, int tokens, int outputs, int summed,
                  int held) {
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
  const signed char *from, *from_other;
  auto aim = [&]() {                                  // a row that is not there: any other
    const int output = next_tile * TILE + 2 * g;
    const signed char* start = weight + next_piece * PIECE + t * 16;
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

  // x of a slice: 16 numbers each. As they came, then even ones and odd ones, as of weights.
  unsigned kept[EIGHTS][2 * PIECES][8];
  auto fetch_x = [&](int slice) {
#pragma unroll
    for (int i = 0; i < EIGHTS; ++i) {
      const int token = first_token + i * 8 + g;
      const T* row = x + token * x_stride;
#pragma unroll
      for (int p = 0; p < 2 * PIECES; ++p) {
        const int k = slice * PIECE + p * 64 + t * 16;
        unsigned(&u)[8] = kept[i][p];
#pragma unroll
        for (int j = 0; j < 8; ++j) u[j] = 0;
        if constexpr (VECTORS) {
          if (token < tokens && k < summed) {
            const uint4 low = *reinterpret_cast<const uint4*>(row + k);
            const uint4 high = *reinterpret_cast<const uint4*>(row + k + 8);
            u[0] = low.x;
            u[1] = low.y;
            u[2] = low.z;
            u[3] = low.w;
            u[4] = high.x;
            u[5] = high.y;
            u[6] = high.z;
            u[7] = high.w;
          }
        } else {
          const unsigned short* bits = reinterpret_cast<const unsigned short*>(row) + k;
#pragma unroll
          for (int j = 0; j < 16; ++j)
            if (token < tokens && k + j < summed) u[j / 2] |= bits[j] << (j % 2 * 16);
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
          asm volatile("" : "+r"(u[j]), "+r"(u[j + 1]));  // not before what stands before
          const unsigned even = __byte_perm(u[j], u[j + 1], 0x5410);
          u[j + 1] = __byte_perm(u[j], u[j + 1], 0x7632);
          u[j] = even;
        }
      }
    }
  };
  fetch_x(first);                                     // before the weights, which take long
#pragma unroll 1
  for (int i = 0; i < DEPTH; ++i) copy_next(of_warp + i * WORDS);
  // Scales are wanted in the end: without waiting for memory then.
  if (begin * TILE + static_cast<int>(threadIdx.x) < min(end * TILE, outputs))
    asm volatile("prefetch.global.L2 [%0];" :: "l"(scale + begin * TILE + threadIdx.x));

  arrange_x();
  uint4* at = of_warp;                                // in the ring
  const Bytes<T> decoded;
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
                const unsigned a[4] = {decoded(upper[s]), decoded(lower[s]),
                                       decoded(upper[s] >> 8), decoded(lower[s] >> 8)};
#pragma unroll
                for (int i = 0; i < EIGHTS; ++i) {
                  const unsigned* b = kept[i][2 * p + h] + 2 * s;
                  multiply_add(total[i], a, b[0], b[1], T());
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
      const float of_one = output < outputs ? to_float(scale[output]) : 0.0f;
      const float of_other = output + 1 < outputs ? to_float(scale[output + 1]) : 0.0f;
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
      T pair[2][2];
      from_float(v.x * of_one, pair[0][0]);
      from_float(v.z * of_other, pair[0][1]);
      from_float(v.y * of_one, pair[1][0]);
      from_float(v.w * of_other, pair[1][1]);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (token + i < tokens) {
          T* out = y + static_cast<long long>(token + i) * outputs + output;
          if (outputs % 2 == 0) {
            if (output < outputs)
              *reinterpret_cast<unsigned*>(out) =
                  __byte_perm(*reinterpret_cast<const unsigned short*>(&pair[i][0]),
                              *reinterpret_cast<const unsigned short*>(&pair[i][1]), 0x5410);
          } else {
            if (output < outputs) out[0] = pair[i][0];
            if (output + 1 < outputs) out[1] = pair[i][1];
          }
        }
      }
    }
    // The sums have been read, also by other blocks: they may be written, and the block may end.
    if (CLUSTER > 1 || round_end < end) meet<CLUSTER>();
  }
}
"""

TYPES = {torch.float16: "__half", torch.bfloat16: "__nv_bfloat16"}


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


def _int8_linear_slices(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    if torch.cuda.get_device_capability(x.device)[0] not in (9, 10):
        raise RuntimeError("needs clusters and 224 KiB of shared memory: use another kernel here")
    tokens, summed = x.shape
    outputs = weight.shape[0]
    y = torch.empty((tokens, outputs), dtype=x.dtype, device=x.device)
    x_stride = x.stride(0) if tokens > 1 else 0
    weight_stride = weight.stride(0) if outputs > 1 else 0

    width = 16  # of copies, all of them within a row
    while any(n % width for n in (summed, weight_stride, weight.storage_offset())):
        width //= 2
    width = 1 if width == 2 else width  # what cp.async has
    vectors = summed % 16 == 0 and x_stride % 8 == 0 and x.storage_offset() % 8 == 0

    processors = torch.cuda.get_device_properties(x.device).multi_processor_count
    eights = 1 if tokens <= 8 or width == 1 else 2
    groups = triton.cdiv(tokens, 8 * eights)
    tiles, pieces = triton.cdiv(outputs, TILE), triton.cdiv(summed, PIECE)
    # Groups of tokens have the same tiles at the same time: one of them reads memory.
    cluster, teams = _teams(tiles, pieces, max(1, processors // groups))
    depth = RING_KIB // (2 * WARPS)
    most = triton.cdiv(tiles, teams)  # of a block
    held = (SHARED_KIB - RING_KIB) * 2 // (WARPS * eights)
    held = triton.cdiv(most, triton.cdiv(most, held))
    kernel = cuda_kernel(
        f"product_by_slices<{TYPES[x.dtype]}, {eights}, {WARPS}, {cluster}, {depth}, {width}, "
        f"{FETCH}, {'true' if vectors else 'false'}>",
        SOURCE,
    )
    kernel.launch(
        (teams * cluster, groups),
        (WARPS * 32,),
        x,
        weight,
        scale,
        y,
        x_stride,
        weight_stride,
        tokens,
        outputs,
        summed,
        held,
        shared=WARPS * (depth * 2048 + held * eights * 512),
        cluster=(cluster, 1) if cluster > 1 else None,
    )
    return y


# -- gluon_hopper --

GROUPS_FEW = 2  # consumers of a block for up to 16 tokens
GROUPS_MANY = 4  # and for more
RING_KIB_GLUON_HOPPER = 192

GROUP = gl.constexpr(64)  # outputs of a consumer: the rows of one wgmma
SUMMED = gl.constexpr(128)  # of the summed dimension at a time: the width of a swizzle


@gluon.jit
def _fetch(arguments, GROUPS: gl.constexpr, STAGES: gl.constexpr):
    x_desc, weight_desc, x_s, weight_s, full, empty, tiles, tiles_of_part = arguments
    first = gl.program_id(1) * tiles_of_part
    for n in range(gl.minimum(tiles - first, tiles_of_part)):
        stage = n % STAGES
        at = (first + n) * SUMMED
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
    x_s = gl.allocate_shared_memory(x_desc.dtype, [STAGES, TOKENS, SUMMED], x_desc.layout)
    weight_s = gl.allocate_shared_memory(
        gl.int8, [STAGES, GROUP * GROUPS, SUMMED], weight_desc.layout
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
        STAGES=RING_KIB_GLUON_HOPPER * 1024 // (128 * (64 * groups + 2 * rows)),
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
        return _int8_linear_slices(x, weight, scale)
    return _int8_linear_gluon_hopper(x, weight, scale)
