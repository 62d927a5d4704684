"""`kagent.Run`, as a program uses it."""

import asyncio
import inspect
import re
import shutil
import signal
import subprocess
import sys
import threading
from operator import attrgetter

import kagent
import pytest
import torch
from asktell_runs import (
    copied,
    divergence,
    judge,
    kernel,
    make_task,
    opener,
    reply,
    toy_machine,  # noqa: F401 - a fixture
)
from docstring_examples import run_examples
from kagent.asktell import judging
from kagent.asktell.open_run import new_run
from kagent.evolve.offline_check import OfflineCheck
from kagent.memory.library import known
from kagent.runs.events import Recorded, Stop
from kagent_sandbox.data.build import Built
from kagent_sandbox.errors import DeviceError, RunError, UserError
from simulated_landscape import toy_source
from simulated_machine import FakeJudge


def reach(method):
    """A public method of the interface by its name."""
    return attrgetter(method if method[0].isupper() else f"Run.{method}")(kagent)


pytestmark = pytest.mark.usefixtures("toy_machine")


@pytest.fixture
def task(tmp_path):
    make_task(tmp_path / "toy")
    return tmp_path / "toy"


@pytest.fixture
def run(task, tmp_path):
    with kagent.Run(task, runs=tmp_path / "runs") as run:
        yield run


def test_the_names_are_those_that_are_documented():
    assert kagent.__all__ == ["Best", "KagentError", "OpenAsk", "Result", "Run", "Task"]
    assert dir(kagent) == kagent.__all__
    for name in kagent.__all__:
        assert getattr(kagent, name).__name__ == name
        assert getattr(kagent, name).__doc__
    assert issubclass(UserError, kagent.KagentError)
    with pytest.raises(AttributeError, match="has no attribute 'run'"):
        kagent.run  # noqa: B018


