import torch
from kagent_sandbox.lang import cuda_kernel

GROUP = 256  # threads of each of the two consumer groups: the sums, the gradient
CHUNK = 16384  # bytes of one bulk copy, one stage of the ring
HINT = 1  # bit 0: read evict_first; bit 1: store evict-first (st.global.cs)
TUNE = {"GROUP": [128, 256], "CHUNK": [8192, 16384], "HINT": [0, 1, 3]}

RING = 229376  # bytes of shared memory for the ring
TYPES = {
    torch.bfloat16: "__nv_bfloat16",
    torch.float16: "__half",
    torch.float32: "float",
}

SOURCE = r"""
#include <cuda_bf16.h>
#include <cuda_fp16.h>

typedef unsigned int u32;
typedef unsigned long long u64;

#define K_LOG2E 1.4426950408889634f
#define K_LN2 0.6931471805599453f
#define K_LOW -1.0e38f

// ---------------------------------------------------------------- numbers
__device__ __forceinline__ float ex2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

template <typename T> struct Pack;

template <> struct Pack<__nv_bfloat16> {
  static constexpr int SIZE = 8;
  static constexpr u32 NEG = 0xFF80FF80u;
  static __device__ __forceinline__ float load(__nv_bfloat16 v) { return __bfloat162float(v); }
  static __device__ __forceinline__ __nv_bfloat16 make(float v) { return __float2bfloat16_rn(v); }
  static __device__ __forceinline__ u32 max2(u32 a, u32 b) {
    __nv_bfloat162 r = __hmax2(*reinterpret_cast<const __nv_bfloat162*>(&a),
                               *reinterpret_cast<const __nv_bfloat162*>(&b));
    return *reinterpret_cast<const u32*>(&r);
  }
  static __device__ __forceinline__ float top(u32 w) {
    return fmaxf(__uint_as_float(w << 16), __uint_as_float(w & 0xFFFF0000u));
  }
  static __device__ __forceinline__ void open(const uint4& w, float (&x)[8]) {
    const u32 v[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      x[2 * k] = __uint_as_float(v[k] << 16);
      x[2 * k + 1] = __uint_as_float(v[k] & 0xFFFF0000u);
    }
  }
  static __device__ __forceinline__ uint4 close(const float (&y)[8]) {
    u32 v[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      __nv_bfloat162 r = __floats2bfloat162_rn(y[2 * k], y[2 * k + 1]);
      v[k] = *reinterpret_cast<const u32*>(&r);
    }
    return make_uint4(v[0], v[1], v[2], v[3]);
  }
};

template <> struct Pack<__half> {
  static constexpr int SIZE = 8;
  static constexpr u32 NEG = 0xFC00FC00u;
  static __device__ __forceinline__ float load(__half v) { return __half2float(v); }
  static __device__ __forceinline__ __half make(float v) { return __float2half_rn(v); }
  static __device__ __forceinline__ u32 max2(u32 a, u32 b) {
    __half2 r = __hmax2(*reinterpret_cast<const __half2*>(&a), *reinterpret_cast<const __half2*>(&b));
    return *reinterpret_cast<const u32*>(&r);
  }
  static __device__ __forceinline__ float top(u32 w) {
    float2 f = __half22float2(*reinterpret_cast<const __half2*>(&w));
    return fmaxf(f.x, f.y);
  }
  static __device__ __forceinline__ void open(const uint4& w, float (&x)[8]) {
    const u32 v[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      float2 f = __half22float2(*reinterpret_cast<const __half2*>(&v[k]));
      x[2 * k] = f.x;
      x[2 * k + 1] = f.y;
    }
  }
  static __device__ __forceinline__ uint4 close(const float (&y)[8]) {
    u32 v[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      __half2 r = __floats2half2_rn(y[2 * k], y[2 * k + 1]);
      v[k] = *reinterpret_cast<const u32*>(&r);
    }
    return make_uint4(v[0], v[1], v[2], v[3]);
  }
};

template <> struct Pack<float> {
  static constexpr int SIZE = 4;
  static constexpr u32 NEG = 0xFF800000u;
  static __device__ __forceinline__ float load(float v) { return v; }
  static __device__ __forceinline__ float make(float v) { return v; }
  static __device__ __forceinline__ u32 max2(u32 a, u32 b) {
    return __float_as_uint(fmaxf(__uint_as_float(a), __uint_as_float(b)));
  }
  static __device__ __forceinline__ float top(u32 w) { return __uint_as_float(w); }
  static __device__ __forceinline__ void open(const uint4& w, float (&x)[4]) {
    x[0] = __uint_as_float(w.x);
    x[1] = __uint_as_float(w.y);
    x[2] = __uint_as_float(w.z);
    x[3] = __uint_as_float(w.w);
  }
  static __device__ __forceinline__ uint4 close(const float (&y)[4]) {
    return make_uint4(__float_as_uint(y[0]), __float_as_uint(y[1]), __float_as_uint(y[2]),
                      __float_as_uint(y[3]));
  }
};

// Merges the pairs (c, total) of a warp; c is the offset in units of log2.
__device__ __forceinline__ void merge_warp(float& c, float& total) {
  float m = c;
#pragma unroll
  for (int d = 16; d > 0; d >>= 1) m = fmaxf(m, __shfl_xor_sync(0xFFFFFFFFu, m, d));
  float s = total * ex2(c - m);
#pragma unroll
  for (int d = 16; d > 0; d >>= 1) s += __shfl_xor_sync(0xFFFFFFFFu, s, d);
  c = m;
  total = s;
}

// ---------------------------------------------------------------- barriers
__device__ __forceinline__ u32 shared_address(const void* p) {
  return static_cast<u32>(__cvta_generic_to_shared(p));
}
__device__ __forceinline__ void barrier_init(u64* b, u32 n) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(b)), "r"(n) : "memory");
}
__device__ __forceinline__ void barrier_expect(u64* b, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(b)), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void barrier_arrive(u64* b) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(b)) : "memory");
}
__device__ __forceinline__ void barrier_arrive_at(u64* b, u32 rank) {
  asm volatile(
      "{\n\t"
      ".reg .b32 remote;\n\t"
      "mapa.shared::cluster.u32 remote, %0, %1;\n\t"
      "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [remote];\n\t"
      "}" ::"r"(shared_address(b)), "r"(rank)
      : "memory");
}
__device__ __forceinline__ void store_pair_at(float2* p, u32 rank, float x, float y) {
  asm volatile(
      "{\n\t"
      ".reg .b32 remote;\n\t"
      "mapa.shared::cluster.u32 remote, %0, %1;\n\t"
      "st.shared::cluster.v2.f32 [remote], {%2, %3};\n\t"
      "}" ::"r"(shared_address(p)), "r"(rank), "f"(x), "f"(y)
      : "memory");
}
__device__ __forceinline__ void barrier_wait(u64* b, u32 parity) {
  const u32 a = shared_address(b);
  u32 done = 0;
  while (!done) {
    asm volatile(
        "{\n\t"
        ".reg .pred p;\n\t"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n\t"
        "selp.u32 %0, 1, 0, p;\n\t"
        "}"
        : "=r"(done)
        : "r"(a), "r"(parity)
        : "memory");
  }
}
__device__ __forceinline__ void barrier_wait_cluster(u64* b, u32 parity) {
  const u32 a = shared_address(b);
  u32 done = 0;
  while (!done) {
    asm volatile(
        "{\n\t"
        ".reg .pred p;\n\t"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n\t"
        "selp.u32 %0, 1, 0, p;\n\t"
        "}"
        : "=r"(done)
        : "r"(a), "r"(parity)
        : "memory");
  }
}
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
}

// ---------------------------------------------------------------- geometry
// head elements, then packs of 16 bytes, then tail elements; this block's packs are [begin, begin + packs).
template <int V, int C>
struct Geometry {
  int head, tail, begin, packs;
  __device__ __forceinline__ Geometry(int row, int columns, int rank) {
    const u32 shift = (static_cast<u32>(row) * static_cast<u32>(columns)) & (V - 1);
    head = static_cast<int>((0u - shift) & (V - 1));
    if (head > columns) head = columns;
    const int body = (columns - head) / V;
    tail = columns - head - body * V;
    if (C == 1) {
      begin = 0;
      packs = body;
    } else {
      const int share = (((body + C - 1) / C) + 7) & ~7;
      begin = rank * share;
      if (begin > body) begin = body;
      packs = body - begin;
      if (packs > share) packs = share;
    }
  }
};

template <int THREADS>
__device__ __forceinline__ int count_targets(const long long* target, int rows, long long ignored, int tid) {
  int n = 0;
  int i = tid;
  for (; i + 15 * THREADS < rows; i += 16 * THREADS) {
    long long v[16];
#pragma unroll
    for (int k = 0; k < 16; ++k) v[k] = target[i + k * THREADS];
#pragma unroll
    for (int k = 0; k < 16; ++k) n += v[k] != ignored;
  }
#pragma unroll 4
  for (; i < rows; i += THREADS) n += target[i] != ignored;
#pragma unroll
  for (int d = 16; d > 0; d >>= 1) n += __shfl_xor_sync(0xFFFFFFFFu, n, d);
  return n;
}

// ---------------------------------------------------------------- the kernel
// Threads [0, GROUP) take the sums, [GROUP, 2 GROUP) the gradient, the last warp feeds the ring.
template <typename T, int GROUP, int CHUNK, int STAGES, int C, int HINT>
__global__ void __launch_bounds__(2 * GROUP + 32, 1)
    pipelined_rows(const T* logits, const long long* target, float* partial, T* grad, long long stride, int rows,
                   int columns, int ignore_index) {
  constexpr int V = Pack<T>::SIZE;
  constexpr int PACKS = CHUNK / 16;
  constexpr int U = PACKS / GROUP;
  constexpr int W = GROUP / 32;
  constexpr int SLOTS = 4;
  static_assert(W * C <= 32 && U * GROUP == PACKS, "geometry");

  extern __shared__ __align__(128) unsigned char ring[];
  __shared__ __align__(8) u64 full[STAGES];
  __shared__ __align__(8) u64 empty[STAGES];
  __shared__ __align__(8) u64 stats_full[SLOTS];
  __shared__ __align__(8) u64 stats_empty[SLOTS];
  __shared__ __align__(16) float2 part[SLOTS][32];
  __shared__ double block_loss;
  __shared__ int counts[W];

  const int warp = threadIdx.x >> 5;
  const int lane = threadIdx.x & 31;
  const int rank = C == 1 ? 0 : static_cast<int>(blockIdx.x % C);
  const int first = static_cast<int>(blockIdx.x / C);
  const int step = static_cast<int>(gridDim.x / C);
  const long long ignored = ignore_index;

  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");

  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; ++i) {
      barrier_init(&full[i], 1);
      barrier_init(&empty[i], W);
    }
    for (int i = 0; i < SLOTS; ++i) {
      barrier_init(&stats_full[i], W * C);
      barrier_init(&stats_empty[i], W * C);
    }
    block_loss = 0.0;
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  }
  __syncthreads();
  if (C > 1) cluster_sync();

  int stage = 0;
  u32 phase = 0;
  long long next = first < rows ? target[first] : 0;

  if (warp == 2 * W) {
    // ------------------------------------------------ producer
    if (lane == 0) {
      u64 policy = 0;
      if (HINT & 1) asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
      for (int row = first; row < rows; row += step) {
        const long long now = next;
        if (row + step < rows) next = target[row + step];
        if (now == ignored) continue;
        const Geometry<V, C> g(row, columns, rank);
        const char* source = reinterpret_cast<const char*>(logits + row * stride + g.head) +
                             static_cast<long long>(g.begin) * 16;
        for (int left = g.packs; left > 0; left -= PACKS) {
          const u32 bytes = static_cast<u32>(left < PACKS ? left : PACKS) * 16u;
          barrier_wait(&empty[stage], phase ^ 1u);
          barrier_expect(&full[stage], bytes);
          const u32 to = shared_address(ring + stage * CHUNK);
          if (HINT & 1) {
            asm volatile(
                "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
                "[%0], [%1], %2, [%3], %4;" ::"r"(to),
                "l"(source), "r"(bytes), "r"(shared_address(&full[stage])), "l"(policy)
                : "memory");
          } else {
            asm volatile(
                "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
                "[%0], [%1], %2, [%3];" ::"r"(to),
                "l"(source), "r"(bytes), "r"(shared_address(&full[stage]))
                : "memory");
          }
          source += CHUNK;
          if (++stage == STAGES) {
            stage = 0;
            phase ^= 1u;
          }
        }
      }
    }
    __syncwarp();
  } else if (warp < W) {
    // ------------------------------------------------ running maximum and sum
    const int tid = threadIdx.x;
    int slot = 0;
    u32 slot_phase = 0;
    for (int row = first; row < rows; row += step) {
      const long long now = next;
      if (row + step < rows) next = target[row + step];
      if (now == ignored) continue;
      const Geometry<V, C> g(row, columns, rank);
      const int edges = rank == 0 ? g.head + g.tail : 0;
      float edge = __uint_as_float(0xFF800000u);
      if (tid < edges) {
        const int j = tid < g.head ? tid : columns - g.tail + (tid - g.head);
        edge = Pack<T>::load(logits[row * stride + j]);
      }
      float peak = K_LOW;
      float c = K_LOW * K_LOG2E;
      float total = 0.0f;
      for (int left = g.packs; left > 0; left -= PACKS) {
        barrier_wait(&full[stage], phase);
        const uint4* chunk = reinterpret_cast<const uint4*>(ring + stage * CHUNK);
        uint4 w[U];
#pragma unroll
        for (int u = 0; u < U; ++u) {
          const int p = tid + u * GROUP;
          w[u] = make_uint4(Pack<T>::NEG, Pack<T>::NEG, Pack<T>::NEG, Pack<T>::NEG);
          if (p < left) w[u] = chunk[p];
        }
        u32 best = Pack<T>::NEG;
#pragma unroll
        for (int u = 0; u < U; ++u) {
          const u32 a = Pack<T>::max2(w[u].x, w[u].y);
          const u32 b = Pack<T>::max2(w[u].z, w[u].w);
          best = Pack<T>::max2(best, Pack<T>::max2(a, b));
        }
        const float top = fmaxf(peak, Pack<T>::top(best));
        const float offset = top * K_LOG2E;
        float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
        for (int u = 0; u < U; ++u) {
          float x[V];
          Pack<T>::open(w[u], x);
#pragma unroll
          for (int k = 0; k < V; ++k) sum[k & 3] += ex2(fmaf(x[k], K_LOG2E, -offset));
        }
        total = fmaf(total, ex2(c - offset), (sum[0] + sum[1]) + (sum[2] + sum[3]));
        peak = top;
        c = offset;
        if (++stage == STAGES) {
          stage = 0;
          phase ^= 1u;
        }
      }
      if (edges > 0) {
        const float top = fmaxf(peak, edge);
        const float offset = top * K_LOG2E;
        total = fmaf(total, ex2(c - offset), ex2(fmaf(edge, K_LOG2E, -offset)));
        c = offset;
      }
      merge_warp(c, total);
      if (C == 1) {
        barrier_wait(&stats_empty[slot], slot_phase ^ 1u);
        if (lane == 0) {
          part[slot][warp] = make_float2(c, total);
          barrier_arrive(&stats_full[slot]);
        }
      } else {
        barrier_wait_cluster(&stats_empty[slot], slot_phase ^ 1u);
        if (lane < C) {
          store_pair_at(&part[slot][rank * W + warp], lane, c, total);
          barrier_arrive_at(&stats_full[slot], lane);
        }
      }
      __syncwarp();
      if (++slot == SLOTS) {
        slot = 0;
        slot_phase ^= 1u;
      }
    }
  } else {
    // ------------------------------------------------ gradient
    const int tid = threadIdx.x - GROUP;
    const int n = count_targets<GROUP>(target, rows, ignored, tid);
    if (lane == 0) counts[warp - W] = n;
    asm volatile("bar.sync 1, %0;" ::"n"(GROUP) : "memory");
    int valid = 0;
#pragma unroll
    for (int i = 0; i < W; ++i) valid += counts[i];
    const float share = 1.0f / static_cast<float>(valid);

    int slot = 0;
    u32 slot_phase = 0;
    for (int row = first; row < rows; row += step) {
      const long long now = next;
      if (row + step < rows) next = target[row + step];
      const Geometry<V, C> g(row, columns, rank);
      const int edges = rank == 0 ? g.head + g.tail : 0;
      const int j = tid < g.head ? tid : columns - g.tail + (tid - g.head);
      T* out = grad + static_cast<long long>(row) * columns;
      uint4* packs_out = reinterpret_cast<uint4*>(out + g.head) + g.begin;

      if (now == ignored) {
        const uint4 zero = make_uint4(0u, 0u, 0u, 0u);
        for (int p = tid; p < g.packs; p += GROUP) {
          if (HINT & 2) __stcs(packs_out + p, zero);
          else packs_out[p] = zero;
        }
        if (tid < edges) out[j] = Pack<T>::make(0.0f);
        continue;
      }

      float edge = 0.0f;
      if (tid < edges) edge = Pack<T>::load(logits[row * stride + j]);

      if (C == 1) barrier_wait(&stats_full[slot], slot_phase);
      else barrier_wait_cluster(&stats_full[slot], slot_phase);
      float c = K_LOW * K_LOG2E;
      float total = 0.0f;
      if (lane < W * C) {
        const float2 pair = part[slot][lane];
        c = pair.x;
        total = pair.y;
      }
      __syncwarp();
      if (C == 1) {
        if (lane == 0) barrier_arrive(&stats_empty[slot]);
      } else {
        if (lane < C) barrier_arrive_at(&stats_empty[slot], lane);
      }
      __syncwarp();
      if (++slot == SLOTS) {
        slot = 0;
        slot_phase ^= 1u;
      }
      merge_warp(c, total);
      const float scale = share / total;

      // Where the target lies: in a pack of this block (hit, place) or among the edges.
      const int wanted = static_cast<int>(now);
      const int inside = wanted - g.head;
      int hit = -1;
      int place = 0;
      if (inside >= 0 && wanted < columns - g.tail) {
        hit = inside / V - g.begin;
        place = inside & (V - 1);
        if (hit >= g.packs) hit = -1;
      }

      for (int base = 0; base < g.packs; base += PACKS) {
        barrier_wait(&full[stage], phase);
        const uint4* chunk = reinterpret_cast<const uint4*>(ring + stage * CHUNK);
        uint4 w[U];
#pragma unroll
        for (int u = 0; u < U; ++u) {
          const int q = tid + u * GROUP;
          w[u] = make_uint4(0u, 0u, 0u, 0u);
          if (base + q < g.packs) w[u] = chunk[q];
        }
        __syncwarp();
        if (lane == 0) barrier_arrive(&empty[stage]);
#pragma unroll
        for (int u = 0; u < U; ++u) {
          const int p = base + tid + u * GROUP;
          if (p < g.packs) {
            float x[V];
            float y[V];
            Pack<T>::open(w[u], x);
#pragma unroll
            for (int k = 0; k < V; ++k) y[k] = ex2(fmaf(x[k], K_LOG2E, -c)) * scale;
            if (p == hit) {
              float chosen = 0.0f;
#pragma unroll
              for (int k = 0; k < V; ++k) {
                if (k == place) chosen = x[k];
              }
              const float special = (ex2(fmaf(chosen, K_LOG2E, -c)) - total) * scale;
#pragma unroll
              for (int k = 0; k < V; ++k) {
                if (k == place) y[k] = special;
              }
              const float loss = (log2f(total) + fmaf(-chosen, K_LOG2E, c)) * K_LN2;
              atomicAdd(&block_loss, static_cast<double>(loss));
            }
            const uint4 r = Pack<T>::close(y);
            if (HINT & 2) __stcs(packs_out + p, r);
            else packs_out[p] = r;
          }
        }
        if (++stage == STAGES) {
          stage = 0;
          phase ^= 1u;
        }
      }

      if (tid < edges) {
        const float e = ex2(fmaf(edge, K_LOG2E, -c));
        float y = e * scale;
        if (j == wanted) {
          y = (e - total) * scale;
          const float loss = (log2f(total) + fmaf(-edge, K_LOG2E, c)) * K_LN2;
          atomicAdd(&block_loss, static_cast<double>(loss));
        }
        out[j] = Pack<T>::make(y);
      }
      __syncwarp();
    }
    asm volatile("bar.sync 1, %0;" ::"n"(GROUP) : "memory");
    if (tid == 0) partial[blockIdx.x] = static_cast<float>(block_loss);
  }
  if (C > 1) cluster_sync();
}

// Rows that no cluster holds: two sweeps through memory, any alignment.
template <typename T>
__global__ void __launch_bounds__(512)
    streamed_rows(const T* logits, const long long* target, float* partial, T* grad, long long stride, int rows,
                  int columns, int ignore_index) {
  __shared__ float2 part[16];
  __shared__ int counts[16];
  __shared__ double block_loss;
  const int tid = threadIdx.x;
  const int warp = tid >> 5;
  const int lane = tid & 31;
  const long long ignored = ignore_index;
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  if (tid == 0) block_loss = 0.0;
  const int n = count_targets<512>(target, rows, ignored, tid);
  if (lane == 0) counts[warp] = n;
  __syncthreads();
  int valid = 0;
#pragma unroll
  for (int i = 0; i < 16; ++i) valid += counts[i];
  const float share = 1.0f / static_cast<float>(valid);

  for (int row = blockIdx.x; row < rows; row += gridDim.x) {
    const long long wanted = target[row];
    const T* in = logits + row * stride;
    T* out = grad + static_cast<long long>(row) * columns;
    if (wanted == ignored) {
      for (int i = tid; i < columns; i += 512) out[i] = Pack<T>::make(0.0f);
      continue;
    }
    float c = K_LOW * K_LOG2E;
    float total = 0.0f;
#pragma unroll 8
    for (int i = tid; i < columns; i += 512) {
      const float x = Pack<T>::load(in[i]);
      const float offset = fmaxf(c, x * K_LOG2E);
      total = fmaf(total, ex2(c - offset), ex2(fmaf(x, K_LOG2E, -offset)));
      c = offset;
    }
    merge_warp(c, total);
    __syncthreads();
    if (lane == 0) part[warp] = make_float2(c, total);
    __syncthreads();
    c = K_LOW * K_LOG2E;
    total = 0.0f;
    if (lane < 16) {
      const float2 pair = part[lane];
      c = pair.x;
      total = pair.y;
    }
    merge_warp(c, total);
    const float scale = share / total;
#pragma unroll 4
    for (int i = tid; i < columns; i += 512) {
      const float x = Pack<T>::load(in[i]);
      const float e = ex2(fmaf(x, K_LOG2E, -c));
      float y = e * scale;
      if (i == wanted) {
        y = (e - total) * scale;
        const float loss = (log2f(total) + fmaf(-x, K_LOG2E, c)) * K_LN2;
        atomicAdd(&block_loss, static_cast<double>(loss));
      }
      out[i] = Pack<T>::make(y);
    }
  }
  __syncthreads();
  if (tid == 0) partial[blockIdx.x] = static_cast<float>(block_loss);
}

// Starts early: the targets are counted while the rows still run.
__global__ void __launch_bounds__(256)
    mean_of_blocks(const float* partial, const long long* target, float* loss, int blocks, int rows,
                   int ignore_index) {
  __shared__ int counts[8];
  __shared__ double sums[8];
  const int tid = threadIdx.x;
  const int n = count_targets<256>(target, rows, ignore_index, tid);
  asm volatile("griddepcontrol.wait;" ::: "memory");
  double s = 0.0;
  for (int i = tid; i < blocks; i += 256) s += static_cast<double>(__ldcg(partial + i));
#pragma unroll
  for (int d = 16; d > 0; d >>= 1) s += __shfl_xor_sync(0xFFFFFFFFu, s, d);
  if ((tid & 31) == 0) {
    counts[tid >> 5] = n;
    sums[tid >> 5] = s;
  }
  __syncthreads();
  if (tid == 0) {
    int valid = 0;
    double sum = 0.0;
    for (int i = 0; i < 8; ++i) {
      valid += counts[i];
      sum += sums[i];
    }
    loss[0] = static_cast<float>(sum / static_cast<double>(valid));
  }
}
"""


