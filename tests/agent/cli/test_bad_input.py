"""Input that commands refuse: one clear line, before any work, and nothing is made or lost."""

import errno
import os
import shutil
import stat
from pathlib import Path

import pytest
from commands import run
from kagent.export.writing import files_of, write_library
from kagent.workload import hotspots
from kagent.workload.hotspots import Hotspots
from synthetic_library import gpu_library

RUNS = Path(__file__).parents[3] / "runs"
RUN = RUNS / "softmax-ask-tell"


@pytest.fixture
def kagent(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    return lambda *words: run(monkeypatch, capsys, *words)


def refused(ended, said, code=2):
    assert ended.code == code, ended
    assert said in " ".join(ended.err.split())
    assert "Errno" not in ended.err
    assert "Traceback" not in ended.err


@pytest.mark.parametrize("place", [".", "/", ""])
def test_a_report_is_not_written_over_a_folder(kagent, tmp_path, place):
    refused(kagent("report", RUN, "-o", place), "a folder, where a file was expected: name a file")
    assert not [*tmp_path.iterdir()]


def test_a_report_is_not_written_over_a_pipe(kagent, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    refused(kagent("report", RUN, "-o", "pipe"), "pipe: a pipe, where a file was expected")
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)


def test_a_port_is_for_a_live_page(kagent, tmp_path):
    refused(kagent("report", RUN, "--port", 80), "--port is for --live")
    assert not [*tmp_path.iterdir()]


@pytest.fixture
def profiled(monkeypatch):
    """Scripts that were profiled."""
    scripts = []

    def find(script, args, **_):
        scripts.append(script)
        return Hotspots(
            str(script), "a device", "cpu", False, 100.0, 90.0, None, None, 0.0, (), {}, ()
        )

    monkeypatch.setattr(hotspots, "find_hotspots", find)
    return scripts


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--page", "/nope/x.html"), "there is no folder /nope"),
        (("--take", 1, "--to", "/proc/nope"), "/proc/nope: cannot be written"),
        (("--page", "."), "a folder, where a file was expected"),
    ],
)
def test_hotspots_refuses_places_before_it_profiles(kagent, profiled, words, said):
    refused(kagent("hotspots", "train.py", *words), said)
    assert not profiled


def test_hotspots_shows_what_it_found_though_the_region_is_missing(kagent, profiled):
    ended = kagent("hotspots", "train.py", "--take", 99, "--page", "x.html")
    refused(ended, "--take 99: no such region")
    assert "a device" in ended.out
    assert Path("x.html").is_file()


@pytest.mark.parametrize(
    ("name", "said"),
    [("nope.py", "nope.py: no such file"), ("folder", "folder: a folder, where a script was")],
)
def test_hotspots_looks_for_the_script_first(kagent, tmp_path, name, said):
    (tmp_path / "folder").mkdir()
    ended = kagent("hotspots", name)
    refused(ended, said)
    assert "ceilings" not in ended.err


def test_a_library_for_gpus_alone_does_not_patch_without_one(kagent, tmp_path, monkeypatch):
    monkeypatch.setattr("kagent.workload.patch_file.available", lambda kind: kind == "cpu")
    monkeypatch.setattr("kagent.workload.patch.run_script", None)
    library = gpu_library()
    write_library(library, files_of(library, cubins={}), tmp_path / "library")
    (tmp_path / "train.py").write_text("")
    refused(
        kagent("patch", "train.py", "library"),
        "library: this machine has no device for any of its kernels",
    )


def test_a_library_on_a_read_only_disk_is_not_measured_for_an_update(kagent, monkeypatch, tmp_path):
    def locked(**_):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    library = gpu_library()
    write_library(library, files_of(library, cubins={}), tmp_path / "library")
    monkeypatch.setattr("kagent.runs.files.tempfile.TemporaryDirectory", locked)
    monkeypatch.setattr("kagent.export.certify.certify", None)  # nothing is measured
    ended = kagent("certify", "library", "--update")
    refused(ended, "library: cannot be written (Read-only file system): name another place")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("ask", "softmax", "--prompts", "nope"), "nope: no such folder: --prompts"),
        (("ask", "softmax", "--prompts", "own"), "task.md.j2:1: "),
        (("serve", "softmax", "--socket", "/nope/x.sock"), "/nope/x.sock: no place for a socket"),
    ],
)
def test_what_is_refused_leaves_no_run(kagent, tmp_path, words, said):
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "task.md.j2").write_text("{% if %}")
    ended = kagent(*words)
    refused(ended, said)
    assert "KAGENT_JUDGE" not in ended.out
    assert not (tmp_path / "runs").exists()


