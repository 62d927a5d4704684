"""Tasks are checked before kernels are."""

import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from handmade_candidates import REFERENCE, TASK, write_task
from kagent.resources import resource
from kagent.tasks import find_task, task_names
from kagent_sandbox.data.task import load_task
from kagent_sandbox.errors import TaskError
from kagent_sandbox.judge import task_check
from kagent_sandbox.judge.check import shape_gaps
from kagent_sandbox.judge.check.flop_counts import product_counter
from kagent_sandbox.judge.check.omissions import OmissionRecorder
from kagent_sandbox.judge.check.shape_gaps import find_gaps
from kagent_sandbox.judge.check.task_checker import check
from kagent_sandbox.judge.check.tf32 import may_use_tf32
from kagent_sandbox.process import ask_once
from kagent_sandbox.process.device_lock import DeviceLock

CPU = torch.device("cpu")
RETURN = "return 2 * x.double()"
DRAWN = "torch.randn(shape, generator=generator, device=device)"

EVERYWHERE = TASK.replace(
    "dims = { M = { min = 1, max = 9 }, N = { min = 2, max = 40, prime = true } }",
    "dims = { M = { min = 1, max = 2048 }, N = { min = 2, max = 2048 } }\n"
    'cost = "M * N"\nmost = 131072',
)
"""The task with hidden cases of all shapes that an export would serve."""

TUPLE = "def inputs(case, generator, device):\n    return 1, 2\n\ndef experts"


def checked(folder, task=EVERYWHERE, reference=REFERENCE):
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
    windows, _ = find_gaps(load_task(tmp_path), "cpu")
    assert found.wrong == 4 + windows  # zeros, scaled, moved; and the product left out
    assert found.eager_eps <= 1


@pytest.mark.sampled(one_in=10)
@pytest.mark.parametrize("name", [*task_names(), "../corpus/tasks/rows", "../corpus/tasks/product"])
def test_our_own_tasks_have_no_holes(name):
    assert check(load_task(resource("seeds") / name), "cpu", CPU).holes == ()


@pytest.mark.parametrize("which", ["hidden_check", "hidden_bench"])
@pytest.mark.parametrize("function", ["reference", "eager", "inputs"])
def test_sizes_that_do_not_go_together_are_a_fault_wherever_they_can_be_drawn(
    tmp_path, which, function
):
    """A case of the final race had them, after a search of hours, in one draw of thirty."""
    for line in REFERENCE.splitlines():
        if line.startswith(f"def {function}("):
            begin, dims = line, "case.dims" if function == "inputs" else "dict(zip('MN', x.shape))"
    narrow = f"if {dims}['M'] - 60 >= {dims}['N'] == 4:"
    wrong = f"{begin}\n    {narrow}\n        raise ValueError('too narrow')"
    generator = (
        f"\n[[cpu.{which}]]\ncount = 2\ndtype = ['float32']\n"
        "dims = { M = { min = 1, max = 64 }, N = { min = 4, max = 64 } }\n"
        'cost = "M * N"\nleast = 64\nmost = 1024\n'
    )
    text = fault(tmp_path, task=TASK + generator, reference=REFERENCE.replace(begin, wrong))
    expected = f"{function}: case {which} of M = 64, N = 4: ValueError: too narrow"
    assert text == f"reference.py: {expected}"
    limited = "constraints = ['M < 64 or N > 4']\n" + TASK + generator
    checked(tmp_path, task=limited, reference=REFERENCE.replace(begin, wrong))


# -- shapes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gelu", "linear_cross_entropy"])
def test_hidden_cases_of_a_gpu_leave_no_range_of_shapes_out(name):
    count, gaps = find_gaps(find_task(name), "gpu")
    assert count > 100
    assert gaps == []


def test_a_range_of_shapes_without_cases_is_a_hole(monkeypatch):
    """Large calls of many rows: between the largest check case and the smallest benchmark. There
    are cases with so many elements, of few rows, and cases with so many rows.
    """
    monkeypatch.setattr(shape_gaps, "MOST_RUNS", 100)
    task = find_task("softmax")
    below = tuple(g for g in task.cpu.hidden_check if not g.least)
    cpu = task.cpu.model_copy(update={"hidden_check": below})
    _, gaps = find_gaps(task.model_copy(update={"cpu": cpu}), "cpu")
    said = "\n".join(gaps)
    assert "cpu: a float32 kernel that is wrong where M is 128 to 512 and the product" in said
    assert "add a hidden_check generator" in said


