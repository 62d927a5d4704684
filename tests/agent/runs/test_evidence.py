"""A recorded run is evidence: commands that read it, or are refused, leave every byte as it was."""

import contextlib
import json
import os
import resource
import shutil
import signal
import sqlite3
import tempfile
from pathlib import Path

import pytest
from commands import run
from kagent.runs.analyses import add_analysis, analyses_path
from kagent.runs.store import RunStore, read_history
from kagent_sandbox.errors import RunError
from simulated_evolution import stored_run

RUNS = Path(__file__).parents[3] / "runs"
NAME = "softmax-ask-tell"


def state(folder):
    """Bytes, mode and time stamp of all that is in a folder, and of the folder itself."""
    found = {}
    for path in (folder, *sorted(folder.rglob("*"))):
        at = path.stat()
        data = path.read_bytes() if path.is_file() else b""
        found[str(path.relative_to(folder))] = (data, at.st_mode, at.st_mtime_ns)
    return found


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """A copy of the recorded runs, and nothing else in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    for folder in RUNS.glob("*-ask-tell"):
        shutil.copytree(folder, tmp_path / "runs" / folder.name)
    return tmp_path / "runs"


READING = [
    "runs",
    f"show {NAME}",
    f"show {NAME} --json",
    f"show {NAME} 9",
    f"show {NAME} 9 --source",
    f"show {NAME} 9 --prompt",
    f"show {NAME} 9 --reply",
    f"diff {NAME} 5 9",
    "top",
    f"report {NAME} -o ../page.html",
    f"ask {NAME} --list",
    f"prompt --run {NAME} softmax",
    "report latest -o ../page.html",
]
REFUSED = [
    f"evolve softmax --resume {NAME}",
    f"evolve gelu --proposer replay:{NAME}",
    f"ask {NAME}",
    f"tell {NAME} nothing.md",
    f"tell {NAME} nothing.md --queue",
    f"judge {NAME} --race",
    f"merge {NAME} {NAME}",
    f"merge {NAME} runs/cross_entropy-ask-tell",
    f"ablate {NAME}",
    f"profile {NAME} 99",
    f"show {NAME} 99",
    f"export {NAME} --to library",
]


def kagent(monkeypatch, capsys, runs, line):
    words = line.replace("../page.html", str(runs.parent / "page.html")).split()
    return run(monkeypatch, capsys, *words, "--runs", runs)


def test_reading_a_run_and_being_refused_changes_nothing(runs, monkeypatch, capsys):
    before = state(runs)
    for line in (*READING, *REFUSED):
        done = kagent(monkeypatch, capsys, runs, line)
        refused = line in REFUSED
        assert (done.code != 0) == refused, (line, done.err)
        assert done.err.startswith("kagent: ") == refused, (line, done.err)
        changed = [n for n, was in state(runs).items() if before.get(n) != was]
        assert changed == [], line


@contextlib.contextmanager
def nobody():
    """Another user than root, who may write anywhere."""
    if os.getuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def locked(monkeypatch):
    """The same copy in folders that nobody may write to."""
    with tempfile.TemporaryDirectory() as made:
        runs = Path(made) / "runs"
        for folder in RUNS.glob("*-ask-tell"):
            shutil.copytree(folder, runs / folder.name)
        paths = [runs, *runs.rglob("*")]
        for path in paths:
            path.chmod(0o555 if path.is_dir() else 0o444)
        Path(made).chmod(0o777)
        monkeypatch.chdir(made)
        yield runs
        for path in paths:
            path.chmod(0o755)


@pytest.mark.nightly
def test_a_read_only_run_is_read_and_kindly_refuses_to_be_written(locked, monkeypatch, capsys):
    before = state(locked)
    answer = locked.parent / "more.py"
    answer.write_text("def entry(x): return x\n")
    with nobody():
        for line in READING:
            assert kagent(monkeypatch, capsys, locked, line).code == 0, line
        told = kagent(monkeypatch, capsys, locked, f"tell {NAME} more.py --queue")
        with pytest.raises(RunError, match=r"analyses\.jsonl: cannot be written: make it writable"):
            add_analysis(locked / NAME, "", "ablated", {})
    assert told.code == 4
    assert "cannot be written: make it writable, or name another place" in told.err
    assert state(locked) == before


def test_an_analysis_is_kept_beside_the_run(tmp_path):
    folder = stored_run(tmp_path)
    store, history = read_history(folder)
    before = state(folder)
    for number in (1, 2):
        add_analysis(folder, store.manifest.id, "ablated", {"number": number})
    add_analysis(folder, "another run", "ablated", {"number": 3})
    assert state(folder) == before
    after = read_history(folder)[1]
    assert [e.data["number"] for e in after.events if e.kind == "ablated"] == [1, 2]
    assert [e.seq for e in after.events] == list(range(1, len(history.events) + 3))
    assert after.elapsed_s == history.elapsed_s
    with analyses_path(folder).open("a") as file:
        file.write(json.dumps({"run": store.manifest.id, "at": "soon", "kind": "x", "data": 1}))
    with pytest.raises(RunError, match=r"analyses\.jsonl: damaged"):
        read_history(folder)


def test_half_an_analysis_is_none(tmp_path):
    """Of a disk that is full; the limit on a file's size stands for it."""
    folder = stored_run(tmp_path)
    store, _ = read_history(folder)
    add_analysis(folder, store.manifest.id, "ablated", {"number": 1})
    size = analyses_path(folder).stat().st_size
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 40, before[1]))
        with pytest.raises(RunError, match=r"analyses\.jsonl: "):
            add_analysis(folder, store.manifest.id, "ablated", {"number": 2})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    add_analysis(folder, store.manifest.id, "ablated", {"number": 3})
    events = read_history(folder)[1].events
    assert [e.data["number"] for e in events if e.kind == "ablated"] == [1, 3]


def test_what_a_killed_process_left_is_read_and_left_alone(tmp_path):
    """A write-ahead log that was not folded in holds the last events."""
    folder = stored_run(tmp_path)
    killed = tmp_path / "runs" / "killed"
    with RunStore.open(folder) as store:
        store.begin(77)
        shutil.copytree(folder, killed)  # as SIGKILL would leave it
    assert (killed / "lineage.sqlite-wal").stat().st_size > 0
    (killed / "lineage.sqlite-shm").unlink()
    before = state(killed)
    assert read_history(killed)[1].budget == 77
    assert state(killed) == before
    with RunStore.open(killed) as store:
        assert state(killed) == before  # until something is written
        store.begin(78)
    assert not (killed / "lineage.sqlite-wal").exists()
    assert read_history(killed)[1].budgets[-2:] == (77, 78)


def test_of_two_that_opened_a_run_without_a_lock_one_may_write(runs):
    folder = runs / NAME
    with RunStore.open(folder) as first:
        with RunStore.open(folder) as second:
            second.append("note", {})
            with pytest.raises(RunError, match="is working on this run"):
                first.append("note", {})
        with pytest.raises(RunError, match="has worked on this run meanwhile: try again"):
            first.append("note", {})
    db = sqlite3.connect(folder / "lineage.sqlite")
    assert db.execute("SELECT count(*) FROM events WHERE kind = 'note'").fetchone() == (1,)
    db.close()
