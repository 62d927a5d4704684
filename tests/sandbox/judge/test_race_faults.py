"""Races in which something fails that is no candidate: a baseline, a launcher, the driver."""

import contextlib
from types import SimpleNamespace

import pytest
from handmade_candidates import GOOD, SLOW, built, write_task
from kagent_sandbox.data.build import Contender
from kagent_sandbox.data.device import Ceilings
from kagent_sandbox.data.task import load_task
from kagent_sandbox.data.verdict import Status
from kagent_sandbox.device.baseline_calls import ReadyBaseline
from kagent_sandbox.device.cpu.backend import CpuBackend
from kagent_sandbox.device.cpu.race_baselines import CpuRaceBaselines
from kagent_sandbox.device.cuda.race_baselines import MOST_LOSSES, GpuRaceBaselines
from kagent_sandbox.device.cuda.traits import TRAITS
from kagent_sandbox.device.interface import BaselineFailed, LaunchFailed
from kagent_sandbox.errors import DeviceError
from kagent_sandbox.judge.judge import Judge
from kagent_sandbox.judge.timing.race_baselines import RaceBaselines

SEED = 5


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    return load_task(write_task(tmp_path_factory.mktemp("scale")))


class Flaky(CpuBackend):
    """Launchers whose first `count` samples fail with a blame."""

    count = 0
    blame = "unclear"

    def settle(self):
        """Flush nothing: no time matters."""

    def launcher(self, arena, **options):
        launcher = super().launcher(arena, **options)
        sample = launcher.sample

        def failing(keys, **options):
            if self.count:
                self.count -= 1
                raise LaunchFailed(Status.GPU_FAULT, "CUDA_ERROR_UNKNOWN", blame=self.blame)
            return sample(keys, **options)

        launcher.sample = failing
        return launcher


@pytest.fixture(scope="module")
def judge(task, shared):
    with contextlib.closing(Judge(task, Flaky(), SEED)) as judge:
        judge._ceilings = Ceilings(10.0, 10.0, 10.0, {"float32": 0.1})
        yield judge


class Beside:
    """Baselines that fail when they are timed, `count` times in all."""

    def __init__(self, count):
        self.count = count
        self.opened = []

    def compile_ahead(self, hidden, visible):
        """Nothing is compiled."""

    def open(self, case, arena):
        self.opened.append(case.name)
        names = ["eager"] if self.count else []
        missing = {} if names else {"eager": "failed twice beside candidates"}
        opened = SimpleNamespace(
            names=names, missing=missing, lacking=(), launcher=None, samples=self.samples
        )
        return contextlib.nullcontext(opened)

    def samples(self, name, count):
        self.count -= 1
        raise BaselineFailed(f"{name}: CUDA_ERROR_ILLEGAL_ADDRESS")


def contenders(task):
    options = {"race": True}
    return [
        Contender("good", built(task, SEED, GOOD, **options), {}),
        Contender("slow", built(task, SEED, SLOW, **options), {}),
    ]


def test_a_baseline_that_fails_is_nobody_s_fault(task, judge):
    race_baselines = Beside(MOST_LOSSES)
    race = judge.race(contenders(task)[:1], hidden=True, race_baselines=race_baselines)
    assert not any("CUDA" in v.message for v in race.failed.values())
    assert race.cases[0].baselines == {}
    assert race.cases[0].missing == {"eager": "failed twice beside candidates"}
    assert race_baselines.opened == ["hidden_bench_0"] * (MOST_LOSSES + 1)


def test_a_failure_that_may_be_the_machine_s_counts_the_second_time(task, judge):
    def failures(count):
        """Of the driver's; on a busy machine a race may fail for other reasons."""
        judge.backend.count = count
        race = judge.race(contenders(task)[:1], hidden=True)
        return [v.status for v in race.failed.values() if v.message == "CUDA_ERROR_UNKNOWN"]

    assert failures(1) == []
    assert failures(2) == [Status.GPU_FAULT]
    judge.backend.count, judge.backend.blame = 100, "machine"
    with pytest.raises(DeviceError, match="no kernel can cause that"):
        judge.race(contenders(task), hidden=True)
    judge.backend.count, judge.backend.blame = 0, "unclear"


