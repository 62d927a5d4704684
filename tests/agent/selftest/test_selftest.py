"""The selftest's parts: reading the corpus, noticing what attacks achieve, keeping the outcome."""

import contextlib
import dataclasses
import io
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kagent import doctor
from kagent.evolve.session import Outcome
from kagent.resources import corpus_folder
from kagent.runs import selftest_record
from kagent.runs.events import Stop
from kagent.runs.manifest import versions
from kagent.runs.selftest_record import SelftestRecord
from kagent.runs.store import read_history
from kagent.selftest import evaluator
from kagent.selftest import machine_checks as checks
from kagent.selftest.bait import KEY, Bait, name_for
from kagent.selftest.catalogue import item_folders, load_catalogue, load_item
from kagent.selftest.evaluator import SelftestEvaluator, _Started
from kagent.selftest.expectations import EntryOutcome, escaped, escapes, miss
from kagent.selftest.jobs import Attempt, Job
from kagent.selftest.leftovers import Leftovers
from kagent.selftest.runner import judged, run_scenario
from kagent.selftest.scenarios import faults
from kagent.ui import end_of_run, run_view
from kagent_sandbox.data.records import to_json
from kagent_sandbox.device.cpu.facts import cpu_facts
from kagent_sandbox.errors import ChildDied, MachineError, UserError
from kagent_sandbox.judge import judge_process
from kagent_sandbox.judge.judge_process import JudgeProcess
from kagent_sandbox.judge.timing.noise import Noise
from rich.console import Console
from simulated_evolution import stored_run

ITEM = """
number = 7
title = "A title"
mechanism = "compiler"
why = "Because."

[[variant]]
file = "bad_cpp.py"
twin = "good_cpp.py"
task = "rows"
runs = "cpu"
expect = "build COMPILE_ERROR"
says = "line \\\\d+"
"""


@pytest.fixture
def item(tmp_path):
    """An item in a corpus of its own; a function that writes its item.toml and reads it."""
    folder = tmp_path / "faults" / "07_some_slug"
    folder.mkdir(parents=True)
    shutil.copytree(corpus_folder() / "tasks", tmp_path / "tasks")
    for name in ("bad_cpp.py", "good_cpp.py"):
        (folder / name).write_text("")

    def load(*changes, extra=""):
        text = ITEM + extra
        for old, new in changes:
            assert old in text
            text = text.replace(old, new)
        (folder / "item.toml").write_text(text)
        return load_item(folder)

    return load


def test_an_item_is_read(item):
    (variant,) = item()
    assert variant.id == "07_some_slug-bad_cpp"
    assert (variant.expect, variant.says, variant.measured) == (
        ("build COMPILE_ERROR",),
        r"line \d+",
        False,
    )
    assert variant.twin.name == "good_cpp.py"
    assert variant.task.name == "rows"
    (timed,) = item(("build COMPILE_ERROR", "measure SUSPECT"))
    assert timed.measured
    (either,) = item(('"build COMPILE_ERROR"', '["passed", "check TAMPER"]'))
    assert either.expect == ("passed", "check TAMPER")


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("number = 7", "number = 8", "number = 8 in a folder '07_some_slug'"),
        ("mechanism", "mechanisms", "mechanism"),
        ("build COMPILE_ERROR", "build COMPILER_ERROR", "neither 'passed' nor a stage"),
        ("build COMPILE_ERROR", "escaped", "neither 'passed' nor a stage"),
        ("bad_cpp.py", "absent.py", "no file"),
        ('task = "rows"', 'task = "nothing"', "no task 'nothing'"),
        ('runs = "cpu"', 'runs = "tpu"', "runs"),
        ("\\\\d+", "(", "no regular expression"),
        ('runs = "cpu"', 'runs = "build"\nmeasure = true', "times nothing"),
        ('runs = "cpu"', 'runs = "cpu"\nextra = 1', "extra"),
        ("[[variant]]", "[[variant", "Expected"),
    ],
)
def test_what_does_not_fit_is_an_error_that_names_the_file(item, old, new, words):
    with pytest.raises(UserError) as e:
        item((old, new))
    assert words in str(e.value)
    assert "07_some_slug" in str(e.value)


def test_an_item_without_anything_to_run_and_one_twice_are_errors(item, tmp_path):
    with pytest.raises(UserError, match="neither a"):
        item((ITEM[ITEM.index("[[variant]]") :], ""))
    with pytest.raises(UserError, match="is there twice"):
        item(extra=ITEM[ITEM.index("[[variant]]") :])
    item()
    shutil.copytree(tmp_path / "faults" / "07_some_slug", tmp_path / "host" / "07_other")
    with pytest.raises(UserError, match="number 7 is that of"):
        item_folders(tmp_path)


