"""Candidates of every language through the real builder: confined processes, compilers, no GPU."""

import dataclasses

import pytest
from kagent_sandbox.data.build import BuildCase, BuildRequest, Built, TensorSpec
from kagent_sandbox.data.device import DeviceFacts
from kagent_sandbox.data.plan import Launch, Pointer, Scalar, Struct, TensorMap
from kagent_sandbox.data.verdict import Rejected, Stage, Status


def case(rows, columns, dtype="float32"):
    x = TensorSpec("x", (rows, columns), (columns, 1), dtype)
    return BuildCase(f"{rows}x{columns}", (x,), (dataclasses.replace(x, name="y"),))


CASES = (case(64, 1000), case(3, 17))


def request(source, cases=CASES, target="sm_90a", **changes):
    return BuildRequest(source, "softmax", target, tuple(cases), **changes)


TRITON = """
import torch
import triton
import triton.language as tl

TUNE = {"WARPS": [4, 8]}
WARPS = 4


@triton.jit
def _rows(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * n + c, mask=c < n, other=-float("inf")).to(tl.float32)
    e = tl.exp(x - tl.max(x, 0))
    tl.store(y_ptr + row * n + c, e / tl.sum(e, 0), mask=c < n)


def softmax(x):
    y = torch.empty_like(x)
    n = x.shape[1]
    _rows[(x.shape[0],)](x, y, n, BLOCK=triton.next_power_of_2(n), num_warps=WARPS)
    return y
"""

CUDA = '''
import torch
from kagent_sandbox.lang import cuda_kernel

SOURCE = r"""
#include <cuda_bf16.h>
extern "C" __global__ void rows(const float* x, float* y, int n, float scale) {
  extern __shared__ float s[];
  for (int i = threadIdx.x; i < n; i += blockDim.x) s[i] = x[blockIdx.x * n + i];
  __syncthreads();
  for (int i = threadIdx.x; i < n; i += blockDim.x) y[blockIdx.x * n + i] = s[n - 1 - i] * scale;
}
"""
TUNE = {"THREADS": [128, 256]}
THREADS = 128


def softmax(x):
    y = torch.empty_like(x)
    n = x.shape[1]
    k = cuda_kernel("rows", SOURCE, defines={"THREADS": THREADS})
    k.launch(x.shape[0], THREADS, x, y, n, 1, shared=4 * n, cluster=(1, 1, 1), pdl=True)
    return y
'''

CPP = '''
import torch
from kagent_sandbox.lang import cpp_kernel

_rows = cpp_kernel("rows", r"""
#include <cmath>
#include <cstdint>
extern "C" void rows(const float* x, float* y, int64_t m, int64_t n) {
#pragma omp parallel for
  for (int64_t r = 0; r < m; ++r)
    for (int64_t i = 0; i < n; ++i) y[r * n + i] = std::exp(x[r * n + i]);
}
""")


def softmax(x):
    y = torch.empty_like(x)
    _rows(x, y, x.shape[0], x.shape[1])
    return y
'''


def test_triton(builder):
    built = builder.build(request(TRITON, max_configs=4))
    assert isinstance(built, Built), built
    assert built.configs == ({"WARPS": 4}, {"WARPS": 8})
    assert set(built.plans) == {(i, c) for i in (0, 1) for c in ("64x1000", "3x17")}
    blocks = {i: plan.launches[0].block for (i, _), plan in built.plans.items()}
    assert blocks == {0: (128, 1, 1), 1: (256, 1, 1)}
    kernel = built.plans[0, "64x1000"].kernels[0]
    assert kernel.registers > 0
    assert kernel.hash in built.binaries
    assert kernel.load_bytes == {4: 8}  # 1000 is no multiple of 16: four bytes at a time
    assert built.plans[0, "64x1000"].peak_bytes == 64 * 1000 * 4
    assert not built.dropped


def test_equal_work_is_recognised_whatever_the_text(builder):
    one = builder.build(request(TRITON))
    other = TRITON.replace("_rows", "_other_name").replace("e / tl.sum(e, 0)", "(e) / tl.sum(e, 0)")
    two = builder.build(request("# a comment\n\n" + other))
    assert one.work_hash == two.work_hash
    assert one.source_hash != two.source_hash
    three = builder.build(request(TRITON.replace("tl.exp(", "tl.exp2(")))
    assert one.work_hash != three.work_hash
    assert one.tree_hash != three.tree_hash


