"""Linear cross entropy over chunks of tokens; logits turn into their gradient on chip, read once.

torch's matrix products around a kernel that turns a chunk's logits into their gradient in place.
Long rows (over 32 KiB) pass from a ring of bulk copies into the registers of a cluster of blocks,
and leave as gradient: 128256 logits of a row are 250 KiB, and what runs at once of a kernel that
reads rows twice is more than L2 holds. Other rows, and those of GPUs before Hopper: a block each,
which reads 16-byte words, each thread keeping a running maximum and sum, merges these once, then
reads the row again, which L2 still holds, and writes. Rows start at multiples of 16 bytes whatever
the vocabulary, so that all accesses are wide.

Memory against time and accuracy as in every chunked form: scratch is CHUNK x vocabulary; each chunk
reads the weight twice and updates all of dw, and each update rounds dw to bf16.
"""

import torch
import triton
from .._runtime import cuda_kernel

TUNE = {"CHUNK": [512, 1024, 2048, 4096], "THREADS": [256, 512, 1024], "UNROLL": [1, 2, 4]}
CHUNK = 4096  # tokens
THREADS = 1024  # per row
UNROLL = 1  # 16-byte words in flight per thread
RING_KIB = 208  # shared memory of an SM for rows to come
SM_WORDS = 8192  # 16-byte words in the registers of an SM: half of the register file
LONG_WORDS = 2048  # rows of more 16-byte words than this are streamed
STREAM_THREADS = 512
MAX_CLUSTER = 8

SOURCE = r"""
#include <cuda_bf16.h>
#include <cuda_fp16.h>

constexpr int WIDTH = 8;  // elements of a 16-byte word
constexpr int WARPS = THREADS / 32;

__device__ float to_float(__half x) { return __half2float(x); }
__device__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ void from_float(float x, __half& y) { y = __float2half_rn(x); }
__device__ void from_float(float x, __nv_bfloat16& y) { y = __float2bfloat16_rn(x); }

struct alignas(16) Word { SCALAR at[WIDTH]; };

// Maximum of some numbers and the sum of exp(number - maximum). Nothing: the lowest float and 0,
// which merges without a special case, as minus infinity would not.
struct State {
  float maximum, sum;
};
constexpr float LOWEST = -3.402823466e38f;

__device__ State merge(State a, State b) {
  const float maximum = fmaxf(a.maximum, b.maximum);
  return {maximum,
          a.sum * __expf(a.maximum - maximum) + b.sum * __expf(b.maximum - maximum)};
}

// Merged over the block, in every thread.
__device__ State merge_block(State mine) {
  __shared__ State warps[WARPS];
#pragma unroll
  for (int d = 16; d > 0; d /= 2)
    mine = merge(mine, {__shfl_xor_sync(0xffffffff, mine.maximum, d),
                        __shfl_xor_sync(0xffffffff, mine.sum, d)});
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = mine;
  __syncthreads();
  State all = warps[0];
  for (int w = 1; w < WARPS; ++w) all = merge(all, warps[w]);
  return all;
}

// One block per row of z [rows, vocab], whose rows are `pitch` elements apart (a multiple of 8).
// In: logits. Out: their gradient, and the row's loss.
extern "C" __global__ void __launch_bounds__(THREADS)
loss_and_gradient(SCALAR* z, const long long* target, const float* count, float* losses,
                  long long pitch, int vocab, long long ignore_index) {
  SCALAR* row = z + blockIdx.x * pitch;
  Word* words = reinterpret_cast<Word*>(row);
  const int last = (vocab + WIDTH - 1) / WIDTH;  // the last word may reach into the padding
  const long long t = target[blockIdx.x];
  if (t == ignore_index) {
    const Word zeros = {};
    for (int w = threadIdx.x; w < last; w += THREADS) words[w] = zeros;
    if (threadIdx.x == 0) losses[blockIdx.x] = 0.0f;
    return;
  }
  const float z_target = to_float(row[t]);  // before anything is overwritten: barrier below

  State state = {LOWEST, 0.0f};
#pragma unroll UNROLL
  for (int w = threadIdx.x; w < last; w += THREADS) {
    const Word word = words[w];
    float x[WIDTH];
    float largest = LOWEST;
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) {
      x[i] = w * WIDTH + i < vocab ? to_float(word.at[i]) : LOWEST;
      largest = fmaxf(largest, x[i]);
    }
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) sum += __expf(x[i] - largest);
    state = merge(state, {largest, sum});
  }
  state = merge_block(state);

  const float share = 1.0f / *count;  // at least this row counts
  const float scale = share / state.sum;
#pragma unroll UNROLL
  for (int w = threadIdx.x; w < last; w += THREADS) {
    Word word = words[w];
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) {
      const float p = __expf(to_float(word.at[i]) - state.maximum) * scale;
      from_float(w * WIDTH + i == t ? p - share : p, word.at[i]);
    }
    words[w] = word;
  }
  if (threadIdx.x == 0) losses[blockIdx.x] = state.maximum + __logf(state.sum) - z_target;
}

// One block. Without losses: the number of targets that count, so that the host need not wait for
// it. With them: their mean, 0 / 0 = NaN if nothing counts, like torch.
extern "C" __global__ void __launch_bounds__(THREADS)
over_tokens(const long long* target, const float* losses, float* count, float* loss, int tokens,
            long long ignore_index) {
  __shared__ float warps[WARPS];
  float sum = 0.0f;
  for (int i = threadIdx.x; i < tokens; i += THREADS)
    sum += losses ? losses[i] : (target[i] == ignore_index ? 0.0f : 1.0f);
#pragma unroll
  for (int d = 16; d > 0; d /= 2) sum += __shfl_xor_sync(0xffffffff, sum, d);
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int w = 1; w < WARPS; ++w) sum += warps[w];
    if (losses)
      *loss = sum / *count;
    else
      *count = sum;
  }
}
"""

