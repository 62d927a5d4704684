"""Native code that computes what it should, and is a bad guest in its caller's process."""

import dataclasses
import os
import platform
import re

import pytest
from handmade_candidates import BODY, GOOD, TASK, built, write_task
from kagent_sandbox.data.task import load_task
from kagent_sandbox.data.verdict import Rejected, Stage, Status
from kagent_sandbox.device.cpu import backend as backend_module
from kagent_sandbox.device.cpu.backend import CpuBackend
from kagent_sandbox.device.cpu.facts import cpu_facts
from kagent_sandbox.judge.judge import Judge
from scripted_clock import ScriptedBackend

SEED = 7
HEADER = """
#include <cfenv>
#include <clocale>
#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <exception>
#include <fcntl.h>
#include <new>
#include <omp.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>
"""
KERNEL = (
    HEADER
    + """
%(before)s
extern "C" void scale(const float* x, float* y, int64_t rows, int64_t cols, int64_t step) {
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t j = 0; j < cols; ++j) y[i * cols + j] = 2.0f * x[i * step + j];
  %(in_call)s
}
"""
)
FTZ = "__builtin_ia32_ldmxcsr(__builtin_ia32_stmxcsr() | 0x8040);"
ON_LOAD = "__attribute__((constructor)) static void on_load() { %s }"
x86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="an instruction of x86")


@pytest.fixture(scope="module")
def judge(tmp_path_factory, shared):
    task = load_task(write_task(tmp_path_factory.mktemp("scale")))
    judge = Judge(task, ScriptedBackend(), SEED, {"wide": 100.0, "tall": 100.0})
    yield judge
    judge.close()


def check(judge, source):
    return judge.check(built(judge.task, SEED, source))


def kernel(in_call="", before=""):
    return KERNEL % {"in_call": in_call, "before": before}


BAD = {
    "rounding": ("fesetround(FE_TOWARDZERO);", "rounding mode is towards zero"),
    "rounding up": ("fesetround(FE_UPWARD);", "rounding mode is upwards"),
    "traps": ("feenableexcept(FE_OVERFLOW);", "exceptions trap"),
    "handler": ("signal(SIGUSR1, [](int) {});", "have a handler: .*SIGUSR1"),
    "another handler": ("signal(SIGSEGV, [](int) { _exit(1); });", "handler of SIGSEGV"),
    "ignored": ("signal(SIGPIPE, SIG_DFL);", "SIGPIPE"),
    "blocked": (
        "sigset_t s; sigemptyset(&s); sigaddset(&s, SIGTERM); sigprocmask(SIG_BLOCK, &s, 0);",
        "blocks: SIGTERM",
    ),
    "stack": (
        "static char room[65536]; stack_t s = {}; s.ss_sp = room; s.ss_size = sizeof room;"
        " sigaltstack(&s, 0);",
        "alternate stack",
    ),
    "locale": ('setlocale(LC_NUMERIC, "C"); setlocale(LC_ALL, "C.UTF-8");', "locale is"),
    "environment": ('setenv("OMP_SCHEDULE", "static", 1);', "environment"),
    "folder": ('if (chdir("/")) abort();', "working directory is /"),
    "threads": ("omp_set_num_threads(1);", "number of threads is 1"),
    "file": ('open("/dev/null", O_RDONLY);', "open: .*/dev/null"),
    "cores": (
        "cpu_set_t c; CPU_ZERO(&c); CPU_SET(sched_getcpu(), &c);"
        " sched_setaffinity(0, sizeof c, &c);",
        "cores of a thread",
    ),
    "rights": ("umask(0);", "umask"),
    "name": ('prctl(PR_SET_NAME, "kernel");', "name of a thread: kernel"),
    "limit": ("rlimit none = {}; setrlimit(RLIMIT_CORE, &none);", "limits of resources"),
    "schedule": ("omp_set_schedule(omp_sched_guided, 7);", "schedule is guided,7, and was"),
    "terminate": ("std::set_terminate(abort);", "handler of std::terminate"),
    "new": ("std::set_new_handler(abort);", "handler of std::terminate or of std::new"),
    "leak": ("void* volatile kept = malloc(1 << 16);", "calls keep memory"),
    "small leak": ("void* volatile kept = malloc(24);", "calls keep memory"),
    "mapped leak": (
        "mmap(0, 1 << 12, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);",
        "calls keep memory",
    ),
}


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("name", BAD)
def test_a_call_that_leaves_its_process_changed_is_refused(judge, name):
    in_call, says = BAD[name]
    found = check(judge, kernel(in_call))
    assert isinstance(found, Rejected), found
    assert (found.stage, found.status) == (Stage.CHECK, Status.POLICY)
    assert found.case == "odd" or "leak" in name
    assert re.search(says, found.message), found.message


