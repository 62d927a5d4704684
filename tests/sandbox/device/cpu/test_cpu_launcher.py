import contextlib
import ctypes
import dataclasses
import hashlib
import itertools
import os
import resource
import statistics
import subprocess
import threading
import time
from pathlib import Path

import brief_timing
import pytest
import torch
from kagent_sandbox.confine.libc import libc
from kagent_sandbox.data.plan import (
    Alloc,
    Buffer,
    Const,
    Copy,
    Fill,
    Free,
    KernelInfo,
    Launch,
    Null,
    Plan,
    PlanError,
    Pointer,
    Scalar,
    TensorMap,
    TensorRef,
    TorchOp,
)
from kagent_sandbox.data.verdict import Status
from kagent_sandbox.device.cpu import ceilings
from kagent_sandbox.device.cpu.arena import CpuArena, refuse_descriptors
from kagent_sandbox.device.cpu.backend import CpuBackend, shares
from kagent_sandbox.device.cpu.ceilings import cached_ceilings
from kagent_sandbox.device.cpu.entry import ENTRY
from kagent_sandbox.device.cpu.facts import cpu_facts
from kagent_sandbox.device.cpu.launcher import CpuLauncher, RequestCost
from kagent_sandbox.device.interface import LaunchFailed
from kagent_sandbox.errors import MachineError, ToolchainError

