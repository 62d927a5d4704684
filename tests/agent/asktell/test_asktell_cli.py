"""`kagent ask`, `tell`, `judge` and `merge` as a user meets them."""

import json
import os
import re
import shutil

import pytest
from asktell_runs import (
    ask,
    history_of,
    judge,
    kernel,
    make_task,
    reply,
    start,
    state_of,
    tell,
    toy_machine,  # noqa: F401 - a fixture
)
from commands import run as run_command
from doubling_task import PARALLEL, PLAIN, REFERENCE, TASK
from doubling_task import kernel_of_passes as double_kernel
from kagent.runs.manifest import list_runs
from kagent.runs.store import read_history
from kagent_sandbox.device.detect import has_gpu
from simulated_evolution import stored_run

without_gpu = pytest.mark.skipif(has_gpu(), reason="there is a GPU")


pytestmark = pytest.mark.usefixtures("uncompiled", "shared", "brief_timing")


@pytest.fixture
def kagent(monkeypatch, capsys, tmp_path):
    """The command line, in a folder of its own; its output without line breaks of the table."""
    monkeypatch.chdir(tmp_path)
    return lambda *words: run_command(monkeypatch, capsys, *words)


@pytest.fixture
def toy(tmp_path):
    make_task(tmp_path / "toy")
    return tmp_path / "toy"


@pytest.mark.usefixtures("toy_machine")
def test_from_a_task_to_a_verdict(kagent, toy, tmp_path):
    asked = kagent("ask", toy, "-n", 2)
    assert asked.code == 0, asked.err
    (run,) = list_runs(tmp_path / "runs")
    for words in (
        f"runs/{run.name}: toy for cpu (not measured yet)",
        f"runs/{run.name}/prompts/0001.md",
        f"kagent tell {run.name} FILE...   evaluates them on this machine",
        f"kagent tell {run.name} FILE... --queue",
    ):
        assert words in asked.out
    (tmp_path / "0001.md").write_text(reply(16, 3))
    told = kagent("tell", run.name, "0001.md")
    assert told.code == 0, told.err
    lines = told.out.splitlines()
    assert lines[0] == "0001.md, ask 1: candidate #2"
    assert [line[:3].strip() for line in lines[1:4]] == ["#0", "#1", "#2"]
    assert "[1.20× predicted] wider loads" in lines[3]
    assert lines[3].split()[1] == "1", "such a run has no budget"
    assert "3 judged, 0 left" in lines
    assert f"next: kagent ask {run.name}" in lines
    again = kagent("tell", run.name, "0001.md")
    assert again.code == 0
    assert "told before, as candidate #2; nothing was added" in again.out
    listed = kagent("ask", run.name, "--list")
    assert "0000.md" in listed.out
    assert "0001.md" not in listed.out.replace("(0000.md)", "")
    shown = kagent("show", run.name)
    assert "waiting for an answer: ask 0" in shown.out
    raced = kagent("judge", "latest", "--race")
    assert "final race, on hidden cases" in raced.out
    assert "0 judged, 0 left" in raced.out


@pytest.mark.usefixtures("toy_machine")
def test_from_a_laptop_to_a_box_and_home(kagent, toy, tmp_path, monkeypatch):
    run = start(tmp_path)
    ask(run)
    tell(run, (0, reply(16, 3)))
    box = tmp_path / "box"
    shutil.copytree(run, box / run.name)
    done = kagent("judge", run.name, "--runs", box, "--deadline", "8m")
    assert done.code == 0, done.err
    assert "3 judged, 0 left" in done.out
    assert f"next: kagent ask {run.name} --runs {box}" in done.out
    home = kagent("merge", run.name, box / run.name)
    assert home.out.startswith("3 verdicts came home; 0 still wait\nthe best so far: #2 ")
    again = kagent("merge", run.name, box / run.name, "--json")
    assert json.loads(again.out)["events"] == 0
    tell(box / run.name, (None, kernel(8, 2)))
    judge(box / run.name)
    more = kagent("merge", run.name, box / run.name)
    assert more.out.startswith("1 verdict, 1 candidate told there came home; 0 still wait\n")
    assert "Toy 1" in kagent("runs").out


