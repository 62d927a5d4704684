"""What a C++ kernel's library may import."""

import pytest
from kagent_sandbox.builder.binary.linked_libraries import forbidden_import
from kagent_sandbox.builder.compile.cpp import compile_cpp

KERNEL = """
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <unordered_map>
#include <vector>
#include <omp.h>
%s
extern "C" void kernel(const float* x, float* y, int n) {
  std::unordered_map<int, std::vector<float>> seen;
#pragma omp parallel for
  for (int i = 0; i < n; ++i) y[i] = std::exp(x[i]) + omp_get_max_threads();
  if (n < 0) std::fprintf(stderr, "%%zu", seen.size());
  %s
}
"""


def compiled(declared="", used=""):
    return compile_cpp("kernel", KERNEL % (declared, used))


def test_the_languages_own_libraries_are_fine():
    assert forbidden_import(compiled()) is None


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize(
    ("declared", "used", "named"),
    [
        ("#include <dlfcn.h>", 'if (dlsym(RTLD_DEFAULT, "PyRun_SimpleString")) y[0] = 1;', "dlsym"),
        ("#include <dlfcn.h>", 'if (dlopen("libtorch_cpu.so", RTLD_NOW)) y[0] = 1;', "dlopen"),
        (
            'extern "C" __attribute__((weak)) int PyRun_SimpleString(const char*);',
            'if (PyRun_SimpleString) PyRun_SimpleString("");',
            "PyRun_SimpleString",
        ),
        (
            "namespace at { __attribute__((weak)) void softmax(const float*); }",
            "if (at::softmax) at::softmax(x);",
            "_ZN2at7softmaxEPKf",
        ),
        (
            'extern "C" __attribute__((weak)) void cblas_sgemm();',
            "if (cblas_sgemm) cblas_sgemm();",
            "cblas_sgemm",
        ),
        ("#include <malloc.h>", "mallopt(M_MMAP_THRESHOLD, 1 << 30);", "mallopt"),
        ("", "srand(1);", "srand"),
        ("#include <cstdlib>", "y[0] = rand();", "rand"),
        ("#include <stdlib.h>", "y[0] = lrand48();", "lrand48"),
        ("#include <stdlib.h>", "on_exit([](int, void*) {}, 0);", "on_exit"),
    ],
)
def test_ways_to_torch_python_and_the_callers_allocator_are_named(declared, used, named):
    what = forbidden_import(compiled(declared, used))
    assert what is not None
    assert what.startswith(named)


def test_other_libraries_are_named():
    binary = compiled().replace(b"libgomp.so.1\0", b"libevil.so.1\0")
    assert forbidden_import(binary) == "the library libevil.so.1"