@x86
@pytest.mark.parametrize(
    "source",
    [
        kernel(FTZ),
        kernel("#pragma omp parallel\n  {\n" + FTZ + "\n}\n"),
        kernel("#pragma omp parallel\n  if (omp_get_thread_num() == 1) {\n" + FTZ + "\n}\n"),
    ],
    ids=["one thread", "all threads", "another thread"],
)
def test_subnormal_numbers_stay_what_they_are_in_all_threads(judge, source):
    found = check(judge, source)
    assert isinstance(found, Rejected), found
    assert found.status is Status.POLICY
    assert "a call leaves" in found.message
    assert "subnormal" in found.message


@x86
@pytest.mark.parametrize(
    "leaves", ['asm volatile("pxor %%mm0, %%mm0" ::: "mm0");', 'asm volatile("fld1");']
)
def test_the_registers_of_the_x87_are_given_back(judge, leaves):
    """`long double` of a caller is NaN else."""
    found = check(judge, kernel(leaves))
    assert isinstance(found, Rejected), found
    assert found.status is Status.POLICY
    assert "registers of the x87 are in use" in found.message
    restored = check(judge, kernel('asm volatile("pxor %%mm0, %%mm0\\n emms" ::: "mm0");'))
    assert not isinstance(restored, Rejected), restored


@x86
def test_what_a_constructor_changes_is_said_of_loading(judge):
    found = check(judge, kernel(before=ON_LOAD % FTZ))
    assert isinstance(found, Rejected), found
    assert "loading its library leaves" in found.message
    assert "subnormal" in found.message


@x86
def test_a_timed_plan_is_a_guest_too(judge):
    """Kernels choose by shape: a bad guest may wait for one that no check has."""
    waits = built(judge.task, SEED, kernel("if (rows * cols > 10000) {" + FTZ + "}"))
    errors = judge.check(waits)
    assert not isinstance(errors, Rejected), errors
    found = judge.measure(waits, errors)
    assert isinstance(found, Rejected), found
    assert (found.stage, found.status) == (Stage.MEASURE, Status.POLICY)
    assert "subnormal" in found.message
    good = built(judge.task, SEED, GOOD)
    passed = judge.measure(good, judge.check(good))
    assert not isinstance(passed, Rejected), passed


ON_UNLOAD = "__attribute__((destructor)) static void on_unload() { %s }"
STATIC_OBJECT = "static struct Kept { char* room = new char[8]; ~Kept() { %s } } kept;"
OF_THREAD = (
    "struct Own { char* room = new char[8]; ~Own() { %s } };"
    " static void touch() { static thread_local Own own; own.room[0] = 1; }"
)


@pytest.mark.parametrize(
    ("before", "says"),
    [
        (ON_UNLOAD % "abort();", "SIGABRT"),
        (ON_UNLOAD % "_exit(3);", "unloaded"),
        (STATIC_OBJECT % "delete[] room; delete[] room;", "SIGABRT"),
        (ON_UNLOAD % "fesetround(FE_UPWARD);", "rounding mode is upwards"),
        (OF_THREAD % "abort();", "native code died of SIG"),  # two at once: SIGABRT, or SIGSEGV
        (OF_THREAD % "for (;;) {}", "a thread that called it ends"),
    ],
)
@pytest.mark.sampled(one_in=3)
def test_what_a_destructor_does_is_seen(judge, before, says):
    """Its caller's process would end that way, long after the last call."""
    found = check(judge, kernel("touch();" if "touch" in before else "", before))
    assert isinstance(found, Rejected), found
    assert found.stage is Stage.CHECK
    assert "unload" in found.message
    assert says in found.message


def test_a_destructor_that_frees_what_it_owns_passes(judge):
    for in_call, before in (("", STATIC_OBJECT), ("touch();", OF_THREAD)):
        found = check(judge, kernel(in_call, before % "delete[] room;"))
        assert not isinstance(found, Rejected), found


OF_OPENMP = """
#pragma omp parallel
if (omp_get_thread_num()) touch();
"""
LATER = "sigset_t all; sigfillset(&all); pthread_sigmask(SIG_BLOCK, &all, 0); usleep(200000); %s"