def test_items_and_chapters_are_chosen(item, tmp_path):
    item()
    assert len(load_catalogue(tmp_path)) == 1
    assert len(load_catalogue(tmp_path, only=[7])) == 1
    assert load_catalogue(tmp_path, chapters=["host"]) == []
    with pytest.raises(UserError, match="no item 8"):
        load_catalogue(tmp_path, only=[8])
    with pytest.raises(UserError, match="no chapter 'hosts'"):
        load_catalogue(tmp_path, chapters=["hosts"])


@given(st.dictionaries(st.text(max_size=8), st.text(max_size=8) | st.integers()))
def test_other_tables_are_user_errors_never_crashes(tmp_path_factory, table):
    folder = tmp_path_factory.getbasetemp() / "fuzz" / "faults" / "07_any"
    folder.mkdir(parents=True, exist_ok=True)
    lines = [f"{_quoted(k)} = {_quoted(v) if isinstance(v, str) else v}" for k, v in table.items()]
    (folder / "item.toml").write_text("\n".join(lines), encoding="utf-8", errors="replace")
    with pytest.raises(UserError):
        load_item(folder)


def _quoted(text):
    return '"' + "".join(f"\\U{ord(c):08x}" for c in text if not 0xD800 <= ord(c) < 0xE000) + '"'


# -- comparing -----------------------------------------------------------------------------------


def test_outcome_and_words_must_both_be_as_expected():
    seen = EntryOutcome("build COMPILE_ERROR", "line 3: no", "met: nothing")
    assert miss(("passed", "build COMPILE_ERROR"), r"line \d", seen) is None
    assert "expected passed, got build COMPILE_ERROR: line 3" in miss(("passed",), "", seen)
    assert "nothing like 'met'" in miss(("build COMPILE_ERROR",), "met", seen)
    passed = EntryOutcome("passed", "", "met: EPERM")
    assert miss(("passed",), "met: EPERM", passed) is None
    assert "what it printed" in miss(("passed",), "line", passed)


def test_an_attack_that_says_that_it_worked_has_escaped():
    token = "0123456789abcdef"
    for seen in (
        EntryOutcome("passed", "", f"the key is {token}"),
        EntryOutcome("build RUNTIME_ERROR", "line 3: SystemError: escaped: wrote a file"),
        EntryOutcome("passed", "", "some line\nescaped 12"),
    ):
        found = escaped(seen, escapes(seen, token))
        assert found.outcome == "escaped"
        assert seen.outcome in found.message
    quoted = EntryOutcome("build COMPILE_ERROR", 'line 3: `puts("escaped");`: expected a ;')
    assert escaped(quoted, escapes(quoted, token)) is quoted


def test_a_twin_that_fails_is_a_miss(item):
    (variant,) = item()
    right = EntryOutcome("build COMPILE_ERROR", "line 1")
    assert judged(variant, right, EntryOutcome("passed")).misses == ()
    (why,) = judged(variant, right, EntryOutcome("check TAMPER", "wrote")).misses
    assert "its honest twin good_cpp.py: expected passed, got check TAMPER" in why


def test_a_scenario_that_is_missing_or_fails_is_an_error_of_its_own(item, monkeypatch):
    extra = '\n[[scenario]]\nname = "full_moon"\nexpect = "calm"\n'
    _, scenario = item(extra=extra)
    assert (scenario.id, scenario.runs) == ("07_some_slug-full_moon", "anywhere")
    seen = run_scenario(None, scenario)
    assert seen.outcome == "error"
    assert "no function full_moon in kagent.selftest.scenarios.faults" in seen.message

    def howl(scenario_run):
        assert scenario_run.folder.is_dir()
        raise ZeroDivisionError("at midnight")

    monkeypatch.setattr(faults, "full_moon", howl, raising=False)
    seen = run_scenario(None, scenario)
    assert seen.outcome == "error"
    assert "ZeroDivisionError: at midnight" in seen.message
    monkeypatch.setattr(faults, "full_moon", lambda scenario_run: EntryOutcome("calm", "no clouds"))
    assert judged(scenario, run_scenario(None, scenario), None).misses == ()


# -- baits ---------------------------------------------------------------------------------------


@pytest.fixture
def bait():
    with contextlib.closing(Bait("@bait_folder@ @bait_pid@ @bait_port@ @bait_abstract@", "t")) as b:
        yield b


