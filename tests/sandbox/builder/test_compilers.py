"""NVRTC and g++ for real; no GPU is needed."""

import pytest
from kagent_sandbox.builder.binary.inspect import (
    InspectError,
    architecture,
    cpp_parameters,
    kernel_info,
)
from kagent_sandbox.builder.compile.cpp import compile_cpp
from kagent_sandbox.builder.compile.cuda import compile_cuda
from kagent_sandbox.data.verdict import Status
from kagent_sandbox.runtime import cutlass, nvrtc
from kagent_sandbox.runtime.errors import CompileError, HeadersMissing

TARGETS = ("sm_80", "sm_90a", "sm_100")

PLAIN = """
#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
extern "C" __global__ void k(const float4* x, __nv_bfloat16* y, int64_t n, half h) {
  float4 v = x[threadIdx.x];
  y[threadIdx.x] = __float2bfloat16(v.x + v.y + v.z + v.w + float(n) + __half2float(h));
}
"""
SUMS = """
extern "C" __global__ void k(const float4* x, float* y, long long n) {
  float4 v = x[threadIdx.x];
  y[threadIdx.x] = v.x + v.y + v.z + v.w + float(n);
}
"""
TENSOR_CORES = """
#include <mma.h>
using namespace nvcuda;
extern "C" __global__ void k(const half* a, const half* b, float* c) {
  wmma::fragment<wmma::matrix_a, 16, 16, 16, half, wmma::row_major> fa;
  wmma::fragment<wmma::matrix_b, 16, 16, 16, half, wmma::col_major> fb;
  wmma::fragment<wmma::accumulator, 16, 16, 16, float> fc;
  wmma::fill_fragment(fc, 0.0f);
  wmma::load_matrix_sync(fa, a, 16);
  wmma::load_matrix_sync(fb, b, 16);
  wmma::mma_sync(fc, fa, fb, fc);
  wmma::store_matrix_sync(c, fc, 16, wmma::mem_row_major);
}
"""
GROUPS = """
#include <cooperative_groups.h>
#include <cooperative_groups/reduce.h>
namespace cg = cooperative_groups;
extern "C" __global__ void k(float* x) {
  auto warp = cg::tiled_partition<32>(cg::this_thread_block());
  x[blockIdx.x] = cg::reduce(warp, x[threadIdx.x], cg::plus<float>());
  cg::this_grid().sync();
}
"""
CLUSTER = """
#include <cooperative_groups.h>
namespace cg = cooperative_groups;
extern "C" __global__ void k(float* x) {
  extern __shared__ float s[];
  auto cluster = cg::this_cluster();
  s[threadIdx.x] = x[threadIdx.x];
  cluster.sync();
  x[threadIdx.x] = *cluster.map_shared_rank(s, (cluster.block_rank() + 1) % cluster.num_blocks());
  cluster.sync();
}
"""
BARRIER = """
#include <cuda/barrier>
#include <cuda/pipeline>
#include <limits>
#include <type_traits>
static_assert(std::numeric_limits<int>::max() > 0 && std::is_same<int, int>::value, "libcu++'s");
extern "C" __global__ void k(float* x) {
  __shared__ cuda::barrier<cuda::thread_scope_block> bar;
  __shared__ alignas(16) float s[128];
  if (threadIdx.x == 0) init(&bar, blockDim.x);
  __syncthreads();
  cuda::memcpy_async(s + threadIdx.x, x + threadIdx.x, sizeof(float), bar);
  bar.arrive_and_wait();
  x[threadIdx.x] = s[127 - threadIdx.x];
}
"""
TMA = """
#include <cuda.h>
extern "C" __global__ void k(const __grid_constant__ CUtensorMap map, float* y, int n) {
  __shared__ alignas(128) float tile[1024];
  __shared__ alignas(8) unsigned long long bar;
  unsigned b = __cvta_generic_to_shared(&bar), t = __cvta_generic_to_shared(tile);
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(b));
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], 4096;" ::"r"(b));
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
        " [%0], [%1, {%2, %3}], [%4];" ::"r"(t), "l"(&map), "r"(0), "r"(n), "r"(b) : "memory");
  }
  y[threadIdx.x] = tile[threadIdx.x];
}
"""
WGMMA = """
extern "C" __global__ void k(float* y, unsigned long long a, unsigned long long b) {
  float d[4] = {0, 0, 0, 0};
  asm volatile("wgmma.fence.sync.aligned;");
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0,%1,%2,%3}, %4, %5, 1, 1, 1, 0, 0;"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "l"(a), "l"(b));
  asm volatile("wgmma.commit_group.sync.aligned;");
  asm volatile("wgmma.wait_group.sync.aligned 0;");
  y[threadIdx.x] = d[0] + d[1] + d[2] + d[3];
}
"""


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize(
    ("source", "target"),
    [
        *((s, t) for s in (PLAIN, TENSOR_CORES, GROUPS) for t in TARGETS),
        *((s, t) for s in (CLUSTER, TMA) for t in TARGETS[1:]),
        (BARRIER, "sm_90a"),
        (WGMMA, "sm_90a"),
    ],
)
def test_headers_and_inline_ptx(source, target):
    built = compile_cuda("k", source, target)
    assert architecture(built.cubin) == int(target[3:].rstrip("a"))
    info = kernel_info(built.cubin, built.symbol, "cuda")
    assert info.registers > 0
    assert info.name == "k"
    if source is PLAIN:
        assert info.param_bytes == (8, 8, 8, 2)
        assert info.load_bytes == {16: 1}
    if source is TMA:
        assert info.param_bytes == (128, 8, 4)
        assert info.static_shared_bytes >= 4096


