"""Cross entropy with its gradient: two sweeps over rows that are held in shared memory.

Persistent blocks, each with a producer warp that runs ahead through a ring of chunks by bulk copies.
The first sweep takes a running maximum and sum as the chunks come; the second reads the same chunks
again from shared memory, frees them one by one and writes the gradient. A row longer than PART_KIB
is divided among the blocks of a cluster, which exchange (maximum, sum) pairs through distributed
shared memory, with an mbarrier per parity instead of cluster barriers. Parts that are too long even
so are read again (from the L2, if it still has them) beyond the KEEP chunks that stay.

Rows need not be aligned: up to 7 elements before and after the 16-byte packs go by themselves.
"""

import torch
from kagent_sandbox.lang import cuda_kernel

THREADS = 512  # consumers per block, beside the producer warp
PART_KIB = 160  # of a row in one block at most: a longer row gets a cluster
WAVES = 1  # blocks per place on the device: more balance the SMs, but fill the ring anew
TUNE = {"THREADS": [256, 512], "PART_KIB": [64, 160], "WAVES": [1, 4]}

CHUNK = 16384  # bytes, as in the source
STAGES = 14
KEEP = 10  # chunks of a row that stay in shared memory between the sweeps
MAX_CLUSTER = 8

SOURCE = r"""
#include <cuda_bf16.h>
#include <cuda_fp16.h>

constexpr int CHUNK = 16384;
constexpr float LOG2E = 1.4426950408889634f;
constexpr float LOWEST = -3.402823466e38f;            // finite: -inf - -inf would be NaN

typedef unsigned long long u64;

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ void from_float(float x, float& y) { y = x; }
__device__ __forceinline__ void from_float(float x, __half& y) { y = __float2half_rn(x); }
__device__ __forceinline__ void from_float(float x, __nv_bfloat16& y) { y = __float2bfloat16_rn(x); }

// 16 bytes of elements; NOTHING is -inf in every element.
template <typename T> struct Format;

template <> struct Format<float> {
  static constexpr unsigned NOTHING = 0xff800000u;
  static __device__ __forceinline__ void unpack(uint4 r, float* v) {
    v[0] = __uint_as_float(r.x);
    v[1] = __uint_as_float(r.y);
    v[2] = __uint_as_float(r.z);
    v[3] = __uint_as_float(r.w);
  }
  static __device__ __forceinline__ uint4 pack(const float* v) {
    return make_uint4(__float_as_uint(v[0]), __float_as_uint(v[1]), __float_as_uint(v[2]),
                      __float_as_uint(v[3]));
  }
};

template <> struct Format<__nv_bfloat16> {
  static constexpr unsigned NOTHING = 0xff80ff80u;
  static __device__ __forceinline__ void unpack(uint4 r, float* v) {
    const unsigned w[4] = {r.x, r.y, r.z, r.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      v[2 * i] = __uint_as_float(w[i] << 16);
      v[2 * i + 1] = __uint_as_float(w[i] & 0xffff0000u);
    }
  }
  static __device__ __forceinline__ unsigned word(float low, float high) {
    __nv_bfloat162 h = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<unsigned*>(&h);
  }
  static __device__ __forceinline__ uint4 pack(const float* v) {
    return make_uint4(word(v[0], v[1]), word(v[2], v[3]), word(v[4], v[5]), word(v[6], v[7]));
  }
};

template <> struct Format<__half> {
  static constexpr unsigned NOTHING = 0xfc00fc00u;
  static __device__ __forceinline__ void unpack(uint4 r, float* v) {
    unsigned w[4] = {r.x, r.y, r.z, r.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 f = __half22float2(*reinterpret_cast<__half2*>(&w[i]));
      v[2 * i] = f.x;
      v[2 * i + 1] = f.y;
    }
  }
  static __device__ __forceinline__ unsigned word(float low, float high) {
    __half2 h = __floats2half2_rn(low, high);
    return *reinterpret_cast<unsigned*>(&h);
  }
  static __device__ __forceinline__ uint4 pack(const float* v) {
    return make_uint4(word(v[0], v[1]), word(v[2], v[3]), word(v[4], v[5]), word(v[6], v[7]));
  }
};

__device__ __forceinline__ float raise2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
  for (int d = 16; d > 0; d /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, d));
  return x;
}

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int d = 16; d > 0; d /= 2) x += __shfl_xor_sync(0xffffffffu, x, d);
  return x;
}

__device__ __forceinline__ unsigned address(const void* p) {
  return static_cast<unsigned>(__cvta_generic_to_shared(p));
}
__device__ __forceinline__ void barrier_init(u64* barrier, unsigned count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(address(barrier)), "r"(count)
               : "memory");
}
__device__ __forceinline__ void barrier_arrive(u64* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(address(barrier)) : "memory");
}
__device__ __forceinline__ void barrier_expect(u64* barrier, unsigned bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
               :: "r"(address(barrier)), "r"(bytes) : "memory");
}
__device__ __forceinline__ void barrier_wait(u64* barrier, unsigned parity) {
  unsigned done;
  do {
    asm volatile(
        "{ .reg .pred p;\n"
        "  mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "  selp.u32 %0, 1, 0, p; }"
        : "=r"(done) : "r"(address(barrier)), "r"(parity) : "memory");
  } while (!done);
}
__device__ __forceinline__ void barrier_wait_cluster(u64* barrier, unsigned parity) {
  unsigned done;
  do {
    asm volatile(
        "{ .reg .pred p;\n"
        "  mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
        "  selp.u32 %0, 1, 0, p; }"
        : "=r"(done) : "r"(address(barrier)), "r"(parity) : "memory");
  } while (!done);
}

__device__ __forceinline__ void bulk_load(void* to, const void* from, unsigned bytes, u64* barrier,
                                          u64 policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1], %2, [%3], %4;"
      :: "r"(address(to)), "l"(from), "r"(bytes), "r"(address(barrier)), "l"(policy) : "memory");
}

// 8 bytes into the same place of another block of the cluster, counted by that block's barrier.
__device__ __forceinline__ void send(float2* place, u64* barrier, int rank, float x, float y) {
  const u64 bits = (static_cast<u64>(__float_as_uint(y)) << 32) | __float_as_uint(x);
  asm volatile(
      "{ .reg .b32 place, signal;\n"
      "  mapa.shared::cluster.u32 place, %0, %2;\n"
      "  mapa.shared::cluster.u32 signal, %1, %2;\n"
      "  st.async.shared::cluster.mbarrier::complete_tx::bytes.b64 [place], %3, [signal]; }"
      :: "r"(address(place)), "r"(address(barrier)), "r"(rank), "l"(bits) : "memory");
}

template <int CLUSTER>
__device__ __forceinline__ void all_meet() {
  if constexpr (CLUSTER > 1) {
    __syncwarp();
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
  } else {
    __syncthreads();
  }
}

template <int THREADS>
__device__ __forceinline__ void consumers_meet() {
  asm volatile("bar.sync 1, %0;" :: "n"(THREADS) : "memory");
}

// A row is `head` elements, packs of 16 aligned bytes, `tail` elements. Of the packs, this block of
// the cluster has `packs`, from `begin`.
struct Part { int head, tail, begin, packs; };

template <typename T, int CLUSTER>
__device__ __forceinline__ Part part_of(const T* row, int columns, int rank) {
  constexpr int WIDTH = 16 / sizeof(T);
  const int past = static_cast<int>((reinterpret_cast<u64>(row) & 15) / sizeof(T));
  Part part;
  part.head = min((WIDTH - past) & (WIDTH - 1), columns);
  const int all = (columns - part.head) / WIDTH;
  part.tail = columns - part.head - all * WIDTH;
  const int each = CLUSTER > 1 ? ((all + CLUSTER - 1) / CLUSTER + 7) / 8 * 8 : all;
  part.begin = min(rank * each, all);
  part.packs = min(each, all - part.begin);
  return part;
}

// Every row of logits must be misaligned as the same row of grad is: the host sees to it.
template <typename T, int THREADS, int STAGES, int CLUSTER>
__global__ void __launch_bounds__(THREADS + 32, 1)
loss_and_gradient(const T* logits, const long long* target, float* losses, T* grad,
                  long long stride, int rows, int columns, long long ignore_index, int keep) {
  constexpr int WIDTH = 16 / sizeof(T);
  constexpr int WARPS = THREADS / 32;
  constexpr int PAIRS = CLUSTER * WARPS;
  constexpr int PACKS = CHUNK / 16;                   // in a chunk
  constexpr int EACH = PACKS / THREADS;               // of them per thread
  static_assert(EACH * THREADS == PACKS, "a chunk must be a multiple of 16 bytes per thread");

  extern __shared__ __align__(128) unsigned char ring[];
  __shared__ __align__(8) u64 full[STAGES];
  __shared__ __align__(8) u64 empty[STAGES];
  __shared__ __align__(8) u64 met[2];
  __shared__ __align__(8) float2 partial[2][PAIRS];
  __shared__ int counts[WARPS];

  // The mean may take its place now: it waits for the end of this grid by itself.
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");

  const int tid = threadIdx.x;
  const int lane = tid % 32;
  const int warp = tid / 32;
  int rank = 0;
  if constexpr (CLUSTER > 1) asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  const int first_row = blockIdx.x / CLUSTER;
  const int step = gridDim.x / CLUSTER;

  if (tid == 0) {
    for (int i = 0; i < STAGES; ++i) {
      barrier_init(&full[i], 1);
      barrier_init(&empty[i], WARPS);
    }
    barrier_init(&met[0], 1);
    barrier_init(&met[1], 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async;" ::: "memory");
  }
  all_meet<CLUSTER>();

  int slot = 0;                                       // of the ring, and its parity
  unsigned phase = 0;
  long long label = first_row < rows ? target[first_row] : ignore_index;

  if (warp == WARPS) {                                // the producer
    if (lane == 0) {
      u64 pass, stay;
      asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(pass));
      asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(stay));
      for (int row = first_row; row < rows; row += step) {
        const long long next_label = row + step < rows ? target[row + step] : ignore_index;
        if (label != ignore_index) {
          const T* x = logits + row * stride;
          const Part part = part_of<T, CLUSTER>(x, columns, rank);
          const unsigned char* from = reinterpret_cast<const unsigned char*>(x + part.head) +
                                      static_cast<long long>(part.begin) * 16;
          const int chunks = (part.packs + PACKS - 1) / PACKS;
          const int again = chunks - min(chunks, keep);
          // All chunks in order, then backwards those that did not stay.
          for (int i = 0; i < chunks + again; ++i) {
            const int k = i < chunks ? i : chunks + again - 1 - i;
            const unsigned bytes = min(PACKS, part.packs - k * PACKS) * 16;
            barrier_wait(&empty[slot], phase ^ 1);
            barrier_expect(&full[slot], bytes);
            bulk_load(ring + slot * CHUNK, from + static_cast<long long>(k) * CHUNK, bytes,
                      &full[slot], i < again ? stay : pass);
            if (++slot == STAGES) {
              slot = 0;
              phase ^= 1;
            }
          }
        }
        label = next_label;
      }
    }
  } else {                                            // the consumers
    // How many rows count, while the ring fills.
    int valid = 0;
#pragma unroll 8
    for (int i = tid; i < rows; i += THREADS) valid += target[i] != ignore_index;
    valid = __reduce_add_sync(0xffffffffu, valid);
    if (lane == 0) counts[warp] = valid;
    consumers_meet<THREADS>();
    valid = 0;
    for (int i = 0; i < WARPS; ++i) valid += counts[i];
    const float count = static_cast<float>(valid);
    const float share = 1.0f / count;                 // unused if no row counts

    unsigned exchange = 0;                            // rows that were not ignored so far
    for (int row = first_row; row < rows; row += step) {
      const long long next_label = row + step < rows ? target[row + step] : ignore_index;
      const T* x = logits + row * stride;
      T* g = grad + static_cast<long long>(row) * columns;
      const Part part = part_of<T, CLUSTER>(g, columns, rank);
      uint4* out = reinterpret_cast<uint4*>(g + part.head) + part.begin;

      int edge = -1;                                  // the column outside of the packs, if any
      if (rank == 0) {
        if (tid < part.head) edge = tid;
        else if (tid >= WIDTH && tid - WIDTH < part.tail) edge = columns - part.tail + tid - WIDTH;
      }

      if (label == ignore_index) {                    // the whole cluster goes on together
        for (int p = tid; p < part.packs; p += THREADS) __stcs(out + p, make_uint4(0, 0, 0, 0));
        if (edge >= 0) from_float(0.0f, g[edge]);
        if (rank == 0 && tid == 0) losses[row] = 0.0f;
        label = next_label;
        continue;
      }

      const unsigned parity = exchange & 1;
      if constexpr (CLUSTER > 1) {
        if (tid == 0) barrier_expect(&met[parity], PAIRS * 8);
      }
      const float at_label = to_float(x[label]);
      const float at_edge = edge >= 0 ? to_float(x[edge]) : __uint_as_float(0xff800000u);
      float maximum = fmaxf(LOWEST, at_edge);
      float sum = raise2((at_edge - maximum) * LOG2E);

      // The first sweep, as the chunks come.
      const int chunks = (part.packs + PACKS - 1) / PACKS;
      const int again = chunks - min(chunks, keep);
      int back = slot;                                // where the second sweep begins
      unsigned back_phase = phase;
      for (int k = 0; k < chunks; ++k) {
        if (k == again) {
          back = slot;
          back_phase = phase;
        }
        const int left = part.packs - k * PACKS;
        const uint4* chunk = reinterpret_cast<const uint4*>(ring + slot * CHUNK);
        barrier_wait(&full[slot], phase);
        float v[EACH * WIDTH];
#pragma unroll
        for (int e = 0; e < EACH; ++e) {
          constexpr unsigned none = Format<T>::NOTHING;
          uint4 raw = make_uint4(none, none, none, none);
          if (e * THREADS + tid < left) raw = chunk[e * THREADS + tid];
          Format<T>::unpack(raw, v + e * WIDTH);
        }
        if (k < again) {
          __syncwarp();
          if (lane == 0) barrier_arrive(&empty[slot]);
        }
        float top[4] = {maximum, maximum, maximum, maximum};
#pragma unroll
        for (int i = 0; i < EACH * WIDTH; ++i) top[i % 4] = fmaxf(top[i % 4], v[i]);
        const float higher = fmaxf(fmaxf(top[0], top[1]), fmaxf(top[2], top[3]));
        float sums[4] = {sum * raise2((maximum - higher) * LOG2E), 0.0f, 0.0f, 0.0f};
        maximum = higher;
#pragma unroll
        for (int i = 0; i < EACH * WIDTH; ++i) sums[i % 4] += raise2((v[i] - maximum) * LOG2E);
        sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
        if (++slot == STAGES) {
          slot = 0;
          phase ^= 1;
        }
      }

      // One pair per warp, to every block of the row. Two sets of places: nobody can be two rows
      // ahead of a warp that still reads.
      const float warp_maximum = warp_max(maximum);
      sum = warp_sum(sum * raise2((maximum - warp_maximum) * LOG2E));
      if constexpr (CLUSTER > 1) {
        if (lane < CLUSTER)
          send(&partial[parity][rank * WARPS + warp], &met[parity], lane, warp_maximum, sum);
        __syncwarp();
        barrier_wait_cluster(&met[parity], (exchange >> 1) & 1);
      } else {
        if (lane == 0) partial[parity][warp] = make_float2(warp_maximum, sum);
        consumers_meet<THREADS>();
      }
      ++exchange;
      float2 pairs[(PAIRS + 31) / 32];
      float top = LOWEST;
#pragma unroll
      for (int i = 0; i < (PAIRS + 31) / 32; ++i) {
        pairs[i] = i * 32 + lane < PAIRS ? partial[parity][i * 32 + lane]
                                         : make_float2(LOWEST, 0.0f);
        top = fmaxf(top, pairs[i].x);
      }
      top = warp_max(top);
      float total = 0.0f;
#pragma unroll
      for (int i = 0; i < (PAIRS + 31) / 32; ++i)
        total += pairs[i].y * raise2((pairs[i].x - top) * LOG2E);
      total = warp_sum(total);

      // The difference first: where the model is sure, it is 0, and the logarithm keeps its digits.
      // The gradient at the label is (p - 1) * share, by expm1 without cancellation.
      if (rank == 0 && tid == 0) losses[row] = logf(total) + (top - at_label);
      const float scale = 1.0f / total * share;
      const float bias = -__log2f(total * count);     // the same in the exponent, for 16 bits
      auto gradient = [&](float value) -> float {
        if constexpr (sizeof(T) == 4) return raise2((value - top) * LOG2E) * scale;
        else return raise2(fmaf(value - top, LOG2E, bias));
      };
      auto label_gradient = [&]() -> float {
        return expm1f(-(logf(total) + (top - at_label))) * share;
      };

      // The second sweep: what stayed, in order, then backwards what came again.
      const int at = static_cast<int>(label) - part.head - part.begin * WIDTH;
      slot = back;
      phase = back_phase;
      for (int j = 0; j < chunks; ++j) {
        const int k = j < chunks - again ? again + j : chunks - 1 - j;
        const int left = part.packs - k * PACKS;
        const uint4* chunk = reinterpret_cast<const uint4*>(ring + slot * CHUNK);
        barrier_wait(&full[slot], phase);
        uint4 raw[EACH];
#pragma unroll
        for (int e = 0; e < EACH; ++e) {
          raw[e] = make_uint4(0, 0, 0, 0);
          if (e * THREADS + tid < left) raw[e] = chunk[e * THREADS + tid];
        }
        __syncwarp();
        if (lane == 0) barrier_arrive(&empty[slot]);
#pragma unroll
        for (int e = 0; e < EACH; ++e) {
          const int p = e * THREADS + tid;
          if (p < left) {
            float v[WIDTH];
            Format<T>::unpack(raw[e], v);
#pragma unroll
            for (int i = 0; i < WIDTH; ++i) v[i] = gradient(v[i]);
            const int hit = at - (k * PACKS + p) * WIDTH;
            if (static_cast<unsigned>(hit) < static_cast<unsigned>(WIDTH)) {
              const float special = label_gradient();
#pragma unroll
              for (int i = 0; i < WIDTH; ++i) v[i] = i == hit ? special : v[i];
            }
            __stcs(out + k * PACKS + p, Format<T>::pack(v));
          }
        }
        if (++slot == STAGES) {
          slot = 0;
          phase ^= 1;
        }
      }
      if (edge >= 0) from_float(edge == label ? label_gradient() : gradient(at_edge), g[edge]);
      label = next_label;
    }
  }
  if constexpr (CLUSTER > 1) all_meet<CLUSTER>();     // nobody leaves while others may send
}

// Counts before it waits for the kernel above.
template <int THREADS>
__global__ void __launch_bounds__(THREADS)
mean_loss(const float* losses, const long long* target, float* loss, int rows,
          long long ignore_index) {
  __shared__ float sums[THREADS / 32];
  __shared__ int counts[THREADS / 32];
  int valid = 0;
#pragma unroll 4
  for (int i = threadIdx.x; i < rows; i += THREADS) valid += target[i] != ignore_index;
  valid = __reduce_add_sync(0xffffffffu, valid);
  asm volatile("griddepcontrol.wait;" ::: "memory");
  float sum = 0.0f;
#pragma unroll 8
  for (int i = threadIdx.x; i < rows; i += THREADS) sum += losses[i];
  sum = warp_sum(sum);
  if (threadIdx.x % 32 == 0) {
    sums[threadIdx.x / 32] = sum;
    counts[threadIdx.x / 32] = valid;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    sum = 0.0f;
    valid = 0;
    for (int i = 0; i < THREADS / 32; ++i) {
      sum += sums[i];
      valid += counts[i];
    }
    *loss = sum / static_cast<float>(valid);          // 0 / 0 = NaN, as torch has it
  }
}
"""

