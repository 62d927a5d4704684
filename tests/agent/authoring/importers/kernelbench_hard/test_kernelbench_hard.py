import math

import pytest
import torch
from commands import run
from kagent.authoring import new_task
from kagent.authoring.importers.kernelbench_hard.task import find_problems, import_problem
from kagent_sandbox.data.task import draw_hidden, load_task
from kagent_sandbox.errors import TaskError, UserError
from kagent_sandbox.judge.check.shape_gaps import find_gaps
from kagent_sandbox.judge.check.task_checker import check

MODEL = '''"""A linear layer."""

from __future__ import annotations

import torch
import torch.nn as nn

ROWS, width = 8, 4096


class Model(nn.Module):
    def __init__(self, rows, width):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(2 * width, width, dtype=torch.bfloat16))
        nn.init.normal_(self.weight, std=0.02)
        self.register_buffer("saved", torch.zeros(1))

    def forward(self, x):
        return (x.float() @ self.weight.float().T).to(torch.bfloat16)


def get_inputs():
    torch.manual_seed(0)
    return [torch.randn(ROWS, width, dtype=torch.bfloat16)]


def get_init_inputs():
    return [ROWS, width]
'''
SHAPES = 'SHAPES = [{"rows": 8, "width": 4096}, {"rows": 300, "width": 4096}]\n'
YAML = 'display_name: "Linear"\nflops_formula: "4 * rows * width * width"\n'
YAML += 'bytes_formula: "1 ** nope"\n'


def problem(folder, model=MODEL, shapes=SHAPES):
    where = folder / "suite" / "01_Linear"
    where.mkdir(parents=True)
    for name, text in (("reference.py", model), ("shapes.py", shapes), ("problem.yaml", YAML)):
        (where / name).write_text(text)
    return where


@pytest.mark.nightly
def test_a_problem_becomes_a_task_that_passes_its_check(tmp_path):
    task = load_task(import_problem(problem(tmp_path), tmp_path))
    assert (task.name, task.summary) == ("kbh_01_linear", "Linear")
    assert [(a.name, a.shape) for a in task.arguments] == [
        ("x", ("rows", "width")),
        ("weight", ("2 * width", "width")),
    ]
    assert task.results[0].shape == ("rows", "2 * width")
    assert (task.flops, task.matrix) == ("4 * rows * width * width", True)
    assert [c.dims["rows"] for c in task.gpu.bench] == [8, 300]
    assert task.min_bytes(task.gpu.bench[0]) == 2 * (8 + 2 * 4096 + 2 * 8) * 4096
    found = check(task, "cpu", torch.device("cpu"))
    assert not found.holes


NIBBLES = """
import torch
import torch.nn as nn


class Model(nn.Module):
    def __init__(self, width):
        super().__init__()
        packed = torch.randint(0, 256, (width, width), dtype=torch.uint8)
        self.register_buffer("packed", packed)

    def forward(self, x):
        high, low = (self.packed >> 4) & 0xF, self.packed & 0xF
        return x @ torch.cat([high, low]).to(x.dtype)


def get_inputs():
    return [torch.randn(rows, 2 * width)]


def get_init_inputs():
    return [width]


rows, width = 4, 32
"""


@pytest.mark.nightly
def test_a_mask_of_bits_that_are_0_already_is_declared(tmp_path):
    shapes = 'SHAPES = [{"rows": 4, "width": 32}]\n'
    task = load_task(import_problem(problem(tmp_path, NIBBLES, shapes), tmp_path))
    (idle,) = task.without_effect
    assert idle.operation.startswith("(self.packed >> 4) & 0xF without its ")
    found = check(task, "cpu", torch.device("cpu"))
    assert not [h for h in found.holes if "window" not in h]
    assert len(found.without_effect) == 1


STEPS = """
import torch
import torch.nn as nn


class Model(nn.Module):
    def forward(self, x):
        carried, parts = torch.zeros_like(x[:, :1]), []
        assert x.shape[1] % 64 == 0
        for chunk in x.split(64, 1):
            parts.append(chunk + carried)
            carried = 0.5 * carried + chunk.sum(1, keepdim=True)
        return torch.cat(parts, 1)


def get_inputs():
    return [torch.randn(rows, length)]


def get_init_inputs():
    return []


rows, length = 4, 1024
"""


