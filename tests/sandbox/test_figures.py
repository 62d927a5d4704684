import pytest
from judging import write_task
from kagent_sandbox import figures
from kagent_sandbox.launch.base import Ceilings, DeviceFacts
from kagent_sandbox.plan import KernelInfo, Launch, Plan
from kagent_sandbox.task import load_task
from kagent_sandbox.verdict import CaseTiming

CEILINGS = Ceilings(2000.0, 1000.0, 500.0, {"float32": 50.0})


def facts(kind="gpu", theoretical=3000.0, l2=1 << 20):
    return DeviceFacts(kind, "x", "sm_90a", "x", 1 << 34, l2, 100, theoretical)


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    return load_task(write_task(tmp_path_factory.mktemp("scale")))


@pytest.fixture(scope="module")
def case(task):
    return task.cpu.bench[0].model_copy(update={"M": 4096, "N": 4096})


def test_attainable_time_is_that_of_the_copy_mix(task, case):
    nbytes = 2 * 4096 * 4096 * 4
    assert figures.attainable_us(task, case, CEILINGS) == pytest.approx(nbytes / 2000 / 1e3)
    reads_more = task.model_copy(update={"written": "M * N"})
    read, written = nbytes - 4096**2, 4096**2
    expected = (2 * written / 2000 + (read - written) / 1000) / 1e3
    assert figures.attainable_us(reads_more, case, CEILINGS) == pytest.approx(expected)
    product = task.model_copy(update={"matrix": True, "flops": "M * N * 1000"})
    assert figures.attainable_us(product, case, CEILINGS) == pytest.approx(4096**2 * 1000 / 50e6)


def test_times_below_the_floor_are_suspect(task, case):
    floor_us = (2 * 4096 * 4096 * 4 - (1 << 20)) / 3000 / 1e3
    fast = figures.suspicion(task, case, 0.99 * floor_us, facts(), CEILINGS, 0.0)
    assert fast is not None
    assert "must move" in fast
    assert figures.suspicion(task, case, 1.01 * floor_us, facts(), CEILINGS, 0.0) is None
    unknown = facts(theoretical=0.0)
    assert figures.suspicion(task, case, 0.5 * floor_us, unknown, CEILINGS, 0.0) is None


@pytest.mark.parametrize(
    ("rows", "us", "honest"),
    [
        # An H100: 50 MiB of L2, 3,352 GB/s. 16 MiB in, 16 MiB out: results need not leave L2.
        (1024, 5.1, True),
        (1024, 4.9, False),
        # 64 MiB in and out: at least 64 + 14 MiB must move.
        (4096, 24.5, True),
        (4096, 24.3, False),
        # 512 MiB in and out.
        (32768, 305.0, True),
        (32768, 304.5, False),
    ],
)
def test_results_that_fit_l2_need_not_leave_it(task, case, rows, us, honest):
    sized = case.model_copy(update={"M": rows, "N": 4096})
    h100 = facts(theoretical=3352.0, l2=50 << 20)
    assert (figures.suspicion(task, sized, us, h100, CEILINGS, us) is None) is honest


def test_only_gpus_have_a_peak_of_matrix_products(task, case):
    product = task.model_copy(update={"matrix": True, "flops": "M * N * 1000"})
    peak_us = 4096**2 * 1000 / (1.5 * 50e6)
    text = figures.suspicion(product, case, 0.9 * peak_us, facts(), CEILINGS, 0.0)
    assert text is not None
    assert "products" in text
    cpu = facts("cpu", 0.0)
    assert figures.suspicion(product, case, 0.9 * peak_us, cpu, CEILINGS, 0.0) is None


def test_clocks_that_disagree_are_suspect(task, case):
    assert figures.suspicion(task, case, 100.0, facts(), CEILINGS, 110.0) is None
    text = figures.suspicion(task, case, 100.0, facts(), CEILINGS, 200.0)
    assert text is not None
    assert "clock" in text
    assert figures.suspicion(task, case, 100.0, facts("cpu", 0.0), CEILINGS, 250.0) is None
    assert figures.suspicion(task, case, 100.0, facts("cpu", 0.0), CEILINGS, 400.0) is not None


def test_a_kernel_that_remembers_its_inputs_is_noticed():
    honest = [(100.0, 101.0, 99.0, 100.0)] * 5
    assert not figures.remembers(honest)
    keeps = [(100.0, 5.0, 5.1, 4.9)] * 5
    assert figures.remembers(keeps)
    disturbed_once = [(400.0, 101.0, 99.0, 100.0), *honest[1:]]
    assert not figures.remembers(disturbed_once)
    skips_once = [(5.0, 5.0, 5.1, 4.9), *keeps[1:]]
    assert figures.remembers(skips_once)


def test_the_score_is_a_geometric_mean():
    def timed(us, baseline):
        return CaseTiming("c", us, us * 0.99, us * 1.01, 30, 0.5, 1.0, 1.0, baseline_us=baseline)

    value, stderr = figures.score([timed(50.0, 100.0), timed(100.0, 50.0)])
    assert value == pytest.approx(1.0)
    assert 0 < stderr < 0.01
    with pytest.raises(ValueError, match="baseline"):
        figures.score([timed(50.0, None)])


def test_share_of_the_roofline_is_attainable_over_taken(task, case):
    plan = Plan("cpu", (), (), (), ())
    timed = figures.case_timing(task, case, plan, [80.0], CEILINGS, config=0, baseline_us=None)
    assert timed.roofline_share == pytest.approx(figures.attainable_us(task, case, CEILINGS) / 80)
    assert timed.gb_per_s == pytest.approx(task.min_bytes(case) / 80 / 1e3)


def test_resources_are_the_most_that_any_launch_asks_for():
    kernel = KernelInfo("h", "cuda", "rows", (), 32, 0, 100, {16: 4})
    small = Launch("h", (8, 1, 1), (128, 1, 1), (), shared=1000)
    large = Launch("h", (8, 1, 1), (32, 8, 1), ())
    plans = [Plan("sm_90a", (), (op,), (), (kernel,)) for op in (small, large)]
    (found,) = figures.resources(plans)
    assert (found["threads"], found["shared_bytes"], found["registers"]) == (256, 1100, 32)
    assert found["load_bytes"] == {"16": 4}
