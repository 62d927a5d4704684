"""Cross entropy with its gradient: long rows streamed through a ring of shared memory, read once.

Long rows (over 32 KiB, 16-byte aligned): persistent blocks, one per SM. TMA bulk copies fill a ring
of chunks, one 16-byte word per thread each, always ahead of the row that is being worked on. Each
thread folds every word into an online (maximum, sum) as it arrives and keeps the raw word in a
register; after one exchange per row the ring is refilled at once, and the gradient is computed from
the registers. Rows over 128 KiB are divided among a cluster (2 blocks for 131072 columns in bf16).
Every block counts the targets for itself while its first loads are under way.

Short or unaligned rows: in the registers of a block or a cluster, one block or cluster per row.
Rows too long for that, and long rows on GPUs older than Hopper, are read twice.
"""

import torch
import triton
from kagent_sandbox.lang import cuda_kernel

STREAM_THREADS = 512  # of a persistent block, one per SM: more threads keep fewer words each
RING_KIB = 208  # shared memory for rows to come
TUNE = {"STREAM_THREADS": [512, 1024], "RING_KIB": [144, 208]}

ELEMENTS = 32  # short and unaligned rows: per thread, kept in registers as float32
THREADS = 512  # short and unaligned rows: per block at most

MAX_CLUSTER = 8  # 16 works on an H100, but is not portable
BLOCK_WORDS = 8192  # 16-byte words of a row that a persistent block keeps: half the registers
LONG_WORDS = 2048  # rows of more 16-byte words than this are streamed
MANY_ROWS = 65536  # beyond this, counting in every block costs more than one launch

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

// A 16-byte word of T: its elements as float32 and back, and a word of minus infinities.
template <typename T> struct Word;
template <> struct Word<float> {
  static constexpr unsigned LOWEST = 0xff800000u;
  static __device__ void unpack(const uint4& q, float (&x)[4]) {
    x[0] = __uint_as_float(q.x);
    x[1] = __uint_as_float(q.y);
    x[2] = __uint_as_float(q.z);
    x[3] = __uint_as_float(q.w);
  }
  static __device__ uint4 pack(const float (&y)[4]) {
    return make_uint4(__float_as_uint(y[0]), __float_as_uint(y[1]), __float_as_uint(y[2]),
                      __float_as_uint(y[3]));
  }
};
template <> struct Word<__half> {
  static constexpr unsigned LOWEST = 0xfc00fc00u;
  static __device__ void two(unsigned u, float& a, float& b) {
    const float2 f = __half22float2(*reinterpret_cast<const __half2*>(&u));
    a = f.x;
    b = f.y;
  }
  static __device__ unsigned one(float a, float b) {
    const __half2 h = __floats2half2_rn(a, b);
    return *reinterpret_cast<const unsigned*>(&h);
  }
  static __device__ void unpack(const uint4& q, float (&x)[8]) {
    two(q.x, x[0], x[1]);
    two(q.y, x[2], x[3]);
    two(q.z, x[4], x[5]);
    two(q.w, x[6], x[7]);
  }
  static __device__ uint4 pack(const float (&y)[8]) {
    return make_uint4(one(y[0], y[1]), one(y[2], y[3]), one(y[4], y[5]), one(y[6], y[7]));
  }
};
template <> struct Word<__nv_bfloat16> {
  static constexpr unsigned LOWEST = 0xff80ff80u;
  static __device__ void two(unsigned u, float& a, float& b) {
    a = __uint_as_float(u << 16);
    b = __uint_as_float(u & 0xffff0000u);
  }
  static __device__ unsigned one(float a, float b) {
    const __nv_bfloat162 h = __floats2bfloat162_rn(a, b);
    return *reinterpret_cast<const unsigned*>(&h);
  }
  static __device__ void unpack(const uint4& q, float (&x)[8]) {
    two(q.x, x[0], x[1]);
    two(q.y, x[2], x[3]);
    two(q.z, x[4], x[5]);
    two(q.w, x[6], x[7]);
  }
  static __device__ uint4 pack(const float (&y)[8]) {
    return make_uint4(one(y[0], y[1]), one(y[2], y[3]), one(y[4], y[5]), one(y[6], y[7]));
  }
};

