"""Benchmarks that run commands side by side: limits, signals, and what is kept of each end."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from import_kernelbench import outcome
from kagent_sandbox.process import process_tree
from limited import Ended, run_all
from suite_imports import Found, load, measure

SLEEPS = "import os, sys, time; {}; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(600)"
CHILD = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", sys.argv[1], sys.argv[2]], start_new_session=True)
time.sleep(600)
"""


@pytest.fixture
def ended():
    return {}


def command(text):
    return [sys.executable, "-c", text]


def in_background(folder):
    """A command that starts a process in a session of its own; it writes its number to a file."""
    return [*command(CHILD), SLEEPS.format("os.nice(1)"), str(folder / "pid")]


def gone(folder):
    """Whether the process in the background has ended, of which a file has the number."""
    deadline = time.monotonic() + 10
    pid = int((folder / "pid").read_text())
    while not process_tree.ended(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return process_tree.ended(pid)


def test_each_end_is_told_with_what_was_printed(ended):
    commands = {n: command(f"print({n}); import sys; sys.exit({n})") for n in range(3)}
    stopped = run_all(commands, ended.__setitem__, jobs=2, limit_s=60)
    assert stopped == ""
    assert {k: (e.status, e.out) for k, e in ended.items()} == {n: (n, f"{n}\n") for n in range(3)}
    assert all(e.cpu_s > 0 for e in ended.values())


def test_cores_are_shared(ended, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    text = "import os; print(os.environ['OMP_NUM_THREADS'])"
    jobs = len(os.sched_getaffinity(0))
    run_all({1: command(text)}, ended.__setitem__, jobs=jobs, limit_s=60)
    assert ended[1].out == "1\n"


@pytest.mark.nightly
def test_a_limit_ends_all_that_a_command_has_started(ended, tmp_path):
    began = time.monotonic()
    commands = {"slow": in_background(tmp_path), "next": command("print(1)")}
    run_all(commands, ended.__setitem__, jobs=1, limit_s=6)
    assert time.monotonic() - began < 60
    assert [e.status for e in ended.values()] == [None, 0]
    assert gone(tmp_path)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_what_runs_and_keeps_what_is_done(tmp_path, number):
    script = (
        "import sys, limited; "
        "print(limited.run_all({1: ['true'], 2: sys.argv[1:], 3: ['true']}, "
        "lambda k, e: print(k, e.status, flush=True), jobs=1, limit_s=600))"
    )
    folder = Path(__file__).parents[1] / "benchmarks"
    words = [*command(script), *in_background(tmp_path)]
    with subprocess.Popen(words, cwd=folder, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "1 0\n"
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
            time.sleep(0.02)
        process.send_signal(number)
        rest, _ = process.communicate(timeout=60)
    assert rest == f"{number.name}\n"
    assert gone(tmp_path)


class Options:
    join, out, every, first, jobs, limit = None, None, 1, 0, 2, 60.0


def test_outcomes_are_kept_joined_and_not_measured_again(tmp_path, capsys):
    problems = {("level", str(n)): command(f"print({n})") for n in range(5)}
    read = lambda ended: Found("task" if ended.out != "3\n" else "holes", "why")  # noqa: E731
    parts = []
    for first in (0, 1):
        options = Options()
        options.out, options.every, options.first = tmp_path / f"{first}.jsonl", 2, first
        assert measure(options, problems, read) == 0
        parts.append(options.out)
    assert [len(load(p)) for p in parts] == [3, 2]
    capsys.readouterr()
    options = Options()
    options.join = parts
    assert measure(options, {}, read) == 0
    assert "| level | 5 | 4 | 1 | 80.0 % |" in capsys.readouterr().out
    options = Options()
    options.out = parts[0]
    measure(options, problems, read)
    text = capsys.readouterr().out
    assert text.startswith(f"3 of 5 are in {parts[0]}\n")
    assert "| level | 5 | 4 | 1 | 80.0 % |" in text


def test_what_a_signal_left_undone_is_in_the_table(tmp_path, capsys):
    problems = {("level", "1"): ["sleep", "600"], ("level", "2"): ["true"]}
    options = Options()
    options.jobs = 1
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
    assert measure(options, problems, lambda _: Found("task")) == 130
    text = capsys.readouterr().out
    assert "| level | 2 | 0 | 2 | - |" in text
    assert text.endswith("SIGTERM: 2 of 2 were not done\n")


@pytest.mark.parametrize(
    ("status", "out", "err", "expected"),
    [
        (0, [{"holes": [], "seeds": [], "notes": []}], "", Found("task")),
        (1, [{"holes": ["a hole"], "seeds": [], "notes": []}], "", Found("holes", "a hole")),
        (2, "", "note\nkagent: no\n", Found("refused", "kagent: no")),
        (1, "", "Traceback ...\nValueError: x\n", Found("crash", "ValueError: x")),
        (-9, "", "", Found("crash", "status -9")),
    ],
)
def test_what_an_import_printed_is_read(status, out, err, expected):
    text = json.dumps(out) if out else ""
    assert outcome(Ended(status, text, err, 1.0, 1.0), seeds=False) == expected
