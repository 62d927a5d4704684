"""What is built neither changes the process that loads it nor depends on where and when it was
built. g++, NVRTC and Triton for real; no GPU is needed.
"""

import ctypes
import os
import platform
import re
import struct
import subprocess
import sys
import textwrap

import pytest
from kagent_sandbox.builder.binary.inspect import kernel_info
from kagent_sandbox.builder.compile.cpp import compile_cpp
from kagent_sandbox.builder.compile.cuda import compile_cuda
from kagent_sandbox.runtime.cpp_options import FAST
from kagent_sandbox.runtime.errors import CompileError

PT_GNU_STACK = 0x6474E551
CPP = 'extern "C" void k(float* x) { x[0] += 1; }'


@pytest.mark.parametrize(
    "option",
    [
        "-ffast-math", "-Ofast", "-funsafe-math-optimizations", "-mdaz-ftz", "-mpc32", "-mpc80",
        "-fsplit-stack", "-fgnu-tm", "-fopenacc", "-finstrument-functions", "-mcmodel=large",
        "-ftree-parallelize-loops=4", "-fvtable-verify=std", "-mveclibabi=svml", "-ffast-mat",
        "-fno-openmp -Ofast", "-static", "-fwhole-program=1",
    ],
)  # fmt: skip
def test_cpp_options_that_change_the_process_are_refused(option):
    with pytest.raises(CompileError, match="is not allowed"):
        compile_cpp("k", CPP, [option])


def test_no_library_makes_the_stacks_of_its_caller_executable():
    note = r'asm(".pushsection .note.GNU-stack, \"x\", @progbits\n.popsection");'
    binary = compile_cpp("k", note + CPP)
    first, size, count = (
        *struct.unpack_from("<Q", binary, 32),
        *struct.unpack_from("<HH", binary, 54),
    )
    headers = [struct.unpack_from("<II", binary, first + i * size) for i in range(count)]
    (flags,) = [flags for kind, flags in headers if kind == PT_GNU_STACK]
    assert not flags & 1


def test_libraries_of_one_process_do_not_share_their_inline_variables(tmp_path):
    """A case's library or another operator's may have others of the same names."""
    source = """
        inline float table[2] = {FACTOR, FACTOR};
        template <class T> T& counter() { static T made = FACTOR; return made; }
        extern "C" void k(float* x) { x[0] = table[0]; x[1] = counter<float>(); }
    """
    for factor in (1, 2):
        library = tmp_path / f"{factor}.so"
        library.write_bytes(compile_cpp("k", source, defines={"FACTOR": factor}))
        found = (ctypes.c_float * 2)()
        ctypes.CDLL(str(library)).k(found)
        assert list(found) == [factor, factor]


def test_who_wants_fast_math_is_told_what_has_it_without_the_harm():
    with pytest.raises(CompileError, match="turns subnormal numbers to zero") as caught:
        compile_cpp("k", CPP, ["-ffast-math"])
    said = [word for word in str(caught.value).split() if word.startswith("-f")]
    assert "-fassociative-math" in said
    sums = """
        extern "C" void k(const float* x, float* y) {
          float sum = 0;
          for (int i = 0; i < 1024; ++i) sum += x[i];
          y[0] = sum;
        }
    """
    slow, fast = (compile_cpp("k", sums, o) for o in ([], said))
    assert kernel_info(slow, "k", "cpp").code != kernel_info(fast, "k", "cpp").code


@pytest.mark.parametrize(
    "option",
    [
        "-fno-math-errno", "-ffinite-math-only", "-fno-fast-math", "-ffp-contract=off",
        "-funroll-loops", "-fno-tree-vectorize", "-falign-loops=32", "-fvect-cost-model=unlimited",
        "-O1", "-Os", "-std=gnu++20", "-march=native", "-UNDEBUG", "-DVALUE=-Ofast",
    ],
)  # fmt: skip
def test_cpp_options_that_change_the_kernel_alone_are_taken(option):
    assert compile_cpp("k", CPP, [option])