def test_large_calls_of_few_columns_are_served_and_so_need_cases(monkeypatch):
    """A kernel with fewer than 256 columns wrote past its rows where there were 500000 elements or
    more: the cases of so few columns were all smaller, and a library served larger ones.
    """
    monkeypatch.setattr(shape_gaps, "MOST_RUNS", 100)
    task = find_task("gelu")
    smaller = tuple(g for g in task.cpu.hidden_check if not g.least or g.least < 500_000)
    cpu = task.cpu.model_copy(update={"hidden_check": smaller})
    _, gaps = find_gaps(task.model_copy(update={"cpu": cpu}), "cpu")
    assert "where N is 32 to 128 and the product of the dimensions 5" in "\n".join(gaps)


def test_a_range_of_one_dimension_without_cases_is_a_hole(tmp_path, monkeypatch):
    monkeypatch.setattr(shape_gaps, "MOST_RUNS", 100)
    text = TASK.replace("max = 9", "max = 7")
    (write_task(tmp_path) / "task.toml").write_text(text)  # 7 rows, and then 64
    _, gaps = find_gaps(load_task(tmp_path), "cpu")
    assert "a float32 kernel that is wrong where M is 8 to 32 " in gaps[0]


@pytest.mark.parametrize("constraint", ["M % 16 == 0 or M < 16", "N >= 64 or M <= 16"])
def test_shapes_that_break_a_constraint_are_no_hole(tmp_path, constraint):
    limited = "constraints = ['M <= 4096', '" + constraint + "']\n"
    (write_task(tmp_path) / "task.toml").write_text(limited + EVERYWHERE)
    count, gaps = find_gaps(load_task(tmp_path), "cpu")
    assert count > 20
    assert gaps == []


ROUNDED = """
def rounded(t):
    return (t.view(torch.int32) & -(1 << 13)).view(torch.float32)

def times_two(x):
    return torch.nn.functional.conv1d(x[:, None], x.new_full((1, 1, 1), 2))[:, 0]

def eager(*, x):
    return %s
"""
"""A stand-in for TF32: the low bits of float32 inputs are cleared."""


@pytest.mark.parametrize(
    ("kind", "eager", "accepted"),
    [
        ("gpu", "times_two(rounded(x))", True),
        ("gpu", "2 * rounded(x)", False),
        ("gpu", "(2 * torch.eye(len(x))) @ rounded(x)", False),
        ("gpu", "times_two(x.double()).float() * rounded(x) / x", False),
        ("cpu", "times_two(rounded(x))", False),
    ],
)
def test_convolutions_on_a_gpu_may_round_to_tf32(tmp_path, kind, eager, accepted):
    write_task(tmp_path)
    (tmp_path / "task.toml").write_text(EVERYWHERE)
    before = "def eager(*, x):\n    return x * 2\n"
    assert before in REFERENCE
    (tmp_path / "reference.py").write_text(REFERENCE.replace(before, ROUNDED % eager))
    task = load_task(tmp_path)
    if accepted:
        assert 0.05 < check(task, kind, CPU).eager_eps < 1
    else:
        with pytest.raises(TaskError, match=r"eager: .* machine epsilons, expected 1024 at most"):
            check(task, kind, CPU)


def test_products_may_round_to_tf32_where_torch_is_told_so():
    x = torch.ones(4, 4)
    mm = torch.ops.aten.mm.default
    assert not may_use_tf32(mm, (x, x))
    torch.set_float32_matmul_precision("high")
    try:
        assert may_use_tf32(mm, (x, x))
        assert not may_use_tf32(mm, (x.double(), x.double()))
        assert not may_use_tf32(torch.ops.aten.add.Tensor, (x, x))
    finally:
        torch.set_float32_matmul_precision("highest")


def test_a_range_of_shapes_that_meet_the_constraints_is_a_hole(tmp_path, monkeypatch):
    monkeypatch.setattr(shape_gaps, "MOST_RUNS", 100)
    text = "constraints = ['M % 16 == 0 or M < 16']\n" + TASK.replace("max = 9", "max = 7")
    (write_task(tmp_path) / "task.toml").write_text(text)
    _, gaps = find_gaps(load_task(tmp_path), "cpu")
    assert "a float32 kernel that is wrong where M is 8 to 32 " in gaps[0]


