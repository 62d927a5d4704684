"""`kagent suite` as a user meets it. Searches are stand-ins; tasks, records and runs are real."""

import contextlib
import itertools
import json
import os
import re
import shutil
import signal
import threading
import time
from dataclasses import replace

import pytest
from commands import run as run_command
from evolve_process import command
from kagent.authoring.seeds import SeedOutcome
from kagent.config.settings import load_config
from kagent.evolve import session
from kagent.evolve.session import Outcome
from kagent.llm.chat import ModelError
from kagent.runs.events import Stop
from kagent.runs.lineage import Lineage
from kagent.suite import compare, import_worker, importing, running, worker, workers
from kagent.suite.importing import ImportedProblem, ImportsAhead, import_problem
from kagent.suite.problems import Form, Problem
from kagent.suite.record import FailedStep, ProblemState, Suite, read_record
from kagent.suite.running import SuiteRunner
from kagent.suite.workers import Workers
from kagent_sandbox.data.records import to_json
from kagent_sandbox.errors import (
    ChildDied,
    DeviceError,
    MachineError,
    RunError,
    TaskError,
    UserError,
)
from kagent_sandbox.process import ask_once, process_tree
from synthetic_suite import Search, problems_in, suite_of


@pytest.fixture
def kagent(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    return lambda *words: run_command(monkeypatch, capsys, "suite", *words)


@pytest.fixture
def searching(monkeypatch, tmp_path):
    """Makes the stand-in for the search."""

    def begin(**does):
        search = Search(tmp_path / "scratch", **does)
        monkeypatch.setattr(session, "evolve", search)
        monkeypatch.setattr(workers.Workers, "ask", in_this_process)
        return search

    return begin


def in_this_process(_, request, tell):
    answer = worker.answer_to(worker.search, request, tell)
    if answer.get("model"):
        raise ModelError(answer["error"], permanent=True)
    return json.loads(json.dumps(answer))


@pytest.mark.parametrize(
    ("error", "step"),
    [
        (ChildDied("the judge's process ended by signal 9"), "machine"),
        (DeviceError("the GPU has fallen off the bus"), "machine"),
        (TaskError("no dims"), "task"),
        (UserError("no such thing"), "search"),
        (KeyError("oops"), "search"),
    ],
)
def test_what_may_be_the_machines_fault_is_told_apart(error, step):
    def work(_request, _tell):
        raise error

    assert worker.answer_to(work, {}, print)["step"] == step


def test_a_suite_runs_whatever_one_problem_does(kagent, searching, tmp_path):
    problems_in(tmp_path / "p", "a", "b", "c", "d")
    problems_in(tmp_path / "p", "e", seeds=False)
    search = searching(a=2.0, b=TaskError("b: no such luck"), c=None, d=KeyError("oops"))
    done = kagent("run", "p", "--lang", "cpp", "--budget", 2)
    assert done.code == 0, done.err
    assert [name for name, _ in search.calls] == ["a", "b", "c", "d"]
    for words in (
        "a: FASTER beside the best of torch, 2.000× (95 %: 1.980–2.020); 4.000× eager",
        "b: failed: task: b: no such luck",
        "c: failed: seed: no seed",
        "d: failed: search: KeyError",
        "e: failed: seed:",
        "5 of 5 problems finished: 1 correct, 4 failed (1 task, 2 seed, 1 search)",
    ):
        assert words in done.out, done.out
    folder = tmp_path / "suites/p"
    assert (folder / "report.html").read_text().startswith("<!doctype html>")
    shown = kagent("report", "suites/p", "--json")
    assert json.loads(shown.out)["all"]["beside"]["torch"]["fast_p"] == {"1": 0.2, "2": 0.0}
    assert read_record(folder, Suite).settings.budget == 2

    again = kagent("run", "p", "--lang", "cpp")
    assert again.code == 2
    assert "a suite is there: --resume goes on with it, --to begins another" in again.err
    other = kagent("run", "p", "--resume", "--budget", 3)
    assert other.code == 2
    assert "began with budget 2, and 3 was given" in other.err
    assert "a suite of" in kagent("run", "a", "--resume", "--to", "suites/p").err
    kept = kagent("run", "p", "--resume")
    assert kept.code == 0
    assert len(search.calls) == 4


@pytest.mark.parametrize(
    ("stop", "words"),
    [
        (Stop.TIME, "--max-time ended the search before a kernel was right"),
        (Stop.COST, "there was no final race; the search ended: "),
    ],
)
def test_a_search_without_a_race_says_why(kagent, searching, monkeypatch, tmp_path, stop, words):
    problems_in(tmp_path / "p", "a")
    search = searching(a=None)
    history = search("a", load_config(runs=tmp_path / "runs"), print).history
    nothing = replace(history, race=None, lineage=Lineage())
    monkeypatch.setattr(session, "evolve", lambda *_: Outcome(tmp_path, stop, nothing))
    monkeypatch.setattr(running, "read_history", lambda _: (None, nothing))
    assert f"a: failed: search: {words}" in kagent("run", "p", "--lang", "cpp").out


def test_a_suite_goes_on_where_it_was_ended(kagent, searching, tmp_path):
    problems_in(tmp_path / "p", "a", "b", "c")
    search = searching(a=2.0, b=KeyboardInterrupt(), c=2.0)
    ended = kagent("run", "p", "--lang", "cpp")
    assert ended.code == 130
    assert "Resume with: kagent suite run p --resume" in ended.err
    assert "not finished: 2; --resume goes on" in ended.out
    search.does["b"] = RunError("measured on another device")
    search.calls.clear()
    goes_on = kagent("run", "p", "--resume")
    assert goes_on.code == 0
    # b's run could not go on, and a new one could not be made.
    assert search.calls == [("b", "b-1"), ("b", None), ("c", None)]
    assert "b: failed: search: measured on another device" in goes_on.out
    assert read_record(tmp_path / "suites/p", Suite).left == ()


def test_a_machine_that_fails_twice_in_a_row_ends_a_suite_that_can_go_on(
    kagent, searching, tmp_path
):
    problems_in(tmp_path / "p", "a", "b", "c", "d")
    search = searching(a=DeviceError("lost"), b=2.0, c=DeviceError("lost"), d=MachineError("lost"))
    ended = kagent("run", "p", "--lang", "cpp")
    assert ended.code == MachineError.exit_code
    assert "2 problems in a row failed on this machine, the last one with: lost" in ended.err
    search.does |= dict.fromkeys("acd", 2.0)
    search.calls.clear()
    assert kagent("run", "p", "--resume").code == 0
    assert [name for name, _ in search.calls] == ["a", "c", "d"]


def interrupt(*_):
    raise KeyboardInterrupt


def test_two_suites_are_compared(kagent, searching, tmp_path, monkeypatch):
    numbers = itertools.count()
    problems_in(tmp_path / "p", "a", "b")
    searching(a=2.0, b=None)
    assert kagent("run", "p", "--lang", "cpp", "--to", "x").code == 0
    searching(a=3.0, b=2.0)
    assert kagent("run", "p", "--lang", "cpp", "--to", "y").code == 0
    done = kagent("compare", "x", "y")
    assert done.code == 0, done.err
    assert "x → y: 2 of 2 problems compare" in done.out
    assert "over the 1 that both solved: 2.000× → 3.000×" in done.out
    raced = kagent("compare", "x", "y", "--race", "--json")
    (a, b) = json.loads(raced.out)["problems"]
    assert (a["no_race"], b["no_race"]) == ("the same kernel", "")
    monkeypatch.setattr(compare, "kernel_id", lambda _: next(numbers))  # of different kernels
    raced = kagent("compare", "x", "y", "--race")
    assert raced.code == 0
    assert re.search("a: not raced: .*task", raced.out)  # the stand-in's task is another one
    monkeypatch.setattr(compare, "_raced", interrupt)
    ended = kagent("compare", "x", "y", "--race")
    assert (ended.code, "a: not raced: Ctrl-C" in ended.out) == (130, True)
    problems_in(tmp_path / "q", "c")
    searching(c=2.0)
    assert kagent("run", "q", "--lang", "cpp", "--to", "z").code == 0
    none = kagent("compare", "x", "z")
    assert none.code == RunError.exit_code
    assert "no problem compares" in none.err


def test_mistakes_are_a_line(kagent, tmp_path):
    for words, said in (
        (("run", "softmx"), "did you mean softmax"),
        (("run", "softmax", "rms_norm"), "name the suite with --to"),
        (("run", "softmax", "--import-time", "soon"), "--import-time: expected a time"),
        (("run", "softmax", "--resume"), "no suite there"),
        (("run", "softmax", "--lang", "cpp", "--at-once", 2), "would disturb the clock"),
        (("run", "softmax", "--device", "cpu", "--device", "cpu"), "cpu is named twice"),
        (("run", "softmax", "--device", "gpu"), "no device 'gpu': expected cpu, cuda"),
        (("run",), "no problems are given"),
        (("import", "softmax", "--kind", "tpu"), "--kind tpu: expected gpu or cpu"),
        (("import", "softmax", "--kind", "cpu", "--at-once", 2), "would disturb the clock"),
        (("report", "none"), "no suite there"),
        (("report", "none", "--json", "-o", "x"), "no suite there"),
    ):
        done = kagent(*words)
        assert done.code != 0
        assert said in done.err, done.err
    assert not (tmp_path / "suites").exists()


# -- several at once -------------------------------------------------------------------------------


@pytest.fixture
def at_once(tmp_path, monkeypatch):
    """Begins a suite of tasks, two at once, whose workers run a program."""

    def made(program, *names, devices=()):
        code = (
            "import json, os, pathlib, sys, time; r = json.load(sys.stdin)\n"
            "name = pathlib.Path(r['task']).name; here = pathlib.Path(r['config']['runs'])\n"
            "here.mkdir(exist_ok=True)\n"
            "def tell(**line): print(json.dumps(line), flush=True)\n"
            f"{program}"
        )
        monkeypatch.setattr(running, "_WORKER", ("-c", code))
        folder = tmp_path / "p"
        if not folder.exists():
            problems_in(folder, *names)
        problems = tuple(Problem(n, Form.TASK, str(folder / n)) for n in names)
        suite = replace(suite_of([]), problems=problems)
        return SuiteRunner(tmp_path / "s", suite, {}, 60.0, print, print, devices, 2)

    return made


def test_one_that_dies_ends_no_other_and_is_tried_again_alone(at_once, tmp_path):
    made = at_once(
        """
with open(here / name, "a") as f: f.write("x")
while len(list(here.iterdir())) < 2: time.sleep(0.01)
tell(phase="searching")
if (here / name).read_text() == "x" and name in "ab": os.kill(os.getpid(), 9)
tell(error="no such luck", step="search")
""",
        *"abcd",
    )
    made.run()
    progress = [made.suite.of(p) for p in made.suite.problems]
    assert [p.reason for p in progress] == ["no such luck"] * 4
    assert [(tmp_path / "s/runs" / n).read_text() for n in "abcd"] == ["xx", "xx", "x", "x"]
    assert set(progress[0].phases) == {"search"}


def test_what_fails_beside_others_has_failed_once_it_failed_alone_too(at_once, tmp_path):
    made = at_once(
        """
with open(here / name, "a") as f: f.write("x")
tell(error="out of memory", step="machine" if name in "ac" else "search")
""",
        *"abcd",
    )
    finished = []
    made.finished = lambda p: finished.append((p.name, made.suite.of(p).step))
    made.run()
    assert set(finished[:2]) == {("b", FailedStep.SEARCH), ("d", FailedStep.SEARCH)}
    assert finished[2:] == [("a", FailedStep.MACHINE), ("c", FailedStep.MACHINE)]
    assert [(tmp_path / "s/runs" / n).read_text() for n in "abcd"] == ["xx", "x", "xx", "x"]
    assert read_record(tmp_path / "s", Suite).left == ()


def test_what_failed_beside_others_is_tried_alone_when_the_suite_goes_on(at_once, tmp_path):
    made = at_once(
        """
if name == "a": tell(error="out of memory", step="machine"); sys.exit()
time.sleep(100)
""",
        *"abc",
    )

    def interrupt():
        while not (made.suite.of(made.suite.problems[0]).alone and all_began()):
            time.sleep(0.01)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)  # it may wait for a lock

    def all_began():
        return all(made.suite.of(p).state is ProblemState.BEGUN for p in made.suite.problems)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        made.run()
    record = read_record(tmp_path / "s", Suite)
    a = record.of(record.problems[0])
    assert (a.state, a.step, a.reason) == (ProblemState.BEGUN, None, "")

    again = at_once("tell(error='no such luck', step='search')", *"abc")
    again.suite = record.again()
    finished = []
    again.finished = lambda p: finished.append(p.name)
    again.run()
    assert (sorted(finished[:2]), finished[2:]) == (["b", "c"], ["a"])


