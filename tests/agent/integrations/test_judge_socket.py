"""Other systems' programs, judged over a real socket; the judge behind it is a stand-in, or the
simulated machine's.
"""

import json
import socket
import subprocess
import sys
import threading
from pathlib import Path

import kagent
import pytest
from asktell_runs import kernel, make_task, toy_machine  # noqa: F401 - a fixture
from kagent.asktell.results import Result
from kagent.integrations import judge_server
from kagent.integrations.judge_client import JudgeError, judge
from kagent_sandbox.data.verdict import CaseTiming, Passed, Rejected, Stage, Status
from kagent_sandbox.errors import MachineError, UserError
from simulated_machine import FakeBuilder

GOOD = "def softmax(x): ..."


class StandIn:
    """A run that knows one right program."""

    def tell(self, ask, text, *, kernel):
        assert (ask, kernel) == (None, True)
        if "broken machine" in text:
            raise MachineError("the device is gone")
        if text == GOOD:
            timing = CaseTiming("wide", 10.0, 9.0, 11.0, 100, 0.5, 1.0, 1.0)
            verdict = Passed((timing,), (), 1.5, 0.1)
        else:
            verdict = Rejected(Stage.CHECK, Status.INCORRECT_NUMERICAL, "it is off", "odd")
        speed = 1.5 if text == GOOD else None
        return Result(7, None, False, "", verdict, speed, None, text == GOOD)


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "judge.sock"
    stopped = threading.Event()

    def serve():
        with judge_server.listening(path) as listener, pytest.raises(KeyboardInterrupt):
            judge_server.serve(Stopping(), listener, lambda _: None)
        stopped.set()

    class Stopping(StandIn):
        def tell(self, ask, text, **how):
            if text == "stop":
                raise KeyboardInterrupt
            return super().tell(ask, text, **how)

    thread = threading.Thread(target=serve)
    thread.start()
    while not path.is_socket():
        assert thread.is_alive()
    yield path
    with pytest.raises(JudgeError, match="ended without a verdict"):
        judge("stop", str(path))
    thread.join(10)
    assert stopped.is_set()
    assert not path.exists()


def test_verdicts_come_back_as_they_are(path):
    found = judge(GOOD, str(path))
    assert (found.id, found.correct, found.speed_up, found.promoted) == (7, True, 1.5, True)
    assert (found.cases_us, found.roofline_shares) == ({"wide": 10.0}, {"wide": 0.5})
    wrong = judge("def softmax(x): return x", str(path))
    assert (wrong.correct, wrong.speed_up) == (False, 0.0)
    assert wrong.feedback == "INCORRECT_NUMERICAL (check) in odd: it is off"


def test_what_is_no_verdict_is_an_error_and_the_next_program_is_judged(path, monkeypatch):
    with pytest.raises(JudgeError, match="the device is gone"):
        judge("def broken machine", str(path))
    for text in (b"\n", b"{}\n", b'{"source": 3}\n', b"[" * 100_000 + b"\n"):
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(path))
            connection.sendall(text)
            assert b"expected one line of JSON" in connection.makefile("rb").readline()
    with socket.socket(socket.AF_UNIX) as connection:  # one that goes away
        connection.connect(str(path))
    assert judge(GOOD, str(path)).correct
    with (
        pytest.raises(UserError, match="another judge listens there"),
        judge_server.listening(path),
    ):
        pass
    monkeypatch.delenv("KAGENT_JUDGE", raising=False)
    with pytest.raises(JudgeError, match="start `kagent serve TASK`"):
        judge(GOOD)
    with pytest.raises(JudgeError, match="is `kagent serve` running"):
        judge(GOOD, str(path) + "x")


@pytest.mark.parametrize(
    "text",
    ["", "def toy(x:\n", "toy = lambda x: x\n", "prose", "kagent ask 7 of run 12ab\n", kernel(8)],
)
def test_whatever_a_program_looks_like_it_is_judged(tmp_path, toy_machine, text):  # noqa: F811
    class Builder(FakeBuilder):
        def build(self, request):
            if "def toy(x)" in request.source:
                return super().build(request)
            return Rejected(Stage.BUILD, Status.COMPILE_ERROR, "line 1: no function toy")

    toy_machine(builder=Builder())
    make_task(tmp_path / "toy")
    with kagent.Run(tmp_path / "toy", runs=tmp_path / "runs", memory=False) as run:
        found = judge_server._answer(run, json.dumps({"source": text}).encode(), print)
        last = run.history.lineage[-1]
    assert (found["id"], last.proposal.source, last.proposal.ask) == (2, text, None)
    if text == kernel(8):
        assert found["correct"]
    else:
        assert (found["correct"], found["speed_up"]) == (False, 0.0)
        assert found["feedback"] == "COMPILE_ERROR (build): line 1: no function toy"


def test_only_its_user_may_use_the_socket(path):
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_stale_socket_is_replaced_and_a_place_that_is_none_is_named(tmp_path):
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(tmp_path / "stale"))
    with judge_server.listening(tmp_path / "stale"):
        pass
    for bad in (tmp_path / "no" / "folder", tmp_path / ("x" * 200)):
        with (
            pytest.raises(UserError, match="no place for a socket"),
            judge_server.listening(bad),
        ):
            pass
    (tmp_path / "file").write_text("mine")
    for bad, kind in ((tmp_path / "file", "a file"), (Path(), "a folder")):
        with (
            pytest.raises(UserError, match=f"{kind}, where a socket would be made"),
            judge_server.listening(bad),
        ):
            pass
    assert (tmp_path / "file").read_text() == "mine"


def test_shinka_gets_its_two_files(path, tmp_path, monkeypatch):
    monkeypatch.setenv("KAGENT_JUDGE", str(path))
    program = tmp_path / "program.py"
    command = [sys.executable, "-m", "kagent.integrations.shinka", "--program_path", str(program)]
    command += ["--results_dir", str(tmp_path / "results")]
    program.write_text("def softmax(x): return x")
    subprocess.run(command, check=True, timeout=60)
    metrics, correct = (
        json.loads((tmp_path / "results" / f"{name}.json").read_text())
        for name in ("metrics", "correct")
    )
    assert (metrics["combined_score"], metrics["text_feedback"]) == (0.0, correct["error"])
    assert correct == {"correct": False, "error": "INCORRECT_NUMERICAL (check) in odd: it is off"}
    program.write_text("def broken machine")
    failed = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (failed.returncode, failed.stderr) == (1, "kagent: the device is gone\n")


def test_openevolve_gets_its_result(path, tmp_path, monkeypatch):
    pytest.importorskip("openevolve", reason="OpenEvolve is not installed")
    from kagent.integrations.openevolve import evaluate

    monkeypatch.setenv("KAGENT_JUDGE", str(path))
    program = tmp_path / "program.py"
    program.write_text(GOOD)
    found = evaluate(str(program))
    assert found.metrics == {"combined_score": 1.5, "correct": 1.0}
    assert found.artifacts == {"cases": "wide: 10.0 µs, 50% of the roofline"}