@pytest.mark.usefixtures("toy_machine")
def test_programs_get_json(kagent, toy, tmp_path):
    made = json.loads(kagent("ask", toy, "-n", 2, "--json").out)
    assert [a["ask"] for a in made["asks"]] == [0, 1]
    (tmp_path / "0000.md").write_text(reply(16, 3))
    (tmp_path / "0001.txt").write_text("prose")
    (tmp_path / "x.py").write_text(kernel(2, note="1  # WRONG"))
    files = ["0000.md", "0001.txt", "x.py"]
    rows = json.loads(kagent("tell", made["run"], *files, "--by", "a model", "--json").out)
    _, history = read_history(tmp_path / "runs" / made["run"])
    assert {c.proposal.origin.model for c in history.lineage if c.id > 1} == {"a model"}
    assert [(r["label"], r["ask"], r["candidate"]) for r in rows] == [
        ("0000.md", 0, 2),
        ("0001.txt", 1, 3),
        ("x.py", None, 4),
    ]
    assert [r["verdict"].get("status") for r in rows] == [None, "NO_KERNEL", "INCORRECT_NUMERICAL"]
    judged = json.loads(kagent("judge", made["run"], "--json").out)
    assert (judged["left"], judged["incumbent"]) == (0, 2)
    listed = json.loads(kagent("ask", made["run"], "--list", "--json").out)
    assert listed["asks"] == []
    assert json.loads(kagent("show", made["run"], "--json").out)["open_asks"] == []


def test_runs_are_shown_in_every_state(kagent, tmp_path, toy_machine):  # noqa: F811
    run = start(tmp_path)
    assert "waiting for a verdict: #0 cpp_plain, #1 cpp_wide" in kagent("show", run.name).out
    assert "cpu (not measured yet)" in kagent("runs").out
    none = kagent("show", run.name, 0)
    assert (none.code, none.err) == (2, "kagent: no candidate 0: the run has none yet\n")
    ask(run)
    tell(run, (0, "prose"))
    judge(run)
    assert "NO_KERNEL" in kagent("show", run.name, 2).out
    assert json.loads(kagent("runs", "--json").out)[0]["device"] == "Toy 1"


