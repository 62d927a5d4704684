"""Inputs of a check are drawn one case ahead, by a thread that ends with the check."""

import dataclasses
import itertools
import math
import threading

import pytest
import torch
from handmade_candidates import REFERENCE, write_task
from kagent.tasks import find_task
from kagent_sandbox.data.task import load_task
from kagent_sandbox.device.traits import InputPolicy
from kagent_sandbox.errors import TaskError
from kagent_sandbox.judge.check import altered_inputs, check_inputs
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


@pytest.mark.parametrize("dtype", ["float32", "float8_e4m3fn", "int64", "int8", "uint8", "bool"])
@pytest.mark.parametrize("shape", [(3, 5), (1,), ()])
def test_one_element_of_any_dtype_is_changed(dtype, shape):
    of = getattr(torch, dtype)
    before = (torch.randperm(15)[: math.prod(shape)].view(shape) % 7).to(of)
    after = before.clone()
    done = altered_inputs._change(after)
    changed = int((after.float() != before.float()).sum())
    if before.numel() == 1 and not (of.is_floating_point or of == torch.bool):
        assert (done, changed) == (False, 0)  # nothing is known of what else may stand there
    elif of.is_floating_point or of == torch.bool:
        assert changed == int(done)
    else:
        assert (done, changed) == (True, 2)
        assert after.flatten().sort().values.equal(before.flatten().sort().values)


def test_offsets_and_padding_stay_what_they_are():
    offsets = torch.tensor([0, 3, 3, 9])
    assert not altered_inputs._change(offsets.clone())
    for _ in range(20):
        padded = torch.tensor([4, 2, -1, -1])
        if altered_inputs._change(padded):
            assert padded.tolist() == [2, 4, -1, -1]


@pytest.mark.parametrize("name", ["fp8_linear", "int8_linear", "adamw"])
def test_every_argument_has_its_turn(name):
    task = find_task(name)
    sampler = InputSampler(task, torch.device("cpu"), POLICIES["all new"])
    changed = set()
    for case in 2 * task.cases("cpu").check:  # a change that does not show has another turn
        _, other, *altered = draw_sets(sampler, case)
        for before, after in itertools.pairwise([other, *altered]):
            (argument,) = (n for n, t in after.tensors.items() if t is not before.tensors[n])
            changed.add(argument)
    assert changed == {a.name for a in task.arguments if a.shape is not None}


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


def test_an_argument_that_is_the_same_in_every_draw_need_not_be_read(tmp_path):
    task = find_task("int8_linear")
    sampler = InputSampler(task, torch.device("cpu"), POLICIES["all new"])
    cases = task.cases("cpu").check
    assert altered_inputs.unread_arguments(sampler, cases[:3]) == []
    draw = sampler.fresh
    sampler.fresh = lambda *args: with_ones(draw(*args))
    assert altered_inputs.unread_arguments(sampler, cases[:3]) == ["weight"]


def test_an_argument_that_not_every_case_has_is_looked_at_where_it_is():
    """As an optional one: of the first case it is no argument, or of the last one."""
    task = find_task("int8_linear")
    cases = task.cases("cpu").check[:2]
    for without in cases:
        sampler = InputSampler(task, torch.device("cpu"), POLICIES["all new"])
        draw = sampler.fresh

        def drawn(case, seed=None, draw=draw, without=without):
            found = with_ones(draw(case, seed))
            if case == without:
                del found.tensors["weight"]
            return found

        sampler.fresh = drawn
        sampler.call = lambda function, inputs, *_, call=sampler.call: call(function, whole(inputs))
        assert altered_inputs.unread_arguments(sampler, cases) == ["weight"]


def whole(inputs):
    sizes = inputs.case.dims["N"], inputs.case.dims["K"]
    ones = torch.ones(sizes, dtype=torch.int8)
    return dataclasses.replace(inputs, tensors={"weight": ones, **inputs.tensors})


def with_ones(drawn):
    drawn.tensors["weight"].fill_(1)
    return drawn