TYPES = {torch.float32: "float", torch.float16: "__half", torch.bfloat16: "__nv_bfloat16"}


def cross_entropy(
    logits: torch.Tensor, target: torch.Tensor, ignore_index: int
) -> tuple[torch.Tensor, torch.Tensor]:
    rows, columns = logits.shape
    size = logits.element_size()
    vector = 16 // size
    # Each row must lie towards 16 bytes as the gradient's row does; odd lengths are welcome.
    if (
        (columns > 1 and logits.stride(1) != 1)
        or logits.storage_offset() % vector != 0
        or (rows > 1 and (logits.stride(0) - columns) % vector != 0)
    ):
        compact = torch.empty((rows, columns), dtype=logits.dtype, device=logits.device)
        compact.copy_(logits)
        logits = compact
    target = target.contiguous()

    grad = torch.empty((rows, columns), dtype=logits.dtype, device=logits.device)
    loss = torch.empty((), dtype=torch.float32, device=logits.device)
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)

    cluster = 1
    while cluster < MAX_CLUSTER and columns * size > cluster * PART_KIB * 1024:
        cluster *= 2
    processors = torch.cuda.get_device_properties(logits.device).multi_processor_count
    # Pairs of SMs always exist; how many larger clusters fit at once is not known: let them queue.
    waves = WAVES if cluster <= 2 else max(WAVES, 8)
    clusters = max(1, min(rows, max(processors // cluster, 1) * waves))

    kernel = cuda_kernel(
        f"loss_and_gradient<{TYPES[logits.dtype]}, {THREADS}, {STAGES}, {cluster}>", SOURCE
    )
    kernel.launch(
        (clusters * cluster,),
        (THREADS + 32,),
        logits,
        target,
        losses,
        grad,
        logits.stride(0),
        rows,
        columns,
        ignore_index,
        KEEP,
        shared=STAGES * CHUNK,
        cluster=(cluster,) if cluster > 1 else None,
    )
    mean = cuda_kernel("mean_loss<512>", SOURCE)
    mean.launch((1,), (512,), losses, target, loss, rows, ignore_index, pdl=True)
    return loss, grad
