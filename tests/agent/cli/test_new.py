"""`kagent new` and `kagent import`: what they print, and how they refuse."""

import errno
import json
import logging
import os

import pytest
import torch
from commands import run
from kagent.authoring import new_task
from kagent.authoring.seeds import SeedOutcome
from kagent_sandbox.judge.check import task_checker

MODULE = """
import torch

half = lambda x: x * 0.5

def make_inputs():
    return torch.randn(12, 9)
"""


@pytest.fixture
def file(tmp_path, monkeypatch):
    def check(task, *, say):
        return [task_checker.check(task, kind, torch.device("cpu")) for kind in ("gpu", "cpu")]

    def write_seeds(folder, *, say):  # test_seeds has real ones: Inductor takes seconds
        (folder / "cpp_inductor.py").write_text("")
        return [
            SeedOutcome("gpu", None, "no kernel"),
            SeedOutcome("cpu", folder / "cpp_inductor.py", results=6),
        ]

    monkeypatch.setattr(new_task, "check_kinds", check)  # not in processes of its own
    monkeypatch.setattr(new_task, "write_seeds", write_seeds)
    path = tmp_path / "mine.py"
    path.write_text(MODULE)
    return path


@pytest.mark.nightly
def test_a_new_task_is_described(file, tmp_path, monkeypatch, capsys):
    words = ("new", f"{file}:half", "--vary", "x:0=rows", "--to", tmp_path / "half", "--json")
    ended = run(monkeypatch, capsys, *words)
    assert ended.code == 0, ended
    found = json.loads(ended.out)
    assert found["signature"] == "half(x: Tensor[rows, 9]) -> Tensor[rows, 9]"
    assert found["dims"] == {"rows": 12}
    assert found["holes"] == []
    assert found["seeds"] == ["cpp_inductor"]
    assert "no Triton seed: no kernel" in found["notes"]
    assert found["name"] == "half"
    again = run(monkeypatch, capsys, *words)
    assert again.code == 2
    assert "it is there already" in again.err


def test_a_folder_that_cannot_be_made_is_refused_before_tracing(
    file, tmp_path, monkeypatch, capsys
):
    def locked(**_):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(new_task, "find_rooms", None)  # nothing is traced
    monkeypatch.setattr("kagent.runs.files.tempfile.TemporaryDirectory", locked)
    monkeypatch.chdir(tmp_path)
    ended = run(monkeypatch, capsys, "new", f"{file}:half")
    assert ended.code == 2, ended
    said = "half: cannot be written (Read-only file system): name another place"
    assert said in " ".join(ended.err.split())


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("new", "mine.py"), "expected FILE:NAME"),
        (("new", "{file}:third"), "defines no 'third'; there are half, make_inputs"),
        (("new", "{file}:half", "--inputs", "mine"), "example arguments; --inputs NAME takes them"),
        (("new", "{file}:half", "--vary", "x=B"), "expected ARG:DIM=NAME"),
        (("import", "kernelbench", "{file}"), "defines no 'Model'"),
        (("import", "kernelbench", "{folder}"), "no file there with Model and get_inputs"),
    ],
)
def test_bad_input_is_one_line(file, monkeypatch, capsys, words, expected):
    words = [w.format(file=file, folder=file.parent) for w in words]
    ended = run(monkeypatch, capsys, *words)
    assert ended.code == 2
    assert ended.err.splitlines()[-1].startswith("kagent: ")
    assert expected in ended.err


@pytest.mark.nightly
def test_of_a_hole_it_is_said_what_to_do(file, tmp_path, monkeypatch, capsys):
    file.write_text(
        "import torch\n\n\ndef best(x):\n    return torch.argmax(torch.softmax(x, -1), -1)\n\n\n"
        "def make_inputs():\n    return (torch.randn(12, 9),)\n"
    )
    ended = run(monkeypatch, capsys, "new", f"{file}:best", "--to", tmp_path / "my best")
    assert ended.code == 0, ended  # the task is there, as `next:` says
    out = " ".join(ended.out.split())
    assert "hole: reference.py:" in out
    assert "name an operation that changes nothing under `without_effect`" in out
    assert f"then kagent check '{tmp_path / 'my best'}'" in out


