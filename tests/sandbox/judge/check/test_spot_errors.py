"""Errors of what was read of timed executions, held against torch's own on the same draw."""

import contextlib
from types import SimpleNamespace

import pytest
import torch
from doubling_task import TASK
from kagent_sandbox.data.task import load_task
from kagent_sandbox.data.verdict import Stage, Status
from kagent_sandbox.device.cpu.traits import TRAITS as CPU
from kagent_sandbox.device.traits import InputPolicy
from kagent_sandbox.judge.arena.session import CandidateRejected
from kagent_sandbox.judge.check import numerics
from kagent_sandbox.judge.check.checker import Checker
from kagent_sandbox.judge.check.inputs import InputSampler
from kagent_sandbox.judge.check.spot_checks import (
    choose_rows,
    choose_spot_checks,
    spot_checks_at,
)
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
ROWS = """

def reference_rows(rows, *, x):
    return [x.double()[rows[0]]]
"""


POLICIES = {"released": InputPolicy(), "kept for others": CPU.inputs}


@pytest.fixture(params=POLICIES)
def checker(tmp_path, request):
    (tmp_path / "task.toml").write_text(TASK)
    return checker_of(tmp_path, REFERENCE + ROWS, POLICIES[request.param])


@pytest.fixture(params=POLICIES)
def without_rows(tmp_path, request):
    """The same, where single rows of the reference cannot be had."""
    return checker_of(tmp_path, REFERENCE, POLICIES[request.param])


def checker_of(folder, reference, policy):
    (folder / "task.toml").write_text(TASK)
    (folder / "reference.py").write_text(reference)
    task = load_task(folder)
    return Checker(task, InputSampler(task, torch.device("cpu"), policy))


@pytest.fixture
def case(checker):
    return easy_case(checker)


def easy_case(checker):
    """A case of which torch's typical errors are those of an easy draw."""
    case = checker.task.cpu.bench[0]
    checker.sampler.usual_errors(draw(checker, case, hard=False), typical=True)
    return case


@pytest.fixture
def calls(without_rows, monkeypatch):
    """Names of the functions of reference.py that are called."""
    names = []
    call = without_rows.sampler.call

    def counted(which, *arguments):
        names.append(which)
        return call(which, *arguments)

    monkeypatch.setattr(without_rows.sampler, "call", counted)
    return names


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


def test_the_reference_is_not_computed_where_a_kernel_does_as_torch(without_rows, calls):
    """Of all of every timed execution's draw, in float64, it is most of a measurement's time."""
    case = easy_case(without_rows)
    del calls[:]
    draws = [draw(without_rows, case, hard=hard) for hard in (False, True)]
    torchs = [without_rows.task.reference().eager(**d.tensors) for d in draws]
    readings = [read(without_rows, *each) for each in zip(draws, torchs, strict=True)]
    without_rows.compare_spot_checks(readings, case)
    assert set(calls) == {"eager"}


def test_a_kernel_may_be_better_than_torch(without_rows, calls):
    """It differs from torch by all that torch errs, and is held against the reference."""
    case = easy_case(without_rows)
    del calls[:]
    hard, easy = (draw(without_rows, case, hard=h) for h in (True, False))
    readings = [read(without_rows, d, d.tensors["x"] * 1.0) for d in (hard, easy)]
    (errors,) = element_errors(readings)
    assert worst_by_draw(readings, 0, errors)[0][0] > 1e-6
    for each in (hard, easy):
        without_rows.sampler.release(each)
    without_rows.compare_spot_checks(readings, case)
    assert calls.count("reference") == 1  # of the one that differs
    (errors,) = element_errors(readings)
    assert float(errors.amax()) == 0.0
    assert hard.known_results is None
    kept = hard.known_spot_checks[0]  # what the next kernel is held against is as it was
    torchs = without_rows.task.reference().eager(without_rows.sampler._drawn(hard).tensors["x"])
    assert torch.equal(kept.expected, torchs.flatten()[kept.index].double())


