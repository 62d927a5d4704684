"""Cross entropy with its gradient: two groups of warps take rows in turn, rows stay on chip as raw words.

One persistent block per SM. A producer warp streams chunks through a ring of 224 KiB by bulk copies.
Two groups of 256 threads take the block's rows alternately: while one writes the gradient of a row,
the other sums up the next. A group keeps the first HELD_KIB of its row as packed words in registers
(those chunks are freed at once), the rest stays in the ring until its gradient is written: 131072
columns of bf16 are 64 KiB in registers and 192 KiB in the ring, and are read once. Exponentials are
recomputed from the raw words. Longer rows read what does not fit again, backwards, from the L2.

The first sweeps follow row by row: named barriers pass the turn, so that no group waits for a phase
of the ring that is more than one round ahead.

Rows need not be aligned: up to 7 elements before and after the 16-byte packs go by themselves.
"""

import torch
from kagent_sandbox.lang import cuda_kernel

CHUNK = 8192  # bytes of a bulk copy, a stage of the ring
HELD_KIB = 64  # of a row in the registers of its group: a register per thread and KiB
TUNE = {"CHUNK": [8192, 16384], "HELD_KIB": [48, 64]}

GROUP = 256  # threads of each of the two groups
RING = 229376  # bytes

SOURCE = r"""
#include <cuda_bf16.h>
#include <cuda_fp16.h>

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
  static __device__ __forceinline__ unsigned larger(unsigned a, unsigned b) {
    return __float_as_uint(fmaxf(__uint_as_float(a), __uint_as_float(b)));
  }
  static __device__ __forceinline__ float largest(unsigned a) { return __uint_as_float(a); }
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
  static __device__ __forceinline__ unsigned larger(unsigned a, unsigned b) {
    __nv_bfloat162 h = __hmax2(*reinterpret_cast<__nv_bfloat162*>(&a),
                               *reinterpret_cast<__nv_bfloat162*>(&b));
    return *reinterpret_cast<unsigned*>(&h);
  }
  static __device__ __forceinline__ float largest(unsigned a) {
    return fmaxf(__uint_as_float(a << 16), __uint_as_float(a & 0xffff0000u));
  }
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
  static __device__ __forceinline__ unsigned larger(unsigned a, unsigned b) {
    __half2 h = __hmax2(*reinterpret_cast<__half2*>(&a), *reinterpret_cast<__half2*>(&b));
    return *reinterpret_cast<unsigned*>(&h);
  }
  static __device__ __forceinline__ float largest(unsigned a) {
    const float2 f = __half22float2(*reinterpret_cast<__half2*>(&a));
    return fmaxf(f.x, f.y);
  }
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

__device__ __forceinline__ void bulk_load(void* to, const void* from, unsigned bytes, u64* barrier,
                                          u64 policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1], %2, [%3], %4;"
      :: "r"(address(to)), "l"(from), "r"(bytes), "r"(address(barrier)), "l"(policy) : "memory");
}

__device__ __forceinline__ void meet(int id, int threads) {
  asm volatile("bar.sync %0, %1;" :: "r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void announce(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" :: "r"(id), "r"(threads) : "memory");
}

// A row is `head` elements, `packs` of 16 aligned bytes, `tail` elements.
struct Parts { int head, packs, tail; };

template <typename T>
__device__ __forceinline__ Parts parts_of(const T* row, int columns) {
  constexpr int WIDTH = 16 / sizeof(T);
  const int past = static_cast<int>((reinterpret_cast<u64>(row) & 15) / sizeof(T));
  Parts parts;
  parts.head = min((WIDTH - past) & (WIDTH - 1), columns);
  parts.packs = (columns - parts.head) / WIDTH;
  parts.tail = columns - parts.head - parts.packs * WIDTH;
  return parts;
}

// Every row of logits must be misaligned as the same row of grad is: the host sees to it.
template <typename T, int GROUP, int CHUNK, int STAGES, int HELD>
__global__ void __launch_bounds__(2 * GROUP + 32, 1)
loss_and_gradient(const T* logits, const long long* target, float* losses, T* grad,
                  long long stride, int rows, int columns, long long ignore_index) {
  constexpr int WIDTH = 16 / sizeof(T);
  constexpr int WARPS = GROUP / 32;                   // of a group
  constexpr int PACKS = CHUNK / 16;                   // in a chunk
  constexpr int EACH = PACKS / GROUP;                 // of them per thread
  constexpr int KEEP = STAGES - 1;                    // at most so many chunks stay in the ring
  static_assert(EACH * GROUP == PACKS && WARPS <= 16, "whole packs per thread, pairs per warp");

  extern __shared__ __align__(128) unsigned char ring[];
  __shared__ __align__(8) u64 full[STAGES];
  __shared__ __align__(8) u64 empty[STAGES];
  __shared__ __align__(8) float2 partial[2][2][WARPS];
  __shared__ int counts[2 * WARPS];

  // The mean may take its place now: it waits for the end of this grid by itself.
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");

  const int lane = threadIdx.x % 32;
  const int step = gridDim.x;

  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; ++i) {
      barrier_init(&full[i], 1);
      barrier_init(&empty[i], WARPS);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async;" ::: "memory");
  }
  __syncthreads();

  int slot = 0;                                       // of the ring, and its parity
  unsigned phase = 0;

  if (threadIdx.x >= 2 * GROUP) {                     // the producer
    if (lane == 0) {
      u64 pass, stay;
      asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(pass));
      asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(stay));
      long long label = blockIdx.x < rows ? target[blockIdx.x] : ignore_index;
      for (int row = blockIdx.x; row < rows; row += step) {
        const long long next_label = row + step < rows ? target[row + step] : ignore_index;
        if (label != ignore_index) {
          const T* x = logits + row * stride;
          const Parts parts = parts_of(x, columns);
          const unsigned char* from = reinterpret_cast<const unsigned char*>(x + parts.head);
          const int chunks = (parts.packs + PACKS - 1) / PACKS;
          const int held_chunks = min(chunks, HELD);
          const int again = max(chunks - held_chunks - KEEP, 0);
          // All chunks in order, then backwards those that neither were held nor stayed.
          for (int i = 0; i < chunks + again; ++i) {
            const int k = i < chunks ? i : held_chunks + (chunks + again - 1 - i);
            const unsigned bytes = min(PACKS, parts.packs - k * PACKS) * 16;
            barrier_wait(&empty[slot], phase ^ 1);
            barrier_expect(&full[slot], bytes);
            bulk_load(ring + slot * CHUNK, from + static_cast<long long>(k) * CHUNK, bytes,
                      &full[slot], i >= held_chunks && i < held_chunks + again ? stay : pass);
            if (++slot == STAGES) {
              slot = 0;
              phase ^= 1;
            }
          }
        }
        label = next_label;
      }
    }
    return;
  }

  // The consumers. How many rows count, while the ring fills:
  int valid = 0;
#pragma unroll 8
  for (int i = threadIdx.x; i < rows; i += 2 * GROUP) valid += target[i] != ignore_index;
  valid = __reduce_add_sync(0xffffffffu, valid);
  if (lane == 0) counts[threadIdx.x / 32] = valid;
  meet(1, 2 * GROUP);
  valid = 0;
  for (int i = 0; i < 2 * WARPS; ++i) valid += counts[i];
  const float count = static_cast<float>(valid);
  const float share = 1.0f / count;                   // unused if no row counts

  const int group = threadIdx.x / GROUP;
  const int tid = threadIdx.x % GROUP;
  const int warp = tid / 32;
  const int mine = 2 + group;                         // barriers: of the group, of its turn
  const int my_turn = 4 + group;
  const int other_turn = 5 - group;

  auto label_of = [&](int row) -> long long { return row < rows ? target[row] : ignore_index; };
  // Over the chunks of a row that is the other group's.
  auto skip = [&](int row, long long label) {
    if (label == ignore_index) return;
    const Parts parts = parts_of<T>(grad + static_cast<long long>(row) * columns, columns);
    const int chunks = (parts.packs + PACKS - 1) / PACKS;
    slot += chunks + max(chunks - min(chunks, HELD) - KEEP, 0);
    while (slot >= STAGES) {
      slot -= STAGES;
      phase ^= 1;
    }
  };
  auto advance = [&]() {
    if (++slot == STAGES) {
      slot = 0;
      phase ^= 1;
    }
  };

  if (group == 1) skip(blockIdx.x, label_of(blockIdx.x));
  int row = blockIdx.x + group * step;
  long long label = label_of(row);
  long long other_label = label_of(row + step);
  unsigned parity = 0;

  for (; row < rows; row += 2 * step) {
    const long long next_label = label_of(row + 2 * step);
    const long long next_other = label_of(row + 3 * step);
    const bool first = row == static_cast<int>(blockIdx.x);
    const bool last = row + step >= rows;
    T* g = grad + static_cast<long long>(row) * columns;
    const Parts parts = parts_of<T>(g, columns);
    uint4* out = reinterpret_cast<uint4*>(g + parts.head);

    int edge = -1;                                    // the column outside of the packs, if any
    if (tid < parts.head) edge = tid;
    else if (tid >= WIDTH && tid - WIDTH < parts.tail) edge = columns - parts.tail + tid - WIDTH;

    if (label == ignore_index) {
      if (!first) meet(my_turn, 2 * GROUP);
      if (!last) announce(other_turn, 2 * GROUP);
      for (int p = tid; p < parts.packs; p += GROUP) __stcs(out + p, make_uint4(0, 0, 0, 0));
      if (edge >= 0) from_float(0.0f, g[edge]);
      if (tid == 0) losses[row] = 0.0f;
    } else {
      const T* x = logits + row * stride;
      const float at_label = to_float(x[label]);
      const float at_edge = edge >= 0 ? to_float(x[edge]) : __uint_as_float(0xff800000u);
      float maximum = fmaxf(LOWEST, at_edge);
      float sum = raise2((at_edge - maximum) * LOG2E);

      const int chunks = (parts.packs + PACKS - 1) / PACKS;
      const int held_chunks = min(chunks, HELD);
      const int rest = chunks - held_chunks;
      const int again = max(rest - KEEP, 0);

      auto load = [&](uint4 (&raw)[EACH], int k) {
        constexpr unsigned none = Format<T>::NOTHING;
        const int left = parts.packs - k * PACKS;
        const uint4* chunk = reinterpret_cast<const uint4*>(ring + slot * CHUNK);
        barrier_wait(&full[slot], phase);
#pragma unroll
        for (int e = 0; e < EACH; ++e) {
          raw[e] = make_uint4(none, none, none, none);
          if (e * GROUP + tid < left) raw[e] = chunk[e * GROUP + tid];
        }
      };
      auto release = [&]() {
        __syncwarp();
        if (lane == 0) barrier_arrive(&empty[slot]);
      };
      auto fold = [&](const uint4 (&raw)[EACH]) {
        unsigned high = Format<T>::NOTHING;
#pragma unroll
        for (int e = 0; e < EACH; ++e) {
          const unsigned a = Format<T>::larger(raw[e].x, raw[e].y);
          const unsigned b = Format<T>::larger(raw[e].z, raw[e].w);
          high = Format<T>::larger(high, Format<T>::larger(a, b));
        }
        const float higher = fmaxf(maximum, Format<T>::largest(high));
        float sums[4] = {sum * raise2((maximum - higher) * LOG2E), 0.0f, 0.0f, 0.0f};
        maximum = higher;
#pragma unroll
        for (int e = 0; e < EACH; ++e) {
          float v[WIDTH];
          Format<T>::unpack(raw[e], v);
#pragma unroll
          for (int i = 0; i < WIDTH; ++i) sums[i % 4] += raise2((v[i] - maximum) * LOG2E);
        }
        sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
      };

      // The first sweep, as the chunks come, after that of the row before.
      if (!first) meet(my_turn, 2 * GROUP);
      uint4 held[HELD][EACH];
#pragma unroll
      for (int h = 0; h < HELD; ++h) {
        if (h < chunks) {
          load(held[h], h);
          release();
          fold(held[h]);
          advance();
        }
      }
      int back = slot;                                // where the second sweep begins
      unsigned back_phase = phase;
      for (int k = held_chunks; k < chunks; ++k) {
        if (k == held_chunks + again) {
          back = slot;
          back_phase = phase;
        }
        uint4 raw[EACH];
        load(raw, k);
        if (k < held_chunks + again) release();
        fold(raw);
        advance();
      }
      if (again == 0 && !last) announce(other_turn, 2 * GROUP);

      // One pair per warp. Two sets of places: nobody can be two rows ahead of a warp that reads.
      const float warp_maximum = warp_max(maximum);
      sum = warp_sum(sum * raise2((maximum - warp_maximum) * LOG2E));
      if (lane == 0) partial[group][parity][warp] = make_float2(warp_maximum, sum);
      meet(mine, GROUP);
      const float2 pair = lane < WARPS ? partial[group][parity][lane] : make_float2(LOWEST, 0.0f);
      parity ^= 1;
      const float top = warp_max(pair.x);
      const float total = warp_sum(pair.y * raise2((pair.x - top) * LOG2E));

      // The difference first: where the model is sure, it is 0, and the logarithm keeps its digits.
      if (tid == 0) losses[row] = logf(total) + (top - at_label);
      const float scale = 1.0f / total * share;
      const float bias = -__log2f(total * count);     // the same in the exponent, for 16 bits
      auto gradient = [&](float value) -> float {
        if constexpr (sizeof(T) == 4) return raise2((value - top) * LOG2E) * scale;
        else return raise2(fmaf(value - top, LOG2E, bias));
      };
      auto store = [&](const uint4& raw, int p) {
        if (p < parts.packs) {
          float v[WIDTH];
          Format<T>::unpack(raw, v);
#pragma unroll
          for (int i = 0; i < WIDTH; ++i) v[i] = gradient(v[i]);
          __stcs(out + p, Format<T>::pack(v));
        }
      };

      // The second sweep: what stayed in the ring, what came again, what the registers hold.
      if (rest > 0) {
        slot = back;
        phase = back_phase;
      }
      for (int j = 0; j < rest; ++j) {
        const int k = j < rest - again ? held_chunks + again + j : held_chunks + (rest - 1 - j);
        uint4 raw[EACH];
        load(raw, k);
        release();
#pragma unroll
        for (int e = 0; e < EACH; ++e) store(raw[e], k * PACKS + e * GROUP + tid);
        advance();
      }
      if (again > 0 && !last) announce(other_turn, 2 * GROUP);
#pragma unroll
      for (int h = 0; h < HELD; ++h) {
        if (h < chunks) {
#pragma unroll
          for (int e = 0; e < EACH; ++e) store(held[h][e], h * PACKS + e * GROUP + tid);
        }
      }
      if (edge >= 0) from_float(gradient(at_edge), g[edge]);

      // At the label (p - 1) * share, by expm1 without cancellation: by the thread that has just
      // written there, so that its second store is the later one.
      const int at = static_cast<int>(label) - parts.head;
      const bool inside = at >= 0 && at < parts.packs * WIDTH;
      if (inside ? (at / WIDTH) % GROUP == tid : edge == static_cast<int>(label))
        from_float(expm1f(-(logf(total) + (top - at_label))) * share, g[label]);
    }
    skip(row + step, other_label);
    label = next_label;
    other_label = next_other;
  }
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
    vector = 16 // logits.element_size()
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

    processors = torch.cuda.get_device_properties(logits.device).multi_processor_count
    blocks = max(1, min(rows, processors))
    kernel = cuda_kernel(
        f"loss_and_gradient<{TYPES[logits.dtype]}, {GROUP}, {CHUNK}, {RING // CHUNK}, "
        f"{HELD_KIB * 1024 // CHUNK}>",
        SOURCE,
    )
    kernel.launch(
        (blocks,),
        (2 * GROUP + 32,),
        logits,
        target,
        losses,
        grad,
        logits.stride(0),
        rows,
        columns,
        ignore_index,
        shared=RING,
    )
    mean = cuda_kernel("mean_loss<512>", SOURCE)
    mean.launch((1,), (512,), losses, target, loss, rows, ignore_index, pdl=True)
    return loss, grad