RAISING = """
import torch
from torch import nn

def half(x, n):
    return x / n.item()

def inputs():
    return torch.ones(12, 9), torch.tensor(2.0)

def sized(batch):
    return torch.ones(batch, 9)

def unlike():
    return torch.ones(3, 4) @ torch.ones(3, 4)

def sparse(x, begins, columns, values):
    return torch.sparse_csr_tensor(begins, columns, values, size=(12, 12)) @ x

def places():
    return torch.randn(12, 9), torch.arange(13), torch.arange(12), torch.randn(12)

def foreign():
    return torch.ones(12, 9).to(torch.float8_e4m3fnuz), torch.tensor(2.0)

class Broken(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = torch.ones(6).reshape(4, 5)
"""


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("{file}:half --inputs inputs", "depends on a tensor's values, as by .item(): pass the"),
        ("{file}:half --inputs sized", "sized() raised TypeError: sized() missing 1 required"),
        ("{file}:half --inputs unlike", "unlike() (raising.py, line 15) raised RuntimeError: mat1"),
        (
            "{file}:Broken --inputs inputs",
            "Broken cannot be made without arguments (raising.py, line",
        ),
        ("{file}:half --inputs foreign", "x is torch.float8_e4m3fnuz, expected one of"),
        ("{file}:sparse --inputs places", "it makes a sparse tensor, which a task cannot have"),
    ],
)
def test_what_a_file_raises_is_told_in_a_line(
    tmp_path, monkeypatch, capsys, caplog, words, expected
):
    (tmp_path / "raising.py").write_text(RAISING)
    words = words.format(file=tmp_path / "raising.py").split()
    ended = run(monkeypatch, capsys, "new", *words, "--to", tmp_path / "to")
    assert ended.code == 2
    assert ended.err.splitlines()[-1].startswith("kagent: ")
    assert expected in ended.err
    assert not [r for r in caplog.records if r.levelno >= logging.ERROR]


PROBLEM = """
import torch

class Model(torch.nn.Module):
    def forward(self, x):
        return x * 0.5

def get_inputs():
    return [torch.randn(12, 9)]

def get_init_inputs():
    return []
"""


@pytest.mark.nightly
def test_an_imported_task_is_replaced_when_told_to(file, tmp_path, monkeypatch, capsys):
    problem, made = tmp_path / "1_Half.py", tmp_path / "tasks"
    problem.write_text(PROBLEM)
    words = ("import", "kernelbench", problem, "--to", made)
    assert run(monkeypatch, capsys, *words).code == 0
    (folder,) = made.iterdir()
    (folder / "mine.txt").write_text("kept")
    (folder / "task.toml").write_text("stale")
    again = run(monkeypatch, capsys, *words)
    assert (again.code, "it is there already" in again.err) == (2, True)
    assert (folder / "task.toml").read_text() == "stale"
    ended = run(monkeypatch, capsys, *words, "--force", "--json")
    assert ended.code == 0, ended.err
    (found,) = json.loads(ended.out)
    assert found["folder"] == str(folder)
    assert "stale" not in (folder / "task.toml").read_text()
    assert (folder / "mine.txt").read_text() == "kept"
    assert [*made.iterdir()] == [folder]


@pytest.mark.nightly
def test_imported_problems_with_holes_are_tasks_and_those_with_faults_are_counted(
    file, tmp_path, monkeypatch, capsys
):
    folder = tmp_path / "problems"
    folder.mkdir()
    (folder / "1_Half.py").write_text(PROBLEM)
    best = PROBLEM.replace("x * 0.5", "torch.argmax(torch.softmax(x, -1), -1)")
    (folder / "2_Best.py").write_text(best)
    words = ("import", "kernelbench", folder, "--to", tmp_path / "tasks", "--force")
    ended = run(monkeypatch, capsys, *words)
    assert ended.code == 0, ended.err
    assert "1 of 2 are tasks without fault or hole" in ended.out
    (folder / "3_None.py").write_text(PROBLEM.replace("x * 0.5", "x.nothing"))
    ended = run(monkeypatch, capsys, *words)
    assert ended.code == 2
    assert "1 of 3 are tasks without fault or hole" in ended.out


FIXED = """
import torch

def small(x):
    return x * 0.5

def small_inputs():
    return torch.randn(4, 5)

def whole(x):
    return x * 0.5 if x.shape == (12, 9) else x

def whole_inputs():
    return torch.randn(12, 9)
"""


@pytest.mark.usefixtures("file")
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("small", "none, for those below 8 stay as they are unless --vary ARG:DIM=NAME names them"),
        ("whole", "none, for the operation takes no other sizes (--vary ARG:DIM=NAME says of one"),
    ],
)
def test_a_task_of_one_size_says_why(tmp_path, monkeypatch, capsys, name, expected):
    path = tmp_path / "fixed.py"
    path.write_text(FIXED)
    words = (f"{path}:{name}", "--inputs", f"{name}_inputs", "--to", tmp_path / "to")
    ended = run(monkeypatch, capsys, "new", *words)
    assert ended.code == 0, ended.err
    assert expected in " ".join(ended.out.split())


def test_a_missing_example_is_said_and_what_a_file_prints_is_no_outcome(
    file, tmp_path, monkeypatch, capsys
):
    file.write_text("print('read')\n\ndef half(x):\n    return x / 2\n")
    ended = run(monkeypatch, capsys, "new", f"{file}:half", "--to", tmp_path / "t", "--json")
    assert ended.code == 2
    assert "defines no 'make_inputs'; there are half. It returns example arguments" in ended.err
    assert "read" not in ended.out
