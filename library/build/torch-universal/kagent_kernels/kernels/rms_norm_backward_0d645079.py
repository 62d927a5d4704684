"""Gradients of RMS norm from a ring in shared memory; rows go to whichever block asks next.

One block on each SM has its share of the weight's gradient in float32 registers. Its tiles (a row,
or several short ones) come by bulk copies into a ring of two places or more, so that the stream of
reads goes on through sums and stores. A thread copies its words of grad and x, of 16 bytes each, to
registers; the one barrier that a tile's sums need also says that all threads have done so, and the
place is filled anew at once.

SMs are unequally fast: with rows in fixed turns all would wait for the slowest, 3 to 7 us of 50 to
100 on an H200. So a block asks a counter in memory which tile is next, one tile early, since the
answer takes a while; the first ones, which fill the ring, go by its index. A small kernel ahead,
which the main one overlaps, zeroes the counter. Another, which starts while the main one drains,
adds up the shares. Which rows a share has depends on who asked when: dweight may differ from run to
run by the rounding of float32 sums.

Not of use on an H200: loads that are the first to leave the L2 (3 to 7 us), two blocks on an SM (2
to 3 us), having the L2 fetch later tiles (5 us), and stores by bulk copies (nothing).

Rows that are not of whole words of 16 bytes come the same way, in the words that they lie in; only
the ends of a tensor are copied by element. A thread then takes one element at a time.

Rows of more than 32 KiB, or of more than 8192 elements and not of whole words, are read twice, as
all are before Hopper.
"""

import torch
import triton
from .._runtime import cuda_kernel

WORDS = 4  # of 16 bytes that a thread has of grad's tile, and as many of x's
THREADS = 256  # of a block where several rows share it; a row may take up to 512
RING_KIB = 96  # of tiles in shared memory, in two places at least
TUNE = {"WORDS": [2, 4], "THREADS": [128, 256, 512], "RING_KIB": [64, 96, 128]}