// The online recurrence, one rescale per word. -inf everywhere: shift by 0, all terms are 0.
template <int WIDTH>
__device__ void fold(float& peak, float& total, const float (&x)[WIDTH]) {
  float top = peak;
#pragma unroll
  for (int i = 0; i < WIDTH; ++i) top = fmaxf(top, x[i]);
  const float shift = top == -CUDART_INF_F ? 0.0f : top;
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < WIDTH; ++i) sum += exponential(x[i] - shift);
  total = total * exponential(peak - shift) + sum;
  peak = top;
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

__device__ unsigned shared_address(const void* p) {
  return static_cast<unsigned>(__cvta_generic_to_shared(p));
}
__device__ void barrier_init(unsigned barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(barrier) : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
__device__ void barrier_arrive(unsigned barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(barrier) : "memory");
}
__device__ void barrier_expect(unsigned barrier, unsigned bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
               :: "r"(barrier), "r"(bytes) : "memory");
}
__device__ void barrier_wait(unsigned barrier, unsigned parity) {
  unsigned done;
  do {
    asm volatile(
        "{ .reg .pred p;\n"
        "  mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "  selp.u32 %0, 1, 0, p; }"
        : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
  } while (!done);
}
__device__ void bulk_load(unsigned to, const void* from, unsigned bytes, unsigned barrier) {
  unsigned long long policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1], %2, [%3], %4;"
      :: "r"(to), "l"(from), "r"(bytes), "r"(barrier), "l"(policy) : "memory");
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
mean_loss(const float* losses, const float* count, float* loss, int terms) {
  float sum = 0.0f;
  for (int i = threadIdx.x; i < terms; i += THREADS) sum += losses[i];
  sum = block_sum<THREADS>(sum);
  if (threadIdx.x == 0) *loss = sum / *count;          // 0 / 0 = NaN, as torch has it
}