def test_options_that_change_no_instruction_are_the_same_work(builder):
    """As of an Inductor seed's VECTOR_BITS where no loop becomes one of vectors."""
    scalar = CPP.replace("std::exp(", "std::lgamma(")
    texts = [
        scalar.replace('\n""")', f'\n""", options=["-mprefer-vector-width={bits}"])')
        for bits in (128, 256, 512)
    ]
    assert len(set(texts)) == 3
    found = [builder.build(request(text, target="cpu")) for text in texts]
    assert len({b.tree_hash for b in found}) == 3
    assert len({b.work_hash for b in found}) == 1


def test_cuda(builder):
    built = builder.build(request(CUDA, max_configs=2))
    assert isinstance(built, Built), built
    op = built.plans[1, "64x1000"].launches[0]
    assert op.grid == (64, 1, 1)
    assert op.block == (256, 1, 1)
    assert op.shared == 4000
    assert op.cluster == (1, 1, 1)
    assert op.pdl
    assert op.args == (Pointer(0, 0), Pointer(1, 0), Scalar("i32", 1000), Scalar("f32", 1.0))


def test_cpp(builder):
    built = builder.build(request(CPP, target="cpu"))
    assert isinstance(built, Built), built
    (op,) = built.plans[0, "3x17"].launches
    assert op.args[2:] == (Scalar("i64", 3), Scalar("i64", 17))
    assert built.binaries[op.kernel].startswith(b"\x7fELF")


def test_tensor_maps_and_structures(builder):
    source = '''
import numpy as np
import torch
from kagent_sandbox.lang import cuda_kernel, struct, tensor_map

K = cuda_kernel("k", r"""
#include <cuda.h>
struct Both { float* y; CUtensorMap m; int n; };
extern "C" __global__ void k(const __grid_constant__ CUtensorMap m,
                             const __grid_constant__ Both both) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&m));
  asm volatile("prefetch.tensormap [%0];" ::"l"(&both.m));
  both.y[threadIdx.x] = both.n;
}
""")


def softmax(x):
    y = torch.empty_like(x)
    view = tensor_map(x[2:, 8:], (16, 32), swizzle=128)
    K.launch(1, 32, view, struct(y, view, np.int32(5)))
    return y
'''
    built = builder.build(request(source, [case(64, 64)]))
    assert isinstance(built, Built), built
    (view, both) = built.plans[0, "64x64"].launches[0].args
    assert both == Struct(bytes(192) + b"\x05" + bytes(63), ((0, Pointer(1, 0)), (64, view)))
    assert view == TensorMap(
        buffer=0,
        offset=4 * (2 * 64 + 8),
        dtype="float32",
        dims=(56, 62),
        strides=(256,),
        box=(32, 16),
        element_strides=(1, 1),
        swizzle=128,
        l2_promotion=128,
    )


BODY = "    y = torch.empty_like(x)\n"


def triton_body(body):
    return TRITON.split("def softmax")[0] + f"def softmax(x):\n{body}"