SOURCE = r"""
#include <cuda_bf16.h>
#include <cuda_fp16.h>

template <typename A, typename B> struct Same { static constexpr bool value = false; };
template <typename A> struct Same<A, A> { static constexpr bool value = true; };

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ void from_float(float x, float& y) { y = x; }
__device__ __forceinline__ void from_float(float x, __half& y) { y = __float2half_rn(x); }
__device__ __forceinline__ void from_float(float x, __nv_bfloat16& y) {
  y = __float2bfloat16_rn(x);
}

// What a thread takes at once: a word of 16 bytes, or an element of rows without whole words.
template <typename T, int WIDTH> struct WordOf { using Type = uint4; };
template <typename T> struct WordOf<T, 1> { using Type = T; };

template <typename T>
__device__ __forceinline__ void unpack(const T& element, float* v) { *v = to_float(element); }
template <typename T>
__device__ __forceinline__ void unpack(const uint4& word, float* v) {
  const unsigned u[4] = {word.x, word.y, word.z, word.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (sizeof(T) == 4) {
      v[i] = __uint_as_float(u[i]);
    } else if constexpr (Same<T, __nv_bfloat16>::value) {
      v[2 * i] = __uint_as_float(u[i] << 16);
      v[2 * i + 1] = __uint_as_float(u[i] & 0xffff0000u);
    } else {
      const float2 f = __half22float2(*reinterpret_cast<const __half2*>(&u[i]));
      v[2 * i] = f.x;
      v[2 * i + 1] = f.y;
    }
  }
}

template <typename T>
__device__ __forceinline__ uint4 pack(const float* v) {
  unsigned u[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (sizeof(T) == 4)
      u[i] = __float_as_uint(v[i]);
    else if constexpr (Same<T, __nv_bfloat16>::value)
      asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(u[i]) : "f"(v[2 * i + 1]), "f"(v[2 * i]));
    else
      asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(u[i]) : "f"(v[2 * i + 1]), "f"(v[2 * i]));
  }
  return make_uint4(u[0], u[1], u[2], u[3]);
}
template <typename T>
__device__ __forceinline__ void store(T* to, const float* v) {
  T element;
  from_float(*v, element);
  __stcs(to, element);
}
template <typename T>
__device__ __forceinline__ void store(uint4* to, const float* v) { __stcs(to, pack<T>(v)); }

#if __CUDA_ARCH__ >= 900
__device__ __forceinline__ unsigned shared_address(const void* p) {
  return static_cast<unsigned>(__cvta_generic_to_shared(p));
}
__device__ __forceinline__ void barrier_init(unsigned long long* barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(shared_address(barrier)) : "memory");
}
__device__ __forceinline__ void barrier_expect(unsigned long long* barrier, unsigned bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
               :: "r"(shared_address(barrier)), "r"(bytes) : "memory");
}
__device__ __forceinline__ void barrier_wait(unsigned long long* barrier, unsigned parity) {
  unsigned done;
  do {
    asm volatile(
        "{ .reg .pred p;\n"
        "  mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "  selp.u32 %0, 1, 0, p; }"
        : "=r"(done) : "r"(shared_address(barrier)), "r"(parity) : "memory");
  } while (!done);
}
__device__ __forceinline__ void bulk_load(void* to, const void* from, unsigned bytes,
                                          unsigned long long* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
      :: "r"(shared_address(to)), "l"(from), "r"(bytes), "r"(shared_address(barrier)) : "memory");
}
#endif

// Elements between an address and the multiple of 16 bytes before it.
template <typename T>
__device__ __forceinline__ int ahead_of(const T* p) {
  return static_cast<int>(reinterpret_cast<unsigned long long>(p) % 16 / sizeof(T));
}

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int d = 16; d > 0; d /= 2) x += __shfl_xor_sync(0xffffffff, x, d);
  return x;
}

// 1 / sqrt(x): for 16-bit elements in two instructions.
template <typename T>
__device__ __forceinline__ float inverse_root(float x) {
  if constexpr (sizeof(T) == 4)
    return 1.0f / sqrtf(x);
  else
    return rsqrtf(x);
}

__global__ void __launch_bounds__(32) zero_counter(int* counter) {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
  if (threadIdx.x == 0) *counter = 0;
}

// ROW_THREADS threads have a row, each WORDS words of grad and of x, of WIDTH elements; a tile has
// EACH rows of each of TEAMS such groups of threads. The ring has DEPTH places, two or more.
template <typename T, int WIDTH, int WORDS, int EACH, int ROW_THREADS, int TEAMS, int DEPTH>
__global__ void __launch_bounds__(ROW_THREADS * TEAMS, 1)
rows_by_tickets(const T* grad, const T* x, const T* weight, T* dx, float* shares, int* counter,
                long long grad_stride, long long x_stride, int rows, int columns, float eps) {
#if __CUDA_ARCH__ >= 900
  using Word = typename WordOf<T, WIDTH>::Type;
  constexpr int QUAD = 16 / sizeof(T);                // elements of 16 bytes
  constexpr int TILE = TEAMS * EACH;                  // rows
  constexpr int WARPS = ROW_THREADS > 32 ? ROW_THREADS / 32 : 1;   // of a row
  extern __shared__ __align__(128) uint4 ring[];
  __shared__ __align__(8) unsigned long long full[DEPTH];
  __shared__ int tile_of[DEPTH];                      // -1: there are no more
  __shared__ float2 partial[2][TILE][WARPS];

  const int lane = threadIdx.x % 32;
  const int thread = threadIdx.x % ROW_THREADS, team = threadIdx.x / ROW_THREADS;
  const int words = columns / WIDTH;
  const int tiles = (rows + TILE - 1) / TILE;
  // Of a row that begins anywhere there are up to 15 bytes before it and behind it, too.
  const int row_pitch = WIDTH == QUAD ? columns : (columns / QUAD + 2) * QUAD;
  const int half_place = TILE * row_pitch;            // elements: grad, then x
  const int first = thread / 32 * (32 * WORDS) + thread % 32;   // its words are 32 apart
  const bool flat = TILE == 1 || grad_stride == columns && x_stride == columns;
  const int pitch = flat ? columns : row_pitch;       // of rows in a place

  // What a copy of `count` elements takes from beside them lies in other rows or between rows, but
  // before the first row and behind the last one: `ends` says which of them it has. Elements there
  // come one by one, before the bulk copies, whose bytes are counted at the same time.
  auto copy = [&](T* to, const T* from, int count, int ends, unsigned long long* barrier) {
    int begin = 0, end = count;                       // of the bulk copy
    if constexpr (WIDTH < QUAD) {
      const int lead = ahead_of(from);
      to += lead;
      begin = -lead;
      end = (count + lead + QUAD - 1) / QUAD * QUAD - lead;
      if (ends & 1 && lead > 0) begin = min(QUAD - lead, count);
      if (ends & 2 && end > count) end = max(end - QUAD, begin);
      if (barrier == nullptr) {
#pragma unroll 1
        for (int c = 0; c < begin; ++c) to[c] = from[c];
#pragma unroll 1
        for (int c = end; c < count; ++c) to[c] = from[c];
      }
    }
    const unsigned bytes = sizeof(T) * (end - begin);
    if (barrier != nullptr && bytes > 0) bulk_load(to + begin, from + begin, bytes, barrier);
    return bytes;
  };
  auto fill = [&](int place, int tile) {              // by one thread
    if (tile >= tiles) {
      tile_of[place] = -1;
      asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
      return;
    }
    tile_of[place] = tile;
    const long long start = static_cast<long long>(tile) * TILE;
    const int count = TILE == 1 ? 1 : min(TILE, static_cast<int>(rows - start));
    const int each = flat ? count : 1;                // rows of a copy
    T* to = reinterpret_cast<T*>(ring) + place * 2 * half_place;
    auto copy_all = [&](unsigned long long* barrier) {
      unsigned bytes = 0;
#pragma unroll 1
      for (int r = 0; r < count; r += each) {
        const int ends = (start + r == 0) + 2 * (start + r + each == rows);
        const T* of_grad = grad + (start + r) * grad_stride;
        const T* of_x = x + (start + r) * x_stride;
        bytes += copy(to + r * pitch, of_grad, each * columns, ends, barrier);
        bytes += copy(to + half_place + r * pitch, of_x, each * columns, ends, barrier);
      }
      return bytes;
    };
    if constexpr (WIDTH == QUAD)
      barrier_expect(&full[place], 2u * sizeof(T) * count * columns);
    else
      barrier_expect(&full[place], copy_all(nullptr));
    copy_all(&full[place]);
  };

  if (threadIdx.x == 0) {
    for (int place = 0; place < DEPTH; ++place) barrier_init(&full[place]);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // bulk copies see the barriers
    for (int place = 0; place < DEPTH; ++place) fill(place, blockIdx.x + place * gridDim.x);
  }
  Word of_weight[WORDS];
  float share[WORDS][WIDTH] = {};
#pragma unroll
  for (int w = 0; w < WORDS; ++w) {
    of_weight[w] = Word();
    if (first + w * 32 < words)
      of_weight[w] = __ldg(reinterpret_cast<const Word*>(weight) + first + w * 32);
  }
  const float inverse = 1.0f / columns;
  int ticket = 0;                                     // of the first thread
  if (threadIdx.x == 0) {
    asm volatile("griddepcontrol.wait;" ::: "memory");   // for the counter
    ticket = atomicAdd(counter, 1);
  }
  __syncthreads();

  for (int place = 0, parity = 0, half = 0;; half ^= 1) {
    const int tile = tile_of[place];
    if (tile < 0) break;
    barrier_wait(&full[place], parity);
    const T* at = reinterpret_cast<const T*>(ring) + place * 2 * half_place;
    const int start = tile * TILE;                    // the tile's first row
    Word of_grad[EACH][WORDS], of_x[EACH][WORDS];
#pragma unroll
    for (int e = 0; e < EACH; ++e) {
      const int row = e * TEAMS + team;
      int grad_lead = 0, x_lead = 0;
      if constexpr (WIDTH < QUAD) {
        const long long copied = flat ? start : start + row;   // first row of its copy
        grad_lead = ahead_of(grad + copied * grad_stride);
        x_lead = ahead_of(x + copied * x_stride);
      }
      const Word* g = reinterpret_cast<const Word*>(at + row * pitch + grad_lead) + first;
      const Word* v = reinterpret_cast<const Word*>(at + half_place + row * pitch + x_lead) + first;
#pragma unroll
      for (int w = 0; w < WORDS; ++w) {
        of_grad[e][w] = of_x[e][w] = Word();
        if (first + w * 32 < words && (TILE == 1 || start + row < rows)) {
          of_grad[e][w] = g[w * 32];
          of_x[e][w] = v[w * 32];
        }
      }
    }

    float2 sums[EACH];                                // x², grad weight x
#pragma unroll
    for (int e = 0; e < EACH; ++e) {
      float square[2] = {0.0f, 0.0f}, dot[2] = {0.0f, 0.0f};
#pragma unroll
      for (int w = 0; w < WORDS; ++w) {
        float g[WIDTH], v[WIDTH], f[WIDTH];
        unpack<T>(of_grad[e][w], g);
        unpack<T>(of_x[e][w], v);
        unpack<T>(of_weight[w], f);
#pragma unroll
        for (int k = 0; k < WIDTH; ++k) {
          square[k % 2] += v[k] * v[k];
          dot[k % 2] += g[k] * f[k] * v[k];
        }
      }
      sums[e] = make_float2(square[0] + square[1], dot[0] + dot[1]);
      if constexpr (ROW_THREADS > 32) {
        // The lower half of a warp adds up the squares, the upper half the products.
        const bool upper = lane >= 16;
        float mine = upper ? sums[e].y : sums[e].x;
        mine += __shfl_xor_sync(0xffffffff, upper ? sums[e].x : sums[e].y, 16);
#pragma unroll
        for (int d = 8; d > 0; d /= 2) mine += __shfl_xor_sync(0xffffffff, mine, d);
        float2* to = &partial[half][e * TEAMS + team][thread / 32];
        if (lane == 0) to->x = mine;
        if (lane == 16) to->y = mine;
      } else {
#pragma unroll
        for (int d = ROW_THREADS / 2; d > 0; d /= 2) {
          sums[e].x += __shfl_xor_sync(0xffffffff, sums[e].x, d);
          sums[e].y += __shfl_xor_sync(0xffffffff, sums[e].y, d);
        }
      }
    }

    __syncthreads();                                  // sums are there, and the place is read
    if (threadIdx.x == 0) {
      fill(place, ticket + DEPTH * gridDim.x);
      ticket = atomicAdd(counter, 1);                 // wanted a tile later
    }
    __syncwarp();

#pragma unroll
    for (int e = 0; e < EACH; ++e) {
      if constexpr (ROW_THREADS > 32) {
        const float2* from = partial[half][e * TEAMS + team];
        sums[e] = from[0];
#pragma unroll(WARPS > 8 ? 4 : 8)                     // all 16 at once would not fit in registers
        for (int i = 1; i < WARPS; ++i) {
          sums[e].x += from[i].x;
          sums[e].y += from[i].y;
        }
      }
      const int row = start + e * TEAMS + team;
      // Rows past the end have no share; eps may be 0.
      const bool inside = TILE == 1 || row < rows;
      const float scale = inside ? inverse_root<T>(sums[e].x * inverse + eps) : 0.0f;
      const float factor = sums[e].y * inverse * scale * scale * scale;
      Word* out = reinterpret_cast<Word*>(dx) + static_cast<long long>(row) * words + first;
#pragma unroll
      for (int w = 0; w < WORDS; ++w) {
        float g[WIDTH], v[WIDTH], f[WIDTH];
        unpack<T>(of_grad[e][w], g);
        unpack<T>(of_x[e][w], v);
        unpack<T>(of_weight[w], f);
#pragma unroll
        for (int k = 0; k < WIDTH; ++k) {
          g[k] *= scale;
          share[w][k] += g[k] * v[k];
          g[k] = g[k] * f[k] - v[k] * factor;
        }
        if (inside && first + w * 32 < words) store<T>(out + w * 32, g);
      }
    }
    if (++place == DEPTH) {
      place = 0;
      parity ^= 1;
    }
  }

  // The teams' shares go to the ring, which has been read, and are added up.
  float* whole = shares + static_cast<long long>(blockIdx.x) * columns;
  float* mine = TEAMS > 1 ? reinterpret_cast<float*>(ring) + team * columns : whole;
#pragma unroll
  for (int w = 0; w < WORDS; ++w)
    if (first + w * 32 < words)
#pragma unroll
      for (int k = 0; k < WIDTH; k += 4) {
        float* to = mine + (first + w * 32) * WIDTH + k;
        if constexpr (WIDTH == 1)
          *to = share[w][k];
        else
          *reinterpret_cast<float4*>(to) =
              make_float4(share[w][k], share[w][k + 1], share[w][k + 2], share[w][k + 3]);
      }
  if constexpr (TEAMS > 1) {
    __syncthreads();                                  // all teams' shares are there
    for (int c = threadIdx.x; c < columns; c += ROW_THREADS * TEAMS) {
      float sum = 0.0f;
#pragma unroll
      for (int t = 0; t < TEAMS; ++t) sum += reinterpret_cast<const float*>(ring)[t * columns + c];
      whole[c] = sum;
    }
  }
#endif
}

template <int WIDTH> struct alignas(4 * WIDTH) Floats { float at[WIDTH]; };

// A block adds up 8 * WIDTH columns of all shares: 32 shares side by side, each thread 8 at a time.
template <typename T, int WIDTH>
__global__ void __launch_bounds__(256)
sum_of_shares(const float* shares, T* dweight, int count, int columns) {
  constexpr int LOADS = 8;
  __shared__ float partial[8][8 * WIDTH];
  const int group = threadIdx.x % 8, line = threadIdx.x / 8;
  const int column = (blockIdx.x * 8 + group) * WIDTH;
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");   // the launch may overlap the kernel before
#endif
  float sum[WIDTH] = {};
  if (column < columns) {
    for (int s = line; s < count; s += 32 * LOADS) {
      Floats<WIDTH> word[LOADS] = {};
#pragma unroll
      for (int j = 0; j < LOADS; ++j)
        if (s + 32 * j < count)
          word[j] = *reinterpret_cast<const Floats<WIDTH>*>(
              shares + static_cast<long long>(s + 32 * j) * columns + column);
#pragma unroll
      for (int j = 0; j < LOADS; ++j)
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) sum[i] += word[j].at[i];
    }
  }
  // A warp has 4 lines of the same columns.
#pragma unroll
  for (int i = 0; i < WIDTH; ++i) {
    sum[i] += __shfl_xor_sync(0xffffffff, sum[i], 8);
    sum[i] += __shfl_xor_sync(0xffffffff, sum[i], 16);
    if (threadIdx.x % 32 < 8) partial[threadIdx.x / 32][group * WIDTH + i] = sum[i];
  }
  __syncthreads();
  const int mine = blockIdx.x * 8 * WIDTH + threadIdx.x;
  if (threadIdx.x < 8 * WIDTH && mine < columns) {
    float all = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) all += partial[i][threadIdx.x];
    from_float(all, dweight[mine]);
  }
}

// Rows in fixed turns, each read twice. The block's share lies in memory; a thread has its columns.
template <typename T, int THREADS>
__global__ void __launch_bounds__(THREADS)
rows_read_twice(const T* grad, const T* x, const T* weight, T* dx, float* shares,
                long long grad_stride, long long x_stride, int rows, int columns, float eps) {
  constexpr int WARPS = THREADS / 32;
  __shared__ float2 partial[2][WARPS];
  float* share = shares + static_cast<long long>(blockIdx.x) * columns;
  const float inverse = 1.0f / columns;
  for (int row = blockIdx.x, half = 0; row < rows; row += gridDim.x, half ^= 1) {
    const T* g = grad + row * grad_stride;
    const T* v = x + row * x_stride;
    T* out = dx + static_cast<long long>(row) * columns;
    float square = 0.0f, dot = 0.0f;
#pragma unroll 4
    for (int c = threadIdx.x; c < columns; c += THREADS) {
      const float value = to_float(v[c]);
      square += value * value;
      dot += to_float(g[c]) * to_float(weight[c]) * value;
    }
    square = warp_sum(square);
    dot = warp_sum(dot);
    if (threadIdx.x % 32 == 0) partial[half][threadIdx.x / 32] = make_float2(square, dot);
    __syncthreads();
    square = dot = 0.0f;
#pragma unroll
    for (int i = 0; i < WARPS; ++i) {
      square += partial[half][i].x;
      dot += partial[half][i].y;
    }
    const float scale = 1.0f / sqrtf(square * inverse + eps);
    const float factor = dot * inverse * scale * scale * scale;
    const bool fresh = row == blockIdx.x;
#pragma unroll 4
    for (int c = threadIdx.x; c < columns; c += THREADS) {
      const float value = to_float(v[c]), scaled = to_float(g[c]) * scale;
      share[c] = (fresh ? 0.0f : share[c]) + scaled * value;
      from_float(scaled * to_float(weight[c]) - value * factor, out[c]);
    }
  }
}
"""

