"""Gradients of attention on the CPU in two sweeps, each of which owns what it writes.

A thread of the first has BLOCK queries of a head and walks over tiles of keys: dq. One of the
second has BLOCK keys and walks over tiles of the queries of all heads that read them: dk and dv.
Both are the same routine with queries and keys exchanged. Probabilities are computed again from the
log-sum-exp in each: seven products instead of five, and no sum in memory that threads share.

Everything is copied once into transposed tiles, so that all products are a few rows of a row-major
matrix by a row-major tile, sums in registers. float32, head dimension a multiple of 64.
"""

import math

import torch
from kagent_sandbox.lang import cpp_kernel

TUNE = {
    "BLOCK": [24, 48, 96],
    "TILE": [64, 128],
    "ROWS": [2, 4, 6],
    "SCHEDULE": ["static", "dynamic", "guided"],
}
BLOCK = 48  # queries or keys that a thread owns, a multiple of ROWS
TILE = 64  # keys or queries at a time
ROWS = 6  # rows whose sums are in registers: 6 x 4 vectors, of AVX-512's 32
SCHEDULE = "dynamic"  # of blocks: causal ones differ in length

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

// A tensor [batch, heads, seq, HEAD_DIM] whose last dimension is contiguous.
struct Rows {
  const float* at;
  int64_t batch, head, row;
  const float* of(int64_t b, int64_t h) const { return at + b * batch + h * head; }
};

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

