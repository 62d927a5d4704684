"""`kagent campaign` as a user meets it, on the CPU, with the tuner and small budgets."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
from commands import run as run_command
from doubling_task import PARALLEL, PLAIN, REFERENCE, TASK, kernel_of_passes
from evolve_process import command
from kagent.campaign import running
from kagent.campaign.file import CampaignFile, plan
from kagent.campaign.record import Campaign, CampaignRun, Slice
from kagent.campaign.view import RunRow
from kagent.cli.campaign import _export, _export_options, exit_code
from kagent.runs.store import read_history
from kagent.suite.problems import Form, Problem
from kagent.suite.record import ProblemState, Settings, read_record
from kagent.suite.results import Figures
from kagent_sandbox.data.verdict import SpeedVerdict
from kagent_sandbox.errors import UserError
from kagent_sandbox.process import process_tree
from kagent_sandbox.process.process_tree import kill_tree
from simulated_evolution import stored_run

pytestmark = pytest.mark.usefixtures("uncompiled", "brief_timing", "warm_processes")

LOCAL = {"jobs": None, "isolation": None, "on": "local"}
RAY = {"jobs": None, "isolation": "T1", "on": "ray"}


@pytest.fixture
def kagent(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    return lambda *words: run_command(monkeypatch, capsys, "campaign", *words)


def tasks_in(folder, *names):
    """Small tasks: one case of each kind."""
    less = re.sub(r"  { name = \"(odd|long)\".*\n", "", TASK)
    for name in names:
        (folder / name).mkdir(parents=True)
        (folder / name / "task.toml").write_text(less.replace('"double"', f'"{name}"', 1))
        (folder / name / "reference.py").write_text(REFERENCE)
        (folder / name / "cpp_plain.py").write_text(kernel_of_passes(PARALLEL + PLAIN))


def verdicts(folder):
    """Verdicts by the names of runs: the candidates' numbers, in the order of their events."""
    return {
        run.name: [e.data["id"] for e in read_history(run)[1].events if e.kind == "recorded"]
        for run in (folder / "runs").iterdir()
    }


def test_a_winner_that_is_refused_keeps_no_other_one_out(monkeypatch, tmp_path, capsys):
    """FASTER in the final race, and not in the race of the export."""
    problems = [
        SimpleNamespace(name=n, verdict=v, progress=SimpleNamespace(run=n))
        for n, v in (
            ("a", SpeedVerdict.FASTER),
            ("b", SpeedVerdict.FASTER),
            ("c", SpeedVerdict.TIE),
        )
    ]
    campaign = SimpleNamespace(
        devices=["cpu"], problems=problems, runs_of=lambda _: [SimpleNamespace(device="cpu")]
    )
    codes = {"a": 2, "b": 0}
    asked = []

    def export(words, *, env, check):
        assert "KAGENT_DEVICE" not in env  # of another command: it would choose
        name = next(n for n in codes if str(tmp_path / "runs" / n) in words)
        asked.append((name, words[-2:]))
        return SimpleNamespace(returncode=codes[name])

    monkeypatch.setattr("kagent.suite.results.result_of", lambda _, __, problem: problem)
    monkeypatch.setattr("subprocess.run", export)
    monkeypatch.setenv("KAGENT_DEVICE", "cpu")
    _export(tmp_path, campaign, tmp_path / "lib", LOCAL)
    assert asked == [("a", ["--device", "cpu"]), ("b", ["--device", "cpu"])]
    assert "c: not exported: TIE" in capsys.readouterr().err
    codes["b"] = 2
    with pytest.raises(UserError, match="no winner was exported"):
        _export(tmp_path, campaign, tmp_path / "lib", LOCAL)
    codes["a"] = 5
    with pytest.raises(UserError, match="lib: a: not exported"):
        _export(tmp_path, campaign, tmp_path / "lib", LOCAL)


@pytest.mark.parametrize(
    ("verdicts", "correct", "code"),
    [("FASTER TIE", 2, 0), ("TIE SLOWER", 2, 3), ("", 1, 3), ("", 0, 1)],
)
def test_the_exit_code_is_that_of_evolve(verdicts, correct, code):
    counts = {v: verdicts.split().count(v) for v in SpeedVerdict}
    assert exit_code(Figures("", 2, 2, correct, {}, counts, {})) == code


