"""Softmax from packed registers: every row is read once and written once, in words of 16 bytes.

A thread keeps up to 8 words of its row as they were loaded (8 elements of bf16 in 4 registers),
which halves the registers per byte in flight: in 64 registers a thread, an SM holds 128 KiB of
rows. The maximum is taken on packed pairs. The exponentials are computed for the sum, and again for
the output; float32 keeps them in place instead. One warp has a row up to 256 words, then a block of
up to 1024 threads. Longer rows of whole words lie in shared memory, too, which bulk copies fill: a
row of 256 KiB takes a cluster of two blocks that exchange (maximum, sum) of their warps. Clusters
of more would leave SMs idle, as few parts of the chip have a number of SMs that 4 divides.

Rows that start anywhere have up to WIDTH - 1 elements before the first whole word and as many after
the last: each is one extra element of one thread. Where x and y are misaligned differently, only
the stores are narrow.

Long rows are looked ahead for: behind its own loads, a block has the L2 fetch its part of a later
row, in contiguous pieces of up to 8 KiB. The stream of reads from memory thus goes on through the
reductions, exchanges and stores of the blocks, whose own loads then hit the L2. It costs neither
registers nor shared memory, nor the balance of the hardware's scheduler, which starts blocks in the
order of rows. On an H200, 6 to 7 MiB between a row and the one that is fetched are best; with more,
the L2 loses rows before they are used. Loads and stores have no hint for the caches there: with
"evict first" everything takes 2 to 4 % longer.
"""

import torch
import triton
from kagent_sandbox.lang import cuda_kernel

WORDS = 8  # of 16 bytes per thread at most, in rows shorter than LONG
LONG = 4096  # words from which on a thread holds LONG_WORDS of them, in 80 registers
LONG_WORDS = 16
THREADS = 256  # per block at most, with 8 words each (half as many with 16)
HELD_THREADS = 512  # per block where rows lie in shared memory, too; two blocks share an SM
HELD_WORDS = 14  # of such a thread in shared memory, at most
STREAM = 1  # 1: stores that are the first to leave the L2; 0: written back when their turn comes
AHEAD = 3  # MiB between a row and the one that its block has fetched into the L2; 0: none
AHEAD_FROM = 2048  # words of a row from which on that is done
TUNE = {
    "AHEAD": [0, 3, 6.5, 8],
    "LONG": [2048, 4096, 65536],
    "THREADS": [256, 512, 1024],
    "STREAM": [0, 1],
}

MAX_CLUSTER = 8  # the portable maximum, on Hopper

