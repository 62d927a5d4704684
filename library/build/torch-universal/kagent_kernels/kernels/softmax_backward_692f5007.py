"""Gradient of softmax from packed registers: both tensors are read once, in words of 16 bytes.

A thread keeps its words of both as they were loaded (8 elements of bf16 in 4 registers), until the
sum of grad · y over the row is known. One warp has a row up to 128 words, then a block, then a
cluster of blocks that exchanges the sums of its warps. A row of 65536 in bf16, 256 KiB of both
tensors, thus takes four blocks of 256 threads, where one block would have to read it again.

Rows that do not all start at multiples of 16 bytes come in words of 8, 4 or 2 bytes, more of them
for each thread. Only rows that are too long for a cluster are swept twice.

Loads have no hint for the caches: with "evict first" everything takes 4 to 8 % longer on an H200.
"""

import math

import torch
import triton
from .._runtime import cuda_kernel

LONG = 512  # words of a row from which on a thread holds 8 of each tensor, in 80 registers; else 4
THREADS = 512  # per block at most, where a cluster can share the row
STREAM_STORES = False  # whether the L2 may forget at once what was written
TUNE = {
    "LONG": [512, 1024, 2048],
    "THREADS": [128, 256, 512],
    "STREAM_STORES": [True, False],
}

MAX_CLUSTER = 8  # the portable maximum, on Hopper

