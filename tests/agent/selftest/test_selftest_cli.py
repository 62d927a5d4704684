"""`kagent selftest` as a user calls it, on a small corpus of two items."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import warm_python
from commands import run
from kagent.resources import corpus_folder
from kagent.selftest import catalogue
from kagent.selftest import machine_checks as checks
from kagent.selftest.assemble import candidate_text
from kagent_sandbox.confine.policy import ISOLATION
from kagent_sandbox.process.environment import for_confined, for_trusted

SYNTAX = """
number = 1
title = "Syntax error"
mechanism = "compiler"
why = "The file is parsed before anything else."

[[variant]]
file = "bad.py"
twin = "../../honest/rows_cpp.py"
task = "rows"
runs = "cpu"
expect = "parse COMPILE_ERROR"
says = "SyntaxError"
"""
KEYS = """
number = 29
title = "Keys in the environment"
mechanism = "clean environment"
why = "Candidates have an environment of their own."

[[variant]]
file = "environ_cpp.py"
twin = "../../honest/rows_cpp.py"
task = "rows"
runs = "cpu"
expect = "passed"
says = "met: KeyError"
"""
LOOK = """import os
import sys

try:
    raise SystemError("escaped: " + os.environ["KAGENT_BAIT_KEY"])
except KeyError:
    print("met: KeyError", file=sys.stderr)