def test_a_machine_that_fails_at_all_that_is_at_once_ends_the_suite(at_once):
    made = at_once("os.kill(os.getpid(), 9)", *"abcdef")
    with pytest.raises(MachineError, match="3 problems in a row failed on this machine"):
        made.run()
    assert made.suite.left


def test_incumbents_are_profiled_where_a_model_reads_of_them(at_once):
    made = at_once("tell(error=str(r['config'].get('profile', True)), step='search')", *"ab")
    made.run()
    assert [made.suite.of(p).reason for p in made.suite.problems] == ["False"] * 2
    asked = at_once("tell(error=str(r['config'].get('profile', True)), step='search')", *"ab")
    asked.suite = replace(asked.suite, settings=replace(asked.suite.settings, model=("m",)))
    asked.run()
    assert [asked.suite.of(p).reason for p in asked.suite.problems] == ["True"] * 2


def test_any_number_that_lack_memory_beside_others_ends_no_suite(at_once):
    made = at_once("tell(error='eager: OutOfMemoryError: CUDA', step='machine')", *"abcdef")
    made.run()
    assert not made.suite.left


def test_ctrl_c_stops_all_that_is_at_once_and_all_goes_on(at_once, tmp_path):
    made = at_once(
        """
(here / name).mkdir(); (here / name / "run.json").touch(); tell(run=name)
if name == "a": tell(error="no such luck", step="search"); sys.exit()
time.sleep(100)
""",
        *"abcd",
    )

    def interrupt():
        while not all(made.suite.of(p).run for p in made.suite.problems[:3]):
            time.sleep(0.01)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)  # it may wait for a lock

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        made.run()
    record = read_record(tmp_path / "s", Suite)
    assert [record.of(p).state.value for p in record.problems] == [
        "failed",
        "begun",
        "begun",
        "waiting",
    ]
    assert [record.of(p).run for p in record.problems] == ["a", "b", "c", ""]
    assert not any("r['config']" in command(p) for p in process_tree.descendants(os.getpid()))
    again = at_once("tell(error='went on with ' + r['run'][-1:], step='search')", *"abcd")
    again.suite = record.again()
    again.run()
    reasons = [again.suite.of(p).reason for p in record.problems]
    assert reasons == ["no such luck", "went on with b", "went on with c", "went on with"]


