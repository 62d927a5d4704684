"""Variables of CUDA modules: NVRTC for real; no GPU is needed."""

import pytest
from kagent_sandbox.builder.compile.cuda import compile_source
from kagent_sandbox.builder.policy import BuildRejected
from kagent_sandbox.data.verdict import Status
from kagent_sandbox.runtime.source import Source

KERNEL = "%s __global__ void k(const float* x, float* y) { %s }"
PICK = "__device__ const int& least(const int& a, const int& b) { return a < b ? a : b; }"
TRAITS = """
template <typename A, typename B> struct Same { static constexpr bool value = false; };
template <int N> struct Zero { static constexpr int value = 0; };
"""
NONE = {
    "nothing": ("", "y[0] = x[0];"),
    "a table": ("__constant__ float t[4] = {1, 2};", "y[0] = t[(int)x[0]];"),
    "a table of zeros": ("__constant__ float t[4];", "y[0] = t[(int)x[0]];"),
    "contents": ("__device__ const float t[4] = {1, 2};", "y[0] = t[(int)x[0]];"),
    "shared": ("", "__shared__ float t[64]; t[threadIdx.x] = x[0]; y[0] = t[(int)x[1]];"),
    "traits": (TRAITS, "if (!Same<int, float>::value) y[0] = x[Zero<3>::value];"),
    "a constant by reference": (TRAITS + PICK, "y[0] = x[least(Zero<3>::value, threadIdx.x)];"),
    "one that nothing uses": ("__device__ int n;", "y[0] = x[0];"),
    "the library": (
        "#include <cuda/barrier>\n#include <cuda/ptx>\n#include <cuda/std/tuple>\n",
        'printf("%f", x[0]); assert(x[1] > 0); y[0] = tgamma((double)x[0]) + sin(1e9 * x[1]);',
    ),
}
SOME = {
    "a workspace": (
        "__device__ float own[70000];",
        "own[blockIdx.x] = x[0]; y[0] = own[3];",
        "own",
    ),
    "managed": ("__device__ __managed__ float own[3];", "y[0] = own[(int)x[0]]++;", "own"),
    "zeros": ("__device__ unsigned own = 0;", "y[0] = atomicAdd(&own, 1);", "own"),
    "of a function": ("", "static __device__ unsigned own; y[0] = atomicAdd(&own, 1);", "own"),
    "in a namespace": ("namespace { __device__ int own[3]; }", "y[0] = own[(int)x[0]]++;", "own"),
    "a structure": ("struct Two { float a, b; }; __device__ Two own;", "own.a = x[0];", "own"),
    "a vector": ("__device__ float4 own;", "own.x += x[0]; y[0] = own.x;", "own"),
    "volatile": ("__device__ volatile int own;", "own = 1; y[0] = own;", "own"),
    "of a template": (
        "template <int N> __device__ unsigned own;",
        "y[0] = atomicAdd(&own<2>, 1);",
        "own",
    ),
    "in PTX": (
        "",
        'unsigned n; asm volatile("{.global .u32 own; atom.global.add.u32 %0, [own], 1;}" '
        ': "=r"(n)); y[0] = n;',
        "own",
    ),
    "in PTX, after others": (
        "",
        'unsigned n; asm volatile("{.global /* a word */ .u32 a[2] = {1, 2}, b = 3, own; '
        'atom.global.add.u32 %0, [own], 1;}" : "=r"(n)); y[0] = n;',
        "own",
    ),
}


def compiled(before, body):
    return compile_source(Source("cuda", "k", KERNEL % (before, body)), "sm_90a")


@pytest.mark.parametrize("name", NONE)
def test_what_calls_may_share_is_compiled(name):
    assert compiled(*NONE[name])


@pytest.mark.parametrize("name", SOME)
def test_a_variable_is_refused_by_its_name(name):
    before, body, variable = SOME[name]
    with pytest.raises(BuildRejected, match=rf"kernel k uses .* variable {variable}: ") as refused:
        compiled(before, body)
    assert refused.value.status is Status.POLICY
    assert "torch.zeros" in refused.value.message
