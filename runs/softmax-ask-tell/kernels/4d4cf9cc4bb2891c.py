import torch
import triton
import triton.language as tl
from kagent_sandbox.lang import cuda_kernel

"""Softmax that reads every row once: short rows in warps or small blocks, long rows in runs.

Rows below STAY words of 16 bytes belong to a warp or a block, which keeps them packed in registers.
Longer rows belong to a block or a cluster that does a levelled run of rows: while one row is in
registers, the next one is brought to shared memory by bulk copies. Each warp contributes one pair
(scaled maximum, sum), so a row costs one exchange. Rows that start anywhere, or that are too long
even for a cluster, are read twice.
"""

WORDS = 8  # words of 16 bytes that a thread keeps, for rows of a block
STAY = 4096  # words of a row from which blocks stay for a run of rows
RUN = 8  # the most rows in a run; levelled by the waves
STORES = 0  # L2 priority of results: 0 normal, 1 evict first, 2 evict last
TUNE = {"WORDS": [4, 8], "STAY": [4096, 8192], "RUN": [8, 64], "STORES": [0, 1, 2]}

BIG = 512  # threads of a block of a cluster
MAX_CLUSTER = 8

TYPES = {torch.bfloat16: "__nv_bfloat16", torch.float16: "__half", torch.float32: "float"}

