import torch
from kagent_sandbox.lang import cuda_kernel

NARROW_ROW = 16384  # bytes: up to here one warp takes a row
HELD = 8  # chunks of 16 KiB of a long row that stay in registers
HELD_FROM = 8  # rows of more chunks than this use registers, too
STAGES = 14  # chunks of 16 KiB in the ring
STORE = 0  # 0: ordinary stores, 1: streaming stores
STATIC_ROWS = 4  # rows of a block before the counter hands them out
TUNE = {
    "STAGES": [11, 14],
    "STORE": [0, 1],
    "STATIC_ROWS": [4, 1048576],
}

CHUNK = 16384
THREADS = 512
TYPES = {torch.bfloat16: "__nv_bfloat16", torch.float16: "__half", torch.float32: "float"}

SOURCE = r"""
#include <cuda_bf16.h>
#include <cuda_fp16.h>

constexpr int CHUNK = 16384;
constexpr int PACKS = CHUNK / 16;
constexpr int THREADS = 512;
constexpr int WARPS = THREADS / 32;
constexpr float LOG2E = 1.4426950408889634f;
constexpr float LOWEST = -3.4028234663852886e38f;

// ---------------------------------------------------------------- words of 4 bytes

template <typename T> struct Words;

template <> struct Words<float> {
  static constexpr int PER = 1;
  static constexpr unsigned EMPTY = 0xff800000u;
  static __device__ __forceinline__ void open(unsigned w, float (&f)[1]) { f[0] = __uint_as_float(w); }
  static __device__ __forceinline__ unsigned close(const float (&f)[1]) { return __float_as_uint(f[0]); }
  static __device__ __forceinline__ unsigned larger(unsigned a, unsigned b) {
    return __float_as_uint(fmaxf(__uint_as_float(a), __uint_as_float(b)));
  }
  static __device__ __forceinline__ float top(unsigned w) { return __uint_as_float(w); }
  static __device__ __forceinline__ float read(const float* p) { return *p; }
  static __device__ __forceinline__ void write(float* p, float v) {
    asm volatile("st.global.b32 [%0], %1;" ::"l"(__cvta_generic_to_global(p)), "r"(__float_as_uint(v)));
  }
};

template <> struct Words<__nv_bfloat16> {
  static constexpr int PER = 2;
  static constexpr unsigned EMPTY = 0xff80ff80u;
  static __device__ __forceinline__ void open(unsigned w, float (&f)[2]) {
    f[0] = __uint_as_float(w << 16);
    f[1] = __uint_as_float(w & 0xffff0000u);
  }
  static __device__ __forceinline__ unsigned close(const float (&f)[2]) {
    const __nv_bfloat162 b = __floats2bfloat162_rn(f[0], f[1]);
    return *reinterpret_cast<const unsigned*>(&b);
  }
  static __device__ __forceinline__ unsigned larger(unsigned a, unsigned b) {
    const __nv_bfloat162 c = __hmax2(*reinterpret_cast<const __nv_bfloat162*>(&a),
                                     *reinterpret_cast<const __nv_bfloat162*>(&b));
    return *reinterpret_cast<const unsigned*>(&c);
  }
  static __device__ __forceinline__ float top(unsigned w) {
    return fmaxf(__uint_as_float(w << 16), __uint_as_float(w & 0xffff0000u));
  }
  static __device__ __forceinline__ float read(const __nv_bfloat16* p) { return __bfloat162float(*p); }
  static __device__ __forceinline__ void write(__nv_bfloat16* p, float v) {
    const __nv_bfloat16 b = __float2bfloat16_rn(v);
    const unsigned short bits = *reinterpret_cast<const unsigned short*>(&b);
    asm volatile("st.global.b16 [%0], %1;" ::"l"(__cvta_generic_to_global(p)), "h"(bits));
  }
};

template <> struct Words<__half> {
  static constexpr int PER = 2;
  static constexpr unsigned EMPTY = 0xfc00fc00u;
  static __device__ __forceinline__ void open(unsigned w, float (&f)[2]) {
    const float2 v = __half22float2(*reinterpret_cast<const __half2*>(&w));
    f[0] = v.x;
    f[1] = v.y;
  }
  static __device__ __forceinline__ unsigned close(const float (&f)[2]) {
    const __half2 b = __floats2half2_rn(f[0], f[1]);
    return *reinterpret_cast<const unsigned*>(&b);
  }
  static __device__ __forceinline__ unsigned larger(unsigned a, unsigned b) {
    const __half2 c = __hmax2(*reinterpret_cast<const __half2*>(&a), *reinterpret_cast<const __half2*>(&b));
    return *reinterpret_cast<const unsigned*>(&c);
  }
  static __device__ __forceinline__ float top(unsigned w) {
    const float2 v = __half22float2(*reinterpret_cast<const __half2*>(&w));
    return fmaxf(v.x, v.y);
  }
  static __device__ __forceinline__ float read(const __half* p) { return __half2float(*p); }
  static __device__ __forceinline__ void write(__half* p, float v) {
    const __half b = __float2half_rn(v);
    const unsigned short bits = *reinterpret_cast<const unsigned short*>(&b);
    asm volatile("st.global.b16 [%0], %1;" ::"l"(__cvta_generic_to_global(p)), "h"(bits));
  }
};

// ---------------------------------------------------------------- packs of 16 bytes

template <typename T> __device__ __forceinline__ float exponential(float d) {
  if constexpr (sizeof(T) == 4) {
    return expf(d);
  } else {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(d * LOG2E));
    return y;
  }
}

template <typename T> __device__ __forceinline__ uint4 empty_pack() {
  constexpr unsigned E = Words<T>::EMPTY;
  return make_uint4(E, E, E, E);
}

template <typename T> __device__ __forceinline__ unsigned pack_larger(const uint4& v) {
  using W = Words<T>;
  return W::larger(W::larger(v.x, v.y), W::larger(v.z, v.w));
}

template <typename T> __device__ __forceinline__ float pack_sum(const uint4& v, float m) {
  using W = Words<T>;
  const unsigned w[4] = {v.x, v.y, v.z, v.w};
  float total[2] = {0.0f, 0.0f};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float f[W::PER];
    W::open(w[i], f);
#pragma unroll
    for (int j = 0; j < W::PER; ++j) total[(i * W::PER + j) & 1] += exponential<T>(f[j] - m);
  }
  return total[0] + total[1];
}

template <typename T> __device__ __forceinline__ uint4 pack_gradient(const uint4& v, float m, float scale) {
  using W = Words<T>;
  unsigned w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float f[W::PER];
    W::open(w[i], f);
#pragma unroll
    for (int j = 0; j < W::PER; ++j) f[j] = exponential<T>(f[j] - m) * scale;
    w[i] = W::close(f);
  }
  return make_uint4(w[0], w[1], w[2], w[3]);
}

// The running maximum m starts at the lowest finite number, so that m - m is never inf - inf.
template <typename T> __device__ __forceinline__ void absorb(const uint4& a, const uint4& b, float& m, float& s) {
  using W = Words<T>;
  const float top = fmaxf(m, W::top(W::larger(pack_larger<T>(a), pack_larger<T>(b))));
  s = s * exponential<T>(m - top) + (pack_sum<T>(a, top) + pack_sum<T>(b, top));
  m = top;
}

template <typename T, int LANES> __device__ __forceinline__ void combine(float& m, float& s) {
  float top = m;
#pragma unroll
  for (int o = LANES / 2; o > 0; o >>= 1) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, o));
  s *= exponential<T>(m - top);
#pragma unroll
  for (int o = LANES / 2; o > 0; o >>= 1) s += __shfl_xor_sync(0xffffffffu, s, o);
  m = top;
}

__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
  for (int o = 16; o > 0; o >>= 1) v += __shfl_xor_sync(0xffffffffu, v, o);
  return v;
}

template <int STORE> __device__ __forceinline__ void store_pack(uint4* p, const uint4& v) {
  const unsigned long long a = __cvta_generic_to_global(p);
  if constexpr (STORE == 1) {
    asm volatile("st.global.cs.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(a), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w));
  } else {
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(a), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w));
  }
}

// ---------------------------------------------------------------- synchronisation

__device__ __forceinline__ unsigned shared_address(const void* p) {
  return static_cast<unsigned>(__cvta_generic_to_shared(p));
}

__device__ __forceinline__ void wait_parity(const unsigned long long* barrier, unsigned parity) {
  const unsigned a = shared_address(barrier);
  unsigned done;
  do {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n"
        "}\n"
        : "=r"(done)
        : "r"(a), "r"(parity)
        : "memory");
  } while (!done);
}

__device__ __forceinline__ void arrive(const unsigned long long* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

__device__ __forceinline__ void release(const unsigned long long* barrier, int lane) {
  __syncwarp();
  if (lane == 0) arrive(barrier);
}

__device__ __forceinline__ void previous_kernel() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// scratch: [0] the next row, [1] blocks that are done, [2] rows that count
__device__ __forceinline__ void finish(float lost, int lane, float* partials, float* loss, int* scratch, int count) {
  int last = 0;
  if (lane == 0) {
    __stcg(partials + blockIdx.x, lost);
    __threadfence();
    last = atomicAdd(scratch + 1, 1) == static_cast<int>(gridDim.x) - 1;
  }
  last = __shfl_sync(0xffffffffu, last, 0);
  if (last) {
    __threadfence();
    float total = 0.0f;
    for (int i = lane; i < static_cast<int>(gridDim.x); i += 32) total += __ldcg(partials + i);
    total = warp_sum(total);
    if (lane == 0) *loss = total / static_cast<float>(count);
  }
}

// ---------------------------------------------------------------- kernels

__global__ void __launch_bounds__(512) prepare(const long long* target, int* scratch, int rows,
                                               long long ignore_index) {
  asm volatile("griddepcontrol.launch_dependents;");
  __shared__ int counts[16];
  int n = 0;
#pragma unroll 8
  for (int i = threadIdx.x; i < rows; i += 512) n += target[i] != ignore_index ? 1 : 0;
#pragma unroll
  for (int o = 16; o > 0; o >>= 1) n += __shfl_xor_sync(0xffffffffu, n, o);
  if (threadIdx.x % 32 == 0) counts[threadIdx.x / 32] = n;
  __syncthreads();
  if (threadIdx.x == 0) {
    int total = 0;
    for (int i = 0; i < 16; ++i) total += counts[i];
    scratch[0] = 0;
    scratch[1] = 0;
    scratch[2] = total;
    scratch[3] = 0;
  }
}

// Up to V - 1 columns before the first whole pack and as many behind the last are taken singly.
template <typename T> __device__ __forceinline__ void layout_of(long long row, int columns, int& head, int& packs) {
  constexpr int V = 16 / sizeof(T);
  head = static_cast<int>((-(row * columns)) & (V - 1));
  head = min(head, columns);
  packs = (columns - head) / V;
}

template <typename T, int STORE>
__global__ void __launch_bounds__(256) narrow_rows(const T* logits, const long long* target, T* grad,
                                                   float* partials, float* loss, int* scratch, long long stride,
                                                   int rows, int columns, long long ignore_index) {
  constexpr int V = 16 / sizeof(T);
  using W = Words<T>;
  __shared__ float sums[8];
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  previous_kernel();
  const int count = __ldcg(scratch + 2);
  const float share = 1.0f / static_cast<float>(count);
  float lost = 0.0f;

  for (long long row = static_cast<long long>(blockIdx.x) * 8 + warp; row < rows;
       row += static_cast<long long>(gridDim.x) * 8) {
    int head, packs;
    layout_of<T>(row, columns, head, packs);
    const long long t = target[row];
    const T* x = logits + row * stride;
    T* y = grad + row * columns;
    const uint4* in = reinterpret_cast<const uint4*>(x + head);
    uint4* out = reinterpret_cast<uint4*>(y + head);
    const int edges = columns - packs * V;
    const bool edge = lane < edges;
    const int edge_column = lane < head ? lane : packs * V + lane;
    float edge_x = 0.0f;
    if (edge) edge_x = W::read(x + edge_column);
    const bool valid = t != ignore_index;
    int owner = -1;
    if (valid) {
      const int column = static_cast<int>(t);
      const int inside = column - head;
      owner = inside < 0 ? column : inside >= packs * V ? column - packs * V : (inside / V) % 32;
    }
    const bool mine = owner == lane;
    float chosen = 0.0f;
    if (mine) chosen = W::read(x + t);

    float m = LOWEST, s = 0.0f;
    for (int p = lane; p < packs; p += 64) {
      const uint4 a = in[p];
      const uint4 b = p + 32 < packs ? in[p + 32] : empty_pack<T>();
      absorb<T>(a, b, m, s);
    }
    if (edge) {
      const float top = fmaxf(m, edge_x);
      s = s * exponential<T>(m - top) + exponential<T>(edge_x - top);
      m = top;
    }
    combine<T, 32>(m, s);
    const float scale = (valid ? share : 0.0f) / s;

    for (int p = lane; p < packs; p += 32) store_pack<STORE>(out + p, pack_gradient<T>(in[p], m, scale));
    if (edge) W::write(y + edge_column, exponential<T>(edge_x - m) * scale);
    if (mine) {
      W::write(y + t, exponential<T>(chosen - m) * scale - share);
      lost += (m - chosen) + logf(s);
    }
  }

  lost = warp_sum(lost);
  if (lane == 0) sums[warp] = lost;
  __syncthreads();
  if (warp == 0) {
    lost = warp_sum(lane < 8 ? sums[lane] : 0.0f);
    finish(lost, lane, partials, loss, scratch, count);
  }
}

// A row is cut into chunks of 16 KiB that come in this order: those dropped after the first sweep
// (none up to HELD + STAGES - 3 chunks), HELD that stay in registers, those kept in the ring, and
// once more those dropped, backwards. They are freed in the same order.
template <typename T, int STAGES, int HELD, int STORE>
__global__ void __launch_bounds__(THREADS + 32, 1)
    ring_rows(const T* logits, const long long* target, T* grad, float* partials, float* loss, int* scratch,
              long long stride, int rows, int columns, long long ignore_index, int static_rows) {
  constexpr int V = 16 / sizeof(T);
  constexpr int KEPT = STAGES - 3;
  using W = Words<T>;
  extern __shared__ __align__(128) unsigned char ring[];
  __shared__ __align__(8) unsigned long long full[STAGES];
  __shared__ __align__(8) unsigned long long vacant[STAGES];
  __shared__ int row_of[STAGES];
  __shared__ float tops[2][WARPS];
  __shared__ float sums[2][WARPS];

  const int tid = threadIdx.x;
  const int lane = tid % 32;
  const int warp = tid / 32;

  if (tid == 0) {
    for (int i = 0; i < STAGES; ++i) {
      asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(full + i)), "r"(1) : "memory");
      asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(vacant + i)), "r"(WARPS)
                   : "memory");
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async;" ::: "memory");
  }
  __syncthreads();

  int stage = 0;
  unsigned phase = 0;

  if (warp == WARPS) {
    if (lane == 0) {
      unsigned long long once, twice;
      asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(once));
      asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(twice));
      bool prepared = false;
      int turn = 0;
      long long row = blockIdx.x;
      while (row < rows) {
        // The next row is asked for before this one is read, so that the answer is there in time.
        long long next;
        ++turn;
        if (turn < static_rows) {
          next = blockIdx.x + static_cast<long long>(turn) * gridDim.x;
        } else {
          if (!prepared) {
            previous_kernel();
            prepared = true;
          }
          next = static_cast<long long>(static_rows) * gridDim.x + atomicAdd(scratch, 1);
        }
        int head, packs;
        layout_of<T>(row, columns, head, packs);
        const int chunks = (packs + PACKS - 1) / PACKS;
        const int dropped = max(0, chunks - HELD - KEPT);
        const unsigned char* source = reinterpret_cast<const unsigned char*>(logits + row * stride + head);
        for (int c = 0; c < chunks + dropped; ++c) {
          const int chunk = c < chunks ? c : dropped - 1 - (c - chunks);
          const int bytes = min(PACKS, packs - chunk * PACKS) * 16;
          wait_parity(vacant + stage, phase ^ 1);
          if (c == 0) row_of[stage] = static_cast<int>(row);
          asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(full + stage)),
                       "r"(bytes)
                       : "memory");
          asm volatile(
              "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
              "[%0], [%1], %2, [%3], %4;" ::"r"(shared_address(ring + stage * CHUNK)),
              "l"(__cvta_generic_to_global(source + static_cast<long long>(chunk) * CHUNK)), "r"(bytes),
              "r"(shared_address(full + stage)), "l"(c < dropped ? twice : once)
              : "memory");
          if (++stage == STAGES) {
            stage = 0;
            phase ^= 1;
          }
        }
        row = next;
      }
      wait_parity(vacant + stage, phase ^ 1);
      row_of[stage] = -1;
      arrive(full + stage);
    }
    return;
  }

  previous_kernel();
  const int count = __ldcg(scratch + 2);
  const float share = 1.0f / static_cast<float>(count);
  float lost = 0.0f;
  int parity = 0;

  while (true) {
    wait_parity(full + stage, phase);
    const int row = row_of[stage];
    if (row < 0) break;
    int head, packs;
    layout_of<T>(row, columns, head, packs);
    const int chunks = (packs + PACKS - 1) / PACKS;
    const int dropped = max(0, chunks - HELD - KEPT);
    const long long t = __ldg(target + row);
    const T* x = logits + static_cast<long long>(row) * stride;
    T* y = grad + static_cast<long long>(row) * columns;
    uint4* out = reinterpret_cast<uint4*>(y + head);
    const int edges = columns - packs * V;
    const bool edge = tid < edges;
    const int edge_column = tid < head ? tid : packs * V + tid;
    float edge_x = 0.0f;
    if (edge) edge_x = W::read(x + edge_column);

    // First sweep: maximum and sum.
    float m = LOWEST, s = 0.0f;
    for (int c = 0; c < dropped; ++c) {
      wait_parity(full + stage, phase);
      const uint4* slot = reinterpret_cast<const uint4*>(ring + stage * CHUNK);
      const uint4 a = slot[tid];
      const uint4 b = slot[tid + THREADS];
      release(vacant + stage, lane);
      absorb<T>(a, b, m, s);
      if (++stage == STAGES) {
        stage = 0;
        phase ^= 1;
      }
    }
    uint4 held[HELD > 0 ? HELD : 1][2];
#pragma unroll
    for (int h = 0; h < HELD; ++h) {
      wait_parity(full + stage, phase);
      const uint4* slot = reinterpret_cast<const uint4*>(ring + stage * CHUNK);
      held[h][0] = slot[tid];
      held[h][1] = slot[tid + THREADS];
      release(vacant + stage, lane);
      absorb<T>(held[h][0], held[h][1], m, s);
      if (++stage == STAGES) {
        stage = 0;
        phase ^= 1;
      }
    }
    int again = stage;
    for (int chunk = dropped + HELD; chunk < chunks; ++chunk) {
      wait_parity(full + stage, phase);
      const uint4* slot = reinterpret_cast<const uint4*>(ring + stage * CHUNK);
      const int left = packs - chunk * PACKS;
      uint4 a = empty_pack<T>();
      uint4 b = empty_pack<T>();
      if (tid < left) a = slot[tid];
      if (tid + THREADS < left) b = slot[tid + THREADS];
      absorb<T>(a, b, m, s);
      if (++stage == STAGES) {
        stage = 0;
        phase ^= 1;
      }
    }
    if (edge) {
      const float top = fmaxf(m, edge_x);
      s = s * exponential<T>(m - top) + exponential<T>(edge_x - top);
      m = top;
    }

    // The thread that writes the target's column sets it right at the end and takes the loss.
    const bool valid = t != ignore_index;
    int owner = -1;
    if (valid) {
      const int column = static_cast<int>(t);
      const int inside = column - head;
      owner = inside < 0 ? column : inside >= packs * V ? column - packs * V : (inside / V) % THREADS;
    }
    const bool mine = owner == tid;
    float chosen = 0.0f;
    if (mine) chosen = W::read(x + t);

    combine<T, 32>(m, s);
    if (lane == 0) {
      tops[parity][warp] = m;
      sums[parity][warp] = s;
    }
    asm volatile("bar.sync 1, 512;" ::: "memory");
    m = tops[parity][lane % WARPS];
    s = sums[parity][lane % WARPS];
    combine<T, WARPS>(m, s);
    parity ^= 1;
    const float scale = (valid ? share : 0.0f) / s;

    // Second sweep: the gradient.
    for (int chunk = dropped + HELD; chunk < chunks; ++chunk) {
      const uint4* slot = reinterpret_cast<const uint4*>(ring + again * CHUNK);
      const int left = packs - chunk * PACKS;
      uint4 a = empty_pack<T>();
      uint4 b = empty_pack<T>();
      if (tid < left) a = slot[tid];
      if (tid + THREADS < left) b = slot[tid + THREADS];
      release(vacant + again, lane);
      uint4* to = out + chunk * PACKS + tid;
      if (tid < left) store_pack<STORE>(to, pack_gradient<T>(a, m, scale));
      if (tid + THREADS < left) store_pack<STORE>(to + THREADS, pack_gradient<T>(b, m, scale));
      if (++again == STAGES) again = 0;
    }
#pragma unroll
    for (int h = 0; h < HELD; ++h) {
      uint4* to = out + (dropped + h) * PACKS + tid;
      store_pack<STORE>(to, pack_gradient<T>(held[h][0], m, scale));
      store_pack<STORE>(to + THREADS, pack_gradient<T>(held[h][1], m, scale));
    }
    for (int chunk = dropped - 1; chunk >= 0; --chunk) {
      wait_parity(full + stage, phase);
      const uint4* slot = reinterpret_cast<const uint4*>(ring + stage * CHUNK);
      const uint4 a = slot[tid];
      const uint4 b = slot[tid + THREADS];
      release(vacant + stage, lane);
      uint4* to = out + chunk * PACKS + tid;
      store_pack<STORE>(to, pack_gradient<T>(a, m, scale));
      store_pack<STORE>(to + THREADS, pack_gradient<T>(b, m, scale));
      if (++stage == STAGES) {
        stage = 0;
        phase ^= 1;
      }
    }
    if (edge) W::write(y + edge_column, exponential<T>(edge_x - m) * scale);
    if (mine) {
      W::write(y + t, exponential<T>(chosen - m) * scale - share);
      lost += (m - chosen) + logf(s);
    }
  }

  lost = warp_sum(lost);
  if (lane == 0) sums[parity][warp] = lost;
  asm volatile("bar.sync 1, 512;" ::: "memory");
  if (warp == 0) {
    lost = warp_sum(lane < WARPS ? sums[parity][lane] : 0.0f);
    finish(lost, lane, partials, loss, scratch, count);
  }
}
"""


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

    processors = torch.cuda.get_device_properties(logits.device).multi_processor_count
    narrow = columns * size <= NARROW_ROW
    if narrow:
        blocks = max(1, min((rows + 7) // 8, processors * 8))
    else:
        blocks = max(1, min(rows, processors))

    grad = torch.empty((rows, columns), dtype=logits.dtype, device=logits.device)
    loss = torch.empty((), dtype=torch.float32, device=logits.device)
    partials = torch.empty(blocks, dtype=torch.float32, device=logits.device)
    scratch = torch.empty(4, dtype=torch.int32, device=logits.device)

    cuda_kernel("prepare", SOURCE).launch((1,), (512,), target, scratch, rows, ignore_index, shared=0)

    kind = TYPES[logits.dtype]
    if narrow:
        kernel = cuda_kernel(f"narrow_rows<{kind}, {STORE}>", SOURCE)
        kernel.launch(
            (blocks,),
            (256,),
            logits,
            target,
            grad,
            partials,
            loss,
            scratch,
            logits.stride(0),
            rows,
            columns,
            ignore_index,
            shared=0,
            pdl=True,
        )
    else:
        # Chunks in registers must be whole, and one more must follow, in every row.
        packs = (columns - (vector - 1)) // vector
        held = HELD if packs > (CHUNK // 16) * max(HELD, HELD_FROM) else 0
        kernel = cuda_kernel(f"ring_rows<{kind}, {STAGES}, {held}, {STORE}>", SOURCE)
        kernel.launch(
            (blocks,),
            (THREADS + 32,),
            logits,
            target,
            grad,
            partials,
            loss,
            scratch,
            logits.stride(0),
            rows,
            columns,
            ignore_index,
            STATIC_ROWS,
            shared=STAGES * CHUNK,
            pdl=True,
        )
    return loss, grad