def test_a_problem_goes_on_on_the_device_where_its_baselines_were_timed(at_once):
    made = at_once("tell(error=r['device'], step='search')", *"abcd", devices=("x", "y"))
    timed = {"state": ProblemState.BEGUN, "phases": {"baselines": 1.0, "seeds": 1.0}}
    for problem, device in zip(made.suite.problems, "yxzy", strict=True):
        made.suite = made.suite.noted(problem, device=device, **timed)
    made.run()
    found = [made.suite.of(p).reason for p in made.suite.problems]
    assert (found[0], found[1], found[3]) == ("y", "x", "y")
    assert found[2] in ("x", "y")


def test_a_phase_is_known_once_it_has_begun():
    """What is killed in it has no time to say so."""
    clock = running._PhaseClock({"start": 1.0, "seeds": 2.0})
    clock.begin("baselines")
    assert clock.seconds == {"start": 1.0, "baselines": 0.0, "seeds": 2.0}
    clock.begin("seeds")
    assert clock.seconds["seeds"] == 2.0
    clock.end()
    assert clock.seconds["seeds"] >= 2.0


def test_a_problem_without_times_goes_on_on_any_device(at_once):
    """Three that one device had, and did not come to an end with, do not wait for it again."""
    made = at_once("tell(error=r['device'], step='search')", *"abcd", devices=("x", "y"))
    stopped = {"state": ProblemState.BEGUN, "phases": {"start": 1.0, "baselines": 1.0}}
    for problem in made.suite.problems:
        made.suite = made.suite.noted(problem, device="x", **stopped)
    made.run()
    assert {made.suite.of(p).reason for p in made.suite.problems} == {"x", "y"}


