"""Errors of what was read of timed executions, held against torch's own on the same draw."""

from types import SimpleNamespace

import pytest
import torch
from doubling_task import TASK
from kagent_sandbox.data.task import load_task
from kagent_sandbox.data.verdict import Stage, Status
from kagent_sandbox.device.cpu.traits import TRAITS as CPU
from kagent_sandbox.device.traits import InputPolicy
from kagent_sandbox.judge.arena.session import CandidateRejected
from kagent_sandbox.judge.check.checker import Checker
from kagent_sandbox.judge.check.inputs import InputSampler
from kagent_sandbox.judge.check.spot_reading import SpotReading, element_errors, worst_by_draw

REFERENCE = """
import torch

def inputs(case, generator, device):
    shape = case.dims["M"], case.dims["N"]
    x = torch.randn(shape, generator=generator, device=device)
    return {"x": x.to(getattr(torch, case.dtype))}

def reference(x):
    return x.double()

def eager(x):  # errs more on some draws, in all elements
    return x + 4096 - 4096 if x[0, 0] > 0 else x

def experts():
    return {}
"""


POLICIES = {"released": InputPolicy(), "kept for others": CPU.inputs}


@pytest.fixture(params=POLICIES)
def checker(tmp_path, request):
    (tmp_path / "task.toml").write_text(TASK)
    (tmp_path / "reference.py").write_text(REFERENCE)
    task = load_task(tmp_path)
    return Checker(task, InputSampler(task, torch.device("cpu"), POLICIES[request.param]))


@pytest.fixture
def case(checker):
    """A case of which torch's typical errors are those of an easy draw."""
    case = checker.task.cpu.bench[0]
    checker.sampler.usual_errors(draw(checker, case, hard=False), typical=True)
    return case


def draw(checker, case, *, hard):
    seeds = (checker.sampler.fresh(case, seed) for seed in range(100))
    return next(d for d in seeds if bool(d.tensors["x"][0, 0] > 0) == hard)


def read(checker, input_set, result):
    """What a sample reads of one plan, whose result is this one."""
    words = result.contiguous().view(torch.int32).flatten()
    plan = SimpleNamespace(outputs=[SimpleNamespace(dtype="float32")])
    placement = SimpleNamespace(plan=plan, words=lambda _, index: index)
    arena = SimpleNamespace(words=lambda _: words)
    spots = [checker.sampler.spot_checks(input_set)]
    reading = SpotReading(arena, [placement], spots, checker.task.compared, [input_set])
    reading.read()
    return reading


def test_a_kernel_may_err_as_torch_does_on_the_same_draw(checker, case):
    easy, hard = (draw(checker, case, hard=hard) for hard in (False, True))
    readings = [read(checker, d, checker.task.reference().eager(**d.tensors)) for d in (easy, hard)]
    (errors,) = element_errors(readings)
    first, last = worst_by_draw(readings, 0, errors)
    assert first[1] is hard
    assert first[0] > 1e-6 > last[0]
    for each in (easy, hard):
        checker.sampler.release(each)
    kept = bool(hard.tensors)  # or it is drawn once more
    checker.compare_spot_checks(readings, case)
    assert bool(hard.tensors) == kept
    assert hard.known_results is None  # whole results in float64
    assert hard.known_errors[0].element >= 0.999 * first[0]  # of all elements


def test_torch_is_not_asked_where_its_error_cannot_decide(checker, case, monkeypatch):
    input_set = draw(checker, case, hard=True)
    reading = read(checker, input_set, -input_set.tensors["x"])
    monkeypatch.setattr(checker.sampler, "errors_there", None)
    with pytest.raises(CandidateRejected, match="wrong where it was timed"):
        checker.compare_spot_checks([reading], case)


@pytest.mark.parametrize("hard", [False, True])
def test_it_may_not_err_more(checker, case, hard):
    input_set = draw(checker, case, hard=hard)
    wrong = checker.task.reference().eager(**input_set.tensors) * 1.01
    with pytest.raises(CandidateRejected) as caught:
        checker.compare_spot_checks([read(checker, input_set, wrong)], case)
    assert caught.value.verdict.status is Status.INCORRECT_NUMERICAL
    assert "wrong where it was timed" in caught.value.verdict.message


@pytest.mark.parametrize("factor", [1.0, 1.01])
def test_whole_results_of_timed_executions_are_held_against_the_same(checker, case, factor):
    input_set = draw(checker, case, hard=True)
    found = checker.task.reference().eager(**input_set.tensors) * factor

    def compare():
        return checker.compare([found], input_set, Stage.MEASURE, typical=True)

    if factor == 1.0:
        assert compare()[0].share_of_tolerance <= 1
        return
    with pytest.raises(CandidateRejected):
        compare()
