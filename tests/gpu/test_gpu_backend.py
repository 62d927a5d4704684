"""The device as a whole: facts, ceilings, transports, baselines in the launcher and beside it."""

import time

import pytest
import torch
from kagent_sandbox.data.plan import Fill, Pointer
from plans import Sketch, cubin, flat

pytestmark = [pytest.mark.gpu, pytest.mark.alone]
GIB = 1 << 30

TOML = """
name = "double"
summary = "Twice x."
entry = "double"
signature = "double(x) -> y"
dims = { N = "elements" }
bytes = "2 * N * itemsize"
flops = "0"
arguments = [{ name = "x", shape = ["N"] }]
results = [{ name = "y", shape = ["N"], k = 2.0 }]
[gpu]
check = [{ name = "g", dtype = "float32", N = 8 }]
bench = [
  { name = "small", dtype = "float32", N = 1048576 },
  { name = "large", dtype = "bfloat16", N = 67108864 },
]
[cpu]
check = [{ name = "c", dtype = "float32", N = 8 }]
bench = [{ name = "cb", dtype = "float32", N = 64 }]
"""
REFERENCE = """
import torch

def inputs(case, generator, device):
    x = torch.randn(case.dims["N"], generator=generator, device=device)
    return {"x": x.to(getattr(torch, case.dtype))}

def reference(*, x):
    return 2 * x.double()

def eager(*, x):
    return torch.sin(2 * x)

def waits(*, x):
    return x * float(x[0].item() > -100)

def fails(*, x):
    raise ValueError("refuses this shape")

def faults(*, x):
    return x[torch.full((1,), 1 << 40, device=x.device)]  # a device-side assertion

def experts():
    return {"waits for the device": waits, "fails": fails, "faults": faults}
"""


@pytest.fixture
def task(tmp_path, monkeypatch):
    from kagent_sandbox.data.task import load_task

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "task.toml").write_text(TOML)
    (tmp_path / "reference.py").write_text(REFERENCE)
    return load_task(tmp_path)


def test_facts(backend):
    facts = backend.facts
    print(facts, "transport", backend._transport, backend.isolation)
    assert facts.kind == "gpu"
    assert facts.target.startswith("sm_")
    assert facts.name in facts.key
    assert torch.__version__ in facts.key
    assert "unknown" not in facts.key
    if "H100" in facts.name and "HBM3" in facts.name:
        assert facts.theoretical_gb_per_s == pytest.approx(3352, rel=0.01)
        assert facts.target == "sm_90a"
        assert facts.units == 132


@pytest.mark.parametrize("transport", ["fd", "ipc"])
def test_memory_is_shared_by_either_transport(transport):
    from kagent_sandbox.device.cuda.backend import GpuBackend
    from kagent_sandbox.errors import DeviceError

    with GpuBackend(transport=transport) as backend:
        arena = backend.arena(8 << 20)
        try:
            launcher = backend.launcher(arena)
        except DeviceError as e:
            if transport == "ipc":
                pytest.skip(f"CUDA IPC does not reach the launcher's user here: {e}")
            raise
        s = Sketch()
        y = s.alloc(4096)
        s.ops.append(Fill(flat(y, 1024, "int32"), 9))
        launcher.load({})
        launcher.prepare("f", s.plan(flat(y, 1024, "int32")), {y: 4096})
        launcher.run("f", limit_s=20.0)
        assert arena.view(flat(y, 1024, "int32"), 4096).eq(9).all()
        launcher.close()
        arena.close()


def test_starting_a_launcher_takes_little_of_the_lane(backend, arena):
    """What the lane waits for, with the next process made ahead; and what making it takes."""
    spares, times = backend._spares, []
    for _ in range(4):
        spares.drop()
        start = time.monotonic()
        spares.begin()
        spares.wait_until_idle()
        ahead = time.monotonic()
        launcher = backend.launcher(arena)
        launcher.load({})
        ready = time.monotonic()
        spares.wait_until_idle()
        closing = time.monotonic()
        launcher.close()
        closed = time.monotonic()
        spares.wait_ended()
        ended = time.monotonic()
        times.append(ready - ahead)
        print(
            f"made ahead in {ahead - start:.2f} s, ready in {ready - ahead:.3f} s, "
            f"closed in {closed - closing:.3f} s, gone after {ended - closing:.3f} s"
        )
    assert min(times) < 1.0


