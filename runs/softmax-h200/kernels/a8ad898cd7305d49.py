"""triton_rows where that is faster, cuda_cluster elsewhere."""

import torch
import triton
import triton.language as tl
from kagent_sandbox.lang import cuda_kernel

N_SPLIT = 65536  # columns: the dimension that is normalised; up to here the first kernel is faster
TUNE = {
    "N_SPLIT": [1024, 4096, 16384, 65536],
    "ELEMENTS_PER_THREAD": [8, 16, 32, 64],
    "ELEMENTS": [16, 32, 64],
    "THREADS": [128, 256, 512, 1024],
}


# -- triton_rows --

ELEMENTS_PER_THREAD = 16  # more threads for the same row hide more latency, but reduce more slowly


@triton.jit
def softmax_rows(x_ptr, y_ptr, x_stride, y_stride, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)  # rows * stride can exceed 32 bits
    offsets = tl.arange(0, BLOCK)
    inside = offsets < columns
    x = tl.load(x_ptr + row * x_stride + offsets, mask=inside, other=-float("inf")).to(tl.float32)
    # exp(x) = exp2(x * log2(e)): the hardware's exponential is base 2. The maximum is subtracted
    # first: rounding the product of a large x would cost the result its low bits.
    e = tl.exp2((x - tl.max(x, 0)) * 1.4426950408889634)
    y = e * (1.0 / tl.sum(e, 0))
    tl.store(y_ptr + row * y_stride + offsets, y.to(y_ptr.dtype.element_ty), mask=inside)


