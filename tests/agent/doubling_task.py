"""A small task with a C++ kernel, for tests of whole runs on the CPU."""

import textwrap

TASK = """
name = "double"
summary = "Twice a matrix"
entry = "double"
signature = "double(x: Tensor[M, N]) -> Tensor[M, N]"
bytes = "2 * M * N * itemsize"
written = "M * N * itemsize"
flops = "M * N"
dims = { M = "rows", N = "columns" }
arguments = [{ name = "x", shape = ["M", "N"] }]
results = [{ name = "y", shape = ["M", "N"], k = 2.0 }]

[cpu]
check = [
  { name = "few", dtype = "float32", M = 1, N = 7 },
  { name = "odd", dtype = "float32", M = 3, N = 341 },
]
bench = [
  { name = "short", dtype = "float32", M = 64, N = 1024 },
  { name = "long", dtype = "float32", M = 1024, N = 1024 },
]

[[cpu.hidden_check]]
count = 1
dtype = ["float32"]
dims = { M = { min = 1, max = 64 }, N = { min = 2, max = 1024 } }

[[cpu.hidden_bench]]
count = 1
dtype = ["float32"]
dims = { M = [96], N = { min = 900, max = 990 } }

[gpu]
check = [{ name = "gpu_few", dtype = "float32", M = 1, N = 7 }]
bench = [{ name = "gpu_long", dtype = "float32", M = 1024, N = 1024 }]
"""

REFERENCE = """
import torch


def inputs(case, generator, device):
    shape = (case.dims["M"], case.dims["N"])
    x = torch.randn(shape, generator=generator, device=device)
    return {"x": (x * case.scale).to(getattr(torch, case.dtype))}


def reference(x):
    return x.double() * 2


def reference_rows(rows, x):
    return reference(x[rows[0]])


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


def kernel_of_passes(loop, passes=1):
    """A candidate that runs a loop four times so many times: it is far from the memory's rate, at
    which a search would end. All that the tuner proposes is slower than one pass, several times: a
    few pairs of blocks show it, where kernels that are alike take hundreds.
    """
    repeated = (
        "volatile int passes = 4 * PASSES;  // which the compiler does not look into\n"
        f"  for (int pass = 0; pass < passes; ++pass) {{\n    {loop}\n  }}"
    )
    text = kernel(repeated.replace(" schedule(static, CHUNK)", "")).replace("CHUNK", "PASSES")
    head, _, rest = text.partition("PASSES = 4096\n")
    _, _, rest = rest.partition("\n")  # TUNE
    tune = {"PASSES": [1, *range(6, 69)]}  # as many as may be
    return f"{head}PASSES = {passes}\nTUNE = {tune}\n{rest}"
