"""The command line: in this process where it only reads, and as real processes where it works."""

import contextlib
import importlib.metadata
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from commands import run
from doubling_task import PARALLEL, PLAIN, REFERENCE, TASK, kernel, kernel_of_passes
from evolve_process import EvolveProcess
from kagent import candidate_file as workbench
from kagent.cli import app
from kagent.runs.events import Stop
from kagent.runs.manifest import list_runs
from kagent.runs.store import RunStore
from kagent.tasks import find_task
from kagent_sandbox.builder.client import Builder
from kagent_sandbox.device.detect import has_gpu
from kagent_sandbox.errors import ChildDied, DeviceWedged, MachineError
from kagent_sandbox.judge.client import JudgeClient
from kagent_sandbox.process import process_tree
from typer.testing import CliRunner

pytestmark = pytest.mark.usefixtures("uncompiled", "brief_timing", "warm_processes")
cold_popen = subprocess.Popen
COLD_AND_BRIEF = Path(__file__).parents[1] / "fleet" / "on_nodes"
without_gpu = pytest.mark.skipif(has_gpu(), reason="there is a GPU")


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    """A task of one statement, so that a run takes seconds."""
    folder = tmp_path_factory.mktemp("double")
    (folder / "task.toml").write_text(re.sub(r"  { name = \"long\".*\n", "", TASK))
    (folder / "reference.py").write_text(REFERENCE)
    (folder / "cpp_parallel.py").write_text(kernel_of_passes(PARALLEL + PLAIN))
    (folder / "wrong.py").write_text(kernel(PLAIN.replace("2 *", "3 *")))
    item = kernel(PLAIN).replace("    y = torch", "    print(x.sum().item())\n    y = torch")
    (folder / "item.py").write_text(item)
    (folder / "triton_twice.py").write_text(
        textwrap.dedent("""
            import torch
            import triton
            import triton.language as tl

            @triton.jit
            def twice(x, y, n, BLOCK: tl.constexpr):
                i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
                tl.store(y + i, 2 * tl.load(x + i, mask=i < n), mask=i < n)

            def double(x):
                y = torch.empty_like(x)
                twice[(triton.cdiv(x.numel(), 1024),)](x, y, x.numel(), BLOCK=1024)
                return y
        """)
    )
    return folder


@pytest.fixture
def kagent(monkeypatch, capsys):
    return lambda *words: run(monkeypatch, capsys, *words)


@pytest.fixture(scope="module")
def machine(task, shared):
    with Builder(1) as builder, JudgeClient(task, "cpu", 1) as judge:
        yield builder, judge


@pytest.fixture
def warm(machine, kagent, monkeypatch):
    """`kagent` on a builder and a judge that have been started already."""
    builder, judge = machine
    monkeypatch.setattr(workbench, "Builder", lambda *_, **__: contextlib.nullcontext(builder))
    monkeypatch.setattr(workbench, "JudgeClient", lambda *_, **__: contextlib.nullcontext(judge))
    monkeypatch.setattr(workbench.secrets, "randbits", lambda _: 1)
    return kagent