// 2^x for x of at most 126, within 2 ulp; 0 below the smallest normal number.
// x = n + r with |r| <= 1/2: a polynomial for 2^r, and n goes into the exponent's bits.
static inline float power_of_two(float x) {
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

// tiles[HEAD_DIM, TILE] each, zeros past the end.
static void transpose(const float* from, int64_t stride, float* tile, int64_t inside) {
  for (int64_t j = 0; j < TILE; ++j)
    for (int64_t d = 0; d < HEAD_DIM; ++d)
      tile[d * TILE + j] = j < inside ? from[j * stride + d] : 0.0f;
}

// Rows [first, first + rows) of a tensor; those past the end are copies of the last one.
static void own(const float* from, int64_t stride, int64_t first, int rows, float* to) {
  for (int i = 0; i < BLOCK; ++i)
    std::memcpy(to + i * HEAD_DIM, from + (first + std::min(i, rows - 1)) * stride, 4 * HEAD_DIM);
}

static void give(const float* sum, float scale, int rows, float* to) {
  for (int i = 0; i < rows * HEAD_DIM; ++i) to[i] = sum[i] * scale;
}

// What a block owns: queries with their grad, or keys with their values; and the sums for it.
struct Block {
  alignas(64) float x[BLOCK * HEAD_DIM], y[BLOCK * HEAD_DIM];
  alignas(64) float dx[BLOCK * HEAD_DIM], dy[BLOCK * HEAD_DIM];
  alignas(64) float p[BLOCK * TILE], t[BLOCK * TILE];
};

// Add what `seq` keys of a head give to queries, or what its queries give to keys. `across_x` and
// `across_y` are tiles of the others, transposed; `other_x` and `other_y` their rows.
template <bool QUERIES>
static void walk(Block& own, int64_t first, int rows, int64_t seq, bool causal,
                 const float* across_x, const float* across_y, const float* other_x,
                 int64_t stride_x, const float* other_y, int64_t stride_y, const float* lse,
                 const float* delta, float scale_log2) {
  const float log2e = 1.44269504f;
  const int64_t from = causal && !QUERIES ? first / TILE * TILE : 0;
  const int64_t to = causal && QUERIES ? first + rows : seq;
  for (int64_t start = from; start < to; start += TILE) {
    const int inside = (int)std::min<int64_t>(TILE, to - start);
    for (int i = 0; i < BLOCK; i += ROWS) {
      float* p = own.p + i * TILE;
      float* t = own.t + i * TILE;
      multiply<false>(own.x + i * HEAD_DIM, HEAD_DIM, across_x + start * HEAD_DIM, TILE, p, TILE,
                      TILE, HEAD_DIM);
      multiply<false>(own.y + i * HEAD_DIM, HEAD_DIM, across_y + start * HEAD_DIM, TILE, t, TILE,
                      TILE, HEAD_DIM);
      for (int r = 0; r < ROWS; ++r) {
        const int64_t row = first + std::min(i + r, rows - 1);
        // Which of the tile's keys the query sees, or which of its queries see the key.
        int low = 0, high = inside;
        if (causal && QUERIES) high = (int)std::clamp<int64_t>(row + 1 - start, 0, inside);
        if (causal && !QUERIES) low = (int)std::clamp<int64_t>(row - start, 0, inside);
        float* pr = p + r * TILE;
        float* tr = t + r * TILE;
        const float* lse_at = lse + (QUERIES ? row : start);
        const float* delta_at = delta + (QUERIES ? row : start);
        std::fill(pr, pr + low, 0.0f);
        std::fill(tr, tr + low, 0.0f);
        std::fill(pr + high, pr + TILE, 0.0f);
        std::fill(tr + high, tr + TILE, 0.0f);
#pragma omp simd
        for (int j = low; j < high; ++j) {
          const int at = QUERIES ? 0 : j;
          pr[j] = power_of_two(pr[j] * scale_log2 - lse_at[at] * log2e);
          tr[j] = pr[j] * (tr[j] - delta_at[at]);
        }
      }
      multiply<true>(t, TILE, other_x + start * stride_x, stride_x, own.dx + i * HEAD_DIM, HEAD_DIM,
                     HEAD_DIM, inside);
      if (!QUERIES)
        multiply<true>(p, TILE, other_y + start * stride_y, stride_y, own.dy + i * HEAD_DIM,
                       HEAD_DIM, HEAD_DIM, inside);
    }
  }
}

extern "C" void attention_gradients(
    const float* grad, const float* q, const float* k, const float* v, const float* o,
    const float* lse, float* tiles, float* delta, float* dq, float* dk, float* dv, int64_t batch,
    int64_t heads, int64_t kv_heads, int64_t seq, int64_t stride_gb, int64_t stride_gh,
    int64_t stride_gs, int64_t stride_qb, int64_t stride_qh, int64_t stride_qs, int64_t stride_kb,
    int64_t stride_kh, int64_t stride_ks, int64_t stride_vb, int64_t stride_vh, int64_t stride_vs,
    int64_t stride_ob, int64_t stride_oh, int64_t stride_os, int64_t stride_lb, int64_t stride_lh,
    bool causal, float scale, float scale_log2) {
  const Rows G{grad, stride_gb, stride_gh, stride_gs}, Q{q, stride_qb, stride_qh, stride_qs};
  const Rows K{k, stride_kb, stride_kh, stride_ks}, V{v, stride_vb, stride_vh, stride_vs};
  const Rows O{o, stride_ob, stride_oh, stride_os};
  const int64_t count = (seq + TILE - 1) / TILE, blocks = (seq + BLOCK - 1) / BLOCK;
  const int64_t group = heads / kv_heads, per_head = count * TILE * HEAD_DIM;
  float* keys = tiles;  // [batch, kv_heads, count, HEAD_DIM, TILE], and so are the values
  float* values = keys + batch * kv_heads * per_head;
  float* queries = values + batch * kv_heads * per_head;  // of `heads`, and so are the gradients
  float* grads = queries + batch * heads * per_head;
#pragma omp parallel
  {
#pragma omp for collapse(2) schedule(static)
    for (int64_t h = 0; h < batch * kv_heads; ++h)
      for (int64_t t = 0; t < count; ++t) {
        const int64_t b = h / kv_heads, head = h % kv_heads;
        const int64_t at = h * per_head + t * TILE * HEAD_DIM;
        const int64_t inside = std::min<int64_t>(TILE, seq - t * TILE);
        transpose(K.of(b, head) + t * TILE * K.row, K.row, keys + at, inside);
        transpose(V.of(b, head) + t * TILE * V.row, V.row, values + at, inside);
      }
#pragma omp for collapse(2) schedule(static)
    for (int64_t h = 0; h < batch * heads; ++h)
      for (int64_t t = 0; t < count; ++t) {
        const int64_t b = h / heads, head = h % heads, at = h * per_head + t * TILE * HEAD_DIM;
        const int64_t inside = std::min<int64_t>(TILE, seq - t * TILE);
        const float* g = G.of(b, head) + t * TILE * G.row;
        const float* out = O.of(b, head) + t * TILE * O.row;
        transpose(Q.of(b, head) + t * TILE * Q.row, Q.row, queries + at, inside);
        transpose(g, G.row, grads + at, inside);
        for (int64_t i = 0; i < inside; ++i) {
          float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
          for (int d = 0; d < HEAD_DIM; ++d) sum += g[i * G.row + d] * out[i * O.row + d];
          delta[h * seq + t * TILE + i] = sum;
        }
      }
    static thread_local Block block;
    // The longest blocks go first, so that none is left for the end: the last queries, first keys.
#pragma omp for collapse(2) schedule(SCHEDULE) nowait
    for (int64_t n = blocks - 1; n >= 0; --n)
      for (int64_t h = 0; h < batch * heads; ++h) {
        const int64_t b = h / heads, head = h % heads, kv = head / group, first = n * BLOCK;
        const int rows = (int)std::min<int64_t>(BLOCK, seq - first);
        const int64_t at = (b * kv_heads + kv) * per_head;
        own(Q.of(b, head), Q.row, first, rows, block.x);
        own(G.of(b, head), G.row, first, rows, block.y);
        std::fill_n(block.dx, BLOCK * HEAD_DIM, 0.0f);
        walk<true>(block, first, rows, seq, causal, keys + at, values + at, K.of(b, kv), K.row,
                   V.of(b, kv), V.row, lse + b * stride_lb + head * stride_lh, delta + h * seq,
                   scale_log2);
        give(block.dx, scale, rows, dq + (h * seq + first) * HEAD_DIM);
      }
#pragma omp for collapse(2) schedule(SCHEDULE)
    for (int64_t n = 0; n < blocks; ++n)
      for (int64_t h = 0; h < batch * kv_heads; ++h) {
        const int64_t b = h / kv_heads, kv = h % kv_heads, first = n * BLOCK;
        const int rows = (int)std::min<int64_t>(BLOCK, seq - first);
        own(K.of(b, kv), K.row, first, rows, block.x);
        own(V.of(b, kv), V.row, first, rows, block.y);
        std::fill_n(block.dx, BLOCK * HEAD_DIM, 0.0f);
        std::fill_n(block.dy, BLOCK * HEAD_DIM, 0.0f);
        for (int64_t head = kv * group; head < (kv + 1) * group; ++head) {
          const int64_t at = b * heads + head;
          walk<false>(block, first, rows, seq, causal, queries + at * per_head,
                      grads + at * per_head, Q.of(b, head), Q.row, G.of(b, head), G.row,
                      lse + b * stride_lb + head * stride_lh, delta + at * seq, scale_log2);
        }
        give(block.dx, scale, rows, dk + (h * seq + first) * HEAD_DIM);
        give(block.dy, 1.0f, rows, dv + (h * seq + first) * HEAD_DIM);
      }
  }
}
"""


def attention_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q: [B, H, S, D], k and v: [B, Hkv, S, D], float32, D a multiple of 64.

    grad and o are like q, lse is [B, H, S]. Rows may be strided; the last dimension must be
    contiguous.
    """
    b, h, s, d = q.shape
    hkv = k.shape[1]
    dq = torch.empty(b, h, s, d, dtype=q.dtype, device=q.device)
    dk = torch.empty(b, hkv, s, d, dtype=q.dtype, device=q.device)
    dv = torch.empty(b, hkv, s, d, dtype=q.dtype, device=q.device)
    tiles = torch.empty(2 * b * (h + hkv), -(-s // TILE), d, TILE, dtype=q.dtype, device=q.device)
    delta = torch.empty(b, h, s, dtype=q.dtype, device=q.device)
    defines = {
        "HEAD_DIM": d,
        "BLOCK": BLOCK,
        "TILE": TILE,
        "ROWS": ROWS,
        "SCHEDULE": SCHEDULE,
    }
    cpp_kernel("attention_gradients", SOURCE, defines=defines)(
        grad, q, k, v, o, lse, tiles, delta, dq, dk, dv, b, h, hkv, s,
        *grad.stride()[:3], *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *o.stride()[:3],
        *lse.stride()[:2], causal, 1 / math.sqrt(d), math.log2(math.e) / math.sqrt(d),
    )  # fmt: skip
    return dq, dk, dv
