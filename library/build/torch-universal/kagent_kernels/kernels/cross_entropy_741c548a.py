"""Cross entropy with its gradient: rows on chip as raw words, read once, by blocks that end.

Long rows (over 32 KiB, 16-byte aligned): a thread keeps 8 words of its row in registers as they
came (8 elements of bf16 in 4 registers), and more of them in shared memory, which bulk copies fill:
64 KiB of a row take a block, 256 KiB a cluster of two that exchanges pairs (maximum, sum). Two
blocks share an SM. The hardware starts blocks in the order of rows, which keeps what is read and
written at one time close together: on an H200 that is faster than persistent blocks, whose rows
drift apart (cuda_streamed.py).

A block's first act is to have the L2 fetch its part of a later row: the stream of reads goes on
through the exchanges and stores of the blocks. A small kernel ahead (overlapped) counts the
targets. The label's element is corrected by the thread that stored it, when all are stored.

Short rows: one block per row, as float32 in registers. All others: two reads.
"""

import torch
import triton
from .._runtime import cuda_kernel

WORDS = 8  # of 16 bytes in a thread's registers
HELD = 8  # of such a thread in shared memory, at most; a longer row gets a cluster
THREADS = 512  # of a block that shares an SM with another
AHEAD = 3  # MiB between a row and the one that its block has fetched into the L2; 0: none
STORE = 0  # 1: stores that are the first to leave the L2; 0: written back when their turn comes
TUNE = {"HELD": [0, 8, 14], "AHEAD": [0, 1.5, 3, 4.5], "STORE": [0, 1]}

LONG_WORDS = 2048  # rows of more 16-byte words than this are kept as words
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

__device__ float ex2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// exp(x), where the maximum has been subtracted already.
__device__ float exponential(float x) { return ex2(x * 1.4426950408889634f); }
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
__device__ void cluster_arrive() {
  __syncwarp();
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
__device__ void barrier_init(unsigned long long* barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(shared_address(barrier)) : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
__device__ void barrier_expect(unsigned long long* barrier, unsigned bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
               :: "r"(shared_address(barrier)), "r"(bytes) : "memory");
}
__device__ void barrier_wait(unsigned long long* barrier, unsigned parity) {
  unsigned done;
  do {
    asm volatile(
        "{ .reg .pred p;\n"
        "  mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "  selp.u32 %0, 1, 0, p; }"
        : "=r"(done) : "r"(shared_address(barrier)), "r"(parity) : "memory");
  } while (!done);
}
__device__ void bulk_load(void* to, const void* from, unsigned bytes,
                          unsigned long long* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
      :: "r"(shared_address(to)), "l"(from), "r"(bytes), "r"(shared_address(barrier)) : "memory");
}
#endif

template <int THREADS>
__global__ void __launch_bounds__(THREADS)
count_targets(const long long* target, float* count, int rows, long long ignore_index) {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
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

template <int STORE>
__device__ __forceinline__ void put(uint4* to, const uint4& q) {
  if constexpr (STORE == 1) __stcs(to, q);
  else *to = q;
}

#if __CUDA_ARCH__ >= 900
// To the same place in block `rank` of the cluster, counted by that block's barrier.
__device__ void send(float2* local, int rank, float2 value, unsigned long long* barrier) {
  asm volatile(
      "{ .reg .b32 to, counter;\n"
      "  mapa.shared::cluster.u32 to, %0, %4;\n"
      "  mapa.shared::cluster.u32 counter, %1, %4;\n"
      "  st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [to], {%2, %3}, [counter]; }"
      :: "r"(shared_address(local)), "r"(shared_address(barrier)), "f"(value.x), "f"(value.y),
         "r"(rank)
      : "memory");
}
__device__ void cluster_barrier_wait(unsigned long long* barrier) {
  unsigned done = 0;
  while (!done)
    asm volatile(
        "{ .reg .pred p;\n"
        "  mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], 0;\n"
        "  selp.u32 %0, 1, 0, p; }"
        : "=r"(done) : "r"(shared_address(barrier)) : "memory");
}
// Fetch into the L2 only: 16-byte aligned, a multiple of 16 bytes, nothing to wait for.
__device__ void prefetch(const void* p, unsigned bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;"
               :: "l"(__cvta_generic_to_global(p)), "r"(bytes));
}
#endif

