"""torch works without numpy, and so do kernels in an exported library."""

import subprocess
import sys

import pytest

CALL = """
import sys
sys.modules["numpy"] = None
import torch
from kagent_sandbox.runtime import cpp_kernel
SOURCE = 'extern "C" void twice(const float* x, float* y, int n) { for (int i = 0; i < n; ++i) y[i] = 2 * x[i]; }'
x = torch.arange(5.0)
y = torch.empty_like(x)
cpp_kernel("twice", SOURCE)(x, y, 5)
print(torch.equal(y, 2 * x))
"""  # noqa: E501


@pytest.mark.nightly
def test_a_kernel_runs_without_numpy():
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CALL],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.stdout.strip() == "True", done.stderr