def test_an_answer_without_a_kernel_is_shown_as_the_reply_that_it_is(
    kagent,
    tmp_path,
    toy_machine,  # noqa: F811
):
    run = start(tmp_path)
    ask(run)
    tell(run, (0, "\n".join(f"word {i}" for i in range(40))), (0, "another one"))
    judge(run)
    shown = kagent("show", run.name, 2).out
    assert "word 0" in shown
    assert "word 39" not in shown
    assert f"kagent show {run.name} 2 --reply" in shown
    assert "what changed" not in shown
    assert "cpp_kernel" not in shown  # no diff that deletes its parent
    second = kagent("show", run.name, 3).out
    assert "another one" in second
    assert "word 0" not in second


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("ask", "softmx"), 2, "nor is it a task: there are adamw, adamw_tensors, attention, "),
        (("ask", "toy", "--list"), 2, "toy: a task; --list is for a run"),
        (("ask", "toy", "-n", "0"), 2, "'-n'"),
        (("ask", "toy", "--target", "sm_1"), 2, "unknown target 'sm_1'"),
        (("ask", "toy", "--lang", "triton", "--target", "cpu"), 2, "--lang triton has no kernels"),
        (
            ("ask", "toy", "--target", "sm_90a"),
            2,
            "no triton or gluon or cuda or cute or cutile seed there",
        ),
        (("ask", "RUN", "--lang", "cpp"), 2, "--lang is for a new run, and"),
        (("ask", "RUN", "--prompts", "nowhere"), 2, "nowhere: no such folder: --prompts names"),
        (("ask", "OTHER"), 2, "its proposals come from random, and kagent evolve ./toy --resume"),
        (("tell", "RUN", "nope.md"), 2, "nope.md: no such file"),
        (("tell", "RUN", "toy"), 2, "toy: a folder, where a file was expected"),
        (("tell", "RUN", "a.md"), 2, "a.md: it names no ask"),
        (("tell", "RUN", "a.md", "--ask", "9"), 2, "a.md: no ask 9 in toy-"),
        (("tell", "RUN", "k.py", "--parent", "9"), 2, "no candidate 9: the run has 0 to 1"),
        (("tell", "RUN", "k.py", "--queue", "--race"), 2, "omit --queue"),
        (("tell", "RUN"), 2, "Missing argument"),
        (("tell", "nope", "k.py"), 4, "no run 'nope'"),
        (("tell", "RUN", "/dev/zero"), 2, "/dev/zero: a device, pipe or socket, where a plain"),
        (("tell", "RUN", "fifo"), 2, "fifo: a device, pipe or socket, where a plain file was"),
        (("judge", "RUN", "--deadline", "soon"), 2, "--deadline soon: expected a time such as 90s"),
        (("judge", "RUN", "--deadline", "0"), 2, "--deadline 0: expected a time above 0"),
        (("merge", "RUN", "toy"), 4, "toy: no run there (no run.json)"),
        (("merge", "RUN", "OTHER"), 2, "no copy of"),
        (("merge", "RUN", "RUN"), 2, "is the run itself"),
    ],
)
def test_mistakes_are_answered_in_a_line_and_change_nothing(
    kagent, tmp_path, toy, words, code, said
):
    run = start(tmp_path)
    other = stored_run(tmp_path / "evolved", budget=1)
    data = json.loads((other / "run.json").read_text())
    data |= {
        "task_folder": str(toy),
        "task_digest": json.loads((run / "run.json").read_text())["task_digest"],
    }
    (other / "run.json").write_text(json.dumps(data))
    (tmp_path / "a.md").write_text("prose")
    (tmp_path / "k.py").write_text(kernel(4))
    os.mkfifo(tmp_path / "fifo")
    before = [history_of(r).events for r in (run, other)]
    places = {"RUN": run, "OTHER": other}
    ended = kagent(*(places.get(w, w) for w in words))
    assert ended.code == code
    assert said in " ".join(re.sub("[│╭╮╰╯─]", " ", ended.err).split())
    assert "Traceback" not in ended.err
    assert [history_of(r).events for r in (run, other)] == before
    assert list_runs(tmp_path / "runs") == [run]


@without_gpu
def test_without_a_gpu_answers_are_queued_or_refused(kagent, tmp_path):
    assert kagent("ask", "softmax", "--target", "sm_90a").code == 0
    (run,) = list_runs(tmp_path / "runs")
    (tmp_path / "k.py").write_text("x = 1")
    told = kagent("tell", run.name, "k.py")
    assert told.code == 2
    assert told.out == ""
    assert "needs an NVIDIA GPU (sm_90a), and this machine has none: queue answers" in told.err
    assert all(p.name != "triton_k" for p in state_of(run).proposals)


TRITON = """
import torch
import triton
import triton.language as tl

@triton.jit
def twice(x, y, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + i, TIMES * tl.load(x + i, mask=i < n), mask=i < n)

def double(x):
    y = torch.empty_like(x)
    twice[(triton.cdiv(x.numel(), 1024),)](x, y, x.numel(), BLOCK=1024)
    return y
"""