def test_sizes_of_more_than_32_bits_have_windows_too(tmp_path, monkeypatch):
    monkeypatch.setattr(shape_gaps, "MOST_RUNS", 50)
    text = "constraints = ['N != 4']\n" + TASK.replace("N = 2048", "N = 3_000_000_000")
    (write_task(tmp_path) / "task.toml").write_text(text)
    _, gaps = find_gaps(load_task(tmp_path), "cpu")
    assert any("wrong where N is " in each for each in gaps)


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
        ("return {}", "return [eager]", "experts: returns list, expected a dict"),
        ("return {}", 'return {"liger": 3}', "experts: liger is int, expected a function"),
        ("return {}", "import liger_of_nobody", "experts: ModuleNotFoundError"),
        (RETURN, "raise SystemExit(3)", "reference: case odd: SystemExit: 3"),
        ("import torch", "raise SystemExit(3)", "reference.py: SystemExit: 3"),
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
        (
            '"2 * M * N * itemsize"',
            '"M"',
            "bytes: case wide: 'M' is 64, .* results alone have 524288",
        ),
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


@pytest.mark.parametrize(
    ("field", "expected"),
    [
        ("scale = 1000.0", "inputs: case odd: scale = 1000 changes nothing"),
        ('inputs = "mixed"', "inputs: case odd: 'mixed' gives the same as 'normal'"),
    ],
)
def test_a_distribution_that_inputs_ignores_is_a_fault(tmp_path, field, expected):
    reference = REFERENCE.replace("x * case.scale", "x")
    task = EVERYWHERE.replace('name = "odd"', f'name = "odd"\n{field}')
    assert expected in fault(tmp_path, task=task, reference=reference)


def test_a_distribution_counts_where_one_case_needs_it(tmp_path):
    kinds = 'x = x.abs() if case.inputs == "mixed" and case.dims["M"] > 5 else x\n    return {"x"'
    task = EVERYWHERE
    for name in ("odd", "padded"):
        task = task.replace(f'name = "{name}"', f'name = "{name}"\ninputs = "mixed"\nscale = 9.0')
    assert checked(tmp_path, task, REFERENCE.replace('return {"x"', kinds)).holes == ()


@pytest.mark.parametrize("always", [False, True])
def test_infinities_must_be_in_every_draw(tmp_path, always):
    """Planted in some rows by chance, they are missing where there are few rows."""
    some = "torch.rand(len(x), generator=generator) < 0.2"
    planted = f'''if case.inputs == "nonfinite":
        some = {some}
        some[0] |= {always}
        x = torch.where(some[:, None], torch.inf, x)
    return {{"x"'''
    task = EVERYWHERE.replace('name = "odd"', 'name = "odd"\ninputs = "nonfinite"')
    reference = REFERENCE.replace('return {"x"', planted)
    if always:
        assert checked(tmp_path, task, reference).wrong
    else:
        assert "case odd: 'nonfinite' has no infinity" in fault(
            tmp_path, task=task, reference=reference
        )


def test_a_reference_that_rounds_as_eager_does_is_a_fault(tmp_path):
    """Float64 only by its dtype: kernels that round otherwise would seem wrong."""
    reference = REFERENCE.replace("return x * 2", "return x / 3 * 7")
    reference = reference.replace(RETURN, "return (x / 3 * 7).double()")
    text = fault(tmp_path, reference=reference)
    assert "reference: case odd: result y is rounded as eager's" in text


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


IDLE = REFERENCE.replace(RETURN, "y = x.double().abs()\n    return 2 * torch.relu(y)").replace(
    "return x * 2", "return x.abs() * 2"
)
RELU = "torch.relu(y) without its relu (its self instead)"


def declaring(operation, reason="nothing is below 0"):
    return f"without_effect = [{{ operation = '{operation}', reason = '{reason}' }}]\n{EVERYWHERE}"


def test_an_operation_that_is_declared_to_change_nothing_is_no_hole(tmp_path):
    (hole,) = checked(tmp_path, reference=IDLE).holes
    assert RELU in hole
    found = checked(tmp_path, declaring(RELU), IDLE)
    assert found.holes == ()
    (line,) = found.without_effect
    assert re.fullmatch(rf"reference\.py:\d+: {re.escape(RELU)}: nothing is below 0", line)


