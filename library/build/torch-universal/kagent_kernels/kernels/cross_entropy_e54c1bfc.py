"""Cross entropy with its gradient: rows on chip as raw words, fed by a TMA ring, read once.

Long rows (over 32 KiB, 16-byte aligned): persistent blocks. A ring of shared memory chunks, one
16-byte word per thread each, is kept full by bulk copies of the rows to come. A row passes from the
ring into registers, unconverted: 128 KiB per SM, half of the register file. One exchange of pairs
(maximum, sum), then the ring is refilled and the gradient is computed from the registers. Two
blocks share an SM where a row is at most 64 KiB; rows over 128 KiB take a cluster of blocks.

Which row comes next is drawn from a counter, `depth` + 1 rows ahead of its use, so that no SM ends
late; a small kernel ahead (overlapped) sets the counter and counts the targets. A block adds up the
losses of its rows, which are others every time: the loss differs in its last bits. Loads are
evict-first, stores by default not: what the L2 holds in the end is gradient, not logits.

Short rows: one block per row, as float32 in registers. All others: two reads.
"""

import torch
import triton
from .._runtime import cuda_kernel

THREADS = 512  # of a persistent block
RESIDENT = 1  # persistent blocks per SM, where the registers hold as many rows
RING_KIB = 208  # shared memory of an SM for rows to come
STORE = 1  # 0: ordinary stores; 1: evict-first (st.global.cs)
TUNE = {"THREADS": [512, 1024], "RESIDENT": [1, 2], "RING_KIB": [144, 208], "STORE": [0, 1]}

SM_WORDS = 8192  # 16-byte words in the registers of an SM: half of the register file
LONG_WORDS = 2048  # rows of more 16-byte words than this are streamed
MAX_CLUSTER = 8

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

// exp(x), where the maximum has been subtracted already.
__device__ float exponential(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x * 1.4426950408889634f));
  return y;
}
// What to subtract from values of this maximum: -inf - -inf would be NaN.
__device__ float shift_of(float maximum) { return maximum == -CUDART_INF_F ? 0.0f : maximum; }

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
// In a fixed order: of the same numbers the same bits.
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
// Pairs (maximum, sum of exp(x - maximum)) of all warps of a row, merged by every warp for itself.
__device__ float2 merge(const float2* pairs, int n) {
  const int lane = threadIdx.x % 32;
  float top = -CUDART_INF_F, sum = 0.0f;
  for (int i = lane; i < n; i += 32) top = fmaxf(top, pairs[i].x);
  top = warp_max(top);
  // A warp of nothing but -inf has weight 0; a row of nothing but -inf is NaN, as torch has it.
  for (int i = lane; i < n; i += 32) sum += pairs[i].y * exponential(pairs[i].x - top);
  return make_float2(top, warp_sum(sum));
}

