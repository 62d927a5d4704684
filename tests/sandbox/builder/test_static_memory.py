"""Static memory of kernels' binaries: g++ and NVRTC for real; no GPU is needed."""

import dataclasses
import re

import pytest
from kagent_sandbox.builder.binary.inspect import kernel_info
from kagent_sandbox.builder.binary.static_memory import (
    MOST_SHARED_BYTES,
    MOST_THREAD_BYTES,
    excess_static,
)
from kagent_sandbox.builder.compile.cpp import compile_cpp
from kagent_sandbox.builder.compile.cuda import compile_cuda
from kagent_sandbox.builder.validate import Forged, checked_plan
from kagent_sandbox.data.build import BuildCase, BuildRequest, TensorSpec
from kagent_sandbox.data.plan import Alloc, Buffer, Launch, Plan, Pointer, TensorRef
from kagent_sandbox.data.plan_json import dump_plan

CPP = '%s extern "C" void k(const float* x, float* y) { %s }'
CUDA = "%s __global__ void k(const float* x, float* y) { %s }"
FEW, MANY = 64, MOST_SHARED_BYTES // 4 + 1
EVERYTHING = """
#include <functional>
#include <iostream>
#include <mutex>
#include <regex>
#include <sstream>
#include <vector>
static std::mutex lock;
struct One { virtual float of(float x) { return x; } };
struct Two : One { float of(float x) override { return 2 * x; } };
"""


def cpp(before, body):
    return compile_cpp("k", CPP % (before, body))


def cuda(before, body):
    return compile_cuda("k", CUDA % (before, body), "sm_90a").cubin


USE = "w[(int)x[0]] = x[1]; y[0] = w[(int)x[2]];"
READ = "y[0] = w[(int)x[2]];"
HONEST = {
    "nothing": (cpp, "", "y[0] = x[0];"),
    "a table": (cpp, "static constexpr float w[100000] = {1, 2, 3};", READ),
    "few": (cpp, f"static float w[{FEW}];", USE),
    "a tile": (cpp, f"static thread_local float w[{MOST_THREAD_BYTES // 4}];", USE),
    "the library": (
        cpp,
        EVERYTHING,
        "std::lock_guard<std::mutex> own(lock); static std::vector<float> v(9);"
        ' std::regex r("a+"); std::ostringstream s; s << x[0]; std::cout << s.str();'
        " One* o = x[0] > 1 ? new One : new Two; y[0] = o->of(v[3]); delete o;"
        " if (std::regex_match(s.str(), r)) y[1] = 1;\n"
        "#pragma omp parallel for\n for (int i = 0; i < 9; ++i) y[i] = x[i];",
    ),
    "nothing, CUDA": (cuda, "", "y[0] = x[0];"),
    "a table, CUDA": (cuda, "__constant__ float w[10000] = {1, 2, 3};", READ),
    "few, CUDA": (cuda, f"__device__ float w[{FEW}];", USE),
    "shared, CUDA": (cuda, "", f"__shared__ float w[10000]; {USE}"),
    "the library, CUDA": (
        cuda,
        "",
        'printf("%f", x[0]); assert(x[1] > 0); y[0] = tgamma((double)x[0]) + sin(1e9 * x[1]);',
    ),
}
TOO_MUCH = {
    "zero": (cpp, f"static float w[{MANY}];", USE, r"\.bss"),
    "not zero": (cpp, f"static float w[{MANY}] = {{1}};", USE, r"\.data"),
    "a section": (
        cpp,
        f'__attribute__((section(".got.own"))) static float w[{MANY}] = {{1}};',
        USE,
        r"\.got\.own",
    ),
    "per thread": (
        cpp,
        f"static thread_local float w[{MOST_THREAD_BYTES // 4 + 1}];",
        USE,
        r"\.tbss",
    ),
    "zero, CUDA": (cuda, f"__device__ float w[{MANY}];", USE, r"\.nv\.global"),
    "not zero, CUDA": (cuda, f"__device__ float w[{MANY}] = {{1}};", USE, r"\.nv\.global\.init"),
    "managed, CUDA": (cuda, f"__device__ __managed__ float w[{MANY}];", USE, r"\.nv\.global"),
}


@pytest.mark.parametrize("name", HONEST)
def test_what_honest_kernels_have_is_little(name):
    compiled, before, body = HONEST[name]
    assert excess_static(compiled(before, body), "k") is None


@pytest.mark.parametrize("name", TOO_MUCH)
def test_memory_that_calls_share_is_found_where_it_is(name):
    compiled, before, body, section = TOO_MUCH[name]
    found = excess_static(compiled(before, body), "k")
    assert found is not None
    problem, remedy = found
    assert re.search(rf"kernel k has \d+ bytes .* in section {section}\)", problem), problem
    assert "torch.empty" in remedy


def test_a_plan_with_such_a_kernel_is_not_taken():
    """A builder that was taken over sends it, though host code was refused."""
    x = TensorSpec("x", (4,), (1,), "float32")
    case = BuildCase("c", (x,), (dataclasses.replace(x, name="y"),))
    request = BuildRequest("def f(x):\n    return x\n", "f", "cpu", (case,))
    for before in ("", f"static float w[{MANY}];"):
        binary = cpp(before, USE if before else "y[0] = x[0];")
        info = kernel_info(binary, "k", "cpp")
        launch = Launch(info.hash, (1, 1, 1), (1, 1, 1), (Pointer(0, 0), Pointer(1, 0)))
        result = TensorRef(1, 0, (4,), (1,), "float32")
        buffers = (Buffer(0, "input", 16, "x"), Buffer(1, "scratch", 16))
        data = dump_plan(Plan("cpu", buffers, (Alloc(1), launch), (result,), (info,)))
        if not before:
            checked_plan(data, {info.hash: binary}, case, request)
            continue
        with pytest.raises(Forged, match="static memory"):
            checked_plan(data, {info.hash: binary}, case, request)