def test_sizes_in_steps_are_tried_with_three_and_shapes_in_between_are_drawn(tmp_path):
    many = [{"rows": r, "length": n} for r, n in ((4, 1024), (64, 256), (5, 640), (900, 512))]
    task = load_task(import_problem(problem(tmp_path, STEPS, f"SHAPES = {many}\n"), tmp_path))
    assert [c.dims["length"] for c in task.gpu.check] == [64, 64, 192]
    assert not check(task, "cpu", torch.device("cpu")).holes
    count, gaps = find_gaps(task, "gpu")
    assert count > 10
    assert gaps == []


def test_the_size_of_steps_is_not_tripled_with_what_comes_in_them(tmp_path):
    model = STEPS.replace("64", "step").replace(
        "(rows, length)", "(rows, length), torch.ones(step)"
    )
    model = model.replace("forward(self, x)", "forward(self, x, decay)")
    model = model.replace("carried, parts =", "step = len(decay)\n        carried, parts =")
    model = model.replace("rows, length = 4, 1024", "rows, length, step = 4, 1024, 64")
    many = [{"rows": 4, "length": 1024, "step": 64}, {"rows": 2, "length": 512, "step": 64}]
    folder = problem(tmp_path, model, f"SHAPES = {many}\n")
    task = load_task(import_problem(folder, tmp_path))
    assert [(c.dims["length"], c.dims["step"]) for c in task.gpu.check][-1] == (192, 64)


HEADS = """
import torch
import torch.nn as nn


class Model(nn.Module):
    def forward(self, q, k):
        assert q.shape[1] % k.shape[1] == 0
        k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
        return torch.softmax(q @ k.mT, -1) @ k


def get_inputs():
    return [torch.randn(rows, heads, length, 16), torch.randn(rows, kv_heads, length, 16)]


def get_init_inputs():
    return []


rows, heads, kv_heads, length = 1, 8, 8, 64
"""


@pytest.mark.parametrize(
    ("shapes", "constraints"),
    [
        (((8, 32, 8, 64), (4, 64, 8, 256), (16, 32, 4, 127), (8, 16, 4, 200)), ()),
        (((1, 8, 1, 64), (1, 8, 2, 64), (1, 16, 4, 96), (1, 8, 8, 70)), ("heads % kv_heads == 0",)),
        (((1, 8, 8, 2048), (64, 8, 8, 32)), ()),
    ],
)
def test_hidden_cases_keep_what_the_given_shapes_have_in_common(tmp_path, shapes, constraints):
    names = ("rows", "heads", "kv_heads", "length")
    given = [dict(zip(names, s, strict=True)) for s in shapes]
    task = load_task(import_problem(problem(tmp_path, HEADS, f"SHAPES = {given}\n"), tmp_path))
    assert task.constraints == constraints
    drawn = [c.dims for seed in range(20) for c in draw_hidden(task, "gpu", "check", seed)]
    assert len(drawn) >= 40
    assert not [d for d in drawn if d["heads"] % d["kv_heads"]]
    visible = [c.dims for c in (*task.gpu.check, *task.gpu.bench)]
    varying = [n for n in names if len({d[n] for d in visible}) > 1]
    most = max(math.prod(d[n] for n in varying) for d in visible)
    assert max(math.prod(d[n] for n in varying) for d in drawn) <= most


def test_a_generator_at_whose_draw_the_model_fails_is_left_out(tmp_path):
    model = STEPS.replace("x.shape[1] % 64 == 0", "x.shape[1] > 8 * x.shape[0]")
    many = [{"rows": r, "length": n} for r, n in ((4, 1024), (16, 256), (5, 640), (60, 512))]
    task = load_task(import_problem(problem(tmp_path, model, f"SHAPES = {many}\n"), tmp_path))
    assert task.gpu.hidden_check == ()


STEP = """
import torch
import torch.nn as nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(0.2 * torch.randn(16, 16))


def policy(model, seen, state):
    state = torch.tanh(seen @ model.weight + state)
    return state.sum(-1), state


def run(many, horizon, seed, model=None):
    model = model or Model()
    seen, state = torch.randn(many, 16), torch.zeros(many, 16)
    for _ in range(horizon):
        actions, state = policy(model, seen, state)
        seen = seen + actions[:, None].sign()
    return {"state": state}


def get_inputs():
    return []


def get_init_inputs():
    return []
"""


