"""What a GPU's times can be trusted with: cold caches, the floor, noise, and who else is there."""

import statistics

import pytest
from kagent_sandbox.data.verdict import Passed, Rejected
from plans import Sketch, cubin, flat
from test_gpu_judge import REFERENCE, TASK, build, source

pytestmark = [pytest.mark.gpu, pytest.mark.alone]
MIB = 1 << 20
READ = """
extern "C" __global__ void read(const float4* x, float* y, long long n) {
  float s = 0;
#if KEEP
  unsigned long long keep;
  asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(keep));
#endif
  for (long long i = blockIdx.x * 512ll + threadIdx.x; i < n; i += gridDim.x * 512ll) {
    float4 v;
#if KEEP
    asm volatile("ld.global.L2::cache_hint.v4.f32 {%0, %1, %2, %3}, [%4], %5;"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(x + i), "l"(keep));
#else
    v = x[i];
#endif
    s += v.x + v.y + v.z + v.w;
  }
  if (s == 12345.f) y[0] = s;
}
"""


def read_plan(keep, nbytes):
    from kagent_sandbox.data.plan import Pointer, Scalar

    sketch = Sketch()
    x, y = sketch.input(nbytes), sketch.input(512)
    code = cubin(READ.replace("KEEP", str(int(keep))))
    args = (Pointer(x, 0), Pointer(y, 0), Scalar("i64", nbytes // 16))
    sketch.launch(code, "read", (528,), (512,), *args)
    return sketch, sketch.plan(flat(y, 1))


def test_lines_that_a_kernel_wants_to_keep_do_not_outlive_the_flush(launcher):
    """24 MiB from L2 would take a third of the time that they take from memory."""
    us = {}
    for keep in (False, True):
        sketch, plan = read_plan(keep, 24 * MIB)
        launcher.load(sketch.binaries)
        launcher.prepare(f"keep{keep}", plan, sketch.offsets())
    for _ in range(3):
        for keep in (False, True):
            times = launcher.samples([f"keep{keep}"], 16, limit_s=30.0)
            us.setdefault(keep, []).extend(times)
    plain, kept = (statistics.median(us[keep]) for keep in (False, True))
    print(f"plain {plain:.1f} µs, with evict_last {kept:.1f} µs")
    assert kept > 0.75 * plain


def test_a_graph_of_products_has_a_workspace_that_outlives_other_graphs():
    """It is written in each replay: of these products cuBLAS splits the sum, on an H100."""
    import torch
    from kagent_sandbox.device.cuda.timing import Clock, Graph

    clock = Clock(0)
    with torch.cuda.stream(clock.stream):
        x = torch.randn(32768, 640, device="cuda", dtype=torch.bfloat16)
        results = [torch.empty(640, 640, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
        works = [lambda y=y: torch.mm(x.t(), x, out=y) for y in results]
        for work in works:
            work()
    first, second = (Graph(clock, work, clock.pool) for work in works)
    second.replay()
    clock.sync("replaying")
    expected = results[1].clone()
    first.close()
    torch.cuda.empty_cache()
    with torch.cuda.stream(clock.stream):
        others = [torch.full((8 * MIB,), 7.0, device="cuda") for _ in range(8)]
    second.replay()
    clock.sync("replaying after another graph was closed")
    assert torch.equal(results[1], expected)
    assert all(bool((other == 7.0).all()) for other in others)
    second.close()


@pytest.fixture(scope="module")
def small_judge(tmp_path_factory):
    """Of a task whose results (16 MiB) fit into L2, and whose kernel takes about 20 µs."""
    from kagent_sandbox.data.task import load_task
    from kagent_sandbox.device.cuda.backend import GpuBackend
    from kagent_sandbox.judge.judge import Judge

    folder = tmp_path_factory.mktemp("small")
    (folder / "task.toml").write_text(TASK.replace("M = 4096\nN = 16384", "M = 1000\nN = 8192"))
    (folder / "reference.py").write_text(REFERENCE)
    made = Judge(load_task(folder), GpuBackend(), 5, {"bench": 20.0})
    yield made
    made.close()


def test_a_kernel_whose_results_stay_in_l2_is_not_suspect(small_judge, builder):
    from kagent_sandbox.data.build import Contender

    built = build(small_judge, builder, source(), configs=2)
    errors = small_judge.check(built)
    assert not isinstance(errors, Rejected), errors
    for _ in range(3):
        passed = small_judge.measure(built, errors, Contender("itself", built, {}))
        assert isinstance(passed, Passed), passed
        print(f"{passed.timings[0].kernel_us:.1f} µs, notes {passed.notes}")


def test_the_noise_of_this_machine(small_judge):
    found = small_judge.find_noise()
    print(found.text, f"{found.seconds:.2f} s")
    assert found.kernel_us > 10
    assert found.factor >= 1


def test_the_gpu_is_watched(small_judge):
    from kagent_sandbox.device.interference import GpuWatch

    watch = small_judge.backend.watch()
    watch.begin()
    assert isinstance(watch, GpuWatch)
    print("notes:", list(watch.notes()), "crowded:", watch.crowded())
    assert watch._before.sm_mhz > 0