def test_problems_at_once_share_the_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(32)))
    monkeypatch.setattr(running, "usable_cores", lambda: 16)  # a control group's
    slots = running.slots_of(("x", "y"), 2)
    assert [s.device for s in slots] == ["x", "y", "x", "y"]
    assert [len(s.cores) for s in slots] == [8] * 4
    assert frozenset().union(*(s.cores for s in slots)) == frozenset(range(32))
    assert running.slots_of((), 1) == [running.Slot()]


# -- imports ---------------------------------------------------------------------------------------


def imported(tmp_path, **more):
    problem = Problem("ends", Form.KERNELBENCH, str(tmp_path / "ends.py"))
    limits = {"limit_s": 60.0, "jobs": 1, "isolation": "auto", **more}
    return import_problem(problem, tmp_path / "tasks/ends", "cpu", **limits)


def importing_by(monkeypatch, code):
    monkeypatch.setattr(importing, "_WORKER", ("-c", code))


def test_a_problem_that_ends_its_process_is_an_error_of_its_own(tmp_path, monkeypatch):
    importing_by(monkeypatch, "import os, sys; sys.stderr.write('out of luck'); os._exit(3)")
    with pytest.raises(UserError, match="imports ended with status 3: out of luck"):
        imported(tmp_path)


def test_an_import_ends_at_its_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(ask_once, "_LOOK_S", 0.05)
    expected = r"took longer than 0\.01 s of CPU time: --import-time gives it more"
    with pytest.raises(UserError, match=expected):
        imported(tmp_path, limit_s=0.01)