HEAD = """
#include <cstdint>
#include <cstdlib>
#include <cstdio>
#include <thread>
#include <stdexcept>
#include <atomic>
#include <csignal>
#include <ctime>
#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <unistd.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
"""
KERNELS = {
    "scale": "void scale(const float* x, float* y, int64_t n, float f) {\n"
    "#pragma omp parallel for simd\nfor (int64_t i = 0; i < n; i++) y[i] = f * x[i]; }",
    "types": "void types(double* y, int8_t a, uint8_t b, int16_t c, uint16_t d, int32_t e,"
    " uint32_t f, int64_t g, uint64_t h, float i, double j, bool k, void* null) {"
    " y[0]=a; y[1]=b; y[2]=c; y[3]=d; y[4]=e; y[5]=f; y[6]=g; y[7]=h; y[8]=i; y[9]=j; y[10]=k;"
    " y[11]=null==nullptr; }",
    "nothing": "void nothing(float*) {}",
    "segfault": "void segfault(float*) { *(volatile int*)8 = 1; }",
    "deep": "int dig(volatile int* p) { volatile int a[1000]; a[0] = *p; return dig(a) + a[1]; }\n"
    "extern \"C\" void deep(float*) { int one = 1; std::printf(\"%d\", dig(&one)); }",
    "aborts": "void aborts(float*) { std::abort(); }",
    "throws": "void throws(float*) { throw std::runtime_error(\"no\"); }",
    "illegal": "void illegal(float*) { __builtin_trap(); }",
    "leaves": "void leaves(float*) { std::exit(3); }",
    "hangs": "void hangs(float* x) { volatile unsigned* n = (unsigned*)x;"
    " for (;;) n[0] = n[0] + 1; }",
    "waits": "void waits(float*) { timespec t, u; clock_gettime(CLOCK_MONOTONIC, &t); do"
    " clock_gettime(CLOCK_MONOTONIC, &u); while ((u.tv_sec - t.tv_sec) * 1000000000LL"
    " + u.tv_nsec - t.tv_nsec < 5000000); }",
    "threads": "void threads(float* x) { std::thread([=]{ x[0] = 1; }).join(); }",
    "more": "void more(float* x) {\n#pragma omp parallel num_threads(64)\nx[0] = 1; }",
    "forks": "void forks(float* x) { x[0] = fork() < 0; }",
    "sockets": "void sockets(float* x) { x[0] = socket(1, 1, 0) < 0; }",
    "filters": "void filters(float* x) { struct { unsigned short c; char t, f; unsigned k; }"
    " allow = {6, 0, 0, 0x7FFF0000}; struct { unsigned short n; void* p; } all = {1, &allow};"
    " x[0] = syscall(SYS_seccomp, 1, 0, &all) && syscall(SYS_seccomp, 0, 0, 0)"
    " && prctl(PR_SET_SECCOMP, 2, &all); }",
    "eats": "void eats(float* x) { for (;;) { char* p = (char*)malloc(1 << 24); if (!p) abort();"
    " for (int i = 0; i < 1 << 24; i += 4096) p[i] = 1; } }",
    "timer": "void timer(float* x) { x[0] = alarm(1) == -1u; struct sigevent e = {};"
    " e.sigev_notify = SIGEV_SIGNAL; e.sigev_signo = SIGCONT; timer_t t;"
    " x[1] = timer_create(CLOCK_MONOTONIC, &e, &t) < 0; }",
    "memfds": "void memfds(float* x) { x[0] = 0; for (int fd = 0; fd < 256; fd++)"
    " if (fcntl(fd, F_GET_SEALS) >= 0) x[0]++; }",
    "maps": "void maps(float* x) { void* page = (void*)((unsigned long)x & ~4095ul);"
    " x[0] = mremap(page, 0, 4096, MREMAP_MAYMOVE) == MAP_FAILED && errno == EPERM;"
    " x[1] = syscall(SYS_mremap, page, -1ul, 4096ul, MREMAP_MAYMOVE, 0ul) < 0 && errno == EPERM;"
    " x[2] = mremap(page, 4096, 4096, MREMAP_MAYMOVE | 4, 0) == MAP_FAILED && errno == EPERM;"
    " x[3] = syscall(SYS_mremap, page, 1ul << 32, 4096ul, 2, 0ul) < 0 && errno == EPERM; }",
    "gives_back": "void gives_back(float* x) { int fd = open(\"f\", O_RDWR | O_CREAT, 0600);"
    " x[0] = fd < 0 || write(fd, x, 4096) != 4096;"
    " x[1] = fallocate(fd, 3, 0, 4096) < 0 && errno == EPERM;"
    " x[2] = ftruncate(fd, 0) < 0 && errno == EPERM; close(fd); unlink(\"f\"); }",
    "advises": "void advises(int* y, char* x) { y[0] = 0;"
    " for (int advice = 0; advice < 128; advice++)"
    " if (!madvise(x, 4096, advice) || errno != EPERM) y[++y[0]] = advice; }",
    "allocates": "void allocates(float* y) { y[0] = 1;"
    " for (size_t n = 1 << 16; n <= 1 << 24; n *= 4) {"
    " char* p = (char*)malloc(n); memset(p, 7, n); p = (char*)realloc(p, 2 * n);"
    " if (!p || p[0] != 7 || p[n - 1] != 7) y[0] = 0; free(p); }"
    " void* p = mmap(0, 1 << 22, 3, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);"
    " p = mremap(p, 1 << 22, 1 << 23, MREMAP_MAYMOVE); y[1] = p != MAP_FAILED;"
    " y[2] = !madvise(p, 1 << 23, MADV_DONTNEED) && !munmap(p, 1 << 23); }",
    "waits_for": "void waits_for(float* x) { int pair[2]; timeval t = {1, 0};"
    " x[0] = !socketpair(1, 1, 0, pair)"
    " && setsockopt(pair[0], SOL_SOCKET, SO_RCVTIMEO, &t, sizeof t) < 0 && errno == EPERM; }",
    "forges": "void forges(float*) { for (int fd = 3; fd < 64; fd++) { char b[20] = {};"
    " unsigned h[4] = {0x6B41474E, 2, 0, 0}; write(fd, h, 16); write(fd, \"{}\", 2); } }",
}  # fmt: skip
for name, count in (("many", 12), ("too_many", 20)):
    KERNELS[name] = (
        f"void {name}(double* y{''.join(f', float f{i}, int16_t i{i}' for i in range(count))}) {{"
        + "".join(f" y[{2 * i}]=f{i}; y[{2 * i + 1}]=i{i};" for i in range(count))
        + " }"
    )
