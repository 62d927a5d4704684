"""Softmax with persistent blocks, per-warp rings of bulk copies, and each row once in registers.

Every warp owns a ring of shared-memory slots that cp.async.bulk fills with its parts of the coming
rows; it moves a part to registers (kept in the input's dtype), re-arms the slot at once, and then
reduces, normalises and stores while the copies of the next row run. One barrier per row merges the
(maximum, sum) pairs of the warps; rows beyond 128 KiB are shared by a cluster. Rows that do not
start or end on 16 bytes have at most two partial vectors, which are loaded element by element.
"""

import torch
import triton
from kagent_sandbox.lang import cuda_kernel

VECTORS = 8  # of 16 bytes, per thread at most, kept packed in registers
MAX_WARPS = 32  # per block at most: a longer row gets a cluster
TUNE = {"VECTORS": [4, 8], "MAX_WARPS": [16, 32]}

MAX_CLUSTER = 8
RING_BYTES = 192 * 1024  # of all blocks of an SM
WARPS_PER_SM = 32

SOURCE = r"""
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <math_constants.h>

#define LOG2E 1.4426950408889634f

template <typename T> struct Codec;

template <> struct Codec<float> {
  static constexpr int W = 4;
  static constexpr unsigned LOWEST = 0xff800000u;     // -inf
  static __device__ __forceinline__ float get(float x) { return x; }
  static __device__ __forceinline__ float put(float x) { return x; }
  static __device__ __forceinline__ void unpack2(unsigned u, float* f) { f[0] = __uint_as_float(u); }
  static __device__ __forceinline__ unsigned pack2(const float* f) { return __float_as_uint(f[0]); }
};

template <> struct Codec<__nv_bfloat16> {
  static constexpr int W = 8;
  static constexpr unsigned LOWEST = 0xff80ff80u;
  static __device__ __forceinline__ float get(__nv_bfloat16 x) { return __bfloat162float(x); }
  static __device__ __forceinline__ __nv_bfloat16 put(float x) { return __float2bfloat16_rn(x); }
  static __device__ __forceinline__ void unpack2(unsigned u, float* f) {
    f[0] = __uint_as_float(u << 16);
    f[1] = __uint_as_float(u & 0xffff0000u);
  }
  static __device__ __forceinline__ unsigned pack2(const float* f) {
    __nv_bfloat162 h = __floats2bfloat162_rn(f[0], f[1]);
    return *reinterpret_cast<unsigned*>(&h);
  }
};

template <> struct Codec<__half> {
  static constexpr int W = 8;
  static constexpr unsigned LOWEST = 0xfc00fc00u;
  static __device__ __forceinline__ float get(__half x) { return __half2float(x); }
  static __device__ __forceinline__ __half put(float x) { return __float2half_rn(x); }
  static __device__ __forceinline__ void unpack2(unsigned u, float* f) {
    float2 t = __half22float2(*reinterpret_cast<__half2*>(&u));
    f[0] = t.x;
    f[1] = t.y;
  }
  static __device__ __forceinline__ unsigned pack2(const float* f) {
    __half2 h = __floats2half2_rn(f[0], f[1]);
    return *reinterpret_cast<unsigned*>(&h);
  }
};

template <typename T>
__device__ __forceinline__ void unpack(const uint4& v, float* f) {
  constexpr int E = Codec<T>::W / 4;
  Codec<T>::unpack2(v.x, f);
  Codec<T>::unpack2(v.y, f + E);
  Codec<T>::unpack2(v.z, f + 2 * E);
  Codec<T>::unpack2(v.w, f + 3 * E);
}

template <typename T>
__device__ __forceinline__ uint4 pack(const float* f) {
  constexpr int E = Codec<T>::W / 4;
  return make_uint4(Codec<T>::pack2(f), Codec<T>::pack2(f + E), Codec<T>::pack2(f + 2 * E),
                    Codec<T>::pack2(f + 3 * E));
}

// Keeps the compiler from holding the unpacked values of one pass for the next: registers.
__device__ __forceinline__ void opaque(uint4& v) {
  asm volatile("" : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w));
}

__device__ __forceinline__ float power2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

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

__device__ __forceinline__ unsigned shared_address(const void* p) {
  return static_cast<unsigned>(__cvta_generic_to_shared(p));
}

__device__ __forceinline__ void barrier_init(unsigned barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(barrier) : "memory");
}

__device__ __forceinline__ void barrier_expect(unsigned barrier, unsigned bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
               :: "r"(barrier), "r"(bytes) : "memory");
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

__device__ __forceinline__ void bulk_load(unsigned to, const void* from, unsigned bytes,
                                          unsigned barrier, unsigned long long policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1], %2, [%3], %4;"
      :: "r"(to), "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(barrier), "l"(policy)
      : "memory");
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

// WARPS warps of each of CLUSTER blocks share a row, VPT vectors of 16 bytes in each thread, which
// come in chunks of CV through a ring of SLOTS chunks per warp. ROWS > 1 only if WARPS is 1.
template <typename T, int VPT, int CV, int SLOTS, int WARPS, int ROWS, int CLUSTER, int MINB,
          bool RAGGED>
__global__ void __launch_bounds__(WARPS * ROWS * 32, MINB)
softmax_ring(const T* x, T* y, long long x_stride, long long y_stride, int rows, int columns) {
  constexpr int W = Codec<T>::W;
  constexpr int CHUNKS = VPT / CV;
  constexpr int CHUNK_BYTES = CV * 512;
  constexpr int TOTAL = CLUSTER * WARPS;
  extern __shared__ __align__(128) unsigned char ring_memory[];
  __shared__ __align__(8) unsigned long long barriers[WARPS * ROWS * SLOTS];
  __shared__ float2 partial[2][TOTAL];                // (maximum, sum) of every warp of the row

  const int lane = threadIdx.x % 32;
  const int block_warp = threadIdx.x / 32;
  unsigned rank = 0;
  if constexpr (CLUSTER > 1) asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  const int unit = ROWS > 1 ? 0 : static_cast<int>(rank) * WARPS + block_warp;
  const int part = unit * VPT * 32;                   // this warp's first vector of a row

  const unsigned char* ring = ring_memory + block_warp * (SLOTS * CHUNK_BYTES);
  const unsigned ring_address = shared_address(ring);
  const unsigned barrier = shared_address(barriers + block_warp * SLOTS);
  if (lane == 0) {
#pragma unroll
    for (int i = 0; i < SLOTS; ++i) barrier_init(barrier + 8 * i);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async;" ::: "memory");
  }
  __syncwarp();
  unsigned long long policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));

  const long long row_step = static_cast<long long>(gridDim.x / CLUSTER) * ROWS;
  const long long first_row =
      static_cast<long long>(blockIdx.x / CLUSTER) * ROWS + (ROWS > 1 ? block_warp : 0);

  // The next chunk to be asked for.
  long long next_row = first_row;
  int next_chunk = 0;
  auto issue = [&](int slot) {
    if (next_row < rows) {
      if (lane == 0) {
        const T* p = x + next_row * x_stride;
        int head = 0;
        if constexpr (RAGGED) head = static_cast<int>(reinterpret_cast<size_t>(p) % 16 / sizeof(T));
        const int base = part + next_chunk * (CV * 32);
        const int from = max(base, head > 0 ? 1 : 0);
        const int to = min(base + CV * 32, (head + columns) / W);
        const unsigned bytes = to > from ? static_cast<unsigned>(to - from) * 16u : 0u;
        barrier_expect(barrier + 8 * slot, bytes);
        if (bytes > 0)
          bulk_load(ring_address + slot * CHUNK_BYTES + (from - base) * 16,
                    p + (static_cast<long long>(from) * W - head), bytes, barrier + 8 * slot,
                    policy);
      }
      if (++next_chunk == CHUNKS) {
        next_chunk = 0;
        next_row += row_step;
      }
    }
    __syncwarp();
  };

#pragma unroll 1
  for (int i = 0; i < SLOTS; ++i) issue(i);

  if constexpr (CLUSTER > 1) {                        // all blocks have started
    cluster_arrive();
    cluster_wait();
  }

  int slot = 0;
  unsigned phase = 0;
  int parity = 0;
#pragma unroll 1
  for (long long row = first_row; row < rows; row += row_step) {
    const T* x_row = x + row * x_stride;
    T* y_row = y + row * y_stride;
    int head = 0;
    if constexpr (RAGGED) head = static_cast<int>(reinterpret_cast<size_t>(x_row) % 16 / sizeof(T));
    const int full_first = head > 0 ? 1 : 0;
    const int full_end = (head + columns) / W;

    // From the ring to registers; each slot is asked to fill again as soon as it is read.
    uint4 r[VPT];
    float maximum = -CUDART_INF_F;
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
      barrier_wait(barrier + 8 * slot, phase);
      __syncwarp();
      const uint4* from = reinterpret_cast<const uint4*>(ring + slot * CHUNK_BYTES) + lane;
#pragma unroll
      for (int i = 0; i < CV; ++i) {
        const int j = part + (c * CV + i) * 32 + lane;
        uint4 v = make_uint4(Codec<T>::LOWEST, Codec<T>::LOWEST, Codec<T>::LOWEST,
                             Codec<T>::LOWEST);
        if (j >= full_first && j < full_end) {
          v = from[i * 32];
        } else if constexpr (RAGGED) {
          const int low = j * W - head;
          if (low < columns && low + W > 0) {
            float f[W];
#pragma unroll
            for (int e = 0; e < W; ++e) {
              f[e] = -CUDART_INF_F;
              if (low + e >= 0 && low + e < columns) f[e] = Codec<T>::get(x_row[low + e]);
            }
            v = pack<T>(f);
          }
        }
        r[c * CV + i] = v;
      }
      __syncwarp();
      issue(slot);
      if (++slot == SLOTS) {
        slot = 0;
        phase ^= 1;
      }
#pragma unroll
      for (int i = 0; i < CV; ++i) {
        float f[W];
        unpack<T>(r[c * CV + i], f);
#pragma unroll
        for (int e = 0; e < W; ++e) maximum = fmaxf(maximum, f[e]);
      }
    }

    // In units of log2: exp(x - max) = 2^(x * log2 e - top), with one rounding in the fma. The
    // rounding of `top` itself is common to all terms and cancels.
    // A warp of nothing but -inf: -inf - -inf would be NaN.
    const float top = warp_max(maximum) * LOG2E;
    const float shift = top == -CUDART_INF_F ? 0.0f : top;
    float sum_a = 0.0f, sum_b = 0.0f;
#pragma unroll
    for (int i = 0; i < VPT; ++i) {
      opaque(r[i]);
      float f[W];
      unpack<T>(r[i], f);
#pragma unroll
      for (int e = 0; e < W; e += 2) {
        sum_a += power2(fmaf(f[e], LOG2E, -shift));
        sum_b += power2(fmaf(f[e + 1], LOG2E, -shift));
      }
    }
    const float sum = warp_sum(sum_a + sum_b);

    float row_top = top, row_sum = sum;
    if constexpr (TOTAL > 1) {
      // Two buffers, taken in turn: one barrier a row is enough.
      float2* exchange = partial[parity];
      parity ^= 1;
      if constexpr (CLUSTER > 1) {
        if (lane < CLUSTER) store_remote(exchange + unit, lane, make_float2(top, sum));
        cluster_arrive();
        cluster_wait();
      } else {
        if (lane == 0) exchange[unit] = make_float2(top, sum);
        __syncthreads();
      }
      row_top = -CUDART_INF_F;
      for (int i = lane; i < TOTAL; i += 32) row_top = fmaxf(row_top, exchange[i].x);
      row_top = warp_max(row_top);
      row_sum = 0.0f;
      for (int i = lane; i < TOTAL; i += 32) {
        const float2 pair = exchange[i];
        row_sum += pair.y * power2(pair.x - row_top);  // a row of -inf: NaN, as it should be
      }
      row_sum = warp_sum(row_sum);
    }
    const float scale = 1.0f / row_sum;

#pragma unroll
    for (int i = 0; i < VPT; ++i) {
      const int j = part + i * 32 + lane;
      opaque(r[i]);
      float f[W];
      unpack<T>(r[i], f);
#pragma unroll
      for (int e = 0; e < W; ++e) f[e] = power2(fmaf(f[e], LOG2E, -row_top)) * scale;
      if constexpr (RAGGED) {
        const int low = j * W - head;
        T* to = y_row + low;
        if (low >= 0 && low + W <= columns && reinterpret_cast<size_t>(to) % 16 == 0) {
          __stcs(reinterpret_cast<uint4*>(to), pack<T>(f));
        } else {
#pragma unroll
          for (int e = 0; e < W; ++e)
            if (low + e >= 0 && low + e < columns) to[e] = Codec<T>::put(f[e]);
        }
      } else {
        if (j < full_end)
          __stcs(reinterpret_cast<uint4*>(y_row + static_cast<long long>(j) * W), pack<T>(f));
      }
    }
  }
}

// Rows too long for a cluster: a running maximum and sum per thread, then a second read.
template <typename T, bool VECTOR, int THREADS>
__global__ void __launch_bounds__(THREADS)
softmax_two_pass(const T* x, T* y, long long x_stride, long long y_stride, int columns) {
  constexpr int W = VECTOR ? Codec<T>::W : 1;
  constexpr int WARPS = THREADS / 32;
  __shared__ float2 partial[WARPS];
  x += blockIdx.x * x_stride;
  y += blockIdx.x * y_stride;

  const float lowest = -3.402823466e38f;              // finite: -inf - -inf would be NaN
  float maximum = lowest, sum = 0.0f;
  for (long long c = static_cast<long long>(threadIdx.x) * W; c < columns; c += THREADS * W) {
    float f[W];
    if constexpr (VECTOR)
      unpack<T>(*reinterpret_cast<const uint4*>(x + c), f);
    else
      f[0] = Codec<T>::get(x[c]);
#pragma unroll
    for (int i = 0; i < W; ++i) {
      const float factor = power2(-fabsf(f[i] - maximum) * LOG2E);
      sum = f[i] > maximum ? sum * factor + 1.0f : sum + factor;
      maximum = fmaxf(maximum, f[i]);
    }
  }
  const float warp_maximum = warp_max(maximum);
  sum = warp_sum(sum * power2((maximum - warp_maximum) * LOG2E));
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = make_float2(warp_maximum, sum);
  __syncthreads();
  float row_maximum = lowest, row_sum = 0.0f;
  for (int i = 0; i < WARPS; ++i) row_maximum = fmaxf(row_maximum, partial[i].x);
  for (int i = 0; i < WARPS; ++i)
    row_sum += partial[i].y * power2((partial[i].x - row_maximum) * LOG2E);
  const float scale = 1.0f / row_sum;

  for (long long c = static_cast<long long>(threadIdx.x) * W; c < columns; c += THREADS * W) {
    float f[W];
    if constexpr (VECTOR)
      unpack<T>(*reinterpret_cast<const uint4*>(x + c), f);
    else
      f[0] = Codec<T>::get(x[c]);
#pragma unroll
    for (int i = 0; i < W; ++i) f[i] = power2((f[i] - row_maximum) * LOG2E) * scale;
    if constexpr (VECTOR)
      __stcs(reinterpret_cast<uint4*>(y + c), pack<T>(f));
    else
      y[c] = Codec<T>::put(f[0]);
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
    width = 16 // x.element_size()
    aligned = columns % width == 0 and x.storage_offset() % width == 0
    aligned = aligned and (rows == 1 or x.stride(0) % width == 0)

    # A row that starts anywhere touches up to one vector more.
    vectors = triton.cdiv(columns if aligned else columns + width - 1, width)
    per_thread = min(VECTORS, triton.next_power_of_2(triton.cdiv(vectors, 32)))
    sharing = triton.cdiv(vectors, 32 * per_thread)  # warps
    cluster = 1
    while cluster < MAX_CLUSTER and triton.cdiv(sharing, cluster) > MAX_WARPS:
        cluster *= 2
    warps = triton.cdiv(sharing, cluster)
    if warps > 32:
        vector = "true" if aligned else "false"
        kernel = cuda_kernel(f"softmax_two_pass<{name}, {vector}, 512>", SOURCE)
        kernel.launch((rows,), (512,), x, y, x.stride(0), y.stride(0), columns)
        return y

    rows_per_block = 4 if sharing == 1 else 1
    block_warps = warps * rows_per_block
    blocks_per_sm = max(1, WARPS_PER_SM // block_warps)
    chunk = min(per_thread, 4)
    slots = max(1, min(8, RING_BYTES // (block_warps * blocks_per_sm * chunk * 512)))

    processors = torch.cuda.get_device_properties(x.device).multi_processor_count
    groups = triton.cdiv(rows, rows_per_block)
    if cluster <= 2:
        groups = min(groups, processors * blocks_per_sm // cluster)
    else:
        # Larger clusters may leave SMs of a GPC idle: short-lived ones, so that a second wave
        # costs little.
        groups = min(groups, max(processors * blocks_per_sm // cluster, triton.cdiv(rows, 8)))

    ragged = "false" if aligned else "true"
    shape = f"{per_thread}, {chunk}, {slots}, {warps}, {rows_per_block}, {cluster}"
    kernel = cuda_kernel(f"softmax_ring<{name}, {shape}, {blocks_per_sm}, {ragged}>", SOURCE)
    kernel.launch(
        (groups * cluster,),
        (block_warps * 32,),
        x,
        y,
        x.stride(0),
        y.stride(0),
        rows,
        columns,
        shared=block_warps * slots * chunk * 512,
        cluster=(cluster,) if cluster > 1 else None,
    )
    return y
