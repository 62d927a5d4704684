"""Tasks are checked before kernels are."""

import re

import pytest
import torch
from judging import REFERENCE, TASK, write_task
from kagent.resources import resource
from kagent.tasks import task_names
from kagent_sandbox.data.task import load_task
from kagent_sandbox.errors import TaskError
from kagent_sandbox.judge import task_check
from kagent_sandbox.judge.check.task_checker import check

CPU = torch.device("cpu")
RETURN = "return 2 * x.double()"
DRAWN = "torch.randn(shape, generator=generator, device=device)"

TUPLE = "def inputs(case, generator, device):\n    return 1, 2\n\ndef experts"


def checked(folder, task=TASK, reference=REFERENCE):
    write_task(folder)
    (folder / "task.toml").write_text(task)
    (folder / "reference.py").write_text(reference)
    return check(load_task(folder), "cpu", CPU)


def fault(folder, **files):
    with pytest.raises(TaskError) as e:
        checked(folder, **files)
    text = str(e.value)
    assert "\n" not in text
    assert text.startswith(str(folder))
    return text.removeprefix(f"{folder}/")


def test_a_sound_task_has_no_holes(tmp_path):
    found = checked(tmp_path)
    assert found.holes == ()
    assert found.cases == 3  # two, and a hidden one
    assert found.wrong == 4  # zeros, scaled, moved; and the product left out
    assert found.eager_eps <= 1


@pytest.mark.parametrize("name", [*task_names(), "../corpus/tasks/rows", "../corpus/tasks/product"])
def test_our_own_tasks_have_no_holes(name):
    assert check(load_task(resource("seeds") / name), "cpu", CPU).holes == ()


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (RETURN, "return 2 * x.double() + torch.rand(())", "reference: .*differs between two"),
        (RETURN, "return x.mul_(2).double()", "reference: .*overwrites its input x"),
        (RETURN, "return 2 * x", "reference: .*is torch.float32, expected torch.float64"),
        (RETURN, "return x.double().log() * 2", "reference: .*not finite where eager is"),
        ("return x * 2", "return x * 4", "eager: .*differs from the reference by 1"),
        ("return x * 2", "return x * torch.nan", "eager: .*not finite where the reference is"),
        ("return x * 2", "return (x * 2).half()", "eager: .*is torch.float16, task.toml says"),
        ("return x * 2", "return (x * 2).bfloat16().float()", "eager: .*machine epsilons"),
        ("return x * 2", "return x.mul_(2)", "eager: .*overwrites its input x"),
        ("return x * 2", "return (x * 2)[:1]", "eager: .*returns shapes"),
        ("return x * 2", "return None", "eager: .*returns NoneType, expected a tensor"),
        ("return x * 2", "return x.nonsense()", "eager: .*AttributeError"),
        (DRAWN, "torch.randn(shape)", "inputs: .*differs between two generators of one seed"),
        (DRAWN, "torch.ones(shape)", "inputs: .*all seeds give the same"),
        ("def experts", TUPLE, "inputs: .*returns tuple, expected a dict"),
        ("(x * case.scale).to(getattr(torch, case.dtype))", "None", "inputs: .*lacks the tensor x"),
        ('return {"x": ', 'return {"y": x, "x": ', r"inputs: .*returns \['y'\] too"),
        ("def experts", "def expert", "does not define experts"),
    ],
)
def test_a_faulty_reference_is_named_not_the_candidate(tmp_path, before, after, expected):
    assert before in REFERENCE
    reference = REFERENCE.replace(before, after, 1)
    text = fault(tmp_path, reference=reference)
    assert text.startswith("reference.py: ")
    assert re.search(expected, text), text


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ('bytes = "2', 'bytes = "2000', "bytes: case wide: .*allow for 1.04858e.06 at most"),
        ('written = "M', 'written = "3 * M', "written: case wide"),
        ('flops = "M', 'flops = "5000 * M', "flops: case "),
        ("k = 2.0", "k = 2.0, floor = 1e9", "results.y: zeros pass every check case"),
        ("dims = {", 'allow = ["aten::mn"]\ndims = {', "allow: torch has no operation 'aten::mn'"),
        ("dims = {", 'allow = ["aten::mm.uot"]\ndims = {', "allow: .*no such overload"),
    ],
)
def test_a_faulty_declaration_is_named(tmp_path, before, after, expected):
    text = fault(tmp_path, task=TASK.replace(before, after, 1))
    assert text.startswith("task.toml: ")
    assert re.search(expected, text), text


def test_what_no_case_sees_is_a_hole(tmp_path):
    """A soft cap that inputs never reach, a bias of zeros, and a guard that never acts: reported.
    A maximum that is subtracted is the same function without: not reported.
    """
    reference = REFERENCE.replace(
        RETURN,
        "x = x.double()\n"
        "    x = 1e9 * torch.tanh(x / 1e9)\n"
        "    x = x + torch.zeros(x.shape[1])\n"
        "    x = torch.where(x < 1e3, x, 0.0)\n"
        "    e = (x - x.amax()) + x.amax()\n"
        "    return 2 * e",
    )
    found = checked(tmp_path, reference=reference)
    assert all(h.endswith("passes every check case") for h in found.holes)
    said = "\n".join(found.holes)
    assert "torch.tanh(x / 1e9) without its tanh (its self instead)" in said
    assert "x + torch.zeros(x.shape[1]) without its add (its self instead)" in said
    assert "torch.where(x < 1e3, x, 0.0) without its where (its self instead)" in said
    assert "without its lt (true everywhere)" in said
    assert "sub" not in said
    assert "without its mul" not in said


def test_a_check_is_recalled(tmp_path, own_cache):
    said = []
    task = load_task(write_task(tmp_path))
    first = task_check.check_task(task, "cpu", said.append)
    assert "checked in" in said[-1]
    said.clear()
    assert task_check.check_task(task, "cpu", said.append) == first
    assert said == []


def test_a_reference_that_ends_its_process_is_named(tmp_path, own_cache):
    folder = write_task(tmp_path)
    (folder / "reference.py").write_text(REFERENCE + "\nimport os\nos.abort()\n")
    with pytest.raises(TaskError, match=r"reference\.py: .*died of SIGABRT"):
        task_check.check_task(load_task(folder), "cpu")


def test_an_operation_that_one_shape_makes_idle_is_no_hole(tmp_path):
    """A mean of one column is that column: that case shows nothing, and others do."""
    mean = "x.double().mean(1, keepdim=True).expand_as(x).clone()"
    reference = REFERENCE.replace(RETURN, f"return {mean}").replace(
        "return x * 2", "return x.mean(1, keepdim=True).expand_as(x).clone()"
    )
    column = '[[cpu.check]]\nname = "column"\ndtype = "float32"\nM = 6\nN = 1\n\n[[cpu.bench]]'
    task = TASK.replace("[[cpu.bench]]", column, 1)
    found = checked(tmp_path, task=task, reference=reference)
    assert not [h for h in found.holes if "mean" in h]