def test_every_place_of_a_declared_operation_is_listed(tmp_path):
    twice = IDLE.replace(".abs()\n", ".abs()\n    y = torch.relu(y)\n")
    lines = checked(tmp_path, declaring(RELU), twice).without_effect
    assert len({line.partition(": ")[0] for line in lines}) == 2


@pytest.mark.parametrize(
    ("value", "case"),
    [
        ("x.double()", r"\w+"),
        ("x.double() if x.shape[1] == 2048 else x.double().abs()", "wide"),  # a benchmark's
    ],
)
def test_an_operation_that_changes_a_result_must_not_be_declared(tmp_path, value, case):
    def changed(text):
        return text.replace("x.double().abs()", value).replace(
            "x.abs() * 2", f"({plain}).relu() * 2"
        )

    plain = value.replace(".double()", "")
    text = fault(tmp_path, task=declaring(RELU), reference=changed(IDLE))
    line = rf"reference\.py:\d+: {re.escape(RELU)}"
    expected = rf"task\.toml: without_effect: {line} changes the results of case {case}: remove .*"
    assert re.fullmatch(expected, text)


def test_an_unknown_operation_must_not_be_declared(tmp_path):
    """Nor one of a call elsewhere; one that only the other kind's cases run is known."""
    text = fault(tmp_path, task=declaring(RELU.replace("(y)", "(z)")), reference=IDLE)
    assert text.startswith("task.toml: without_effect: no case runs 'torch.relu(z) without its ")
    assert repr(RELU) in text
    only = IDLE.replace("torch.relu(y)", "(torch.relu(y) if tuple(x.shape) == (3, 5) else y)")
    assert checked(tmp_path, declaring(RELU), only).without_effect == ()


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("[{ operation = 'relu' }]", "without_effect.0.reason: Field required"),
        ("[{ operation = 'relu', reason = '' }]", "without_effect.0.reason: .* at least 1"),
        ("[" + "{ operation = 'a', reason = 'b' }, " * 2 + "]", "an operation appears twice"),
    ],
)
def test_a_declaration_of_no_effect_is_whole(tmp_path, line, expected):
    text = fault(tmp_path, task=f"without_effect = {line}\n{TASK}")
    assert re.search(expected, text), text


def test_a_check_is_recalled(tmp_path, own_cache):
    said = []
    task = load_task(write_task(tmp_path))
    first = task_check.check_task(task, "cpu", said.append)
    assert "checked in" in said[-1]
    said.clear()
    assert task_check.check_task(task, "cpu", said.append) == first
    assert said == []


COUNTED = """

computed = reference


def reference(**arguments):
    with open(__file__ + ".calls", "a") as file:
        file.write("x")
    return computed(**arguments)
"""
"""Makes a reference count its calls, for `calls_of`."""


def calls_of(folder):
    file = folder / "reference.py.calls"
    count = len(file.read_text())
    file.unlink()
    return count


@pytest.mark.nightly
def test_a_declaration_of_no_effect_is_all_that_its_check_looks_at(
    tmp_path, own_cache, monkeypatch
):
    """An importer declares what the first check calls holes. All else is known from that one."""
    folder = write_task(tmp_path)
    (folder / "reference.py").write_text(IDLE + COUNTED)
    (folder / "task.toml").write_text(EVERYWHERE)
    first = task_check.check_kinds(load_task(folder))
    assert all(len([h for h in f.holes if RELU in h]) == 1 for f in first)
    assert calls_of(folder) > 20
    (folder / "task.toml").write_text(declaring(RELU))
    second = task_check.check_kinds(load_task(folder))
    cases = sum(f.cases for f in first) + 2 * 2  # and benchmarks, those of a run and a race
    assert 0 < calls_of(folder) <= 2 * cases  # each once with the operation, once without
    with monkeypatch.context() as other:
        other.setenv("XDG_CACHE_HOME", str(tmp_path / "empty"))
        whole = task_check.check_kinds(load_task(folder))
    assert [replace(f, seconds=0.0) for f in second] == [replace(f, seconds=0.0) for f in whole]
    assert all(RELU in "".join(f.without_effect) for f in second)
    (folder / "task.toml").write_text(EVERYWHERE + "# a comment\n")
    third = task_check.check_kinds(load_task(folder))
    assert [replace(f, seconds=0.0) for f in third] == [replace(f, seconds=0.0) for f in first]


