"""Cross entropy with its gradient: a persistent kernel that streams rows through shared memory.

Each block (or cluster, for long rows) walks over rows. A ring of bulk copies runs ahead of it, by
more than a row. The current row stays in registers as packed 16-bit values: maximum and sum in a
first sweep, the gradient in a second, straight to global memory. Every block counts the targets
for itself while the first copies are under way; a small dependent launch adds up the blocks' losses.

Short rows, rows that are not aligned to 16 bytes, and fp32 take a plain kernel that reads twice.
"""

import torch
from kagent_sandbox.lang import cuda_kernel

BLOCKS = 1  # per SM; together they have 1024 threads
STREAM_FROM = 8192  # columns; shorter rows are not worth the ring
TUNE = {"BLOCKS": [1, 2]}

SLOTS = 13  # of the ring; each holds 16 bytes per thread
PACKS = 8  # packs of 16 bytes that a thread holds at most
MAX_CLUSTER = 8

SOURCE = r"""
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <math_constants.h>

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ void from_float(float x, float& y) { y = x; }
__device__ __forceinline__ void from_float(float x, __half& y) { y = __float2half_rn(x); }
__device__ __forceinline__ void from_float(float x, __nv_bfloat16& y) { y = __float2bfloat16_rn(x); }

// Two 16-bit values in one register.
template <typename T> struct Pair;

template <> struct Pair<__nv_bfloat16> {
  static constexpr unsigned LOWEST = 0xff80ff80u;      // -inf, -inf
  static __device__ __forceinline__ unsigned maximum(unsigned a, unsigned b) {
    unsigned c;
    asm("max.bf16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
    return c;
  }
  static __device__ __forceinline__ float low(unsigned a) { return __uint_as_float(a << 16); }
  static __device__ __forceinline__ float high(unsigned a) {
    return __uint_as_float(a & 0xffff0000u);
  }
  static __device__ __forceinline__ unsigned pack(float lo, float hi) {
    unsigned c;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(c) : "f"(hi), "f"(lo));
    return c;
  }
};

template <> struct Pair<__half> {
  static constexpr unsigned LOWEST = 0xfc00fc00u;
  static __device__ __forceinline__ unsigned maximum(unsigned a, unsigned b) {
    unsigned c;
    asm("max.f16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
    return c;
  }
  static __device__ __forceinline__ float low(unsigned a) {
    return __half2float(__ushort_as_half(static_cast<unsigned short>(a & 0xffffu)));
  }
  static __device__ __forceinline__ float high(unsigned a) {
    return __half2float(__ushort_as_half(static_cast<unsigned short>(a >> 16)));
  }
  static __device__ __forceinline__ unsigned pack(float lo, float hi) {
    unsigned c;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(c) : "f"(hi), "f"(lo));
    return c;
  }
};

__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

#define LOG2E 1.4426950408889634f

// exp(x). The subtraction of the maximum has happened: scaling before it would lose low bits.
__device__ __forceinline__ float exponential(float x) { return exp2_fast(x * LOG2E); }

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
  for (int d = 16; d > 0; d /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, d));
  return x;
}

template <typename Number>
__device__ __forceinline__ Number warp_sum(Number x) {
#pragma unroll
  for (int d = 16; d > 0; d /= 2) x += __shfl_xor_sync(0xffffffff, x, d);
  return x;
}

// Sum over a block of THREADS threads, in a fixed order: the same bits every time.
template <int THREADS, typename Number>
__device__ __forceinline__ Number block_sum(Number x) {
  __shared__ Number partial[THREADS / 32];
  x = warp_sum(x);
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = x;
  __syncthreads();
  x = 0;
  for (int i = 0; i < THREADS / 32; ++i) x += partial[i];
  return x;
}

__device__ __forceinline__ unsigned shared_address(const void* p) {
  return static_cast<unsigned>(__cvta_generic_to_shared(p));
}

// --- clusters ---
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
__device__ __forceinline__ void store_remote(float2* local, unsigned rank, float2 value) {
  asm volatile(
      "{ .reg .b32 remote;\n"
      "  mapa.shared::cluster.u32 remote, %0, %1;\n"
      "  st.shared::cluster.v2.f32 [remote], {%2, %3}; }"
      :: "r"(shared_address(local)), "r"(rank), "f"(value.x), "f"(value.y) : "memory");
}

// --- bulk copies ---
__device__ __forceinline__ void barrier_init(unsigned barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(barrier) : "memory");
}
__device__ __forceinline__ void barrier_wait(unsigned barrier, unsigned parity) {
  unsigned done;
  do {
    asm volatile(
        "{ .reg .pred p;\n"
        "  mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "  selp.u32 %0, 1, 0, p; }"
        : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
  } while (!done);
}
__device__ __forceinline__ void bulk_load(unsigned destination, const void* source, unsigned bytes,
                                          unsigned barrier) {
  unsigned long long policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
               :: "r"(barrier), "r"(bytes) : "memory");
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1], %2, [%3], %4;"
      :: "r"(destination), "l"(__cvta_generic_to_global(source)), "r"(bytes), "r"(barrier),
         "l"(policy)
      : "memory");
}

// A cluster walks over the rows cluster_id, cluster_id + clusters, ...; a block of it has PACKS
// chunks of each row, a chunk being 8 columns per thread. Rows that are ignored are not read.
template <typename T, int THREADS, int PACKS, int CLUSTER, int SLOTS, int BLOCKS>
__global__ void __launch_bounds__(THREADS, BLOCKS)
rows_streamed(const T* __restrict__ logits, const long long* __restrict__ target, float* count_out,
              float* block_losses, T* grad, long long stride, int rows, int columns,
              long long ignore_index) {
  static_assert(PACKS <= SLOTS, "a row must fit the ring");
  constexpr int WARPS = THREADS / 32;
  constexpr int CHUNK = THREADS * 8;
  extern __shared__ __align__(128) unsigned char ring[];
  __shared__ __align__(8) unsigned long long full[SLOTS];
  __shared__ float2 partial[2][CLUSTER * WARPS];       // (maximum, sum) of every warp of the row

  const int thread = threadIdx.x;
  const int lane = thread % 32;
  const int rank = CLUSTER > 1 ? static_cast<int>(cluster_rank()) : 0;
  const int clusters = gridDim.x / CLUSTER;
  const int first_row = blockIdx.x / CLUSTER;

  const int shard = rank * (PACKS * CHUNK);            // this block's first column
  const int length = min(max(columns - shard, 0), PACKS * CHUNK);
  const int mine = (length + CHUNK - 1) / CHUNK;       // chunks of a row that this block has
  const int left = length - thread * 8;

  // The producer is thread 0. Its cursor: the next chunk to copy, and the slots it may fill.
  int p_row = first_row, p_chunk = 0, p_slot = 0, p_free = SLOTS;
  long long p_label = ignore_index;
  auto refill = [&]() {
    while (p_free > 0 && p_row < rows) {
      if (p_label != ignore_index) {
        const int start = p_chunk * CHUNK;
        bulk_load(shared_address(ring + p_slot * (CHUNK * 2)),
                  logits + p_row * stride + shard + start,
                  static_cast<unsigned>(min(CHUNK, length - start)) * 2u,
                  shared_address(&full[p_slot]));
        --p_free;
        p_slot = p_slot + 1 == SLOTS ? 0 : p_slot + 1;
        if (++p_chunk < mine) continue;
      }
      p_chunk = 0;
      p_row += clusters;
      if (p_row < rows) p_label = target[p_row];       // used only in a later round, mostly
    }
  };

  if (thread == 0) {
    for (int i = 0; i < SLOTS; ++i) barrier_init(shared_address(&full[i]));
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    if (p_row < rows) p_label = target[p_row];
    if (mine > 0) refill();
  }
  __syncwarp();
  if constexpr (CLUSTER > 1) cluster_arrive();         // "my shared memory exists"

  // How many rows count: every block for itself, behind the first copies.
  int valid = 0;
#pragma unroll 8
  for (int row = thread; row < rows; row += THREADS) valid += target[row] != ignore_index;
  const float count = static_cast<float>(block_sum<THREADS>(valid));
  if (blockIdx.x == 0 && thread == 0) *count_out = count;
  __syncthreads();
  if constexpr (CLUSTER > 1) cluster_wait();

  int slot = 0, buffer = 0;
  unsigned parity = 0;
  float loss_sum = 0.0f;
  long long next_label = first_row < rows ? target[first_row] : ignore_index;

  for (int row = first_row; row < rows; row += clusters) {
    const long long label = next_label;
    if (row + clusters < rows) next_label = target[row + clusters];
    T* g = grad + static_cast<long long>(row) * columns + shard + thread * 8;

    if (label == ignore_index) {                       // the same decision in the whole cluster
#pragma unroll
      for (int i = 0; i < PACKS; ++i)
        if (i * CHUNK < left)
          __stcs(reinterpret_cast<uint4*>(g + i * CHUNK), make_uint4(0u, 0u, 0u, 0u));
      continue;
    }

    // One thread of the cluster has the label among its columns: it does what concerns it.
    const int at = static_cast<int>(label) - shard;
    const bool owner = at >= 0 && at < length && (at / 8) % THREADS == thread;
    float at_label = 0.0f;
    if (owner) at_label = to_float(logits[row * stride + label]);

    // From the ring into registers.
    unsigned v[PACKS * 4];
#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
      uint4 pack = make_uint4(Pair<T>::LOWEST, Pair<T>::LOWEST, Pair<T>::LOWEST, Pair<T>::LOWEST);
      if (i < mine) {
        barrier_wait(shared_address(&full[slot]), parity);
        if (i * CHUNK < left)
          pack = *reinterpret_cast<const uint4*>(ring + slot * (CHUNK * 2) + thread * 16);
        if (++slot == SLOTS) {
          slot = 0;
          parity ^= 1u;
        }
      }
      v[4 * i] = pack.x;
      v[4 * i + 1] = pack.y;
      v[4 * i + 2] = pack.z;
      v[4 * i + 3] = pack.w;
    }

    // Maximum of the warp, on pairs; then exponentials relative to it, so that one exchange serves
    // maximum and sum. A warp that holds nothing but -inf: -inf - -inf would be NaN.
    unsigned pair_maximum = Pair<T>::LOWEST;
#pragma unroll
    for (int i = 0; i < PACKS * 4; ++i) pair_maximum = Pair<T>::maximum(pair_maximum, v[i]);
    const float maximum =
        warp_max(fmaxf(Pair<T>::low(pair_maximum), Pair<T>::high(pair_maximum)));
    const float shift = maximum == -CUDART_INF_F ? 0.0f : maximum;
    float sum_low = 0.0f, sum_high = 0.0f;
#pragma unroll
    for (int i = 0; i < PACKS * 4; ++i) {
      sum_low += exponential(Pair<T>::low(v[i]) - shift);
      sum_high += exponential(Pair<T>::high(v[i]) - shift);
    }
    const float sum = warp_sum(sum_low + sum_high);

    float2* const exchange = partial[buffer];          // two buffers: one barrier per row suffices
    buffer ^= 1;
    const int warp = rank * WARPS + thread / 32;
    if constexpr (CLUSTER > 1) {
      if (lane < CLUSTER) store_remote(&exchange[warp], lane, make_float2(maximum, sum));
      cluster_arrive();
      cluster_wait();
    } else {
      if (lane == 0) exchange[warp] = make_float2(maximum, sum);
      __syncthreads();
    }

    // Everybody has this row in registers: its slots are free.
    if (thread == 0 && mine > 0) {
      p_free += mine;
      refill();
    }
    __syncwarp();

    float row_maximum = -CUDART_INF_F, row_sum = 0.0f;
#pragma unroll
    for (int i = lane; i < CLUSTER * WARPS; i += 32) row_maximum = fmaxf(row_maximum, exchange[i].x);
    row_maximum = warp_max(row_maximum);
#pragma unroll
    for (int i = lane; i < CLUSTER * WARPS; i += 32)
      row_sum += exchange[i].y * exponential(exchange[i].x - row_maximum);
    row_sum = warp_sum(row_sum);

    // p / count = 2 ^ ((x - maximum) * log2(e) - log2(sum * count)): no multiplication afterwards.
    const float offset = -(log2f(row_sum) + log2f(count));
#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
      if (i * CHUNK < left) {
        unsigned out[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const unsigned u = v[4 * i + j];
          out[j] = Pair<T>::pack(
              exp2_fast(fmaf(Pair<T>::low(u) - row_maximum, LOG2E, offset)),
              exp2_fast(fmaf(Pair<T>::high(u) - row_maximum, LOG2E, offset)));
        }
        __stcs(reinterpret_cast<uint4*>(g + i * CHUNK), make_uint4(out[0], out[1], out[2], out[3]));
      }
    }

    if (owner) {
      // The same thread has just stored there, so this store comes after it. The mean's factor
      // comes last, since p - 1 cancels. In the loss the difference comes first: where the model is
      // sure, it is 0, and the logarithm keeps its digits.
      const float p = exponential(at_label - row_maximum) / row_sum;
      from_float((p - 1.0f) / count, grad[static_cast<long long>(row) * columns + label]);
      loss_sum += logf(row_sum) + (row_maximum - at_label);
    }
    __syncwarp();
  }

  __syncthreads();
  loss_sum = block_sum<THREADS>(loss_sum);
  if (thread == 0) block_losses[blockIdx.x] = loss_sum;
}

// The last launch: it may start early, and waits here for what the kernel before it wrote.
template <int THREADS>
__global__ void __launch_bounds__(THREADS)
mean_loss(const float* losses, const float* count, float* loss, int n) {
  asm volatile("griddepcontrol.wait;" ::: "memory");
  float sum = 0.0f;
  for (int i = threadIdx.x; i < n; i += THREADS) sum += losses[i];
  sum = block_sum<THREADS>(sum);
  if (threadIdx.x == 0) *loss = sum / *count;          // 0 / 0 = NaN, as torch has it
}

template <int THREADS>
__global__ void __launch_bounds__(THREADS)
count_targets(const long long* target, float* count, int rows, long long ignore_index) {
  int valid = 0;
  for (int row = threadIdx.x; row < rows; row += THREADS) valid += target[row] != ignore_index;
  valid = block_sum<THREADS>(valid);
  if (threadIdx.x == 0) *count = static_cast<float>(valid);
}

// WIDTH elements that one instruction loads or stores.
template <typename T, int WIDTH>
struct alignas(sizeof(T) * WIDTH) Pack { T at[WIDTH]; };

template <typename T, int WIDTH>
__device__ __forceinline__ void store(T* p, const float* values) {
  Pack<T, WIDTH> pack;
#pragma unroll
  for (int i = 0; i < WIDTH; ++i) from_float(values[i], pack.at[i]);
  *reinterpret_cast<Pack<T, WIDTH>*>(p) = pack;
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

  const float lowest = -3.402823466e38f;               // finite: -inf - -inf would be NaN
  float maximum = lowest, sum = 0.0f;
  for (long long c = threadIdx.x * WIDTH; c < columns; c += THREADS * WIDTH) {
    const auto pack = *reinterpret_cast<const Pack<T, WIDTH>*>(x + c);
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
  if (row_maximum == CUDART_INF_F) row_sum = CUDART_NAN_F;   // inf - inf, as torch has it
  if (threadIdx.x == 0) losses[row] = logf(row_sum) + (row_maximum - to_float(x[label]));

  const float inverse = 1.0f / row_sum;
  const float share = 1.0f / *count;                   // not 0: this row counts
  for (long long c = threadIdx.x * WIDTH; c < columns; c += THREADS * WIDTH) {
    const auto pack = *reinterpret_cast<const Pack<T, WIDTH>*>(x + c);
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
    if columns > 1 and logits.stride(1) != 1:
        logits = logits.contiguous()
    target = target.contiguous()
    stride = logits.stride(0)
    name = TYPES[logits.dtype]
    device = logits.device
    grad = torch.empty((rows, columns), dtype=logits.dtype, device=device)
    count = torch.empty((), dtype=torch.float32, device=device)
    loss = torch.empty((), dtype=torch.float32, device=device)

    vector = 16 // logits.element_size()
    aligned = all(n % vector == 0 for n in (columns, stride, logits.storage_offset()))
    threads = 1024 // BLOCKS
    cluster = 1
    while cluster * threads * PACKS * 8 < columns:
        cluster *= 2
    streamed = (
        aligned
        and logits.element_size() == 2
        and columns >= STREAM_FROM
        and cluster <= MAX_CLUSTER
        and torch.cuda.get_device_capability(device)[0] >= 9
    )

    if streamed:
        packs = -(-columns // (cluster * threads * 8))
        sms = torch.cuda.get_device_properties(device).multi_processor_count
        clusters = sms * BLOCKS // cluster
        if cluster > 2 * BLOCKS:  # these may not fill every GPC, and a second wave would be a waste
            clusters = max(clusters * 7 // 8, 1)
        clusters = min(clusters, rows)
        parts = clusters * cluster
        losses = torch.empty(parts, dtype=torch.float32, device=device)
        kernel = cuda_kernel(
            f"rows_streamed<{name}, {threads}, {packs}, {cluster}, {SLOTS}, {BLOCKS}>", SOURCE
        )
        kernel.launch(
            (parts,),
            (threads,),
            logits,
            target,
            count,
            losses,
            grad,
            stride,
            rows,
            columns,
            ignore_index,
            shared=SLOTS * threads * 16,
            cluster=(cluster,) if cluster > 1 else None,
        )
        mean = cuda_kernel("mean_loss<256>", SOURCE)
        mean.launch((1,), (256,), losses, count, loss, parts, pdl=True)
        return loss, grad

    losses = torch.empty(rows, dtype=torch.float32, device=device)
    counting = cuda_kernel("count_targets<1024>", SOURCE)
    counting.launch((1,), (1024,), target, count, rows, ignore_index)
    width = vector if aligned else 1  # rows that start anywhere are read element by element
    kernel = cuda_kernel(f"rows_two_pass<{name}, {width}, 256>", SOURCE)
    kernel.launch(
        (rows,),
        (256,),
        logits,
        target,
        count,
        losses,
        grad,
        stride,
        columns,
        ignore_index,
    )
    mean = cuda_kernel("mean_loss<256>", SOURCE)
    mean.launch((1,), (256,), losses, count, loss, rows, pdl=True)
    return loss, grad