TYPES = {torch.float32: "float", torch.float16: "__half", torch.bfloat16: "__nv_bfloat16"}


def rms_norm_backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    rows, columns = x.shape
    dx = torch.empty((rows, columns), dtype=x.dtype, device=x.device)
    dweight = torch.empty(columns, dtype=x.dtype, device=x.device)
    name = TYPES[x.dtype]
    quad = 16 // x.element_size()  # elements of 16 bytes
    strides = [t.stride(0) if rows > 1 else columns for t in (grad, x)]
    starts = [t.storage_offset() for t in (grad, x, weight)]
    aligned = all(n % quad == 0 for n in (columns, *strides, *starts))
    hopper = torch.cuda.get_device_capability(x.device)[0] >= 9
    sms = torch.cuda.get_device_properties(x.device).multi_processor_count

    width = quad if aligned else 1  # elements that a thread takes at once
    words = columns // width
    tickets = hopper and columns <= 2048 * quad and words <= 8192
    if tickets:
        most = WORDS if aligned else 4 * WORDS  # words of a thread
        most = max(most, triton.cdiv(words, 512))  # 512 threads have 128 registers each
        if words <= 32:
            row_threads, each = triton.next_power_of_2(words), most
        else:
            row_threads = 32 * triton.cdiv(words, 32 * most)
            each = most // triton.cdiv(words, row_threads)
        teams = max(THREADS // row_threads, 1)
        place = 2 * teams * each * (columns // quad + (0 if aligned else 2)) * 16  # bytes
        depth = max(RING_KIB * 1024 // place, 2)
        blocks = min(triton.cdiv(rows, teams * each), sms)
        counter = torch.empty(1, dtype=torch.int32, device=x.device)
        cuda_kernel("zero_counter", SOURCE).launch((1,), (32,), counter)
        shares = torch.empty((blocks, columns), dtype=torch.float32, device=x.device)
        of_thread = triton.cdiv(words, row_threads)
        shape = f"{width}, {of_thread}, {each}, {row_threads}, {teams}, {depth}"
        kernel = cuda_kernel(f"rows_by_tickets<{name}, {shape}>", SOURCE)
        kernel.launch(
            (blocks,),
            (row_threads * teams,),
            grad,
            x,
            weight,
            dx,
            shares,
            counter,
            *strides,
            rows,
            columns,
            eps,
            shared=depth * place,
            pdl=True,
        )
    else:
        blocks = min(rows, 4 * sms)
        shares = torch.empty((blocks, columns), dtype=torch.float32, device=x.device)
        kernel = cuda_kernel(f"rows_read_twice<{name}, 256>", SOURCE)
        kernel.launch((blocks,), (256,), grad, x, weight, dx, shares, *strides, rows, columns, eps)
    wide = 1 if columns % 4 else 4
    last = cuda_kernel(f"sum_of_shares<{name}, {wide}>", SOURCE)
    grid = (triton.cdiv(columns, 8 * wide),)
    last.launch(grid, (256,), shares, dweight, blocks, columns, pdl=tickets)
    return dx, dweight