CONSTRUCTOR = """
#include <unistd.h>
#include <sys/socket.h>
static int at_load = socket(1, 1, 0) < 0 && fork() < 0;
extern "C" void answer(float* x) { x[0] = at_load; }
"""


def compile_so(folder, source):
    path = folder / "k.so"
    (folder / "k.cpp").write_text(source)
    options = ["-O1", "-fopenmp", "-shared", "-fPIC", "-pthread", "-Winfinite-recursion", "-w"]
    subprocess.run(["g++", *options, folder / "k.cpp", "-o", path], check=True)
    return path.read_bytes()


@pytest.fixture(scope="module")
def binaries(tmp_path_factory):
    folder = tmp_path_factory.mktemp("so")
    bodies = "\n".join(
        body if name == "deep" else f'extern "C" {body}' for name, body in KERNELS.items()
    )
    all_of_them = compile_so(folder, HEAD + bodies)
    constructor = compile_so(folder, CONSTRUCTOR)
    return {hash_of("all"): all_of_them, hash_of("constructor"): constructor}


def hash_of(text):
    return hashlib.sha256(text.encode()).hexdigest()


@pytest.fixture(scope="module")
def backend():
    with CpuBackend(memory_bytes=512 << 20) as backend:
        yield backend


@pytest.fixture
def arena(backend):
    arena = backend.arena(1 << 20)
    yield arena
    arena.close()


@pytest.fixture
def launcher(backend, arena, binaries):
    launcher = backend.launcher(arena)
    launcher.load(binaries)
    yield launcher
    launcher.close()


def tensor(buffer, *shape, dtype="float32", offset=0):
    strides, step = [], 1
    for n in reversed(shape):
        strides.insert(0, step)
        step *= n
    return TensorRef(buffer, offset, shape, tuple(strides), dtype)


def launch_plan(name, args, sizes, binary="all", nbytes=4096):
    kernel = KernelInfo(hash_of(binary), "cpp", name, tuple(sizes))
    buffers = (Buffer(0, "input", nbytes, "x"), Buffer(1, "scratch", nbytes))
    launch = Launch(kernel.hash, (1, 1, 1), (1, 1, 1), tuple(args))
    return Plan("cpu", buffers, (Alloc(1), launch), (tensor(1, 8),), (kernel,))


def simple(name, binary="all"):
    return launch_plan(name, [Pointer(1, 0)], [8], binary)


AT = {0: 0, 1: 4096}


def run(launcher, plan, offsets=AT, limit_s=20.0):
    launcher.prepare("plan", plan, offsets)
    launcher.run("plan", limit_s=limit_s)


def test_a_kernel_runs_where_the_judge_placed_it(launcher, arena):
    args = [Pointer(0, 0), Pointer(1, 16), Scalar("i64", 100), Scalar("f32", 3.0)]
    plan = launch_plan("scale", args, [8, 8, 8, 4])
    for offsets in (AT, {0: 8192, 1: 65536}):
        x = torch.arange(100, dtype=torch.float32)
        launcher.stop()
        arena.bytes(0, arena.nbytes).fill_(255)
        arena.view(tensor(0, 100), offsets[0]).copy_(x)
        run(launcher, plan, offsets)
        launcher.stop()
        y = arena.view(tensor(1, 100, offset=4), offsets[1])
        assert torch.equal(y, 3 * x)
        before = arena.bytes(offsets[1], offsets[1] + 16)
        assert (before == 255).all()


