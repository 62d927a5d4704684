"""Compilers and libraries must work inside the confinement exactly as they do outside."""

from pathlib import Path

import pytest
from confined_handlers import ask
from kagent_sandbox.confine import builder_confinement, interpreter_confinement
from kagent_sandbox.process.forkserver import ForkServer

OPENMP = r"""
source = '''
#include <cmath>
#include <immintrin.h>
#include <omp.h>
#include <vector>
extern "C" int run(float* x, int n) {
  int threads = 0;
#pragma omp parallel
  {
#pragma omp single
    threads = omp_get_num_threads();
#pragma omp for simd
    for (int i = 0; i < n; i++) x[i] = 2 * x[i];
  }
  return threads;
}
'''
import ctypes, subprocess
open("k.cpp", "w").write(source)
command = "g++ -O3 -march=native -fopenmp -shared -fPIC k.cpp -o k.so".split()
subprocess.run(command, check=True)
x = (ctypes.c_float * 1000)(*[1.0] * 1000)
threads = ctypes.CDLL("./k.so").run(x, 1000)
result = [threads == len(os.sched_getaffinity(0)), sum(x)]
"""
TRITON = """
import importlib.util
open("kernel.py", "w").write('''
import triton
import triton.language as tl

@triton.jit
def add(x, y, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(y + i, tl.load(x + i, mask=i < n) + 1, mask=i < n)
''')
spec = importlib.util.spec_from_file_location("kernel", "kernel.py")
kernel = importlib.util.module_from_spec(spec)
spec.loader.exec_module(kernel)
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
types = {"x": "*fp32", "y": "*fp32", "n": "i32", "B": "constexpr"}
source = ASTSource(kernel.add, types, {(3,): 256})
compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32))
result = [compiled.asm["cubin"][:4] == b"\\x7fELF", os.listdir("triton") != []]
"""
NVRTC = """
from cuda.core import Program, ProgramOptions
source = 'extern "C" __global__ void k(float* x) { x[threadIdx.x] = 1; }'
code = Program(source, "c++", ProgramOptions(arch="sm_90a")).compile("cubin").code
result = code[:4] == b"\\x7fELF"
"""
TORCH = """
import torch
a = torch.ones(300, 300)
result = [(a @ a).sum().item(), a.bfloat16().matmul(a.bfloat16()).float().sum().item()]
"""


@pytest.fixture(scope="module")
def server():
    with ForkServer(
        "confined_handlers:execute",
        preload=["torch", "triton", "numpy"],
        confinement=builder_confinement(),
    ) as server:
        yield server


@pytest.fixture
def child(server):
    with server.spawn(wall_limit_s=100.0) as child:
        yield child


def test_the_process_that_forks_stays_single_threaded(server, child):
    assert ask(child, "result = 1") == 1
    status = Path(f"/proc/{server._process.pid}/status").read_text()
    assert "\nThreads:\t1\n" in status


def test_gcc_and_openmp(child):
    assert ask(child, OPENMP) == [True, 2000.0]


def test_triton_compiles_for_a_gpu(child):
    assert ask(child, TRITON) == [True, True]


def test_nvrtc_compiles_for_a_gpu(child):
    assert ask(child, NVRTC) is True


def test_torch_computes_in_parallel(child):
    assert ask(child, TORCH) == [27e6, 27e6]


def test_compilers_cannot_include_secrets(child, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("int key = 42;")
    secret.chmod(0o666)
    source = f"""
import subprocess
open("a.cpp", "w").write('#include "{secret}"')
open("b.cpp", "w").write('asm(".incbin \\\\"{secret}\\\\"");')
run = lambda f: subprocess.run(["g++", "-c", f], capture_output=True, text=True)
result = [run(f).returncode == 0 for f in ("a.cpp", "b.cpp")]
"""
    assert ask(child, source) == [False, False]


ASKING = {
    "include": ("cpp", '#include "PATH"'),
    "macro": ("cpp", '#define F "PATH"\n#include F'),
    "dependency": ("cpp", '#pragma GCC dependency "PATH"'),
    "assembler's include": ("cpp", 'asm(".include \\"PATH\\"");'),
    "assembler's data": ("cpp", 'asm(".incbin \\"PATH\\"");'),
    "include of CUDA": ("cuda", '#include "PATH"'),
}


@pytest.mark.parametrize("way", ASKING)
def test_what_a_compiler_says_of_a_path_outside_does_not_depend_on_it(child, tmp_path, way):
    """Forbidden, missing, a folder, behind a file: one message."""
    language, asking = ASKING[way]
    secret = tmp_path / "secret"
    secret.write_text("#error top secret\n")
    compiler = "compile_cpp" if language == "cpp" else "compile_cuda"
    target = "" if language == "cpp" else ", 'sm_90a'"
    texts = set()
    for path in ("/etc/shadow", "/etc/shadow/x", "/etc", "/etc/absent", str(secret)):
        source = asking.replace("PATH", path) + '\nextern "C" void k(float* x) {}\n'
        module = "cpp" if language == "cpp" else "cuda"
        said = ask(
            child,
            f"from kagent_sandbox.builder.compile.{module} import *\n"
            f"try:\n    {compiler}('k', {source!r}{target}); result = 'compiled'\n"
            "except Exception as e:\n    result = f'{type(e).__name__}: {e}'",
        )
        assert said.startswith("CompileError"), said
        texts.add(said.replace(path, "PATH"))
    assert len(texts) == 1, texts


def test_an_endless_include_is_cut_by_the_limits(child):
    source = """
import subprocess
open("a.cpp", "w").write('#include "/dev/zero"')
result = subprocess.run(["g++", "-c", "a.cpp"], capture_output=True).returncode
"""
    assert ask(child, source) not in (0, None)


def test_numpy_and_torch_work_where_no_program_may_start():
    with (
        ForkServer(
            "confined_handlers:execute",
            preload=["torch", "numpy"],
            confinement=interpreter_confinement(),
        ) as server,
        server.spawn(wall_limit_s=60.0) as child,
    ):
        assert ask(child, TORCH) == [27e6, 27e6]
