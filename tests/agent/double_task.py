"""A small task with a C++ kernel, for tests of whole runs on the CPU."""

import textwrap

TASK = """
name = "double"
summary = "Twice a vector"
entry = "double"
signature = "double(x: Tensor[N]) -> Tensor[N]"
bytes = "2 * N * itemsize"
written = "N * itemsize"
flops = "N"
dims = { N = "elements" }
arguments = [{ name = "x", shape = ["N"] }]
results = [{ name = "y", shape = ["N"], k = 2.0 }]

[cpu]
check = [
  { name = "few", dtype = "float32", N = 7 },
  { name = "odd", dtype = "float32", N = 1021 },
]
bench = [
  { name = "short", dtype = "float32", N = 65536 },
  { name = "long", dtype = "float32", N = 1048576 },
]
hidden_check = [{ count = 1, dtype = ["float32"], dims = { N = { min = 2, max = 3000 } } }]
hidden_bench = [{ count = 1, dtype = ["float32"], dims = { N = { min = 90000, max = 99000 } } }]

[gpu]
check = [{ name = "gpu_few", dtype = "float32", N = 7 }]
bench = [{ name = "gpu_long", dtype = "float32", N = 1048576 }]
"""

REFERENCE = """
import torch


def inputs(case, generator, device):
    x = torch.randn(case.dims["N"], generator=generator, device=device)
    return {"x": (x * case.scale).to(getattr(torch, case.dtype))}


def reference(x):
    return x.double() * 2


def eager(x):
    return x * 2


def experts():
    return {}
"""


def kernel(loop):
    return (
        textwrap.dedent('''
        import torch
        from kagent_sandbox.lang import cpp_kernel

        CHUNK = 4096
        TUNE = {"CHUNK": [1024, 2048, 4096, 8192, 16384]}
        SOURCE = r"""
        #include <cstdint>
        extern "C" void twice(const float* x, float* y, int64_t n) {
          LOOP
        }
        """


        def double(x: torch.Tensor) -> torch.Tensor:
            y = torch.empty_like(x)
            cpp_kernel("twice", SOURCE, defines={"CHUNK": CHUNK})(x, y, x.numel())
            return y
    ''')
        .lstrip()
        .replace("LOOP", loop)
    )


PARALLEL = "#pragma omp parallel for simd schedule(static, CHUNK)\n  "
PLAIN = "for (int64_t i = 0; i < n; ++i) y[i] = 2 * x[i];"