def test_an_imported_task_gets_the_problems_name(tmp_path, monkeypatch):
    monkeypatch.setattr(ask_once, "_LOOK_S", 0.05)  # it is looked at several times
    importing_by(
        monkeypatch,
        "import json, sys, pathlib, time; time.sleep(0.2);"
        "r = json.load(sys.stdin); f = pathlib.Path(r['to'], 'norm');"
        "f.mkdir(); (f / 'task.toml').write_text(''); print(json.dumps({'folder': str(f), 'notes':"
        "['n'], 'no_seed': ''}))",
    )
    assert imported(tmp_path).notes == ("n",)
    assert [str(p.relative_to(tmp_path)) for p in tmp_path.rglob("task.toml")] == [
        "tasks/ends/task.toml"
    ]
    importing_by(monkeypatch, 'print(\'{"error": "no", "machine": true}\')')
    with pytest.raises(MachineError, match="no"):
        imported(tmp_path)


def ahead(make, names, at_once):
    problems = [Problem(name, Form.KERNELBENCH, name) for name in names]
    return problems, contextlib.closing(ImportsAhead(make, problems, at_once))


def test_the_next_problems_are_imported_while_one_is_timed():
    begun, both = [], threading.Event()

    def make(problem, unwanted):
        begun.append(problem.name)
        both.wait(60)
        if problem.name == "b":
            raise UserError("b: no task")
        return ImportedProblem((problem.name,), "")

    problems, opened = ahead(make, "abcd", 2)
    with opened as imports:
        threading.Timer(0.1, both.set).start()
        assert imports.take(problems[0]).notes == ("a",)
        assert imports.take(problems[2]).notes == ("c",)  # b is a task already, say
    assert {"a", "b", "c"} <= set(begun)


def test_an_import_that_the_machine_failed_at_is_made_again_when_it_is_asked_for_again():
    tries = []

    def make(problem, unwanted):
        tries.append(problem.name)
        if len(tries) == 1:
            raise MachineError("the disk is full")
        return ImportedProblem((), "")

    problems, opened = ahead(make, "a", 1)
    with opened as imports:
        with pytest.raises(MachineError):
            imports.take(problems[0])
        assert imports.take(problems[0]) == ImportedProblem((), "")
    assert tries == ["a", "a"]


def test_a_problem_whose_import_failed_says_so_when_it_is_its_turn():
    def make(problem, unwanted):
        raise UserError(f"{problem.name}: no task")

    problems, opened = ahead(make, "ab", 1)
    with opened as imports:
        for problem in problems:
            with pytest.raises(UserError, match=f"^{problem.name}: no task"):
                imports.take(problem)