STREAMED = r"""
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <math_constants.h>

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

// Persistent: a cluster's items 0 ... depth are the rows group, group + groups, ... While item k is
// summed, item k + depth + 1 is drawn from the counter (0 at first); item k's barrier publishes it.
// A cluster's blocks share each row.
// A block's part of a row is `words` 16-byte words, in `chunks` chunks of one word per thread. They
// pass through a ring of `stages` chunks. Chunk q of the block's sequence lies in slot q % stages
// and completes phase q / stages of that slot's barrier; an ignored row takes its slots too, but
// moves no bytes. Every row has one block-wide barrier, ignored or not: no warp can come two phases
// ahead of a refill. After it the row's slots are free, and each is refilled by one warp.
template <typename T, int WORDS, int THREADS, int CLUSTER>
__global__ void __launch_bounds__(THREADS, 1)
rows_streamed(T* z, const long long* target, const float* count, int* counter, float* losses,
              long long stride, int rows, int columns, int stages, int depth, int ignore) {
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
                reinterpret_cast<const uint4*>(z + row * stride) + begin + from, bytes,
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
  const float share = 1.0f / *count;                  // infinite only if no row uses it
  __syncthreads();                                    // the ring's barriers are initialised
  if constexpr (CLUSTER > 1) cluster_wait();

  int slot = 0, buffer = 0;
  unsigned phase = 0;
  float loss = 0.0f;                                  // of the labels that this thread met

  for (int k = 0;; ++k) {
    const int row = queue[k & (QUEUE - 1)];                 // published at least one barrier ago
    if (row >= rows) break;                           // so are all later items
    uint4* out = reinterpret_cast<uint4*>(z + static_cast<long long>(row) * stride) + begin;
    int drawn = 0;
    if (thread == 0 && rank == 0) drawn = atomicAdd(counter, 1) + (depth + 1) * groups;

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
      for (int i = thread; i < words; i += THREADS) out[i] = make_uint4(0, 0, 0, 0);
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
          out[index] = Word<T>::pack(y);
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

  loss = block_sum<THREADS>(loss);
  if (thread == 0) losses[blockIdx.x] = loss;
#endif
}
"""