_LOADS = """
import ctypes, struct, sys
def control():
    state = ctypes.create_string_buffer(64)
    ctypes.CDLL("libm.so.6").fegetenv(state)
    return state.raw[:2], struct.unpack_from("I", state.raw, 28)[0] & ~0x3F
before = control()
ctypes.CDLL(sys.argv[1])
sys.exit(control() != before)
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="reads the state of an x86")
@pytest.mark.parametrize("way", ["option", "pragma", "attribute"])
def test_loading_a_library_of_fast_code_leaves_floating_point_as_it_was(way, tmp_path):
    head = '#pragma GCC optimize("Ofast,unsafe-math-optimizations")\n' if way == "pragma" else ""
    mark = '__attribute__((optimize("fast-math")))' if way == "attribute" else ""
    source = head + f'extern "C" {mark} void k(float* x) {{ x[0] += x[1]; }}'
    library = tmp_path / "k.so"
    library.write_bytes(compile_cpp("k", source, FAST if way == "option" else ()))
    subprocess.run([sys.executable, "-c", _LOADS, str(library)], check=True, timeout=60)


@pytest.mark.parametrize(
    "text",
    [
        "const char* t = __DATE__;",
        "\nconst char* t = __TIME__;",
        "const char* t = __TIMESTAMP__;",
        "#define P(a, b) a##b\n#define Q(a, b) P(a, b)\nconst char* t = Q(__DA, TE__);",
        '#pragma push_macro("__TIME__")\n#undef __TIME__\n#pragma pop_macro("__TIME__")\n'
        "const char* t = __TIME__;",
    ],
)
def test_a_cpp_source_does_not_learn_the_day_of_its_build(text):
    with pytest.raises(CompileError, match="day and time") as caught:
        compile_cpp("k", text + '\nextern "C" void k(float*) {}')
    if "##" not in text:
        assert ": line " in str(caught.value)


@pytest.mark.parametrize("options", [["-U__DATE__"], ['-D__DATE__="a day"']])
def test_options_do_not_give_the_day_back(options):
    source = """
        #ifndef __DATE__
        #define __DATE__ "never"
        #endif
        const char t[] = __DATE__; extern "C" void k(float* x) { x[0] = t[1]; }
    """
    assert not re.search(rb"[A-Z][a-z]{2} [ \d]\d 20\d\d", compile_cpp("k", source, options))


@pytest.mark.parametrize(
    "text", ["__DATE__", "__TIME__", "__TI\\\nME__", "__TIMESTAMP__", "DAY", "/* */ __DATE__"]
)
def test_a_cuda_source_does_not_learn_the_day_of_its_build(text):
    source = f"__device__ char t[] = {text};\n__global__ void k(char* y) {{ y[0] = t[1]; }}"
    with pytest.raises(CompileError, match="day and time"):
        compile_cuda("k", source, "sm_90a", defines={"DAY": "__DATE__"} if text == "DAY" else {})


def test_what_a_comment_says_of_the_day_is_nobodys_business():
    source = "// __DATE__\n/* __TIME__\n */ "
    compile_cuda("k", source + "__global__ void k(char* y) { y[0] = 1; }", "sm_90a")
    compile_cpp("k", source + 'extern "C" void k(char* y) { y[0] = 1; }')


_COMPILES = {
    "cpp": """
        from kagent_sandbox.runtime.cpp import compile_cpp
        headers = ("cassert", "cstdio", "vector", "source_location")
        source = "".join(f"#include <{h}>\\n" for h in headers)
        source += 'extern "C" void k(float* x) { assert(x);'
        source += ' static std::vector<int> v(9); x[v[0]] = 1;'
        source += ' std::puts(__FILE__ __BASE_FILE__);'
        source += ' std::puts(std::source_location::current().file_name()); }'
        made = compile_cpp("k", source)
    """,
    "cuda": """
        from kagent_sandbox.runtime.nvrtc import compile_cuda
        source = '#include <cassert>\\n'
        source += '__global__ void k(char* x) { assert(x); x[0] = __FILE__[1]; }'
        made = compile_cuda("k", source, "sm_90a", ["-lineinfo"]).cubin
    """,
    "triton": """
        import triton, triton.language as tl
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource
        import kernel
        types = {"x": "*fp32", "y": "*fp32", "BLOCK": "constexpr"}
        source = ASTSource(fn=kernel.double, signature=types, constexprs={"BLOCK": 128})
        made = triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["cubin"]
    """,
}
_TRITON = """
import triton, triton.language as tl
@triton.jit
def double(x, y, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(y + at, 2 * tl.load(x + at))
"""
_OTHER_DAY = """
#include <sys/time.h>
#include <time.h>
extern "C" time_t time(time_t* t) { time_t n = 1000000000; if (t) *t = n; return n; }
extern "C" int gettimeofday(timeval* t, void*) { t->tv_sec = 1000000000; t->tv_usec = 7; return 0; }
"""


@pytest.mark.nightly
@pytest.mark.parametrize("language", _COMPILES)
def test_a_build_elsewhere_and_on_another_day_gives_the_same_bytes(language, tmp_path):
    clock = tmp_path / "clock.so"
    command = ["g++", "-shared", "-fPIC", "-x", "c++", "-", "-o", clock]
    subprocess.run(command, input=_OTHER_DAY.encode(), check=True, timeout=60)
    made = []
    for folder, more in (("one", {}), ("another/folder", {"LD_PRELOAD": str(clock)})):
        place = tmp_path / folder
        place.mkdir(parents=True)
        (place / "kernel.py").write_text(_TRITON)
        code = textwrap.dedent(_COMPILES[language])
        code += "\nimport sys, time; open('made', 'wb').write(made); print(time.time())"
        (place / "compile.py").write_text(code)
        env = {
            **os.environ, "HOME": str(place), "TMPDIR": str(place), "TRITON_CACHE_DIR": str(place),
            "TRITON_DISABLE_LINE_INFO": "1", **more,
        }  # fmt: skip
        run = [sys.executable, "compile.py"]
        subprocess.run(run, cwd=place, env=env, check=True, timeout=120)
        made.append((place / "made").read_bytes())
    assert made[0] == made[1]