def process(*words, **environment):
    """`kagent` as a process."""
    return subprocess.run(
        [sys.executable, "-m", "kagent", *map(str, words)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_tasks_are_listed(kagent):
    listed = kagent("tasks")
    assert listed.code == 0
    for name in ("attention", "cross_entropy", "gelu", "linear_cross_entropy", "softmax"):
        assert name in listed.out
    rows = json.loads(kagent("tasks", "--json").out)
    (softmax,) = [r for r in rows if r["name"] == "softmax"]
    assert {"name": "triton_rows", "language": "triton"} in softmax["seeds"]
    assert softmax["gpu_bench"]


@pytest.mark.nightly
def test_a_triton_candidate_is_built_for_a_gpu_that_is_not_there(task, warm):
    file = task / "triton_twice.py"
    for target in ("sm_80", "sm_100"):
        shown = warm("build", file, "--task", task, "--target", target, "--jobs", 1)
        assert shown.code == 0
        for words in (f"kernels for {target}", "registers", "global loads", "16 B ×", "launches"):
            assert words in shown.out
    data = json.loads(warm("build", file, "--task", task, "--jobs", 1, "--json").out)
    assert data["target"] == "sm_90a"
    assert {p["case"] for p in data["plans"]} == {"gpu_few", "gpu_long"}
    assert data["kernels"][0]["registers"] > 0


def test_a_cuda_seed_is_built_with_named_kernels(warm):
    task = find_task("gelu")
    built = warm("build", task.folder / "cuda_vector.py", "--task", "gelu", "--jobs", 2)
    assert built.code == 0, built.err
    assert "kernels for sm_90a" in built.out
    assert "_Z" not in built.out


def test_a_cpp_candidate_is_built_with_every_plan_in_full(task, warm):
    file = task / "cpp_parallel.py"
    shown = warm("build", file, "--task", task, "--configs", 2, "--full", "--jobs", 1)
    assert shown.code == 0
    assert "kernels for cpu" in shown.out
    assert "PASSES=6" in shown.out
    assert "launch twice" in shown.out


def test_a_rejected_candidate_comes_with_line_and_remedy(task, warm):
    shown = warm("build", task / "item.py", "--task", task, "--jobs", 1)
    assert shown.code == 1
    assert shown.out.startswith("item.py: POLICY (build)")
    assert "x.sum().item()" in shown.out
    data = json.loads(warm("build", task / "item.py", "--task", task, "--json").out)
    assert data["outcome"] == "rejected"
    assert data["verdict"]["status"] == "POLICY"


def test_checking_runs_every_case_on_the_cpu(task, warm):
    good = warm("check", task / "cpp_parallel.py", "--task", task, "--jobs", 1)
    assert good.code == 0, good.err
    assert "odd" in good.out
    assert "correct in 3 results" in good.out
    wrong = warm("check", task / "wrong.py", "--task", task, "--json", "--jobs", 1)
    assert wrong.code == 1
    data = json.loads(wrong.out)
    assert (data["outcome"], data["interpreted"]) == ("rejected", False)
    assert data["verdict"]["status"] == "INCORRECT_NUMERICAL"


def test_a_task_is_checked_without_a_candidate(task, warm, tmp_path):
    good = warm("check", task)
    assert good.code == 0, good.err
    assert re.search(r"double, cpu cases: all \d\d wrong results fail", good.out)
    unknown = warm("check", task / "wrong.py")
    assert unknown.code == 2
    assert "name its task with --task" in unknown.err
    reference = (task / "reference.py").read_text()
    bad = shutil.copytree(task, tmp_path / "bad")
    (bad / "reference.py").write_text(reference.replace("x.double() * 2", "x.mul_(2).double()"))
    for command in (("check", bad), ("check", bad / "wrong.py", "--task", bad)):
        refused = warm(*command)
        assert refused.code == 2
        assert refused.err.splitlines()[-1].startswith(f"kagent: {bad / 'reference.py'}: reference")
        assert "Traceback" not in refused.err


@without_gpu
def test_triton_is_interpreted_and_says_so(task, kagent):
    shown = kagent("check", task / "triton_twice.py", "--task", task)
    assert shown.code == 0, shown.err
    assert "interpreted, not run on a GPU: values only" in shown.out


@without_gpu
def test_timing_a_gpu_candidate_without_a_gpu_is_one_line(task, kagent):
    shown = kagent("bench", task / "triton_twice.py", "--task", task)
    assert (shown.code, shown.out) == (2, "")
    assert "needs an NVIDIA GPU" in shown.err
    assert "Traceback" not in shown.err
    evolved = kagent("evolve", task, "--lang", "triton")
    assert evolved.code == 2
    assert "--lang cpp evolves double" in evolved.err


def test_times_are_not_lost_with_the_race(task, warm, machine, monkeypatch):
    """Real times of a real judge, whose process is gone when it is to race."""

    def dies(*_, **__):
        raise ChildDied("the judge's process ended: out of memory")

    monkeypatch.setattr(machine[1], "race", dies)
    files = [task / "cpp_parallel.py", task / "wrong.py"]
    shown = warm("bench", *files, "--task", task, "--jobs", 1)
    assert shown.code == 1
    assert "cpp_parallel" in shown.out
    assert "the race did not finish for them" in shown.out
    assert "INCORRECT_NUMERICAL" in shown.out
    assert "the judge's process ended: out of memory" in shown.err
    data = json.loads(warm("bench", *files, "--task", task, "--jobs", 1, "--json").out)
    assert data["failure"] == "the judge's process ended: out of memory"
    (timing,) = data["measured"]["cpp_parallel"]["timings"]
    assert timing["kernel_us"] > 0
    assert data["race"]["cases"] == []


@pytest.mark.parametrize("language", ["cpp", "triton"])
def test_a_file_that_does_not_parse_is_not_timed_and_says_why(kagent, task, tmp_path, language):
    """Nothing is started or measured for it, with and without a GPU."""
    bad = tmp_path / "bad.py"
    source = "cpp_kernel('k', '')\n" if language == "cpp" else "@triton.jit\n"
    bad.write_text(f"{source}def double(x):\n    return (x\n")
    shown = kagent("bench", bad, "--task", task)
    assert shown.code == 1
    assert shown.out.startswith("double not timed: the candidate was rejected\n")
    assert "COMPILE_ERROR" in shown.out
    assert "line 3: `return (x`: SyntaxError: '(' was never closed" in shown.out
    assert "GPU" not in shown.out
    assert shown.err == ""
    shutil.copy(bad, tmp_path / "worse.py")
    shown = kagent("bench", bad, tmp_path / "worse.py", "--task", task)
    assert "double not timed: all 2 candidates were rejected" in shown.out


def test_a_file_that_does_not_build_is_rejected_before_baselines_are_measured(
    task, warm, machine, monkeypatch
):
    monkeypatch.setattr(machine[1], "baselines", None)
    shown = warm("bench", task / "item.py", "--task", task, "--jobs", 1)
    assert shown.code == 1, shown.err
    assert "double not timed: the candidate was rejected" in shown.out
    assert "POLICY" in shown.out
    assert "item: build" in shown.err
    assert "race" not in shown.err


def test_a_machine_that_fails_before_anything_is_timed_is_an_error(
    task, warm, machine, monkeypatch
):
    def wedged(*_, **__):
        raise DeviceWedged("no longer computes correctly")

    monkeypatch.setattr(machine[1], "measure", wedged)
    shown = warm("bench", task / "cpp_parallel.py", "--task", task, "--jobs", 1)
    assert (shown.code, shown.out) == (MachineError.exit_code, "")
    assert "no longer computes correctly" in shown.err


@pytest.mark.nightly
@pytest.mark.timeout(400)  # others may use the cores, too
def test_candidates_are_timed_beside_the_baselines_and_failures_named(task, monkeypatch):
    """Here every process is started as users start it, not forked from a warm one. Judges time
    briefly all the same.
    """
    monkeypatch.setattr("subprocess.Popen", cold_popen)
    files = [task / "cpp_parallel.py", task / "wrong.py"]
    done = process("bench", *files, "--task", task, "--json", PYTHONPATH=str(COLD_AND_BRIEF))
    assert done.returncode == 1, done.stderr
    data = json.loads(done.stdout)
    assert [c["case"] for c in data["race"]["cases"]] == ["short"]
    assert set(data["race"]["cases"][0]["baselines"]) >= {"eager"}
    assert data["rejected"]["wrong"]["status"] == "INCORRECT_NUMERICAL"
    assert (list(data["measured"]), data["failure"]) == (["cpp_parallel"], None)


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("build", "x.py", "--task", "softmx"), 2, "did you mean softmax? A folder with"),
        (("build", "nope.py", "--task", "softmax"), 2, "nope.py: no such file"),
        (("evolve", "softmax", "--resume", "nope"), 4, "no run 'nope' in runs: it has none"),
        (("evolve", "softmax", "--budget", "-5"), 2, "'--budget': expected at least 0, got '-5'"),
        (("evolve", "softmax", "--budget", "x"), 2, "'--budget': expected a whole number, got 'x'"),
        (("ask", "softmax", "-n", "-3"), 2, "'-n': expected at least 1, got '-3'"),
        (("evolve", "softmax", "--lang", "rust"), 2, "'--lang': 'rust' is not one of 'triton'"),
        (("evolve", "softmax", "--isolation", "T9"), 2, "'--isolation': 'T9' is not one of 'auto'"),
        (
            ("evolve", "softmax", "--max-time", "5x"),
            2,
            "kagent: --max-time: expected a time such as 90s, 8m, 1h30m, or a number of seconds, "
            "got '5x'",
        ),
        (("evolve", "softmax", "--stop-at", "95"), 2, "--stop-at: expected at most 1, got 95.0"),
        (("evolve", "softmax", "--proposer", "foo"), 2, "--proposer: expected tune, model or"),
        (("evolve", "softmax", "--base-url", "x"), 2, "--base-url: expected an address such as"),
        (("evolve", "./nodir"), 2, "./nodir: no such folder: expected a task's name, or its"),
        (
            ("evolve", "x.py"),
            2,
            "x.py: a Python file, where a task was expected: kagent new x.py:N",
        ),
        (("evolve", "gone.py"), 2, "gone.py: no such file: expected a task's name, or its"),
        (("evolve", "nothing"), 2, "no task 'nothing': there are adamw"),
        (("show", "nope"), 4, "no run 'nope'"),
        (("bench", "--task", "softmax"), 2, "Missing argument"),
    ],
)
def test_mistakes_are_answered_in_a_line(kagent, tmp_path, monkeypatch, words, code, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.py").write_text("")
    ended = kagent(*words)
    assert ended.code == code
    assert said in " ".join(re.sub("[│╭╮╰╯─]", " ", ended.err).split())
    assert "Traceback" not in ended.err
    assert "Value error" not in ended.err


def test_settings_come_from_flags_then_the_environment_then_kagent_toml(
    kagent, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    assert "no runs in runs:" in kagent("runs").out
    (tmp_path / "kagent.toml").write_text('runs = "from_toml"')
    assert "no runs in from_toml:" in kagent("runs").out
    monkeypatch.setenv("KAGENT_RUNS", "from_environment")
    assert "no runs in from_environment:" in kagent("runs").out
    (tmp_path / "from_flag").mkdir()
    assert "no runs in from_flag:" in kagent("runs", "--runs", "from_flag").out
    (tmp_path / "kagent.toml").write_text("rnus = 1")
    assert "no option 'rnus': there are runs" in kagent("runs").err
    (tmp_path / "kagent.toml").write_text("runs = ")
    assert "kagent: kagent.toml: " in kagent("runs").err
    (tmp_path / "kagent.toml").unlink()
    monkeypatch.setenv("KAGENT_JOBS", "many")
    ended = kagent("runs")
    assert (ended.code, ended.out) == (2, "")
    assert "option jobs" in ended.err


def test_a_folder_that_cannot_be_written_is_a_clear_error(task, tmp_path):
    (tmp_path / "runs").write_text("a file is in the way")
    done = process("evolve", task, "--runs", tmp_path / "runs", "--budget", 0, "--lang", "cpp")
    assert done.returncode == 2
    assert str(tmp_path / "runs") in done.stderr
    assert "Traceback" not in done.stderr


def test_a_closed_pipe_is_no_error(tmp_path):
    command = f"{sys.executable} -m kagent tasks --json | head -c 1"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)
    assert done.stdout == "["
    assert done.stderr == ""


@pytest.mark.nightly
@pytest.mark.timeout(400)
@pytest.mark.usefixtures("orphans_come_here")
def test_ctrl_c_ends_cleanly_says_how_to_go_on_and_leaves_nothing(task, tmp_path):
    run = EvolveProcess(task, tmp_path, runs="my runs", budget=60)
    run.wait_until("^#0 ")
    assert process_tree.descendants(run.process.pid)
    run.process.send_signal(signal.SIGINT)
    text, said = run.process.communicate()
    text = "".join(run.lines) + text
    assert (run.process.returncode, said) == (130, "")
    run.assert_nothing_left()
    assert "\x1b" not in text
    (folder,) = list_runs(run.runs)
    assert "ended: interrupted" in text
    again = f"kagent evolve {task} --runs '{run.runs}' --resume {folder.name}"
    assert f"resume: {again}" in text
    with RunStore.open(folder, write=False) as store:
        assert store.history().stop is Stop.INTERRUPTED
        recorded = len(store.history().lineage)
    assert recorded == len(re.findall(r"^#\d+ +(?:seed|\d+/60) ", text, re.MULTILINE))

    # no further candidate: test_session has a run that goes on with its search
    words = ["evolve", task, "--lang", "cpp", "--runs", run.runs, "--resume", "latest"]
    least = "0"
    if "under way" in (refused := process(*words, "--budget", 0)).stderr:
        assert refused.returncode == 2
        (least,) = re.findall(r"--budget (\d+) finishes these alone", refused.stderr)
    done = process(*words, "--budget", least)
    assert done.returncode in (0, 3), done.stderr  # 3: not FASTER
    assert f"kagent show {folder.name}" in done.stdout
    assert "the chosen finalist over all hidden cases" in done.stdout
    with RunStore.open(folder, write=False) as store:
        assert len(store.history().lineage) >= recorded
        assert store.history().race is not None


@pytest.mark.usefixtures("orphans_come_here")
def test_sigterm_ends_as_ctrl_c_does_and_is_named(task, tmp_path):
    run = EvolveProcess(task, tmp_path, runs="runs", budget=60)
    run.wait_until("^proposals come from")
    run.process.send_signal(signal.SIGTERM)
    _, said = run.process.communicate()
    assert run.process.returncode == 130
    assert "kagent: SIGTERM: ending as after Ctrl-C" in said
    assert "Traceback" not in said
    run.assert_nothing_left()


@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_another_system_is_one_line(platform):
    code = f"import sys; sys.platform = {platform!r}; import kagent.cli"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == MachineError.exit_code
    assert done.stderr.count("\n") == 1
    assert f"this is {platform}: use a Linux machine" in done.stderr


def test_the_version_is_printed(kagent):
    assert kagent("--version").out == f"kagent {importlib.metadata.version('kagent')}\n"


@pytest.mark.parametrize(
    ("typed", "names"),
    [
        ("evolve lin", ["linear_cross_entropy"]),
        ("show so", ["softmax-ask-tell"]),
        ("evolve softmax --resume cr", ["cross_entropy-ask-tell"]),
        ("bench x.py --task fp", ["fp8_linear"]),
        ("ask cro", ["cross_entropy", "cross_entropy-ask-tell"]),
        ("diff --runs {runs} la", ["latest"]),
        ("diff --runs nowhere so", []),
    ],
)
def test_names_of_tasks_and_runs_are_completed(typed, names, tmp_path, monkeypatch):
    for name in ("softmax-ask-tell", "cross_entropy-ask-tell"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "run.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    words = f"kagent {typed.format(runs=tmp_path / 'runs')}"
    asked = {"_KAGENT_COMPLETE": "complete_fish", "_TYPER_COMPLETE_ARGS": words}
    asked["_TYPER_COMPLETE_FISH_ACTION"] = "get-args"
    done = CliRunner().invoke(app, [], env=asked, prog_name="kagent")
    assert done.stdout.split() == names


def test_help_shows_every_command_in_a_group(kagent):
    text = kagent("--help").out
    order = ["Evolve", "evolve ", "Look at runs", "runs ", "Export", "Drive from", "Trust"]
    places = [text.index(f" {words}") for words in order]
    assert places == sorted(places)
    assert "─ Commands" not in text