// Persistent: a cluster takes the rows group, group + groups, ...; its blocks share each row.
// A block's part of a row is `words` 16-byte words, in `chunks` chunks of one word per thread, which
// pass through a ring of `stages` chunks. Chunk q of the block's whole sequence lies in slot
// q % stages and completes phase q / stages of that slot's barrier; a row that is ignored takes its
// slots as well, but moves no bytes. There is one block-wide barrier in every row, ignored or not:
// after it, the slots of the row are free and each is refilled by a warp of its own.
template <typename T, int WORDS, int THREADS, int CLUSTER>
__global__ void __launch_bounds__(THREADS, 1)
rows_streamed(const T* logits, const long long* target, const float* counted, float* count,
              float* losses, T* grad, long long stride, int rows, int columns, int stages,
              int ignore) {
#if __CUDA_ARCH__ >= 900
  constexpr int WIDTH = 16 / sizeof(T);
  constexpr int WARPS = THREADS / 32;
  extern __shared__ __align__(128) unsigned char ring[];
  __shared__ float2 partial[2][CLUSTER * WARPS];      // (maximum, sum) of every warp of the row
  __shared__ __align__(8) unsigned long long full[64];
  __shared__ int2 plan[WARPS];                        // where each warp's refill comes from

  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  const int rank = CLUSTER > 1 ? static_cast<int>(cluster_rank()) : 0;
  const int groups = gridDim.x / CLUSTER, group = blockIdx.x / CLUSTER;
  const int row_words = columns / WIDTH;
  const int block_words = (row_words + CLUSTER - 1) / CLUSTER;
  const int begin = rank * block_words;
  const int words = max(0, min(block_words, row_words - begin));
  const int chunks = (words + THREADS - 1) / THREADS;

  if constexpr (CLUSTER > 1) cluster_started();       // "my shared memory exists": awaited below

  auto issue = [&](int slot, int row, int chunk, bool ignored) {
    const unsigned barrier = shared_address(&full[slot]);
    if (ignored) {
      barrier_arrive(barrier);                        // an empty phase
    } else {
      const int from = chunk * THREADS;
      const unsigned bytes = min(THREADS, words - from) * 16;
      barrier_expect(barrier, bytes);
      bulk_load(shared_address(ring) + slot * (THREADS * 16),
                reinterpret_cast<const uint4*>(logits + row * stride) + begin + from, bytes,
                barrier);
    }
  };

  // Fill the ring: each of the first threads has a slot of its own.
  if (thread < stages) {
    barrier_init(shared_address(&full[thread]));
    if (chunks > 0) {
      const int row = group + thread / chunks * groups;
      if (row < rows) issue(thread, row, thread % chunks, static_cast<int>(target[row]) == ignore);
    }
  }
  // The slot of chunk q takes chunk q + stages next: the same distance in every row.
  int ahead = ignore;                                 // label of the row of this warp's next refill
  if (lane == 0 && warp < chunks) {
    plan[warp] = make_int2((warp + stages) / chunks * groups, (warp + stages) % chunks);
    const int to = group + plan[warp].x;
    if (to < rows) ahead = static_cast<int>(target[to]);
  }
  int label = group < rows ? static_cast<int>(target[group]) : ignore;

  // How many rows count, while the first loads are under way.
  float share;
  if (counted != nullptr) {
    share = 1.0f / *counted;
  } else {
    int valid = 0;
#pragma unroll 8
    for (int row = thread; row < rows; row += THREADS)
      valid += static_cast<int>(target[row]) != ignore;
    valid = block_sum<THREADS>(valid);
    if (blockIdx.x == 0 && thread == 0) *count = static_cast<float>(valid);
    share = 1.0f / static_cast<float>(valid);         // infinite only if no row uses it
  }
  __syncthreads();                                    // the barriers of the ring are initialised
  if constexpr (CLUSTER > 1) cluster_wait();          // all blocks of the cluster have started

  int slot = 0;
  unsigned phase = 0;
  int buffer = 0;
  float mine = 0.0f;                                  // losses of the labels that this thread met

  for (int row = group; row < rows; row += groups) {
    const int next = row + groups;
    const int next_label = next < rows ? static_cast<int>(target[next]) : ignore;
    uint4* out = reinterpret_cast<uint4*>(grad + static_cast<long long>(row) * columns) + begin;

    auto refill = [&]() {
      if (lane == 0 && warp < chunks) {
        const int2 source = plan[warp];
        const int to = row + source.x;
        if (to < rows) {
          int at = slot + warp;
          if (at >= stages) at -= stages;
          issue(at, to, source.y, ahead == ignore);
          const int later = to + groups;
          if (later < rows) ahead = static_cast<int>(target[later]);
        }
      }
      __syncwarp();
    };

    if (label == ignore) {                            // for all blocks of the cluster
      __syncthreads();
      refill();
      for (int i = thread; i < words; i += THREADS) __stcs(out + i, make_uint4(0, 0, 0, 0));
    } else {
      uint4 kept[WORDS];
      float peak = -CUDART_INF_F, total = 0.0f;
      // The load of a word is issued before the fold of the one before it.
#pragma unroll
      for (int w = 0; w <= WORDS; ++w) {
        if (w < WORDS) {
          constexpr unsigned LOWEST = Word<T>::LOWEST;
          kept[w < WORDS ? w : 0] = make_uint4(LOWEST, LOWEST, LOWEST, LOWEST);
          if (w < chunks) {
            int at = slot + w;
            unsigned parity = phase;
            if (at >= stages) {
              at -= stages;
              parity ^= 1;
            }
            barrier_wait(shared_address(&full[at]), parity);
            if (w * THREADS + thread < words)
              kept[w < WORDS ? w : 0] = reinterpret_cast<const uint4*>(ring)[at * THREADS + thread];
          }
        }
        if (w > 0 && w - 1 < chunks) {
          float x[WIDTH];
          Word<T>::unpack(kept[w > 0 ? w - 1 : 0], x);
          fold<WIDTH>(peak, total, x);
        }
      }

      const float top = warp_max(peak);
      const float shift = top == -CUDART_INF_F ? 0.0f : top;
      const float sum = warp_sum(total * exponential(peak - shift));
      float2* pairs = partial[buffer];
      buffer ^= 1;                                    // read until the next row's barrier
      if constexpr (CLUSTER > 1) {
        if (lane < CLUSTER) store_remote(&pairs[rank * WARPS + warp], lane, make_float2(top, sum));
        cluster_arrive();
        cluster_wait();
      } else {
        if (lane == 0) pairs[warp] = make_float2(top, sum);
        __syncthreads();
      }
      refill();                                       // everybody has the row in registers

      float row_maximum = -CUDART_INF_F, row_sum = 0.0f;
      for (int i = lane; i < CLUSTER * WARPS; i += 32) row_maximum = fmaxf(row_maximum, pairs[i].x);
      row_maximum = warp_max(row_maximum);
      for (int i = lane; i < CLUSTER * WARPS; i += 32)
        row_sum += pairs[i].y * exponential(pairs[i].x - row_maximum);
      row_sum = warp_sum(row_sum);

      const float inverse = 1.0f / row_sum;
      const float weight = inverse * share;
      const float logarithm = logf(row_sum);
      const int label_word = label / WIDTH - begin, label_at = label % WIDTH;
#pragma unroll
      for (int w = 0; w < WORDS; ++w) {
        const int index = w * THREADS + thread;
        if (index < words) {
          float x[WIDTH], y[WIDTH];
          Word<T>::unpack(kept[w], x);
#pragma unroll
          for (int i = 0; i < WIDTH; ++i) y[i] = exponential(x[i] - row_maximum) * weight;
          if (index == label_word) {
            float at_label = 0.0f;
#pragma unroll
            for (int i = 0; i < WIDTH; ++i)
              if (i == label_at) at_label = x[i];
            // The mean's factor comes last: p - 1 cancels, which would magnify its rounding.
            const float special = (exponential(at_label - row_maximum) * inverse - 1.0f) * share;
#pragma unroll
            for (int i = 0; i < WIDTH; ++i)
              if (i == label_at) y[i] = special;
            // The difference first: where the model is sure, it is 0.
            mine += logarithm + (row_maximum - at_label);
          }
          __stcs(out + index, Word<T>::pack(y));
        }
      }
    }

    label = next_label;
    slot += chunks;
    if (slot >= stages) {
      slot -= stages;
      phase ^= 1;
    }
  }

  mine = block_sum<THREADS>(mine);
  if (thread == 0) losses[blockIdx.x] = mine;
#endif
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
    if columns > 1 and logits.stride(1) != 1:
        logits = logits.contiguous()
    target = target.contiguous()
    device = logits.device
    grad = torch.empty((rows, columns), dtype=logits.dtype, device=device)
    count, loss = (torch.empty((), dtype=torch.float32, device=device) for _ in range(2))

    vector = 16 // logits.element_size()
    aligned = all(n % vector == 0 for n in (columns, logits.stride(0), logits.storage_offset()))
    clusters = torch.cuda.get_device_capability(device)[0] >= 9

    words = columns // vector
    cluster = triton.next_power_of_2(triton.cdiv(words, BLOCK_WORDS)) if words else 1
    streamed = (
        clusters
        and aligned
        and words > LONG_WORDS
        and cluster <= MAX_CLUSTER
        and -(2**31) <= ignore_index < 2**31
    )

    if not streamed or rows > MANY_ROWS:
        counting = cuda_kernel("count_targets<1024>", SOURCE)
        counting.launch((1,), (1024,), target, count, rows, ignore_index)

    if streamed:
        threads = STREAM_THREADS
        each = triton.cdiv(triton.cdiv(words, cluster), threads)  # words per thread
        each += each % 2  # fewer kernels to compile
        stages = RING_KIB * 1024 // (threads * 16)
        groups = torch.cuda.get_device_properties(device).multi_processor_count // cluster
        if cluster > 2:
            # Parts of the chip with 14 or 18 processors hold no whole number of such clusters, and
            # one that has to wait for another would double the time.
            groups -= 3
        groups = max(1, min(rows, groups))
        losses = torch.empty(groups * cluster, dtype=torch.float32, device=device)
        name = f"rows_streamed<{TYPES[logits.dtype]}, {each}, {threads}, {cluster}>"
        cuda_kernel(name, SOURCE).launch(
            (groups * cluster,),
            (threads,),
            logits,
            target,
            count if rows > MANY_ROWS else None,
            count,
            losses,
            grad,
            logits.stride(0),
            rows,
            columns,
            stages,
            ignore_index,
            shared=stages * threads * 16,
            cluster=(cluster,) if cluster > 1 else None,
        )
        mean = cuda_kernel("mean_loss<256>", SOURCE)
        mean.launch((1,), (256,), losses, count, loss, groups * cluster)
        return loss, grad

    losses = torch.empty(rows, dtype=torch.float32, device=device)
    width = vector if aligned else 1  # rows that start anywhere are read element by element
    most = min(1024, 32768 // ELEMENTS)  # threads whose values fit an SM's registers
    sharing = max(128, triton.next_power_of_2(triton.cdiv(columns, ELEMENTS)))
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