REJECTED = {
    "syntax": ("def softmax(x:\n", Stage.PARSE, Status.COMPILE_ERROR, ["line 1", "SyntaxError"]),
    "null byte": (
        "x = 1\ny = r'\0'",
        Stage.PARSE,
        Status.COMPILE_ERROR,
        [r"line 2: `y = r'\x00'`: SyntaxError: the source holds U+0000", r"as an escape (\x00)"],
    ),
    "turned around": (
        "x = 1  # \u202e1 = y",
        Stage.PARSE,
        Status.COMPILE_ERROR,
        [r"line 1: `x = 1  # \u202e1 = y`: SyntaxError", "U+202E (RIGHT-TO-LEFT OVERRIDE)"],
    ),
    "no entry": (
        TRITON.replace("def softmax", "def other"),
        Stage.PARSE,
        Status.POLICY,
        ["softmax", "other"],
    ),
    "wrong shape": (
        triton_body("    return torch.empty(3, device=x.device)\n"),
        Stage.BUILD,
        Status.INCORRECT_SHAPE,
        ["line", "return torch.empty", "(3,)", "(64, 1000)"],
    ),
    "wrong dtype": (
        triton_body("    return torch.empty_like(x, dtype=torch.bfloat16)\n"),
        Stage.BUILD,
        Status.INCORRECT_DTYPE,
        ["bfloat16", "float32", "dtype=torch.float32"],
    ),
    "item": (
        triton_body("    if x[0, 0].item() > 0:\n        return x\n    return x\n"),
        Stage.BUILD,
        Status.POLICY,
        ["line 20", "x[0, 0].item()"],
    ),
    "forbidden operation": (
        triton_body("    return torch.softmax(x, -1)\n"),
        Stage.BUILD,
        Status.POLICY,
        ["line 20", "softmax", "kernel"],
    ),
    "no launch": (
        triton_body("    return torch.empty_like(x)\n"),
        Stage.BUILD,
        Status.POLICY,
        ["launches no kernel", "@triton.jit"],
    ),
    "no kernel, where torch is allowed": (
        "import torch\n\ndef softmax(x):\n    return torch.mul(x, 2)\n",
        Stage.BUILD,
        Status.POLICY,
        ["launches no kernel"],
    ),
    "host error": (
        triton_body("    return x.shape[9]\n"),
        Stage.BUILD,
        Status.RUNTIME_ERROR,
        ["line 20", "IndexError"],
    ),
    "triton error": (
        TRITON.replace("tl.max(x, 0)", "tl.maxx(x, 0)"),
        Stage.BUILD,
        Status.COMPILE_ERROR,
        ["line 15", "maxx"],
    ),
    "cuda error": (
        CUDA.replace("* scale", "* scaleX"),
        Stage.BUILD,
        Status.COMPILE_ERROR,
        ["line 7", 'identifier "scaleX" is undefined'],
    ),
    "cuda argument": (
        CUDA.replace("x, y, n, 1,", "x, y, 2.5, 1,"),
        Stage.BUILD,
        Status.RUNTIME_ERROR,
        ["k.launch", "argument 3 (i32)", "int("],
    ),
    "too few arguments": (
        CUDA.replace("x, y, n, 1,", "x, y, n,"),
        Stage.BUILD,
        Status.RUNTIME_ERROR,
        ["takes 4 arguments, got 3"],
    ),
    "too much shared memory": (
        CUDA.replace("shared=4 * n", "shared=300_000"),
        Stage.BUILD,
        Status.RESOURCE_LIMIT,
        ["300000", "232448"],
    ),
    "too many threads": (
        CUDA.replace("launch(x.shape[0], THREADS", "launch(x.shape[0], 2048"),
        Stage.BUILD,
        Status.RESOURCE_LIMIT,
        ["2048x1x1", "1024"],
    ),
    "death": (
        triton_body("    import os, signal\n    os.kill(os.getpid(), signal.SIGSEGV)\n"),
        Stage.BUILD,
        Status.RUNTIME_ERROR,
        ["SIGSEGV", "64x1000"],
    ),
    "death at import": (
        "import os\nos._exit(7)\n",
        Stage.BUILD,
        Status.RUNTIME_ERROR,
        ["importing the file", "status 7"],
    ),
    "secret include": (
        CUDA.replace("cuda_bf16.h", "/etc/passwd"),
        Stage.BUILD,
        Status.COMPILE_ERROR,
        ["/etc/passwd"],
    ),
}


@pytest.mark.parametrize("name", REJECTED)
def test_rejected_with_line_and_remedy(builder, name):
    source, stage, status, parts = REJECTED[name]
    answer = builder.build(request(source, allow=("aten::mul",)))
    assert isinstance(answer, Rejected), answer
    assert (answer.stage, answer.status) == (stage, status), answer
    assert stage is not Stage.PARSE or answer.case is None, "the whole file's, and no case's"
    for part in parts:
        assert part in answer.message, answer.message


def test_one_case_may_do_without_a_launch(builder):
    body = "    if x.shape[0] == 3:\n        return torch.ones_like(x)\n"
    answer = builder.build(request(TRITON.replace("def softmax(x):\n", f"def softmax(x):\n{body}")))
    assert isinstance(answer, Built), answer
    assert not answer.plans[0, "3x17"].launches


def test_a_cpp_error_and_the_wrong_language(builder):
    answer = builder.build(request(CPP.replace("std::exp", "std::expp"), target="cpu"))
    assert answer.status is Status.COMPILE_ERROR
    assert "line 7" in answer.message
    answer = builder.build(request(CPP))
    assert answer.status is Status.POLICY
    assert "cuda_kernel" in answer.message


def test_endless_host_code_and_imports_are_cut(builder):
    loop = triton_body("    while True:\n        pass\n")
    answer = builder.build(request(loop, wall_limit_s=1.7))
    assert answer.status is Status.TIMEOUT
    answer = builder.build(request("while True:\n    pass\n", wall_limit_s=0.5))
    assert answer.status is Status.TIMEOUT
    assert "importing" in answer.message