def cross_entropy(
    logits: torch.Tensor, target: torch.Tensor, ignore_index: int
) -> tuple[torch.Tensor, torch.Tensor]:
    rows, columns = logits.shape
    vector = 16 // logits.element_size()
    # Rows of the logits must lie towards 16 bytes as the gradient's rows do; odd lengths are welcome.
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

    processors = torch.cuda.get_device_properties(logits.device).multi_processor_count
    name = TYPES[logits.dtype]
    stages = RING // CHUNK
    packs = -(-columns // vector)

    # The smallest cluster whose blocks hold their part of a row and room to read ahead.
    size = 0
    for candidate, limit in ((1, 147456), (2, 196608), (4, stages * CHUNK)):
        share = (-(-packs // candidate) + 7) // 8 * 8 if candidate > 1 else packs
        if -(-share * 16 // CHUNK) * CHUNK <= limit:
            size = candidate
            break

    if size > 0:
        if size == 4:
            clusters = max(1, processors * 15 // 66)
        else:
            clusters = max(1, processors // size)
        blocks = max(1, min(rows, clusters)) * size
        kernel = cuda_kernel(
            f"pipelined_rows<{name}, {GROUP}, {CHUNK}, {stages}, {size}, {HINT}>", SOURCE
        )
        threads = 2 * GROUP + 32
        shared = stages * CHUNK
    else:
        blocks = max(1, min(rows, processors * 4))
        kernel = cuda_kernel(f"streamed_rows<{name}>", SOURCE)
        threads = 512
        shared = 0

    partial = torch.empty(blocks, dtype=torch.float32, device=logits.device)
    kernel.launch(
        (blocks,),
        (threads,),
        logits,
        target,
        partial,
        grad,
        logits.stride(0),
        rows,
        columns,
        ignore_index,
        shared=shared,
        cluster=(size,) if size > 1 else None,
    )
    mean = cuda_kernel("mean_of_blocks", SOURCE)
    mean.launch(
        (1,),
        (256,),
        partial,
        target,
        loss,
        blocks,
        rows,
        ignore_index,
        shared=0,
        pdl=True,
    )
    return loss, grad
