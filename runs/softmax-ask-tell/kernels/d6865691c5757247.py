import torch
import triton
from kagent_sandbox.lang import cuda_kernel

CONSUMERS = 512  # ring: threads that compute; one more warp asks for the bytes
RING_BYTES = 16384  # rows up to this size stay in registers, longer ones go through the ring
WORDS = 4  # registers: words of 16 bytes per thread
WAVES = 1  # ring: clusters launched per cluster that is resident
STREAM = 0  # 1: stores are evict_first too
TUNE = {
    "CONSUMERS": [256, 512],
    "RING_BYTES": [16384, 65536],
    "WORDS": [4, 8],
    "WAVES": [1, 3],
    "STREAM": [0, 1],
}

TYPES = {torch.bfloat16: "__nv_bfloat16", torch.float16: "__half", torch.float32: "float"}
CHUNK_WORDS = 1024  # 16 KiB, as in the source

SOURCE = r"""
#include <cuda_bf16.h>
#include <cuda_fp16.h>

typedef unsigned int u32;
typedef unsigned long long u64;

#define LOG2E 1.4426950408889634f
#define LOWEST -3.0e38f

// ---------------------------------------------------------------- numbers

template <typename T> struct Word;

template <> struct Word<__nv_bfloat16> {
  static constexpr int N = 8;
  static constexpr u32 PAD = 0xFF80FF80u;  // -inf, -inf
  static __device__ __forceinline__ void unpack(const uint4& w, float (&f)[8]) {
    const u32 v[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      f[2 * i] = __uint_as_float(v[i] << 16);
      f[2 * i + 1] = __uint_as_float(v[i] & 0xFFFF0000u);
    }
  }
  static __device__ __forceinline__ uint4 pack(const float (&f)[8]) {
    u32 v[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      __nv_bfloat162 p = __floats2bfloat162_rn(f[2 * i], f[2 * i + 1]);
      v[i] = *reinterpret_cast<u32*>(&p);
    }
    return make_uint4(v[0], v[1], v[2], v[3]);
  }
};

template <> struct Word<__half> {
  static constexpr int N = 8;
  static constexpr u32 PAD = 0xFC00FC00u;
  static __device__ __forceinline__ void unpack(const uint4& w, float (&f)[8]) {
    u32 v[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 p = __half22float2(*reinterpret_cast<__half2*>(&v[i]));
      f[2 * i] = p.x;
      f[2 * i + 1] = p.y;
    }
  }
  static __device__ __forceinline__ uint4 pack(const float (&f)[8]) {
    u32 v[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      __half2 p = __floats2half2_rn(f[2 * i], f[2 * i + 1]);
      v[i] = *reinterpret_cast<u32*>(&p);
    }
    return make_uint4(v[0], v[1], v[2], v[3]);
  }
};

template <> struct Word<float> {
  static constexpr int N = 4;
  static constexpr u32 PAD = 0xFF800000u;
  static __device__ __forceinline__ void unpack(const uint4& w, float (&f)[4]) {
    f[0] = __uint_as_float(w.x);
    f[1] = __uint_as_float(w.y);
    f[2] = __uint_as_float(w.z);
    f[3] = __uint_as_float(w.w);
  }
  static __device__ __forceinline__ uint4 pack(const float (&f)[4]) {
    return make_uint4(__float_as_uint(f[0]), __float_as_uint(f[1]), __float_as_uint(f[2]),
                      __float_as_uint(f[3]));
  }
};

__device__ __forceinline__ float to_float(__nv_bfloat16 v) { return __bfloat162float(v); }
__device__ __forceinline__ float to_float(__half v) { return __half2float(v); }
__device__ __forceinline__ float to_float(float v) { return v; }
__device__ __forceinline__ void put(__nv_bfloat16* p, float v) { *p = __float2bfloat16(v); }
__device__ __forceinline__ void put(__half* p, float v) { *p = __float2half(v); }
__device__ __forceinline__ void put(float* p, float v) { *p = v; }

__device__ __forceinline__ float ex2(float v) {
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v));
  return r;
}

// ---------------------------------------------------------------- online softmax
// (peak, total): peak is the largest x * log2(e), rounded once; total = sum of exp2(x * log2(e) - peak).

template <typename T, int NW>
__device__ __forceinline__ void fold(float& peak, float& total, const uint4 (&w)[NW]) {
  constexpr int N = Word<T>::N;
  float top = __uint_as_float(0xFF800000u);
#pragma unroll
  for (int j = 0; j < NW; ++j) {
    float f[N];
    Word<T>::unpack(w[j], f);
#pragma unroll
    for (int k = 0; k < N; ++k) top = fmaxf(top, f[k]);
  }
  const float q = fmaxf(peak, __fmul_rn(top, LOG2E));
  float a = 0.0f, b = 0.0f;
#pragma unroll
  for (int j = 0; j < NW; ++j) {
    float f[N];
    Word<T>::unpack(w[j], f);
#pragma unroll
    for (int k = 0; k < N; k += 2) {
      a += ex2(fmaf(f[k], LOG2E, -q));
      b += ex2(fmaf(f[k + 1], LOG2E, -q));
    }
  }
  total = fmaf(total, ex2(peak - q), a + b);
  peak = q;
}

template <typename T>
__device__ __forceinline__ uint4 finish(const uint4& w, float peak, float scale) {
  constexpr int N = Word<T>::N;
  float f[N];
  Word<T>::unpack(w, f);
#pragma unroll
  for (int k = 0; k < N; ++k) f[k] = ex2(fmaf(f[k], LOG2E, -peak)) * scale;
  return Word<T>::pack(f);
}

__device__ __forceinline__ void reduce_warp(float& peak, float& total) {
  float q = peak;
#pragma unroll
  for (int d = 16; d > 0; d >>= 1) q = fmaxf(q, __shfl_xor_sync(0xFFFFFFFFu, q, d));
  float t = total * ex2(peak - q);
#pragma unroll
  for (int d = 16; d > 0; d >>= 1) t += __shfl_xor_sync(0xFFFFFFFFu, t, d);
  peak = q;
  total = t;
}

// ---------------------------------------------------------------- memory

__device__ __forceinline__ u64 evict_first() {
  u64 policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

__device__ __forceinline__ uint4 load_once(const uint4* p, u64 policy) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p), "l"(policy));
  return v;
}

template <int STREAM>
__device__ __forceinline__ void store(uint4* p, const uint4& v, u64 policy) {
  if constexpr (STREAM != 0) {
    asm volatile("st.global.L2::cache_hint.v4.u32 [%0], {%1, %2, %3, %4}, %5;" ::"l"(p), "r"(v.x),
                 "r"(v.y), "r"(v.z), "r"(v.w), "l"(policy)
                 : "memory");
  } else {
    *p = v;
  }
}

__device__ __forceinline__ u32 shared_address(const void* p) {
  return static_cast<u32>(__cvta_generic_to_shared(p));
}

__device__ __forceinline__ void barrier_init(u64* bar, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(bar)), "r"(count)
               : "memory");
}

__device__ __forceinline__ void barrier_arrive(u64* bar) {
  asm volatile("{\n.reg .b64 s;\nmbarrier.arrive.shared::cta.b64 s, [%0];\n}" ::"r"(
                   shared_address(bar))
               : "memory");
}

__device__ __forceinline__ void barrier_wait(u64* bar, u32 parity) {
  const u32 address = shared_address(bar);
  u32 done = 0;
  while (!done) {
    asm volatile(
        "{\n.reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(address), "r"(parity)
        : "memory");
  }
}

__device__ __forceinline__ void barrier_wait_cluster(u64* bar, u32 parity) {
  const u32 address = shared_address(bar);
  u32 done = 0;
  while (!done) {
    asm volatile(
        "{\n.reg .pred p;\n"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(address), "r"(parity)
        : "memory");
  }
}

// ---------------------------------------------------------------- long rows: a ring of 16 KiB chunks
// The row (or this block's part of it) stays in shared memory between the two passes, while the
// slots left over already fill with the next row.

template <typename T, int CONSUMERS, int CLUSTER, int SLOTS, int RESIDENT, int STREAM>
__global__ void __launch_bounds__(CONSUMERS + 32, RESIDENT)
    softmax_ring(const T* __restrict__ x, T* __restrict__ y, long long stride, int rows, int words,
                 int part) {
  constexpr int CHUNK_WORDS = 1024;
  constexpr int WARPS = CONSUMERS / 32;
  constexpr int PER = CHUNK_WORDS / CONSUMERS;
  constexpr int PAIRS = CLUSTER * WARPS;
  extern __shared__ __align__(128) unsigned char memory[];
  __shared__ __align__(8) u64 full[SLOTS];
  __shared__ __align__(8) u64 empty[SLOTS];
  __shared__ __align__(8) u64 merged[2];
  __shared__ __align__(8) float2 pairs[2][PAIRS];
  uint4* const ring = reinterpret_cast<uint4*>(memory);

  const int thread = threadIdx.x;
  const int warp = thread / 32;
  const int lane = thread % 32;
  const int rank = CLUSTER > 1 ? static_cast<int>(blockIdx.x % CLUSTER) : 0;
  const int first_row = blockIdx.x / CLUSTER;
  const int row_step = gridDim.x / CLUSTER;
  const int begin = rank * part;
  const int mine = min(part, words - begin);
  const int chunks = (mine + CHUNK_WORDS - 1) / CHUNK_WORDS;

  if (thread == 0) {
    for (int i = 0; i < SLOTS; ++i) {
      barrier_init(&full[i], 1);
      barrier_init(&empty[i], WARPS);
    }
    barrier_init(&merged[0], PAIRS);
    barrier_init(&merged[1], PAIRS);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  if constexpr (CLUSTER > 1) {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
  }
  const u64 policy = evict_first();

  if (warp == WARPS) {  // the producer
    if (lane == 0) {
      int slot = 0;
      u32 phase = 0;
      for (int row = first_row; row < rows; row += row_step) {
        const uint4* from = reinterpret_cast<const uint4*>(x + row * stride) + begin;
        for (int c = 0; c < chunks; ++c) {
          barrier_wait(&empty[slot], phase ^ 1u);
          const u32 bytes = 16u * static_cast<u32>(min(CHUNK_WORDS, mine - c * CHUNK_WORDS));
          const u32 bar = shared_address(&full[slot]);
          asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar),
                       "r"(bytes)
                       : "memory");
          asm volatile(
              "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
              "[%0], [%1], %2, [%3], %4;" ::"r"(shared_address(ring + slot * CHUNK_WORDS)),
              "l"(from + c * CHUNK_WORDS), "r"(bytes), "r"(bar), "l"(policy)
              : "memory");
          if (++slot == SLOTS) {
            slot = 0;
            phase ^= 1u;
          }
        }
      }
    }
    return;
  }

  int start = 0;
  u32 start_phase = 0;
  u32 turn = 0;
  for (int row = first_row; row < rows; row += row_step, ++turn) {
    float peak = LOWEST, total = 0.0f;

    int slot = start;
    u32 phase = start_phase;
    for (int c = 0; c < chunks; ++c) {
      barrier_wait(&full[slot], phase);
      const uint4* from = ring + slot * CHUNK_WORDS;
      const int n = mine - c * CHUNK_WORDS;
      if (n >= CHUNK_WORDS) {
#pragma unroll
        for (int j = 0; j < PER; j += 2) {
          uint4 w[2];
          w[0] = from[thread + j * CONSUMERS];
          w[1] = from[thread + (j + 1) * CONSUMERS];
          fold<T, 2>(peak, total, w);
        }
      } else {
        for (int i = thread; i < n; i += CONSUMERS) {
          uint4 w[1];
          w[0] = from[i];
          fold<T, 1>(peak, total, w);
        }
      }
      if (++slot == SLOTS) {
        slot = 0;
        phase ^= 1u;
      }
    }

    __syncwarp();
    reduce_warp(peak, total);
    const u32 side = turn & 1u;
    if constexpr (CLUSTER > 1) {
      if (lane < CLUSTER) {
        const u32 local_pair = shared_address(&pairs[side][rank * WARPS + warp]);
        const u32 local_bar = shared_address(&merged[side]);
        u32 pair, bar;
        asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
                     : "=r"(pair)
                     : "r"(local_pair), "r"(lane));
        asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
                     : "=r"(bar)
                     : "r"(local_bar), "r"(lane));
        asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};" ::"r"(pair), "f"(peak), "f"(total)
                     : "memory");
        asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(bar)
                     : "memory");
      }
      __syncwarp();
      barrier_wait_cluster(&merged[side], (turn >> 1) & 1u);
    } else {
      if (lane == 0) {
        pairs[side][warp] = make_float2(peak, total);
        barrier_arrive(&merged[side]);
      }
      __syncwarp();
      barrier_wait(&merged[side], (turn >> 1) & 1u);
    }
    peak = LOWEST;
    total = 0.0f;
#pragma unroll
    for (int i = 0; i < PAIRS; i += 32) {
      if (i + lane < PAIRS) {
        const float2 other = pairs[side][i + lane];
        const float q = fmaxf(peak, other.x);
        total = total * ex2(peak - q) + other.y * ex2(other.x - q);
        peak = q;
      }
    }
    __syncwarp();
    reduce_warp(peak, total);
    const float scale = 1.0f / total;

    uint4* to = reinterpret_cast<uint4*>(y) + static_cast<long long>(row) * words + begin;
    slot = start;
    phase = start_phase;
    for (int c = 0; c < chunks; ++c) {
      const uint4* from = ring + slot * CHUNK_WORDS;
      const int n = mine - c * CHUNK_WORDS;
      if (n >= CHUNK_WORDS) {
        uint4 w[PER];
#pragma unroll
        for (int j = 0; j < PER; ++j) w[j] = from[thread + j * CONSUMERS];
        __syncwarp();
        if (lane == 0) barrier_arrive(&empty[slot]);
#pragma unroll
        for (int j = 0; j < PER; ++j)
          store<STREAM>(to + thread + j * CONSUMERS, finish<T>(w[j], peak, scale), policy);
      } else {
        for (int i = thread; i < n; i += CONSUMERS)
          store<STREAM>(to + i, finish<T>(from[i], peak, scale), policy);
        __syncwarp();
        if (lane == 0) barrier_arrive(&empty[slot]);
      }
      to += CHUNK_WORDS;
      if (++slot == SLOTS) {
        slot = 0;
        phase ^= 1u;
      }
    }
    start = slot;
    start_phase = phase;
  }
}

// ---------------------------------------------------------------- short rows: packed in registers

template <typename T, int WORDS, int LANES, int ROWS, int STREAM>
__global__ void __launch_bounds__(LANES * ROWS)
    softmax_rows(const T* __restrict__ x, T* __restrict__ y, long long stride, int rows, int words) {
  constexpr int WARPS = LANES / 32;  // of a row
  const int in_row = threadIdx.x % LANES;
  const int local = threadIdx.x / LANES;
  const long long row = static_cast<long long>(blockIdx.x) * ROWS + local;
  const int n = row < rows ? words : 0;
  const u64 policy = evict_first();

  const uint4* from = reinterpret_cast<const uint4*>(x + (row < rows ? row : 0) * stride);
  uint4 w[WORDS];
#pragma unroll
  for (int j = 0; j < WORDS; ++j) {
    const int i = in_row + j * LANES;
    w[j] = make_uint4(Word<T>::PAD, Word<T>::PAD, Word<T>::PAD, Word<T>::PAD);
    if (i < n) w[j] = load_once(from + i, policy);
  }

  float peak = LOWEST, total = 0.0f;
  fold<T, WORDS>(peak, total, w);
  reduce_warp(peak, total);
  if constexpr (WARPS > 1) {
    __shared__ float2 pairs[ROWS][WARPS];
    const int lane = threadIdx.x % 32;
    if (lane == 0) pairs[local][in_row / 32] = make_float2(peak, total);
    __syncthreads();
    peak = LOWEST;
    total = 0.0f;
    if (lane < WARPS) {
      const float2 other = pairs[local][lane];
      peak = other.x;
      total = other.y;
    }
    __syncwarp();
    reduce_warp(peak, total);
  }
  const float scale = 1.0f / total;

  uint4* to = reinterpret_cast<uint4*>(y) + row * words;
#pragma unroll
  for (int j = 0; j < WORDS; ++j) {
    const int i = in_row + j * LANES;
    if (i < n) store<STREAM>(to + i, finish<T>(w[j], peak, scale), policy);
  }
}

// ---------------------------------------------------------------- everything else: element by element

template <typename T, int LANES, int ROWS>
__global__ void __launch_bounds__(LANES * ROWS)
    softmax_any(const T* __restrict__ x, T* __restrict__ y, long long stride, int rows,
                int columns) {
  constexpr int WARPS = LANES / 32;
  constexpr int BATCH = 8;
  const int in_row = threadIdx.x % LANES;
  const int local = threadIdx.x / LANES;
  const long long row = static_cast<long long>(blockIdx.x) * ROWS + local;
  const long long n = row < rows ? columns : 0;
  const T* from = x + (row < rows ? row : 0) * stride;
  const float low = __uint_as_float(0xFF800000u);

  float peak = LOWEST, total = 0.0f;
  for (long long base = 0; base < n; base += LANES * BATCH) {
    float f[BATCH];
    float top = low;
#pragma unroll
    for (int k = 0; k < BATCH; ++k) {
      const long long i = base + in_row + k * LANES;
      f[k] = low;
      if (i < n) f[k] = to_float(from[i]);
    }
#pragma unroll
    for (int k = 0; k < BATCH; ++k) top = fmaxf(top, f[k]);
    const float q = fmaxf(peak, __fmul_rn(top, LOG2E));
    float sum = 0.0f;
#pragma unroll
    for (int k = 0; k < BATCH; ++k) sum += ex2(fmaf(f[k], LOG2E, -q));
    total = fmaf(total, ex2(peak - q), sum);
    peak = q;
  }
  __syncwarp();
  reduce_warp(peak, total);
  if constexpr (WARPS > 1) {
    __shared__ float2 pairs[ROWS][WARPS];
    const int lane = threadIdx.x % 32;
    if (lane == 0) pairs[local][in_row / 32] = make_float2(peak, total);
    __syncthreads();
    peak = LOWEST;
    total = 0.0f;
    if (lane < WARPS) {
      const float2 other = pairs[local][lane];
      peak = other.x;
      total = other.y;
    }
    __syncwarp();
    reduce_warp(peak, total);
  }
  const float scale = 1.0f / total;

  T* to = y + row * columns;
  for (long long base = 0; base < n; base += LANES * BATCH) {
    float f[BATCH];
#pragma unroll
    for (int k = 0; k < BATCH; ++k) {
      const long long i = base + in_row + k * LANES;
      f[k] = low;
      if (i < n) f[k] = to_float(from[i]);
    }
#pragma unroll
    for (int k = 0; k < BATCH; ++k) {
      const long long i = base + in_row + k * LANES;
      if (i < n) put(to + i, ex2(fmaf(f[k], LOG2E, -peak)) * scale);
    }
  }
}
"""