def test_baits_that_nobody_touches_are_untouched(bait):
    folder, pid, port, abstract = bait.fill().split()
    assert bait.touched() == []
    assert (Path(folder) / "secret").read_text() == f"{KEY}=t\n"
    environ = Path(f"/proc/{pid}/environ")
    while not environ.read_bytes():  # exec has begun, and not filled it in yet
        time.sleep(0.001)
    assert f"{KEY}=t".encode() in environ.read_bytes().split(b"\0")
    assert int(port) > 1023
    assert abstract.startswith("kagent-bait-")


def _overwrite(folder, *_):
    (Path(folder) / "writable").write_text("mine")


def _plant(folder, *_):
    (Path(folder) / "planted").touch()


def _remove(folder, *_):
    (Path(folder) / "secret").unlink()


def _kill(_folder, pid, *_):
    os.kill(int(pid), signal.SIGKILL)
    os.waitid(os.P_PID, int(pid), os.WEXITED | os.WNOWAIT)


def _renice(_folder, pid, *_):
    os.setpriority(os.PRIO_PROCESS, int(pid), 5)


def _connect(_folder, _pid, port, _):
    socket.create_connection(("127.0.0.1", int(port))).close()


def _send(_folder, _pid, port, _):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        s.sendto(b"x", ("127.0.0.1", int(port)))


def _local(folder, *_):
    with socket.socket(socket.AF_UNIX) as s:
        s.connect(f"{folder}/socket")


def _abstract(_folder, _pid, _port, name):
    with socket.socket(socket.AF_UNIX) as s:
        s.connect(f"\0{name}")


@pytest.mark.parametrize(
    ("attack", "words"),
    [
        (_overwrite, "writable was changed"),
        (_plant, "planted"),
        (_remove, "holds socket, writable"),
        (_kill, "witness process was ended"),
        (_renice, "witness process was changed"),
        (_connect, "TCP bait was reached"),
        (_send, "UDP bait was reached"),
        (_local, "folder's socket was reached"),
        (_abstract, "abstract socket was reached"),
    ],
)
def test_every_bait_tells(bait, attack, words):
    attack(*bait.fill().split())
    deadline = time.monotonic() + 60
    while not bait.touched() and time.monotonic() < deadline:
        time.sleep(0.01)
    (found,) = bait.touched()
    assert words in found


def test_only_baits_that_are_named_are_made():
    with contextlib.closing(Bait("nothing @bait_name@", "0123456789abcdef")) as bait:
        assert bait.fill() == f"nothing {name_for('0123456789abcdef')}"
        assert bait.touched() == []


# -- what a rig starts ---------------------------------------------------------------------------


class Helper:
    """A judge's stand-in."""

    def __init__(self, key):
        self.key, self.closed = key, False

    def close(self):
        self.closed = True


def test_helpers_are_started_once_side_by_side_and_anew_when_dropped():
    both = threading.Barrier(2)

    def start(key):
        both.wait(10.0)  # neither is ready before the other was begun
        return Helper(key)

    started = _Started(start)
    with ThreadPoolExecutor(4) as threads:
        a, b, c, d = threads.map(started.get, ["a", "b", "a", "b"])
    assert a is c is not b is d
    assert started.all() == [a, b]
    started.drop("a")
    assert (a.closed, b.closed, started.all()) == (True, False, [b])


def test_a_helper_that_does_not_start_is_tried_again():
    failures = [MachineError("busy")]

    def start(key):
        if failures:
            raise failures.pop()
        return Helper(key)

    started = _Started(start)
    with pytest.raises(MachineError, match="busy"):
        started.get("a")
    assert started.all() == []
    assert started.get("a") is started.get("a")


# -- honest kernels in every tier ------------------------------------------------------------------


class Timing:
    """A rig's stand-in, which has built a kernel and times it."""

    def __init__(self, *times_us):
        self.left_us = list(times_us)

    def judged(self, _):
        return EntryOutcome("passed", kernel_us=self.left_us.pop(0))

    finish = judged


def honest(**rigs):
    job = Job("", Path(), "cpu", measured=True)
    built = {tier: Attempt(job, Bait("", "token"), "") for tier in rigs}
    return checks._honest("cpp", rigs, built, 0.1)


def test_a_lone_fast_moment_of_one_tier_is_no_difference():
    t0 = Timing(700.0, *[1000.0] * 14)  # as seen: a neighbour was gone for a moment
    t1 = Timing(*[1000.0] * 15)
    check = honest(T0=t0, T1=t1)
    assert check.ok
    assert check.got == "right; T0 1000 µs, T1 1.00× of it"
    assert len(t1.left_us) == 11  # four rounds told


