"""Linear cross entropy over chunks of tokens, loss and gradient in a CUDA kernel: a block per row.

torch's matrix products around one kernel that turns a chunk's logits into their gradient in place.
A block reads its row in 16-byte words, each thread keeping a running maximum and sum, merges these
once, then reads the row again, which L2 still holds (132 rows of 256 KiB are 34 MiB), and writes.
Rows start at multiples of 16 bytes whatever the vocabulary, so that all accesses are wide.

Memory against time and accuracy as in every chunked form: scratch is CHUNK x vocabulary; each chunk
reads the weight twice and updates all of dw, and each update rounds dw to bf16.
"""

import torch
from kagent_sandbox.lang import cuda_kernel

TUNE = {"CHUNK": [512, 1024, 2048, 4096], "THREADS": [256, 512, 1024], "UNROLL": [1, 2, 4]}
CHUNK = 2048  # tokens
THREADS = 512  # per row
UNROLL = 4  # 16-byte words in flight per thread

SOURCE = r"""
#include <cuda_bf16.h>
#include <cuda_fp16.h>

constexpr int WIDTH = 8;  // elements of a 16-byte word
constexpr int WARPS = THREADS / 32;

__device__ float to_float(__half x) { return __half2float(x); }
__device__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ void from_float(float x, __half& y) { y = __float2half_rn(x); }
__device__ void from_float(float x, __nv_bfloat16& y) { y = __float2bfloat16_rn(x); }

struct alignas(16) Word { SCALAR at[WIDTH]; };

// Maximum of some numbers and the sum of exp(number - maximum). Nothing: the lowest float and 0,
// which merges without a special case, as minus infinity would not.
struct State {
  float maximum, sum;
};
constexpr float LOWEST = -3.402823466e38f;

__device__ State merge(State a, State b) {
  const float maximum = fmaxf(a.maximum, b.maximum);
  return {maximum,
          a.sum * __expf(a.maximum - maximum) + b.sum * __expf(b.maximum - maximum)};
}

// Merged over the block, in every thread.
__device__ State merge_block(State mine) {
  __shared__ State warps[WARPS];
#pragma unroll
  for (int d = 16; d > 0; d /= 2)
    mine = merge(mine, {__shfl_xor_sync(0xffffffff, mine.maximum, d),
                        __shfl_xor_sync(0xffffffff, mine.sum, d)});
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = mine;
  __syncthreads();
  State all = warps[0];
  for (int w = 1; w < WARPS; ++w) all = merge(all, warps[w]);
  return all;
}

// One block per row of z [rows, vocab], whose rows are `pitch` elements apart (a multiple of 8).
// In: logits. Out: their gradient, and the row's loss.
extern "C" __global__ void __launch_bounds__(THREADS)
loss_and_gradient(SCALAR* z, const long long* target, const float* count, float* losses,
                  long long pitch, int vocab, long long ignore_index) {
  SCALAR* row = z + blockIdx.x * pitch;
  Word* words = reinterpret_cast<Word*>(row);
  const int last = (vocab + WIDTH - 1) / WIDTH;  // the last word may reach into the padding
  const long long t = target[blockIdx.x];
  if (t == ignore_index) {
    const Word zeros = {};
    for (int w = threadIdx.x; w < last; w += THREADS) words[w] = zeros;
    if (threadIdx.x == 0) losses[blockIdx.x] = 0.0f;
    return;
  }
  const float z_target = to_float(row[t]);  // before anything is overwritten: barrier below

  State state = {LOWEST, 0.0f};
#pragma unroll UNROLL
  for (int w = threadIdx.x; w < last; w += THREADS) {
    const Word word = words[w];
    float x[WIDTH];
    float largest = LOWEST;
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) {
      x[i] = w * WIDTH + i < vocab ? to_float(word.at[i]) : LOWEST;
      largest = fmaxf(largest, x[i]);
    }
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) sum += __expf(x[i] - largest);
    state = merge(state, {largest, sum});
  }
  state = merge_block(state);

  const float share = 1.0f / *count;  // at least this row counts
  const float scale = share / state.sum;
#pragma unroll UNROLL
  for (int w = threadIdx.x; w < last; w += THREADS) {
    Word word = words[w];
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) {
      const float p = __expf(to_float(word.at[i]) - state.maximum) * scale;
      from_float(w * WIDTH + i == t ? p - share : p, word.at[i]);
    }
    words[w] = word;
  }
  if (threadIdx.x == 0) losses[blockIdx.x] = state.maximum + __logf(state.sum) - z_target;
}

// One block. Without losses: the number of targets that count, so that the host need not wait for
// it. With them: their mean, 0 / 0 = NaN if nothing counts, like torch.
extern "C" __global__ void __launch_bounds__(THREADS)
over_tokens(const long long* target, const float* losses, float* count, float* loss, int tokens,
            long long ignore_index) {
  __shared__ float warps[WARPS];
  float sum = 0.0f;
  for (int i = threadIdx.x; i < tokens; i += THREADS)
    sum += losses ? losses[i] : (target[i] == ignore_index ? 0.0f : 1.0f);
#pragma unroll
  for (int d = 16; d > 0; d /= 2) sum += __shfl_xor_sync(0xffffffff, sum, d);
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int w = 1; w < WARPS; ++w) sum += warps[w];
    if (losses)
      *loss = sum / *count;
    else
      *count = sum;
  }
}
"""


def linear_cross_entropy(
    x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, ignore_index: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Mean loss (fp32) of x [T, D] @ weight.T [D, V] against target [T], and d loss / dx and dw."""
    tokens, vocab = x.shape[0], weight.shape[0]
    defines = {
        "SCALAR": "__nv_bfloat16" if x.dtype == torch.bfloat16 else "__half",
        "THREADS": THREADS,
        "UNROLL": UNROLL,
    }
    rows_kernel = cuda_kernel("loss_and_gradient", SOURCE, defines=defines)
    tokens_kernel = cuda_kernel("over_tokens", SOURCE, defines=defines)
    count, loss = (torch.empty((), dtype=torch.float32, device=x.device) for _ in range(2))
    losses = torch.empty(tokens, dtype=torch.float32, device=x.device)
    dx, dw = torch.empty_like(x), torch.empty_like(weight)
    pitch = -(-vocab // 16) * 16
    logits = torch.empty(min(CHUNK, tokens), pitch, dtype=x.dtype, device=x.device)

    tokens_kernel.launch(1, THREADS, target, None, count, loss, tokens, ignore_index)
    for start in range(0, tokens, CHUNK):
        rows = x[start : start + CHUNK]
        z = logits[: rows.shape[0], :vocab]
        torch.mm(rows, weight.t(), out=z)
        rows_kernel.launch(
            rows.shape[0], THREADS,
            z, target[start:], count, losses[start:], pitch, vocab, ignore_index,
        )  # fmt: skip
        torch.mm(z, weight, out=dx[start : start + CHUNK])
        if start == 0:
            torch.mm(z.t(), rows, out=dw)
        else:
            dw.addmm_(z.t(), rows)
    tokens_kernel.launch(1, THREADS, target, losses, count, loss, tokens, ignore_index)
    return loss, dx, dw
