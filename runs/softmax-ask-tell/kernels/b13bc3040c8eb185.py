"""Softmax of rows that land in shared memory: many small blocks, and clusters for long rows.

One program per row (from `triton_rows`), balanced by the hardware, and the cluster with one exchange of
(maximum, sum) per warp (from `cuda_cluster`). Neither holds the row in float32: one thread asks for the
block's share by cp.async.bulk, which costs no registers, so that several blocks per SM always have
loads under way; three sweeps over the 16-byte words in shared memory (maximum, sum, output) do the rest.
Rows of one warp stay in registers, as loaded.

Rows that start anywhere: the whole words are copied in bulk, the elements before and after them one by
one, with -inf around the row. Words of the grid of x are stored whole where y has the same misalignment.
"""

import torch
import triton
from kagent_sandbox.lang import cuda_kernel

PART = 32768  # bytes of a row in one block at most: a longer row gets a cluster
WORDS = 8  # of 16 bytes per thread: fewer threads per block mean more blocks, in different phases
TUNE = {"PART": [16384, 32768, 65536], "WORDS": [2, 4, 8]}

MAX_CLUSTER = 8  # the portable maximum
MAX_PART = 220 * 1024

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
__device__ __forceinline__ void from_float(float x, __nv_bfloat16& y) { y = __float2bfloat16_rn(x); }

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
__device__ __forceinline__ unsigned larger(unsigned a, const uint4& word) {
  return larger<T>(a, larger<T>(larger<T>(word.x, word.y), larger<T>(word.z, word.w)));
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
__device__ __forceinline__ float exponential(float x) { return ex2(x * LOG2E); }

// The sum of 2^(x log2 e - shift) over a word. `shift` is the rounded product maximum * log2 e; the fma
// rounds once, and what was rounded off in shift is one factor for the whole row: it cancels.
template <typename T>
__device__ __forceinline__ float word_sum(const uint4& word, float shift) {
  constexpr int WIDTH = 16 / sizeof(T);
  float v[WIDTH];
  unpack<T>(word, v);
#pragma unroll
  for (int k = 0; k < WIDTH; ++k) v[k] = ex2(fmaf(v[k], LOG2E, -shift));
#pragma unroll
  for (int d = WIDTH / 2; d > 0; d /= 2) {
#pragma unroll
    for (int k = 0; k < d; ++k) v[k] += v[k + d];
  }
  return v[0];
}

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
}
__device__ __forceinline__ void barrier_expect(unsigned long long* barrier, unsigned bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
               :: "r"(address(barrier)), "r"(bytes) : "memory");
}
__device__ __forceinline__ void barrier_wait(unsigned long long* barrier) {
  unsigned done = 0;
  while (!done)
    asm volatile(
        "{ .reg .pred p;\n"
        "  mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
        "  selp.u32 %0, 1, 0, p; }"
        : "=r"(done) : "r"(address(barrier)), "r"(0) : "memory");
}
__device__ __forceinline__ void bulk_load(void* to, const void* from, unsigned bytes,
                                          unsigned long long* barrier) {
  unsigned long long policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1], %2, [%3], %4;"
      :: "r"(address(to)), "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(address(barrier)),
         "l"(policy) : "memory");
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