def test_a_tier_that_is_slower_is_found_among_disturbed_times():
    t0 = Timing(*[1000.0, 1900.0, 1000.0] * 5)
    t1 = Timing(*[2500.0, 1200.0, 1200.0] * 5)
    check = honest(T0=t0, T1=t1)
    assert not check.ok
    assert check.got == "right; T0 1000 µs, T1 1.20× of it"
    assert not t1.left_us


def test_a_host_with_no_tier_but_t0_has_nothing_to_compare():
    assert honest(T0=Timing(1000.0, 1000.0)).ok


# -- what is left behind -------------------------------------------------------------------------


@pytest.fixture
def outside():
    with contextlib.closing(Leftovers("escaped-0123")) as outside:
        yield outside


def test_nothing_is_left_where_nothing_was_started(outside):
    done = subprocess.run([sys.executable, "-c", "import tempfile; print(tempfile.gettempdir())"],
                          capture_output=True, text=True)  # fmt: skip
    assert "kagent-selftest-" in done.stdout
    assert outside.left() == []


def test_a_file_and_shared_memory_are_found(outside):
    path = Path("/dev/shm/escaped-0123")
    path.touch()
    try:
        assert outside.left() == [f"file {path}"]
    finally:
        path.unlink()
    Path(os.environ["TMPDIR"], "any").touch()
    (found,) = outside.left()
    assert found.endswith("/any")


def test_what_a_process_takes_away_as_it_ends_is_not_left(outside):
    code = """
        import os, pathlib, time
        file = pathlib.Path(os.environ["TMPDIR"], "its_own")
        file.touch()
        print(flush=True)
        time.sleep(0.3)
        file.unlink()
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as ending:
        ending.stdout.readline()
        assert outside.left() == []


def test_a_daemon_is_found_by_whom_it_belongs_to(outside):
    code = """
        import os, time
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                os.execvp("sleep", ["sleep", "60"])
            os._exit(0)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)
    deadline = time.monotonic() + 60
    while not (found := [x for x in outside.left() if "sleep 60" in x]):
        assert time.monotonic() < deadline
    pid = int(found[0].split()[1].rstrip(":"))
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert outside.left() == []


def test_what_was_there_before_is_not_left(outside):
    with subprocess.Popen(["sleep", "60"]) as new:
        assert outside.left() == [f"process {new.pid}: sleep 60"]
        with contextlib.closing(Leftovers("escaped-0123")) as later:
            assert later.left() == []
        new.kill()


