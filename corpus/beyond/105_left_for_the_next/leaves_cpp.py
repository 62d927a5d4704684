"""Leaves itself wherever it can: files, caches, modules, the environment, memory."""

import contextlib
import os
import sys
import tempfile

import torch
from kagent_sandbox.lang import cpp_kernel

SOURCE = r"""
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>

static int runs = 0;

static void softmax_of(const float* x, float* y, int64_t rows, int64_t columns) {
  for (int64_t row = 0; row < rows; ++row) {
    const float* in = x + row * columns;
    float* out = y + row * columns;
    float maximum = -__builtin_inff();
    for (int64_t i = 0; i < columns; ++i) maximum = __builtin_fmaxf(maximum, in[i]);
    double sum = 0;
    for (int64_t i = 0; i < columns; ++i) sum += out[i] = __builtin_expf(in[i] - maximum);
    const float scale = float(1 / sum);
    for (int64_t i = 0; i < columns; ++i) out[i] *= scale;
  }
}

extern "C" void softmax(const float* x, float* y, int64_t rows, int64_t columns) {
  softmax_of(x, y, rows, columns);
  if (runs++) return;
  setenv("KAGENT_LEFT", "1", 1);
  for (std::string folder : {std::string(getenv("TMPDIR")) + "/..", std::string("/tmp"),
                             std::string("/var/tmp"), std::string("/dev/shm")}) {
    if (FILE* file = std::fopen((folder + "/kagent_left").c_str(), "w")) std::fclose(file);
  }
}
"""
HOME = os.path.expanduser("~")
FOLDERS = [tempfile.gettempdir(), HOME, os.getcwd(), f"{os.getcwd()}/.."]
FOLDERS += ["/tmp", "/var/tmp", "/dev/shm", os.path.dirname(torch.__file__)]  # noqa: S108
FOLDERS += [os.environ["TRITON_CACHE_DIR"], os.environ["XDG_CACHE_HOME"], f"{HOME}/.cache"]

os.environ["KAGENT_LEFT"] = "1"
torch.kagent_left = sys.kagent_left = True
for folder in FOLDERS:
    with contextlib.suppress(OSError):
        os.makedirs(folder, exist_ok=True)
        with open(f"{folder}/kagent_left", "w") as file:
            file.write("left")


def rows(x: torch.Tensor) -> torch.Tensor:
    y = torch.empty_like(x)
    cpp_kernel("softmax", SOURCE)(x, y, *x.shape)
    return y
