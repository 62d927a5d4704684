"""Softmax, every row read once.

Up to 2 KiB a row: one warp per row. Up to RING_BYTES: one block per row, in packed registers.
Longer: persistent blocks (or small clusters of them) that hold the row at work in packed registers
while a ring of bulk copies in shared memory fetches the next rows. The one barrier of a row both
exchanges (maximum, sum) and frees the ring's slots. Beyond 1 MiB a row: two sweeps.
"""

import torch
from kagent_sandbox.lang import cuda_kernel

ROW_WARPS = 4  # rows (warps) of a block for short rows
BLOCK_V = 4  # 16-byte words of a thread, one block per row
RING_BYTES = 24576  # rows of at least so many bytes take the persistent ring
MAX_CHUNK = 8192  # 16-byte words of a row for one block of the ring, more: clusters
TUNE = {
    "ROW_WARPS": [2, 4, 8],
    "BLOCK_V": [2, 4],
    "RING_BYTES": [24576, 65537],
    "MAX_CHUNK": [4096, 8192],
}

SOURCE = r"""
#include <cuda_bf16.h>
#include <cuda_fp16.h>

typedef unsigned int u32;
typedef unsigned long long u64;

#define INL __device__ __forceinline__
#define LOG2E 1.4426950408889634f

INL float minus_inf() { return __int_as_float(0xff800000); }

INL float ex2(float a) {
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(a));
  return r;
}

// The subtraction first, then the constant: exact for large inputs.
INL float expo(float a, float k) { return ex2((a - k) * LOG2E); }

// A shift that never makes -inf - -inf.
INL float safe(float m) { return m == minus_inf() ? 0.0f : m; }

template <typename T> struct Num;

template <> struct Num<float> {
  static constexpr int VEC = 4;
  static constexpr u32 LOW = 0xff800000u;
  static INL u32 pmax(u32 a, u32 b) {
    return __float_as_uint(fmaxf(__uint_as_float(a), __uint_as_float(b)));
  }
  static INL float fin(u32 a) { return __uint_as_float(a); }
  static INL float sum(u32 w, float k) { return expo(__uint_as_float(w), k); }
  static INL u32 out(u32 w, float k, float inv) {
    return __float_as_uint(expo(__uint_as_float(w), k) * inv);
  }
};

template <> struct Num<__nv_bfloat16> {
  static constexpr int VEC = 8;
  static constexpr u32 LOW = 0xff80ff80u;
  static INL float lo(u32 w) { return __uint_as_float(w << 16); }
  static INL float hi(u32 w) { return __uint_as_float(w & 0xffff0000u); }
  static INL u32 pmax(u32 a, u32 b) {
    u32 r;
    asm("max.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
  }
  static INL float fin(u32 a) { return fmaxf(lo(a), hi(a)); }
  static INL float sum(u32 w, float k) { return expo(lo(w), k) + expo(hi(w), k); }
  static INL u32 out(u32 w, float k, float inv) {
    const float a = expo(lo(w), k) * inv;
    const float b = expo(hi(w), k) * inv;
    u32 r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(b), "f"(a));
    return r;
  }
};

template <> struct Num<__half> {
  static constexpr int VEC = 8;
  static constexpr u32 LOW = 0xfc00fc00u;
  static INL float2 both(u32 w) {
    float2 r;
    asm("{\n\t.reg .b16 l, h;\n\tmov.b32 {l, h}, %2;\n\tcvt.f32.f16 %0, l;\n\tcvt.f32.f16 %1, h;\n\t}"
        : "=f"(r.x), "=f"(r.y) : "r"(w));
    return r;
  }
  static INL u32 pmax(u32 a, u32 b) {
    u32 r;
    asm("max.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
  }
  static INL float fin(u32 a) {
    const float2 f = both(a);
    return fmaxf(f.x, f.y);
  }
  static INL float sum(u32 w, float k) {
    const float2 f = both(w);
    return expo(f.x, k) + expo(f.y, k);
  }
  static INL u32 out(u32 w, float k, float inv) {
    const float2 f = both(w);
    const float a = expo(f.x, k) * inv;
    const float b = expo(f.y, k) * inv;
    u32 r;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(b), "f"(a));
    return r;
  }
};

template <typename T> INL uint4 low_word() {
  return make_uint4(Num<T>::LOW, Num<T>::LOW, Num<T>::LOW, Num<T>::LOW);
}

template <typename T> INL uint4 finish(const uint4& w, float k, float inv) {
  return make_uint4(Num<T>::out(w.x, k, inv), Num<T>::out(w.y, k, inv),
                    Num<T>::out(w.z, k, inv), Num<T>::out(w.w, k, inv));
}

INL float warp_max(float m) {
#pragma unroll
  for (int d = 16; d > 0; d >>= 1) m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, d));
  return m;
}

INL float warp_sum(float s) {
#pragma unroll
  for (int d = 16; d > 0; d >>= 1) s += __shfl_xor_sync(0xffffffffu, s, d);
  return s;
}

// (maximum, sum of exponentials relative to it) of the words of a warp.
template <typename T, int V> INL float2 warp_pair(const uint4 (&raw)[V]) {
  u32 a = Num<T>::LOW, b = Num<T>::LOW;  // never NaN: max drops NaNs, the sum brings them back
#pragma unroll
  for (int v = 0; v < V; ++v) {
    a = Num<T>::pmax(a, raw[v].x);
    b = Num<T>::pmax(b, raw[v].y);
    a = Num<T>::pmax(a, raw[v].z);
    b = Num<T>::pmax(b, raw[v].w);
  }
  const float m = warp_max(Num<T>::fin(Num<T>::pmax(a, b)));
  const float k = safe(m);
  float s0 = 0.0f, s1 = 0.0f;
#pragma unroll
  for (int v = 0; v < V; ++v) {
    s0 += Num<T>::sum(raw[v].x, k);
    s1 += Num<T>::sum(raw[v].y, k);
    s0 += Num<T>::sum(raw[v].z, k);
    s1 += Num<T>::sum(raw[v].w, k);
  }
  return make_float2(m, warp_sum(s0 + s1));
}

// (shift, 1 / sum) from COUNT pairs in shared memory, in every lane of every warp.
template <int COUNT> INL float2 merge_pairs(const float2* pairs) {
  constexpr int P = (COUNT + 31) / 32;
  const int lane = threadIdx.x % 32;
  float2 p[P];
  float m = minus_inf();
#pragma unroll
  for (int i = 0; i < P; ++i) {
    const int j = i * 32 + lane;
    p[i] = make_float2(minus_inf(), 0.0f);
    if (j < COUNT) p[i] = pairs[j];
    m = fmaxf(m, p[i].x);
  }
  const float k = safe(warp_max(m));
  float s = 0.0f;
#pragma unroll
  for (int i = 0; i < P; ++i) s += p[i].y * expo(p[i].x, k);
  return make_float2(k, 1.0f / warp_sum(s));
}

// Words of rows that are not aligned: `first` may lie before the row or behind it.
template <typename T> INL uint4 load_general(const T* row, int first, int n, bool vec) {
  constexpr int VEC = Num<T>::VEC;
  if (vec && first >= 0 && first + VEC <= n) return __ldcs((const uint4*)(row + first));
  u32 part[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    part[i] = Num<T>::LOW;
    if constexpr (VEC == 4) {
      const int e = first + i;
      if (e >= 0 && e < n) part[i] = ((const u32*)row)[e];
    } else {
      const int e = first + 2 * i;
      u32 l = Num<T>::LOW & 0xffffu, h = Num<T>::LOW & 0xffffu;
      if (e >= 0 && e < n) l = ((const unsigned short*)row)[e];
      if (e + 1 >= 0 && e + 1 < n) h = ((const unsigned short*)row)[e + 1];
      part[i] = l | (h << 16);
    }
  }
  return make_uint4(part[0], part[1], part[2], part[3]);
}

template <typename T> INL void store_general(T* row, int first, int n, const uint4& o) {
  constexpr int VEC = Num<T>::VEC;
  if (first >= 0 && first + VEC <= n) {  // `first` was chosen so that this is aligned
    __stcs((uint4*)(row + first), o);
    return;
  }
  const u32 part[4] = {o.x, o.y, o.z, o.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (VEC == 4) {
      const int e = first + i;
      if (e >= 0 && e < n) ((u32*)row)[e] = part[i];
    } else {
      const int e = first + 2 * i;
      if (e >= 0 && e < n) ((unsigned short*)row)[e] = (unsigned short)(part[i] & 0xffffu);
      if (e + 1 >= 0 && e + 1 < n) ((unsigned short*)row)[e + 1] = (unsigned short)(part[i] >> 16);
    }
  }
}

template <typename T> INL bool all_aligned(const T* x, const T* y, long long stride, int n) {
  return n % Num<T>::VEC == 0 &&
         (((u64)x | (u64)y | (u64)(stride * (long long)sizeof(T))) & 15ull) == 0;
}

template <typename T> INL int head_of(const T* y_row) {
  return (int)(((u64)y_row & 15ull) / sizeof(T));
}

template <typename T> INL bool same_phase(const T* x_row, int head) {
  return (((u64)x_row - (u64)head * sizeof(T)) & 15ull) == 0;
}

// ---------------------------------------------------------------- one warp per row

template <typename T, int V, int WARPS>
__global__ void __launch_bounds__(WARPS * 32)
softmax_warp(const T* __restrict__ x, T* __restrict__ y, long long stride, int rows, int n) {
  constexpr int VEC = Num<T>::VEC;
  const int lane = threadIdx.x % 32;
  const long long row = (long long)blockIdx.x * WARPS + threadIdx.x / 32;
  if (row >= rows) return;
  const T* xr = x + row * stride;
  T* yr = y + row * n;
  const bool fast = all_aligned(x, y, stride, n);
  const int head = fast ? 0 : head_of(yr);
  const int words = (head + n + VEC - 1) / VEC;
  uint4 raw[V];
  if (fast) {
#pragma unroll
    for (int v = 0; v < V; ++v) {
      raw[v] = low_word<T>();
      if (v * 32 + lane < words) raw[v] = __ldcs((const uint4*)xr + v * 32 + lane);
    }
  } else {
    const bool vec = same_phase(xr, head);
#pragma unroll
    for (int v = 0; v < V; ++v) raw[v] = load_general(xr, (v * 32 + lane) * VEC - head, n, vec);
  }
  const float2 mine = warp_pair<T, V>(raw);
  const float k = safe(mine.x);
  const float inv = 1.0f / mine.y;
  if (fast) {
#pragma unroll
    for (int v = 0; v < V; ++v)
      if (v * 32 + lane < words) __stcs((uint4*)yr + v * 32 + lane, finish<T>(raw[v], k, inv));
  } else {
#pragma unroll
    for (int v = 0; v < V; ++v)
      store_general(yr, (v * 32 + lane) * VEC - head, n, finish<T>(raw[v], k, inv));
  }
}

// ---------------------------------------------------------------- one block per row

template <typename T, int V, int THREADS>
__global__ void __launch_bounds__(THREADS)
softmax_block(const T* __restrict__ x, T* __restrict__ y, long long stride, int n) {
  constexpr int VEC = Num<T>::VEC;
  constexpr int WARPS = THREADS / 32;
  __shared__ float2 pairs[WARPS];
  const int tid = threadIdx.x;
  const long long row = blockIdx.x;
  const T* xr = x + row * stride;
  T* yr = y + row * n;
  const bool fast = all_aligned(x, y, stride, n);
  const int head = fast ? 0 : head_of(yr);
  const int words = (head + n + VEC - 1) / VEC;
  uint4 raw[V];
  if (fast) {
#pragma unroll
    for (int v = 0; v < V; ++v) {
      raw[v] = low_word<T>();
      if (v * THREADS + tid < words) raw[v] = __ldcs((const uint4*)xr + v * THREADS + tid);
    }
  } else {
    const bool vec = same_phase(xr, head);
#pragma unroll
    for (int v = 0; v < V; ++v)
      raw[v] = load_general(xr, (v * THREADS + tid) * VEC - head, n, vec);
  }
  const float2 mine = warp_pair<T, V>(raw);
  if (tid % 32 == 0) pairs[tid / 32] = mine;
  __syncthreads();
  const float2 all = merge_pairs<WARPS>(pairs);
  if (fast) {
#pragma unroll
    for (int v = 0; v < V; ++v)
      if (v * THREADS + tid < words)
        __stcs((uint4*)yr + v * THREADS + tid, finish<T>(raw[v], all.x, all.y));
  } else {
#pragma unroll
    for (int v = 0; v < V; ++v)
      store_general(yr, (v * THREADS + tid) * VEC - head, n, finish<T>(raw[v], all.x, all.y));
  }
}

// ---------------------------------------------------------------- persistent, with a ring

INL u32 smem_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

INL void bar_wait(u32 bar, u32 parity) {
  u32 done;
  do {
    asm volatile(
        "{\n\t.reg .pred p;\n\t"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n\t"
        "selp.u32 %0, 1, 0, p;\n\t}"
        : "=r"(done) : "r"(bar), "r"(parity) : "memory");
  } while (!done);
}

INL void bulk_load(u32 dst, const void* src, u32 bytes, u32 bar) {
  u64 policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes)
               : "memory");
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1], %2, [%3], %4;" ::"r"(dst), "l"((u64)src), "r"(bytes), "r"(bar), "l"(policy)
      : "memory");
}

INL void cluster_barrier() {
  __syncwarp();
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Dynamic shared memory: SLOTS slabs of THREADS words | 2 x CL x WARPS pairs | SLOTS barriers.
template <typename T, int THREADS, int V, int CL, int SLOTS>
__global__ void __launch_bounds__(THREADS, 1024 / THREADS)
softmax_ring(const T* __restrict__ x, T* __restrict__ y, long long stride, int rows, int n,
             int chunk) {
  constexpr int VEC = Num<T>::VEC;
  constexpr int WARPS = THREADS / 32;
  constexpr int SLAB = THREADS * 16;
  static_assert(SLOTS >= V, "a row must fit the ring");
  extern __shared__ __align__(128) unsigned char smem[];
  float2* pairs = reinterpret_cast<float2*>(smem + SLOTS * SLAB);
  const u32 ring = smem_address(smem);
  const u32 full = ring + SLOTS * SLAB + 2 * CL * WARPS * 8;

  const int tid = threadIdx.x;
  const int lane = tid % 32;
  const int warp = tid / 32;
  u32 rank = 0;
  if constexpr (CL > 1) asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  const int first = blockIdx.x / CL;
  const int step = gridDim.x / CL;
  const int begin = (int)rank * chunk;  // in words

  const bool fast = all_aligned(x, y, stride, n);
  int mine = min(max(n / VEC - begin, 0), chunk);  // words of this block, when aligned
  const int tiles = (mine + THREADS - 1) / THREADS;

  // What thread 0 fetches next.
  int p_row = first, p_tile = 0, p_slot = 0;
  auto fetch = [&](int count) {
    for (int i = 0; i < count && p_row < rows; ++i) {
      const int w = p_tile * THREADS;
      bulk_load(ring + p_slot * SLAB, x + (long long)p_row * stride + (long long)(begin + w) * VEC,
                (u32)min(THREADS, mine - w) * 16u, full + p_slot * 8);
      if (++p_slot == SLOTS) p_slot = 0;
      if (++p_tile == tiles) {
        p_tile = 0;
        p_row += step;
      }
    }
  };

  if (tid == 0) {
    for (int s = 0; s < SLOTS; ++s)
      asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(full + s * 8) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    if (fast && tiles > 0) fetch(SLOTS);
  }
  if constexpr (CL > 1) cluster_barrier();  // the neighbours must run before one writes to them
  else __syncthreads();

  int slot = 0;
  u32 phase = 0;
  int parity = 0;
  for (int row = first; row < rows; row += step) {
    T* yr = y + (long long)row * n;
    int head = 0;
    uint4 raw[V];
    if (fast) {
#pragma unroll
      for (int v = 0; v < V; ++v) {
        raw[v] = low_word<T>();
        if (v < tiles) {
          bar_wait(full + slot * 8, phase);
          if (v * THREADS + tid < mine)
            raw[v] = *reinterpret_cast<const uint4*>(smem + slot * SLAB + tid * 16);
          if (++slot == SLOTS) {
            slot = 0;
            phase ^= 1;
          }
        }
      }
    } else {
      const T* xr = x + (long long)row * stride;
      head = head_of(yr);
      const bool vec = same_phase(xr, head);
      mine = min(max((head + n + VEC - 1) / VEC - begin, 0), chunk);
#pragma unroll
      for (int v = 0; v < V; ++v) {
        const int w = v * THREADS + tid;
        raw[v] = low_word<T>();
        if (w < mine) raw[v] = load_general(xr, (begin + w) * VEC - head, n, vec);
      }
    }

    const float2 pair = warp_pair<T, V>(raw);
    float2* now = pairs + parity * (CL * WARPS);  // two sets: one barrier per row is enough
    parity ^= 1;
    if constexpr (CL > 1) {
      if (lane < CL) {
        const u32 here = smem_address(now + rank * WARPS + warp);
        u32 there;
        asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(here), "r"(lane));
        asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};" ::"r"(there), "f"(pair.x),
                     "f"(pair.y)
                     : "memory");
      }
      cluster_barrier();
    } else {
      if (lane == 0) now[warp] = pair;
      __syncthreads();
    }
    // All threads hold their words now: the slots of this row are free.
    if (tid == 0 && fast && tiles > 0) fetch(tiles);
    __syncwarp();

    const float2 all = merge_pairs<CL * WARPS>(now);
    if (fast) {
      uint4* yw = reinterpret_cast<uint4*>(yr) + begin + tid;
#pragma unroll
      for (int v = 0; v < V; ++v)
        if (v * THREADS + tid < mine) __stcs(yw + v * THREADS, finish<T>(raw[v], all.x, all.y));
    } else {
#pragma unroll
      for (int v = 0; v < V; ++v) {
        const int w = v * THREADS + tid;
        if (w < mine)
          store_general(yr, (begin + w) * VEC - head, n, finish<T>(raw[v], all.x, all.y));
      }
    }
  }
  if constexpr (CL > 1) cluster_barrier();  // no block leaves while another may write to it
}

// ---------------------------------------------------------------- two sweeps, very long rows

template <typename T, int THREADS>
__global__ void __launch_bounds__(THREADS)
softmax_long(const T* __restrict__ x, T* __restrict__ y, long long stride, int n) {
  constexpr int VEC = Num<T>::VEC;
  constexpr int WARPS = THREADS / 32;
  __shared__ float2 pairs[WARPS];
  const int tid = threadIdx.x;
  const long long row = blockIdx.x;
  const T* xr = x + row * stride;
  T* yr = y + row * n;
  const int head = head_of(yr);
  const bool vec = same_phase(xr, head);
  const int words = (head + n + VEC - 1) / VEC;
  float m = minus_inf(), s = 0.0f;
#pragma unroll 4
  for (int w = tid; w < words; w += THREADS) {
    const uint4 q = load_general(xr, w * VEC - head, n, vec);
    u32 t = Num<T>::pmax(Num<T>::LOW, q.x);
    t = Num<T>::pmax(t, q.y);
    t = Num<T>::pmax(t, q.z);
    t = Num<T>::pmax(t, q.w);
    const float top = fmaxf(m, Num<T>::fin(t));
    const float k = safe(top);
    s = s * expo(m, k) + ((Num<T>::sum(q.x, k) + Num<T>::sum(q.y, k)) +
                          (Num<T>::sum(q.z, k) + Num<T>::sum(q.w, k)));
    m = top;
  }
  const float wm = warp_max(m);
  s = warp_sum(s * expo(m, safe(wm)));
  if (tid % 32 == 0) pairs[tid / 32] = make_float2(wm, s);
  __syncthreads();
  const float2 all = merge_pairs<WARPS>(pairs);
  const int last = (words - 1) / THREADS * THREADS;
#pragma unroll 4
  for (int b = last; b >= 0; b -= THREADS) {
    const int w = b + tid;
    if (w < words) {
      const uint4 q = load_general(xr, w * VEC - head, n, vec);
      store_general(yr, w * VEC - head, n, finish<T>(q, all.x, all.y));
    }
  }
}
"""