@pytest.mark.parametrize(
    ("device", "session", "options"),
    [
        ("cuda:1", LOCAL, "--on local --device cuda:1"),
        ("cuda:1", {**LOCAL, "jobs": 2}, "--jobs 2 --on local --device cuda:1"),
        ("H100", RAY, "--isolation T1 --on ray --accelerator H100"),
        ("cuda", RAY, "--isolation T1 --on ray"),
        ("cpu", RAY, "--isolation T1 --on ray --accelerator cpu"),
    ],
)
def test_a_library_is_made_where_the_campaign_was(device, session, options):
    assert _export_options(device, session) == options.split()


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_a_campaign_that_is_killed_goes_on_and_keeps_its_budget(kagent, tmp_path):
    tasks_in(tmp_path, "a", "b")
    words = ["campaign", "a", "b", "--lang", "cpp", "--device", "cpu", "--budget", "4"]
    words += ["--seeds", "2", "--to", "c"]
    folder = tmp_path / "c"
    process = subprocess.Popen(
        [sys.executable, "-m", "kagent", *words],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=dict(os.environ),
    )
    try:
        deadline = time.monotonic() + 400
        while time.monotonic() < deadline and process.poll() is None:
            done = list((folder / "runs").glob("*/lineage.sqlite"))
            if len(done) > 1 and read_record(folder, Campaign).runs[1].run:
                break  # in the middle of the second run
            time.sleep(0.1)
        assert process.poll() is None
    finally:
        kill_tree(process.pid)
        process.wait()
    before = verdicts(folder)
    assert sum(map(len, before.values()))
    done = kagent("a", "b", "--resume", "--to", "c")
    assert done.code in (0, 3), done.err  # 3: not FASTER
    after = verdicts(folder)
    for name, numbers in before.items():
        assert after[name][: len(numbers)] == numbers
    assert all(numbers == list(range(len(numbers))) for numbers in after.values())
    campaign = read_record(folder, Campaign)
    judged = [read_history(folder / "runs" / r.run)[1].lineage.counted for r in campaign.runs]
    assert all(judged)
    assert sum(judged) <= 4
    assert [campaign.of(p).state for p in campaign.problems] == [ProblemState.DONE] * 2
    races = [campaign.of(p).run for p in campaign.problems]
    assert len(after) == len({r.run for r in campaign.runs} | set(races))  # and no others
    page = (folder / "report.html").read_text()
    assert 'http-equiv="refresh"' not in page
    assert "a, cpu, seed 1" in page
    assert "of 4 evaluations" in done.out
    assert "a, cpu, seed 1: up to 1 evaluation, searching" in done.err
    assert "cost" not in done.out  # the tuner's work has none

    # A campaign that is over does nothing more.
    assert kagent("a", "b", "--resume", "--to", "c").code == done.code
    assert verdicts(folder) == after
    other = kagent("a", "b", "--resume", "--to", "c", "--seeds", 3)
    assert (other.code, "began with seeds 2, and 3 was given" in other.err) == (2, True)


def test_one_run_that_fails_ends_no_other_and_ctrl_c_ends_all(kagent, tmp_path, monkeypatch):
    tasks_in(tmp_path, "a", "b")
    code = (
        "import json, sys; r = json.load(sys.stdin);"
        "print(json.dumps({'error': 'no such luck', 'step': 'search'})) if r['task'][-1] == 'a'"
        " else sys.exit(3)"
    )
    monkeypatch.setattr(running, "_WORKER", ("-c", code))
    done = kagent("a", "b", "--lang", "cpp", "--device", "cpu", "--budget", 4, "--to", "c")
    assert done.code == 1
    for words in (
        "a, cpu, seed 0: failed: search: no such luck",
        "b, cpu, seed 0: failed: machine: its process ended with status 3",
        "2 of 2 tasks finished: 0 correct, 2 failed",
    ):
        assert words in done.out, done.out
    assert "problem" not in done.out
    assert "fast_" not in done.out
    assert "no such luck" in (tmp_path / "c/report.html").read_text()

    def interrupt(*_):
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(running.CampaignRunner, "_ask", interrupt)
    ended = kagent("a", "b", "--lang", "cpp", "--device", "cpu", "--to", "d")
    assert ended.code == 130
    assert "Resume with: kagent campaign a b --resume --to d" in ended.err


def two_devices():
    names = ("x", "y")
    return Campaign(
        sources=("a",),
        settings=Settings(4, "cpp", "tune", (), None),
        problems=tuple(Problem(d, Form.TASK, "/a") for d in names),
        version="0",
        started="2026-01-01T00:00:00",
        devices=names,
        seeds=1,
        max_cost=None,
        runs=tuple(CampaignRun(d, "/a", d, 0, d, {}) for d in names),
    )


@pytest.fixture
def runner(tmp_path, monkeypatch):
    """A campaign on two devices, whose workers wait until both have begun."""

    def made(then):
        code = (
            "import json, pathlib, sys, time; r = json.load(sys.stdin)\n"
            "here = pathlib.Path(r['config']['runs'])\n"
            "(here / r['device']).touch()\n"
            f"while len(list(here.iterdir())) < 2: time.sleep(0.01)\n{then}"
        )
        monkeypatch.setattr(running, "_WORKER", ("-c", code))
        (tmp_path / "runs").mkdir()
        return running.CampaignRunner(tmp_path, two_devices(), {}, print, print)

    return made