"""


@pytest.fixture
def corpus(tmp_path, own_cache, monkeypatch):
    """A corpus of two items, and a cache of its own."""
    real = corpus_folder()
    folder = tmp_path / "corpus"
    for name in ("tasks", "honest"):
        shutil.copytree(real / name, folder / name)
    honest = candidate_text(real / "honest" / "rows_cpp.py")
    looking = honest.replace("import torch\n", LOOK + "import torch\n", 1)
    for item, table, file, text in (
        ("faults/01_syntax", SYNTAX, "bad.py", honest + "\n)"),
        ("host/29_keys", KEYS, "environ_cpp.py", looking),
    ):
        (folder / item).mkdir(parents=True)
        (folder / item / "item.toml").write_text(table)
        (folder / item / file).write_text(text)
    monkeypatch.setattr(catalogue, "corpus_folder", lambda: folder)
    return folder


@pytest.fixture
def selftest(warm_processes, brief_timing, corpus, monkeypatch, capsys):
    # started later, they would be taken for what an attack leaves behind
    interprets = {**for_confined(), "TRITON_INTERPRET": "1"}
    warm_python.ready(for_confined(), for_trusted(), interprets)

    def call(*words):
        return run(monkeypatch, capsys, "selftest", *words)

    return call


def test_list_shows_items_by_chapter_and_runs_nothing(selftest):
    done = selftest("--list")
    assert done.code == 0
    lines = [line.strip() for line in done.out.splitlines() if line.strip()]
    assert lines[2] == "faults"
    assert lines[3].startswith("1 Syntax error")
    assert "clean environment" in lines[5]
    assert [e["number"] for e in json.loads(selftest("--list", "--json").out)] == [1, 29]


def test_an_item_is_shown_whole(selftest, corpus):
    file = corpus / "host" / "29_keys" / "environ_cpp"
    file.with_suffix(".py").unlink()
    looks = "".join(f"+{line}\n" for line in LOOK.splitlines())
    file.with_suffix(".edits").write_text(
        f'"""It looks."""\nover ../../honest/rows_cpp.py\n@@\n{looks} import torch\n'
    )
    done = selftest("--show", "29")
    assert done.code == 0, done.err
    assert re.search(r"environ_cpp\.py \(cpu: passed.*its twin is rows_cpp\.py", done.out)
    assert str(file.with_suffix(".edits")) in done.out
    assert '"""It looks."""' in done.out
    assert f"{LOOK}import torch" in done.out
    assert "rows_cpp.py (honest)" in done.out
    assert "no item 7" in selftest("--show", "7").err


def test_all_as_expected_is_a_table_a_line_and_a_clean_exit(selftest):
    done = selftest("--only", "1,29")
    assert done.code == 0, done.out
    assert re.search(
        r"1 Syntax error +parse COMPILE_ERROR +parse COMPILE_ERROR +compiler", done.out
    )
    assert re.search(r"left behind +nothing +nothing", done.out)
    assert "2 items, 2 files, 1 honest twin, 1 check of the machine in" in done.out
    assert "all as expected" in done.out


@pytest.mark.nightly
def test_a_miss_is_explained_and_the_exit_says_so(selftest, corpus):
    table = corpus / "host" / "29_keys" / "item.toml"
    table.write_text(table.read_text().replace("met: KeyError", "met: PermissionError"))
    done = selftest("--chapter", "host")
    assert done.code == 1
    at_once = next(line for line in done.err.splitlines() if line.startswith("missed: "))
    assert re.match(r"missed: 29_keys-environ_cpp: .*but what it printed has nothing", at_once)
    assert "nothing like 'met: PermissionError'" in done.out
    assert str(corpus / "host" / "29_keys" / "environ_cpp.py") in done.out
    assert "1 missed" in done.out


@pytest.mark.nightly
@pytest.mark.timeout(600)  # builders and judges in every tier
def test_json_has_everything(selftest, corpus, monkeypatch):
    monkeypatch.setattr(checks, "ROUNDS", 1)
    file = corpus / "host" / "29_keys" / "environ_cpp.py"
    file.write_text(file.read_text().replace('os.environ["KAGENT_BAIT_KEY"]', '"a lie"'))
    # One tier beside T0: each has a builder, a judge and an interpreter of its own.
    monkeypatch.setenv(ISOLATION, "auto")  # to be restored
    done = selftest("--json", "--isolation", "T1")
    assert done.code == 1
    report = json.loads(done.out)
    assert report["as_expected"] is False
    assert "29_keys-environ_cpp" in report["missed"]
    found = {e["id"]: e for e in report["entries"]}
    assert found["29_keys-environ_cpp"]["seen"]["outcome"] == "escaped"
    assert "SystemError: escaped: a lie" in found["29_keys-environ_cpp"]["seen"]["message"]
    assert found["01_syntax-bad"]["misses"] == []
    names = [c["name"] for c in report["checks"]]
    assert {"A/A, cpp", "honest cpp", "honest triton", "honest cuda", "left behind"} <= set(names)
    assert "left behind" not in report["missed"]
    assert f"canaries, {report['tier']}" in names
    keys = {d["key"] for d in report["devices"]}
    assert keys == set(report["noise"])
    assert all(n["kernel_us"] > 0 and n["factor"] >= 1 for n in report["noise"].values())


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--only", "2"], "no item 2"),
        (["--only", "two"], "expected numbers"),
        (["--chapter", "hosts"], "no chapter 'hosts'"),
    ],
)
def test_what_is_not_there_is_said(selftest, words, text):
    done = selftest(*words)
    assert done.code == 2
    assert text in done.err


def test_an_interrupt_ends_it_and_leaves_nothing(tmp_path):
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    process = subprocess.Popen(
        [sys.executable, "-m", "kagent", "selftest", "--only", "4,13,22"],  # 13, 22: endless builds
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    while not list(tmp_path.glob("kagent-selftest-*/kagent-*")):
        assert process.poll() is None
        time.sleep(0.05)
    time.sleep(2.0)  # in the middle of a build
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate()
    assert process.returncode == 130
    assert "interrupted" in err
    assert "Traceback" not in err + out
    assert list(tmp_path.glob("kagent-*")) == []
    deadline = time.monotonic() + 60  # helpers of a judge that had to be killed die after it
    while (left := _processes_of(tmp_path)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left == []


def _processes_of(folder):
    return [p for p in Path("/proc").glob("[0-9]*") if _mentions(p, str(folder))]


def _mentions(process, text):
    try:
        return text.encode() in (process / "environ").read_bytes()
    except OSError:
        return False