TYPES = {
    torch.bfloat16: ("__nv_bfloat16", 8),
    torch.float16: ("__half", 8),
    torch.float32: ("float", 4),
}


def ceil_div(a, b):
    return -(-a // b)


def softmax(x: torch.Tensor) -> torch.Tensor:
    rows, n = x.shape
    if n > 1 and x.stride(1) != 1:
        x = x.contiguous()
    y = torch.empty((rows, n), dtype=x.dtype, device=x.device)
    if rows == 0 or n == 0:
        return y
    name, vec = TYPES[x.dtype]
    stride = x.stride(0)
    # 16-byte words of y that a row can touch; a row of y that starts inside a word touches one more.
    words = n // vec if n % vec == 0 else (n + 2 * vec - 2) // vec

    if words <= 128:
        v = ceil_div(words, 32)
        kernel = cuda_kernel(f"softmax_warp<{name}, {v}, {ROW_WARPS}>", SOURCE)
        kernel.launch((ceil_div(rows, ROW_WARPS),), (ROW_WARPS * 32,), x, y, stride, rows, n, shared=0)
        return y

    if words <= 4096 and words * 16 < RING_BYTES:
        threads = min(1024, ceil_div(ceil_div(words, BLOCK_V), 32) * 32)
        v = ceil_div(words, threads)
        kernel = cuda_kernel(f"softmax_block<{name}, {v}, {threads}>", SOURCE)
        kernel.launch((rows,), (threads,), x, y, stride, n, shared=0)
        return y

    if words > 8 * 8192:
        kernel = cuda_kernel(f"softmax_long<{name}, 1024>", SOURCE)
        kernel.launch((rows,), (1024,), x, y, stride, n, shared=0)
        return y

    blocks = 1
    while blocks < 8 and ceil_div(words, blocks) > MAX_CHUNK:
        blocks *= 2
    chunk = ceil_div(words, blocks)
    threads = 512 if chunk <= 4096 else 1024
    v = ceil_div(chunk, threads)
    slots = 14 if threads == 1024 and blocks < 8 else 13
    shared = slots * threads * 16 + 2 * blocks * (threads // 32) * 8 + slots * 8
    processors = torch.cuda.get_device_properties(x.device).multi_processor_count
    groups = processors * (1024 // threads) // blocks
    if blocks > 2:  # clusters of 4 and 8 do not fill every GPC: never a straggling last one
        groups = groups * 15 // 16
    groups = max(1, min(rows, groups))
    kernel = cuda_kernel(f"softmax_ring<{name}, {threads}, {v}, {blocks}, {slots}>", SOURCE)
    kernel.launch(
        (groups * blocks,),
        (threads,),
        x,
        y,
        stride,
        rows,
        n,
        chunk,
        shared=shared,
        cluster=(blocks,) if blocks > 1 else None,
    )
    return y
