"""A library's own tests are run before it is written; one that fails them is not written."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest
from kagent.config.settings import load_config
from kagent.export import export as exporting
from kagent.export import own_tests as trying
from kagent.export.host import LocalHost
from kagent.export.packaging import without_tests_of
from kagent.export.writing import files_of, write_library
from kagent_sandbox.errors import UserError
from kagent_sandbox.process.device_lock import CPU, DeviceLock
from kagent_sandbox.replay.library_tests import Ran, run_tests
from synthetic_library import cpu_library

pytestmark = pytest.mark.usefixtures("shared")

HOST = LocalHost(load_config(), print)
PACKAGE = "def twice(x):\n    return x + x\n"
PASSES = "import tiny\n\ndef test_twice():\n    assert tiny.twice(2) == 4\n"
HEAD = "def test_it():\n"


def tiny(tests=PASSES, package=PACKAGE):
    return {"package/tiny/__init__.py": package.encode(), "tests/test_tiny.py": tests.encode()}


def test_they_have_a_turn_on_the_device(monkeypatch):
    """Nobody times there meanwhile."""
    seen = []

    def run(*_, **__):
        seen.extend(DeviceLock(CPU).turns())
        return Ran(1, (), "")

    monkeypatch.setattr(trying, "run_tests", run)
    assert (
        trying.failure_of("tiny", trying.run_in_turn("tiny", {}, print, gpu=False, path="")) == ""
    )
    assert os.getpid() in [process for process, _ in seen]


@pytest.mark.parametrize(
    ("files", "why"),
    [
        (tiny(), ""),
        (tiny(package="def twice(x):\n    return 5\n"), "tests/test_tiny.py::test_twice failed"),
        (tiny(package="import nothing_of_the_kind\n"), "tests/test_tiny.py failed"),
        (tiny(package=f"import kagent_sandbox\n{PACKAGE}"), "tests/test_tiny.py failed"),
        (
            tiny("def helper():\n    pass\n"),
            "pytest (it ended with <ExitCode.NO_TESTS_COLLECTED: 5>",
        ),
        (
            tiny("import os\ndef test_it():\n    os._exit(0)\n"),
            "their process exited with status 0",
        ),
        (
            tiny("import ctypes\ndef test_it():\n    ctypes.string_at(0)\n"),
            "their process died of SIGSEGV",
        ),
        (tiny("import pytest\ndef test_it():\n    pytest.skip('no')\n"), "there was none to run"),
    ],
    ids=["passes", "wrong", "import", "kagent", "none", "exit", "fault", "skipped"],
)
def test_what_came_of_them(files, why):
    tested = run_tests("tiny", files, gpu=False, path="package")
    assert tested.why.startswith(why), tested
    assert bool(tested.why) == bool(why), tested


def test_they_are_confined(tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("secret")
    reach = f"""
import pathlib, socket, pytest

def test_files():
    with pytest.raises(OSError):
        pathlib.Path({str(secret)!r}).read_text()
    with pytest.raises(OSError):
        pathlib.Path({str(tmp_path / "mine")!r}).write_text("")

def test_network():
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", 1), 1.0).close()
        raise AssertionError

def test_own_folder():
    pathlib.Path("written").write_text("")
"""
    tested = run_tests("tiny", tiny(reach), gpu=False, path="package")
    assert (tested.passed, tested.why) == (3, ""), tested.log


def softmax_library(spoilt=""):
    """Softmax in C++; `spoilt` is added to the kernel's file."""
    made = cpu_library("made_kernels")
    operator = next(o for o in made.operators if o.task == "softmax")
    (kernel,) = operator.kernels
    return dataclasses.replace(
        made,
        operators=(
            dataclasses.replace(
                operator,
                kernels=(dataclasses.replace(kernel, source=kernel.source + spoilt),),
            ),
        ),
    )


NAN = """

_right = softmax


def softmax(x):
    y = _right(x)
    if x.shape[0] in (17, 9, 5):
        y[3, 4] = float("nan")
    return y
"""


