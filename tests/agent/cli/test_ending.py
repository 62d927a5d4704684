"""A command that waits for the check of a task ends when it is told to, and leaves nothing."""

import signal
import subprocess
import sys
import time

import pytest
from commands import run
from doubling_task import REFERENCE, TASK
from kagent.evolve import session
from kagent.runs.events import Started
from kagent_sandbox.errors import MachineError, TaskError
from kagent_sandbox.process import process_tree

LIMIT_S = 30.0
IGNORED = "trap '' INT; exec "  # as a shell that is no terminal's has its `&`


@pytest.fixture
def slow_task(tmp_path):
    """A task whose check takes for ever."""
    (tmp_path / "task.toml").write_text(TASK)
    head, line, rest = REFERENCE.partition("def inputs(case, generator, device):\n")
    assert line
    (tmp_path / "reference.py").write_text(f"import time\n{head}{line}    time.sleep(600)\n{rest}")
    return tmp_path


def until(found):
    deadline = time.monotonic() + LIMIT_S
    while not (seen := found()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return seen


def checkers(pid):
    """The processes below that check a task."""

    def is_one(each):
        with open(f"/proc/{each}/cmdline", "rb") as file:
            return b"task_checker" in file.read()

    return [p for p in process_tree.descendants(pid) if is_one(p)]


@pytest.mark.sampled(one_in=2)
@pytest.mark.usefixtures("orphans_come_here", "own_cache")
@pytest.mark.parametrize(
    ("number", "before", "code"),
    [
        (signal.SIGINT, "exec ", 130),
        (signal.SIGTERM, "exec ", 130),
        (signal.SIGTERM, IGNORED, 130),
        (signal.SIGKILL, "exec ", -signal.SIGKILL),
    ],
)
def test_it_ends_and_leaves_no_process(slow_task, number, before, code):
    words = f"{sys.executable} -m kagent check {slow_task}"
    with subprocess.Popen(["sh", "-c", before + words], stderr=subprocess.PIPE) as process:
        try:
            seen = until(lambda: checkers(process.pid))
            process.send_signal(number)
            _, said = process.communicate(timeout=LIMIT_S)
        finally:
            process.kill()
    assert process.returncode == code, said
    assert b"Traceback" not in said
    assert (b"kagent: interrupted\n" in said) == (code == 130)
    until(lambda: all(map(process_tree.ended, seen)))


def test_evolve_has_words_of_its_own_for_ctrl_c(monkeypatch, capsys, tmp_path):
    def ends(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(session, "evolve", ends)
    ended = run(monkeypatch, capsys, "evolve", "softmax", "--lang", "cpp", "--runs", tmp_path)
    assert ended.code == 130
    assert ended.err == "kagent: interrupted before the run began; nothing was stored\n"


@pytest.mark.parametrize(("error", "resumes"), [(MachineError, True), (TaskError, False)])
def test_what_the_task_itself_has_ended_is_not_resumed(
    monkeypatch, capsys, tmp_path, error, resumes
):
    """A mended task is another one: a run of it begins anew."""

    def ends(task, config, observe, folder):
        observe(Started("run", task, 1))
        raise error("eager: case hidden_bench_0: ValueError")

    monkeypatch.setattr(session, "evolve", ends)
    ended = run(monkeypatch, capsys, "evolve", "softmax", "--lang", "cpp", "--runs", tmp_path)
    assert ended.code != 0
    assert "eager: case hidden_bench_0: ValueError" in ended.err
    assert ("Resume with: " in ended.err) == resumes