def test_all_scalar_types_arrive(launcher, arena):
    values = [
        ("i8", -5), ("u8", 250), ("i16", -300), ("u16", 65000), ("i32", -70000),
        ("u32", 4_000_000_000), ("i64", -(2**40)), ("u64", 2**60), ("f32", 0.5),
        ("f64", float("-inf")), ("i1", True),
    ]  # fmt: skip
    args = [Pointer(1, 0), *(Scalar(t, v) for t, v in values), Null()]
    run(launcher, launch_plan("types", args, [8, 1, 1, 2, 2, 4, 4, 8, 8, 4, 8, 1, 8]))
    launcher.stop()
    y = arena.view(tensor(1, 12, dtype="float64"), 4096).tolist()
    assert y == [*(float(v) for _, v in values), 1.0]


def test_fills_copies_constants_and_torch_operations(launcher, arena):
    a, b, c = (tensor(i, 4, 4) for i in range(3))
    ops = (
        Alloc(0), Alloc(1), Alloc(2),
        Fill(a, 2.0),
        Const(tensor(1, 4), torch.arange(4.0).numpy().tobytes()),
        Copy(TensorRef(1, 0, (4, 4), (0, 1), "float32"), c),
        TorchOp("aten::mm.out", (a, c), {}, (b,)),
        TorchOp("aten::add_.Scalar", (b, 1), {}, (b,)),
        Copy(b, TensorRef(2, 0, (4, 4), (1, 4), "bfloat16")),
        Free(0),
    )  # fmt: skip
    buffers = tuple(Buffer(i, "scratch", 64) for i in range(3))
    out = TensorRef(2, 0, (4, 4), (1, 4), "bfloat16")
    run(launcher, Plan("cpu", buffers, ops, (out,), ()), {0: 256, 1: 512, 2: 1024})
    expected = torch.arange(4.0) * 8 + 1
    launcher.stop()
    assert torch.equal(arena.view(out, 1024).float(), expected.expand(4, 4))


@pytest.mark.parametrize(
    ("plan", "why"),
    [
        (launch_plan("scale", [], [], "missing"), None),
        (simple("no_such_symbol"), None),
        (Plan("sm_90a", (), (), (), ()), "sm_90a"),
        (Plan("cpu", (Buffer(0, "scratch", 1 << 20),), (Alloc(0),), (), ()), "leaves"),
        (
            Plan(
                "cpu",
                (Buffer(0, "scratch", 64),),
                (Alloc(0), TorchOp("aten::no_such_op", (), {}, ())),
                (),
                (),
            ),
            "no torch operation",
        ),
        (
            launch_plan("f", [TensorMap(0, 0, "float32", (4,), (), (4,), (1,))], [128]),
            "TensorMap",
        ),
        (launch_plan("f", [Scalar("bf16", 1.0)], [2]), "bf16"),
    ],
)
def test_what_cannot_run_is_refused_before_it_runs(launcher, plan, why):
    with pytest.raises(PlanError if why else LaunchFailed, match=why or "symbol|cannot open"):
        launcher.prepare("bad", plan, {0: 4096, 1: 8192})
    run(launcher, simple("nothing"))  # the launcher lives on


@pytest.mark.parametrize(
    ("name", "status", "text"),
    [
        ("segfault", Status.RUNTIME_ERROR, "SIGSEGV"),
        ("deep", Status.RUNTIME_ERROR, "SIGSEGV"),
        ("aborts", Status.RUNTIME_ERROR, "SIGABRT"),
        ("throws", Status.RUNTIME_ERROR, "SIGABRT"),
        ("illegal", Status.RUNTIME_ERROR, "SIGILL"),
        ("leaves", Status.RUNTIME_ERROR, "status 3"),
        ("threads", Status.RUNTIME_ERROR, "SIGABRT"),
        ("more", Status.RUNTIME_ERROR, "default number of threads"),
        ("hangs", Status.TIMEOUT, "did not return within 0.3 s"),
        ("forges", Status.TAMPER, "result channel"),
    ],
)
def test_faults_of_native_code_are_named(launcher, name, status, text):
    launcher.prepare("bad", simple(name), AT)
    with pytest.raises(LaunchFailed, match=text) as failure:
        launcher.run("bad", limit_s=0.3 if name == "hangs" else 20.0)
    assert failure.value.status is status
    with pytest.raises(LaunchFailed, match=text):
        launcher.run("bad", limit_s=1.0)
    with pytest.raises(LaunchFailed, match=text):
        launcher.stop()


