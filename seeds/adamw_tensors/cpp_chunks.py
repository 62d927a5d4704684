"""A step of AdamW over several tensors on the CPU: OpenMP threads over the chunks of all of them.

One parallel loop: small tensors start no threads of their own. The step's own numbers are worked
out once, in double: 1 - beta2^step cancels in the first steps.
"""

import torch
from kagent_sandbox.lang import cpp_kernel

SCHEDULE = "static"
CHUNK = 4096  # elements that a thread takes at a time
VECTOR_BITS = 256  # that the compiler prefers; wider ones lower the clock of some CPUs
TUNE = {
    "SCHEDULE": ["static", "dynamic", "guided"],
    "CHUNK": [1024, 4096, 16384, 65536],
    "VECTOR_BITS": [256, 512],
}

SOURCE = r"""
#include <cmath>
#include <cstdint>

struct Step {
  float size, inverse_root, beta1, rest1, beta2, rest2, eps;
};

struct Tensor {
  float* param;
  const float* grad;
  float* exp_avg;
  float* exp_avg_sq;
  int64_t count;
  float kept;   // of the parameter: matrices decay
};

static void update(float* __restrict param, const float* __restrict grad, float* __restrict exp_avg,
                   float* __restrict exp_avg_sq, int64_t count, float kept, Step s) {
  for (int64_t i = 0; i < count; ++i) {
    const float g = grad[i];
    const float m = s.beta1 * exp_avg[i] + s.rest1 * g;
    const float v = s.beta2 * exp_avg_sq[i] + s.rest2 * g * g;
    exp_avg[i] = m;
    exp_avg_sq[i] = v;
    param[i] = param[i] * kept - s.size * (m / (std::sqrt(v) * s.inverse_root + s.eps));
  }
}

extern "C" void adamw_chunks(
    float* wide, float* square,
    float* gain, float* bias,
    const float* grad_wide, const float* grad_square,
    const float* grad_gain, const float* grad_bias,
    float* exp_avg_wide, float* exp_avg_square,
    float* exp_avg_gain, float* exp_avg_bias,
    float* exp_avg_sq_wide, float* exp_avg_sq_square,
    float* exp_avg_sq_gain, float* exp_avg_sq_bias,
    const float* lr, const float* step, int64_t wide_count, int64_t square_count,
    int64_t gain_count, int64_t bias_count, double beta1, double beta2, double eps,
    double weight_decay) {
  const double first = -std::expm1(*step * std::log(beta1));
  const double second = -std::expm1(*step * std::log(beta2));
  const float kept = float(1.0 - *lr * weight_decay);
  const Step s = {float(*lr / first), float(1.0 / std::sqrt(second)), float(beta1),
                  float(1.0 - beta1),  float(beta2),                   float(1.0 - beta2),
                  float(eps)};
  const Tensor tensors[] = {
      {wide, grad_wide, exp_avg_wide, exp_avg_sq_wide, wide_count, kept},
      {square, grad_square, exp_avg_square, exp_avg_sq_square, square_count, kept},
      {gain, grad_gain, exp_avg_gain, exp_avg_sq_gain, gain_count, 1.0f},
      {bias, grad_bias, exp_avg_bias, exp_avg_sq_bias, bias_count, 1.0f}};
  int64_t chunks = 0;
  for (const Tensor& t : tensors) chunks += (t.count + CHUNK - 1) / CHUNK;
#pragma omp parallel for schedule(SCHEDULE)
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    int64_t start = chunk * CHUNK;
    const Tensor* t = tensors;
    for (; start >= t->count; ++t) start -= (t->count + CHUNK - 1) / CHUNK * CHUNK;
    const int64_t size = start + CHUNK < t->count ? CHUNK : t->count - start;
    update(t->param + start, t->grad + start, t->exp_avg + start, t->exp_avg_sq + start, size,
           t->kept, s);
  }
}
"""


def adamw_tensors(
    wide: torch.Tensor,
    square: torch.Tensor,
    gain: torch.Tensor,
    bias: torch.Tensor,
    grad_wide: torch.Tensor,
    grad_square: torch.Tensor,
    grad_gain: torch.Tensor,
    grad_bias: torch.Tensor,
    exp_avg_wide: torch.Tensor,
    exp_avg_square: torch.Tensor,
    exp_avg_gain: torch.Tensor,
    exp_avg_bias: torch.Tensor,
    exp_avg_sq_wide: torch.Tensor,
    exp_avg_sq_square: torch.Tensor,
    exp_avg_sq_gain: torch.Tensor,
    exp_avg_sq_bias: torch.Tensor,
    lr: torch.Tensor,
    step: torch.Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
) -> None:
    defines = {"SCHEDULE": SCHEDULE, "CHUNK": CHUNK}
    # A square root that may set errno is a call for each element.
    options = ["-fno-math-errno", f"-mprefer-vector-width={VECTOR_BITS}"]
    kernel = cpp_kernel("adamw_chunks", SOURCE, defines=defines, options=options)
    counts = [t.numel() for t in (wide, square, gain, bias)]
    kernel(
        wide,
        square,
        gain,
        bias,
        grad_wide,
        grad_square,
        grad_gain,
        grad_bias,
        exp_avg_wide,
        exp_avg_square,
        exp_avg_gain,
        exp_avg_bias,
        exp_avg_sq_wide,
        exp_avg_sq_square,
        exp_avg_sq_gain,
        exp_avg_sq_bias,
        lr,
        step,
        *counts,
        beta1,
        beta2,
        eps,
        weight_decay,
    )