SOURCE = r"""
#include <cuda_bf16.h>
#include <cuda_fp16.h>

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

template <typename Word>
__device__ __forceinline__ void store(Word* to, Word word) {
  if constexpr (STREAM_STORES)
    __stcs(to, word);
  else
    *to = word;
}

// The elements of a word of 2, 4, 8 or 16 bytes, and back.
template <typename T>
__device__ __forceinline__ void unpack(unsigned short word, float* v) {
  if constexpr (Same<T, __nv_bfloat16>::value)
    v[0] = __uint_as_float(static_cast<unsigned>(word) << 16);
  else
    v[0] = __half2float(__ushort_as_half(word));
}
template <typename T>
__device__ __forceinline__ void unpack(unsigned word, float* v) {
  if constexpr (sizeof(T) == 4) {
    v[0] = __uint_as_float(word);
  } else if constexpr (Same<T, __nv_bfloat16>::value) {
    v[0] = __uint_as_float(word << 16);
    v[1] = __uint_as_float(word & 0xffff0000u);
  } else {
    const float2 f = __half22float2(*reinterpret_cast<const __half2*>(&word));
    v[0] = f.x;
    v[1] = f.y;
  }
}
template <typename T>
__device__ __forceinline__ void unpack(const uint2& word, float* v) {
  unpack<T>(word.x, v);
  unpack<T>(word.y, v + 4 / sizeof(T));
}
template <typename T>
__device__ __forceinline__ void unpack(const uint4& word, float* v) {
  unpack<T>(make_uint2(word.x, word.y), v);
  unpack<T>(make_uint2(word.z, word.w), v + 8 / sizeof(T));
}

template <typename T>
__device__ __forceinline__ void pack(const float* v, unsigned short& word) {
  if constexpr (Same<T, __nv_bfloat16>::value)
    word = __bfloat16_as_ushort(__float2bfloat16_rn(v[0]));
  else
    word = __half_as_ushort(__float2half_rn(v[0]));
}
template <typename T>
__device__ __forceinline__ void pack(const float* v, unsigned& word) {
  if constexpr (sizeof(T) == 4)
    word = __float_as_uint(v[0]);
  else if constexpr (Same<T, __nv_bfloat16>::value)
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(v[1]), "f"(v[0]));
  else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(v[1]), "f"(v[0]));
}
template <typename T>
__device__ __forceinline__ void pack(const float* v, uint2& word) {
  pack<T>(v, word.x);
  pack<T>(v + 4 / sizeof(T), word.y);
}
template <typename T>
__device__ __forceinline__ void pack(const float* v, uint4& word) {
  pack<T>(v, word.x);
  pack<T>(v + 4 / sizeof(T), word.y);
  pack<T>(v + 8 / sizeof(T), word.z);
  pack<T>(v + 12 / sizeof(T), word.w);
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
__device__ __forceinline__ void send(float* local, unsigned rank, float value,
                                     unsigned long long* barrier) {
  asm volatile(
      "{ .reg .b32 to, counter;\n"
      "  mapa.shared::cluster.u32 to, %0, %3;\n"
      "  mapa.shared::cluster.u32 counter, %1, %3;\n"
      "  st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [to], %2, [counter]; }"
      :: "r"(address(local)), "r"(address(barrier)), "r"(__float_as_uint(value)), "r"(rank)
      : "memory");
}

__device__ __forceinline__ void change(unsigned& word, unsigned bits) { word ^= bits; }
__device__ __forceinline__ void change(uint2& word, unsigned bits) {
  word = make_uint2(word.x ^ bits, word.y ^ bits);
}
__device__ __forceinline__ void change(uint4& word, unsigned bits) {
  word = make_uint4(word.x ^ bits, word.y ^ bits, word.z ^ bits, word.w ^ bits);
}

// Asked for each time: the compiler would keep them.
__device__ __forceinline__ unsigned thread_now() {
  unsigned thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}
__device__ __forceinline__ unsigned block_now() {
  unsigned block;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(block));
  return block;
}

// Of this thread: its row, and the first of its words in it.
struct Place { long long row; int first; };
template <int THREADS, int ROWS, int CLUSTER>
__device__ __forceinline__ Place place() {
  const unsigned thread = thread_now(), block = block_now();
  const int rank = CLUSTER > 1 ? cluster_rank() : 0;
  const long long row = static_cast<long long>(block / CLUSTER) * ROWS + thread / THREADS;
  return {row, rank * THREADS + static_cast<int>(thread % THREADS)};
}

// THREADS threads of each of CLUSTER blocks share a row; a block has its part of ROWS rows.
template <typename T, typename Word, int WORDS, int THREADS, int ROWS, int CLUSTER>
__global__ void __launch_bounds__(
    THREADS * ROWS,
    (WORDS * sizeof(Word) > 64 ? (THREADS * ROWS > 256 ? 512 : 768) : 1024) / (THREADS * ROWS))
softmax_backward_words(const T* grad, const T* y, T* dx, long long grad_stride, long long y_stride,
                       int rows, int columns, unsigned zero) {
  constexpr int WIDTH = sizeof(Word) / sizeof(T);
  constexpr int WARPS = THREADS / 32;
  constexpr int STEP = CLUSTER * THREADS;
  __shared__ __align__(8) unsigned long long gathered;
  __shared__ float partial[ROWS][CLUSTER * WARPS];

  const int lane = threadIdx.x % 32;
  const int thread = threadIdx.x % THREADS;
  const int slot = threadIdx.x / THREADS;
  const int rank = CLUSTER > 1 ? cluster_rank() : 0;
  const Place at = place<THREADS, ROWS, CLUSTER>();
  const long long row = at.row;
  if constexpr (CLUSTER > 1) {
    if (threadIdx.x == 0) barrier_init(&gathered);
    cluster_arrive();                                 // "my barrier exists": awaited before sending
  }
  const int words = row < rows ? columns / WIDTH : 0;  // spare rows take part in barriers only
  grad += row * grad_stride;
  y += row * y_stride;

  // All loads are issued before the first use. A thread has every STEP-th word from its first on.
  const int left = words - at.first;
  grad += at.first * WIDTH;
  y += at.first * WIDTH;
  Word g[WORDS], p[WORDS];
#pragma unroll
  for (int i = 0; i < WORDS; ++i) {
    g[i] = p[i] = Word{};
    if (i * STEP < left) {
      g[i] = __ldg(reinterpret_cast<const Word*>(grad) + i * STEP);
      p[i] = __ldg(reinterpret_cast<const Word*>(y) + i * STEP);
    }
  }

  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < WORDS; ++i) {
    float a[WIDTH], b[WIDTH], part = 0.0f;
    unpack<T>(g[i], a);
    unpack<T>(p[i], b);
#pragma unroll
    for (int k = 0; k < WIDTH; ++k) part = fmaf(a[k], b[k], part);
    sum += part;
  }
  float dot = warp_sum(sum);
  if constexpr (CLUSTER * WARPS > 1) {
    const int warp = rank * WARPS + thread / 32;
    if constexpr (CLUSTER > 1) {
      cluster_wait();
      // What arrives before is counted, too: the barrier's phase ends with this thread's arrival.
      if (threadIdx.x == 0) barrier_expect(&gathered, ROWS * CLUSTER * WARPS * 4);
      if (lane < CLUSTER) send(&partial[slot][warp], lane, dot, &gathered);
      __syncwarp();
      barrier_wait(&gathered, 0);                     // all that will ever be sent here has arrived
    } else {
      if (lane == 0) partial[slot][warp] = dot;
      __syncthreads();
    }
    dot = 0.0f;
    for (int i = lane; i < CLUSTER * WARPS; i += 32) dot += partial[slot][i];
    dot = warp_sum(dot);
  }

  const Place now = place<THREADS, ROWS, CLUSTER>();  // asked again, not kept: registers are few
  const int still = columns / WIDTH - now.first;
  Word* out = reinterpret_cast<Word*>(dx + now.row * columns) + now.first;
#pragma unroll
  for (int i = 0; i < WORDS; ++i) {
    if (now.row < rows && i * STEP < still) {
      // With a 0 that the compiler does not know, so that it unpacks the words again: it would keep
      // twice as many floats.
      if constexpr (WIDTH > 1) {
        change(g[i], zero);
        change(p[i], zero);
      }
      float a[WIDTH], b[WIDTH];
      unpack<T>(g[i], a);
      unpack<T>(p[i], b);
#pragma unroll
      for (int k = 0; k < WIDTH; ++k) a[k] = b[k] * (a[k] - dot);
      Word word;
      pack<T>(a, word);
      store(out + i * STEP, word);
    }
  }
}

// One block per row of any length and alignment, read twice.
template <typename T, int THREADS>
__global__ void __launch_bounds__(THREADS)
softmax_backward_swept(const T* grad, const T* y, T* dx, long long grad_stride, long long y_stride,
                       int columns) {
  constexpr int UNROLL = 4;                           // loads of each tensor in flight
  __shared__ float partial[THREADS / 32];
  const long long row = blockIdx.x;
  grad += row * grad_stride;
  y += row * y_stride;
  dx += row * columns;
  float sums[UNROLL] = {};
  for (long long c = threadIdx.x; c < columns; c += UNROLL * THREADS) {
#pragma unroll
    for (int u = 0; u < UNROLL; ++u)
      if (c + u * THREADS < columns)
        sums[u] = fmaf(to_float(grad[c + u * THREADS]), to_float(y[c + u * THREADS]), sums[u]);
  }
  float dot = warp_sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = dot;
  __syncthreads();
  dot = 0.0f;
  for (int i = 0; i < THREADS / 32; ++i) dot += partial[i];
#pragma unroll UNROLL
  for (long long c = threadIdx.x; c < columns; c += THREADS)
    from_float(to_float(y[c]) * (to_float(grad[c]) - dot), dx[c]);
}
"""