// One row per cluster of blocks. The row lies on a grid of aligned words of x, from element `shift` of the
// grid to element `end`; this block has `part` of those words, from `first`.
template <typename T, int THREADS, int CLUSTER>
__global__ void __launch_bounds__(THREADS, THREADS < 64 ? 24 : 1536 / THREADS)
softmax_landed(const T* x, T* y, long long x_stride, int columns, int part) {
  constexpr int WIDTH = 16 / sizeof(T);
  constexpr int WARPS = THREADS / 32;
  extern __shared__ __align__(128) uint4 landing[];
  __shared__ __align__(8) unsigned long long landed;
  __shared__ __align__(8) unsigned long long gathered;
  __shared__ float2 partial[CLUSTER * WARPS];

  const int thread = threadIdx.x;
  const int lane = thread % 32;
  const int rank = CLUSTER > 1 ? cluster_rank() : 0;
  const long long row = blockIdx.x / CLUSTER;
  x += row * x_stride;
  y += row * columns;

  const int shift = static_cast<int>((reinterpret_cast<unsigned long long>(x) & 15) / sizeof(T));
  const int end = shift + columns;
  const int first = rank * part;
  const int last = min(first + part, (end + WIDTH - 1) / WIDTH);
  const int count = last - first;                     // may be negative: nothing to do
  T* elements = reinterpret_cast<T*>(landing);

  if (thread == 0) {
    barrier_init(&landed);
    barrier_init(&gathered);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    const int whole = max(first, shift > 0 ? 1 : 0);  // the words that are the row's alone
    const int bytes = max(min(last, end / WIDTH) - whole, 0) * 16;
    barrier_expect(&landed, bytes);
    if (bytes > 0)
      bulk_load(landing + (whole - first), x + (static_cast<long long>(whole) * WIDTH - shift), bytes,
                &landed);
    if constexpr (CLUSTER > 1) barrier_expect(&gathered, CLUSTER * WARPS * 8);
  }
  __syncwarp();
  if (thread < 2 * WIDTH) {                           // the first and the last word, if not whole
    const int word = thread < WIDTH ? 0 : end / WIDTH;
    const bool broken = thread < WIDTH ? shift > 0 : end % WIDTH > 0;
    if (broken && word >= first && word < last) {
      const int at = word * WIDTH + thread % WIDTH;
      T value;
      from_float(-CUDART_INF_F, value);
      if (at >= shift && at < end) value = x[at - shift];
      elements[at - first * WIDTH] = value;
    }
  }
  if constexpr (CLUSTER > 1) cluster_arrive();        // "my barrier exists": awaited before sending
  __syncthreads();
  barrier_wait(&landed);

  unsigned top = lowest<T>();
#pragma unroll 4
  for (int i = thread; i < count; i += THREADS) top = larger<T>(top, landing[i]);
  const float maximum = warp_max(largest<T>(top));

  // Relative to the warp's own maximum, so that one exchange serves maximum and sum.
  // A warp may hold nothing but -inf (masked or past the end): -inf - -inf would be NaN.
  const float log_max = maximum * LOG2E;
  const float own = maximum == -CUDART_INF_F ? 0.0f : log_max;
  float sum = 0.0f;
#pragma unroll 2
  for (int i = thread; i < count; i += THREADS) sum += word_sum<T>(landing[i], own);
  sum = warp_sum(sum);

  float row_log = log_max, row_sum = sum;
  if constexpr (CLUSTER * WARPS > 1) {
    const int warp = rank * WARPS + thread / 32;
    if constexpr (CLUSTER > 1) {
      cluster_wait();
      if (lane < CLUSTER) send(&partial[warp], lane, make_float2(log_max, sum), &gathered);
      __syncwarp();
      barrier_wait(&gathered);                        // all that will ever be sent here has arrived
    } else {
      if (lane == 0) partial[warp] = make_float2(log_max, sum);
      __syncthreads();
    }
    row_log = -CUDART_INF_F;
    row_sum = 0.0f;
    for (int i = lane; i < CLUSTER * WARPS; i += 32) row_log = fmaxf(row_log, partial[i].x);
    row_log = warp_max(row_log);
    for (int i = lane; i < CLUSTER * WARPS; i += 32)  // a row of -inf gives NaN, as it should
      row_sum += partial[i].y * ex2(partial[i].x - row_log);
    row_sum = warp_sum(row_sum);
  }
  const float scale = 1.0f / row_sum;

  if (shift == static_cast<int>((reinterpret_cast<unsigned long long>(y) & 15) / sizeof(T))) {
    uint4* out = reinterpret_cast<uint4*>(y - shift) + first;
#pragma unroll 2
    for (int i = thread; i < count; i += THREADS) {
      float v[WIDTH];
      unpack<T>(landing[i], v);
#pragma unroll
      for (int k = 0; k < WIDTH; ++k) v[k] = ex2(fmaf(v[k], LOG2E, -row_log)) * scale;
      const int at = (first + i) * WIDTH;
      if (at >= shift && at + WIDTH <= end) {
        __stcs(out + i, pack<T>(v));
      } else {
#pragma unroll
        for (int k = 0; k < WIDTH; ++k)
          if (at + k >= shift && at + k < end) from_float(v[k], y[at + k - shift]);
      }
    }
  } else {                                            // y is misaligned otherwise: narrow stores
    const int to = min(last * WIDTH, end);
    for (int at = max(first * WIDTH, shift) + thread; at < to; at += THREADS) {
      const float value = to_float(elements[at - first * WIDTH]);
      from_float(ex2(fmaf(value, LOG2E, -row_log)) * scale, y[at - shift]);
    }
  }
}