@pytest.mark.parametrize("name", ["forks", "sockets", "filters", "answer"])
def test_native_code_is_locked_from_its_constructors_on(launcher, arena, name):
    launcher.stop()
    arena.view(tensor(1, 1), 4096).zero_()
    run(launcher, simple(name, "constructor" if name == "answer" else "all"))
    launcher.stop()
    assert arena.view(tensor(1, 1), 4096).item() == 1


def test_native_code_cannot_set_a_timer_to_wake_itself(launcher, arena):
    run(launcher, simple("timer"))
    launcher.stop()
    assert arena.view(tensor(1, 2), 4096).tolist() == [1, 1]


def values(launcher, arena, name, count):
    launcher.stop()
    arena.view(tensor(1, 8), 4096).fill_(-1)
    run(launcher, simple(name))
    launcher.stop()
    return arena.view(tensor(1, count), 4096).tolist()


def test_native_code_finds_no_descriptor_of_the_arena(launcher, arena):
    """By one it could give pages back to the kernel that its rivals are timed on."""
    assert values(launcher, arena, "memfds", 1) == [0]


def test_a_launcher_that_keeps_a_descriptor_of_shared_memory_does_not_start():
    with (
        contextlib.closing(os.fdopen(os.memfd_create("kept"), "rb")),
        pytest.raises(MachineError, match=r"internal error: .* descriptor \d+ of shared memory"),
    ):
        refuse_descriptors()


def test_native_code_cannot_map_the_arena_a_second_time(launcher, arena):
    assert values(launcher, arena, "maps", 4) == [1, 1, 1, 1]


def test_native_code_gives_no_pages_of_files_back(launcher, arena):
    assert values(launcher, arena, "gives_back", 3) == [0, 1, 1]


def test_native_code_gives_only_harmless_advice_about_memory(launcher, arena):
    args = [Pointer(1, 0), Pointer(0, 0)]
    run(launcher, launch_plan("advises", args, [8, 8]))
    launcher.stop()
    found = arena.view(tensor(1, 128, dtype="int32"), 4096).tolist()
    assert found[1 : found[0] + 1] == [4, 14, 23]


def test_native_code_allocates_and_frees_as_everywhere(launcher, arena):
    assert values(launcher, arena, "allocates", 3) == [1, 1, 1]


def test_native_code_sets_no_time_limit_on_a_socket(launcher, arena):
    """Waiting with one is interrupted when a stopped process goes on."""
    assert values(launcher, arena, "waits_for", 1) == [1]


def test_no_thread_is_started_after_the_first_kernel(launcher):
    assert launcher.threads >= len(os.sched_getaffinity(0))


def test_the_cpu_is_known_by_the_version_that_torch_gives_itself():
    assert cpu_facts().key.endswith(f", torch {torch.__version__}")


def test_memory_is_limited(launcher):
    launcher.prepare("bad", simple("eats"), AT)
    with pytest.raises(LaunchFailed, match=r"SIGABRT|memory limit of \d+ MiB"):
        launcher.run("bad", limit_s=20.0)


@pytest.mark.parametrize("machine_gib", [2, 4, 7, 16, 23, 512])
def test_all_launchers_together_have_half_of_the_memory(machine_gib):
    together, memory, disk = shares(machine_gib << 30)
    assert (together + 1) * (memory + disk) <= machine_gib << 29
    assert together >= (3 if machine_gib >= 4 else 1)  # a run's final race has three
    assert memory >= 256 << 20  # torch starts, and something is left


