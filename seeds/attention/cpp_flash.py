"""Flash attention on the CPU: tiles that stay in the L1 and L2 caches, vectors by the compiler.

Keys are transposed once into tiles of BLOCK_N, so that both products (q by keys, probabilities by
values) are the same small routine: a few rows of a row-major matrix by a row-major tile, sums in
registers. A thread takes BLOCK_M queries of one head and keeps their running maximum, sum and
output while it walks over the keys; tiles above the diagonal are skipped.

float32, head dimension a multiple of 64.
"""

import math

import torch
from kagent_sandbox.lang import cpp_kernel

TUNE = {
    "BLOCK_M": [24, 48, 96],
    "BLOCK_N": [64, 128, 256],
    "ROWS": [2, 4, 6],
    "SCHEDULE": ["static", "dynamic", "guided"],
}
BLOCK_M = 48  # queries of a thread's tile, a multiple of ROWS
BLOCK_N = 64  # keys of a tile
ROWS = 6  # rows whose sums are in registers: 6 x 4 vectors, of AVX-512's 32
SCHEDULE = "dynamic"  # of query tiles: causal ones differ in length

SOURCE = r"""
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

// Four vectors make a strip of 64 floats with AVX-512 and of 32 with AVX2.
#ifdef __AVX512F__
constexpr int LANES = 16;
#else
constexpr int LANES = 8;
#endif
constexpr int STRIP = 4 * LANES;
typedef float Vector __attribute__((vector_size(4 * LANES), aligned(4)));

// c[ROWS, n] (+)= a[ROWS, depth] * b[depth, n], n a multiple of STRIP; all row-major.
template <bool ADD>
static inline void multiply(const float* a, int64_t lda, const float* b, int64_t ldb, float* c,
                            int64_t ldc, int n, int depth) {
  for (int j = 0; j < n; j += STRIP) {
    Vector sum[ROWS][4];
    for (int i = 0; i < ROWS; ++i)
      for (int v = 0; v < 4; ++v)
        sum[i][v] = ADD ? *(const Vector*)(c + i * ldc + j + v * LANES) : Vector{};
    for (int k = 0; k < depth; ++k) {
      const Vector* row = (const Vector*)(b + k * ldb + j);
      for (int i = 0; i < ROWS; ++i)
        for (int v = 0; v < 4; ++v) sum[i][v] += a[i * lda + k] * row[v];
    }
    for (int i = 0; i < ROWS; ++i)
      for (int v = 0; v < 4; ++v) *(Vector*)(c + i * ldc + j + v * LANES) = sum[i][v];
  }
}

// 2^x for x <= 0, within 2 ulp; 0 below the smallest normal number, also for -inf.
// x = n + r with |r| <= 1/2: a polynomial for 2^r, and n goes into the exponent's bits.
static inline float exp2_nonpositive(float x) {
  const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number
  const float shifted = x + magic;
  const float r = x - (shifted - magic);
  float p = 1.5403530e-4f;
  p = p * r + 1.3333558e-3f;
  p = p * r + 9.6181291e-3f;
  p = p * r + 5.5504109e-2f;
  p = p * r + 2.4022651e-1f;
  p = p * r + 6.9314718e-1f;
  p = p * r + 1.0f;
  uint32_t bits, exponent;
  std::memcpy(&bits, &p, 4);
  std::memcpy(&exponent, &shifted, 4);  // n sits in the low bits of shifted
  bits += exponent << 23;
  float y;
  std::memcpy(&y, &bits, 4);
  return x < -126.0f ? 0.0f : y;
}

// Scores of one row become probabilities relative to its running maximum; returns what the row's
// output must be scaled by.
static inline float fold(float* score, int visible, float scale_log2, float& maximum, float& sum) {
  float largest = -INFINITY;
#pragma omp simd reduction(max : largest)
  for (int j = 0; j < visible; ++j) largest = std::max(largest, score[j]);
  const float next = std::max(maximum, largest * scale_log2);
  // In 16 sums on every processor: in the 8 that AVX2's registers suggest, rounding adds up.
  float part[16] = {};
  for (int j = 0; j < BLOCK_N; j += 16) {
#pragma omp simd
    for (int i = 0; i < 16; ++i) {
      const float p = exp2_nonpositive(score[j + i] * scale_log2 - next);
      score[j + i] = j + i < visible ? p : 0.0f;
      part[i] += score[j + i];
    }
  }
  for (int width = 8; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) part[i] += part[i + width];
  const float shrink = maximum == -INFINITY ? 0.0f : exp2_nonpositive(maximum - next);
  sum = sum * shrink + part[0];
  maximum = next;
  return shrink;
}

static void attend(const float* q, int64_t stride_q, const float* keys, const float* v,
                   int64_t stride_v, float* o, int64_t first, int64_t seq, bool causal,
                   float scale_log2) {
  alignas(64) float query[BLOCK_M * HEAD_DIM], score[BLOCK_M * BLOCK_N], out[BLOCK_M * HEAD_DIM];
  float maximum[BLOCK_M], sum[BLOCK_M];
  const int rows = (int)std::min<int64_t>(BLOCK_M, seq - first);
  // Rows past the end are copies of the last one: they cost nothing extra and need no special case.
  for (int i = 0; i < BLOCK_M; ++i)
    std::memcpy(query + i * HEAD_DIM, q + (first + std::min(i, rows - 1)) * stride_q,
                4 * HEAD_DIM);
  std::fill_n(out, BLOCK_M * HEAD_DIM, 0.0f);
  std::fill_n(maximum, BLOCK_M, -INFINITY);
  std::fill_n(sum, BLOCK_M, 0.0f);

  const int64_t seen = causal ? first + rows : seq;
  for (int64_t start = 0; start < seen; start += BLOCK_N) {
    const int inside = (int)std::min<int64_t>(BLOCK_N, seen - start);
    const float* tile = keys + start * HEAD_DIM;
    for (int i = 0; i < BLOCK_M; i += ROWS) {
      float* s = score + i * BLOCK_N;
      multiply<false>(query + i * HEAD_DIM, HEAD_DIM, tile, BLOCK_N, s, BLOCK_N, BLOCK_N, HEAD_DIM);
      for (int r = i; r < i + ROWS; ++r) {
        const int64_t row = first + std::min(r, rows - 1);
        const int64_t before = causal ? std::clamp<int64_t>(row + 1 - start, 0, inside) : inside;
        const float shrink =
            fold(score + r * BLOCK_N, (int)before, scale_log2, maximum[r], sum[r]);
#pragma omp simd
        for (int d = 0; d < HEAD_DIM; ++d) out[r * HEAD_DIM + d] *= shrink;
      }
      multiply<true>(s, BLOCK_N, v + start * stride_v, stride_v, out + i * HEAD_DIM, HEAD_DIM,
                     HEAD_DIM, inside);
    }
  }
  for (int i = 0; i < rows; ++i) {
    const float scale = 1.0f / sum[i];
#pragma omp simd
    for (int d = 0; d < HEAD_DIM; ++d)
      o[(first + i) * HEAD_DIM + d] = out[i * HEAD_DIM + d] * scale;
  }
}

extern "C" void flash_attention(const float* q, const float* k, const float* v, float* keys,
                                float* o, int64_t batch, int64_t heads, int64_t kv_heads,
                                int64_t seq, int64_t stride_qb, int64_t stride_qh,
                                int64_t stride_qs, int64_t stride_kb, int64_t stride_kh,
                                int64_t stride_ks, int64_t stride_vb, int64_t stride_vh,
                                int64_t stride_vs, bool causal, float scale_log2) {
  const int64_t key_tiles = (seq + BLOCK_N - 1) / BLOCK_N;
  const int64_t query_tiles = (seq + BLOCK_M - 1) / BLOCK_M;
#pragma omp parallel
  {
    // keys: [batch, kv_heads, key_tiles, HEAD_DIM, BLOCK_N], zeros past the end.
#pragma omp for collapse(2) schedule(static)
    for (int64_t h = 0; h < batch * kv_heads; ++h)
      for (int64_t t = 0; t < key_tiles; ++t) {
        const float* from = k + h / kv_heads * stride_kb + h % kv_heads * stride_kh;
        float* tile = keys + (h * key_tiles + t) * HEAD_DIM * BLOCK_N;
        for (int64_t j = 0; j < BLOCK_N; ++j) {
          const bool inside = t * BLOCK_N + j < seq;
          for (int64_t d = 0; d < HEAD_DIM; ++d)
            tile[d * BLOCK_N + j] = inside ? from[(t * BLOCK_N + j) * stride_ks + d] : 0.0f;
        }
      }
    // The last tiles see the most keys and go first, so that no long one is left for the end.
#pragma omp for collapse(2) schedule(SCHEDULE)
    for (int64_t h = 0; h < batch * heads; ++h)
      for (int64_t t = query_tiles - 1; t >= 0; --t) {
        const int64_t b = h / heads, kv = h % heads / (heads / kv_heads);
        attend(q + b * stride_qb + h % heads * stride_qh, stride_qs,
               keys + (b * kv_heads + kv) * key_tiles * HEAD_DIM * BLOCK_N,
               v + b * stride_vb + kv * stride_vh, stride_vs, o + h * seq * HEAD_DIM, t * BLOCK_M,
               seq, causal, scale_log2);
      }
  }
}
"""


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    """Attention of q [B, H, S, D] over k and v [B, Hkv, S, D], float32, D a multiple of 64.

    Rows may be strided (slices of a packed projection); the last dimension must be contiguous.
    """
    b, h, s, d = q.shape
    hkv = k.shape[1]
    tiles = -(-s // BLOCK_N)
    keys = torch.empty(b, hkv, tiles, d, BLOCK_N, dtype=q.dtype, device=q.device)
    o = torch.empty(b, h, s, d, dtype=q.dtype, device=q.device)
    defines = {
        "HEAD_DIM": d,
        "BLOCK_M": BLOCK_M,
        "BLOCK_N": BLOCK_N,
        "ROWS": ROWS,
        "SCHEDULE": SCHEDULE,
    }
    cpp_kernel("flash_attention", SOURCE, defines=defines)(
        q, k, v, keys, o, b, h, hkv, s,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3],
        causal, math.log2(math.e) / math.sqrt(d),
    )  # fmt: skip
    return o
