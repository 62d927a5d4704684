"""`kagent new` and `kagent import`: what they print, and how they refuse."""

import json

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


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("new", "mine.py"), "expected FILE:NAME"),
        (("new", "{file}:third"), "defines no 'third'; there are half, make_inputs"),
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
