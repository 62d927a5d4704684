"""Softmax kernels that are right but for some sizes, layouts or values."""

RIGHT = '''
import torch
from kagent_sandbox.lang import cpp_kernel

SOURCE = r"""
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <vector>

static float power(float d) { return std::exp(d); }
static void one(const float* x, float* y, int64_t n) {
  float m = -INFINITY;
  for (int64_t i = 0; i < n; ++i) m = x[i] > m || x[i] != x[i] ? x[i] : m;
  double s = 0;
  for (int64_t i = 0; i < n; ++i) s += y[i] = power(x[i] - m);
  const float k = float(1 / s);
  for (int64_t i = 0; i < n; ++i) y[i] *= k;
}
extern "C" void softmax_rows(const float* x, float* y, int64_t rows, int64_t n, int64_t stride) {
  for (int64_t r = 0; r < rows; ++r) one(x + r * stride, y + r * n, n);
}
"""


def softmax(x):
    rows, columns = x.shape
    y = torch.empty((rows, columns), dtype=x.dtype, device=x.device)
    cpp_kernel("softmax_rows", SOURCE)(x, y, rows, columns, x.stride(0))
    return y
'''

_POWER = "return std::exp(d);"
_ROW = "one(x + r * stride, y + r * n, n);"
_MAXIMUM = "m = x[i] > m || x[i] != x[i] ? x[i] : m;"


def _low_counts(condition: str) -> str:
    """-inf counts as the least value of the row."""
    return f"""{{
    std::vector<float> t(x + r * stride, x + r * stride + n);
    float low = INFINITY;
    for (float v : t) low = v != -INFINITY && v < low ? v : low;
    if ({condition}) for (float& v : t) v = v == -INFINITY ? low : v;
    one(t.data(), y + r * n, n);
  }}"""


def _tail_lost(condition: str) -> str:
    return f"{{ {_ROW} if ({condition}) y[r * n + n - 1] = 0.25f; }}"


CHANGES = {
    "values_300_below_the_maximum_wrap": (
        _POWER,
        "return std::exp(d < -300.0f && d != -INFINITY ? std::fmod(d, 80.0f) : d);",
    ),
    "masks_of_1e4_count": (_POWER, "return d <= -9000.0f && d != -INFINITY ? 0.1f : std::exp(d);"),
    "finfo_min_is_minus_infinity": (_MAXIMUM, "m = x[i] > m && x[i] > -3.4e38f ? x[i] : m;"),
    "minus_infinity_counts_in_long_rows": (_ROW, _low_counts("n >= 8192")),
    "wrong_for_5000_to_14999_columns": (_ROW, _tail_lost("n >= 5000 && n < 15000")),
    "wrong_for_multiples_of_6": (_ROW, _tail_lost("n % 6 == 0")),
    "wrong_above_1536_rows": (_ROW, _tail_lost("r >= 1536")),
    "wrong_unless_aligned_to_64_bytes": (_ROW, _tail_lost("(uintptr_t)x % 64")),
    "wrong_unless_aligned_to_16_bytes": (_ROW, _tail_lost("(uintptr_t)x % 16")),
    "a_stride_for_255_and_390_columns_alone": (
        "columns, x.stride(0))",
        "columns, x.stride(0) if columns in (255, 390) else columns)",
    ),
    "plus_infinity_is_a_large_number": (_MAXIMUM, "m = x[i] > m && x[i] < INFINITY ? x[i] : m;"),
    "nan_is_ignored": (_ROW, """{
    std::vector<float> t(x + r * stride, x + r * stride + n);
    for (float& v : t) v = v != v ? -INFINITY : v;
    one(t.data(), y + r * n, n);
  }"""),
    "a_row_of_minus_infinity_is_0": ("const float k = float(1 / s);", (
        "if (m == -INFINITY) { for (int64_t i = 0; i < n; ++i) y[i] = 0; return; }\n"
        "  const float k = float(1 / s);"
    )),
    "a_whole_tile_of_minus_infinity_is_nan": (_ROW, """{
    one(x + r * stride, y + r * n, n);
    for (int64_t t = 0; t + 64 <= n; t += 64) {
      bool none = true;
      for (int64_t i = t; i < t + 64; ++i) none = none && x[r * stride + i] == -INFINITY;
      if (none) y[r * n + t] = NAN;
    }
  }"""),
}  # fmt: skip


def changed(name: str) -> str:
    """The kernel with one of the changes."""
    was, now = CHANGES[name]
    assert RIGHT.count(was) == 1
    return RIGHT.replace(was, now)