def test_no_more_launchers_live_than_have_memory(backend, arena, monkeypatch):
    before = backend._server.alive
    monkeypatch.setattr(backend, "_together", before + 2)
    two = [backend.launcher(arena) for _ in range(2)]
    with pytest.raises(MachineError, match=r"share half of this machine's memory.*compare fewer"):
        backend.launcher(arena)
    two.pop().close()
    two.append(backend.launcher(arena))
    for launcher in two:
        launcher.close()


@pytest.mark.parametrize(("name", "count"), [("many", 12), ("too_many", 20)])
def test_arguments_of_all_kinds_arrive_in_registers_and_on_the_stack(launcher, arena, name, count):
    """More of them than the loop passes are Python's to pass."""
    values = [(i + 0.5, -i) for i in range(count)]
    pairs = [(Scalar("f32", f), Scalar("i16", i)) for f, i in values]
    args = [Pointer(1, 0), *itertools.chain(*pairs)]
    launcher.prepare("k", launch_plan(name, args, [8] + [4, 2] * count), AT)
    launcher.run("k", limit_s=10.0)
    launcher.stop()
    found = arena.view(tensor(1, 2 * count, dtype="float64"), AT[1])
    assert found.tolist() == list(itertools.chain(*values))


def test_every_sample_runs_every_key_once(launcher, arena):
    """Every run adds one to its own cell."""
    keys = [f"k{i}" for i in range(7)]
    for i, key in enumerate(keys):
        cell = tensor(0, 1, dtype="int32")
        add = TorchOp("aten::add_.Scalar", (cell, 1), {}, (cell,))
        launcher.prepare(
            key, Plan("cpu", (Buffer(0, "input", 4, "x"),), (add,), (), ()), {0: 4 * i}
        )
    cells = arena.bytes(0, 28).view(torch.int32)
    for _ in range(6):
        launcher.sample(keys, limit_s=30.0)
    launcher.stop()
    assert cells.tolist() == [6] * 7
    assert launcher.wall_us(keys, 14, limit_s=30.0) is None
    with pytest.raises(ValueError, match="nothing"):
        launcher.sample([], limit_s=1.0)
    launcher.forget("k0")
    with pytest.raises(KeyError, match="k0"):
        launcher.run("k0", limit_s=1.0)


def test_only_who_is_timed_finds_out_what_asking_costs(backend, arena, binaries, monkeypatch):
    monkeypatch.setattr(backend, "_request_cost", RequestCost())
    for timed, count in ((False, 0), (True, 36), (False, 36), (True, 40)):
        with contextlib.closing(backend.launcher(arena, timed=timed)) as launcher:
            launcher.load(binaries)
            launcher.prepare("k", simple("waits"), AT)
            launcher.run("k", limit_s=10.0)
            assert len(backend._request_cost.costs_s) == count
            if not timed:
                with pytest.raises(ValueError, match="not for timing"):
                    launcher.sample(["k"], limit_s=1.0)


def test_caches_are_emptied_by_more_than_they_hold(backend, monkeypatch):
    few = dataclasses.replace(backend.facts, l2_bytes=1 << 20)
    monkeypatch.setattr("kagent_sandbox.device.cpu.flush.cpu_facts", lambda: few)
    read = brief_timing.larger_than_caches.__wrapped__()
    assert read.nbytes == 2 << 20
    assert (read == 1).all()  # written: zeros would be one page


def test_asking_costs_no_pages_of_memory_that_nobody_has_read_yet(backend, monkeypatch):
    """What is read of a sample's results has been written. 256 page faults cost 0.3 ms, which all
    contenders would be given.
    """
    monkeypatch.setattr(backend, "_request_cost", RequestCost())
    faults = []
    execute = CpuLauncher._execute

    def counted(launcher, keys, limit_s, observe):
        def watched():
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            observe()
            faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)

        return execute(launcher, keys, limit_s, watched)

    monkeypatch.setattr(CpuLauncher, "_execute", counted)
    with (
        contextlib.closing(backend.arena(64 << 20)) as fresh,
        contextlib.closing(backend.launcher(fresh)) as launcher,
    ):
        launcher.load({})
    assert len(faults) == 36
    assert statistics.median(faults) < 50


