"""Softmax by blocks that stay: bulk copies fill a ring of row parts while earlier rows are finished.

A row is divided among the blocks of a cluster (one block where it fits). Each block owns a ring of
`stages` parts in shared memory, filled by cp.async.bulk; a part is moved into registers, and as soon as
the block's (or the cluster's) exchange of (maximum, sum) shows that every warp has done so, the slot
is refilled with a later row, under way during the merge and the stores. Rows of one warp do
the same with registers. Rows that start anywhere, and rows too long for a cluster, run as before.
"""

import torch
import triton
from kagent_sandbox.lang import cuda_kernel

PART = 2048  # words of 16 bytes of a row in one block at most: a longer row gets a cluster
WORDS = 4  # words per thread, kept in registers as float32
ROWS_EACH = 16  # rows per block or cluster at most; the hardware balances what remains
TUNE = {"PART": [1024, 2048, 4096], "WORDS": [2, 4], "ROWS_EACH": [1, 4, 16, 256]}

MAX_CLUSTER = 8  # 16 works on an H100, but is not portable
MAX_STAGES = 6
ELEMENTS = 32  # of the kernel for rows that start anywhere
THREADS = 512

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

// A word of 16 bytes to its elements, and back.
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

__device__ __forceinline__ float ex2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
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

// v becomes 2^(v log2 e - shift), where shift = round(maximum log2 e). The fma rounds once; what was
// rounded off in shift is the same factor for every element of the warp, and the weight
// 2^(log_max - row's) uses the same rounded number, so that it cancels exactly.
// The warp's log_max is -inf where it holds nothing but -inf (masked or past the end).
template <int COUNT>
__device__ __forceinline__ float2 exponentials(float (&v)[COUNT]) {
  float maximum = -CUDART_INF_F;
#pragma unroll
  for (int i = 0; i < COUNT; ++i) maximum = fmaxf(maximum, v[i]);
  maximum = warp_max(maximum);
  const float log_max = maximum * LOG2E;
  const float shift = maximum == -CUDART_INF_F ? 0.0f : log_max;
  float even = 0.0f, odd = 0.0f;
#pragma unroll
  for (int i = 0; i < COUNT; i += 2) {
    v[i] = ex2(fmaf(v[i], LOG2E, -shift));
    v[i + 1] = ex2(fmaf(v[i + 1], LOG2E, -shift));
    even += v[i];
    odd += v[i + 1];
  }
  return make_float2(log_max, warp_sum(even + odd));
}