// A row is shared by CLUSTER blocks, each with a contiguous part of it: WORDS words of each thread
// in registers, the rest in shared memory, which bulk copies fill. `ahead`: the rows between a row
// and the one that is fetched into the L2 meanwhile (0: none), not below `skip`, which run by then.
template <typename T, int WORDS, bool HELD, int THREADS, int CLUSTER, int STORE>
__global__ void __launch_bounds__(THREADS, 1024 / THREADS)
rows_packed(const T* logits, const long long* target, const float* count, float* losses, T* grad,
            long long stride, int rows, int columns, int ahead, int skip, int ignore) {
#if __CUDA_ARCH__ >= 900
  constexpr int WIDTH = 16 / sizeof(T);
  constexpr int WARPS = THREADS / 32;
  constexpr int KEPT = WORDS * THREADS;
  extern __shared__ __align__(128) uint4 held[];
  __shared__ __align__(8) unsigned long long gathered, arrived;
  __shared__ float2 pairs[CLUSTER * WARPS];
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  const int rank = CLUSTER > 1 ? cluster_rank() : 0;
  const int row = blockIdx.x / CLUSTER;
  const int whole = columns / WIDTH;
  const int part = (whole + CLUSTER - 1) / CLUSTER;
  const int begin = rank * part;
  const int words = max(0, min(part, whole - begin));
  const int in_memory = HELD ? max(0, words - KEPT) : 0;
  const uint4* from = reinterpret_cast<const uint4*>(logits + row * stride) + begin;
  uint4* to = reinterpret_cast<uint4*>(grad + static_cast<long long>(row) * columns) + begin;
  const int label = static_cast<int>(target[row]);

  if (ahead > 0 && lane == 0) {
    const int later = row + ahead;
    if (later >= skip && later < rows && static_cast<int>(target[later]) != ignore) {
      const int piece = ((words + WARPS - 1) / WARPS + 7) & ~7;
      const int fetched = min(piece, words - warp * piece);
      if (fetched > 0)
        prefetch(reinterpret_cast<const uint4*>(logits + later * stride) + begin + warp * piece,
                 fetched * 16u);
    }
  }
  __syncwarp();
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");  // mean_loss may get ready
  if (label == ignore) {                              // for all blocks of the cluster
    asm volatile("griddepcontrol.wait;" ::: "memory");  // else what follows need not wait, either
    for (int i = thread; i < words; i += THREADS) to[i] = make_uint4(0, 0, 0, 0);
    if (thread == 0 && rank == 0) losses[row] = 0.0f;
    return;
  }
  if (thread == 0) {
    if constexpr (CLUSTER > 1) {
      barrier_init(&gathered);
      barrier_expect(&gathered, CLUSTER * WARPS * 8);
    }
    if constexpr (HELD) {
      barrier_init(&arrived);
      barrier_expect(&arrived, in_memory * 16);
      for (int i = 0; i < in_memory; i += 1024)
        bulk_load(held + i, from + KEPT + i, min(1024, in_memory - i) * 16, &arrived);
    }
  }
  __syncwarp();
  uint4 kept[WORDS];
#pragma unroll
  for (int w = 0; w < WORDS; ++w) {
    constexpr unsigned LOWEST = Word<T>::LOWEST;
    kept[w] = make_uint4(LOWEST, LOWEST, LOWEST, LOWEST);
    if (thread + w * THREADS < words) kept[w] = __ldg(from + thread + w * THREADS);
  }
  // The label's word is this thread's: it corrects that element when all are stored.
  const int label_word = label / WIDTH - begin;
  const bool mine =
      label >= 0 && label_word >= 0 && label_word < words && label_word % THREADS == thread;
  const float at_label = mine ? to_float(logits[row * stride + label]) : 0.0f;
  if constexpr (CLUSTER > 1) cluster_arrive(); else __syncthreads();

  unsigned packed = Word<T>::LOWEST;
#pragma unroll
  for (int w = 0; w < WORDS; ++w) packed = Word<T>::peak(packed, kept[w]);
  if constexpr (CLUSTER > 1) cluster_wait();          // barriers are initialised, here and there
  if constexpr (HELD) {
    barrier_wait(&arrived, 0);
#pragma unroll 4
    for (int i = thread; i < in_memory; i += THREADS) packed = Word<T>::peak(packed, held[i]);
  }
  const float top = warp_max(Word<T>::top(packed));
  const float base = shift_of(top);
  float total = 0.0f;
  auto add = [&](const uint4& q) {
    float x[WIDTH];
    Word<T>::unpack(q, x);
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) sum += exponential(x[i] - base);
    total += sum;
  };