def minor_faults(launcher):
    stat = Path(f"/proc/{launcher._child.pid()}/stat").read_text()
    return int(stat.rsplit(")", 1)[1].split()[7])


def test_pages_that_others_took_are_back_before_a_sample(launcher, arena):
    """A hole in the arena is one in all page tables. The judge's writing fills its own alone."""
    args = [Pointer(0, 0), Pointer(1, 0), Scalar("i64", 100_000), Scalar("f32", 3.0)]
    plan = launch_plan("scale", args, [8, 8, 8, 4], nbytes=400_000)
    launcher.prepare("k", plan, {0: 0, 1: 409_600})
    launcher.run("k", limit_s=10.0)
    faults = []
    for again in (False, True):
        launcher.stop()
        nbytes = ctypes.c_int64(arena.nbytes)
        assert libc.fallocate(arena.fd, 3, ctypes.c_int64(0), nbytes) == 0
        if again:
            launcher.populate(["k"])
            launcher.stop()
        arena.bytes(0, arena.nbytes).fill_(1)
        before = minor_faults(launcher)
        launcher.sample(["k"], limit_s=10.0)
        faults.append(minor_faults(launcher) - before)
    assert faults[0] > 4 * faults[1]


def test_a_sample_is_the_mean_time_of_its_runs(launcher):
    """Not slopes, which native code that knows how often it is called can bend."""
    launcher.prepare("wait", simple("waits"), AT)
    launcher.prepare("other", simple("waits"), {0: 8192, 1: 12288})
    us = [launcher.sample(["wait", "other"], limit_s=30.0) for _ in range(5)]
    assert min(us) > 4700  # each run spins for 5 ms by its own clock


def test_results_are_read_on_the_clock(launcher, arena):
    """What a sample reads is there, and reading it counts."""
    cell = tensor(0, 1, dtype="int32")
    plan = Plan("cpu", (Buffer(0, "input", 4, "x"),), (Fill(cell, 7),), (), ())
    launcher.prepare("fill", plan, {0: 0})
    launcher.stop()
    arena.bytes(0, 4).zero_()
    seen = []

    def observe():
        seen.append(arena.view(cell, 0).item())
        time.sleep(0.05)

    assert launcher.sample(["fill"], limit_s=30.0, observe=observe) > 45_000
    assert seen == [7]


def test_a_stopped_process_sees_nothing_before_its_sample_begins(launcher, arena):
    """A thread that never stops looking, and counts, stands still while inputs are written."""
    launcher.prepare("nothing", simple("nothing"), AT)
    launcher.stop()
    states = [
        Path(f"/proc/{launcher._child.pid()}/task/{task}/stat")
        .read_text()
        .rsplit(")", 1)[1]
        .split()[0]
        for task in os.listdir(f"/proc/{launcher._child.pid()}/task")
    ]
    assert len(states) >= launcher.threads
    assert set(states) == {"T"}
    launcher.run("nothing", limit_s=20.0)  # being asked lets it go on


def test_who_is_timed_has_priority_and_cores_of_its_own_while_it_is(launcher):
    """Where this user may take priority; cores it may always."""
    pid = launcher._child.pid()
    assert pid is not None
    cores = os.sched_getaffinity(0)

    def seen():
        tasks = sorted(map(int, os.listdir(f"/proc/{pid}/task")))
        places = [os.sched_getaffinity(task) for task in tasks]
        return places, [os.getpriority(os.PRIO_PROCESS, task) for task in (0, *tasks)]

    before = seen()
    with launcher._priority:
        places, nice = seen()
    assert seen() == before
    assert all(place == cores for place in before[0])
    if len(cores) > 1 and len(places) > 1 and (len(places) - 1) % (len(cores) - 1) == 0:
        assert [len(place) for place in places] == [1] * len(places)
        assert set.union(*places) == cores
    assert set(nice) in ({0}, {-10})


