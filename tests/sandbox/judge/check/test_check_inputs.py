"""Inputs of a check are drawn one case ahead, by a thread that ends with the check."""

import threading

import pytest
import torch
from handmade_candidates import REFERENCE, write_task
from kagent_sandbox.data.task import load_task
from kagent_sandbox.device.traits import InputPolicy
from kagent_sandbox.errors import TaskError
from kagent_sandbox.judge.check import check_inputs
from kagent_sandbox.judge.check.check_inputs import drawn_new, drawn_pairs
from kagent_sandbox.judge.check.inputs import InputSampler

POLICIES = {"all new": InputPolicy(), "kept": InputPolicy(pool=3)}


@pytest.fixture
def task(tmp_path):
    return load_task(write_task(tmp_path))


@pytest.mark.parametrize("policy", POLICIES)
def test_every_case_has_two_draws_with_the_reference_on_each(task, policy):
    sampler = InputSampler(task, torch.device("cpu"), POLICIES[policy])
    cases = task.cases("cpu").check
    with drawn_pairs(sampler, cases) as pairs:
        found = list(pairs)
    for case, (first, other) in zip(cases, found, strict=True):
        assert first.case == other.case == case
        assert first is not other
        assert first.known_results is not None
        assert other.known_results is not None
        assert first.known_errors is not None


def test_no_thread_is_left_where_a_check_ends_early(task):
    before = set(threading.enumerate())
    sampler = InputSampler(task, torch.device("cpu"), POLICIES["all new"])
    with drawn_pairs(sampler, task.cases("cpu").check) as pairs:
        next(pairs)
        assert set(threading.enumerate()) > before
    assert set(threading.enumerate()) == before


def test_a_reference_that_fails_is_the_tasks_fault_and_names_its_case(tmp_path):
    folder = write_task(tmp_path)
    text = REFERENCE.replace("return 2 * x.double()", "return 2 * x.double() + torch.ones(7, 1)")
    (folder / "reference.py").write_text(text)  # only the case of seven rows can do that
    task = load_task(folder)
    sampler = InputSampler(task, torch.device("cpu"), POLICIES["all new"])
    with drawn_pairs(sampler, task.cases("cpu").check) as pairs:
        assert next(pairs)[0].case.name == "odd"
        with pytest.raises(TaskError, match="padded"):
            next(pairs)


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