def test_an_ended_caller_s_threads_of_openmp_end_before_the_process_is_compared(judge):
    """The C library has such a thread block all signals when its last steps begin."""
    found = check(judge, kernel(OF_OPENMP, OF_THREAD % LATER % ""))
    assert not isinstance(found, Rejected), found


def test_what_a_destructor_of_openmp_s_threads_does_is_seen(judge):
    found = check(judge, kernel(OF_OPENMP, OF_THREAD % LATER % "abort();"))
    assert isinstance(found, Rejected), found
    assert (found.stage, found.status) == (Stage.CHECK, Status.RUNTIME_ERROR)
    assert "unload" in found.message


RESTORES = BODY % (
    "float* in = const_cast<float*>(x) + i * step + j; const float was = *(volatile float*)in;"
    " *(volatile float*)in = 2 * was; y[i * cols + j] = *in; *(volatile float*)in = was;"
)


def test_an_input_that_is_written_and_put_back_is_tampering(judge):
    found = check(judge, RESTORES)
    assert isinstance(found, Rejected), found
    assert (found.stage, found.status) == (Stage.CHECK, Status.TAMPER)
    assert "may only read (x)" in found.message


def test_an_argument_that_the_task_lets_be_written_may_be(tmp_path):
    folder = write_task(tmp_path)
    text = TASK.replace('name = "x",', 'name = "x", mutates = true,')
    (folder / "task.toml").write_text(text)
    judge = Judge(load_task(folder), CpuBackend(), SEED)
    try:
        assert not isinstance(check(judge, RESTORES), Rejected)
    finally:
        judge.close()


GOOD_GUESTS = {
    "plain": "",
    "restores": "const int mode = fegetround(); fesetround(FE_UPWARD); fesetround(mode);",
    "restores a handler": "signal(SIGUSR1, [](int) {}); signal(SIGUSR1, SIG_DFL);",
    "scratch": "void* volatile kept = malloc(1 << 20); free(kept);",
    "once": "static float* kept = (float*)calloc(1 << 20, 1); kept[rows] = 1;",
    "per thread": "#pragma omp parallel\n{ static thread_local float* kept ="
    " (float*)calloc(1 << 16, 1); kept[rows] = 1; free(calloc(1, 1 << 12)); }\n",
    "raises flags": "feraiseexcept(FE_INEXACT | FE_DIVBYZERO);",
}


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("name", GOOD_GUESTS)
def test_a_good_guest_passes(judge, name):
    found = check(judge, kernel(GOOD_GUESTS[name]))
    assert not isinstance(found, Rejected), found
    assert not isinstance(check(judge, GOOD), Rejected)


SHARED = (
    HEADER.replace("<cstdlib>", "<cstdlib>\n#include <mutex>\n#include <vector>")
    + """
%(memory)s
extern "C" void scale(const float* x, float* y, int64_t rows, int64_t cols, int64_t step) {
  %(begin)s
  if ((int64_t)twice.size() < rows * cols) twice.resize(rows * cols);
#pragma omp parallel for
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t j = 0; j < cols; ++j) kept[i * cols + j] = 2.0f * x[i * step + j];
#pragma omp parallel for
  for (int64_t i = 0; i < rows * cols; ++i) y[i] = kept[i];
}
"""
)
STATIC = "static std::vector<float> twice(1 << 18);"
GOOD_CALLERS = {
    "of the call": ("", "std::vector<float> twice(rows * cols); float* kept = twice.data();"),
    "of the thread": (
        "static thread_local std::vector<float> twice(1 << 18);",
        "float* kept = twice.data();",
    ),
    "locked": (
        STATIC + " static std::mutex lock;",
        "std::lock_guard<std::mutex> own(lock); float* kept = twice.data();",
    ),
}


def test_calls_that_share_memory_are_wrong_when_two_threads_call(judge):
    source = SHARED % {"memory": STATIC, "begin": "float* kept = twice.data();"}
    found = check(judge, source)
    assert isinstance(found, Rejected), found
    assert (found.stage, found.status) == (Stage.CHECK, Status.INCORRECT_NUMERICAL)
    assert "two threads call it at once" in found.message
    assert "torch.empty" in found.message


@pytest.mark.parametrize("name", GOOD_CALLERS)
def test_calls_with_memory_of_their_own_pass(judge, name):
    memory, begin = GOOD_CALLERS[name]
    found = check(judge, SHARED % {"memory": memory, "begin": begin})
    assert not isinstance(found, Rejected), found