def test_the_variable_for_a_judge_stands_alone_on_its_line(kagent, tmp_path, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("kagent.integrations.judge_server.serve", interrupt)
    ended = kagent("serve", "softmax", "--socket", "judge.sock", "--lang", "cpp")
    assert ended.code == 130, ended.err
    assert f"KAGENT_JUDGE={tmp_path / 'judge.sock'}" in ended.out.splitlines()


@pytest.fixture
def stored(tmp_path):
    """A copy of a run, here."""
    shutil.copytree(RUN, tmp_path / "b")
    return tmp_path / "b"


def test_damage_to_a_run_is_told_in_words(kagent, stored):
    kernel = next(stored.glob("kernels/*.py"))
    kernel.rename("kernel")
    refused(kagent("show", "./b"), f"b/kernels/{kernel.name} is missing: put it back", 4)
    Path("kernel").rename(kernel)
    whole = kernel.read_text()
    kernel.write_text(whole + "#")
    refused(
        kagent("show", "./b"), "after it was stored: put it back from a copy, or start a new", 4
    )
    kernel.write_text(whole)
    (stored / "run.json").write_text("")
    refused(kagent("show", "./b"), "b/run.json is damaged (not JSON): restore it, or start a", 4)
    shutil.copyfile(RUN / "run.json", stored / "run.json")
    (stored / "lineage.sqlite").write_bytes(b"")
    refused(kagent("show", "./b"), "b/lineage.sqlite is damaged (it holds no events)", 4)
    assert "it holds no events" in kagent("verify", "./b").out
    (stored / "lineage.sqlite").write_bytes(b"no database" * 100)
    refused(kagent("show", "./b"), "is not a database: put it back from a copy, or start a new", 4)
    (stored / "lineage.sqlite").unlink()
    (stored / "lineage.sqlite").mkdir()
    refused(kagent("show", "./b"), "b/lineage.sqlite: a folder, where a file was expected", 4)


def test_a_name_of_no_run_is_refused_with_the_last_ones(kagent, stored):
    refused(kagent("show", "x", "--runs", "."), "no run 'x' in .: the last is b", 4)
    shutil.copytree(stored, "a")
    refused(kagent("show", "x", "--runs", "."), "no run 'x' in .: the last are a, b", 4)


@pytest.mark.parametrize(
    ("words", "said", "code"),
    [
        (("ask", "softmax", "--runs", "file"), "file: a file, where a folder was expected", 2),
        (("ask", "softmax", "--runs", "file/a"), "file: a file, where a folder was expected", 2),
        (("ask", "softmax", "--runs", "/proc/x"), "/proc/x: cannot be written (No such file or "
         "directory): name another place", 2),
        (("evolve", "softmax", "--lang", "cpp", "--runs", "file"), "file: a file, where a f", 2),
        (("evolve", "softmax", "--lang", "cpp", "--runs", "/proc/x"), "/proc/x: cannot be wr", 2),
        (("campaign", "softmax", "--to", "file"), "file: a file, where a folder was expected", 2),
        (("suite", "run", "softmax", "--to", "file"), "file: a file, where a folder was exp", 2),
        (("suite", "run", "softmax", "--to", "/proc/x"), "/proc/x: cannot be written", 2),
        (("campaign", "no.toml"), "no.toml: no such file: expected a campaign's TOML file", 2),
        (("campaign", "folder"), "folder: no task there: expected a task's folder, a "
         "folder of tasks, or a TOML file", 2),
        (("new", "folder:f"), "folder: a folder, where a Python file was expected", 2),
        (("new", "own.py:f", "--to", "/proc/nope"), "/proc/nope: cannot be written", 2),
        (("export", RUN, "--to", "/proc/nope"), "/proc/nope: cannot be written", 2),
        (("export", RUN, "--single-file", "--to", "file"), "file: a file, where a folder was", 2),
        (("campaign", "softmax", "--export", "/proc/nope"), "/proc/nope: cannot be written", 2),
        (("show", "./folder"), "./folder: no run there (no run.json)", 4),
        (("selftest", "--chapter", "nope"), "beyond, and machine", 2),
        (("runs", "--runs", "file"), "file: a file, where a folder of runs was expected", 2),
        (("runs", "--runs", "nope"), "nope: no such folder", 2),
        (("top", "softmax", "--runs", "nope"), "nope: no such folder", 2),
        (("top", "nope"), "no task 'nope'", 2),
        (("import", "flashinfer", "nope.json"), "not imported: nope.json: no such file", 2),
        (("import", "flashinfer", "empty.json"), "empty.json: name: Field required", 2),
        (("import", "kernelbench", "nope.py"), "nope.py: no such file or folder", 2),
        (("check", "own.py", "--definition", "nope.json"), "nope.json: no such file", 2),
        (("build", "nope.py", "--task", "softmax"), "kagent: nope.py: no such file", 2),
        (("show", RUN, "7", "--source", "--plan"), "--source, --plan: give one of them", 2),
        (("show", RUN, "7", "--source", "--json"), "--source prints a text: omit --json", 2),
        (("check", "softmaxx"), "softmaxx: no task: did you mean softmax? For a candidate", 2),
        (("check", "own.py"), "own.py: no task: for a candidate, name its task with --task", 2),
    ],
)  # fmt: skip
def test_places_and_names_are_refused_in_words(kagent, tmp_path, words, said, code):
    (tmp_path / "file").write_text("")
    (tmp_path / "empty.json").write_text("{}")
    (tmp_path / "folder").mkdir()
    (tmp_path / "own.py").write_text("def f(x): return x\n")
    refused(kagent(*words), said, code)
    assert (tmp_path / "file").read_text() == ""


def test_a_file_that_does_not_parse_shows_the_line_once(kagent, tmp_path):
    (tmp_path / "bad.py").write_text("import torch\n\ndef f(x):\n    return x +\n")
    ended = kagent("new", "bad.py:f")
    refused(ended, "kagent: bad.py, line 4: invalid syntax: return x +")
    assert ended.err.splitlines()[-1].count("bad.py") == 1
    (tmp_path / "uses.py").write_text("import bad\n")
    refused(kagent("new", "uses.py:f"), f"{tmp_path / 'bad.py'}, line 4: invalid syntax: return")
    (tmp_path / "null.py").write_bytes(b"x = 1\0\n")
    refused(kagent("new", "null.py:f"), "null.py: source code")
    (tmp_path / "tab.py").write_text("if 1:\n\tx = 1\n        y = 2\n")
    refused(kagent("new", "tab.py:f"), "tab.py, line 3: ")


def test_no_runs_yet_is_no_mistake(kagent):
    for words in (("runs",), ("top",), ("top", "softmax")):
        assert kagent(*words).code == 0


def test_settings_that_do_not_fit_are_told_in_words(kagent):
    for text, said in (
        ("runs = 3\n", "kagent.toml: option runs: expected a path, in quotes, got 3"),
        (
            "budget = [\n",
            "kagent.toml: no TOML: Invalid value (at end of document): expected lines",
        ),
    ):
        Path("kagent.toml").write_text(text)
        refused(kagent("runs"), said)


def test_memory_that_is_a_file_names_the_variable(kagent, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    for place in ("file", "file/below"):
        monkeypatch.setenv("XDG_DATA_HOME", place)
        refused(kagent("memory", "list"), f"XDG_DATA_HOME={place}: a file, where a folder was")


def test_a_new_task_that_draws_random_numbers_is_named(kagent, tmp_path):
    (tmp_path / "m.py").write_text(
        "import torch\n\ndef rnd(x):\n    return x + torch.rand_like(x)\n\n"
        "def make_inputs():\n    return torch.ones(8, 8),\n"
    )
    refused(kagent("new", "m.py:rnd"), "m.py:rnd: it draws random numbers (aten.rand")
    refused(kagent("new", "m.py:rnd", "--vary", "y:0=B"), "no tensor of that name: there are x")