class Device:
    """A backend whose launchers' baselines fault."""

    outcome = ReadyBaseline(captured=True)
    status = Status.GPU_FAULT

    def __init__(self):
        self.asked = []
        self.closed = 0

    def launcher(self, arena, baselines, compiled):
        self.asked.append(sorted(key.split("/")[1] for key in baselines))
        return SimpleNamespace(
            baselines=dict.fromkeys(baselines, self.outcome), samples=self.samples, close=self.close
        )

    def samples(self, keys, count, *, limit_s):
        if keys == ["baseline/eager/0"]:
            raise LaunchFailed(self.status, "CUDA_ERROR_ILLEGAL_ADDRESS replaying the plan")
        return [1.0] * count

    def close(self):
        self.closed += 1


def test_a_baseline_of_a_gpu_is_tried_once_more_and_then_left_out(task):
    device = Device()
    race_baselines = RaceBaselines(task, GpuRaceBaselines(device), TRAITS.compile_modes)
    first, second = task.gpu.bench[0], task.gpu.check[0]
    for _ in range(MOST_LOSSES):
        with race_baselines.open(first, None) as opened:
            assert "eager" in opened.names
            with pytest.raises(BaselineFailed, match="eager: CUDA_ERROR_ILLEGAL_ADDRESS"):
                opened.samples("eager", 3)
            assert opened.samples("compile", 3) == [1.0] * 3
    with race_baselines.open(first, None) as opened:
        assert "eager" not in opened.names
        assert opened.missing["eager"].startswith(
            "failed twice beside candidates: CUDA_ERROR_ILLEGAL"
        )
        assert opened.samples("compile", 3) == [1.0] * 3
    with race_baselines.open(second, None) as opened:
        assert "eager" in opened.names  # in another case it may well work
    assert "eager" not in device.asked[-2]
    assert device.closed == MOST_LOSSES + 2


def test_a_baseline_of_a_gpu_that_lacks_memory_is_told_from_one_that_fails(task):
    device = Device()
    race_baselines = RaceBaselines(task, GpuRaceBaselines(device), TRAITS.compile_modes)
    case = task.gpu.bench[0]
    for lacked in (True, False):
        device.outcome = ReadyBaseline(failed="no", lacked=lacked)
        with race_baselines.open(case, None) as opened:
            assert opened.missing["eager"] == "no"
            assert ("eager" in opened.lacking) is lacked
    device.outcome, device.status = ReadyBaseline(captured=True), Status.RESOURCE_LIMIT
    for _ in range(MOST_LOSSES):
        with race_baselines.open(case, None) as opened, pytest.raises(BaselineFailed):
            opened.samples("eager", 3)
    with race_baselines.open(case, None) as opened:
        assert list(opened.missing) == list(opened.lacking) == ["eager"]


@pytest.mark.parametrize(
    ("error", "lacking"),
    [("torch.OutOfMemoryError('CUDA out of memory')", ["eager"]), ("ValueError('no')", [])],
)
def test_a_baseline_of_a_cpu_that_lacks_memory_is_told_from_one_that_fails(
    tmp_path, error, lacking
):
    folder = write_task(tmp_path)
    reference = folder / "reference.py"
    reference.write_text(f"{reference.read_text()}\n\ndef eager(**_):\n    raise {error}\n")
    race_baselines = RaceBaselines(load_task(folder), CpuRaceBaselines(), ())
    with race_baselines.open(race_baselines.task.cpu.bench[0], None) as opened:
        assert list(opened.missing) == ["eager"]
        assert list(opened.lacking) == lacking
