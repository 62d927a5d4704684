"""Cross entropy with its gradient: each row in the registers of a cluster of blocks, read once.

A row is divided among as many threads as it needs at ELEMENTS each: up to 16384 columns in one
block, beyond that in a cluster of up to 8 blocks, which exchange one pair (maximum, sum) per warp
through distributed shared memory. A vocabulary of 131072 in bf16 is 256 KiB on chip, where a single
block would have to read the row again. Rows too long even for a cluster, and long rows on GPUs
older than Hopper, are read twice.

Three launches: how many rows count; each row's loss and gradient; the mean. The count comes first,
since the gradient is divided by it.
"""

import torch
import triton
from kagent_sandbox.lang import cuda_kernel

ELEMENTS = 32  # per thread, kept in registers as float32
THREADS = (
    512  # per block at most: a longer row gets a cluster. Small blocks overlap better on an SM
)
TUNE = {"ELEMENTS": [16, 32, 64], "THREADS": [256, 512, 1024]}

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

template <typename Number>
__device__ Number warp_sum(Number x) {
#pragma unroll
  for (int d = 16; d > 0; d /= 2) x += __shfl_xor_sync(0xffffffff, x, d);
  return x;
}

// Sum over a block of THREADS threads, in a fixed order: the same bits every time.
template <int THREADS, typename Number>
__device__ Number block_sum(Number x) {
  __shared__ Number partial[THREADS / 32];
  x = warp_sum(x);
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = x;
  __syncthreads();
  x = 0;
  for (int i = 0; i < THREADS / 32; ++i) x += partial[i];
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

template <int THREADS>
__global__ void __launch_bounds__(THREADS)
count_targets(const long long* target, float* count, int rows, long long ignore_index) {
  int valid = 0;
  for (int row = threadIdx.x; row < rows; row += THREADS) valid += target[row] != ignore_index;
  valid = block_sum<THREADS>(valid);
  if (threadIdx.x == 0) *count = static_cast<float>(valid);
}

template <int THREADS>
__global__ void __launch_bounds__(THREADS)
mean_loss(const float* losses, const float* count, float* loss, int rows) {
  float sum = 0.0f;
  for (int row = threadIdx.x; row < rows; row += THREADS) sum += losses[row];
  sum = block_sum<THREADS>(sum);
  if (threadIdx.x == 0) *loss = sum / *count;          // 0 / 0 = NaN, as torch has it
}

// THREADS threads of each of CLUSTER blocks share a row.
template <typename T, int WIDTH, int ELEMENTS, int THREADS, int CLUSTER>
__global__ void __launch_bounds__(THREADS, (ELEMENTS > 32 ? 512 : 1024) / THREADS)
rows_on_chip(const T* logits, const long long* target, const float* count, float* losses, T* grad,
             long long stride, int columns, long long ignore_index) {
  constexpr int WARPS = THREADS / 32;
  __shared__ float2 partial[CLUSTER * WARPS];         // (maximum, sum) of every warp of the row

  const int lane = threadIdx.x % 32;
  const unsigned rank = CLUSTER > 1 ? cluster_rank() : 0;
  const long long row = blockIdx.x / CLUSTER;
  const long long label = target[row];

  // This thread has the columns first, first + STEP, ..., WIDTH of them each time.
  constexpr int STEP = CLUSTER * THREADS * WIDTH;
  const int first = (rank * THREADS + threadIdx.x) * WIDTH;
  const int left = columns - first;
  const T* x = logits + row * stride + first;
  T* g = grad + row * columns + first;
  float v[ELEMENTS];

  if (label == ignore_index) {                        // the whole cluster leaves together
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) v[i] = 0.0f;
    for (int i = 0; i < left; i += STEP) store<T, WIDTH>(g + i, v);
    if (rank == 0 && threadIdx.x == 0) losses[row] = 0.0f;
    return;
  }
  if constexpr (CLUSTER > 1) cluster_started();       // "my shared memory exists": awaited below

  // All loads are issued before the first use.
  const float at_label = to_float(logits[row * stride + label]);
  const float share = 1.0f / *count;                  // not 0: this row counts
  Pack<T, WIDTH> packs[ELEMENTS / WIDTH];
#pragma unroll
  for (int i = 0; i < ELEMENTS / WIDTH; ++i)
    if (i * STEP < left) packs[i] = load<T, WIDTH>(x + i * STEP);
  float maximum = -CUDART_INF_F;
#pragma unroll
  for (int i = 0; i < ELEMENTS; ++i) {
    v[i] = i / WIDTH * STEP < left ? to_float(packs[i / WIDTH].at[i % WIDTH]) : -CUDART_INF_F;
    maximum = fmaxf(maximum, v[i]);
  }

  // Exponentials relative to the warp's own maximum, so that one exchange serves maximum and sum.
  // A warp past the end holds nothing but -inf: -inf - -inf would be NaN.
  maximum = warp_max(maximum);
  const float shift = maximum == -CUDART_INF_F ? 0.0f : maximum;
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < ELEMENTS; ++i) {
    v[i] = exponential(v[i] - shift);
    sum += v[i];
  }
  sum = warp_sum(sum);

  const int warp = rank * WARPS + threadIdx.x / 32;
  if constexpr (CLUSTER > 1) {
    cluster_wait();                                   // all blocks of the cluster have started
    if (lane < CLUSTER) store_remote(&partial[warp], lane, make_float2(maximum, sum));
    cluster_arrive();
    cluster_wait();                                   // nobody touches a remote block from here on
  } else {
    if (lane == 0) partial[warp] = make_float2(maximum, sum);
    __syncthreads();
  }
  float row_maximum = -CUDART_INF_F, row_sum = 0.0f;
  // Every warp merges for itself, which saves another barrier.
  for (int i = lane; i < CLUSTER * WARPS; i += 32) row_maximum = fmaxf(row_maximum, partial[i].x);
  row_maximum = warp_max(row_maximum);
  for (int i = lane; i < CLUSTER * WARPS; i += 32)
    row_sum += partial[i].y * exponential(partial[i].x - row_maximum);
  row_sum = warp_sum(row_sum);
  // With `maximum`, not `shift`: the weight of a warp of -inf is 0.
  const float scale = exponential(maximum - row_maximum) / row_sum;

  // The difference first: where the model is sure, it is 0, and the logarithm keeps its digits.
  if (rank == 0 && threadIdx.x == 0) losses[row] = logf(row_sum) + (row_maximum - at_label);

  // Where the label falls in this thread's columns; the mean's factor comes last, since p - 1 there
  // cancels, which would magnify its rounding.
  const int at = static_cast<int>(label) - first;
