"""Inputs of a check are drawn one case ahead, by a thread that ends with the check."""

import threading

import pytest
import torch
from handmade_candidates import REFERENCE, write_task
from kagent_sandbox.data.task import load_task
from kagent_sandbox.device.traits import InputPolicy
from kagent_sandbox.errors import TaskError
from kagent_sandbox.judge.check import check_inputs
from kagent_sandbox.judge.check.check_inputs import draw_sets, drawn_new, drawn_sets
from kagent_sandbox.judge.check.inputs import InputSampler

POLICIES = {"all new": InputPolicy(), "kept": InputPolicy(pool=3)}


@pytest.fixture
def task(tmp_path):
    return load_task(write_task(tmp_path))


@pytest.mark.parametrize("policy", POLICIES)
def test_every_case_has_draws_with_the_reference_on_each(task, policy):
    sampler = InputSampler(task, torch.device("cpu"), POLICIES[policy])
    cases = task.cases("cpu").check
    with drawn_sets(sampler, cases) as sets:
        found = list(sets)
    for case, (first, other, changed) in zip(cases, found, strict=True):
        assert first.case == other.case == changed.case == case
        assert first is not other
        assert all(d.known_results is not None for d in (first, other, changed))
        assert first.known_errors is not None
        assert changed.is_altered
        (name,) = other.tensors
        assert int((other.tensors[name] != changed.tensors[name]).sum()) == 1
        differ = (other.known_results[0] - changed.known_results[0]).abs().amax()
        assert differ > 1e-3 * other.known_results[0].abs().amax()


def test_a_draw_is_altered_once(task):
    sampler = InputSampler(task, torch.device("cpu"), POLICIES["kept"])
    case = task.cases("cpu").check[0]
    found = [draw_sets(sampler, case) for _ in range(8)]
    assert len({id(altered) for _, _, altered in found}) <= 3  # as many as there are draws


NO_VALUE_TWICE = """
def inputs(case, generator, device):
    x = torch.randn(case.dims["M"], case.dims["N"], generator=generator, device=device)
    return {"x": x}

def reference(*, x):
    if not x.isfinite().all() or (x.abs() == x.abs().amax()).sum() > 1:
        raise ValueError("not of this task")
    return 2 * x.double()
"""


def test_where_no_element_may_be_changed_there_are_two_draws(tmp_path):
    folder = write_task(tmp_path)
    begin, _, end = REFERENCE.partition("def inputs")
    _, _, end = end.partition("def eager")
    (folder / "reference.py").write_text(begin + NO_VALUE_TWICE.lstrip() + "\ndef eager" + end)
    task = load_task(folder)
    sampler = InputSampler(task, torch.device("cpu"), POLICIES["all new"])
    assert len(draw_sets(sampler, task.cases("cpu").check[0])) == 2


def test_no_thread_is_left_where_a_check_ends_early(task):
    before = set(threading.enumerate())
    sampler = InputSampler(task, torch.device("cpu"), POLICIES["all new"])
    with drawn_sets(sampler, task.cases("cpu").check) as sets:
        next(sets)
        assert set(threading.enumerate()) > before
    assert set(threading.enumerate()) == before


def test_a_reference_that_fails_is_the_tasks_fault_and_names_its_case(tmp_path):
    folder = write_task(tmp_path)
    text = REFERENCE.replace("return 2 * x.double()", "return 2 * x.double() + torch.ones(7, 1)")
    (folder / "reference.py").write_text(text)  # only the case of seven rows can do that
    task = load_task(folder)
    sampler = InputSampler(task, torch.device("cpu"), POLICIES["all new"])
    with drawn_sets(sampler, task.cases("cpu").check) as sets:
        assert next(sets)[0].case.name == "odd"
        with pytest.raises(TaskError, match="padded"):
            next(sets)


@pytest.mark.parametrize("most_bytes", [0, 1 << 40])
def test_new_inputs_of_each_case_whether_small_or_large(task, monkeypatch, most_bytes):
    monkeypatch.setattr(check_inputs, "MOST_AHEAD_BYTES", most_bytes)
    sampler = InputSampler(task, torch.device("cpu"), POLICIES["kept"])
    cases = task.cases("cpu").check
    with drawn_new(sampler, [*cases, *cases]) as input_sets:
        found = list(input_sets)
    assert [d.case for d in found] == [*cases, *cases]
    assert len({d.number for d in found}) == len(found)
    assert all(d.known_results is not None for d in found)
