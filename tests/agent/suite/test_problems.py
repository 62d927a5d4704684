"""Finding a suite's problems."""

import pytest
from doubling_task import REFERENCE, TASK
from kagent.suite.problems import Form, absolute, find_problems
from kagent_sandbox.errors import UserError

MODEL = "class Model:\n    pass\n\n\ndef get_inputs():\n    return []\n"
DEFINITION = '{"name": "norm", "axes": {}, "reference": "def run(): ..."}'


@pytest.fixture
def folder(tmp_path):
    """Problems in every form, and files that are none."""
    files = {
        "level1/10_Last.py": MODEL,
        "level1/2_First.py": MODEL,
        "level1/util.py": "x = 1\n",
        "level1/__pycache__/2_First.py": MODEL,
        ".git/3_Old.py": MODEL,
        "own/double/task.toml": TASK,
        "own/double/reference.py": REFERENCE + MODEL,
        "hard/01_gemm/reference.py": MODEL,
        "hard/01_gemm/shapes.py": "SHAPES = []\n",
        "ops/norm.json": DEFINITION,
        "ops/norm.jsonl": "",
        "ops/other.json": '{"figures": [1]}',
    }
    for name, text in files.items():
        path = tmp_path / "suite" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "suite"


def found(*sources):
    return [(p.name, p.form, p.group) for p in find_problems([str(s) for s in sources])]


def test_a_folder_has_problems_in_every_form(folder):
    assert found(folder) == [
        ("hard/01_gemm", Form.KERNELBENCH_HARD, "hard"),
        ("level1/2_First", Form.KERNELBENCH, "level1"),
        ("level1/10_Last", Form.KERNELBENCH, "level1"),
        ("ops/norm", Form.FLASHINFER, "ops"),
        ("own/double", Form.TASK, "own"),
    ]
    (norm,) = (p for p in find_problems([str(folder)]) if p.form is Form.FLASHINFER)
    assert norm.workloads == str(folder / "ops/norm.jsonl")


def test_names_begin_below_a_single_folder_and_with_each_of_several(folder):
    assert [name for name, _, _ in found(folder / "level1")] == ["2_First", "10_Last"]
    assert found("softmax", folder / "level1", folder / "own/double") == [
        ("softmax", Form.TASK, ""),
        ("level1/2_First", Form.KERNELBENCH, "level1"),
        ("level1/10_Last", Form.KERNELBENCH, "level1"),
        ("double", Form.TASK, ""),
    ]
    assert found(folder / "ops/norm.json") == [("norm", Form.FLASHINFER, "")]
    assert found(folder / "level1/2_First.py") == [("2_First", Form.KERNELBENCH, "")]
    assert found(folder / "hard/01_gemm") == [("01_gemm", Form.KERNELBENCH_HARD, "")]


def test_what_is_no_problem_is_named(folder, tmp_path):
    (tmp_path / "empty").mkdir()
    for source, words in (
        (tmp_path / "empty", "no problem there: expected a task's folder"),
        (folder / "level1/util.py", "no problem there"),
        ("softmx", "did you mean softmax"),
        (tmp_path / "gone", "gone: no such folder"),
    ):
        with pytest.raises(UserError, match=words):
            found(source)
    with pytest.raises(UserError, match=r"two problems have the name softmax: .*: leave one out"):
        found("softmax", "softmax")


def test_a_source_is_the_same_from_every_folder(folder, monkeypatch):
    monkeypatch.chdir(folder)
    assert absolute("level1") == str(folder / "level1")
    assert absolute("softmax") == "softmax"