TYPES = {torch.float32: "float", torch.float16: "__half", torch.bfloat16: "__nv_bfloat16"}
WORDS = {16: "uint4", 8: "uint2", 4: "unsigned", 2: "unsigned short"}


def softmax_backward(grad: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    rows, columns = y.shape
    dx = torch.empty((rows, columns), dtype=y.dtype, device=y.device)
    dtype = TYPES[y.dtype]
    strides = (grad.stride(0), y.stride(0)) if rows > 1 else (0, 0)
    starts = (columns, *strides, grad.storage_offset(), y.storage_offset())
    width = math.gcd(16 // y.element_size(), *starts)
    hopper = torch.cuda.get_device_capability(y.device)[0] >= 9
    word_bytes, words = width * y.element_size(), columns // width

    # In 16 registers of each tensor, or 32: a word of 2 bytes takes one, too.
    most = 16 // max(word_bytes // 4, 1) if word_bytes < 16 or words < LONG else 8
    each = min(triton.next_power_of_2(triton.cdiv(words, 32)), most)
    cluster = 1
    while hopper and cluster < MAX_CLUSTER and triton.cdiv(words, cluster) > THREADS * each:
        cluster *= 2
    threads = 32 * triton.cdiv(words, 32 * each * cluster)
    streams = {"STREAM_STORES": int(STREAM_STORES)}
    if threads > 512:
        kernel = cuda_kernel(f"softmax_backward_swept<{dtype}, 512>", SOURCE, defines=streams)
        kernel.launch((rows,), (512,), grad, y, dx, *strides, columns)
        return dx

    together = max(1, 128 // threads)
    shape = f"{WORDS[word_bytes]}, {each}, {threads}, {together}, {cluster}"
    kernel = cuda_kernel(f"softmax_backward_words<{dtype}, {shape}>", SOURCE, defines=streams)
    kernel.launch(
        (triton.cdiv(rows, together) * cluster,),
        (threads * together,),
        grad,
        y,
        dx,
        *strides,
        rows,
        columns,
        0,
        cluster=(cluster,) if cluster > 1 else None,
    )
    return dx