@pytest.fixture
def double(tmp_path):
    """A task of one statement, with a C++ and a Triton seed."""
    folder = tmp_path / "double"
    folder.mkdir()
    (folder / "task.toml").write_text(re.sub(r"  { name = \"long\".*\n", "", TASK))
    (folder / "reference.py").write_text(REFERENCE)
    (folder / "cpp_plain.py").write_text(double_kernel(PLAIN))
    (folder / "triton_twice.py").write_text(TRITON.replace("TIMES", "2"))
    return folder


@pytest.mark.nightly
@without_gpu
def test_queued_triton_is_compiled_and_interpreted(kagent, double, tmp_path):
    assert kagent("ask", double, "--target", "sm_90", "-n", 2).code == 0
    (run,) = list_runs(tmp_path / "runs")
    (tmp_path / "0000.py").write_text('"""Two."""\n' + TRITON.replace("TIMES", "(1 + 1)"))
    (tmp_path / "0001.py").write_text(TRITON.replace("TIMES", "3"))
    (tmp_path / "broken.py").write_text(TRITON.replace("TIMES", "two"))
    (tmp_path / "none.py").write_text(
        "import torch\ndef double(x):\n    return torch.empty_like(x)\n"
    )
    files = ("0000.py", "0001.py", "broken.py", "none.py")
    told = kagent("tell", run.name, *files, "--queue", "--jobs", 1)
    assert told.code == 0, told.err
    (good,) = [x for x in told.out.splitlines() if x.startswith("#1 ")]
    assert re.search(r"builds for sm_90a in [\d.]+ s; right in Triton's interpreter", good)
    (wrong,) = [x for x in told.out.splitlines() if x.startswith("#2 ")]
    assert "builds for sm_90a" in wrong
    assert "check INCORRECT_NUMERICAL" in wrong
    (broken,) = [x for x in told.out.splitlines() if x.startswith("#3 ")]
    assert "build COMPILE_ERROR" in broken
    (none,) = [x for x in told.out.splitlines() if x.startswith("#4 ")]
    assert "build POLICY: host code launches no kernel" in none
    assert "5 wait for a judge" in told.out
    state = state_of(run)
    looked = {n: x.interpreted for n, x in state.looked.items()}
    assert looked == {1: True, 2: True, 3: False, 4: False}
    assert [p.id for p in state.history.pending] == [0, 1, 2, 3, 4]
    assert len(state.history.lineage) == 0


@pytest.mark.nightly
@pytest.mark.timeout(400)  # some 25 s of a core, which others may use too
def test_the_whole_circle_with_real_builds_and_a_real_judge(kagent, double, tmp_path):
    assert kagent("ask", double, "--lang", "cpp").code == 0
    (home,) = list_runs(tmp_path / "runs")
    source = double_kernel(PARALLEL + PLAIN, passes=8)  # it clearly loses: soon judged
    answer = f"Hypothesis: threads.\nPredicted speed-up: 2.0×\n\n```python\n{source}```\n"
    (tmp_path / "0000.md").write_text(answer)
    (tmp_path / "wrong.py").write_text(double_kernel(PLAIN.replace("2 *", "3 *")))
    told = kagent("tell", home.name, "0000.md", "wrong.py", "--queue", "--jobs", 1)
    assert told.code == 0, told.err
    assert told.out.count("builds for cpu") == 2
    box = tmp_path / "box"
    shutil.copytree(home, box / home.name)
    judged = kagent("judge", home.name, "--runs", box, "--jobs", 1)
    assert judged.code == 0, judged.err
    assert "3 judged, 0 left" in judged.out
    merged = kagent("merge", home.name, box / home.name)
    assert "3 verdicts came home; 0 still wait" in merged.out
    lineage = history_of(home).lineage
    assert lineage[1].proposal.predicted == 2.0
    assert [c.score is not None for c in lineage] == [True, True, False]
    assert set(history_of(home).baselines) == {"baselines", "ceilings"}
    asked = kagent("ask", home.name)
    assert asked.code == 0, asked.err
    text = (home / "prompts" / "0001.md").read_text()
    assert "µs" in text