def test_folders_of_killed_selftests_are_removed(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    dead = subprocess.Popen(["true"])
    dead.wait()
    stale = tmp_path / f"kagent-selftest-{dead.pid}-abc"
    stale.mkdir()
    other = tmp_path / f"kagent-selftest-{os.getpid()}-abc"
    other.mkdir()
    with contextlib.closing(Leftovers("escaped-0123")):
        assert not stale.exists()
        assert other.exists()


# -- the record ----------------------------------------------------------------------------------

VERSIONS = {"kagent": "1", "torch": "2"}
RECORD = SelftestRecord("abcd", "a CPU", "T2", "2026-11-21T10:00:00+0000", 200, 30, ())


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.mark.usefixtures("cache")
def test_a_record_belongs_to_device_versions_and_corpus():
    corpus = selftest_record.corpus_hash()
    assert selftest_record.newest("cpu", VERSIONS) is None
    assert selftest_record.in_environment("cpu", VERSIONS) == "not run"
    selftest_record.save(RECORD, "cpu", corpus, VERSIONS)
    assert selftest_record.newest("cpu", VERSIONS) == RECORD
    assert selftest_record.newest("another", VERSIONS) is None
    assert selftest_record.newest("cpu", {**VERSIONS, "torch": "3"}) is None
    selftest_record.save(RECORD, "cpu", "of another corpus", {**VERSIONS, "torch": "4"})
    assert selftest_record.newest("cpu", {**VERSIONS, "torch": "4"}) is None


@pytest.mark.usefixtures("cache")
def test_what_a_run_says_of_it():
    selftest_record.save(RECORD, "cpu", selftest_record.corpus_hash(), VERSIONS)
    environment = {"selftest": selftest_record.in_environment("cpu", VERSIONS)}
    assert selftest_record.line(environment) == (
        "selftest: 200 of 200 as expected, 30 skipped; 2026-11-21, tier T2, digest abcd"
    )
    assert "not run" in selftest_record.line(
        {"selftest": selftest_record.in_environment("gpu", VERSIONS)}
    )
    assert selftest_record.line({"device": "of a run before there was a selftest"}) is None


def test_the_digest_changes_with_every_outcome_text_and_version(tmp_path):
    outcomes = [("a", "passed"), ("b", "check TAMPER")]
    before = selftest_record.digest_of("corpus", VERSIONS, outcomes)
    assert selftest_record.digest_of("corpus", VERSIONS, outcomes[::-1]) == before
    assert selftest_record.digest_of("corpus", VERSIONS, [*outcomes[:1], ("b", "passed")]) != before
    assert selftest_record.digest_of("corpus", {**VERSIONS, "torch": "3"}, outcomes) != before
    (tmp_path / "a.py").write_text("1")
    hashed = selftest_record.corpus_hash(tmp_path)
    (tmp_path / "a.pyc").write_text("1")
    assert selftest_record.corpus_hash(tmp_path) == hashed
    (tmp_path / "a.py").write_text("2")
    assert selftest_record.corpus_hash(tmp_path) != hashed


# -- where it is shown ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stored", "words"),
    [(to_json(RECORD), "200 of 200 as expected"), ("not run", "selftest: not run"), (None, "")],
)
def test_a_run_shows_it_in_its_report_and_at_its_end(tmp_path, stored, words):
    folder = stored_run(tmp_path)
    path = folder / "run.json"
    manifest = json.loads(path.read_text())
    if stored is not None:
        manifest["environment"]["selftest"] = stored
    path.write_text(json.dumps(manifest))
    store, history = read_history(folder)
    ended = end_of_run.end_of_run(
        Outcome(folder, Stop.BUDGET, history), "toy", matrix=False, flags={}
    )
    for parts in ([run_view.run_view(store, history)], ended):
        console = Console(file=io.StringIO(), width=150)
        console.print(*parts)
        text = console.file.getvalue()
        assert (words in text) if words else ("selftest" not in text)


@pytest.mark.usefixtures("cache")
def test_doctor_shows_it():
    assert doctor._selftest().level is doctor.Level.MISSING
    assert "kagent selftest" in doctor._selftest().text
    missed = dataclasses.replace(RECORD, missed=("66_caching-by_pointer_cpp",))
    for kept, level in ((RECORD, doctor.Level.OK), (missed, doctor.Level.BROKEN)):
        selftest_record.save(kept, cpu_facts().key, selftest_record.corpus_hash(), versions())
        assert doctor._selftest().level is level
    assert "199 of 200" in doctor._selftest().text
    assert "66_caching-by_pointer_cpp" in doctor._selftest().text
    noisy = dataclasses.replace(RECORD, noise=Noise(301.0, 1.012, 0.02, 3.1))
    selftest_record.save(noisy, cpu_facts().key, selftest_record.corpus_hash(), versions())
    assert doctor._selftest().text.endswith(
        "digest abcd; noise: a 301 µs kernel against itself: 1.0120×, single pairs of blocks "
        "differ by 2.0%; intervals widened 3.1×"
    )


@pytest.mark.nightly
@pytest.mark.usefixtures("cache")
def test_a_judge_that_was_restarted_is_closed_at_the_end():
    with SelftestEvaluator(1, "token") as started:
        started._timeout_scale = 1.0
        judge = started.judge(corpus_folder() / "tasks" / "rows", "cpu")
        os.kill(judge.pid, signal.SIGKILL)
        judge._restart()
        successor = judge._link._process
    assert successor.returncode == 0


def test_judges_that_are_being_started_at_the_end_are_not_waited_for(monkeypatch):
    # A server that answers nobody: without a kill it would be there for a minute.
    monkeypatch.setattr(judge_process, "_SERVER", ("-c", "import time; time.sleep(60)"))
    links = []

    class Listed(JudgeProcess):
        def __init__(self, *args, **more):
            super().__init__(*args, **more)
            links.append(self)

    monkeypatch.setattr(evaluator, "JudgeProcess", Listed)
    with SelftestEvaluator(1, "token") as started:
        monkeypatch.setattr(started, "_timeout_scale", 1.0)
        asked = started._threads.submit(started.judge, corpus_folder() / "tasks" / "rows", "cpu")
        while not links:
            assert not asked.done()
            time.sleep(0.01)
    assert isinstance(asked.exception(), ChildDied)
    assert links[0]._process.returncode == -signal.SIGKILL