SOURCE = r"""
#include <cuda_bf16.h>
#include <cuda_fp16.h>

typedef unsigned int u32;
typedef unsigned long long u64;

#define LOG2E 1.4426950408889634f
#define NEG_INF __int_as_float(0xff800000)
#define EVICT_FIRST 0x12F0000000000000ULL
#define EVICT_LAST 0x14F0000000000000ULL

template <typename T> struct Codec;

template <> struct Codec<float> {
  static constexpr int PER = 1;
  static constexpr u32 FILL = 0xff800000u;
  static __device__ __forceinline__ u32 top(u32 a, u32 b) {
    return __float_as_uint(fmaxf(__uint_as_float(a), __uint_as_float(b)));
  }
  static __device__ __forceinline__ float lo(u32 a) { return __uint_as_float(a); }
  static __device__ __forceinline__ float hi(u32 a) { return __uint_as_float(a); }
  static __device__ __forceinline__ u32 pack(float l, float h) { return __float_as_uint(l); }
  static __device__ __forceinline__ float widen(float a) { return a; }
  static __device__ __forceinline__ float narrow(float a) { return a; }
};

template <> struct Codec<__nv_bfloat16> {
  static constexpr int PER = 2;
  static constexpr u32 FILL = 0xff80ff80u;
  static __device__ __forceinline__ u32 top(u32 a, u32 b) {
    u32 d;
    asm("max.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
  }
  static __device__ __forceinline__ float lo(u32 a) { return __uint_as_float(a << 16); }
  static __device__ __forceinline__ float hi(u32 a) { return __uint_as_float(a & 0xffff0000u); }
  static __device__ __forceinline__ u32 pack(float l, float h) {
    u32 d;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(h), "f"(l));
    return d;
  }
  static __device__ __forceinline__ float widen(__nv_bfloat16 a) { return __bfloat162float(a); }
  static __device__ __forceinline__ __nv_bfloat16 narrow(float a) { return __float2bfloat16(a); }
};

template <> struct Codec<__half> {
  static constexpr int PER = 2;
  static constexpr u32 FILL = 0xfc00fc00u;
  static __device__ __forceinline__ u32 top(u32 a, u32 b) {
    u32 d;
    asm("max.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
  }
  static __device__ __forceinline__ float lo(u32 a) {
    return __half2float(__ushort_as_half((unsigned short)(a & 0xffffu)));
  }
  static __device__ __forceinline__ float hi(u32 a) {
    return __half2float(__ushort_as_half((unsigned short)(a >> 16)));
  }
  static __device__ __forceinline__ u32 pack(float l, float h) {
    u32 d;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(h), "f"(l));
    return d;
  }
  static __device__ __forceinline__ float widen(__half a) { return __half2float(a); }
  static __device__ __forceinline__ __half narrow(float a) { return __float2half(a); }
};

__device__ __forceinline__ float ex2(float a) {
  float d;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(d) : "f"(a));
  return d;
}

__device__ __forceinline__ float rcp(float a) {
  float d;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(d) : "f"(a));
  return d;
}

__device__ __forceinline__ float warp_max(float a) {
#pragma unroll
  for (int i = 16; i > 0; i >>= 1) a = fmaxf(a, __shfl_xor_sync(0xffffffffu, a, i));
  return a;
}

__device__ __forceinline__ float warp_sum(float a) {
#pragma unroll
  for (int i = 16; i > 0; i >>= 1) a += __shfl_xor_sync(0xffffffffu, a, i);
  return a;
}

__device__ __forceinline__ uint4 load_word(const uint4* p) {
  uint4 d;
  asm volatile("ld.global.nc.L1::no_allocate.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
               : "=r"(d.x), "=r"(d.y), "=r"(d.z), "=r"(d.w)
               : "l"(__cvta_generic_to_global(p)), "l"(EVICT_FIRST));
  return d;
}

template <int STORES>
__device__ __forceinline__ void store_word(uint4* p, u32 a, u32 b, u32 c, u32 d) {
  if (STORES == 0) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(p)),
                 "r"(a), "r"(b), "r"(c), "r"(d)
                 : "memory");
  } else {
    asm volatile("st.global.L2::cache_hint.v4.u32 [%0], {%1, %2, %3, %4}, %5;" ::"l"(
                     __cvta_generic_to_global(p)),
                 "r"(a), "r"(b), "r"(c), "r"(d), "l"(STORES == 1 ? EVICT_FIRST : EVICT_LAST)
                 : "memory");
  }
}

// The warp's scaled maximum c and its sum of 2^(x log2e - c). A warp without any finite value
// has c = -inf and s = 0. float values are replaced by their exponentials.
template <typename T, int N>
__device__ __forceinline__ void warp_pair(u32 (&v)[N], float& c, float& s) {
  typedef Codec<T> K;
  u32 t0 = v[0], t1 = v[1];
#pragma unroll
  for (int i = 2; i < N; i += 2) {
    t0 = K::top(t0, v[i]);
    t1 = K::top(t1, v[i + 1]);
  }
  t0 = K::top(t0, t1);
  float m = K::PER == 1 ? K::lo(t0) : fmaxf(K::lo(t0), K::hi(t0));
  m = warp_max(m);
  c = m * LOG2E;
  const float base = (m == NEG_INF) ? 0.0f : c;
  float s0 = 0.0f, s1 = 0.0f;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    if (K::PER == 1) {
      const float e = ex2(fmaf(K::lo(v[i]), LOG2E, -base));
      v[i] = __float_as_uint(e);
      if (i & 1) s1 += e; else s0 += e;
    } else {
      s0 += ex2(fmaf(K::lo(v[i]), LOG2E, -base));
      s1 += ex2(fmaf(K::hi(v[i]), LOG2E, -base));
    }
  }
  s = warp_sum(s0 + s1);
}

// All pairs of the row, merged by every warp. A row of -inf alone becomes NaN, as in torch.
template <int N>
__device__ __forceinline__ void merge_pairs(const float2* p, int lane, float& top, float& sum) {
  float m = NEG_INF;
#pragma unroll
  for (int i = 0; i < N; i += 32)
    if (i + lane < N) m = fmaxf(m, p[i + lane].x);
  m = warp_max(m);
  float t = 0.0f;
#pragma unroll
  for (int i = 0; i < N; i += 32)
    if (i + lane < N) {
      const float2 q = p[i + lane];
      t += q.y * ex2(q.x - m);
    }
  top = m;
  sum = warp_sum(t);
}

template <typename T>
__device__ __forceinline__ u32 finish(u32 a, float top, float inv, float factor) {
  typedef Codec<T> K;
  if (K::PER == 1) return __float_as_uint(__uint_as_float(a) * factor);
  return K::pack(ex2(fmaf(K::lo(a), LOG2E, -top)) * inv, ex2(fmaf(K::hi(a), LOG2E, -top)) * inv);
}

// ---------------------------------------------------------------- a row per warp or block

template <typename T, int W, int NW, int ROWS, int FULL, int MINB, int STORES>
__global__ void __launch_bounds__(NW * ROWS * 32, MINB)
softmax_rows(const T* x, T* y, long long sx, int rows, int words) {
  static_assert(NW == 1 || ROWS == 1, "rows of several warps have a block of their own");
  constexpr int SPAN = NW * 32;
  const int lane = threadIdx.x & 31;
  const int warp = threadIdx.x >> 5;
  const int row = NW == 1 ? blockIdx.x * ROWS + warp : blockIdx.x;
  const int place = NW == 1 ? lane : threadIdx.x;
  if (row >= rows) return;  // whole warps, and only where no barrier follows

  const uint4* in = reinterpret_cast<const uint4*>(x) + row * sx + place;
  u32 v[4 * W];
#pragma unroll
  for (int j = 0; j < W; ++j) {
    uint4 t = make_uint4(Codec<T>::FILL, Codec<T>::FILL, Codec<T>::FILL, Codec<T>::FILL);
    if (FULL || place + j * SPAN < words) t = load_word(in + j * SPAN);
    v[4 * j] = t.x;
    v[4 * j + 1] = t.y;
    v[4 * j + 2] = t.z;
    v[4 * j + 3] = t.w;
  }

  float c, s;
  warp_pair<T>(v, c, s);
  float top = c, sum = s;
  if (NW > 1) {
    __shared__ float2 pairs[NW];
    if (lane == 0) pairs[warp] = make_float2(c, s);
    __syncthreads();
    merge_pairs<NW>(pairs, lane, top, sum);
  }
  const float inv = rcp(sum);
  const float factor = ex2(c - top) * inv;

  uint4* out = reinterpret_cast<uint4*>(y) + (long long)row * words + place;
#pragma unroll
  for (int j = 0; j < W; ++j) {
    if (FULL || place + j * SPAN < words)
      store_word<STORES>(out + j * SPAN, finish<T>(v[4 * j], top, inv, factor),
                         finish<T>(v[4 * j + 1], top, inv, factor),
                         finish<T>(v[4 * j + 2], top, inv, factor),
                         finish<T>(v[4 * j + 3], top, inv, factor));
  }
}

// ---------------------------------------------------------------- runs of long rows

__device__ __forceinline__ void wait_phase(u32 bar, u32 parity) {
  u32 done;
  do {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.b32 %0, 1, 0, p;\n"
        "}\n"
        : "=r"(done)
        : "r"(bar), "r"(parity)
        : "memory");
  } while (!done);
}

__device__ __forceinline__ void cluster_barrier() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

template <int THREADS>
__device__ __forceinline__ void bring(const uint4* src, u32 buffer, u32 bars, int count) {
#pragma unroll 1
  for (int j = 0; j < 8; ++j) {
    const int n = min(count - j * THREADS, THREADS);
    if (n <= 0) break;
    const u32 bytes = (u32)n * 16u;
    const u32 bar = bars + 8u * j;
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes)
                 : "memory");
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[%0], [%1], %2, [%3], %4;" ::"r"(buffer + (u32)(j * THREADS * 16)),
        "l"(__cvta_generic_to_global(src + j * THREADS)), "r"(bytes), "r"(bar), "l"(EVICT_FIRST)
        : "memory");
  }
}

template <typename T, int THREADS, int CLUSTER, int FULL, int MINB, int STORES>
__global__ void __launch_bounds__(THREADS, MINB)
softmax_runs(const T* x, T* y, long long sx, int rows, int words, int share, int run) {
  constexpr int NW = THREADS / 32;
  extern __shared__ __align__(128) unsigned char dynamic_shared[];
  __shared__ __align__(8) u64 barriers[8];
  __shared__ __align__(8) float2 pairs[2][NW * CLUSTER];

  const int tid = threadIdx.x;
  const int lane = tid & 31;
  const int warp = tid >> 5;
  const int rank = CLUSTER == 1 ? 0 : blockIdx.x % CLUSTER;
  const int start = rank * share;
  const int count = max(0, min(share, words - start));
  int row = (blockIdx.x / CLUSTER) * run;
  const int end = min(row + run, rows);

  const uint4* buffer = reinterpret_cast<const uint4*>(dynamic_shared);
  const u32 buffer_at = (u32)__cvta_generic_to_shared(dynamic_shared);
  const u32 bars = (u32)__cvta_generic_to_shared(barriers);
  const uint4* in = reinterpret_cast<const uint4*>(x) + start;

  if (tid == 0) {
#pragma unroll
    for (int j = 0; j < 8; ++j)
      asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(bars + 8u * j) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    if (row < end) bring<THREADS>(in + row * sx, buffer_at, bars, count);
  }
  __syncthreads();
  if (CLUSTER > 1) cluster_barrier();  // no block writes to one that has not begun

  u32 phase = 0;
#pragma unroll 1
  for (; row < end; ++row, phase ^= 1u) {
    u32 v[32];
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      uint4 t = make_uint4(Codec<T>::FILL, Codec<T>::FILL, Codec<T>::FILL, Codec<T>::FILL);
      if (FULL || j * THREADS < count) wait_phase(bars + 8u * j, phase);
      if (FULL || j * THREADS + tid < count) t = buffer[j * THREADS + tid];
      v[4 * j] = t.x;
      v[4 * j + 1] = t.y;
      v[4 * j + 2] = t.z;
      v[4 * j + 3] = t.w;
    }
    __syncthreads();  // the row is in registers: its place is free for the next one
    if (tid == 0 && row + 1 < end) bring<THREADS>(in + (row + 1) * sx, buffer_at, bars, count);
    __syncwarp();

    float c, s;
    warp_pair<T>(v, c, s);
    // Two sets of pairs in turn: whoever writes a set again has passed the barrier of the row
    // between, which nobody reaches before having read the set.
    if (CLUSTER == 1) {
      if (lane == 0) pairs[phase][warp] = make_float2(c, s);
      __syncthreads();
    } else {
      if (lane < CLUSTER) {
        const u32 here = (u32)__cvta_generic_to_shared(&pairs[phase][rank * NW + warp]);
        u32 there;
        asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(here), "r"(lane));
        asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};" ::"r"(there), "f"(c), "f"(s)
                     : "memory");
      }
      __syncwarp();
      cluster_barrier();
    }
    float top, sum;
    merge_pairs<NW * CLUSTER>(pairs[phase], lane, top, sum);
    const float inv = rcp(sum);
    const float factor = ex2(c - top) * inv;

    uint4* out = reinterpret_cast<uint4*>(y) + (long long)row * words + start + tid;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      if (FULL || j * THREADS + tid < count)
        store_word<STORES>(out + j * THREADS, finish<T>(v[4 * j], top, inv, factor),
                           finish<T>(v[4 * j + 1], top, inv, factor),
                           finish<T>(v[4 * j + 2], top, inv, factor),
                           finish<T>(v[4 * j + 3], top, inv, factor));
    }
  }
}

// ---------------------------------------------------------------- anything else: read twice

template <typename T, int VEC>
__device__ __forceinline__ void get_unit(const T* p, long long i, float* f) {
  typedef Codec<T> K;
  if (VEC) {
    const uint4 t = reinterpret_cast<const uint4*>(p)[i];
    const u32 w[4] = {t.x, t.y, t.z, t.w};
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      f[k * K::PER] = K::lo(w[k]);
      if (K::PER == 2) f[k * K::PER + K::PER - 1] = K::hi(w[k]);
    }
  } else {
    f[0] = K::widen(p[i]);
  }
}

template <typename T, int VEC>
__device__ __forceinline__ void put_unit(T* p, long long i, const float* f) {
  typedef Codec<T> K;
  if (VEC) {
    u32 w[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) w[k] = K::pack(f[k * K::PER], f[k * K::PER + K::PER - 1]);
    reinterpret_cast<uint4*>(p)[i] = make_uint4(w[0], w[1], w[2], w[3]);
  } else {
    p[i] = K::narrow(f[0]);
  }
}

template <typename T, int THREADS, int VEC>
__global__ void __launch_bounds__(THREADS)
softmax_twice(const T* x, T* y, long long sx, int columns) {
  constexpr int NW = THREADS / 32;
  constexpr int PER = VEC ? 4 * Codec<T>::PER : 1;
  __shared__ float2 pairs[NW];
  const int lane = threadIdx.x & 31;
  const int warp = threadIdx.x >> 5;
  const T* in = x + blockIdx.x * sx;
  T* out = y + (long long)blockIdx.x * columns;
  const int units = columns / PER;

  float m = NEG_INF, c = NEG_INF, s = 0.0f;
#pragma unroll 4
  for (int i = threadIdx.x; i < units; i += THREADS) {
    float f[PER];
    get_unit<T, VEC>(in, i, f);
    float here = f[0];
#pragma unroll
    for (int k = 1; k < PER; ++k) here = fmaxf(here, f[k]);
    if (here > m) {
      const float next = here * LOG2E;
      s *= ex2(c - next);
      m = here;
      c = next;
    }
    const float base = (m == NEG_INF) ? 0.0f : c;
#pragma unroll
    for (int k = 0; k < PER; ++k) s += ex2(fmaf(f[k], LOG2E, -base));
  }
  const float cw = warp_max(c);
  const float safe = (cw == NEG_INF) ? 0.0f : cw;
  const float sw = warp_sum(s * ex2(c - safe));
  if (lane == 0) pairs[warp] = make_float2(cw, sw);
  __syncthreads();
  float top, sum;
  merge_pairs<NW>(pairs, lane, top, sum);
  const float inv = rcp(sum);

#pragma unroll 4
  for (int i = threadIdx.x; i < units; i += THREADS) {
    float f[PER];
    get_unit<T, VEC>(in, i, f);
#pragma unroll
    for (int k = 0; k < PER; ++k) f[k] = ex2(fmaf(f[k], LOG2E, -top)) * inv;
    put_unit<T, VEC>(out, i, f);
  }
}
"""