def test_slices_of_two_devices_are_spent_at_once(runner):
    made = runner("print(json.dumps({'error': 'both were there', 'step': 'search'}))")
    made.run()
    assert [r.reason for r in made.campaign.runs] == ["both were there"] * 2


def test_a_first_share_too_small_for_a_reply_is_not_the_end_of_a_run(tmp_path, monkeypatch):
    """A dear model: half of the money does not pay for a reply, and all of it would."""
    folder = stored_run(tmp_path, budget=0)  # its seeds alone
    work = two_devices()
    runs = tuple(replace(r, device="x", run=folder.name) for r in work.runs)
    work = replace(work, devices=("x",), runs=runs, max_cost=1.0)
    asked = []

    def ask(_, run, limits, *more):
        asked.append((run.name, limits["max_cost"]))
        return {"stop": "cost"}

    monkeypatch.setattr(running.CampaignRunner, "_ask", ask)
    monkeypatch.setattr(running.CampaignRunner, "_race", lambda *_: None)
    made = running.CampaignRunner(tmp_path, work, {}, print, print)
    made.run()
    assert asked == [("x", 0.5), ("y", 1.0), ("x", 1.0)]
    assert [r.over for r in made.campaign.runs] == ["cost"] * 2


@pytest.mark.parametrize(
    ("limits", "over"),
    [({}, "budget"), ({"max_time": 5.0}, "time"), ({"max_cost": 0.0}, "cost")],
)
def test_a_run_that_nothing_is_left_for_is_not_open_any_more(tmp_path, monkeypatch, limits, over):
    """Unless the campaign goes on, perhaps with more."""
    folder = stored_run(tmp_path, budget=4)
    work = two_devices()
    begun = replace(work.runs[0], run=folder.name, last=Slice(4, 1.0, 0.0, 0.1))
    settings = replace(work.settings, max_time=limits.get("max_time"))
    work = replace(
        work,
        runs=(begun, replace(work.runs[1], over="exhausted")),
        settings=settings,
        max_cost=limits.get("max_cost"),
        seconds=10.0,
    )
    assert RunRow(begun).state == "open"
    raced = []
    monkeypatch.setattr(running.CampaignRunner, "_race", lambda _, p: raced.append(p.name))
    made = running.CampaignRunner(tmp_path, work, {}, print, print)
    made.run()
    assert raced == ["x", "y"]
    assert [RunRow(r).state for r in made.campaign.runs] == [over, "exhausted"]
    assert [r.over for r in made.campaign.resumed().runs] == ["", "exhausted"]


def test_a_task_that_no_time_was_left_for_waits(tmp_path):
    """It did not fail: the campaign may go on with more time."""
    work = two_devices()
    work = replace(work, settings=replace(work.settings, max_time=5.0), seconds=10.0)
    said = []
    made = running.CampaignRunner(tmp_path, work, {}, lambda *_: None, said.append)
    made.run()
    assert [made.campaign.of(p).state for p in made.campaign.problems] == [ProblemState.WAITING] * 2
    assert said[-1].endswith("not begun: nothing was left for it")