def test_a_case_whose_wrong_results_have_all_failed_is_computed_twice(tmp_path):
    """Not once more to try them: the second time has shown which they are."""
    more = '[[cpu.check]]\nname = "more"\ndtype = "float32"\nM = 8\nN = 16\n\n[[cpu.bench]]'
    third = REFERENCE.replace(RETURN, "return x.double() / 3").replace("x * 2", "x / 3")
    calls, wrong = [], []
    for task in (EVERYWHERE, EVERYWHERE.replace("[[cpu.bench]]", more, 1)):
        found = checked(tmp_path, task, third + COUNTED)
        calls.append(calls_of(tmp_path))
        wrong.append(found.wrong - find_gaps(load_task(tmp_path), "cpu")[0])
    assert calls[1] - calls[0] == 2
    assert wrong == [4, 4]


def test_a_reference_may_have_another_result_while_its_operations_are_looked_at(tmp_path):
    """As torch may that has faster ways of its own. It is held against itself as it is."""
    mode = "torch.utils._python_dispatch._get_current_dispatch_mode()"
    other = REFERENCE.replace(RETURN, f"return (2 if {mode} is None else 3) * x.double()")
    assert checked(tmp_path, reference=other).cases == 3


@pytest.mark.nightly
def test_a_wrong_declaration_of_no_effect_is_a_fault_also_where_all_else_is_known(
    tmp_path, own_cache
):
    folder = write_task(tmp_path)
    (folder / "reference.py").write_text(IDLE)
    (folder / "task.toml").write_text(EVERYWHERE)
    task_check.check_task(load_task(folder), "cpu")
    (folder / "task.toml").write_text(declaring(RELU.replace("(y)", "(z)")))
    with pytest.raises(TaskError, match="without_effect: no case runs"):
        task_check.check_task(load_task(folder), "cpu")


def test_a_check_on_a_gpu_takes_a_turn(tmp_path, own_cache, monkeypatch):
    """Another process of kagent may time kernels there."""
    monkeypatch.setenv("KAGENT_LOCKS", str(tmp_path / "locks"))
    monkeypatch.setattr(task_check, "available", lambda kind: True)
    monkeypatch.setattr(task_check, "own_unit", lambda kind: f"{kind}-0")
    seen = []

    def run(task, known, device, *, alone):
        seen.append((device, [number for number, _ in DeviceLock("gpu-0").turns()]))
        return {k: task_check.TaskCheck(k, device, 1, (), 0, (), 0.0, 0.0) for k in known}

    monkeypatch.setattr(task_check, "_run", run)
    found = task_check.check_kinds(load_task(write_task(tmp_path)))
    assert [(f.kind, f.device) for f in found] == [("gpu", "cuda"), ("cpu", "cpu")]
    assert seen == [("cuda", [os.getpid()]), ("cpu", [])]


def test_a_reference_that_ends_its_process_is_named(tmp_path, own_cache):
    folder = write_task(tmp_path)
    (folder / "reference.py").write_text(REFERENCE + "\nimport os\nos.abort()\n")
    with pytest.raises(TaskError, match=r"reference\.py: .*died of SIGABRT"):
        task_check.check_task(load_task(folder), "cpu")


def test_a_check_that_takes_too_much_cpu_time_is_a_fault(tmp_path, own_cache, monkeypatch):
    monkeypatch.setattr(task_check, "LIMIT_S", 0.01)
    monkeypatch.setattr(ask_once, "_LOOK_S", 0.05)
    expected = r"reference\.py: the check of the task took longer than 0\.01 s of CPU time: make "
    with pytest.raises(TaskError, match=expected):
        task_check.check_task(load_task(write_task(tmp_path)), "cpu")