// A warp per row, all words aligned. x_stride is in elements.
template <typename T, int WORDS>
__global__ void __launch_bounds__(128, 12)
softmax_warp(const T* x, T* y, long long x_stride, int rows, int words) {
  constexpr int WIDTH = 16 / sizeof(T);
  const int lane = threadIdx.x % 32;
  const long long row = blockIdx.x * 4LL + threadIdx.x / 32;
  if (row >= rows) return;
  const uint4* from = reinterpret_cast<const uint4*>(x + row * x_stride) + lane;
  uint4* to = reinterpret_cast<uint4*>(y) + row * words + lane;

  uint4 w[WORDS];
#pragma unroll
  for (int i = 0; i < WORDS; ++i) {
    w[i] = make_uint4(lowest<T>(), lowest<T>(), lowest<T>(), lowest<T>());
    if (lane + i * 32 < words) w[i] = __ldcs(from + i * 32);
  }
  unsigned top = lowest<T>();
#pragma unroll
  for (int i = 0; i < WORDS; ++i) top = larger<T>(top, w[i]);
  const float maximum = warp_max(largest<T>(top));
  const float shift = maximum == -CUDART_INF_F ? 0.0f : maximum * LOG2E;
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < WORDS; ++i) sum += word_sum<T>(w[i], shift);
  const float scale = 1.0f / warp_sum(sum);           // a row of -inf: 0 * inf = NaN, as it should be
#pragma unroll
  for (int i = 0; i < WORDS; ++i) {
    if (lane + i * 32 < words) {
      float v[WIDTH];
      unpack<T>(w[i], v);
#pragma unroll
      for (int k = 0; k < WIDTH; ++k) v[k] = ex2(fmaf(v[k], LOG2E, -shift)) * scale;
      __stcs(to + i * 32, pack<T>(v));
    }
  }
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
    if rows == 0 or columns == 0:
        return y
    if columns > 1 and x.stride(1) != 1:
        x = x.contiguous()
    name = TYPES[x.dtype]
    stride = x.stride(0) if rows > 1 else 0
    width = 16 // x.element_size()
    aligned = all(n % width == 0 for n in (columns, stride, x.storage_offset()))
    # Of the grid of aligned words that a row touches, at most.
    words = triton.cdiv(columns + (0 if aligned else width - 1), width)

    if aligned and words <= 128:
        per_thread = triton.next_power_of_2(triton.cdiv(words, 32))
        kernel = cuda_kernel(f"softmax_warp<{name}, {per_thread}>", SOURCE)
        kernel.launch((triton.cdiv(rows, 4),), (128,), x, y, stride, rows, words)
        return y

    cluster = 1
    while cluster < MAX_CLUSTER and triton.cdiv(words, cluster) * 16 > PART:
        cluster *= 2
    part = triton.cdiv(words, cluster)
    if part * 16 > MAX_PART:
        narrow = width if aligned else 1
        kernel = cuda_kernel(f"softmax_endless<{name}, {narrow}, 1024>", SOURCE)
        kernel.launch((rows,), (1024,), x, y, stride, columns)
        return y

    threads = triton.next_power_of_2(triton.cdiv(part, WORDS))
    threads = max(32, min(1024, threads))
    kernel = cuda_kernel(f"softmax_landed<{name}, {threads}, {cluster}>", SOURCE)
    kernel.launch(
        (rows * cluster,),
        (threads,),
        x,
        y,
        stride,
        columns,
        part,
        shared=part * 16,
        cluster=(cluster,) if cluster > 1 else None,
    )
    return y