def test_a_task_with_an_address_of_its_own_needs_no_key_of_the_general_one(tmp_path, monkeypatch):
    tasks_in(tmp_path, "a", "b")
    monkeypatch.chdir(tmp_path)
    for name in ("KAGENT_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    local = {"base_url": "http://127.0.0.1:8000/v1"}

    def planned(*tasks):
        return plan(
            ("c.toml",),
            CampaignFile.model_validate(
                {
                    "tasks": list(tasks),
                    "devices": ["cpu"],
                    "options": {"model": "some-model", "lang": "cpp", "proposer": "model"},
                }
            ),
        )

    a, b = ({"task": name, "options": local} for name in ("./a", "./b"))
    assert planned(a, b).settings.model == ("some-model",)
    with pytest.raises(UserError, match=r"some-model at .* has no key"):
        planned(a, "./b")


def test_the_price_of_a_tasks_own_model_must_be_known(tmp_path, monkeypatch):
    tasks_in(tmp_path, "a")
    monkeypatch.chdir(tmp_path)
    own = {"model": "mine", "base_url": "http://127.0.0.1:8000/v1", "proposer": "model"}
    asked = CampaignFile.model_validate(
        {
            "tasks": [{"task": "./a", "options": own}],
            "devices": ["cpu"],
            "max_cost": 1.0,
            "options": {"lang": "cpp"},
        }
    )
    with pytest.raises(UserError, match="needs the price of mine"):
        plan(("c.toml",), asked)


def test_dollars_are_no_limit_where_no_model_is_asked(tmp_path, monkeypatch):
    tasks_in(tmp_path, "a")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("KAGENT_MODEL", raising=False)
    asked = CampaignFile.model_validate(
        {"tasks": ["./a"], "devices": ["cpu"], "max_cost": 1.0, "options": {"lang": "cpp"}}
    )
    with pytest.raises(UserError, match="max_cost limits what calls of models cost"):
        plan(("c.toml",), asked)


def test_each_run_tells_what_is_done_for_it_and_of_every_verdict(runner, monkeypatch):
    made = runner(
        "print(json.dumps({'doing': 'searching: the device is shared'}), flush=True)\n"
        "print(json.dumps({'recorded': 0}), flush=True)\n"
        "print(json.dumps({'error': 'no luck', 'step': 'search'}))"
    )
    told, changes = [], []
    made.say, made.changed = lambda *words: told.append(words), changes.append
    made.run()
    for name in ("x", "y"):
        assert [text for who, text in told if who == name] == [
            "starting",
            "up to 1 evaluation, searching: the device is shared",
            "",
        ]
        assert f"{name}: failed: search: no luck" in changes
    assert changes.count("") == 2


def test_ctrl_c_ends_the_workers_of_all_devices_and_blames_no_run(runner, tmp_path):
    made = runner("time.sleep(100)")

    def interrupt():
        while len(list((tmp_path / "runs").iterdir())) < 2:
            time.sleep(0.01)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        made.run()
    assert not any("r['config']" in command(p) for p in process_tree.descendants(os.getpid()))
    assert [r.step for r in made.campaign.runs] == [None, None]


def test_mistakes_are_a_line(kagent, tmp_path):
    tasks_in(tmp_path, "a", "b")
    files = {
        "keys.toml": 'tasks = ["a"]\nbudgets = 3\n',
        "misspelt.toml": 'taskz = ["a"]\n',
        "least.toml": 'tasks = ["a"]\nbudget = 0\n',
        "empty.toml": "budget = 3\n",
        "type.toml": 'tasks = ["a"]\nbudget = "3"\n',
        "none.toml": "tasks = []\n",
        "text.toml": "tasks = [\n",
        "option.toml": 'tasks = [{task = "a", options = {budget = 3}}]\n',
        "value.toml": 'tasks = ["a"]\noptions = {lang = "fortran"}\n',
        "replay.toml": 'tasks = ["a"]\noptions = {proposer = "replay:x", lang = "cpp"}\n',
        "time.toml": 'tasks = ["a"]\nmax_time = "soon"\n',
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    for words, said in (
        (("softmx",), "did you mean softmax"),
        (("a", "b"), "name the campaign with --to"),
        (("a", "a", "--to", "c", "--lang", "cpp"), "task a is named twice"),
        (("a", "b", "--to", "c", "--lang", "cpp", "--budget", 1), "give --budget 2 or more"),
        (("a", "--device", "cpu", "--device", "cpu"), "device cpu is named twice"),
        (("a", "--device", "gpu"), "no device 'gpu': expected cpu, cuda"),
        (("a", "--device", "cpu", "--lang", "triton"), "language triton has no kernels for cpu"),
        (("a", "--max-time", "soon"), "--max-time: expected a time"),
        (("a", "--max-cost", "0"), "expected dollars above 0"),
        (("a", "--resume"), "no campaign there"),
        (("keys.toml",), "no key budgets: a campaign has tasks, devices"),
        (("misspelt.toml",), "misspelt.toml: no key taskz: a campaign has tasks, devices"),
        (("least.toml",), "least.toml: budget: expected at least 1, got 0"),
        (("empty.toml",), 'empty.toml: no tasks: expected tasks = ["softmax", ...]'),
        (("type.toml",), "type.toml: budget: expected a whole number, got '3'"),
        (("none.toml",), "tasks: List should have at least 1 item"),
        (
            ("text.toml",),
            "text.toml: no TOML: Invalid value (at end of document): expected lines such as",
        ),
        (("option.toml",), "tasks: a: options: no option 'budget': there are lang"),
        (("value.toml",), "fortran"),
        (("replay.toml",), "a campaign searches, and replay:x repeats a run"),
        (("time.toml",), "max_time: expected a time"),
        (("gone.toml",), "gone.toml"),
        (("keys.toml", "a", "--to", "c"), "give it alone"),
        (("type.toml", "a"), "type.toml: a campaign's file names all tasks: give it alone"),
    ):
        done = kagent(*words)
        assert done.code not in (0, 1), words
        assert said in done.err, (words, done.err)
    assert not (tmp_path / "campaigns").exists()
    assert not (tmp_path / "c").exists()