def check_here(task, *, say):
    return [check(task, kind, torch.device("cpu")) for kind in ("gpu", "cpu")]


@pytest.mark.nightly
def test_one_step_is_the_task_where_run_draws_the_inputs(tmp_path, monkeypatch):
    monkeypatch.setattr(new_task, "check_kinds", check_here)
    shapes = 'SHAPES = [{"num_envs": 64, "horizon": 9}, {"num_envs": 24, "horizon": 5}]\n'
    task = load_task(import_problem(problem(tmp_path, STEP, shapes), tmp_path))
    assert [(a.name, a.shape) for a in task.arguments] == [
        ("seen", ("M", "K")),
        ("state", ("M", "N")),
        ("model_weight", ("K", "N")),
    ]
    assert [r.shape for r in task.results] == [("M",), ("M", "N")]
    assert task.gpu.bench[0].dims == {"M": 24, "K": 16, "N": 16}
    text = (task.folder / "reference.py").read_text()
    assert "the last of 5 calls of policy in 01_Linear's run, with num_envs = 24" in text
    assert "zeros" not in text.split("The case's scale")[0]  # of the first step


@pytest.mark.nightly
def test_a_task_of_a_step_is_overwritten_once_the_new_one_is_there(tmp_path, monkeypatch):
    monkeypatch.setattr(new_task, "check_kinds", check_here)
    folder = problem(tmp_path, STEP, 'SHAPES = [{"num_envs": 24, "horizon": 5}]\n')
    made = import_problem(folder, tmp_path)
    first = load_task(made)
    (made / "triton_own.py").write_text("# a seed of the user's\n")
    (made / "task.toml").write_text("old")
    with monkeypatch.context() as broken:
        broken.setattr(new_task, "make_draft", lambda _: pytest.fail("no draft"))
        with pytest.raises(pytest.fail.Exception):
            import_problem(folder, tmp_path, force=True)
    assert (made / "task.toml").read_text() == "old"
    assert import_problem(folder, tmp_path, force=True) == made
    again = load_task(made)  # its case of the CPU depends on how long torch takes
    assert (again.name, again.arguments, again.gpu) == (first.name, first.arguments, first.gpu)
    assert (made / "triton_own.py").exists()
    assert not list(tmp_path.glob(".*"))


def test_what_cannot_be_imported_is_one_line(tmp_path):
    with pytest.raises(UserError, match="no problem of KernelBench-Hard there"):
        find_problems(tmp_path)
    nothing = MODEL.replace("return [torch.randn(ROWS, width, dtype=torch.bfloat16)]", "return []")
    folder = problem(tmp_path, nothing)
    with pytest.raises(TaskError, match=r"its inputs are no arguments of Model\.forward"):
        import_problem(folder, tmp_path)
    (folder / "reference.py").write_text(nothing + "\n\ndef run(rows, width):\n    return {}\n")
    with pytest.raises(TaskError, match=r"run: calls no function of the file with its model"):
        import_problem(folder, tmp_path)
    (folder / "reference.py").write_text(nothing + "\n\ndef run(rows):\n    return {}\n")
    with pytest.raises(TaskError, match=r"run: TypeError: run\(\) takes 1 positional"):
        import_problem(folder, tmp_path)
    needing = MODEL.replace("import torch\n", "import no_such_package\nimport torch\n", 1)
    (folder / "reference.py").write_text(needing)
    with pytest.raises(TaskError, match="imports no_such_package: pip install no"):
        import_problem(folder, tmp_path)
    (folder / "shapes.py").write_text("")
    with pytest.raises(TaskError, match=r"shapes.py: no SHAPES"):
        import_problem(folder, tmp_path)


@pytest.mark.nightly
def test_the_command_imports_a_folder_of_problems(tmp_path, monkeypatch, capsys):
    problem(tmp_path)
    words = ("import", "kernelbench-hard", tmp_path / "suite", "--to", tmp_path / "tasks")
    done = run(monkeypatch, capsys, *words)
    assert done.code == 0
    assert "tasks/kbh_01_linear  (sizes of shapes.py)" in done.out