def test_a_launcher_for_plans_without_products_does_not_load_their_library():
    from kagent_sandbox.device.cuda.backend import GpuBackend

    for products in (True, False):
        with GpuBackend(products=products) as backend:
            start = time.monotonic()
            backend._spares.wait_until_idle()
            print(f"products {products}: next made in {time.monotonic() - start:.2f} s")
            assert backend.healthy()


def test_ceilings(backend, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    start = time.monotonic()
    ceilings = backend.ceilings()
    print(f"{ceilings} in {time.monotonic() - start:.1f} s")
    facts = backend.facts
    if facts.theoretical_gb_per_s:
        for value in (ceilings.copy_gb_per_s, ceilings.read_gb_per_s, ceilings.write_gb_per_s):
            assert 0.5 * facts.theoretical_gb_per_s < value < 1.02 * facts.theoretical_gb_per_s
    assert ceilings.tflop_per_s["bfloat16"] > ceilings.tflop_per_s["float32"] > 1
    start = time.monotonic()
    assert backend.ceilings() == ceilings
    assert time.monotonic() - start < 0.5


def test_baselines_are_measured_and_failures_recorded(backend, task):
    from kagent_sandbox.judge.timing.baselines import measure_baselines

    lines = []
    start = time.monotonic()
    found = measure_baselines(task, "gpu", backend.facts, lines.append)
    print("\n".join(lines), f"\n{time.monotonic() - start:.1f} s; failed: {found.failed}")
    for case in ("small", "large"):
        assert {"eager", "compile", "compile max-autotune"} <= set(found.us[case]), found.failed
        assert found.failed[case]["fails"] == "ValueError: refuses this shape"
        assert "it ended the device's context: CUDA_ERROR_ASSERT" in found.failed[case]["faults"]
        assert found.captured[case]["waits for the device"] is False
    assert found.peak_bytes["large"]["eager"] >= 2 * 67108864
    assert measure_baselines(task, "gpu", backend.facts) == found


@pytest.mark.alone
def test_a_call_that_fills_the_hosts_time_is_captured():
    """Whether or not some of its samples are as good as the graph's."""
    from kagent_sandbox.device.cuda.baselines import ready
    from kagent_sandbox.device.cuda.timing import Clock

    clock = Clock(0)
    x = torch.ones(16 << 20, device=clock.device)
    y = torch.empty_like(x)
    clock.sync("making tensors")
    flush_us = clock.median_us([clock.flush])
    for share in (0.9, 1.2, 1.6):

        def call(wait_s=1e-6 * share * flush_us):
            end = time.perf_counter() + wait_s
            while time.perf_counter() < end:
                pass
            torch.mul(x, 2, out=y)

        found = ready(call, clock)
        print(f"host {share} of a flush: {found.captured}, {clock.median_us([found.work]):.1f} µs")
        assert found.captured
        found.close()
    plain = ready(lambda: y.copy_(x), clock)
    print(f"copy: captured {plain.captured}, {clock.median_us([plain.work]):.1f} µs")
    plain.close()


def test_a_capture_that_fails_disturbs_nothing_that_follows():
    """Torch 2.11 took the process for one that captures, from then on."""
    from kagent_sandbox.device.cuda.baselines import ready
    from kagent_sandbox.device.cuda.timing import Clock

    clock = Clock(0)
    x = torch.ones(1 << 20, device=clock.device)
    before = ready(lambda: x * 2, clock)
    waiting = ready(lambda: x * float(x[0].item()), clock)
    assert before.captured
    assert not waiting.captured
    assert torch.randn(8, device=clock.device).isfinite().all()
    for _ in range(2):
        after = ready(lambda: x * 3, clock)
        assert after.captured
        after.close()
    kept = torch.cuda.memory_reserved()
    torch.empty(1 << 30, dtype=torch.uint8, device=clock.device)  # and free at once
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= kept
    before.close()


def test_a_graph_keeps_the_inputs_of_its_work():
    """A replay reads addresses: what lies there must not be given to anybody else."""
    from kagent_sandbox.device.cuda.timing import Clock, Graph

    clock = Clock(0)
    count = 4 << 20
    result = torch.zeros(count, device=clock.device)

    def captured():
        given = torch.ones(count, device=clock.device)

        def work():
            torch.mul(given, 2, out=result)

        with torch.cuda.stream(clock.stream):
            work()
        torch.cuda.synchronize()
        return Graph(clock, work, clock.pool)

    graph = captured()
    others = [torch.full((count,), 7.0, device=clock.device) for _ in range(3)]
    torch.cuda.synchronize()
    graph.replay()
    clock.sync("replaying")
    assert result.eq(2).all()
    assert all(o.eq(7).all() for o in others)
    graph.close()


def test_baselines_live_in_the_launcher_beside_a_plan(backend, task):
    from kagent_sandbox.judge.timing.baselines import baseline_call

    case = task.gpu.bench[1]
    names = ["eager", "faults", "compile", "waits for the device", "fails"]
    calls = {f"baseline/{n}/0": baseline_call(task, case, n, seed=3) for n in names}
    arena = backend.arena(1 << 20)
    launcher = backend.launcher(arena, calls)
    try:
        print(launcher.baselines)
        assert launcher.baselines["baseline/fails/0"].failed == "ValueError: refuses this shape"
        assert not launcher.baselines["baseline/fails/0"].lacked
        assert "CUDA_ERROR_ASSERT" in launcher.baselines["baseline/faults/0"].failed
        assert not launcher.baselines["baseline/waits for the device/0"].captured
        s = Sketch()
        y = s.alloc(4096)
        source = 'extern "C" __global__ void one(int* y) { y[threadIdx.x] = 1; }'
        s.launch(cubin(source), "one", (1,), (32,), Pointer(y, 0))
        launcher.load(s.binaries)
        launcher.prepare("plan", s.plan(flat(y, 32, "int32")), s.offsets())
        for key in ("baseline/eager/0", "plan", "baseline/compile/0"):
            times = launcher.samples([key], 10, limit_s=30.0)
            print(key, launcher.baselines.get(key), f"{sorted(times)[5]:.2f} µs")
            assert len(times) == 10
        us = sorted(launcher.samples(["baseline/compile/0"], 10, limit_s=30.0))[5]
        assert 60 < us < 600  # 256 MiB moved
        launcher.samples(["baseline/waits for the device/0"], 3, limit_s=30.0)
    finally:
        launcher.close()
        arena.close()


@pytest.mark.parametrize("name", ["softmax", "attention"])
def test_what_was_compiled_ahead_is_loaded_by_the_launcher_of_a_race(backend, name):
    from kagent.tasks import find_task
    from kagent_sandbox.judge.timing.baselines import baseline_call

    task = find_task(name)
    case = task.gpu.bench[1]
    backend.prefetch_race()
    backend._race.connection().kill()  # the compiler is imported
    modes = ["compile", "compile max-autotune"]
    given = [baseline_call(task, case, m, seed=4) for m in modes]
    steps, turn, compiled = backend.compile_ahead(given, GIB), "work", None
    while compiled is None:
        start, now = time.monotonic(), turn
        try:
            turn = next(steps)
        except StopIteration as end:
            compiled = end.value
        print(f"ahead: {time.monotonic() - start:.1f} s of {now}")
    print(f"{[len(a) for a in compiled]} bytes")
    assert all(compiled)
    calls = {f"baseline/{m}/0": baseline_call(task, case, m, seed=5) for m in modes}
    arena = backend.arena(1 << 20)
    try:
        for archives in ((), compiled):
            start = time.monotonic()
            launcher = backend.launcher(arena, calls, archives)
            what = "loading" if archives else "compiling"
            print(f"launcher ready in {time.monotonic() - start:.1f} s, {what}")
            assert not any(how.failed for how in launcher.baselines.values())
            us = {k: sorted(launcher.samples([k], 10, limit_s=30.0))[5] for k in calls}
            print({k: f"{v:.1f} µs" for k, v in us.items()})
            launcher.close()
    finally:
        arena.close()


def test_memory_that_torch_keeps_is_given_back():
    from kagent_sandbox.device.cuda.backend import GpuBackend

    with GpuBackend() as backend:
        torch.empty(2 * GIB, dtype=torch.uint8, device=backend.device)
        assert torch.cuda.memory_reserved(backend.device) >= 2 * GIB
        backend.free_unused()
        assert torch.cuda.memory_reserved(backend.device) < GIB