SOURCE = r"""
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <math_constants.h>

#define LOG2E 1.4426950408889634f

template <typename A, typename B> struct Same { static constexpr bool value = false; };
template <typename A> struct Same<A, A> { static constexpr bool value = true; };

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ void from_float(float x, float& y) { y = x; }
__device__ __forceinline__ void from_float(float x, __half& y) { y = __float2half_rn(x); }
__device__ __forceinline__ void from_float(float x, __nv_bfloat16& y) {
  y = __float2bfloat16_rn(x);
}

template <typename T>
__device__ __forceinline__ void unpack(const uint4& word, float* v) {
  const unsigned u[4] = {word.x, word.y, word.z, word.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (sizeof(T) == 4) {
      v[i] = __uint_as_float(u[i]);
    } else if constexpr (Same<T, __nv_bfloat16>::value) {
      v[2 * i] = __uint_as_float(u[i] << 16);
      v[2 * i + 1] = __uint_as_float(u[i] & 0xffff0000u);
    } else {
      const float2 f = __half22float2(*reinterpret_cast<const __half2*>(&u[i]));
      v[2 * i] = f.x;
      v[2 * i + 1] = f.y;
    }
  }
}

template <typename T>
__device__ __forceinline__ uint4 pack(const float* v) {
  unsigned u[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (sizeof(T) == 4)
      u[i] = __float_as_uint(v[i]);
    else if constexpr (Same<T, __nv_bfloat16>::value)
      asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(u[i]) : "f"(v[2 * i + 1]), "f"(v[2 * i]));
    else
      asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(u[i]) : "f"(v[2 * i + 1]), "f"(v[2 * i]));
  }
  return make_uint4(u[0], u[1], u[2], u[3]);
}

// 4 bytes of -inf.
template <typename T>
__device__ __forceinline__ unsigned lowest() {
  if constexpr (sizeof(T) == 4)
    return 0xff800000u;
  else if constexpr (Same<T, __nv_bfloat16>::value)
    return 0xff80ff80u;
  else
    return 0xfc00fc00u;
}

// The maximum of 4 bytes of elements, each with its counterpart.
template <typename T>
__device__ __forceinline__ unsigned larger(unsigned a, unsigned b) {
  unsigned c;
  if constexpr (sizeof(T) == 4)
    c = __float_as_uint(fmaxf(__uint_as_float(a), __uint_as_float(b)));
  else if constexpr (Same<T, __nv_bfloat16>::value)
    asm("max.bf16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
  else
    asm("max.f16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
  return c;
}

template <typename T>
__device__ __forceinline__ float largest(unsigned a) {
  if constexpr (sizeof(T) == 4) {
    return __uint_as_float(a);
  } else if constexpr (Same<T, __nv_bfloat16>::value) {
    return fmaxf(__uint_as_float(a << 16), __uint_as_float(a & 0xffff0000u));
  } else {
    const float2 f = __half22float2(*reinterpret_cast<const __half2*>(&a));
    return fmaxf(f.x, f.y);
  }
}

__device__ __forceinline__ float ex2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// exp(x). The subtraction of the maximum has happened: one multiply-add for both is less exact, and
// the product with a large finite number overflows.
__device__ __forceinline__ float exponential(float x) { return ex2(x * LOG2E); }

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
  for (int d = 16; d > 0; d /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, d));
  return x;
}

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int d = 16; d > 0; d /= 2) x += __shfl_xor_sync(0xffffffff, x, d);
  return x;
}

__device__ __forceinline__ unsigned address(const void* p) {
  return static_cast<unsigned>(__cvta_generic_to_shared(p));
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
  __syncwarp();
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
__device__ __forceinline__ void barrier_init(unsigned long long* barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(address(barrier)) : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void barrier_expect(unsigned long long* barrier, unsigned bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
               :: "r"(address(barrier)), "r"(bytes) : "memory");
}
__device__ __forceinline__ void barrier_wait(unsigned long long* barrier, unsigned parity) {
  unsigned done = 0;
  while (!done)
    asm volatile(
        "{ .reg .pred p;\n"
        "  mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
        "  selp.u32 %0, 1, 0, p; }"
        : "=r"(done) : "r"(address(barrier)), "r"(parity) : "memory");
}
// To the same place in block `rank` of the cluster, counted by that block's barrier.
__device__ __forceinline__ void send(float2* local, unsigned rank, float2 value,
                                     unsigned long long* barrier) {
  asm volatile(
      "{ .reg .b32 to, counter;\n"
      "  mapa.shared::cluster.u32 to, %0, %4;\n"
      "  mapa.shared::cluster.u32 counter, %1, %4;\n"
      "  st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [to], {%2, %3}, [counter]; }"
      :: "r"(address(local)), "r"(address(barrier)), "f"(value.x), "f"(value.y), "r"(rank)
      : "memory");
}

// Both ends 16-byte aligned, a multiple of 16 bytes.
__device__ __forceinline__ void bulk_load(void* to, const void* from, unsigned bytes,
                                          unsigned long long* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
      :: "r"(address(to)), "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(address(barrier))
      : "memory");
}

// Fetch into the L2 only: 16-byte aligned, a multiple of 16 bytes, nothing to wait for.
__device__ __forceinline__ void prefetch(const void* p, unsigned bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;"
               :: "l"(__cvta_generic_to_global(p)), "r"(bytes));
}

// The row's maximum and sum of exponentials relative to it, of those of its warps, which `partial`
// takes. `gathered` counts what blocks of a cluster send.
template <int CLUSTER, int WARPS>
__device__ __forceinline__ float2 row_of(float2 mine, float2* partial, int rank, int warp,
                                         unsigned long long* gathered) {
  const int lane = threadIdx.x % 32;
  if constexpr (CLUSTER > 1) {
    if (lane < CLUSTER) send(&partial[rank * WARPS + warp], lane, mine, gathered);
    __syncwarp();
    barrier_wait(gathered, 0);                        // all that will ever be sent here has arrived
  } else {
    if (lane == 0) partial[warp] = mine;
    __syncthreads();
  }
  float maximum = -CUDART_INF_F, sum = 0.0f;
  for (int i = lane; i < CLUSTER * WARPS; i += 32) maximum = fmaxf(maximum, partial[i].x);
  maximum = warp_max(maximum);
  for (int i = lane; i < CLUSTER * WARPS; i += 32)    // a row of -inf gives NaN, as it should
    sum += partial[i].y * exponential(partial[i].x - maximum);
  return make_float2(maximum, warp_sum(sum));
}

// THREADS threads of each of CLUSTER blocks share a row; a block has its part of ROWS rows.
// EDGES: rows may start anywhere, and end anywhere. ahead: the rows between a row and the one that
// is fetched into the L2 meanwhile (0: none). Not below `skip`: its block runs by then.
template <typename T, int WORDS, int THREADS, int ROWS, int CLUSTER, bool EDGES, bool STREAM>
__global__ void __launch_bounds__(
    THREADS * ROWS,
    (WORDS > 8 ? (EDGES || THREADS * ROWS > 256 ? 512 : 768) : WORDS > 4 ? 1024 : 1536) /
        (THREADS * ROWS))
softmax_words(const T* x, T* y, long long x_stride, int rows, int columns, int ahead, int skip) {
  constexpr int WIDTH = 16 / sizeof(T);
  constexpr int WARPS = THREADS / 32;
  constexpr int STEP = CLUSTER * THREADS;
  constexpr bool IN_PLACE = sizeof(T) == 4;           // the exponential is as small as the element
  __shared__ __align__(8) unsigned long long gathered;
  __shared__ float2 partial[ROWS][CLUSTER * WARPS];

  const int lane = threadIdx.x % 32;
  const int thread = threadIdx.x % THREADS;
  const int slot = threadIdx.x / THREADS;
  const int rank = CLUSTER > 1 ? cluster_rank() : 0;
  const long long row = static_cast<long long>(blockIdx.x / CLUSTER) * ROWS + slot;
  if constexpr (CLUSTER > 1) {
    if (threadIdx.x == 0) {
      barrier_init(&gathered);
      barrier_expect(&gathered, ROWS * CLUSTER * WARPS * 8);
    }
    cluster_arrive();                                 // "my barrier exists": awaited before sending
  }

  // The row: `head` elements, `words` whole words of x, `tail` elements.
  x += row * x_stride;
  y += row * columns;
  int head = 0, words = 0, tail = 0;
  if (row < rows) {                                   // spare rows take part in barriers only
    if constexpr (EDGES) {
      const int shift =
          static_cast<int>((reinterpret_cast<unsigned long long>(x) & 15) / sizeof(T));
      head = min((WIDTH - shift) % WIDTH, columns);
      words = (columns - head) / WIDTH;
      tail = (columns - head) % WIDTH;
    } else {
      words = columns / WIDTH;
    }
  }

  // All loads are issued before the first use. This thread has the words first, first + STEP, ...
  const int first = rank * THREADS + thread;
  const uint4* from = reinterpret_cast<const uint4*>(x + head);
  uint4 w[WORDS];
#pragma unroll
  for (int i = 0; i < WORDS; ++i) {
    w[i] = make_uint4(lowest<T>(), lowest<T>(), lowest<T>(), lowest<T>());
    if (first + i * STEP < words) w[i] = __ldg(from + first + i * STEP);
  }
  int edge = -1;
  float extra = -CUDART_INF_F;
  if constexpr (EDGES) {
    if (rank == 0) {
      if (thread < head)
        edge = thread;
      else if (thread >= 16 && thread - 16 < tail)    // head < 16
        edge = columns - tail + thread - 16;
      if (edge >= 0) extra = to_float(x[edge]);
    }
  }

#if __CUDA_ARCH__ >= 900
  if (ahead > 0 && lane == 0) {                       // this warp's piece of a later row
    const long long later = row + ahead;
    if (later >= skip && later < rows) {
      constexpr int PARTS = CLUSTER * WARPS;
      const T* start = x + ahead * x_stride;          // x is at this row
      int whole = columns / WIDTH;
      if constexpr (EDGES) {
        const int shift =
            static_cast<int>((reinterpret_cast<unsigned long long>(start) & 15) / sizeof(T));
        const int skipped = min((WIDTH - shift) % WIDTH, columns);
        start += skipped;
        whole = (columns - skipped) / WIDTH;
      }
      const int piece = ((whole + PARTS - 1) / PARTS + 7) & ~7;
      const int begin = (rank * WARPS + thread / 32) * piece;
      const int count = min(piece, whole - begin);
      if (count > 0) prefetch(start + static_cast<long long>(begin) * WIDTH, count * 16u);
    }
  }
  __syncwarp();
#endif

  unsigned top = lowest<T>();
#pragma unroll
  for (int i = 0; i < WORDS; ++i)
    top = larger<T>(top, larger<T>(larger<T>(w[i].x, w[i].y), larger<T>(w[i].z, w[i].w)));
  const float maximum = warp_max(fmaxf(largest<T>(top), extra));

  // Exponentials relative to the warp's own maximum, so that one exchange serves maximum and sum. A
  // warp may hold nothing but -inf: -inf - -inf would be NaN.
  const float base = maximum == -CUDART_INF_F ? 0.0f : maximum;
  float even = 0.0f, odd = 0.0f;
#pragma unroll
  for (int i = 0; i < WORDS; ++i) {
    float v[WIDTH];
    unpack<T>(w[i], v);
#pragma unroll
    for (int k = 0; k < WIDTH; k += 2) {
      v[k] = exponential(v[k] - base);
      v[k + 1] = exponential(v[k + 1] - base);
      even += v[k];
      odd += v[k + 1];
    }
    if constexpr (IN_PLACE) w[i] = pack<T>(v);
  }
  if constexpr (EDGES) even += exponential(extra - base);
  const float sum = warp_sum(even + odd);

  float2 of_row = make_float2(maximum, sum);
  if constexpr (CLUSTER * WARPS > 1) {
    if constexpr (CLUSTER > 1) cluster_wait();
    of_row = row_of<CLUSTER, WARPS>(of_row, partial[slot], rank, thread / 32, &gathered);
  }
  const float row_maximum = of_row.x, row_sum = of_row.y;
  const float scale = (IN_PLACE ? exponential(maximum - row_maximum) : 1.0f) / row_sum;

  T* out = y + head;
  const bool wide = !EDGES || (reinterpret_cast<unsigned long long>(out) & 15) == 0;
#pragma unroll
  for (int i = 0; i < WORDS; ++i) {
    const int at = first + i * STEP;
    if (at < words) {
      float v[WIDTH];
      unpack<T>(w[i], v);
#pragma unroll
      for (int k = 0; k < WIDTH; ++k)
        v[k] = (IN_PLACE ? v[k] : exponential(v[k] - row_maximum)) * scale;
      if (wide) {
        if constexpr (STREAM)
          __stcs(reinterpret_cast<uint4*>(out) + at, pack<T>(v));
        else
          reinterpret_cast<uint4*>(out)[at] = pack<T>(v);
      } else {
#pragma unroll
        for (int k = 0; k < WIDTH; ++k) from_float(v[k], out[at * WIDTH + k]);
      }
    }
  }
  if constexpr (EDGES) {
    if (edge >= 0) from_float(exponential(extra - row_maximum) / row_sum, y[edge]);
  }
}

// THREADS threads of each of CLUSTER blocks share a row of whole words. A block has a contiguous
// part of it: WORDS words of each thread in registers, the others in shared memory, `held`.
template <typename T, int WORDS, int THREADS, int CLUSTER, bool STREAM>
__global__ void __launch_bounds__(THREADS, 1024 / THREADS)
softmax_held(const T* x, T* y, long long x_stride, int rows, int columns, int ahead, int skip) {
#if __CUDA_ARCH__ >= 900
  constexpr int WIDTH = 16 / sizeof(T);
  constexpr int WARPS = THREADS / 32;
  constexpr int KEPT = WORDS * THREADS;
  constexpr int AT_ONCE = 1024;                       // words of a bulk copy
  constexpr bool IN_PLACE = sizeof(T) == 4;
  extern __shared__ __align__(128) uint4 held[];
  __shared__ __align__(8) unsigned long long gathered, arrived;
  __shared__ float2 partial[CLUSTER * WARPS];

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int rank = CLUSTER > 1 ? cluster_rank() : 0;
  const long long row = blockIdx.x / CLUSTER;
  const int row_words = columns / WIDTH;
  const int part = (row_words + CLUSTER - 1) / CLUSTER;
  const int begin = rank * part;
  const int words = max(0, min(part, row_words - begin));
  const int held_words = max(0, words - KEPT);
  const uint4* from = reinterpret_cast<const uint4*>(x + row * x_stride) + begin;
  uint4* out = reinterpret_cast<uint4*>(y + row * columns) + begin;

  if (threadIdx.x == 0) {
    if constexpr (CLUSTER > 1) {
      barrier_init(&gathered);
      barrier_expect(&gathered, CLUSTER * WARPS * 8);
    }
    barrier_init(&arrived);
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // bulk copies see the barrier
    barrier_expect(&arrived, held_words * 16);
    for (int i = 0; i < held_words; i += AT_ONCE)
      bulk_load(held + i, from + KEPT + i, min(AT_ONCE, held_words - i) * 16, &arrived);
  }
  __syncwarp();
  uint4 w[WORDS];
#pragma unroll
  for (int i = 0; i < WORDS; ++i) {
    const int at = threadIdx.x + i * THREADS;
    w[i] = make_uint4(lowest<T>(), lowest<T>(), lowest<T>(), lowest<T>());
    if (at < words) w[i] = __ldg(from + at);
  }
  if (ahead > 0 && lane == 0) {                       // this warp's piece of a later row
    const long long later = row + ahead;
    if (later >= skip && later < rows) {
      const int piece = ((words + WARPS - 1) / WARPS + 7) & ~7;
      const int count = min(piece, words - warp * piece);
      const uint4* start = reinterpret_cast<const uint4*>(x + later * x_stride) + begin;
      if (count > 0) prefetch(start + warp * piece, count * 16u);
    }
  }
  __syncwarp();
  // Barriers are initialised, here and in the other blocks.
  if constexpr (CLUSTER > 1) {
    cluster_arrive();
    cluster_wait();
  } else {
    __syncthreads();
  }

  unsigned top = lowest<T>();
  auto raise = [&](const uint4& q) {
    top = larger<T>(top, larger<T>(larger<T>(q.x, q.y), larger<T>(q.z, q.w)));
  };
#pragma unroll
  for (int i = 0; i < WORDS; ++i) raise(w[i]);
  barrier_wait(&arrived, 0);
#pragma unroll 4
  for (int i = threadIdx.x; i < held_words; i += THREADS) raise(held[i]);
  const float maximum = warp_max(largest<T>(top));

  const float base = maximum == -CUDART_INF_F ? 0.0f : maximum;
  float even = 0.0f, odd = 0.0f;
  auto add = [&](uint4& q) {
    float v[WIDTH];
    unpack<T>(q, v);
#pragma unroll
    for (int k = 0; k < WIDTH; k += 2) {
      v[k] = exponential(v[k] - base);
      v[k + 1] = exponential(v[k + 1] - base);
      even += v[k];
      odd += v[k + 1];
    }
    if constexpr (IN_PLACE) q = pack<T>(v);
  };
#pragma unroll
  for (int i = 0; i < WORDS; ++i) add(w[i]);
#pragma unroll 2
  for (int i = threadIdx.x; i < held_words; i += THREADS) add(held[i]);
  const float2 mine = make_float2(maximum, warp_sum(even + odd));
  const float2 of_row = row_of<CLUSTER, WARPS>(mine, partial, rank, warp, &gathered);

  const float scale = (IN_PLACE ? exponential(maximum - of_row.x) : 1.0f) / of_row.y;
  auto put = [&](int at, const uint4& q) {
    float v[WIDTH];
    unpack<T>(q, v);
#pragma unroll
    for (int k = 0; k < WIDTH; ++k)
      v[k] = (IN_PLACE ? v[k] : exponential(v[k] - of_row.x)) * scale;
    if constexpr (STREAM)
      __stcs(out + at, pack<T>(v));
    else
      out[at] = pack<T>(v);
  };
#pragma unroll
  for (int i = 0; i < WORDS; ++i) {
    const int at = threadIdx.x + i * THREADS;
    if (at < words) put(at, w[i]);
  }
#pragma unroll 2
  for (int i = threadIdx.x; i < held_words; i += THREADS) put(KEPT + i, held[i]);
#endif
}

template <typename T, int WIDTH>
struct alignas(sizeof(T) * WIDTH) Pack { T at[WIDTH]; };

// One block per row of any length: a running maximum and sum per thread, then a second read.
template <typename T, int WIDTH, int THREADS>
__global__ void __launch_bounds__(THREADS)
softmax_endless(const T* x, T* y, long long x_stride, int columns) {
  constexpr int WARPS = THREADS / 32;
  __shared__ float2 partial[WARPS];
  x += blockIdx.x * x_stride;
  y += static_cast<long long>(blockIdx.x) * columns;

  const float least = -3.402823466e38f;               // finite: -inf - -inf would be NaN
  float maximum = least, sum = 0.0f;
  for (long long c = threadIdx.x * WIDTH; c < columns; c += THREADS * WIDTH) {
    const auto word = *reinterpret_cast<const Pack<T, WIDTH>*>(x + c);
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) {
      const float value = to_float(word.at[i]);
      const float factor = exponential(-fabsf(value - maximum));
      sum = value > maximum ? sum * factor + 1.0f : sum + factor;
      maximum = fmaxf(maximum, value);
    }
  }
  const float warp_maximum = warp_max(maximum);
  sum = warp_sum(sum * exponential(maximum - warp_maximum));
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = make_float2(warp_maximum, sum);
  __syncthreads();
  float row_maximum = least, row_sum = 0.0f;
  for (int i = 0; i < WARPS; ++i) row_maximum = fmaxf(row_maximum, partial[i].x);
  for (int i = 0; i < WARPS; ++i) row_sum += partial[i].y * exponential(partial[i].x - row_maximum);
  const float scale = 1.0f / row_sum;

  for (long long c = threadIdx.x * WIDTH; c < columns; c += THREADS * WIDTH) {
    auto word = *reinterpret_cast<const Pack<T, WIDTH>*>(x + c);
#pragma unroll
    for (int i = 0; i < WIDTH; ++i)
      from_float(exponential(to_float(word.at[i]) - row_maximum) * scale, word.at[i]);
    *reinterpret_cast<Pack<T, WIDTH>*>(y + c) = word;
  }
}
"""