def test_on_a_cpu_nothing_is_imported_beside_what_is_timed():
    begun = []

    def make(problem, unwanted):
        begun.append(problem.name)
        return ImportedProblem((), "")

    problems, opened = ahead(make, "ab", 0)
    with opened as imports:
        imports.take(problems[0])
        assert begun == ["a"]


def test_imports_that_nobody_waits_for_are_ended(tmp_path, monkeypatch):
    pids = tmp_path / "pids"
    code = f"import os, time; open({str(pids)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    importing_by(monkeypatch, code)

    def make(problem, unwanted):
        if problem.name == "a":
            return ImportedProblem((), "")
        return imported(tmp_path, unwanted=unwanted)

    problems, opened = ahead(make, "ab", 1)
    with opened as imports:
        imports.take(problems[0])
        while not (pids.is_file() and pids.read_text()):
            time.sleep(0.05)
    assert not os.path.exists(f"/proc/{pids.read_text()}")


def test_imports_ahead_leave_the_gpu_alone(tmp_path, monkeypatch):
    seen, nices = [], []

    def make(problem, to, kind, *, environment, nice, **_):
        seen.append((problem.name, kind, environment))
        nices.append(nice)
        raise UserError("no task")

    monkeypatch.setattr(running, "import_problem", make)
    monkeypatch.setattr(running, "usable_cores", lambda: 16)
    suite = replace(suite_of([]), kind="gpu", problems=ahead(make, "ab", 0)[0])
    folder = tmp_path / "suite"
    folder.mkdir()
    SuiteRunner(folder, suite, {}, 60.0, lambda _: None, lambda _: None).run()
    hidden = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "2"}
    assert sorted(seen) == [("a", "gpu", hidden), ("b", "gpu", hidden)]
    assert nices == [5, 5]
    runner = SuiteRunner(folder, suite, {}, 60.0, lambda _: None, lambda _: None)
    runner.import_all(2, lambda _: None)  # nothing is timed beside these
    assert seen[-1][2] == {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "8"}
    assert nices[-2:] == [0, 0]


def test_no_import_removes_what_a_link_leads_to(tmp_path, monkeypatch):
    """The folder of a suite may be somebody else's, and that of a task is removed first."""
    mine = tmp_path / "mine"
    (mine / "a").mkdir(parents=True)
    monkeypatch.setattr(running, "import_problem", lambda _, to, *__, **___: shutil.rmtree(to))
    suite = suite_of([])
    suite = replace(suite, problems=ahead(None, "a", 0)[0])
    folder = tmp_path / "suite"
    folder.mkdir()
    (folder / "tasks").symlink_to(mine)
    runner = SuiteRunner(folder, suite, {}, 60.0, lambda _: None, lambda _: None)
    runner.run()
    assert (mine / "a").is_dir()
    assert "a link there leads out of the suite's folder" in runner.suite.progress["a"].reason


@pytest.fixture
def three_files(tmp_path, monkeypatch):
    """Problems whose imports are made by a program: one with a seed, one without, none."""
    importing_by(
        monkeypatch,
        "import json, sys, pathlib; r = json.load(sys.stdin); name = r['problem']['name']\n"
        "if name == 'c': print(json.dumps({'error': 'no Model', 'machine': False})); sys.exit()\n"
        "f = pathlib.Path(r['to'], name); f.mkdir(); (f / 'task.toml').write_text('')\n"
        "none = 'no way' if name == 'b' else ''\n"
        "print(json.dumps({'folder': str(f), 'notes': [r['kind']], 'no_seed': none}))",
    )
    folder = tmp_path / "p"
    folder.mkdir()
    for name in ("a", "b", "c"):
        (folder / f"{name}.py").write_text("class Model: ...\ndef get_inputs(): ...\n")
    return folder