__device__ __forceinline__ unsigned address(const void* p) {
  return static_cast<unsigned>(__cvta_generic_to_shared(p));
}
__device__ __forceinline__ unsigned cluster_rank() {
  unsigned rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
__device__ __forceinline__ void cluster_sync() {
  __syncwarp();
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
__device__ __forceinline__ void barrier_init(unsigned long long* barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(address(barrier)) : "memory");
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
        "  mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "  selp.u32 %0, 1, 0, p; }"
        : "=r"(done) : "r"(address(barrier)), "r"(parity) : "memory");
}
__device__ __forceinline__ void barrier_wait_cluster(unsigned long long* barrier, unsigned parity) {
  unsigned done = 0;
  while (!done)
    asm volatile(
        "{ .reg .pred p;\n"
        "  mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
        "  selp.u32 %0, 1, 0, p; }"
        : "=r"(done) : "r"(address(barrier)), "r"(parity) : "memory");
}
__device__ __forceinline__ void bulk_load(void* to, const void* from, unsigned bytes,
                                          unsigned long long* barrier, unsigned long long policy) {
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

// Row `blockIdx.x / CLUSTER` and every gridDim.x / CLUSTER-th after it; this block has the words
// [rank * part, ...) of each. x_stride is in words.
template <typename T, int WORDS, int THREADS, int BLOCKS, int CLUSTER>
__global__ void __launch_bounds__(THREADS, BLOCKS)
softmax_ring(const T* x, T* y, long long x_stride, int rows, int words, int part, int stages) {
  constexpr int WIDTH = 16 / sizeof(T);
  constexpr int WARPS = THREADS / 32;
  extern __shared__ __align__(128) uint4 ring[];
  __shared__ __align__(8) unsigned long long full[8];
  __shared__ __align__(8) unsigned long long gathered[2];
  __shared__ float2 partial[2][CLUSTER * WARPS];      // alternating: one barrier per row is enough

  const int thread = threadIdx.x;
  const int lane = thread % 32;
  const unsigned rank = CLUSTER > 1 ? cluster_rank() : 0;
  const int step = gridDim.x / CLUSTER;
  const int first_row = blockIdx.x / CLUSTER;
  const int begin = rank * part;
  const int mine = min(part, words - begin);
  const uint4* source = reinterpret_cast<const uint4*>(x) + begin;
  uint4* target = reinterpret_cast<uint4*>(y) + begin + thread;

  unsigned long long policy = 0;
  if (thread == 0) {
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    for (int s = 0; s < stages; ++s) barrier_init(&full[s]);
    barrier_init(&gathered[0]);
    barrier_init(&gathered[1]);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    for (int s = 0; s < stages; ++s) {
      const int row = first_row + s * step;
      if (row < rows) {
        barrier_expect(&full[s], mine * 16);
        bulk_load(ring + s * part, source + row * x_stride, mine * 16, &full[s], policy);
      }
    }
  }
  if constexpr (CLUSTER > 1)
    cluster_sync();
  else
    __syncthreads();

  int stage = 0;
  unsigned phase = 0;
  int turn = 0;
  for (int row = first_row; row < rows; row += step, ++turn) {
    barrier_wait(&full[stage], phase);
    const uint4* slot = ring + stage * part + thread;
    float v[WORDS * WIDTH];
#pragma unroll
    for (int i = 0; i < WORDS; ++i) {
      if (thread + i * THREADS < mine) {
        unpack<T>(slot[i * THREADS], v + i * WIDTH);
      } else {
#pragma unroll
        for (int k = 0; k < WIDTH; ++k) v[i * WIDTH + k] = -CUDART_INF_F;
      }
    }
    const float2 own = exponentials(v);

    const int side = turn & 1;
    if constexpr (CLUSTER == 1) {
      if (lane == 0) partial[side][thread / 32] = own;
      __syncthreads();
    } else {
      if (thread == 0) barrier_expect(&gathered[side], CLUSTER * WARPS * 8);
      __syncwarp();
      if (lane < CLUSTER)
        send(&partial[side][rank * WARPS + thread / 32], lane, own, &gathered[side]);
      barrier_wait_cluster(&gathered[side], (turn >> 1) & 1);
    }

    // Every warp of this block has its words in registers: the slot is free for a later row.
    if (thread == 0) {
      const int next = row + stages * step;
      if (next < rows) {
        barrier_expect(&full[stage], mine * 16);
        bulk_load(ring + stage * part, source + next * x_stride, mine * 16, &full[stage], policy);
      }
    }
    __syncwarp();

    float row_log = -CUDART_INF_F, row_sum = 0.0f;
#pragma unroll
    for (int i = lane; i < CLUSTER * WARPS; i += 32) row_log = fmaxf(row_log, partial[side][i].x);
    row_log = warp_max(row_log);
#pragma unroll
    for (int i = lane; i < CLUSTER * WARPS; i += 32)
      row_sum += partial[side][i].y * ex2(partial[side][i].x - row_log);
    // The weight of a warp of -inf is 0, and a row of -inf gives NaN.
    const float scale = ex2(own.x - row_log) / warp_sum(row_sum);

    uint4* to = target + static_cast<long long>(row) * words;
#pragma unroll
    for (int i = 0; i < WORDS; ++i) {
      if (thread + i * THREADS < mine) {
#pragma unroll
        for (int k = 0; k < WIDTH; ++k) v[i * WIDTH + k] *= scale;
        __stcs(to + i * THREADS, pack<T>(v + i * WIDTH));
      }
    }
    if (++stage == stages) {
      stage = 0;
      phase ^= 1;
    }
  }
  if constexpr (CLUSTER > 1) cluster_sync();          // nobody leaves before the others
}
// A warp has whole rows; the next row is under way during this one. x_stride is in words.
template <typename T, int WORDS>
__global__ void __launch_bounds__(128, WORDS > 4 ? 5 : 8)
softmax_warps(const T* x, T* y, long long x_stride, int rows, int words) {
  constexpr int WIDTH = 16 / sizeof(T);
  const int lane = threadIdx.x % 32;
  const int step = gridDim.x * 4;
  const uint4* source = reinterpret_cast<const uint4*>(x) + lane;
  uint4* target = reinterpret_cast<uint4*>(y) + lane;
  int row = blockIdx.x * 4 + threadIdx.x / 32;
  if (row >= rows) return;

  uint4 next[WORDS];
#pragma unroll
  for (int i = 0; i < WORDS; ++i) {
    next[i] = make_uint4(0, 0, 0, 0);
    if (lane + i * 32 < words) next[i] = __ldcs(source + row * x_stride + i * 32);
  }
  for (; row < rows; row += step) {
    float v[WORDS * WIDTH];
#pragma unroll
    for (int i = 0; i < WORDS; ++i) {
      unpack<T>(next[i], v + i * WIDTH);
      if (lane + i * 32 >= words) {
#pragma unroll
        for (int k = 0; k < WIDTH; ++k) v[i * WIDTH + k] = -CUDART_INF_F;
      }
    }
    if (row + step < rows) {
      const uint4* from = source + (row + step) * x_stride;
#pragma unroll
      for (int i = 0; i < WORDS; ++i)
        if (lane + i * 32 < words) next[i] = __ldcs(from + i * 32);
    }
    const float scale = 1.0f / exponentials(v).y;     // a row of -inf: 0 * inf = NaN, as it should be
    uint4* to = target + static_cast<long long>(row) * words;
#pragma unroll
    for (int i = 0; i < WORDS; ++i) {
      if (lane + i * 32 < words) {
#pragma unroll
        for (int k = 0; k < WIDTH; ++k) v[i * WIDTH + k] *= scale;
        __stcs(to + i * 32, pack<T>(v + i * WIDTH));
      }
    }
  }
}

// Rows that start anywhere, element by element: THREADS threads of each of CLUSTER blocks have a row.
template <typename T, int ELEMENTS, int THREADS, int ROWS, int CLUSTER>
__global__ void __launch_bounds__(THREADS * ROWS, 1024 / (THREADS * ROWS))
softmax_narrow(const T* x, T* y, long long x_stride, int rows, int columns) {
  constexpr int WARPS = THREADS / 32;
  constexpr int STEP = CLUSTER * THREADS;
  __shared__ __align__(8) unsigned long long gathered;
  __shared__ float2 partial[ROWS][CLUSTER * WARPS];
  const int lane = threadIdx.x % 32;
  const int thread = threadIdx.x % THREADS;
  const int slot = threadIdx.x / THREADS;
  const unsigned rank = CLUSTER > 1 ? cluster_rank() : 0;
  const long long row = static_cast<long long>(blockIdx.x / CLUSTER) * ROWS + slot;
  const int first = rank * THREADS + thread;
  const int left = row < rows ? columns - first : 0;  // spare rows take part in barriers only
  x += row * x_stride + first;
  y += row * columns + first;
  if constexpr (CLUSTER > 1) {
    if (threadIdx.x == 0) {
      barrier_init(&gathered);
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
      barrier_expect(&gathered, CLUSTER * WARPS * 8);
    }
    cluster_sync();
  }

  float v[ELEMENTS];
#pragma unroll
  for (int i = 0; i < ELEMENTS; ++i)
    v[i] = i * STEP < left ? to_float(__ldcs(x + i * STEP)) : -CUDART_INF_F;
  const float2 own = exponentials(v);
  float scale;
  if constexpr (CLUSTER * WARPS == 1) {
    scale = 1.0f / own.y;
  } else {
    const int warp = rank * WARPS + thread / 32;
    if constexpr (CLUSTER > 1) {
      if (lane < CLUSTER) send(&partial[slot][warp], lane, own, &gathered);
      __syncwarp();
      barrier_wait_cluster(&gathered, 0);             // all that others send here has arrived
    } else {
      if (lane == 0) partial[slot][warp] = own;
      __syncthreads();
    }
    float row_log = -CUDART_INF_F, row_sum = 0.0f;
    for (int i = lane; i < CLUSTER * WARPS; i += 32) row_log = fmaxf(row_log, partial[slot][i].x);
    row_log = warp_max(row_log);
    for (int i = lane; i < CLUSTER * WARPS; i += 32)
      row_sum += partial[slot][i].y * ex2(partial[slot][i].x - row_log);
    scale = ex2(own.x - row_log) / warp_sum(row_sum);
  }
#pragma unroll
  for (int i = 0; i < ELEMENTS; ++i) {
    T out;
    from_float(v[i] * scale, out);
    if (i * STEP < left) __stcs(y + i * STEP, out);
  }
}

template <typename T, int WIDTH>
struct alignas(sizeof(T) * WIDTH) Pack { T at[WIDTH]; };

// One block per row of any length: a running maximum and sum per thread, then a second read.
template <typename T, int WIDTH, int THREADS>
__global__ void __launch_bounds__(THREADS)
softmax_two_pass(const T* x, T* y, long long x_stride, int columns) {
  constexpr int WARPS = THREADS / 32;
  __shared__ float2 partial[WARPS];
  x += blockIdx.x * x_stride;
  y += static_cast<long long>(blockIdx.x) * columns;

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
    auto pack = *reinterpret_cast<const Pack<T, WIDTH>*>(x + c);
#pragma unroll
    for (int i = 0; i < WIDTH; ++i)
      from_float(exponential(to_float(pack.at[i]) - row_maximum) * scale, pack.at[i]);
    *reinterpret_cast<Pack<T, WIDTH>*>(y + c) = pack;
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
    processors = torch.cuda.get_device_properties(x.device).multi_processor_count
    hopper = torch.cuda.get_device_capability(x.device)[0] >= 9

    if aligned and columns <= 1024:
        words = columns // width
        own = triton.next_power_of_2(triton.cdiv(words, 32))
        fair = triton.cdiv(rows, processors * 32)
        each = max(1, min(ROWS_EACH, fair))
        kernel = cuda_kernel(f"softmax_warps<{name}, {own}>", SOURCE)
        kernel.launch(
            (triton.cdiv(rows, 4 * each),), (128,), x, y, stride // width, rows, words
        )
        return y

    if aligned and hopper:
        words = columns // width
        cluster = 1
        while cluster < MAX_CLUSTER and triton.cdiv(words, cluster) > PART:
            cluster *= 2
        part = triton.cdiv(words, cluster)
        own = WORDS
        while own < 8 and triton.cdiv(part, own) > (1024 if own * width <= 32 else 512):
            own *= 2
        most = 1024 if own * width <= 32 else 512  # threads whose values fit an SM's registers
        threads = 32 * triton.cdiv(part, 32 * own)
        if threads <= most:
            blocks = min(16, most // threads)
            static = 16 * cluster * (threads // 32) + 256
            room = 228 * 1024 // blocks - 1024 - static
            stages = max(1, min(MAX_STAGES, room // (16 * part)))
            fair = triton.cdiv(rows * cluster, processors * blocks)
            each = max(1, min(ROWS_EACH, fair))
            kernel = cuda_kernel(
                f"softmax_ring<{name}, {own}, {threads}, {blocks}, {cluster}>", SOURCE
            )
            kernel.launch(
                (triton.cdiv(rows, each) * cluster,),
                (threads,),
                x,
                y,
                stride // width,
                rows,
                words,
                part,
                stages,
                shared=stages * part * 16,
                cluster=(cluster,) if cluster > 1 else None,
            )
            return y

    sharing = max(32, triton.next_power_of_2(triton.cdiv(columns, ELEMENTS)))
    threads = min(sharing, THREADS)
    if sharing // threads > MAX_CLUSTER:
        threads = 1024
    cluster = sharing // threads
    if aligned or cluster > (MAX_CLUSTER if hopper else 1):
        narrow = width if aligned else 1
        kernel = cuda_kernel(f"softmax_two_pass<{name}, {narrow}, 512>", SOURCE)
        kernel.launch((rows,), (512,), x, y, stride, columns)
        return y
    together = max(1, 128 // threads)
    shape = f"{ELEMENTS}, {threads}, {together}, {cluster}"
    kernel = cuda_kernel(f"softmax_narrow<{name}, {shape}>", SOURCE)
    kernel.launch(
        (triton.cdiv(rows, together) * cluster,),
        (threads * together,),
        x,
        y,
        stride,
        rows,
        columns,
        cluster=(cluster,) if cluster > 1 else None,
    )
    return y
