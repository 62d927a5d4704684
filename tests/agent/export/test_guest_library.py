"""A library's own test of what it leaves of its caller's process: it notices bad guests."""

import functools
import os
import re

import pytest
from kagent.export.writing import files_of, write_library
from synthetic_library import cpu_library

NAME = "guests_library"
LOADED = "#include <csignal>\n__attribute__((constructor)) static void at_load() { %s }\n"
FLUSHES = """
#ifdef __x86_64__
  __builtin_ia32_ldmxcsr(__builtin_ia32_stmxcsr() | 0x8040);
#else
  __builtin_aarch64_set_fpcr(__builtin_aarch64_get_fpcr() | 1 << 24);
#endif
"""
INCLUDED = "".join(f"#include <{h}>\n" for h in ("fcntl.h", "omp.h", "thread", "unistd.h"))
HEAD = INCLUDED + (LOADED % "std::signal(SIGUSR1, [](int) {});")
IN_CALL = (
    "static void* volatile kept; kept = std::malloc(4096);"
    'static int opened; if (opened++ < 200) open("/dev/null", 0);'
    "static int started; if (started++ < 200) std::thread(pause).detach();"
    "\n#pragma omp parallel\n  if (omp_get_thread_num()) {" + FLUSHES + "}\n" + FLUSHES
)
SAYS = (
    "1e-310 \\* 1, a subnormal number: 0.0",
    "1e-40 \\* 1 in float32",
    "control words",
    "the handler of signal 10",
    "keeps memory",
    "open files: new: \\[",
    "more threads: \\{",
)
WRITES = "{ float* volatile p = (float*)x; *p = *(volatile float*)p; }"


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    folder = tmp_path_factory.mktemp("library") / NAME
    made = cpu_library(NAME)
    write_library(made, files_of(made, cubins={}), folder)
    return folder


@pytest.fixture
def visited(bare_python, library, tmp_path):
    def run():
        env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
        return bare_python.run("tests/visit.py", "softmax", cwd=library, env=env)

    return run


@pytest.mark.nightly
def test_a_good_guest_leaves_everything_as_it_was(visited):
    done = visited()
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture
def called_together(bare_python, library, tmp_path):
    """Runs the library's test of two threads."""

    def run():
        env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        words = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/test_softmax.py")
        return bare_python.run(*words, "-k", "two_threads", cwd=library, env=env)

    return run


@pytest.fixture
def visited_with(changed, visited):
    return functools.partial(changed, visited)


@pytest.fixture
def changed(library):
    """Does something with a library whose kernel has more code before it and in it."""

    def run(do, head, in_call):
        (path,) = library.glob(f"build/torch-universal/{NAME}/kernels/softmax_*.py")
        good = path.read_text()
        bad = good.replace('extern "C" void', head + 'extern "C" void', 1)
        bad = re.sub(r'(extern "C" void softmax_rows\([^)]*\) \{)', lambda m: m[1] + in_call, bad)
        assert bad.count(in_call) == 1
        try:
            path.write_text(bad)
            return do()
        finally:
            path.write_text(good)

    return run


@pytest.mark.nightly
def test_a_bad_guest_is_told_of_everything_that_it_changed(visited_with):
    done = visited_with(HEAD, IN_CALL)
    assert done.returncode == 1, done.stdout + done.stderr
    missed = [says for says in SAYS if not re.search(says, done.stdout)]
    assert missed == [], done.stdout


@pytest.mark.nightly
def test_a_guest_with_teams_of_other_sizes_is_a_good_one(visited_with):
    team = "static int calls; const int size = calls++ % 2 ? 2 : 5;"
    done = visited_with("", team + "\n#pragma omp parallel num_threads(size)\n  {}\n")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.nightly
def test_a_guest_that_rounds_otherwise_is_noticed(visited_with):
    done = visited_with("#include <cfenv>\n", "fesetround(FE_UPWARD);")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "1 / -3.0 in float32" in done.stdout


def test_a_guest_that_writes_its_input_does_not_survive_it(visited_with):
    done = visited_with("", WRITES)
    assert done.returncode == -11, done.stdout + done.stderr
    assert done.stdout.startswith("softmax, cpu")


SHARED = (
    "static std::vector<float> shared(1 << 22);"
    "std::copy(x, x + rows * columns, shared.begin()); x = shared.data();"
)


def test_a_buffer_that_calls_share_fails_when_two_threads_call(changed, called_together):
    done = called_together()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout
    done = changed(called_together, "#include <algorithm>\n#include <vector>\n", SHARED)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "test_two_threads_may_call_it_at_once" in done.stdout
