import importlib.util
import json
import re

import pytest
import torch
from commands import run
from flashinfer_definitions import norm, write
from kagent.authoring.importers.flashinfer.exchange import Solution
from kagent.authoring.importers.flashinfer.solution import candidate_of
from kagent.authoring.importers.flashinfer.task import import_definition
from kagent.export.flashinfer import flashinfer_files
from kagent_sandbox.data.task import load_task
from kagent_sandbox.errors import UserError
from synthetic_library import SEEDS, cpu_library, gpu_library, in_place_library
from test_exchange import solution


def made(main, *, language="triton", function="run", writes=False, **files):
    sources = [{"path": "main.py", "content": main}]
    sources += [{"path": f"{n}.py", "content": text} for n, text in files.items()]
    spec = {
        "language": language,
        "target_hardware": ["cuda"],
        "entry_point": f"main.py::{function}",
        "destination_passing_style": writes,
    }
    return Solution.model_validate(solution(spec=spec, sources=sources))


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    folder = tmp_path_factory.mktemp("norm")
    return load_task(import_definition(write(folder, norm()), None, folder).folder)


def called(source, task):
    names = {}
    exec(source, names)
    x = torch.ones(3, 32).bfloat16()
    return names[task.entry](x, x[0], 1e-6)


def test_a_function_of_the_entry_s_name_stays_as_it_is(task):
    main = "def run(x, weight, eps):\n    return x * weight\n"
    assert candidate_of(made(main), task) == main


@pytest.mark.parametrize("function", ["run", "go"])
def test_results_that_are_written_into_are_allocated(task, function):
    main = f"def {function}(x, weight, eps, y):\n    y.copy_(x + weight)\n"
    source = candidate_of(made(main, function=function, writes=True), task)
    assert "_torch.empty((x.shape[0], 32, ), dtype=_torch.bfloat16" in source
    assert torch.equal(called(source, task), torch.full((3, 32), 2.0).bfloat16())


def test_modules_of_its_own_go_in_front(task):
    main = "from __future__ import annotations\nfrom .parts import twice\n\n\n"
    main += "def run(x, weight, eps):\n    return twice(x)\n"
    source = candidate_of(
        made(main, parts="import math\n\n\ndef twice(x):\n    return 2 * x\n"), task
    )
    assert source.index("def twice") < source.index("def run")
    assert called(source, task)[0, 0] == 2


@pytest.mark.parametrize(
    ("main", "more", "says"),
    [
        ("import parts\n", {"parts": ""}, r"main.py:1: imports its own parts.py as a module"),
        ("from . import parts\n", {"parts": ""}, r"imports its own parts.py as a module"),
        ("from parts import a as b\n", {"parts": ""}, r"imports its own parts.py as a module"),
        ("def run(:\n", {}, r"main.py:1: SyntaxError"),
        ("x = 1\n", {}, r"main.py defines no function 'run'"),
        ("def run(): pass\n", {"language": "cuda"}, r"its language is cuda: a candidate is one"),
    ],
)  # fmt: skip
def test_what_cannot_be_a_candidate_is_one_line(task, main, more, says):
    with pytest.raises(UserError, match=says):
        candidate_of(made(main, **more), task)


def test_what_kagent_exported_comes_back_with_its_configuration(task):
    files = {**flashinfer_files(gpu_library()), **flashinfer_files(cpu_library())}
    found = [json.loads(t) for p, t in files.items() if "/solutions/" in p]
    own = [Solution.model_validate(s) for s in found if len(s["sources"]) == 2]
    assert own
    for each in own:
        config = each.sources[0].content.split("CONFIG = ")[1].split("\n")[0]
        source = candidate_of(each, task)
        assert "from . import" not in source  # the kernel alone
        (entry,) = re.findall(rf"def {task.entry}\(.*\):\n    return (\w+)\(", source)
        assert f"def {entry}(" in source
        for name, value in eval(config).items():
            assert f"{name} = {value}" in source


@pytest.mark.parametrize("defined", [False, True])
def test_an_exported_step_writes_in_place_and_for_its_definition_copies(tmp_path, defined):
    def fits(path, folder):
        return f"/{folder}/" in path and "float32" in path

    files = flashinfer_files(in_place_library(kind="gpu"))
    (one,) = (json.loads(t) for p, t in files.items() if fits(p, "solutions"))
    (definition,) = (json.loads(t) for p, t in files.items() if fits(p, "definitions"))
    step = load_task(SEEDS / "adamw")
    if defined:
        path = write(tmp_path, definition)
        step = load_task(import_definition(path, None, tmp_path).folder)
    path = tmp_path / "candidate.py"  # Triton takes functions of files alone
    path.write_text(candidate_of(Solution.model_validate(one), step))
    spec = importlib.util.spec_from_file_location("exported_step", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    tensors = [torch.full((2, 8), float(i)) for i in range(4)]

    def adamw(param, grad, exp_avg, exp_avg_sq, *numbers):
        assert len(numbers) == 6
        for t in (param, exp_avg, exp_avg_sq):
            t.add_(10.0)

    module.adamw = adamw
    found = getattr(module, step.entry)(*tensors, *range(6))
    now = [float(t[0, 0]) for t in tensors]
    if defined:
        assert now == [0.0, 1.0, 2.0, 3.0]
        assert [float(t[0, 0]) for t in found] == [10.0, 12.0, 13.0]
    else:
        assert now == [10.0, 1.0, 12.0, 13.0]


def test_the_command_takes_a_solution_with_its_definition(tmp_path, monkeypatch, capsys):
    path = tmp_path / "s.json"
    path.write_text(json.dumps(solution(spec={**solution()["spec"], "language": "cuda"})))
    definition = write(tmp_path, norm())
    done = run(monkeypatch, capsys, "check", path, "--definition", definition)
    assert (done.code, done.out) == (2, "")
    assert "solution fast: its language is cuda" in done.err
    done = run(monkeypatch, capsys, "bench", path)
    assert "no task: name it with --task, or a definition with --definition" in done.err
    done = run(monkeypatch, capsys, "bench", path, "--definition", definition, "--task", "softmax")
    assert "one of the two was expected" in done.err