BOMB = '''
import torch
from kagent_sandbox.lang import cpp_kernel

TUNE = {"N": [0, 9]}
N = 0
SOURCE = r"""
#define A(x) x x x x x x x x
extern "C" void k(float* y) {
#if N
  A(A(A(A(A(A(A(A(y[0] += 1;))))))))
#endif
  y[0] = 1;
}
"""


def softmax(x):
    y = torch.empty_like(x)
    cpp_kernel("k", SOURCE, defines={"N": N})(y)
    return y
'''


def test_a_slow_configuration_is_dropped_and_a_slow_default_rejected(builder):
    # of CPU time: enough for the plain kernel, of 0.2 s, also on a slow machine
    built = builder.build(request(BOMB, target="cpu", max_configs=2, compile_limit_s=1.0))
    assert isinstance(built, Built), built
    assert set(built.plans) == {(0, "64x1000"), (0, "3x17")}
    assert len(built.dropped) == 1
    assert "took longer than 1 s" in built.dropped[0]
    answer = builder.build(
        request(BOMB.replace("\nN = 0", "\nN = 9"), target="cpu", compile_limit_s=1.0)
    )
    assert answer.status is Status.TIMEOUT
    assert "kernel k" in answer.message


def test_a_configuration_that_fails_is_listed(builder):
    source = CUDA.replace("[128, 256]", "[128, 2048, 256]")
    built = builder.build(request(source, max_configs=3))
    assert {i for i, _ in built.plans} == {0, 2}
    assert all("2048" in text for text in built.dropped)


ASKING = TRITON.replace(
    "def softmax(x):\n",
    "def softmax(x):\n"
    "    units = torch.cuda.get_device_properties(x.device).multi_processor_count\n"
    "    known = triton.runtime.driver.active.utils.get_device_properties(0)\n"
    "    assert known['multiprocessor_count'] == units\n"
    "    assert 'PCIe' in torch.cuda.get_device_name(0) or units == 132\n",
).replace("_rows[(x.shape[0],)]", "_rows[(units,)]")


def test_a_configuration_that_launches_nothing_is_dropped(builder):
    source = TRITON.replace(
        "    y = torch", "    if WARPS == 8:\n        return torch.empty_like(x)\n    y = torch"
    )
    answer = builder.build(request(source, max_configs=2))
    assert isinstance(answer, Built), answer
    assert set(answer.plans) == {(0, c.name) for c in CASES}
    assert answer.dropped == ("{'WARPS': 8}: launches no kernel in any case",)


def test_host_code_is_told_of_the_device_that_it_is_judged_on(builder):
    usual = builder.build(request(ASKING))
    assert usual.plans[0, "64x1000"].launches[0].grid == (132, 1, 1)
    facts = DeviceFacts(
        kind="gpu",
        name="NVIDIA H100 PCIe",
        target="sm_90a",
        key="",
        memory_bytes=80 << 30,
        l2_bytes=50 << 20,
        units=114,
        theoretical_gb_per_s=2039.0,
    )
    here = builder.build(request(ASKING, device=facts.device))
    assert here.plans[0, "64x1000"].launches[0].grid == (114, 1, 1)
    assert here.binaries.keys() == usual.binaries.keys()
    assert dataclasses.replace(facts, kind="cpu").device is None


def test_several_at_once(builder):
    from concurrent.futures import ThreadPoolExecutor

    sources = [CPP.replace("std::exp", f"{i} + std::exp") for i in range(4)]
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda s: builder.build(request(s, target="cpu")), sources))
    assert len({a.work_hash for a in answers}) == 4


def test_no_case_sees_another(builder):
    source = CPP.replace(
        "def softmax(x):",
        "SEEN = []\n\n\ndef softmax(x):\n    SEEN.append(1)\n    assert len(SEEN) == 1",
    )
    assert isinstance(builder.build(request(source, target="cpu")), Built)


def test_launches_are_recorded_in_order(builder):
    source = CPP.replace("    return y", "    y.zero_()\n    _rows(x, y, 1, 1)\n    return y")
    built = builder.build(request(source, target="cpu"))
    kinds = [type(op).__name__ for op in built.plans[0, "3x17"].ops]
    assert kinds == ["Alloc", "Launch", "Fill", "Launch"]
    assert all(isinstance(op, Launch) for op in built.plans[0, "3x17"].launches)
