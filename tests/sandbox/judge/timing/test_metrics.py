import pytest
from handmade_candidates import write_task
from kagent.tasks import find_task
from kagent_sandbox.data.device import Ceilings, DeviceFacts
from kagent_sandbox.data.plan import KernelInfo, Launch, Plan
from kagent_sandbox.data.task import load_task
from kagent_sandbox.data.verdict import CaseTiming
from kagent_sandbox.judge.timing import metrics

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
    assert metrics.attainable_us(task, case, CEILINGS) == pytest.approx(nbytes / 2000 / 1e3)
    reads_more = task.model_copy(update={"written": "M * N"})
    read, written = nbytes - 4096**2, 4096**2
    expected = (2 * written / 2000 + (read - written) / 1000) / 1e3
    assert metrics.attainable_us(reads_more, case, CEILINGS) == pytest.approx(expected)
    product = task.model_copy(update={"matrix": True, "flops": "M * N * 1000"})
    assert metrics.attainable_us(product, case, CEILINGS) == pytest.approx(4096**2 * 1000 / 50e6)


def test_times_above_the_measured_roofline_are_suspect(task, case):
    limit_us = (2 * 4096 * 4096 * 4 - 2 * (1 << 20)) / CEILINGS.copy_gb_per_s / 1e3 / 1.1
    limit_us += (1 << 20) / CEILINGS.read_gb_per_s / 1e3 / 1.1
    fast = metrics.suspicion(task, case, 0.99 * limit_us, facts(), CEILINGS, 1)
    assert fast is not None
    assert "128.0 MiB must move" in fast
    assert "of the roofline (alarm above 110%)" in fast
    assert metrics.suspicion(task, case, 1.01 * limit_us, facts(), CEILINGS, 1) is None


@pytest.mark.parametrize(("rows", "hidden"), [(1024, 1.0), (4096, 50 / 64), (32768, 50 / 512)])
def test_on_a_gpu_results_that_fit_l2_need_not_leave_it(task, case, rows, hidden):
    """50 MiB of L2. 16, 64 and 512 MiB go in and out."""
    sized = case.model_copy(update={"M": rows, "N": 4096})
    mib = rows * 4096 * 4 / 2**20
    written = mib * (1 - hidden)
    us = 2 * written * 2**20 / CEILINGS.copy_gb_per_s / 1e3
    us += (mib - written) * 2**20 / CEILINGS.read_gb_per_s / 1e3
    for share, honest in ((1.01, True), (0.99, False)):
        found = metrics.suspicion(task, sized, share * us / 1.1, facts(l2=50 << 20), CEILINGS, 1)
        assert (found is None) is honest


def test_on_a_cpu_the_cache_explains_results_of_a_sample_as_far_as_it_holds_them(task, case):
    """Four executions of 64 MiB in and 64 MiB out, beside a cache of 128 MiB: half of the results.

    Inputs were flushed from it before.
    """
    cpu = facts("cpu", 0.0, l2=128 << 20)
    half = (32 << 20) / 1e3
    us = (2 * half / CEILINGS.copy_gb_per_s + half / CEILINGS.read_gb_per_s) / 1.1
    assert metrics.suspicion(task, case, 0.99 * us, cpu, CEILINGS, 4) is not None
    assert metrics.suspicion(task, case, 1.01 * us, cpu, CEILINGS, 4) is None


@pytest.mark.parametrize("kind", ["gpu", "cpu"])
def test_products_have_a_peak_on_every_device(task, case, kind):
    product = task.model_copy(update={"matrix": True, "flops": "M * N * 1000"})
    peak_us = 4096**2 * 1000 / (1.1 * 50e6)
    text = metrics.suspicion(product, case, 0.99 * peak_us, facts(kind), CEILINGS, 1)
    assert text is not None
    assert "products" in text
    assert metrics.suspicion(product, case, 1.01 * peak_us, facts(kind), CEILINGS, 1) is None