@pytest.mark.parametrize("at_once", [1, 2])
def test_tasks_are_made_where_there_is_no_gpu(kagent, three_files, tmp_path, at_once):
    done = kagent("import", "p", "--at-once", at_once, "--to", "s")
    assert done.code == 0, done.err
    assert "2 of 3 problems are tasks (1 of them without a seed), 1 failed" in done.out
    assert "b: a task; no seed: no way" in done.out
    assert "c: failed: task: no Model" in done.out
    assert "kagent suite run --resume --to" in done.err
    suite = read_record(tmp_path / "s", Suite)
    assert suite.kind == "gpu"
    found = [suite.of(p) for p in suite.problems]
    assert [p.task for p in found] == ["tasks/a", "tasks/b", ""]
    assert [p.finished for p in found] == [False, False, True]
    assert [p.notes for p in found] == [("gpu",), ("gpu",), ()]
    again = kagent("import", "p", "--resume", "--to", "s")
    assert "2 of 3 problems are tasks" in again.out
    assert read_record(tmp_path / "s", Suite) == suite
    other = kagent("import", "p", "--kind", "cpu", "--resume", "--to", "s")
    assert "for a GPU, and --kind is cpu" in other.err


def test_an_imported_suite_goes_on_elsewhere_with_options_of_its_searches(
    kagent, three_files, searching, tmp_path
):
    kagent("import", "p", "--kind", "cpu", "--to", "s")
    shutil.rmtree(tmp_path / "p")
    shutil.rmtree(tmp_path / "s/tasks/a")
    problems_in(tmp_path / "s/tasks", "a")
    shutil.move(tmp_path / "s", tmp_path / "t")
    searching(a=1.5)
    done = kagent("run", "--resume", "--to", "t", "--lang", "cpp", "--budget", 7)
    assert done.code == 0, done.err
    assert "3 of 3 problems finished: 1 correct, 2 failed" in done.out
    assert "budget 7 a problem" in done.out
    refused = kagent("run", "--resume", "--to", "t", "--budget", 8)
    assert "began with budget 7, and 8 was given" in refused.err


DOUBLE = {
    "name": "Double-h32",
    "op_type": "double",
    "description": "Twice a matrix.",
    "axes": {"rows": {"type": "var"}, "hidden": {"type": "const", "value": 32}},
    "inputs": {"x": {"shape": ["rows", "hidden"], "dtype": "float32"}},
    "outputs": {"y": {"shape": ["rows", "hidden"], "dtype": "float32"}},
    "reference": "import torch\n\n\ndef run(x):\n    return 2 * x\n",
}


def test_the_worker_imports_and_says_why_there_is_no_seed(tmp_path, monkeypatch):
    (tmp_path / "double.json").write_text(json.dumps(DOUBLE))
    problem = Problem("double", Form.FLASHINFER, str(tmp_path / "double.json"))
    outcome = SeedOutcome("cpu", None, "no C++ for it")
    monkeypatch.setattr(import_worker, "write_seeds", lambda *a, **k: [outcome])
    request = {"to": str(tmp_path), "kind": "cpu", "jobs": 1, "isolation": "auto"}
    made = import_worker.make({**request, "problem": to_json(problem)})
    assert made == {"folder": str(tmp_path / "double_h32"), "notes": [], "no_seed": "no C++ for it"}


def test_what_a_suite_began_with_is_kept(kagent, searching, tmp_path):
    problems_in(tmp_path / "p", "a")
    searching(a=2.0)
    kagent("run", "p", "--lang", "cpp", "--max-time", "90s")
    suite = read_record(tmp_path / "suites/p", Suite)
    progress = suite.of(suite.problems[0])
    assert (progress.state, progress.run) == (ProblemState.DONE, "a-1")
    assert progress.digest
    assert progress.step is None
    assert FailedStep.MACHINE == "machine"
    assert suite.settings.max_time == 90.0
    shutil.rmtree(tmp_path / "suites/p/runs/a-1")
    shown = kagent("report", "suites/p")
    assert shown.code == 0
    assert "1 of 1 problems finished: 0 correct, 1 failed (1 search)" in shown.out


def test_a_worker_that_does_not_listen_yet_is_killed():
    """A shell's `&` has it ignore SIGINT, until it sets a handler."""
    code = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(600)"
    workers, ended = Workers(("-c", code)), []

    def ask():
        try:
            workers.ask({}, print)
        except KeyboardInterrupt:
            ended.append(True)

    thread = threading.Thread(target=ask)
    thread.start()
    while not workers._live:
        time.sleep(0.01)
    workers.stop(print)
    thread.join()
    assert ended == [True]