ALONE = """

import ctypes

torch.set_num_threads(torch.get_num_threads())  # from now on each new thread has as many
_right = softmax


def softmax(x):
    y = _right(x)
    if ctypes.CDLL("libgomp.so.1").omp_get_max_threads() == 1:
        y[0, 0] = float("nan")
    return y
"""


@pytest.mark.nightly
@pytest.mark.skipif(os.cpu_count() == 1, reason="other tests fail there, too")
def test_a_kernel_that_needs_several_threads_is_not_written(tmp_path, monkeypatch):
    """A judge calls it with one thread less than the machine has: fifteen of sixteen."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    said = r"tests/test_softmax.py::test_one_thread_is_enough failed"
    with pytest.raises(UserError, match=said):
        put(softmax_library(ALONE), tmp_path / "made_kernels")


def test_those_of_some_operators_can_be_left_out():
    files = files_of(cpu_library("made_kernels"), cubins={})
    left = without_tests_of(["softmax"], files)
    out = set(files) - set(left)
    assert {"tests/test_softmax.py", "tests/tasks/softmax/task.toml"} <= out
    assert all(path.startswith("tests/") and "softmax" in path for path in out)
    assert {"tests/test_cross_entropy.py", "tests/tasks/cross_entropy/task.toml"} <= set(left)
    assert without_tests_of([], files) == files


def put(library, folder, disk=None):
    (operator,) = library.operators
    merged = {operator.task: (operator, ["softmax: added"])}
    said = []
    exporting._write(disk, folder, library.name, merged, {}, HOST, said.append, gpu=False)
    return said


@pytest.mark.nightly
def test_a_kernel_that_returns_nan_in_some_call_is_not_written(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "made_kernels"
    with pytest.raises(UserError) as caught:
        put(softmax_library(NAN), folder)
    text = str(caught.value)
    assert "\n" not in text
    assert "nothing was written: its own tests do not pass" in text
    assert "tests/test_softmax.py::test_agrees_with_float64[cpu_17x1021_large]" in text
    log = Path(text.rpartition("output: ")[2].rstrip(")"))
    assert "FAILED tests/test_softmax.py" in log.read_text()
    assert not folder.exists()


def test_a_library_that_is_there_stays_as_it_was(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "made_kernels"
    library = softmax_library()
    write_library(library, files_of(library, cubins={}), folder)
    before = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    tests = []

    def failing(name, files, *, gpu, path):
        tests.append(files["tests/test_softmax.py"])
        return Ran(3, ("tests/test_softmax.py::test_opcheck[cpu]",), "the log")

    monkeypatch.setattr(trying, "run_tests", failing)
    with pytest.raises(UserError, match=r"test_opcheck\[cpu\] failed"):
        put(library, folder)
    assert len(tests) == 1
    assert {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()} == before
    monkeypatch.setattr(trying, "run_tests", lambda *_, **__: Ran(3, (), ""))
    assert put(library, folder) == [
        "running the library's own tests",
        f"writing {folder}",
    ]


def test_nothing_is_left_of_a_dimension_that_may_vary(tmp_path):
    """A size that always is 4 is part of the operation: torch itself refuses 0 there."""
    record = cpu_library("kagent_kernels")
    write_library(record, files_of(record, cubins={}), tmp_path / "lib")
    program = """
import torch
from harness import Task
task = object.__new__(Task)
shapes = {"weight": [4, "C"], "x": ["B", "C", 4], "bias": ["C"]}
arguments = [{"name": n, "shape": s} for n, s in shapes.items()]
task.data = {"dims": {"B": "", "C": ""}, "arguments": arguments}
task.tensors = list(shapes)
sizes = {4: 4, "B": 2, "C": 3}
found = task.empty({n: torch.ones([sizes[s] for s in shape]) for n, shape in shapes.items()})
print(*(list(t.shape) for t in found.values()))
"""
    places = [tmp_path / "lib" / "tests", tmp_path / "lib" / "build" / "torch-universal"]
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, places))},
        capture_output=True,
        text=True,
    )
    assert done.stdout == "[4, 0] [2, 0, 4] [0]\n", done.stderr