@pytest.mark.parametrize("accept", [False, True])
def test_an_operation_that_one_shape_makes_idle_is_no_hole(tmp_path, accept):
    """A mean of one column is that column: that case shows nothing, and others do."""
    mean = "x.double().mean(1, keepdim=True).expand_as(x) / 3"
    reference = REFERENCE.replace(RETURN, f"return {mean}").replace(
        "return x * 2", "return x.mean(1, keepdim=True).expand_as(x) / 3"
    )
    column = '[[cpu.check]]\nname = "column"\ndtype = "float32"\nM = 6\nN = 1\n\n[[cpu.bench]]'
    task = TASK.replace("[[cpu.bench]]", column, 1)
    if accept:  # results are then looked at as rounded to their dtype
        task = f"accept = true\n{task}"
        reference += "\n\ndef accept(results, expected, *, x):\n    return (False,)\n"
    found = checked(tmp_path, task=task, reference=reference)
    assert not [h for h in found.holes if "mean" in h]


def test_what_one_shape_makes_of_a_product_is_no_hole(tmp_path):
    """Attention to one row is that row, and einsum multiplies there: nothing shows by leaving the
    product out.
    """
    attention = 'torch.einsum("qk,kd->qd", torch.softmax({0} @ {0}.T, 1), {0})'
    reference = REFERENCE.replace(RETURN, f"return {attention.format('x.double()')}").replace(
        "return x * 2", f"return {attention.format('x')}"
    )
    row = '[[cpu.check]]\nname = "row"\ndtype = "float32"\nM = 1\nN = 6\n\n[[cpu.bench]]'
    task = TASK.replace("[[cpu.bench]]", row, 1)
    task = task.replace('flops = "M * N"', 'flops = "4 * M * M * N"').replace("k = 2.0", "k = 8.0")
    found = checked(tmp_path, task=task, reference=reference)
    assert not [h for h in found.holes if "einsum" in h]


def test_what_one_shape_makes_nearly_idle_is_no_hole(tmp_path):
    """A number over its norm is 1, but for what keeps the norm from 0, and so is its square."""
    squared = "(lambda n: n @ n.T @ n)({0} / ({0}.norm() + 1e-7))"
    reference = REFERENCE.replace(RETURN, f"return {squared.format('x.double()')}").replace(
        "return x * 2", f"return {squared.format('x')}"
    )
    one = '[[cpu.check]]\nname = "one"\ndtype = "float32"\nM = 1\nN = 1\n\n[[cpu.bench]]'
    task = TASK.replace("[[cpu.bench]]", one, 1)
    task = task.replace('flops = "M * N"', 'flops = "4 * M * M * N"').replace("k = 2.0", "k = 8.0")
    found = checked(tmp_path, task=task, reference=reference)
    assert not [h for h in found.holes if "mm" in h]


@pytest.mark.parametrize("kind", ["flash", "efficient", "cudnn"])
def test_attention_of_fewer_heads_of_keys_is_counted(kind):
    """torch 2.11's own count refuses it."""
    q, k, v = (torch.empty(2, h, n, 64, device="meta") for h, n in ((8, 16), (2, 24), (2, 24)))
    more = () if kind == "flash" else (None, False)
    with product_counter() as counter:
        getattr(torch.ops.aten, f"_scaled_dot_product_{kind}_attention")(q, k, v, *more)
    assert counter.get_total_flops() == 2 * 2 * 8 * 16 * 24 * (64 + 64)


def test_gradients_of_attention_of_fewer_heads_of_keys_are_counted():
    """torch 2.11's own count refuses them."""
    q, k, v = (torch.empty(2, h, n, 64, device="meta") for h, n in ((8, 16), (2, 24), (2, 24)))
    lse = torch.empty(2, 8, 16, device="meta", dtype=torch.float32)
    seed = torch.empty(0, dtype=torch.int64, device="meta")
    with product_counter() as counter:
        torch.ops.aten._scaled_dot_product_flash_attention_backward(
            q, q, k, v, q, lse, None, None, 16, 24, 0.0, False, seed, seed
        )
    products = 3 * 64 + 2 * 64  # scores again, dq and dk; those of values twice
    assert counter.get_total_flops() == 2 * 2 * 8 * 16 * 24 * products


def doubled(x):
    constant = torch.ops.aten.lift_fresh_copy(torch.full((1,), 2.0))
    return x * constant


def test_a_copy_of_a_constant_is_nothing_to_leave_out():
    with OmissionRecorder(Path(__file__)) as recorder:
        doubled(torch.ones(3))
    assert {o.operation for o in recorder.found} == {"mul"}
