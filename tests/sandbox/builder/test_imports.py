"""What a C++ kernel's library may import."""

import pytest
from kagent_sandbox.builder.binary.linked_libraries import asked_of_surroundings, forbidden_import
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
    assert asked_of_surroundings(compiled()) is None


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize(
    ("include", "used", "named"),
    [
        ("cstdlib", 'if (std::getenv("HOME")) y[0] = 1;', "getenv"),
        ("unistd.h", "if (environ[0]) y[0] = 1;", "environ"),
        ("unistd.h", "y[0] = getppid();", "getppid"),
        ("unistd.h", "y[0] = syscall(39);", "syscall"),
        ("ctime", "y[0] = std::time(nullptr);", "time"),
        (
            "chrono",
            "y[0] = std::chrono::steady_clock::now().time_since_epoch().count();",
            "_ZNSt6ch",
        ),
        ("random", "y[0] = std::random_device()();", "_ZNSt13random_device"),
        ("fstream", 'std::ifstream at("/etc/passwd"); y[0] = at.get();', "_ZNSt13basic_filebuf"),
        ("fcntl.h", 'y[0] = open("/", 0);', "open"),
        ("cstdio", 'y[0] = std::fopen("/tmp/x", "r") != nullptr;', "fopen"),
        ("sys/stat.h", 'struct stat at; y[0] = stat("/home", &at);', "stat"),
        ("sys/prctl.h", "y[0] = prctl(PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0);", "prctl"),
        ("thread", "std::this_thread::sleep_for(std::chrono::seconds(1));", ""),
        ("unordered_map", "y[0] = omp_get_wtime();", "omp_get_wtime"),
    ],
)
def test_questions_about_the_surroundings_are_named(include, used, named):
    found = asked_of_surroundings(compiled(f"#include <{include}>", used))
    assert found is not None
    assert named in found


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
