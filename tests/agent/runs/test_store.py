import contextlib
import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from kagent.runs import store as store_module
from kagent.runs.analyses import add_analysis
from kagent.runs.events import Stop
from kagent.runs.lineage import Candidate, Facts, Operator, Proposal
from kagent.runs.manifest import find_run, list_runs, read_manifest
from kagent.runs.store import RunStore, last_seq
from kagent_sandbox.data.verdict import CaseTiming, Comparison, Passed, Rejected, Stage, Status
from kagent_sandbox.errors import RunError
from simulated_evolution import manifest
from stored_events import add


def proposal(number, source="x = 1\n"):
    return Proposal(
        number, (0,) if number else (), Operator.TUNE, "cpp_x", source, "é", 1.5, number
    )


TIMING = CaseTiming("a", 1.0, 0.9, 1.1, 30, 0.5, 1.0, 0.0)
PASSED = Passed(
    (TIMING,), (), 1.2, 0.01, configs=({"B": 1},), versus=Comparison("0", 1.1, 1.0, 1.2, 0.99)
)
REJECTED = Rejected(Stage.BUILD, Status.POLICY, "no\nline 2", "case")


def fill(store):
    store.begin(10)
    for number, verdict in enumerate((PASSED, REJECTED)):
        store.propose(proposal(number, f"x = {number}\n"))
        store.record(
            Candidate(
                proposal(number, f"x = {number}\n"), verdict, Facts("t", f"w{number}", 1, 0.5)
            )
        )
    store.propose(proposal(2))


def test_the_last_number_is_the_historys_while_it_is_written_and_with_analyses(tmp_path):
    with RunStore.create(tmp_path / "runs", manifest()) as store:
        fill(store)
        folder = store.folder
        numbers = [last_seq(folder)]
        store.stop(Stop.BUDGET)
        numbers.append(last_seq(folder))
    add_analysis(folder, "another run", "some", {})
    numbers.append(last_seq(folder))
    add_analysis(folder, manifest().id, "some", {})
    numbers.append(last_seq(folder))
    assert [n - numbers[0] for n in numbers] == [0, 1, 1, 2]
    with RunStore.open(folder, write=False) as store:
        assert store.history().events[-1].seq == numbers[-1]
    (folder / "lineage.sqlite").unlink()
    with pytest.raises(RunError, match=r"lineage\.sqlite is missing"):
        last_seq(folder)


def test_what_is_written_is_read(tmp_path):
    with RunStore.create(tmp_path / "runs", manifest()) as store:
        fill(store)
        store.stop(Stop.BUDGET)
        folder = store.folder
    with RunStore.open(folder, write=False) as store:
        history = store.history()
        assert store.manifest == manifest()
    assert [c.verdict for c in history.lineage] == [PASSED, REJECTED]
    assert [c.facts.work_hash for c in history.lineage] == ["w0", "w1"]
    assert [p.source for p in history.pending] == ["x = 1\n"]
    assert history.pending[0] == proposal(2)
    assert history.stop is Stop.BUDGET
    assert history.budgets == (10,)
    assert sorted(p.name for p in folder.iterdir()) == [
        "kernels",
        "lineage.sqlite",
        "lock",
        "logs",
        "run.json",
    ]


def test_two_runs_in_one_second_get_two_folders(tmp_path):
    folders = []
    for _ in range(3):
        with RunStore.create(tmp_path, manifest()) as store:
            folders.append(store.folder)
    assert sorted(folders) == sorted(set(folders))
    assert set(list_runs(tmp_path)) == set(folders)


def test_two_processes_cannot_write_one_run(tmp_path):
    with RunStore.create(tmp_path, manifest()) as store:
        fill(store)
        with pytest.raises(RunError, match=f"process {os.getpid()} is working on this run"):
            RunStore.open(store.folder)
        with RunStore.open(store.folder, write=False) as reader:
            assert len(reader.history().lineage) == 2
    RunStore.open(store.folder).close()


def test_a_newer_format_is_named(tmp_path):
    RunStore.create(tmp_path, manifest()).close()
    folder = list_runs(tmp_path)[0]
    data = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps(data | {"format": 99, "version": "7.0", "new": 1}))
    with pytest.raises(RunError, match=r"kagent 7.0 in run format 99.*update kagent"):
        RunStore.open(folder)


@pytest.mark.parametrize("text", ["", "[]", '{"format": 1}', "{", '{"format": 1, "odd": 2}'])
def test_a_damaged_manifest_is_named(tmp_path, text):
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(RunError, match=r"run\.json"):
        read_manifest(tmp_path)


@pytest.fixture
def folder(tmp_path):
    with RunStore.create(tmp_path / "runs", manifest()) as store:
        fill(store)
    return store.folder


def test_a_damaged_database_is_named(folder):
    path = folder / "lineage.sqlite"
    path.write_bytes(b"not a database, but long enough to be read as one" * 100)
    with pytest.raises(RunError, match=r"lineage\.sqlite is damaged"):
        RunStore.open(folder)


@pytest.mark.parametrize(
    ("kind", "data"),
    [("recorded", "{}"), ("proposed", "nonsense"), ("recorded", '{"id":7}'), ("stopped", "{}")],
)
def test_a_damaged_event_is_named(folder, kind, data):
    add(folder, kind, data)
    with RunStore.open(folder) as store, pytest.raises(RunError, match="is damaged"):
        store.history()