def test_an_instance_of_a_template():
    source = "template <int N, class T> __global__ void rows(T* x) { x[threadIdx.x] = N; }"
    built = compile_cuda("rows<128, float>", source, "sm_90a")
    assert "rows" in built.symbol
    assert kernel_info(built.cubin, built.symbol, "cuda").param_bytes == (8,)


@pytest.mark.parametrize(
    ("source", "status", "parts"),
    [
        (
            'extern "C" __global__ void k(float* x) {\n  x[0] = y;\n  x[1] = z;\n}',
            Status.COMPILE_ERROR,
            ["line 2", 'identifier "y" is undefined', "2 | x[0] = y;"],
        ),
        (
            "#include <torch/extension.h>\n",
            Status.COMPILE_ERROR,
            ["line 1", "torch/extension.h", "can be included"],
        ),
        (
            'extern "C" __global__ void other(float* x) {}',
            Status.COMPILE_ERROR,
            ["no kernel k", "it has other"],
        ),
        (
            'extern "C" __global__ void k(float* x) {\n'
            '  asm volatile("nope.f32 %0, %0;" : "+f"(x[0]));\n}',
            Status.COMPILE_ERROR,
            ["line 2", "'nope'"],
        ),
        (
            'extern "C" __global__ void k(float* x) {\n  __shared__ float s[100000];\n'
            "  s[threadIdx.x] = x[0];\n  __syncthreads();\n  x[1] = s[threadIdx.x ^ 1];\n}",
            Status.RESOURCE_LIMIT,
            ["400000 bytes", "at most 232448"],
        ),
    ],
)
def test_a_refused_cuda_source_names_its_line(source, status, parts):
    with pytest.raises(CompileError) as caught:
        compile_cuda("k", source, "sm_90a")
    assert caught.value.over_limit is (status is Status.RESOURCE_LIMIT)
    for part in parts:
        assert part in str(caught.value)


def test_what_an_architecture_lacks_is_said():
    with pytest.raises(CompileError, match=r"line 4: ptxas for sm_80: .*wgmma"):
        compile_cuda("k", WGMMA, "sm_80")


@pytest.mark.parametrize("option", ["-include", "--include-path=/etc", "@file", "-arch=sm_80"])
def test_hostile_cuda_options_are_refused(option):
    with pytest.raises(CompileError, match="is not allowed"):
        compile_cuda("k", PLAIN, "sm_90a", [option])


def test_options_and_defines_change_the_code():
    source = 'extern "C" __global__ void k(float* x) { x[0] = __expf(x[0]) / N; }'
    builds = [
        compile_cuda("k", source, "sm_90a", options, {"N": n})
        for options, n in (((), 3), (("--use_fast_math",), 3), ((), 5))
    ]
    codes = {kernel_info(b.cubin, b.symbol, "cuda").code for b in builds}
    assert len(codes) == 3


@pytest.mark.parametrize("target", TARGETS[1:])
def test_equal_machine_code_is_recognised_under_another_name(target):
    first = compile_cuda("k", SUMS, target)
    other = compile_cuda("renamed", SUMS.replace(" k(", " renamed("), target, ["-lineinfo"])
    second = compile_cuda("k", "// moved down\n\n" + SUMS, target)
    one, two, three = (kernel_info(b.cubin, b.symbol, "cuda") for b in (first, other, second))
    assert one == three
    assert one.code == two.code
    assert one.hash != two.hash
    changed = compile_cuda("k", SUMS.replace("v.z + v.w", "v.z - v.w"), target)
    assert kernel_info(changed.cubin, "k", "cuda").code != one.code


# -- C++ -----------------------------------------------------------------------------------------

CPP = """
#include <cmath>
#include <cstdint>
using real = float;
extern "C" void k(const real* __restrict__ x, float* y, std::int64_t n, const int m, float s,
                  double d, bool b, std::size_t q, std::uint8_t u) {
#pragma omp parallel for simd
  for (std::int64_t i = 0; i < n; ++i) y[i] = std::exp(x[i]) * s;
}
"""


