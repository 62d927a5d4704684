"""Sum of a matrix's rows on the CPU, for benchmarks/patch_step.py: the gradient of a bias.

A thread takes a block of columns and reads its part of each row. Rows are added in blocks, so that
rounding errors grow with their number's root or less.
"""

import torch
from kagent_sandbox.lang import cpp_kernel

COLUMNS = 128  # that a thread takes
ROWS = 32  # that are added one by one
TUNE = {"COLUMNS": [64, 128, 256, 512], "ROWS": [16, 32, 64, 128]}

SOURCE = r"""
#include <cstdint>

extern "C" void column_sum(const float* x, float* y, int64_t rows, int64_t columns) {
#pragma omp parallel for schedule(static)
  for (int64_t first = 0; first < columns; first += COLUMNS) {
    const int64_t count = columns - first < COLUMNS ? columns - first : COLUMNS;
    float total[COLUMNS] = {};
    for (int64_t top = 0; top < rows; top += ROWS) {
      const int64_t end = top + ROWS < rows ? top + ROWS : rows;
      float block[COLUMNS] = {};
      for (int64_t r = top; r < end; ++r) {
        const float* row = x + r * columns + first;
        if (count == COLUMNS)
          for (int j = 0; j < COLUMNS; ++j) block[j] += row[j];
        else
          for (int j = 0; j < count; ++j) block[j] += row[j];
      }
      for (int j = 0; j < count; ++j) total[j] += block[j];
    }
    for (int j = 0; j < count; ++j) y[first + j] = total[j];
  }
}
"""


def column_sum(x0: torch.Tensor) -> torch.Tensor:
    rows, columns = x0.shape
    x0 = x0.contiguous()
    y = torch.empty((1, columns), dtype=torch.float32, device=x0.device)
    cpp_kernel("column_sum", SOURCE, defines={"COLUMNS": COLUMNS, "ROWS": ROWS})(
        x0, y, rows, columns
    )
    return y