// A 16-byte word of T. `peak` keeps a packed running maximum, `top` reduces it to one float.
template <typename T> struct Word;
template <> struct Word<float> {
  static constexpr unsigned LOWEST = 0xff800000u;
  static __device__ unsigned peak(unsigned a, const uint4& q) {
    return __float_as_uint(fmaxf(
        __uint_as_float(a),
        fmaxf(fmaxf(__uint_as_float(q.x), __uint_as_float(q.y)),
              fmaxf(__uint_as_float(q.z), __uint_as_float(q.w)))));
  }
  static __device__ float top(unsigned a) { return __uint_as_float(a); }
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
template <typename Derived>
struct HalfWord {
  static __device__ unsigned peak(unsigned a, const uint4& q) {
    return Derived::larger(
        a, Derived::larger(Derived::larger(q.x, q.y), Derived::larger(q.z, q.w)));
  }
  static __device__ float top(unsigned u) {
    float a, b;
    Derived::two(u, a, b);
    return fmaxf(a, b);
  }
  static __device__ void unpack(const uint4& q, float (&x)[8]) {
    Derived::two(q.x, x[0], x[1]);
    Derived::two(q.y, x[2], x[3]);
    Derived::two(q.z, x[4], x[5]);
    Derived::two(q.w, x[6], x[7]);
  }
  static __device__ uint4 pack(const float (&y)[8]) {
    return make_uint4(Derived::one(y[0], y[1]), Derived::one(y[2], y[3]),
                      Derived::one(y[4], y[5]), Derived::one(y[6], y[7]));
  }
};
template <> struct Word<__half> : HalfWord<Word<__half>> {
  static constexpr unsigned LOWEST = 0xfc00fc00u;
  static __device__ unsigned larger(unsigned a, unsigned b) {
    const __half2 m =
        __hmax2(*reinterpret_cast<const __half2*>(&a), *reinterpret_cast<const __half2*>(&b));
    return *reinterpret_cast<const unsigned*>(&m);
  }
  static __device__ void two(unsigned u, float& a, float& b) {
    const float2 f = __half22float2(*reinterpret_cast<const __half2*>(&u));
    a = f.x;
    b = f.y;
  }
  static __device__ unsigned one(float a, float b) {
    const __half2 h = __floats2half2_rn(a, b);
    return *reinterpret_cast<const unsigned*>(&h);
  }
};
template <> struct Word<__nv_bfloat16> : HalfWord<Word<__nv_bfloat16>> {
  static constexpr unsigned LOWEST = 0xff80ff80u;
  static __device__ unsigned larger(unsigned a, unsigned b) {
    const __nv_bfloat162 m = __hmax2(*reinterpret_cast<const __nv_bfloat162*>(&a),
                                     *reinterpret_cast<const __nv_bfloat162*>(&b));
    return *reinterpret_cast<const unsigned*>(&m);
  }
  static __device__ void two(unsigned u, float& a, float& b) {
    a = __uint_as_float(u << 16);
    b = __uint_as_float(u & 0xffff0000u);
  }
  static __device__ unsigned one(float a, float b) {
    const __nv_bfloat162 h = __floats2bfloat162_rn(a, b);
    return *reinterpret_cast<const unsigned*>(&h);
  }
};

#if __CUDA_ARCH__ >= 900
__device__ unsigned shared_address(const void* p) {
  return static_cast<unsigned>(__cvta_generic_to_shared(p));
}
__device__ int cluster_rank() {
  int rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
__device__ void cluster_started() { asm volatile("barrier.cluster.arrive.relaxed.aligned;"); }
__device__ void cluster_arrive() {
  __syncwarp();
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
__device__ void store_remote(const float2* local, int rank, float2 value) {
  asm volatile(
      "{ .reg .b32 remote;\n"
      "  mapa.shared::cluster.u32 remote, %0, %1;\n"
      "  st.shared::cluster.v2.f32 [remote], {%2, %3}; }"
      :: "r"(shared_address(local)), "r"(rank), "f"(value.x), "f"(value.y) : "memory");
}
__device__ void store_remote_int(const int* local, int rank, int value) {
  asm volatile(
      "{ .reg .b32 remote;\n"
      "  mapa.shared::cluster.u32 remote, %0, %1;\n"
      "  st.shared::cluster.u32 [remote], %2; }"
      :: "r"(shared_address(local)), "r"(rank), "r"(value) : "memory");
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
#endif

template <int THREADS>
__global__ void __launch_bounds__(THREADS)
count_targets(const long long* target, float* count, int* counter, int start, int rows,
              long long ignore_index) {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
  if (counter != nullptr && threadIdx.x == 0) *counter = start;
  int valid = 0;
#pragma unroll 8
  for (int row = threadIdx.x; row < rows; row += THREADS) valid += target[row] != ignore_index;
  valid = block_sum<THREADS>(valid);
  if (threadIdx.x == 0) *count = static_cast<float>(valid);
}

template <int THREADS>
__global__ void __launch_bounds__(THREADS)
mean_loss(const float* losses, const float* count, float* loss, int terms) {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");  // the launch may overlap the kernel before
#endif
  float sum = 0.0f;
  for (int i = threadIdx.x; i < terms; i += THREADS) sum += losses[i];
  sum = block_sum<THREADS>(sum);
  if (threadIdx.x == 0) *loss = sum / *count;         // 0 / 0 = NaN, as torch has it
}

// Persistent: a cluster's items 0 ... depth are the rows group, group + groups, ... While item k is
// summed, item k + depth + 1 is drawn from the counter; item k's barrier publishes it. A cluster's
// blocks share each row.
// A block's part of a row is `words` 16-byte words, in `chunks` chunks of one word per thread. They
// pass through a ring of `stages` chunks. Chunk q of the block's sequence lies in slot q % stages
// and completes phase q / stages of that slot's barrier; an ignored row takes its slots too, but
// moves no bytes. Every row has one block-wide barrier, ignored or not: no warp can come two phases
// ahead of a refill. After it the row's slots are free, and each is refilled by one warp.
template <int STORE>
__device__ __forceinline__ void put(uint4* to, const uint4& q) {
  if constexpr (STORE == 1) __stcs(to, q);
  else *to = q;
}

template <typename T, int WORDS, int THREADS, int RESIDENT, int CLUSTER, int STORE>
__global__ void __launch_bounds__(THREADS, RESIDENT)
rows_streamed(const T* logits, const long long* target, const float* count, int* counter,
              float* losses, T* grad, long long stride, int rows, int columns, int stages,
              int depth, int ignore) {
#if __CUDA_ARCH__ >= 900
  constexpr int WIDTH = 16 / sizeof(T);
  constexpr int WARPS = THREADS / 32;
  extern __shared__ __align__(128) unsigned char ring[];
  __shared__ float2 partial[2][CLUSTER * WARPS];
  __shared__ __align__(8) unsigned long long full[64];
  __shared__ int2 plan[WARPS];                        // each warp's refill: items ahead, chunk
  constexpr int QUEUE = 16;                           // more than depth + 3
  __shared__ int queue[QUEUE];                        // the row of item k, at k % QUEUE

  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  const int rank = CLUSTER > 1 ? cluster_rank() : 0;
  const int groups = gridDim.x / CLUSTER, group = blockIdx.x / CLUSTER;
  const int row_words = columns / WIDTH;
  const int block_words = (row_words + CLUSTER - 1) / CLUSTER;
  const int begin = rank * block_words;
  const int words = max(0, min(block_words, row_words - begin));
  const int chunks = (words + THREADS - 1) / THREADS;

  if constexpr (CLUSTER > 1) cluster_started();       // awaited before the first remote store

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

  // Fill the ring: one thread per slot.
  if (thread < stages) {
    barrier_init(shared_address(&full[thread]));
    if (chunks > 0) {
      const int row = group + thread / chunks * groups;
      if (row < rows) issue(thread, row, thread % chunks, static_cast<int>(target[row]) == ignore);
    }
  }
  // Chunk q + stages follows chunk q in its slot: the same distance in every row.
  int ahead = ignore;                                 // label of the row of the warp's next refill
  if (lane == 0 && warp < chunks) {
    const int2 mine = make_int2((warp + stages) / chunks, (warp + stages) % chunks);
    plan[warp] = mine;
    const int to = group + mine.x * groups;           // mine.x <= depth
    if (to < rows) ahead = static_cast<int>(target[to]);
  }
  int label = group < rows ? static_cast<int>(target[group]) : ignore;

  if (thread <= depth) queue[thread] = group + thread * groups;
  asm volatile("griddepcontrol.wait;" ::: "memory");  // the counter is set, the targets counted
  const float share = 1.0f / *count;                  // infinite only if no row uses it
  __syncthreads();                                    // the ring's barriers are initialised
  if constexpr (CLUSTER > 1) cluster_wait();

  int slot = 0, buffer = 0;
  unsigned phase = 0;
  float loss = 0.0f;                                  // of the labels that this thread met

  for (int k = 0;; ++k) {
    const int row = queue[k & (QUEUE - 1)];                 // published at least one barrier ago
    if (row >= rows) break;                           // so are all later items
    uint4* out = reinterpret_cast<uint4*>(grad + static_cast<long long>(row) * columns) + begin;
    int drawn = 0;
    if (thread == 0 && rank == 0) drawn = atomicAdd(counter, 1);

    // Item k + depth + 1, before the barrier of item k.
    auto publish = [&]() {
      if (thread == 0 && rank == 0) {
        int* at = &queue[(k + depth + 1) & (QUEUE - 1)];
        if constexpr (CLUSTER > 1) {
#pragma unroll
          for (int r = 0; r < CLUSTER; ++r) store_remote_int(at, r, drawn);
        } else {
          *at = drawn;
        }
      }
    };
    auto label_of_next = [&]() {
      const int next = queue[(k + 1) & (QUEUE - 1)];
      return next < rows ? static_cast<int>(target[next]) : ignore;
    };
    auto refill = [&]() {
      if (lane == 0 && warp < chunks) {
        const int2 source = plan[warp];
        const int item = k + source.x;
        const int to = queue[item & (QUEUE - 1)];
        if (to < rows) {
          int at = slot + warp;
          if (at >= stages) at -= stages;
          issue(at, to, source.y, ahead == ignore);
          const int then = queue[(item + 1) & (QUEUE - 1)];
          if (then < rows) ahead = static_cast<int>(target[then]);
        }
      }
      __syncwarp();
    };
    int next_label;

    if (label == ignore) {                            // for all blocks of the cluster
      publish();
      if constexpr (CLUSTER > 1) {
        cluster_arrive();
        cluster_wait();
      } else {
        __syncthreads();
      }
      refill();
      next_label = label_of_next();
      for (int i = thread; i < words; i += THREADS) put<STORE>(out + i, make_uint4(0, 0, 0, 0));
    } else {
      // The row into registers, with a packed maximum on the way.
      uint4 kept[WORDS];
      unsigned packed = Word<T>::LOWEST;
#pragma unroll
      for (int w = 0; w < WORDS; ++w) {
        constexpr unsigned LOWEST = Word<T>::LOWEST;
        kept[w] = make_uint4(LOWEST, LOWEST, LOWEST, LOWEST);
        if (w < chunks) {
          int at = slot + w;
          unsigned parity = phase;
          if (at >= stages) {
            at -= stages;
            parity ^= 1;
          }
          barrier_wait(shared_address(&full[at]), parity);
          if (w * THREADS + thread < words)
            kept[w] = reinterpret_cast<const uint4*>(ring)[at * THREADS + thread];
          packed = Word<T>::peak(packed, kept[w]);
        }
      }

      // The sum relative to this thread's maximum, then to the warp's.
      const float peak = Word<T>::top(packed);
      const float base = shift_of(peak);
      float total = 0.0f;
#pragma unroll
      for (int w = 0; w < WORDS; ++w) {
        if (w < chunks) {
          float x[WIDTH];
          Word<T>::unpack(kept[w], x);
          float part = 0.0f;
#pragma unroll
          for (int i = 0; i < WIDTH; ++i) part += exponential(x[i] - base);
          total += part;
        }
      }
      const float top = warp_max(peak);
      const float sum = warp_sum(total * exponential(peak - shift_of(top)));
      float2* pairs = partial[buffer];
      buffer ^= 1;                                    // these are read until the next barrier
      publish();
      if constexpr (CLUSTER > 1) {
        if (lane < CLUSTER) store_remote(&pairs[rank * WARPS + warp], lane, make_float2(top, sum));
        cluster_arrive();
        cluster_wait();
      } else {
        if (lane == 0) pairs[warp] = make_float2(top, sum);
        __syncthreads();
      }
      refill();                                       // all threads have the row in registers
      next_label = label_of_next();

      const float2 all = merge(pairs, CLUSTER * WARPS);
      const float inverse = 1.0f / all.y;
      const float weight = inverse * share;
      const int label_word = label / WIDTH - begin, label_at = label % WIDTH;
#pragma unroll
      for (int w = 0; w < WORDS; ++w) {
        const int index = w * THREADS + thread;
        if (index < words) {
          float x[WIDTH], y[WIDTH];
          Word<T>::unpack(kept[w], x);
#pragma unroll
          for (int i = 0; i < WIDTH; ++i) y[i] = exponential(x[i] - all.x) * weight;
          if (index == label_word) {
            float at_label = 0.0f;
#pragma unroll
            for (int i = 0; i < WIDTH; ++i)
              if (i == label_at) at_label = x[i];
            // The mean's factor last: p - 1 cancels, which would magnify its rounding.
            const float special = (exponential(at_label - all.x) * inverse - 1.0f) * share;
#pragma unroll
            for (int i = 0; i < WIDTH; ++i)
              if (i == label_at) y[i] = special;
            loss += logf(all.y) + (all.x - at_label);  // 0 difference where the model is sure
          }
          put<STORE>(out + index, Word<T>::pack(y));
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

  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  loss = block_sum<THREADS>(loss);
  if (thread == 0) losses[blockIdx.x] = loss;
#endif
}

// WIDTH elements that one instruction moves.
template <typename T, int WIDTH>
struct alignas(sizeof(T) * WIDTH) Pack { T at[WIDTH]; };

// One block per row, all of it in registers: rows of up to 32 x 1024 columns, at any alignment with
// WIDTH = 1.
template <typename T, int WIDTH, int ELEMENTS, int THREADS>
__global__ void __launch_bounds__(THREADS)
rows_in_block(const T* logits, const long long* target, const float* count, float* losses, T* grad,
              long long stride, int columns, long long ignore_index) {
  constexpr int STEP = THREADS * WIDTH;
  __shared__ float2 pairs[THREADS / 32];
  using Piece = Pack<T, WIDTH>;
  const long long row = blockIdx.x;
  const long long label = target[row];
  const int first = threadIdx.x * WIDTH;
  const T* x = logits + row * stride;
  T* g = grad + row * columns;

  if (label == ignore_index) {
    Piece zero;
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) from_float(0.0f, zero.at[i]);
    for (int c = first; c < columns; c += STEP) *reinterpret_cast<Piece*>(g + c) = zero;
    if (threadIdx.x == 0) losses[row] = 0.0f;
    return;
  }

  const float at_label = to_float(x[label]);
  const float share = 1.0f / *count;                  // not 0: this row counts
  float v[ELEMENTS];
  float peak = -CUDART_INF_F;
#pragma unroll
  for (int e = 0; e < ELEMENTS; e += WIDTH) {
    const int c = first + e / WIDTH * STEP;
    if (c < columns) {
      const Piece piece = *reinterpret_cast<const Piece*>(x + c);
#pragma unroll
      for (int i = 0; i < WIDTH; ++i) v[e + i] = to_float(piece.at[i]);
    } else {
#pragma unroll
      for (int i = 0; i < WIDTH; ++i) v[e + i] = -CUDART_INF_F;
    }
  }
#pragma unroll
  for (int e = 0; e < ELEMENTS; ++e) peak = fmaxf(peak, v[e]);
  const float top = warp_max(peak);
  const float base = shift_of(top);
  float sum = 0.0f;
#pragma unroll
  for (int e = 0; e < ELEMENTS; ++e) {
    v[e] = exponential(v[e] - base);
    sum += v[e];
  }
  sum = warp_sum(sum);
  if (threadIdx.x % 32 == 0) pairs[threadIdx.x / 32] = make_float2(top, sum);
  __syncthreads();
  const float2 all = merge(pairs, THREADS / 32);
  if (threadIdx.x == 0) losses[row] = logf(all.y) + (all.x - at_label);
  const float scale = exponential(top - all.x) / all.y;   // 0 for a warp of -inf

#pragma unroll
  for (int e = 0; e < ELEMENTS; e += WIDTH) {
    const int c = first + e / WIDTH * STEP;
    if (c < columns) {
      Piece piece;
#pragma unroll
      for (int i = 0; i < WIDTH; ++i) {
        const float p = v[e + i] * scale;
        from_float((c + i == label ? p - 1.0f : p) * share, piece.at[i]);
      }
      *reinterpret_cast<Piece*>(g + c) = piece;
    }
  }
}

// One block per row of any length and alignment, read twice.
template <typename T, int THREADS>
__global__ void __launch_bounds__(THREADS)
rows_twice(const T* logits, const long long* target, const float* count, float* losses, T* grad,
           long long stride, int columns, long long ignore_index) {
  constexpr int BATCH = 8;                            // loads in flight per thread
  __shared__ float2 pairs[THREADS / 32];
  const long long row = blockIdx.x;
  const long long label = target[row];
  const T* x = logits + row * stride;
  T* g = grad + row * columns;

  if (label == ignore_index) {
    for (long long c = threadIdx.x; c < columns; c += THREADS) from_float(0.0f, g[c]);
    if (threadIdx.x == 0) losses[row] = 0.0f;
    return;
  }

  float peak = -CUDART_INF_F, total = 0.0f;
  for (long long c = threadIdx.x; c < columns; c += BATCH * THREADS) {
    float v[BATCH];
    float higher = peak;
#pragma unroll
    for (int i = 0; i < BATCH; ++i)
      v[i] = c + i * THREADS < columns ? to_float(x[c + i * THREADS]) : -CUDART_INF_F;
#pragma unroll
    for (int i = 0; i < BATCH; ++i) higher = fmaxf(higher, v[i]);
    const float base = shift_of(higher);
    float part = 0.0f;
#pragma unroll
    for (int i = 0; i < BATCH; ++i) part += exponential(v[i] - base);
    total = total * exponential(peak - base) + part;
    peak = higher;
  }
  const float top = warp_max(peak);
  const float sum = warp_sum(total * exponential(peak - shift_of(top)));
  if (threadIdx.x % 32 == 0) pairs[threadIdx.x / 32] = make_float2(top, sum);
  __syncthreads();
  const float2 all = merge(pairs, THREADS / 32);
  if (threadIdx.x == 0) losses[row] = logf(all.y) + (all.x - to_float(x[label]));

  const float inverse = 1.0f / all.y;
  const float share = 1.0f / *count;
  for (long long c = threadIdx.x; c < columns; c += BATCH * THREADS) {
    float v[BATCH];
#pragma unroll
    for (int i = 0; i < BATCH; ++i)
      v[i] = c + i * THREADS < columns ? to_float(x[c + i * THREADS]) : 0.0f;
#pragma unroll
    for (int i = 0; i < BATCH; ++i) {
      const long long at = c + i * THREADS;
      const float p = exponential(v[i] - all.x) * inverse;
      if (at < columns) from_float((at == label ? p - 1.0f : p) * share, g[at]);
    }
  }
}
"""

TYPES = {torch.float32: "float", torch.float16: "__half", torch.bfloat16: "__nv_bfloat16"}


def cross_entropy(
    logits: torch.Tensor, target: torch.Tensor, ignore_index: int
) -> tuple[torch.Tensor, torch.Tensor]:
    rows, columns = logits.shape
    device = logits.device
    dtype = TYPES[logits.dtype]
    grad = torch.empty((rows, columns), dtype=logits.dtype, device=device)
    count, loss = (torch.empty((), dtype=torch.float32, device=device) for _ in range(2))

    vector = 16 // logits.element_size()
    aligned = all(n % vector == 0 for n in (columns, logits.stride(0), logits.storage_offset()))
    hopper = torch.cuda.get_device_capability(device)[0] >= 9

    words = columns // vector
    cluster = triton.next_power_of_2(triton.cdiv(words, SM_WORDS)) if words else 1
    streamed = (
        hopper
        and aligned
        and words > LONG_WORDS
        and cluster <= MAX_CLUSTER
        and -(2**31) <= ignore_index < 2**31
    )

    counting = cuda_kernel("count_targets<1024>", SOURCE)
    if streamed:
        threads = THREADS
        resident = max(1, min(RESIDENT, 1024 // threads))
        if words * resident > SM_WORDS:
            resident = 1
        each = triton.cdiv(triton.cdiv(words, cluster), threads)  # words per thread
        each += each % 2  # fewer kernels to compile
        stages = RING_KIB * 1024 // resident // (threads * 16)
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        groups = processors * resident // cluster
        if cluster > 2:
            # A part of the chip may hold no whole number of such clusters, and one that has to wait
            # until another has ended would double the time.
            groups -= 3
        groups = max(1, min(rows, groups))
        terms = groups * cluster
        # How many rows ahead of the current one a refill may reach, in the block of fewest chunks.
        part = triton.cdiv(words, cluster)
        fewest = max(1, triton.cdiv(words - (cluster - 1) * part, threads))
        depth = (fewest - 1 + stages) // fewest
        counter = torch.empty(1, dtype=torch.int32, device=device)
        counting.launch(
            (1,), (1024,), target, count, counter, (depth + 1) * groups, rows, ignore_index
        )
        losses = torch.empty(terms, dtype=torch.float32, device=device)
        name = f"rows_streamed<{dtype}, {each}, {threads}, {resident}, {cluster}, {STORE}>"
        cuda_kernel(name, SOURCE).launch(
            (terms,),
            (threads,),
            logits,
            target,
            count,
            counter,
            losses,
            grad,
            logits.stride(0),
            rows,
            columns,
            stages,
            depth,
            ignore_index,
            shared=stages * threads * 16,
            cluster=(cluster,) if cluster > 1 else None,
            pdl=True,
        )
    else:
        counting.launch((1,), (1024,), target, count, None, 0, rows, ignore_index)
        terms = rows
        losses = torch.empty(terms, dtype=torch.float32, device=device)
        width = vector if aligned else 1
        if columns <= 32768:
            threads = triton.next_power_of_2(triton.cdiv(columns, 16))
            threads = max(32, min(1024, threads))
            elements = max(width, triton.next_power_of_2(triton.cdiv(columns, threads)))
            name = f"rows_in_block<{dtype}, {width}, {elements}, {threads}>"
        else:
            threads = 1024
            name = f"rows_twice<{dtype}, {threads}>"
        cuda_kernel(name, SOURCE).launch(
            (rows,),
            (threads,),
            logits,
            target,
            count,
            losses,
            grad,
            logits.stride(0),
            columns,
            ignore_index,
        )

    mean = cuda_kernel("mean_loss<512>", SOURCE)
    mean.launch((1,), (512,), losses, count, loss, terms, pdl=hopper)
    return loss, grad