TYPES = {torch.float32: "float", torch.float16: "__half", torch.bfloat16: "__nv_bfloat16"}


def softmax(x: torch.Tensor) -> torch.Tensor:
    rows, columns = x.shape
    y = torch.empty((rows, columns), dtype=x.dtype, device=x.device)
    name = TYPES[x.dtype]
    stride = x.stride(0) if rows > 1 else 0
    width = 16 // x.element_size()
    aligned = all(n % width == 0 for n in (columns, stride, x.storage_offset()))
    words = triton.cdiv(columns, width)

    hopper = torch.cuda.get_device_capability(x.device)[0] >= 9
    sms = torch.cuda.get_device_properties(x.device).multi_processor_count
    stream = "true" if STREAM else "false"

    def fetched(resident: int) -> tuple[int, int]:
        """Rows ahead, and the first row that none of those that start at once fetches."""
        if not hopper or words < AHEAD_FROM:
            return 0, resident
        return int(AHEAD * 1024 * 1024) // (words * 16), resident

    if hopper and aligned and words > WORDS * THREADS and words < LONG:
        kept, cluster = WORDS * HELD_THREADS, 1
        while triton.cdiv(words, cluster) > kept + HELD_WORDS * HELD_THREADS:
            cluster *= 2
        if cluster <= MAX_CLUSTER:
            shape = f"{WORDS}, {HELD_THREADS}, {cluster}, {stream}"
            kernel = cuda_kernel(f"softmax_held<{name}, {shape}>", SOURCE)
            kernel.launch(
                (rows * cluster,),
                (HELD_THREADS,),
                x,
                y,
                stride,
                rows,
                columns,
                *fetched(sms * (1024 // HELD_THREADS) // cluster),
                shared=max(0, triton.cdiv(words, cluster) - kept) * 16,
                cluster=(cluster,) if cluster > 1 else None,
            )
            return y

    per_thread = triton.next_power_of_2(triton.cdiv(words, 32))
    threads, cluster = 32, 1
    if per_thread > WORDS:
        per_thread = WORDS if words < LONG else LONG_WORDS
        most = THREADS * min(per_thread, 8)  # words of a block
        while hopper and cluster < MAX_CLUSTER and triton.cdiv(words, cluster) > most:
            cluster *= 2
        threads = 32 * triton.cdiv(words, 32 * per_thread * cluster)
        if threads > (1024 if per_thread <= 8 else 512):  # 512 with 16 words have 128 registers
            per_thread = 8
            threads = 32 * triton.cdiv(words, 32 * per_thread * cluster)
    if threads > 1024:
        narrow = width if aligned else 1
        kernel = cuda_kernel(f"softmax_endless<{name}, {narrow}, 512>", SOURCE)
        kernel.launch((rows,), (512,), x, y, stride, columns)
        return y

    together = max(1, 128 // threads)
    block = threads * together
    if per_thread > 8:
        resident = (512 if not aligned or block > 256 else 768) // block
    else:
        resident = (1024 if per_thread > 4 else 1536) // block
    edges = "false" if aligned else "true"
    shape = f"{per_thread}, {threads}, {together}, {cluster}, {edges}, {stream}"
    kernel = cuda_kernel(f"softmax_words<{name}, {shape}>", SOURCE)
    kernel.launch(
        (triton.cdiv(rows, together) * cluster,),
        (block,),
        x,
        y,
        stride,
        rows,
        columns,
        *fetched(sms * max(1, resident) * together // cluster),
        cluster=(cluster,) if cluster > 1 else None,
    )
    return y
