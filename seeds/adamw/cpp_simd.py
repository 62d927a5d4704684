"""A step of AdamW on the CPU: OpenMP threads over chunks of elements, vectorised by g++.

The step's own numbers are worked out once, in double: 1 - beta2^step cancels in the first steps.
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
  float size, inverse_root, kept, beta1, rest1, beta2, rest2, eps;
};

static void update(float* __restrict param, const float* __restrict grad, float* __restrict exp_avg,
                   float* __restrict exp_avg_sq, int64_t count, Step s) {
  for (int64_t i = 0; i < count; ++i) {
    const float g = grad[i];
    const float m = s.beta1 * exp_avg[i] + s.rest1 * g;
    const float v = s.beta2 * exp_avg_sq[i] + s.rest2 * g * g;
    exp_avg[i] = m;
    exp_avg_sq[i] = v;
    param[i] = param[i] * s.kept - s.size * (m / (std::sqrt(v) * s.inverse_root + s.eps));
  }
}

extern "C" void adamw_simd(float* param, const float* grad, float* exp_avg, float* exp_avg_sq,
                           const float* lr, const float* step, int64_t count, double beta1,
                           double beta2, double eps, double weight_decay) {
  const double first = -std::expm1(*step * std::log(beta1));
  const double second = -std::expm1(*step * std::log(beta2));
  const Step s = {float(*lr / first),
                  float(1.0 / std::sqrt(second)),
                  float(1.0 - *lr * weight_decay),
                  float(beta1),
                  float(1.0 - beta1),
                  float(beta2),
                  float(1.0 - beta2),
                  float(eps)};
#pragma omp parallel for schedule(SCHEDULE)
  for (int64_t start = 0; start < count; start += CHUNK) {
    const int64_t size = start + CHUNK < count ? CHUNK : count - start;
    update(param + start, grad + start, exp_avg + start, exp_avg_sq + start, size, s);
  }
}
"""


def adamw(
    param: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
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
    kernel = cpp_kernel("adamw_simd", SOURCE, defines=defines, options=options)
    state = (param, grad, exp_avg, exp_avg_sq, lr, step)
    kernel(*state, param.numel(), beta1, beta2, eps, weight_decay)