#pragma unroll
  for (int w = 0; w < WORDS; ++w) add(kept[w]);
  if constexpr (HELD) {
#pragma unroll 2
    for (int i = thread; i < in_memory; i += THREADS) add(held[i]);
  }
  const float sum = warp_sum(total);
  if constexpr (CLUSTER > 1) {
    if (lane < CLUSTER)
      send(&pairs[rank * WARPS + warp], lane, make_float2(top, sum), &gathered);
    __syncwarp();
    cluster_barrier_wait(&gathered);
  } else {
    if (lane == 0) pairs[warp] = make_float2(top, sum);
    __syncthreads();
  }
  const float2 all = merge(pairs, CLUSTER * WARPS);
  asm volatile("griddepcontrol.wait;" ::: "memory");  // the targets are counted
  const float share = 1.0f / *count;                  // not infinite: this row counts
  const float inverse = 1.0f / all.y;
  const float weight = inverse * share;
  auto put_word = [&](int at, const uint4& q) {
    float x[WIDTH];
    Word<T>::unpack(q, x);
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) x[i] = exponential(x[i] - all.x) * weight;
    put<STORE>(to + at, Word<T>::pack(x));
  };
#pragma unroll
  for (int w = 0; w < WORDS; ++w)
    if (thread + w * THREADS < words) put_word(thread + w * THREADS, kept[w]);
  if constexpr (HELD) {
#pragma unroll 2
    for (int i = thread; i < in_memory; i += THREADS) put_word(KEPT + i, held[i]);
  }
  if (mine) {
    // The mean's factor last: p - 1 cancels, which would magnify its rounding.
    const float special = (exponential(at_label - all.x) * inverse - 1.0f) * share;
    from_float(special, grad[static_cast<long long>(row) * columns + label]);
    losses[row] = logf(all.y) + (all.x - at_label);   // 0 difference where the model is sure
  }
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
    most = (WORDS + HELD) * THREADS
    cluster = 1
    while triton.cdiv(words, cluster) > most:
        cluster *= 2
    packed = (
        hopper
        and aligned
        and words > LONG_WORDS
        and cluster <= MAX_CLUSTER
        and -(2**31) <= ignore_index < 2**31
    )

    counting = cuda_kernel("count_targets<1024>", SOURCE)
    counting.launch((1,), (1024,), target, count, rows, ignore_index)
    losses = torch.empty(rows, dtype=torch.float32, device=device)
    if packed:
        held = max(0, triton.cdiv(words, cluster) - WORDS * THREADS)  # words of a block
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        resident = processors * (1024 // THREADS) // cluster  # rows that run at once
        is_held = "true" if held else "false"
        name = f"rows_packed<{dtype}, {WORDS}, {is_held}, {THREADS}, {cluster}, {STORE}>"
        cuda_kernel(name, SOURCE).launch(
            (rows * cluster,),
            (THREADS,),
            logits,
            target,
            count,
            losses,
            grad,
            logits.stride(0),
            rows,
            columns,
            int(AHEAD * 1024 * 1024) // (words * 16),
            resident,
            ignore_index,
            shared=held * 16,
            cluster=(cluster,) if cluster > 1 else None,
            pdl=True,
        )
    else:
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
    mean.launch((1,), (512,), losses, count, loss, rows, pdl=hopper)
    return loss, grad