def linear_cross_entropy(
    x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, ignore_index: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Mean loss (fp32) of x [T, D] @ weight.T [D, V] against target [T], and d loss / dx and dw."""
    tokens, vocab = x.shape[0], weight.shape[0]
    defines = {
        "SCALAR": "__nv_bfloat16" if x.dtype == torch.bfloat16 else "__half",
        "THREADS": THREADS,
        "UNROLL": UNROLL,
    }
    tokens_kernel = cuda_kernel("over_tokens", SOURCE, defines=defines)
    count, loss = (torch.empty((), dtype=torch.float32, device=x.device) for _ in range(2))
    dx, dw = torch.empty_like(x), torch.empty_like(weight)
    pitch = -(-vocab // 16) * 16
    logits = torch.empty(min(CHUNK, tokens), pitch, dtype=x.dtype, device=x.device)

    words = vocab // 8
    streamed = (
        LONG_WORDS < words <= MAX_CLUSTER * SM_WORDS
        and vocab % 8 == 0
        and -(2**31) <= ignore_index < 2**31
        and torch.cuda.get_device_capability(x.device)[0] >= 9
    )
    starts = range(0, tokens, CHUNK)
    if streamed:
        cluster = triton.next_power_of_2(triton.cdiv(words, SM_WORDS))
        processors = torch.cuda.get_device_properties(x.device).multi_processor_count
        # A part of the chip may hold no whole number of clusters of more than 2.
        most = processors // cluster - (3 if cluster > 2 else 0)
        part = triton.cdiv(words, cluster)
        each = triton.cdiv(part, STREAM_THREADS)  # words per thread
        each += each % 2  # fewer kernels to compile
        stages = RING_KIB * 1024 // (STREAM_THREADS * 16)
        fewest = max(1, triton.cdiv(words - (cluster - 1) * part, STREAM_THREADS))
        depth = (fewest - 1 + stages) // fewest  # rows ahead that a refill may reach
        name = f"rows_streamed<{defines['SCALAR']}, {each}, {STREAM_THREADS}, {cluster}>"
        stream_kernel = cuda_kernel(name, STREAMED)
        drawn = torch.zeros(len(starts), dtype=torch.int32, device=x.device)
        terms = len(starts) * most * cluster
    else:
        rows_kernel = cuda_kernel("loss_and_gradient", SOURCE, defines=defines)
        terms = tokens
    losses = torch.empty(terms, dtype=torch.float32, device=x.device)
    filled = 0

    tokens_kernel.launch(1, THREADS, target, None, count, loss, tokens, ignore_index)
    for chunk, start in enumerate(starts):
        rows = x[start : start + CHUNK]
        some = rows.shape[0]
        z = logits[:some, :vocab]
        torch.mm(rows, weight.t(), out=z)
        if streamed:
            blocks = cluster * min(some, most)
            stream_kernel.launch(
                blocks, STREAM_THREADS,
                z, target[start:], count, drawn[chunk:], losses[filled:], pitch, some, vocab,
                stages, depth, ignore_index,
                shared=stages * STREAM_THREADS * 16,
                cluster=(cluster,) if cluster > 1 else None,
            )  # fmt: skip
            filled += blocks
        else:
            rows_kernel.launch(
                some, THREADS,
                z, target[start:], count, losses[start:], pitch, vocab, ignore_index,
            )  # fmt: skip
            filled += some
        torch.mm(z, weight, out=dx[start : start + CHUNK])
        if start == 0:
            torch.mm(z.t(), rows, out=dw)
        else:
            dw.addmm_(z.t(), rows)
    tokens_kernel.launch(1, THREADS, target, losses, count, loss, filled, ignore_index)
    return loss, dx, dw