def test_a_timed_plan_is_called_by_two_threads_too(judge):
    begin = (
        "std::vector<float> own(rows * cols);"
        " float* kept = rows * cols > 10000 ? twice.data() : own.data();"
    )
    waits = built(judge.task, SEED, SHARED % {"memory": STATIC, "begin": begin})
    errors = judge.check(waits)
    assert not isinstance(errors, Rejected), errors
    found = judge.measure(waits, errors)
    assert isinstance(found, Rejected), found
    assert (found.stage, found.status) == (Stage.MEASURE, Status.INCORRECT_NUMERICAL)
    assert "two threads call it at once" in found.message


BY_THREAD = (
    HEADER
    + """
%(before)s
extern "C" void scale(const float* x, float* y, int64_t rows, int64_t cols, int64_t step) {
  %(outside)s
#pragma omp parallel %(clause)s
  for (int64_t i = omp_get_thread_num(); i < rows; i += %(count)s)
    for (int64_t j = 0; j < cols; ++j) y[i * cols + j] = 2.0f * x[i * step + j];
}
"""
)
NUMBERS_OF_THREADS = {
    "of this machine": {"count": str(len(os.sched_getaffinity(0)))},
    "when it is loaded": {
        "before": "static const int count = omp_get_max_threads();",
        "count": "count",
    },
    "of the clause": {"clause": "num_threads(2)", "count": "2"},
}
RIGHT_NUMBERS_OF_THREADS = {
    "of the team": {"count": "omp_get_num_threads()"},
    "of one": {"clause": "if(cols < 0)", "count": "omp_get_num_threads()"},
    "of the caller": {
        "outside": "const int count = omp_get_max_threads();",
        "clause": "num_threads(count)",
        "count": "count",
    },
}


def by_thread(parts):
    return BY_THREAD % {"before": "", "outside": "", "clause": "", **parts}


@pytest.mark.skipif(len(os.sched_getaffinity(0)) != 2, reason="written for two cores")
@pytest.mark.parametrize("name", NUMBERS_OF_THREADS)
def test_a_kernel_that_counts_on_a_number_of_threads_is_wrong(judge, name):
    found = check(judge, by_thread(NUMBERS_OF_THREADS[name]))
    assert isinstance(found, Rejected), found
    assert (found.stage, found.status) == (Stage.CHECK, Status.INCORRECT_NUMERICAL)
    assert "fewer threads" in found.message
    assert "omp_get_num_threads" in found.message


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="there are no fewer than one")
def test_a_kernel_that_ends_where_there_are_fewer_threads_is_told_so(judge):
    parts = {
        "before": "static const int most = omp_get_max_threads();",
        "outside": "if (omp_get_max_threads() < most) abort();",
        "count": "omp_get_num_threads()",
    }
    found = check(judge, by_thread(parts))
    assert isinstance(found, Rejected), found
    assert (found.stage, found.status) == (Stage.CHECK, Status.RUNTIME_ERROR)
    assert found.message.startswith("in a thread that has fewer threads of OpenMP")


@pytest.mark.parametrize("name", RIGHT_NUMBERS_OF_THREADS)
def test_a_kernel_that_asks_for_the_number_of_threads_passes(judge, name):
    found = check(judge, by_thread(RIGHT_NUMBERS_OF_THREADS[name]))
    assert not isinstance(found, Rejected), found


def test_all_callers_go_by_the_threads_that_torch_takes(tmp_path, monkeypatch):
    """Of cores that share an execution unit it takes one, where OpenMP would take all."""
    facts = cpu_facts()
    more = dataclasses.replace(facts, units=2 * facts.units)
    monkeypatch.setattr(backend_module, "cpu_facts", lambda: more)
    judge = Judge(load_task(write_task(tmp_path)), ScriptedBackend(), SEED)
    try:
        found = check(judge, by_thread(RIGHT_NUMBERS_OF_THREADS["of the team"]))
        assert not isinstance(found, Rejected), found
    finally:
        judge.close()


def test_memory_that_code_takes_itself_is_in_peak_memory(judge):
    """64 MiB of the calling thread: those of one of two callers."""
    takes = "static thread_local char* kept = (char*)calloc(1 << 26, 1); kept[rows] = 1;"
    plain, taking = (built(judge.task, SEED, kernel(in_call)) for in_call in ("", takes))
    one, other = (judge.measure(b, judge.check(b)) for b in (plain, taking))
    for before, after in zip(one.timings, other.timings, strict=True):
        assert before.peak_bytes == 4 * 64 * 2048
        assert 0 <= after.peak_bytes - before.peak_bytes - (1 << 26) < 4 << 20
