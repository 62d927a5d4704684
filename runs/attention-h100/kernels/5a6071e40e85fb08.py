"""Flash attention in CUDA C++ with the tensor cores' warp-level instruction, for Ampere and later.

A block owns BLOCK_M queries of one head, 16 per warp, and walks over tiles of BLOCK_N keys that
cp.async brings into shared memory STAGES - 1 tiles ahead. Scores, probabilities and output never
leave a warp's registers: the layout in which mma.m16n8k16 leaves a 16 x 16 block of scores is the
one in which it takes a left operand, so that p goes into the second product as it is. Rows of a
tile are swizzled, which makes all shared-memory accesses free of bank conflicts.

A base to work from: mma.sync reaches about two thirds of what Hopper's wgmma does, and both
operands of wgmma's second product could come from shared memory.
"""

import math

import torch
import triton
from kagent_sandbox.lang import cuda_kernel

TUNE = {"BLOCK_M": [64, 128], "BLOCK_N": [32, 64, 128], "STAGES": [2, 3]}
BLOCK_M = 64  # queries of a block, 16 per warp; two blocks of 64 overlap better than one of 128
BLOCK_N = 64  # keys of a tile
STAGES = 2  # tiles of k and v in shared memory

SOURCE = r"""
#include <math_constants.h>
#if BF16
#include <cuda_bf16.h>
#define PTX_TYPE "bf16"
typedef __nv_bfloat16 Scalar;
#else
#include <cuda_fp16.h>
#define PTX_TYPE "f16"
typedef __half Scalar;
#endif

constexpr int WARPS = BLOCK_M / 16;
constexpr int THREADS = WARPS * 32;
constexpr int CHUNKS = HEAD_DIM / 8;  // of 16 bytes, in a row
constexpr int TILE = BLOCK_N * HEAD_DIM;

// --- instructions -------------------------------------------------------------------------------

__device__ unsigned shared_address(const void* p) {
  return static_cast<unsigned>(__cvta_generic_to_shared(p));
}

// Copies 16 bytes to shared memory in the background; zeros if not `inside`.
__device__ void copy_async(Scalar* to, const Scalar* from, bool inside) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)),
               "l"(from), "r"(inside ? 16 : 0)
               : "memory");
}

__device__ void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most PENDING of this thread's groups of copies are under way.
template <int PENDING>
__device__ void copy_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// Four 8 x 8 matrices; lane i gives the address of row i % 8 of matrix i / 8, and gets of each
// matrix elements 2 (i % 4) and the next of row i / 4.
__device__ void load_matrices(unsigned (&to)[4], const Scalar* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(shared_address(row))
               : "memory");
}

// The same, of the matrices' transposes.
__device__ void load_matrices_transposed(unsigned (&to)[4], const Scalar* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(shared_address(row))
               : "memory");
}

// c[16, 8] += a[16, 16] * b[16, 8]. With g = lane / 4 and t = 2 (lane % 4), a lane holds
//   c: (g, t) (g, t + 1) (g + 8, t) (g + 8, t + 1)       rows, columns
//   a: pairs (g, t..) (g + 8, t..) (g, t + 8..) (g + 8, t + 8..)
//   b: pairs (t.., g) (t + 8.., g)
__device__ void multiply_add(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32." PTX_TYPE "." PTX_TYPE ".f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// --- tiles --------------------------------------------------------------------------------------

__device__ unsigned pack(float low, float high) {
#if BF16
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
#else
  const __half2 pair = __floats2half2_rn(low, high);
#endif
  return *reinterpret_cast<const unsigned*>(&pair);
}

// Where chunk `chunk` of a row lies in a tile: eight rows' chunks of equal number lie in different
// banks.
__device__ int swizzled(int row, int chunk) { return row * HEAD_DIM + (chunk ^ (row & 7)) * 8; }

// Starts copying rows [first, first + ROWS) of a matrix; zeros past the end of the sequence.
template <int ROWS>
__device__ void copy_rows(Scalar* tile, const Scalar* from, long long stride, int first, int seq) {
#pragma unroll
  for (int i = threadIdx.x; i < ROWS * CHUNKS; i += THREADS) {
    const int row = i / CHUNKS, chunk = i % CHUNKS;
    const bool inside = first + row < seq;
    copy_async(tile + swizzled(row, chunk), from + (inside ? first + row : 0) * stride + chunk * 8,
               inside);
  }
}

// Maximum and sum over the four lanes that hold a row.
__device__ float row_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffff, x, 2));
}

__device__ float row_sum(float x) {
  x += __shfl_xor_sync(0xffffffff, x, 1);
  return x + __shfl_xor_sync(0xffffffff, x, 2);
}

// --- kernel -------------------------------------------------------------------------------------

extern "C" __global__ void __launch_bounds__(THREADS)
flash_attention(const Scalar* q, const Scalar* k, const Scalar* v, Scalar* o, long long stride_qb,
                long long stride_qh, long long stride_qs, long long stride_kb, long long stride_kh,
                long long stride_ks, long long stride_vb, long long stride_vh, long long stride_vs,
                int heads, int group, int seq, float scale_log2) {
  extern __shared__ uint4 shared[];  // q: [BLOCK_M, HEAD_DIM]; k, v: [STAGES, BLOCK_N, HEAD_DIM]
  Scalar* q_tile = reinterpret_cast<Scalar*>(shared);
  Scalar* k_tiles = q_tile + BLOCK_M * HEAD_DIM;
  Scalar* v_tiles = k_tiles + STAGES * TILE;

  // Neighbouring blocks are tiles of one head, whose keys they share through L2. The last tiles
  // see the most keys and go first, so that no long one is left for the end.
  const int first = (gridDim.x - 1 - blockIdx.x) * BLOCK_M;
  const int batch = blockIdx.y / heads, head = blockIdx.y % heads;
  q += batch * stride_qb + head * stride_qh;
  k += batch * stride_kb + head / group * stride_kh;
  v += batch * stride_vb + head / group * stride_vh;
  o += static_cast<long long>(blockIdx.y) * seq * HEAD_DIM;

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int warp_row = first + warp * 16;
  const int seen = CAUSAL ? min(first + BLOCK_M, seq) : seq;
  const int tiles = (seen + BLOCK_N - 1) / BLOCK_N;

  copy_rows<BLOCK_M>(q_tile, q, stride_qs, first, seq);
  for (int t = 0; t < STAGES - 1; ++t) {
    if (t < tiles) {
      copy_rows<BLOCK_N>(k_tiles + t * TILE, k, stride_ks, t * BLOCK_N, seq);
      copy_rows<BLOCK_N>(v_tiles + t * TILE, v, stride_vs, t * BLOCK_N, seq);
    }
    copy_commit();  // of nothing too, so that groups count tiles; q comes with the first
  }

  unsigned query[HEAD_DIM / 16][4];
  float out[HEAD_DIM / 8][4] = {};
  float maximum[2] = {-CUDART_INF_F, -CUDART_INF_F};  // of rows lane / 4 and lane / 4 + 8
  float sum[2] = {0.0f, 0.0f};  // of this lane's columns

  for (int t = 0; t < tiles; ++t) {
    // Tile t has arrived for every thread, and every thread is done with tile t - 1, whose place
    // the next copies take.
    copy_wait<STAGES - 2>();
    __syncthreads();
    const int ahead = t + STAGES - 1;
    if (ahead < tiles) {
      const int place = ahead % STAGES * TILE;
      copy_rows<BLOCK_N>(k_tiles + place, k, stride_ks, ahead * BLOCK_N, seq);
      copy_rows<BLOCK_N>(v_tiles + place, v, stride_vs, ahead * BLOCK_N, seq);
    }
    copy_commit();
    if (t == 0) {
#pragma unroll
      for (int d = 0; d < HEAD_DIM / 16; ++d)
        load_matrices(query[d], q_tile + swizzled(warp * 16 + lane % 16, 2 * d + lane / 16));
    }
    const Scalar* k_tile = k_tiles + t % STAGES * TILE;
    const Scalar* v_tile = v_tiles + t % STAGES * TILE;

    float score[BLOCK_N / 8][4] = {};
#pragma unroll
    for (int d = 0; d < HEAD_DIM / 16; ++d) {
#pragma unroll
      for (int n = 0; n < BLOCK_N / 16; ++n) {
        unsigned keys[4];  // keys 0-7 and dimensions 0-7, 8-15; then keys 8-15
        load_matrices(keys, k_tile + swizzled(n * 16 + lane % 8 + lane / 16 * 8,
                                              2 * d + lane / 8 % 2));
        multiply_add(score[2 * n], query[d], keys[0], keys[1]);
        multiply_add(score[2 * n + 1], query[d], keys[2], keys[3]);
      }
    }

    const int start = t * BLOCK_N;
    if (start + BLOCK_N > seq || (CAUSAL && start + BLOCK_N > warp_row + 1)) {
#pragma unroll
      for (int n = 0; n < BLOCK_N / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int key = start + n * 8 + lane % 4 * 2 + i % 2;
          const int row = warp_row + lane / 4 + i / 2 * 8;
          if (key >= seq || (CAUSAL && key > row)) score[n][i] = -CUDART_INF_F;
        }
      }
    }

    // Key 0 is visible to every row, so that the maximum is finite from the first tile on.
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float largest = -CUDART_INF_F;
#pragma unroll
      for (int n = 0; n < BLOCK_N / 8; ++n)
        largest = fmaxf(largest, fmaxf(score[n][2 * half], score[n][2 * half + 1]));
      const float next = fmaxf(maximum[half], row_max(largest) * scale_log2);
      const float shrink = exp2_approx(maximum[half] - next);
      maximum[half] = next;
      sum[half] *= shrink;
#pragma unroll
      for (int n = 0; n < BLOCK_N / 8; ++n) {
#pragma unroll
        for (int i = 2 * half; i < 2 * half + 2; ++i) {
          score[n][i] = exp2_approx(fmaf(score[n][i], scale_log2, -next));
          sum[half] += score[n][i];
        }
      }
#pragma unroll
      for (int d = 0; d < HEAD_DIM / 8; ++d) {
        out[d][2 * half] *= shrink;
        out[d][2 * half + 1] *= shrink;
      }
    }

#pragma unroll
    for (int n = 0; n < BLOCK_N / 16; ++n) {
      const unsigned p[4] = {pack(score[2 * n][0], score[2 * n][1]),
                             pack(score[2 * n][2], score[2 * n][3]),
                             pack(score[2 * n + 1][0], score[2 * n + 1][1]),
                             pack(score[2 * n + 1][2], score[2 * n + 1][3])};
#pragma unroll
      for (int d = 0; d < HEAD_DIM / 16; ++d) {
        unsigned values[4];  // dimensions 0-7 and keys 0-7, 8-15; then dimensions 8-15
        load_matrices_transposed(values,
                                 v_tile + swizzled(n * 16 + lane % 16, 2 * d + lane / 16));
        multiply_add(out[2 * d], p, values[0], values[1]);
        multiply_add(out[2 * d + 1], p, values[2], values[3]);
      }
    }
  }

  // Out through shared memory, for whole 16-byte words: each warp has its 16 rows where its
  // queries were.
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float scale = 1.0f / row_sum(sum[half]);
#pragma unroll
    for (int d = 0; d < HEAD_DIM / 8; ++d)
      *reinterpret_cast<unsigned*>(q_tile + swizzled(warp * 16 + lane / 4 + half * 8, d) +
                                   lane % 4 * 2) =
          pack(out[d][2 * half] * scale, out[d][2 * half + 1] * scale);
  }
  __syncwarp();
  for (int i = lane; i < 16 * CHUNKS; i += 32) {
    const int row = i / CHUNKS, chunk = i % CHUNKS;
    if (warp_row + row < seq)
      *reinterpret_cast<uint4*>(o + static_cast<long long>(warp_row + row) * HEAD_DIM + chunk * 8) =
          *reinterpret_cast<const uint4*>(q_tile + swizzled(warp * 16 + row, chunk));
  }
}
"""


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    """Attention of q [B, H, S, D] over k and v [B, Hkv, S, D], bf16 or fp16, D a multiple of 64.

    Rows may be strided (slices of a packed projection) by multiples of 8 elements; the last
    dimension must be contiguous.
    """
    # Rows are copied 16 bytes at a time: a tensor that starts in the middle of them is moved first.
    q, k, v = (t if t.storage_offset() % 8 == 0 else t.clone() for t in (q, k, v))
    b, h, s, d = q.shape
    o = torch.empty(b, h, s, d, dtype=q.dtype, device=q.device)
    defines = {
        "BF16": int(q.dtype == torch.bfloat16),
        "CAUSAL": int(causal),
        "HEAD_DIM": d,
        "BLOCK_M": BLOCK_M,
        "BLOCK_N": BLOCK_N,
        "STAGES": STAGES,
    }
    cuda_kernel("flash_attention", SOURCE, defines=defines).launch(
        (triton.cdiv(s, BLOCK_M), b * h),
        BLOCK_M // 16 * 32,
        q, k, v, o,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3],
        h, h // k.shape[1], s,
        math.log2(math.e) / math.sqrt(d),
        shared=(BLOCK_M + 2 * STAGES * BLOCK_N) * d * q.element_size(),
    )  # fmt: skip
    return o