@pytest.mark.parametrize("hard", [False, True])
@pytest.mark.parametrize("wrong", [lambda y: y * 1.01, torch.zeros_like, lambda y: y / 0])
def test_whoever_is_wrong_is_held_against_the_reference(without_rows, hard, wrong):
    case = easy_case(without_rows)
    input_set = draw(without_rows, case, hard=hard)
    found = wrong(without_rows.task.reference().eager(**input_set.tensors))
    with pytest.raises(CandidateRejected, match="wrong where it was timed"):
        without_rows.compare_spot_checks([read(without_rows, input_set, found)], case)


@pytest.mark.parametrize("width", [1, 5, 40])
def test_exact_spot_checks_are_those_that_are_chosen(width):
    reference = torch.randn(7, width, dtype=torch.float64)
    reference[2, 0] = torch.inf
    rows = torch.tensor([0, 2, 6])
    chosen = choose_spot_checks(rows, reference[rows], torch.float32, 1.0)
    exact = spot_checks_at(chosen.index.flatten(), reference, torch.float32, 1.0)
    assert torch.equal(exact.expected, chosen.expected.flatten())
    assert torch.equal(exact.magnitude, chosen.magnitude.flatten())


OVERFLOWS = REFERENCE.replace("return x + 4096 - 4096 if x[0, 0] > 0 else x", "return x / (x > 0)")


@pytest.mark.parametrize("as_torch", [True, False])
def test_infinities_are_where_the_reference_has_them(tmp_path, as_torch):
    """As in checks: torch may overflow where the reference does not."""
    checker = checker_of(tmp_path, OVERFLOWS, InputPolicy())
    checker.sampler._yardsticks = {}
    case = checker.task.cpu.bench[0]
    few = numerics.Errors(0.0, 0.0, 0.0)
    checker.sampler._yardsticks[case.name] = (few,)
    input_set = checker.sampler.fresh(case, 1)
    x = input_set.tensors["x"]
    reading = read(checker, input_set, x / (x > 0) if as_torch else x)
    if as_torch:
        with pytest.raises(CandidateRejected, match="wrong where it was timed"):
            checker.compare_spot_checks([reading], case)
    else:
        checker.compare_spot_checks([reading], case)


OF_ONE_SIZE = REFERENCE.replace(
    "x = torch.randn(shape, generator=generator, device=device)",
    "x = torch.randn(shape, generator=generator, device=device).sign()",
).replace("return x + 4096 - 4096 if x[0, 0] > 0 else x", "return x * 1.0001")


@pytest.mark.parametrize(
    ("error", "asked", "right"),
    [
        (1.0, False, True),  # torch's own
        (1.9, False, True),  # torch's and less than the rest
        (0.0, False, True),  # the reference's results differ from torch's by just the rest
        (-0.5, True, True),  # further from torch than the rest, and near the reference
        (2.5, True, False),  # nearer to torch than the limit, and too far from the reference
        (-2.5, True, False),
    ],
)
def test_torchs_error_and_the_rest_make_the_limit(tmp_path, error, asked, right):
    """The task allows twice torch's error, of which torch's results have spent half.

    Args:
        tmp_path: The task's folder.
        error: Of the kernel, in multiples of torch's.
        asked: Whether it is held against the reference.
        right: Whether it passes.
    """
    checker = checker_of(tmp_path, OF_ONE_SIZE, InputPolicy())
    case = checker.task.cpu.bench[0]
    input_set = checker.sampler.fresh(case, 1)
    checker.sampler.usual_errors(checker.sampler.fresh(case, 2), typical=True)
    reading = read(checker, input_set, input_set.tensors["x"] * (1 + 0.99995e-4 * error))
    of_torch = reading.spot_checks[0].expected.clone()
    with contextlib.nullcontext() if right else pytest.raises(CandidateRejected):
        checker.compare_spot_checks([reading], case)
    assert torch.equal(reading.spot_checks[0].expected, of_torch) == (not asked)


def test_a_task_that_seeds_torch_does_not_tell_the_places():
    """Whoever knows the seed would know which elements are compared."""
    found = []
    for _ in range(2):
        torch.manual_seed(0)
        rows = choose_rows(1 << 40, torch.device("cpu"))
        spots = choose_spot_checks(rows, torch.ones(4, 1 << 20), torch.float32, 1.0)
        found.append((rows, spots.index, spots.some(4).index % 16))
    for one, other in zip(*found, strict=True):
        assert not torch.equal(one, other)