def test_cpp_signature_is_the_compilers():
    binary = compile_cpp("k", CPP)
    assert cpp_parameters(binary) == (None, None, "i64", "i32", "f32", "f64", "i1", "u64", "u8")
    assert kernel_info(binary, "k", "cpp").param_bytes == (8, 8, 8, 4, 4, 8, 1, 8, 1)


def test_cpp_builds_are_deterministic_and_hold_no_paths(tmp_path):
    binary = compile_cpp("k", CPP, folder=tmp_path)
    assert binary == compile_cpp("k", CPP)
    assert str(tmp_path).encode() not in binary
    renamed = compile_cpp("kk", CPP.replace(" k(", " kk("))
    one, two = kernel_info(binary, "k", "cpp"), kernel_info(renamed, "kk", "cpp")
    assert one.code == two.code
    assert one.hash != two.hash


@pytest.mark.parametrize(
    ("source", "parts"),
    [
        (
            '#include <vector>\nextern "C" void k(float* x) {\n  x[0] = y;\n}',
            ["line 3", "'y' was not declared", "3 | x[0] = y;"],
        ),
        ('extern "C" void k(float* x) { for (;;) {\n', ["closing brace"]),
        ('extern "C" void other(float* x) {}', ["no function k", "it has other"]),
        ('void g();\nextern "C" void k(float* x) { g(); }', ["undefined reference to `g()'"]),
        ('#include "/etc/nothing.h"\nextern "C" void k() {}', ["line 1", "/etc/nothing.h"]),
        (
            '#include <algorithm>\n#include <vector>\nstruct S {};\nextern "C" void k(float* x) {\n'
            "  std::vector<S> v;\n  std::sort(v.begin(), v.end());\n}",
            ["line 6", "std::sort(v.begin(), v.end());"],
        ),
    ],
)
def test_a_refused_cpp_source_names_its_line(source, parts):
    with pytest.raises(CompileError) as caught:
        compile_cpp("k", source)
    for part in parts:
        assert part in str(caught.value)


def test_a_flood_of_errors_is_cut():
    with pytest.raises(CompileError) as caught:
        compile_cpp("k", '#error "\x1b[31m' + "x" * 100_000 + '"')
    assert len(str(caught.value)) < 4000
    assert "\x1b" not in str(caught.value)


@pytest.mark.parametrize(
    "option",
    ["-fplugin=x.so", "-B/tmp", "@x", "-wrapper", "-include", "-Wl,-z,now", "-fdump-tree-all"],
)
def test_hostile_cpp_options_are_refused(option):
    with pytest.raises(CompileError, match="is not allowed"):
        compile_cpp("k", CPP, [option])


def test_a_kernel_without_c_linkage_or_with_structs_is_refused():
    mangled = compile_cpp("k", "void k(float* x) {}")
    with pytest.raises(InspectError, match='extern "C"'):
        kernel_info(mangled, "k", "cpp")
    struct = compile_cpp("k", 'struct A { int a[9]; }; extern "C" void k(A a) {}')
    with pytest.raises(InspectError, match="parameter 1"):
        kernel_info(struct, "k", "cpp")


CUTE = """
#include <cute/layout.hpp>
using namespace cute;
extern "C" __global__ void k(int* x) {
  auto layout = make_layout(make_shape(Int<4>{}, Int<8>{}));
  for_each(make_int_sequence<3>{}, [&](auto i) { x[layout(threadIdx.x, i)] = i; });
}
"""


def test_headers_of_cutlass_are_found_and_mended():
    if cutlass.find_headers() is None:
        pytest.skip("not installed: nvidia-cutlass")
    assert nvrtc.compiler_version(CUTE) == f"{nvrtc.nvrtc_version()}-cutlass-4.2.0"
    assert nvrtc.compiler_version(PLAIN) == nvrtc.nvrtc_version()
    built = compile_cuda("k", CUTE, "sm_90a")
    assert kernel_info(built.cubin, "k", "cuda").param_bytes == (8,)
    assert not built.log


def test_without_cutlass_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setattr(cutlass, "find_headers", lambda: None)
    cutlass.headers.cache_clear()
    try:
        with pytest.raises(CompileError) as error:
            compile_cuda("k", CUTE, "sm_90a")
        assert str(error.value) == (
            "kernel k: cute/layout.hpp: the headers of CUTLASS and CuTe are not installed: install "
            "them with `pip install nvidia-cutlass==4.2.0.0`"
        )
        with pytest.raises(HeadersMissing, match="pip install nvidia-cutlass"):
            nvrtc.compiler_version(CUTE)
    finally:
        cutlass.headers.cache_clear()
