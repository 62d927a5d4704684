"""Plans whose copies and views are all of an operation, and whose kernel is there to be seen."""

import pytest
from custom_tasks import candidate, judged, write
from kagent_sandbox.data.verdict import Rejected, Status

TURNED = """
dims = { M = "rows", N = "columns" }
arguments = [{ name = "x", shape = ["M", "N"] }]
results = [{ name = "y", shape = ["N", "M"], k = 1 }]

[[cpu.check]]
name = "cpu"
dtype = "float32"
M = 33
N = 20

[[cpu.bench]]
name = "cpu_bench"
dtype = "float32"
M = 64
N = 40
"""
REFERENCE = """
def inputs(case, generator, device):
    shape = case.dims["M"], case.dims["N"]
    return {"x": torch.randn(shape, generator=generator, device=device)}


def reference(*, x):
    return x.double().t()


def eager(*, x):
    return x.t().contiguous()
"""
CODE = """
extern "C" void turn(const float* x, float* y, int64_t m, int64_t n) {
  for (int64_t i = 0; i < m; ++i)
    for (int64_t j = 0; j < n; ++j) y[j * m + i] = x[i * n + j];
}
"""
HOST = """
def run(x):
    m, n = x.shape
    y = torch.empty(n, m, dtype=x.dtype, device=x.device)
    aside = torch.empty(n, m, dtype=x.dtype, device=x.device)
    turn = cpp_kernel("turn", SOURCE)
"""
GOOD = "    turn(x, y, m, n)\n    return y"


@pytest.mark.parametrize(
    ("rest", "status", "said"),
    [
        (GOOD, None, ""),
        ("    turn(x, aside, m, n)\n    y.copy_(aside)\n    return y", None, ""),
        (
            "    y.copy_(x.t())\n    turn(x, aside, m, n)\n    return y",
            Status.POLICY,
            "the results are right without any launch",
        ),
        (
            "    turn(x, aside, m, n)\n    return x.t()",
            Status.INCORRECT_SHAPE,
            "lies in the memory of the argument x, which is the caller's",
        ),
        (
            "    turn(x, aside, m, n)\n    return aside[:, :1].expand(n, m)",
            Status.INCORRECT_SHAPE,
            r"the same memory (strides (33, 0))",
        ),
    ],
)
def test_a_kernel_has_a_part_in_the_results(builder, tmp_path, rest, status, said):
    task = write(tmp_path, TURNED, REFERENCE)
    found = judged(builder, task, candidate(CODE, HOST) + rest)
    if status is None:
        assert not isinstance(found, Rejected), found
    else:
        assert found.status is status, found
        assert said in found.message
