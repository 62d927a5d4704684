"""From a run to a library and back: real builds, real measurements, real processes."""

import json
import os
import shutil
import subprocess
import sys

import pytest
from commands import run
from kagent.resources import resource
from library_checks import require_certified

pytestmark = [
    pytest.mark.timeout(400),  # a run, and a library's measurements
    pytest.mark.usefixtures("uncompiled", "brief_timing", "warm_processes"),
]
ENTRY = """
import json, sys
sys.modules["kagent"] = sys.modules["kagent_sandbox"] = None  # whoever imports them fails
import torch, rows_lib
x = torch.randn(256, 1024)
y = rows_lib.rows(x)
portfolio = rows_lib.operators.rows
print(json.dumps({"close": torch.allclose(y, torch.softmax(x, -1), atol=1e-6),
                  "modules": sorted(m for m in sys.modules if m.startswith("rows_lib.kernels."))}))
"""


def kagent(folder, *words, code=0):
    done = subprocess.run(
        [sys.executable, "-m", "kagent", *map(str, words)],
        cwd=folder, capture_output=True, text=True, timeout=170, check=False,
    )  # fmt: skip
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done


@pytest.fixture
def refused(exported, monkeypatch, capsys):
    """`kagent` in this process, in the folder: nothing is measured."""
    monkeypatch.chdir(exported)

    def call(*words, code=2):
        done = run(monkeypatch, capsys, *words)
        assert done.code == code, done.out + done.err
        assert "Traceback" not in done.err
        return done.err

    return call


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A folder with a task, a run of it, and the library `lib`."""
    folder = tmp_path_factory.mktemp("export")
    corpus = resource("corpus")
    shutil.copytree(corpus / "tasks" / "rows", folder / "rows")
    shutil.copy(corpus / "honest" / "rows_cpp.py", folder / "rows" / "cpp_rows.py")
    words = ("evolve", "rows", "--lang", "cpp", "--budget", "0", "--runs", "runs")
    kagent(folder, *words, code=3)  # it is not FASTER than torch
    words = ("export", "latest", "--to", "lib", "--name", "rows_lib", "--runs", "runs")
    kagent(folder, *words, "--allow-slower")
    return folder


def test_the_library_works_without_kagent_and_uses_its_kernel(exported, bare_python):
    env = {**os.environ, "PYTHONPATH": str(exported / "lib/build/torch-universal")}
    done = bare_python.run("-c", ENTRY, cwd=exported, env=env)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["close"]
    assert len(found["modules"]) == 1


def test_it_is_what_its_record_says(exported, tmp_path):
    require_certified(exported / "lib", tmp_path)


def test_its_record_says_where_it_comes_from(exported):
    record = json.loads((exported / "lib" / "PROVENANCE.json").read_text())
    library = record["library"]
    (operator,) = library["operators"]
    (kernel,) = operator["kernels"]
    run = next((exported / "runs").glob("rows-*")).name
    assert kernel["origin"]["run"] == run
    assert "source" not in kernel  # the text is a file
    assert kernel["compiled"][0]["language"] == "cpp"
    assert {p["case"] for p in operator["devices"][0]["points"]} >= {"cpu_256x1024"}
    package = exported / "lib/build/torch-universal/rows_lib"
    assert "kagent_sandbox" not in (package / "kernels" / f"{kernel['id']}.py").read_text()


def test_a_winner_that_loses_is_refused_unless_asked_for(exported, refused):
    said = refused("export", "latest", "--to", "other", "--runs", "runs")
    assert "is not FASTER than torch" in said
    assert not (exported / "other").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("latest", "--to", "rows"), "holds cpp_rows.py, reference.py, task.toml and no library"),
        (("latest", "--to", "lib", "--name", "another"), "is called rows_lib"),
        (("latest", "--to", "new", "--name", "Bad-Name"), "cannot be a library's name"),
        (("latest:7", "--to", "new"), "no candidate 7"),
        (("nope", "--to", "new"), "no run 'nope'"),
    ],
)
def test_what_is_refused_before_anything_is_measured(refused, words, said):
    code = 4 if words[0] == "nope" else 2
    assert said in refused("export", *words, "--runs", "runs", "--allow-slower", code=code)


@pytest.mark.nightly
def test_certify_measures_again_and_finds_what_was_changed(exported, refused):
    lib = exported / "changed"
    shutil.copytree(exported / "lib", lib)
    card = lib / "CARD.md"
    card.write_text(card.read_text() + "\nedited\n")
    (kernel,) = (lib / "build/torch-universal/rows_lib/kernels").glob("rows_*.py")
    kernel.write_text(kernel.read_text().replace("return y", "return y * 1.01", 1))
    done = kagent(exported, "certify", "changed", "--json", code=1)
    found = json.loads(done.stdout)
    assert not found["ok"]
    assert sorted(found["changed"]) == [
        "CARD.md",
        f"build/torch-universal/rows_lib/kernels/{kernel.name}",
    ]
    assert list(found["wrong"]) == [kernel.stem]
    assert "own tests do not pass: tests/test_rows.py::test_agrees_with_float64" in found["tests"]
    words = ("export", "latest", "--to", "changed", "--runs", "runs", "--allow-slower")
    said = refused(*words)
    assert "CARD.md" in said
    assert "--force" in said


def test_certify_of_an_operator_that_is_not_there(exported, refused):
    said = refused("certify", "lib", "--operator", "softmax")
    assert "rows_lib has no operator softmax; it has rows" in said


def test_certify_of_what_is_no_library(exported, refused):
    assert "no library there" in refused("certify", "rows")
    (exported / "broken").mkdir()
    (exported / "broken" / "PROVENANCE.json").write_text('{"library": {"format": 99}}')
    assert "update kagent" in refused("certify", "broken")
