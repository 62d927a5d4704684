"""A question to a process of its own, and its limits."""

import sys
import tempfile
from pathlib import Path

import pytest
from kagent_sandbox.process import ask_once as module
from kagent_sandbox.process.ask_once import TookTooLong, Unwanted, ask_once

BURN = "while True: pass"


@pytest.fixture(autouse=True)
def often(monkeypatch):
    monkeypatch.setattr(module, "_LOOK_S", 0.05)


def ask(code, request=None, limit_s=60.0, **more):
    return ask_once(("-c", code), request or {}, limit_s=limit_s, **more)


def test_the_answer_is_what_it_prints():
    code = "import json, os, sys, time; r = json.load(sys.stdin); time.sleep(0.2)\n"
    code += "print(r['one'], r['parent'] == os.getppid(), os.environ['MORE'])\n"
    code += "sys.stderr.write('12345\\nlast words'); sys.exit(3)"
    found = ask(code, {"one": 1}, environment={"MORE": "more"}, tail_bytes=12)
    assert (found.out, found.status, found.tail) == (b"1 True more\n", 3, "5 last words")


@pytest.mark.parametrize("code", [BURN, "import subprocess\nsubprocess.run({})"])
def test_cpu_time_is_limited_also_that_of_what_it_starts(code):
    child = repr([sys.executable, "-c", BURN])
    with pytest.raises(TookTooLong, match=r"took longer than 0\.5 s of CPU time: hurry up$"):
        ask(code.format(child), limit_s=0.5, hint="hurry up")


def test_cpu_time_is_limited_also_where_nobody_asks_about_what_has_ended():
    """Each child's time is gone from the system's counts when it ends."""
    short = "import time\nwhile time.process_time() < 0.3: pass"
    child = repr([sys.executable, "-c", short])
    code = "import signal, subprocess\nsignal.signal(signal.SIGCHLD, signal.SIG_IGN)\n"
    code += f"for _ in range(20): subprocess.Popen({child}).wait()\n"
    with pytest.raises(TookTooLong, match=r"took longer than 1 s of CPU time$"):
        ask(code, limit_s=1.0)


def test_time_that_passes_is_not_limited():
    """A busy machine refuses nothing."""
    assert ask("import time; time.sleep(1.5); print('awake')", limit_s=1.0).out == b"awake\n"


def test_whoever_waits_for_long_is_ended(monkeypatch):
    monkeypatch.setattr(module, "_WAITS_S", 0.5)
    with pytest.raises(TookTooLong, match=r"waited for 0\.5 s instead of computing$"):
        ask("import time; time.sleep(600)", hint="hurry up")


def test_an_answer_that_nobody_wants_is_given_up():
    with pytest.raises(Unwanted):
        ask("import time; time.sleep(600)", unwanted=lambda: True)


def test_a_process_that_reads_no_question_is_no_error():
    assert ask("import os; os._exit(4)", {"long": "x" * 1_000_000}).status == 4


@pytest.mark.parametrize("ends", [True, False])
def test_its_temporary_files_are_removed_however_it_ends(tmp_path, monkeypatch, ends):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    code = "import os, sys, tempfile, time; d = tempfile.mkdtemp(); open(d + '/f', 'w')\n"
    code += "os.chmod(d, 0); print(os.path.dirname(d), flush=True)\n"
    if ends:
        where = Path(ask(code).out.decode().strip())
        assert where.parent == tmp_path
    else:
        with pytest.raises(TookTooLong):
            ask(f"{code}while True: pass", limit_s=0.3)
    assert list(tmp_path.iterdir()) == []