def softmax(x: torch.Tensor) -> torch.Tensor:
    rows, columns = x.shape
    y = torch.empty((rows, columns), dtype=x.dtype, device=x.device)
    if rows == 0 or columns == 0:
        return y
    if columns > 1 and x.stride(1) != 1:
        x = x.contiguous()
    name = TYPES[x.dtype]
    stride = x.stride(0) if rows > 1 else columns
    vector = 16 // x.element_size()
    aligned = all(n % vector == 0 for n in (columns, stride, x.storage_offset()))
    words = columns // vector

    if aligned and words * 16 <= RING_BYTES:
        per = WORDS
        if triton.cdiv(words, per) > 512:
            per = 8
        if words <= 32 * per:
            per, lanes = triton.next_power_of_2(triton.cdiv(words, 32)), 32
        else:
            lanes = triton.next_power_of_2(triton.cdiv(words, per))
        together = max(1, 128 // lanes)
        kernel = cuda_kernel(f"softmax_rows<{name}, {per}, {lanes}, {together}, {STREAM}>", SOURCE)
        kernel.launch(
            (triton.cdiv(rows, together),), (lanes * together,), x, y, stride, rows, words, shared=0
        )
        return y

    hopper = torch.cuda.get_device_capability(x.device)[0] >= 9
    cluster = 1
    while cluster < 8 and words > 8 * CHUNK_WORDS * cluster:
        cluster *= 2
    part = triton.cdiv(words, cluster)
    if aligned and hopper and part <= 13 * CHUNK_WORDS:
        resident = 2 if part <= 4 * CHUNK_WORDS and cluster == 1 else 1
        slots = 7 if resident == 2 else 13
        sms = torch.cuda.get_device_properties(x.device).multi_processor_count
        # Clusters of 4 and 8 do not fill every GPC: many short-lived ones balance themselves.
        waves = WAVES if cluster <= 2 else 8
        clusters = min(rows, waves * max(1, resident * sms // cluster))
        shape = f"{CONSUMERS}, {cluster}, {slots}, {resident}, {STREAM}"
        kernel = cuda_kernel(f"softmax_ring<{name}, {shape}>", SOURCE)
        kernel.launch(
            (clusters * cluster,),
            (CONSUMERS + 32,),
            x,
            y,
            stride,
            rows,
            words,
            part,
            shared=slots * CHUNK_WORDS * 16,
            cluster=(cluster,) if cluster > 1 else None,
        )
        return y

    lanes, together = (32, 4) if columns <= 1024 else (512, 1)
    kernel = cuda_kernel(f"softmax_any<{name}, {lanes}, {together}>", SOURCE)
    kernel.launch(
        (triton.cdiv(rows, together),), (lanes * together,), x, y, stride, rows, columns, shared=0
    )
    return y