def test_the_arena_cannot_be_resized(backend):
    arena = backend.arena(5000)
    assert arena.nbytes == 8192
    for size in (0, 1 << 20):
        with pytest.raises(PermissionError):
            os.ftruncate(arena.fd, size)
    assert (arena.bytes(0, arena.nbytes) == 0).all()
    with pytest.raises(PlanError):
        arena.view(tensor(0, 4096), 4096)
    arena.close()
    arena.close()
    with pytest.raises(MachineError, match="MiB"):
        CpuArena(1 << 60)


def test_a_stopped_process_does_not_run(launcher, arena):
    launcher.prepare("spin", simple("hangs"), AT)
    thread = threading.Thread(target=swallow, args=(launcher, "spin"))
    thread.start()
    cell = arena.view(tensor(1, 1), 4096)
    address = ctypes.c_uint32.from_address(cell.data_ptr())
    for _ in range(1000):
        if address.value > 0:
            break
        time.sleep(0.005)
    assert launcher._child.stop()
    seen = address.value
    assert seen > 0
    time.sleep(0.05)
    assert address.value == seen
    launcher._child.kill()
    thread.join()


def swallow(launcher, key):
    with pytest.raises(LaunchFailed):
        launcher.run(key, limit_s=30.0)


def test_the_device_is_described_and_healthy(backend):
    facts = backend.facts
    assert facts.kind == facts.target == "cpu"
    assert facts.units >= 1
    assert facts.l2_bytes >= 1 << 18
    assert torch.__version__ in facts.key
    assert backend.healthy()


def run_each(launcher, names, placement_count):
    for name in names:
        for i in range(placement_count):
            launcher.run(f"{name}{i}", limit_s=30.0)
    return dict.fromkeys(names, 100.0)


@pytest.mark.nightly
def test_ceilings_are_measured_once(backend, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    module = "kagent_sandbox.device.cpu.ceilings"
    monkeypatch.setattr(f"{module}._MOST_PLACEMENTS", 2)
    monkeypatch.setattr(f"{module}._MOST_ARRAY_BYTES", 16 << 20)
    monkeypatch.setattr(f"{module}._PRODUCT", 64)
    monkeypatch.setattr(f"{module}._best_us", run_each)
    first = backend.ceilings()
    assert first.copy_gb_per_s > 0
    assert set(first.tflop_per_s) == {"float32", "bfloat16"}

    def fail(nbytes):
        raise AssertionError("measured twice")

    assert cached_ceilings(backend.facts, fail) == first
    assert backend.ceilings(again=True).copy_gb_per_s >= first.copy_gb_per_s
    first = backend.ceilings()
    (path,) = (tmp_path / "kagent").glob("ceilings-cpu-*.json")
    path.write_text("{")
    assert backend.ceilings() == first


def test_a_product_that_takes_long_is_timed_once_a_round():
    """In bfloat16 it takes 0.9 s where a processor has none: ceilings took more than a minute."""
    sampled = []

    class Slow:
        def sample(self, keys, limit_s):
            sampled.append(list(keys))
            return 9e5 if keys[0].startswith("bfloat16") else 50.0

    best = ceilings._best_us(Slow(), ["copy", "bfloat16"], 3)
    assert best == {"copy": 50.0, "bfloat16": 9e5}
    assert [keys for keys in sampled if keys[0] == "bfloat160"] == ceilings._ROUNDS * [
        ["bfloat160"]
    ]
    assert ["copy0", "copy1", "copy2"] in sampled


def test_a_machine_without_a_compiler_is_refused_before_anything_is_measured(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ToolchainError, match=r"^timing on the CPU needs .*: install it \(apt.*\)$"):
        ENTRY.open(0, products=False)