def test_an_edited_kernel_is_noticed(folder):
    path = next((folder / "kernels").glob("*.py"))
    path.write_text("x = 99\n")
    with RunStore.open(folder) as store, pytest.raises(RunError, match="changed after"):
        store.history()


def test_a_missing_kernel_is_named(folder):
    for path in (folder / "kernels").glob("*.py"):
        path.unlink()
    with RunStore.open(folder) as store, pytest.raises(RunError, match=r"kernels/.*\.py"):
        store.history()


def test_a_full_disk_is_one_clear_line_and_loses_nothing(tmp_path):
    with RunStore.create(tmp_path, manifest()) as store:
        fill(store)
        store._db.execute("PRAGMA max_page_count = 12")  # what a full disk looks like to sqlite
        with pytest.raises(RunError, match="the disk is full: free some space, then resume"):
            store.append("note", {"text": "x" * 500_000})
        store._db.execute("PRAGMA max_page_count = 100000")
        assert len(store.history().lineage) == 2
        store.append("note", {})


def test_a_full_disk_while_writing_a_kernel(folder, monkeypatch):
    def no_space(*arguments, **more):
        raise OSError(28, "No space left on device")

    with RunStore.open(folder) as store:
        monkeypatch.setattr("pathlib.Path.write_bytes", no_space)
        with pytest.raises(RunError, match="the disk is full"):
            store.propose(proposal(3, "x = 3\n"))
        monkeypatch.undo()
        assert len(store.history().pending) == 1


def test_a_read_only_runs_folder_is_one_clear_line(tmp_path):
    """Root may write anywhere, so that the check runs as another user where it is root."""
    runs = tmp_path / "runs"
    runs.mkdir()
    runs.chmod(0o555)
    code = (
        "import os, sys; sys.path.insert(0, sys.argv[2])\n"
        "from simulated_evolution import manifest; from kagent.runs.store import RunStore\n"
        "from pathlib import Path\n"
        "from kagent_sandbox.errors import RunError\n"
        "os.getuid() or os.setuid(65534)\n"
        "try: RunStore.create(Path(sys.argv[1]), manifest())\n"
        "except RunError as e: print(e)\n"
    )
    for parent in [runs, *runs.parents]:
        if parent != runs and parent.stat().st_uid == os.getuid() and str(parent) != "/tmp":
            parent.chmod(parent.stat().st_mode | 0o055)
        if str(parent) == "/tmp":
            break
    answer = subprocess.run(
        [sys.executable, "-c", code, str(runs), str(Path(__file__).parents[1])],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "cannot be written: make it writable, or name another place with --runs" in answer


def test_the_budget_is_the_last_sessions(folder):
    with RunStore.open(folder) as store:
        assert store.history().budget == 10
        store.begin(70)
        assert store.history().budget == 70


def test_a_candidate_cannot_descend_from_a_later_one(folder):
    with RunStore.open(folder) as store:
        source = "x = 9\n"
        store.propose(Proposal(3, (3,), Operator.TUNE, "cpp_x", source, "", None, 3))
        with pytest.raises(RunError, match="cannot have the parents"):
            store.history()


def test_a_run_in_a_read_only_folder_can_be_read(folder):
    copy = folder.parent / "copy"
    shutil.copytree(folder, copy)
    copy.chmod(0o555)
    with RunStore.open(copy, write=False) as store:
        assert len(store.history().lineage) == 2
    copy.chmod(0o755)


def test_finding_runs(tmp_path):
    runs = tmp_path / "runs"
    names = ["softmax-20260101-000000", "softmax-20260102-000000", "gelu-20260103-000000"]
    for i, name in enumerate(names):
        started = f"2026-01-0{i + 1}T00:00:00+0000"
        with RunStore.create(runs, dataclasses.replace(manifest(), started=started)) as store:
            pass
        store.folder.rename(runs / name)
        os.utime(runs / name, (9 - i, 9 - i))  # the first was looked into last
    assert [p.name for p in list_runs(runs)] == names
    assert find_run(runs, "latest").name == names[-1]
    assert find_run(runs, "gelu").name == names[2]
    assert find_run(runs, names[0]).name == names[0]
    assert find_run(runs, str(runs / names[1])).name == names[1]
    with pytest.raises(RunError, match="several runs begin with 'softmax'"):
        find_run(runs, "softmax")
    with pytest.raises(RunError, match="no run 'nope'"):
        find_run(runs, "nope")
    with pytest.raises(RunError, match="it has none"):
        find_run(tmp_path / "none", "latest")


def test_a_signal_right_after_a_commit_damages_nothing(folder, monkeypatch):
    real = store_module.clear_errors

    @contextlib.contextmanager
    def interrupted(where):
        with real(where):
            yield
        raise KeyboardInterrupt

    with contextlib.closing(RunStore.open(folder)) as store:
        store.begin(3)
        monkeypatch.setattr(store_module, "clear_errors", interrupted)
        with pytest.raises(KeyboardInterrupt):
            store.begin(4)
        monkeypatch.setattr(store_module, "clear_errors", real)
        store.begin(5)
    with contextlib.closing(RunStore.open(folder, write=False)) as store:
        assert [e.data["budget"] for e in store.events() if e.kind == "session"][-3:] == [3, 4, 5]