def power_above(n: int) -> int:
    """The smallest power of two that is at least n."""
    p = 1
    while p < n:
        p *= 2
    return p


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def softmax(x: torch.Tensor) -> torch.Tensor:
    rows, columns = x.shape
    y = torch.empty((rows, columns), dtype=x.dtype, device=x.device)
    if rows == 0 or columns == 0:
        return y
    if columns > 1 and x.stride(1) != 1:
        x = x.contiguous()
    kind = TYPES[x.dtype]
    vector = 16 // x.element_size()
    stride = x.stride(0) if rows > 1 else columns
    aligned = columns % vector == 0 and stride % vector == 0 and x.storage_offset() % vector == 0
    words = columns // vector

    if not aligned or words > MAX_CLUSTER * BIG * 8:
        units = words if aligned else columns
        threads = 128 if units <= 1024 else 512
        kernel = cuda_kernel(f"softmax_twice<{kind}, {threads}, {int(aligned)}>", SOURCE)
        kernel.launch((rows,), (threads,), x, y, stride, columns, shared=0)
        return y

    if words < STAY:
        if words <= 128:  # a warp per row, 16 blocks of 4 rows on an SM
            keep = power_above(cdiv(words, 32))
            warps, together, resident = 1, 4, 16
        else:
            keep = WORDS if words <= WORDS * 512 else 8
            warps = cdiv(words, keep * 32)
            together = 4 if warps == 1 else 1
            most = 1024 if keep == 8 else 1536
            resident = max(1, most // (warps * 32 * together))
        full = int(words == keep * warps * 32)
        kernel = cuda_kernel(
            f"softmax_rows<{kind}, {keep}, {warps}, {together}, {full}, {resident}, {STORES}>",
            SOURCE,
        )
        kernel.launch(
            (cdiv(rows, together),),
            (warps * 32 * together,),
            x,
            y,
            stride // vector,
            rows,
            words,
            shared=0,
        )
        return y

    cluster = power_above(cdiv(words, BIG * 8))
    share = cdiv(words, cluster)
    threads = cdiv(share, 8 * 32) * 32
    resident = max(1, 1024 // threads)
    full = int(share * cluster == words and share == threads * 8)
    # Levelled runs: as many waves as runs of RUN rows make, then the shortest run for them.
    processors = torch.cuda.get_device_properties(x.device).multi_processor_count
    at_once = max(1, processors * resident // cluster)
    waves = cdiv(rows, RUN * at_once)
    run = cdiv(rows, waves * at_once)
    kernel = cuda_kernel(
        f"softmax_runs<{kind}, {threads}, {cluster}, {full}, {resident}, {STORES}>", SOURCE
    )
    kernel.launch(
        (cdiv(rows, run) * cluster,),
        (threads,),
        x,
        y,
        stride // vector,
        rows,
        words,
        share,
        run,
        shared=threads * 8 * 16,
        cluster=(cluster,) if cluster > 1 else None,
    )
    return y