def _softmax_rows(x: torch.Tensor) -> torch.Tensor:
    rows, columns = x.shape
    y = torch.empty((rows, columns), dtype=x.dtype, device=x.device)
    block = triton.next_power_of_2(columns)
    warps = min(max(block // (32 * ELEMENTS_PER_THREAD), 1), 32)
    softmax_rows[(rows,)](x, y, x.stride(0), y.stride(0), columns, BLOCK=block, num_warps=warps)
    return y


# -- cuda_cluster --

ELEMENTS = 32  # per thread, kept in registers as float32
THREADS = (
    512  # per block at most: a longer row gets a cluster. Small blocks overlap better on an SM
)

MAX_CLUSTER = 8  # 16 works on an H100, but is not portable

SOURCE = r"""
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <math_constants.h>

__device__ float to_float(float x) { return x; }
__device__ float to_float(__half x) { return __half2float(x); }
__device__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ void from_float(float x, float& y) { y = x; }
__device__ void from_float(float x, __half& y) { y = __float2half_rn(x); }
__device__ void from_float(float x, __nv_bfloat16& y) { y = __float2bfloat16_rn(x); }

// WIDTH elements that one instruction loads or stores.
template <typename T, int WIDTH>
struct alignas(sizeof(T) * WIDTH) Pack { T at[WIDTH]; };

// Streaming accesses (evict first): nothing is used twice, and the L2 is better left to others.
template <typename T, int WIDTH>
__device__ Pack<T, WIDTH> load(const T* p) {
  Pack<T, WIDTH> pack;
  if constexpr (WIDTH > 1)
    *reinterpret_cast<uint4*>(&pack) = __ldcs(reinterpret_cast<const uint4*>(p));
  else
    pack.at[0] = __ldcs(p);
  return pack;
}

template <typename T, int WIDTH>
__device__ void store(T* p, const float* values) {
  Pack<T, WIDTH> pack;
#pragma unroll
  for (int i = 0; i < WIDTH; ++i) from_float(values[i], pack.at[i]);
  if constexpr (WIDTH > 1)
    __stcs(reinterpret_cast<uint4*>(p), *reinterpret_cast<uint4*>(&pack));
  else
    __stcs(p, pack.at[0]);
}

// exp(x). The subtraction of the maximum has happened: scaling before it would lose low bits.
__device__ float exponential(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x * 1.4426950408889634f));
  return y;
}

__device__ float warp_max(float x) {
#pragma unroll
  for (int d = 16; d > 0; d /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, d));
  return x;
}

__device__ float warp_sum(float x) {
#pragma unroll
  for (int d = 16; d > 0; d /= 2) x += __shfl_xor_sync(0xffffffff, x, d);
  return x;
}

// What cooperative_groups would give, without its header, which takes 1.3 s to compile.
#if __CUDA_ARCH__ >= 900
__device__ unsigned cluster_rank() {
  unsigned rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
__device__ void cluster_started() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;");
}
__device__ void cluster_arrive() {
  __syncwarp();
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
__device__ void store_remote(float2* local, unsigned rank, float2 value) {
  unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(local));
  asm volatile(
      "{ .reg .b32 remote;\n"
      "  mapa.shared::cluster.u32 remote, %0, %1;\n"
      "  st.shared::cluster.v2.f32 [remote], {%2, %3}; }"
      :: "r"(address), "r"(rank), "f"(value.x), "f"(value.y) : "memory");
}
#else
__device__ unsigned cluster_rank() { return 0; }
__device__ void cluster_started() {}
__device__ void cluster_arrive() {}
__device__ void cluster_wait() {}
__device__ void store_remote(float2* local, unsigned, float2 value) { *local = value; }
#endif

// THREADS threads of each of CLUSTER blocks share a row; a block holds its part of ROWS rows.
template <typename T, int WIDTH, int ELEMENTS, int THREADS, int ROWS, int CLUSTER>
__global__ void __launch_bounds__(THREADS * ROWS, (ELEMENTS > 32 ? 512 : 1024) / (THREADS * ROWS))
softmax_on_chip(const T* x, T* y, long long x_stride, long long y_stride, int rows, int columns) {
  constexpr int WARPS = THREADS / 32;
  __shared__ float2 partial[ROWS][CLUSTER * WARPS];   // (maximum, sum) of every warp of the row

  const int lane = threadIdx.x % 32;
  const int thread = threadIdx.x % THREADS;
  const int slot = threadIdx.x / THREADS;
  const unsigned rank = CLUSTER > 1 ? cluster_rank() : 0;
  const long long row = static_cast<long long>(blockIdx.x / CLUSTER) * ROWS + slot;
  if constexpr (CLUSTER > 1) cluster_started();       // "my shared memory exists": awaited below

  // This thread has the columns first, first + STEP, ..., WIDTH of them each time.
  constexpr int STEP = CLUSTER * THREADS * WIDTH;
  const int first = (rank * THREADS + thread) * WIDTH;
  const int left = row < rows ? columns - first : 0;  // spare rows take part in barriers only
  x += row * x_stride + first;
  y += row * y_stride + first;

  // All loads are issued before the first use.
  Pack<T, WIDTH> packs[ELEMENTS / WIDTH];
#pragma unroll
  for (int i = 0; i < ELEMENTS / WIDTH; ++i)
    if (i * STEP < left) packs[i] = load<T, WIDTH>(x + i * STEP);
  float v[ELEMENTS];
  float maximum = -CUDART_INF_F;
#pragma unroll
  for (int i = 0; i < ELEMENTS; ++i) {
    v[i] = i / WIDTH * STEP < left ? to_float(packs[i / WIDTH].at[i % WIDTH]) : -CUDART_INF_F;
    maximum = fmaxf(maximum, v[i]);
  }

  // Exponentials relative to the warp's own maximum, so that one exchange serves maximum and sum.
  // A warp may hold nothing but -inf (masked or past the end): -inf - -inf would be NaN.
  maximum = warp_max(maximum);
  const float shift = maximum == -CUDART_INF_F ? 0.0f : maximum;
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < ELEMENTS; ++i) {
    v[i] = exponential(v[i] - shift);
    sum += v[i];
  }
  sum = warp_sum(sum);

  float scale;
  if constexpr (CLUSTER * WARPS == 1) {
    scale = 1.0f / sum;
  } else {
    const int warp = rank * WARPS + thread / 32;
    if constexpr (CLUSTER > 1) {
      cluster_wait();                                 // all blocks of the cluster have started
      if (lane < CLUSTER) store_remote(&partial[slot][warp], lane, make_float2(maximum, sum));
      cluster_arrive();
      cluster_wait();                                 // nobody touches a remote block from here on
    } else {
      if (lane == 0) partial[slot][warp] = make_float2(maximum, sum);
      __syncthreads();
    }
    float row_maximum = -CUDART_INF_F, row_sum = 0.0f;
    // Every warp merges for itself, which saves another barrier.
    for (int i = lane; i < CLUSTER * WARPS; i += 32)
      row_maximum = fmaxf(row_maximum, partial[slot][i].x);
    row_maximum = warp_max(row_maximum);
    for (int i = lane; i < CLUSTER * WARPS; i += 32)
      row_sum += partial[slot][i].y * exponential(partial[slot][i].x - row_maximum);
    // With `maximum`, not `shift`: the weight of a warp of -inf is 0, and a row of -inf gives NaN.
    scale = exponential(maximum - row_maximum) / warp_sum(row_sum);
  }

#pragma unroll
  for (int i = 0; i < ELEMENTS; ++i) v[i] *= scale;
#pragma unroll
  for (int i = 0; i < ELEMENTS / WIDTH; ++i)
    if (i * STEP < left) store<T, WIDTH>(y + i * STEP, v + i * WIDTH);
}

// One block per row of any length: a running maximum and sum per thread, then a second read.
template <typename T, int WIDTH, int THREADS>
__global__ void __launch_bounds__(THREADS)
softmax_two_pass(const T* x, T* y, long long x_stride, long long y_stride, int columns) {
  constexpr int WARPS = THREADS / 32;
  __shared__ float2 partial[WARPS];
  x += blockIdx.x * x_stride;
  y += blockIdx.x * y_stride;

  const float lowest = -3.402823466e38f;              // finite: -inf - -inf would be NaN
  float maximum = lowest, sum = 0.0f;
  for (long long c = threadIdx.x * WIDTH; c < columns; c += THREADS * WIDTH) {
    const auto pack = *reinterpret_cast<const Pack<T, WIDTH>*>(x + c);   // cached: read again below
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) {
      const float value = to_float(pack.at[i]);
      const float factor = exponential(-fabsf(value - maximum));
      sum = value > maximum ? sum * factor + 1.0f : sum + factor;
      maximum = fmaxf(maximum, value);
    }
  }
  const float warp_maximum = warp_max(maximum);
  sum = warp_sum(sum * exponential(maximum - warp_maximum));
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = make_float2(warp_maximum, sum);
  __syncthreads();
  float row_maximum = lowest, row_sum = 0.0f;
  for (int i = 0; i < WARPS; ++i) row_maximum = fmaxf(row_maximum, partial[i].x);
  for (int i = 0; i < WARPS; ++i) row_sum += partial[i].y * exponential(partial[i].x - row_maximum);
  const float scale = 1.0f / row_sum;

  for (long long c = threadIdx.x * WIDTH; c < columns; c += THREADS * WIDTH) {
    const auto pack = load<T, WIDTH>(x + c);
    float v[WIDTH];
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) v[i] = exponential(to_float(pack.at[i]) - row_maximum) * scale;
    store<T, WIDTH>(y + c, v);
  }
}
"""

TYPES = {torch.float32: "float", torch.float16: "__half", torch.bfloat16: "__nv_bfloat16"}


def _softmax_cluster(x: torch.Tensor) -> torch.Tensor:
    rows, columns = x.shape
    y = torch.empty((rows, columns), dtype=x.dtype, device=x.device)
    vector = 16 // x.element_size()
    aligned = all(n % vector == 0 for n in (columns, x.stride(0), x.storage_offset()))
    width = vector if aligned else 1  # rows that start anywhere are read element by element

    most = min(1024, 32768 // ELEMENTS)  # threads whose values fit an SM's registers
    sharing = max(32, triton.next_power_of_2(triton.cdiv(columns, ELEMENTS)))
    clusters = torch.cuda.get_device_capability(x.device)[0] >= 9
    threads = min(sharing, THREADS if clusters else most, most)
    if sharing // threads > MAX_CLUSTER:
        threads = most
    cluster = sharing // threads

    if cluster > (MAX_CLUSTER if clusters else 1):
        kernel = cuda_kernel(f"softmax_two_pass<{TYPES[x.dtype]}, {width}, 512>", SOURCE)
        kernel.launch((rows,), (512,), x, y, x.stride(0), y.stride(0), columns)
        return y

    rows_per_block = max(1, 128 // threads)
    shape = f"{width}, {ELEMENTS}, {threads}, {rows_per_block}, {cluster}"
    kernel = cuda_kernel(f"softmax_on_chip<{TYPES[x.dtype]}, {shape}>", SOURCE)
    kernel.launch(
        (triton.cdiv(rows, rows_per_block) * cluster,),
        (threads * rows_per_block,),
        x,
        y,
        x.stride(0),
        y.stride(0),
        rows,
        columns,
        cluster=(cluster,) if cluster > 1 else None,
    )
    return y


def softmax(x: torch.Tensor) -> torch.Tensor:
    if x.shape[-1] <= N_SPLIT:
        return _softmax_rows(x)
    return _softmax_cluster(x)