#pragma unroll
  for (int i = 0; i < ELEMENTS; ++i) {
    const float p = v[i] * scale;
    v[i] = (at == i / WIDTH * STEP + i % WIDTH ? p - 1.0f : p) * share;
  }
#pragma unroll
  for (int i = 0; i < ELEMENTS / WIDTH; ++i)
    if (i * STEP < left) store<T, WIDTH>(g + i * STEP, v + i * WIDTH);
}

// One block per row of any length: a running maximum and sum per thread, then a second read.
template <typename T, int WIDTH, int THREADS>
__global__ void __launch_bounds__(THREADS)
rows_two_pass(const T* logits, const long long* target, const float* count, float* losses, T* grad,
              long long stride, int columns, long long ignore_index) {
  constexpr int WARPS = THREADS / 32;
  __shared__ float2 partial[WARPS];
  const long long row = blockIdx.x;
  const long long label = target[row];
  const T* x = logits + row * stride;
  T* g = grad + row * columns;
  float v[WIDTH];

  if (label == ignore_index) {
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) v[i] = 0.0f;
    for (long long c = threadIdx.x * WIDTH; c < columns; c += THREADS * WIDTH)
      store<T, WIDTH>(g + c, v);
    if (threadIdx.x == 0) losses[row] = 0.0f;
    return;
  }

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
  if (threadIdx.x == 0) losses[row] = logf(row_sum) + (row_maximum - to_float(x[label]));

  const float inverse = 1.0f / row_sum;
  const float share = 1.0f / *count;                  // not 0: this row counts
  for (long long c = threadIdx.x * WIDTH; c < columns; c += THREADS * WIDTH) {
    const auto pack = load<T, WIDTH>(x + c);
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) {
      const float p = exponential(to_float(pack.at[i]) - row_maximum) * inverse;
      v[i] = (c + i == label ? p - 1.0f : p) * share;
    }
    store<T, WIDTH>(g + c, v);
  }
}
"""

TYPES = {torch.float32: "float", torch.float16: "__half", torch.bfloat16: "__nv_bfloat16"}


def cross_entropy(
    logits: torch.Tensor, target: torch.Tensor, ignore_index: int
) -> tuple[torch.Tensor, torch.Tensor]:
    rows, columns = logits.shape
    grad = torch.empty((rows, columns), dtype=logits.dtype, device=logits.device)
    count, loss = (torch.empty((), dtype=torch.float32, device=logits.device) for _ in range(2))
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)

    counting = cuda_kernel("count_targets<1024>", SOURCE)
    counting.launch((1,), (1024,), target, count, rows, ignore_index)

    vector = 16 // logits.element_size()
    aligned = all(n % vector == 0 for n in (columns, logits.stride(0), logits.storage_offset()))
    width = vector if aligned else 1  # rows that start anywhere are read element by element
    most = min(1024, 32768 // ELEMENTS)  # threads whose values fit an SM's registers
    sharing = max(128, triton.next_power_of_2(triton.cdiv(columns, ELEMENTS)))
    clusters = torch.cuda.get_device_capability(logits.device)[0] >= 9
    threads = min(sharing, THREADS if clusters else most, most)
    if sharing // threads > MAX_CLUSTER:
        threads = most
    cluster = sharing // threads

    on_chip = cluster <= (MAX_CLUSTER if clusters else 1)
    if not on_chip:
        threads, cluster = 512, 1
    name = (
        f"rows_on_chip<{TYPES[logits.dtype]}, {width}, {ELEMENTS}, {threads}, {cluster}>"
        if on_chip
        else f"rows_two_pass<{TYPES[logits.dtype]}, {width}, {threads}>"
    )
    cuda_kernel(name, SOURCE).launch(
        (rows * cluster,),
        (threads,),
        logits,
        target,
        count,
        losses,
        grad,
        logits.stride(0),
        columns,
        ignore_index,
        cluster=(cluster,) if cluster > 1 else None,
    )

    mean = cuda_kernel("mean_loss<1024>", SOURCE)
    mean.launch((1,), (1024,), losses, count, loss, rows)
    return loss, grad