def test_importing_is_cheap():
    code = (
        "import sys, kagent\n"
        "assert not {'torch', 'pydantic', 'kagent.api'} & set(sys.modules)\n"
        "kagent.Run\n"
        "assert not {'torch', 'triton', 'openai'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_five_lines(run):
    model = iter([reply(16, 3), reply(8, 3), "I cannot.", reply(1, note="0  # WRONG")]).__next__
    results = [run.tell(ask, model()) for ask in run.ask(4)]
    assert [r.passed for r in results] == [True, True, False, False]
    assert str(results[0]).endswith("× the best of torch, the best so far")
    assert str(results[2]).startswith("#4: parse NO_KERNEL: ")
    assert str(results[3]) == "#5: check INCORRECT_NUMERICAL: element [0]"
    assert run.best.id == results[0].id == 2
    assert run.best.source == kernel(16, 3)
    assert run.best.path.read_text() == run.best.source
    assert f"{results[0].speed_up:.3f}×" in str(run.best)
    assert run.open_asks() == []
    assert divergence(run.folder) is None


def test_examples_run_as_they_are_written(task, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(kernel(8, 1))
    monkeypatch.setattr("kagent.api.new_run", lambda _, *rest: new_run(str(task), *rest))
    monkeypatch.setattr("kagent.api.precheck", lambda *_: ())  # the toy is no real kernel
    model = iter([reply(16, 3), reply(8, 3)])
    run_examples(kagent.Run, my_model=lambda _prompt: next(model))
    run_examples(kagent.Run.open)
    run_examples(kagent.Run.judge)
    run = kagent.Run.open("latest")
    shutil.copytree(run.folder, "copy")
    run.ask()
    (tmp_path / "reply.md").write_text(reply(16, 3))
    run_examples(kagent.Run.tell)
    run_examples(kagent.Run.merge)
    *printed, verdict, merged = capsys.readouterr().out.splitlines()
    one, two, best, told, newest, judged = printed
    assert [one[:4], two[:4]] == ["#2: ", "#3: "]
    assert best.startswith("#2 ")
    assert told.endswith("waits for a judge")
    assert newest == best
    assert judged == "1 judged, 0 left"
    assert "DUPLICATE" in verdict
    assert merged == "0 verdicts came home"


def test_an_ask_has_its_prompt_in_one_piece_and_in_two(run):
    (ask,) = run.ask()
    assert ask.prompt.startswith(ask.system.rstrip())
    assert ask.prompt.endswith(ask.user)
    assert ask.path.read_text().endswith(ask.prompt)
    assert ask.id == 0
    assert run.open_asks() == [ask]


def test_a_program_may_end_and_another_go_on(run):
    asks = run.ask(3)
    run.tell(asks[1], reply(4))
    again = kagent.Run.open(run.folder)
    assert again.open_asks() == [asks[0], asks[2]]
    assert again.tell(2, reply(16, 3)).promoted
    assert again.best.id == run.best.id == 3
    assert [c.id for c in run.history.lineage] == [0, 1, 2, 3]
    assert kagent.Run.open(run.folder.name, runs=run.folder.parent).folder == run.folder
    with pytest.raises(RunError, match="no run 'nope'"):
        kagent.Run.open("nope", runs=run.folder.parent)


def test_queued_answers_wait_and_are_judged_elsewhere(task, tmp_path, monkeypatch):
    looked = []

    class OfflineChecker:
        def __init__(self, *_, **options):
            looked.append(options)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def look(self, source):
            return OfflineCheck(Built("", "", "cpu", ({},), {}, {}, 0.5))

    monkeypatch.setattr("kagent.asktell.precheck.OfflineChecker", OfflineChecker)
    home = kagent.Run(task, runs=tmp_path / "runs")
    (ask,) = home.ask()
    result = home.tell(ask, reply(16, 3), queue=True)
    assert result.verdict is None
    assert str(result) == "#2: builds for cpu, waits for a judge"
    assert home.best is None
    box = kagent.Run.open(copied(home.folder))
    judged = box.judge(deadline_s=60, race=True)
    assert (judged.stop, judged.left) == (Stop.ANSWERED, 0)
    assert home.merge(box.folder).verdicts == (0, 1, 2)
    assert home.best.id == 2
    assert home.manifest.device == "Toy 1"
    again = home.tell(ask, reply(16, 3), queue=True)
    assert again.again
    assert again.passed
    assert str(again).endswith("(told before)")
    assert len(looked) == 1


def test_later_runs_remember_what_was_told_unless_memory_is_off(task, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    with kagent.Run(task, memory=False, runs=tmp_path / "runs") as off:
        assert off.tell(None, kernel(16, 3)).promoted
    monkeypatch.setenv("KAGENT_MEMORY", "1")
    off.tell(None, kernel(8), queue=True)
    judge(off.folder)  # as kagent judge does it
    assert known() == []
    with kagent.Run(task, memory=True, runs=tmp_path / "more") as run:
        assert run.tell(None, kernel(16, 3)).promoted
    assert [(r.folder, r.kernels[0].id) for r in known()] == [(run.folder.name, 2)]


def test_who_answered_is_recorded(run):
    told = [run.tell(None, kernel(16, 3), by=" Ada "), run.tell(None, kernel(8))]
    origins = [run.history.lineage[each.id].proposal.origin for each in told]
    assert [origin.model for origin in origins] == ["Ada", "ask/tell"]


def test_a_kernel_that_nobody_asked_for(run):
    first = run.tell(None, kernel(16, 3))
    second = run.tell(None, kernel(8), parent=1)
    parents = [c.proposal.parents for c in run.history.lineage]
    assert parents == [(), (), (0,), (1,)]
    assert (first.ask, second.ask) == (None, None)
    with pytest.raises(UserError, match="it names no ask"):
        run.tell(None, "prose")
    with pytest.raises(UserError, match="no ask 5"):
        run.tell(5, kernel())
    other = kagent.Run(run.manifest.task_folder, runs=run.folder.parent)
    with pytest.raises(UserError, match="a prompt of another run, not of"):
        run.tell(other.ask()[0], kernel())


def test_the_machine_is_opened_once_and_closed(task, tmp_path, monkeypatch):
    opened, closed = [], []
    open_toy = opener()

    class Counting:
        def __init__(self, *arguments):
            self.inner = open_toy(*arguments)

        def __enter__(self):
            opened.append(1)
            return self.inner.__enter__()

        def __exit__(self, *error):
            closed.append(1)
            return self.inner.__exit__(*error)

    monkeypatch.setattr(judging, "open_machine", Counting)
    with kagent.Run(task, runs=tmp_path / "runs") as run:
        assert not opened, "asking needs no machine"
        for ask in run.ask(3):
            run.tell(ask, reply(2**ask.id))
        assert (len(opened), len(closed)) == (1, 0)
    assert len(closed) == 1
    run.tell(None, kernel(32, 3))
    assert len(opened) == 2
    run.close()
    run.close()
    assert len(closed) == 2


def test_after_a_failure_the_next_answer_gets_a_new_machine(run, toy_machine):  # noqa: F811
    class Failing(FakeJudge):
        def measure(self, *_, **__):
            raise DeviceError("the device fell off the bus")

    toy_machine(judge=Failing())
    (ask,) = run.ask()
    with pytest.raises(kagent.KagentError, match="fell off the bus"):
        run.tell(ask, reply(16, 3))
    toy_machine()
    assert run.judge().recorded == (0, 1, 2)
    assert run.best.id == 2


def test_it_can_be_used_where_an_event_loop_runs(run):
    async def agent():
        (ask,) = run.ask()
        return run.tell(ask, reply(16, 3))

    assert asyncio.run(agent()).passed


def test_an_interrupt_where_an_event_loop_runs_ends_the_judging(
    run,
    toy_machine,  # noqa: F811
    monkeypatch,
):
    """As a notebook's: the loop itself does not hear of it."""

    class Judge(FakeJudge):
        def measure(self, *args, **more):
            if len(self.measured) == 2:
                signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
                ended.wait(60)  # the verdict that is due comes to nobody any more
            return super().measure(*args, **more)

    ended, come = threading.Event(), judging._Interrupt.come
    monkeypatch.setattr(judging._Interrupt, "come", lambda self: (come(self), ended.set()))
    toy_machine(judge=Judge())
    for ask in run.ask(6):
        run.tell(ask, reply(2**ask.id), queue=True)

    async def cell():
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            run.judge()
        finally:
            signal.signal(signal.SIGINT, before)

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(cell())
    assert len(run.history.lineage) == 2
    toy_machine()
    assert run.judge().left == 0


def test_an_observer_is_told(task, tmp_path):
    events = []
    with kagent.Run(task, runs=tmp_path / "runs", observe=events.append) as run:
        run.tell(None, kernel(16, 3))
    assert [e.candidate.id for e in events if isinstance(e, Recorded)] == [0, 1, 2]


def half(x):
    return x / 2


@pytest.mark.parametrize(
    ("method", "name"),
    [
        (method, name)
        for method in ("Task.of", "Run", "Run.open", "ask", "tell", "judge", "merge")
        for name in inspect.signature(reach(method)).parameters
        if name != "self"
    ],
)
def test_every_argument_of_an_alien_type_is_refused_by_name(run, tmp_path, method, name):
    usual = {
        "Task.of": {"function": half, "example_inputs": torch.ones(4, 4), "to": tmp_path / "half"},
        "Run": {"task": "softmax", "runs": tmp_path / "more"},
        "Run.open": {"run": run.folder},
        "tell": {"ask": None, "text": kernel(16, 3)},
        "merge": {"copy": tmp_path},
    }
    call = reach(method) if method[0].isupper() else getattr(run, method)
    with pytest.raises(UserError, match=rf"\b{name}\b"):
        call(**{**usual.get(method, {}), name: object()})
    assert len(run.history.lineage) == 0
    assert not [*tmp_path.glob("more/*"), *tmp_path.glob("half/*")]


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda run: run.ask(0), "count=0: expected a whole number above 0"),
        (lambda run: run.ask(True), "count=True: expected a whole number above 0"),
        (lambda run: run.tell("abc", "x"), "ask='abc': expected an OpenAsk, its number, or None"),
        (lambda run: run.tell(-1, "x"), "ask=-1: expected an OpenAsk"),
        (lambda run: run.tell(0, None), "text=None: expected the text of a reply or of a kernel"),
        (lambda run: run.tell(None, kernel(), parent=-2), "parent=-2: expected a candidate's id"),
        (lambda run: run.tell(None, kernel(), parent=9), "no candidate 9: the run has 0 to 1"),
        (lambda run: run.tell(None, kernel(), queue="no"), "queue='no': expected True or False"),
        (lambda run: run.judge(deadline_s=0), "deadline_s=0: expected a number of seconds above 0"),
        (lambda run: run.judge(deadline_s=float("nan")), "deadline_s=nan: expected a number"),
        (lambda run: kagent.Run.open(""), "run='': expected a run's name or path"),
        (lambda run: kagent.Run(""), "task='': expected a task's name or folder"),
        (lambda run: kagent.Task.of(half, torch.ones(4), vary={0: "B"}), "vary={0: 'B'}: expected"),
    ],
)
def test_values_that_mean_nothing_are_refused(run, call, said):
    with pytest.raises(UserError, match=f"^{re.escape(said)}"):
        call(run)
    assert run.open_asks() == []


def test_settings_come_from_arguments_and_mistakes_are_named(task, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KAGENT_RUNS", "elsewhere")
    run = kagent.Run(task, seed=7)
    assert run.folder.parent.name == "elsewhere"
    assert run.manifest.seed == 7
    assert "kagent.Run" in repr(run)
    with pytest.raises(UserError, match="did you mean softmax"):
        kagent.Run("softmx")
    with pytest.raises(UserError, match="unknown target"):
        kagent.Run(task, target="sm_1")
    with pytest.raises(UserError, match="lang"):
        kagent.Run(task, lang="rust")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "system.md.j2").write_text("Mine {{ nothing }}")
    with pytest.raises(UserError, match=r"system\.md\.j2:1: .*nothing"):
        kagent.Run.open(run.folder, prompts=tmp_path / "mine").ask()
    assert run.open_asks() == []
    assert toy_source() in run.ask()[0].prompt
