"""A library's own test of what it leaves of its caller's process: it notices bad guests."""

import os
import re
import subprocess
import sys

import pytest
from kagent.export.writing import write_library
from made_library import cpu_library

NAME = "guests_library"
LOADED = "#include <csignal>\n__attribute__((constructor)) static void at_load() { %s }\n"
FLUSHES = """
#ifdef __x86_64__
  __builtin_ia32_ldmxcsr(__builtin_ia32_stmxcsr() | 0x8040);
#else
  __builtin_aarch64_set_fpcr(__builtin_aarch64_get_fpcr() | 1 << 24);
#endif
"""
BAD = {
    "flushes": ("", FLUSHES, "1e-310 \\* 1, a subnormal number: 0.0"),
    "flushes elsewhere": (
        "#include <omp.h>\n",
        "\n#pragma omp parallel\n  if (omp_get_thread_num()) {" + FLUSHES + "}\n",
        "1e-40 \\* 1 in float32",
    ),
    "rounds": ("#include <cfenv>\n", "fesetround(FE_UPWARD);", "control words"),
    "handles": (LOADED % "std::signal(SIGUSR1, [](int) {});", "", "the handler of signal 10"),
    "keeps": ("", "static void* volatile kept; kept = std::malloc(4096);", "keeps memory"),
    "opens": ("#include <fcntl.h>\n", 'open("/dev/null", 0);', "open files"),
    "writes": ("", "{ float* volatile p = (float*)x; *p = *(volatile float*)p; }", "softmax, cpu"),
}


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    folder = tmp_path_factory.mktemp("library") / NAME
    write_library(cpu_library(NAME), folder, cubins={})
    return folder


def visited(library, home, task="softmax"):
    env = {**os.environ, "XDG_CACHE_HOME": str(home)}
    command = [sys.executable, "tests/visit.py", task]
    return subprocess.run(
        command, cwd=library, env=env, capture_output=True, text=True, timeout=120, check=False
    )


def test_a_good_guest_leaves_everything_as_it_was(library, tmp_path):
    done = visited(library, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", BAD)
def test_a_bad_guest_is_noticed(library, tmp_path, name):
    head, in_call, says = BAD[name]
    (path,) = library.glob(f"torch-ext/{NAME}/kernels/softmax_*.py")
    good = path.read_text()
    bad = good.replace('extern "C" void', head + 'extern "C" void', 1)
    bad = re.sub(r'(extern "C" void softmax_rows\([^)]*\) \{)', lambda m: m[1] + in_call, bad)
    assert bad != good
    try:
        path.write_text(bad)
        done = visited(library, tmp_path)
    finally:
        path.write_text(good)
    assert done.returncode == (-11 if name == "writes" else 1), done.stdout + done.stderr
    assert re.search(says, done.stdout), done.stdout