def test_products_of_8_bits_have_their_own_ceiling(case):
    """fp8_linear's results are bfloat16; its products are those of its 8-bit arguments."""
    ceilings = Ceilings(2000.0, 1000.0, 500.0, {"bfloat16": 700.0, "float8_e4m3fn": 1300.0})
    task = find_task("fp8_linear")
    sized = task.gpu.bench[0].model_copy(update={"M": 8192, "N": 8192, "K": 8192})
    us = 2 * 8192**3 / 1300e6
    assert metrics.attainable_us(task, sized, ceilings) == pytest.approx(us)
    assert metrics.suspicion(task, sized, us, facts(), ceilings, 1) is None
    assert "products" in str(metrics.suspicion(task, sized, 0.9 * us, facts(), ceilings, 1))


def test_products_of_many_bits_may_be_put_together_from_those_of_fewer(task, case):
    product = task.model_copy(update={"matrix": True, "flops": "M * N * 1000"})
    ceilings = Ceilings(2000.0, 1000.0, 500.0, {"float32": 50.0, "bfloat16": 700.0})
    us = 4096**2 * 1000 / 50e6
    assert metrics.attainable_us(product, case, ceilings) == pytest.approx(us)
    assert metrics.suspicion(product, case, us / 4, facts(), ceilings, 1) is None


@pytest.mark.parametrize("narrow", ["int8", "float8_e4m3fn"])
def test_products_of_8_bits_explain_no_time_of_wider_arguments(task, case, narrow):
    """They are twice as fast as those of 16 bits, and a number of 16 bits takes more than one."""
    ceilings = Ceilings(2000.0, 1000.0, 500.0, {"bfloat16": 700.0, narrow: 1300.0})
    product = task.model_copy(update={"matrix": True, "flops": "M * N * 10000"})
    us = 0.99 * 4096**2 * 10000 / (1.1 * 700e6)
    assert "products" in str(metrics.suspicion(product, case, us, facts(), ceilings, 1))
    weight = task.arguments[0].model_copy(update={"name": "weight", "dtype": "int8"})
    mixed = product.model_copy(update={"arguments": (*task.arguments, weight)})
    assert metrics.suspicion(mixed, case, us, facts(), ceilings, 1) is None


def test_clocks_that_disagree_are_suspect():
    assert metrics.disagreement(100.0, 110.0) is None
    assert "clock" in (metrics.disagreement(100.0, 200.0) or "")


def test_the_score_is_a_geometric_mean():
    def timed(us, baseline):
        return CaseTiming("c", us, us * 0.99, us * 1.01, 30, 0.5, 1.0, 1.0, baseline_us=baseline)

    value, stderr = metrics.score([timed(50.0, 100.0), timed(100.0, 50.0)])
    assert value == pytest.approx(1.0)
    assert 0 < stderr < 0.01
    with pytest.raises(ValueError, match="baseline"):
        metrics.score([timed(50.0, None)])


def test_share_of_the_roofline_is_attainable_over_taken(task, case):
    plan = Plan("cpu", (), (), (), ())
    timed = metrics.case_timing(task, case, plan, [80.0], CEILINGS, config=0, baseline_us=None)
    assert timed.roofline_share == pytest.approx(metrics.attainable_us(task, case, CEILINGS) / 80)
    assert timed.gb_per_s == pytest.approx(task.min_bytes(case) / 80 / 1e3)


def test_resources_are_the_most_that_any_launch_asks_for():
    kernel = KernelInfo("h", "cuda", "rows", (), 32, 0, 100, {16: 4})
    small = Launch("h", (8, 1, 1), (128, 1, 1), (), shared=1000)
    large = Launch("h", (8, 1, 1), (32, 8, 1), ())
    plans = [Plan("sm_90a", (), (op,), (), (kernel,)) for op in (small, large)]
    (found,) = metrics.resources(plans)
    assert (found["threads"], found["shared_bytes"], found["registers"]) == (256, 1100, 32)
    assert found["load_bytes"] == {"16": 4}
