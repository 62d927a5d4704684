"""What happens to a run's log on a disk that does not keep it."""

import contextlib
import json
import os
import shutil
import sqlite3
from pathlib import Path

import commands
import pytest
from kagent.runs import store as store_module
from kagent.runs.store import RunStore, read_history
from kagent.runs.verify import verify
from kagent_sandbox.errors import RunError
from simulated_evolution import stored_run

EVERY = 61  # bits; every bit takes a minute, and 61 is prime to all sizes of SQLite's


@pytest.fixture
def folder(tmp_path):
    return stored_run(tmp_path, budget=3)


def values(folder):
    """All that a reader gets of a run."""
    store, history = read_history(folder)
    found = [(e.seq, e.at, e.kind, e.data) for e in history.events]
    return store.manifest, found, [*history.lineage], history.pending, history.stop


def change(folder, *statements):
    with contextlib.closing(sqlite3.connect(folder / "lineage.sqlite")) as db, db:
        for sql in statements:
            db.execute(sql)


def refused(folder):
    with pytest.raises(RunError) as caught:
        RunStore.open(folder)
    text = str(caught.value)
    assert "\n" not in text
    return text


@pytest.fixture
def _replayed_once(monkeypatch):
    """A run of the same events is replayed once: that is most of the time of reading a log."""
    replay, known = store_module.replay_events, []

    def once(folder, run, events):
        for given, history in known:
            if given == (folder, run, events):
                return history
        known.append(((folder, run, events), replay(folder, run, events)))
        return known[-1][1]

    monkeypatch.setattr(store_module, "replay_events", once)


@pytest.mark.nightly
@pytest.mark.usefixtures("_replayed_once")
def test_no_bit_of_the_log_can_flip_to_another_value(folder):
    path = folder / "lineage.sqlite"
    whole, expected = path.read_bytes(), values(folder)
    reported = 0
    with path.open(
        "r+b", buffering=0
    ) as file:  # writing all of it anew would take most of the time
        for bit in range(0, 8 * len(whole), EVERY):
            at, byte = bit // 8, whole[bit // 8]
            os.pwrite(file.fileno(), bytes([byte ^ 1 << bit % 8]), at)
            try:
                assert values(folder) == expected, f"bit {bit} flipped, and nobody noticed"
            except RunError:
                reported += 1
                found = verify(folder).findings
                assert found, f"bit {bit}: read, it is damaged; verified, it is not"
            assert path.stat().st_size == len(whole)
            os.pwrite(file.fileno(), bytes([byte]), at)
    assert reported > 0
    assert path.read_bytes() == whole


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE events SET data = replace(data, '\"budget\":3', '\"budget\":4')",
        "UPDATE events SET at = at + 1 WHERE seq = 1",
        "UPDATE events SET kind = 'note' WHERE seq = 1",
        "UPDATE events SET checksum = '0123456789abcdef' WHERE seq = 1",
        "UPDATE events SET data = CAST(data AS BLOB) WHERE seq = 1",
    ],
)
def test_a_changed_event_is_named_with_what_to_do(folder, statement):
    change(folder, statement)
    text = refused(folder)
    assert f"event {2 if 'budget' in statement else 1} is damaged" in text
    assert "Put lineage.sqlite back from a copy, or start a new run" in text


def test_missing_and_exchanged_events_are_noticed(folder, tmp_path):
    last = read_history(folder)[1].events[-1].seq
    for number, (statements, said) in enumerate(
        [
            (["DELETE FROM events WHERE seq = 1"], "event 2 is damaged"),
            (["DELETE FROM events WHERE seq = 2"], "event 3 is damaged: it follows event 1"),
            ([f"DELETE FROM events WHERE seq = {last}"], f"{last} events were written"),
            (["DELETE FROM events"], f"{last} events were written"),
            (
                [
                    "UPDATE events SET seq = 0 WHERE seq = 3",
                    "UPDATE events SET seq = 3 WHERE seq = 2",
                    "UPDATE events SET seq = 2 WHERE seq = 0",
                ],
                "event 2 is damaged",
            ),
        ]
    ):
        copy = tmp_path / f"copy{number}"
        shutil.copytree(folder, copy)
        change(copy, *statements)
        assert said in refused(copy)


def test_events_written_later_continue_the_chain(folder):
    for _ in range(2):
        with RunStore.open(folder) as store:
            store.begin(5)
            store.append("note", {"text": "é"})
            assert not verify(folder).findings  # while it is being written
    assert [e.kind for e in read_history(folder)[1].events][-4:] == 2 * ["session", "note"]


def old(tmp_path):
    """A run as it shipped before events had checksums."""
    copy = tmp_path / "old"
    shutil.copytree(Path(__file__).parents[3] / "runs" / "softmax-ask-tell", copy)
    return copy


def test_a_run_without_checksums_is_read_and_continued_without(tmp_path, monkeypatch, capsys):
    folder = old(tmp_path)
    with RunStore.open(folder) as store:
        before = len(store.history().events)
        store.append("note", {})
    assert len(read_history(folder)[1].events) == before + 1
    said = commands.run(monkeypatch, capsys, "verify", folder)
    assert said.code == 0
    assert "events have no checksums (a run of an earlier version)" in said.out


def test_verify_says_that_all_is_as_it_was_written(folder, monkeypatch, capsys):
    said = commands.run(monkeypatch, capsys, "verify", folder)
    assert said.code == 0
    assert said.out.strip().endswith("all is as it was written")
    assert len(said.out.strip().splitlines()) == 1


def test_verify_has_a_line_for_all_that_is_damaged(folder, monkeypatch, capsys):
    last = read_history(folder)[1].events[-1].seq
    change(folder, f"UPDATE events SET at = at + 1 WHERE seq IN (1, {last})")
    kernels = sorted((folder / "kernels").iterdir())
    kernels[0].write_text("x = 1\n")
    kernels[1].unlink()
    said = commands.run(monkeypatch, capsys, "verify", folder)
    assert said.code == RunError.exit_code
    *lines, end = said.out.strip().splitlines()
    assert "event 1 is damaged" in lines[0]
    assert f"event {last} is damaged" in lines[1]
    assert any("changed after it was stored" in line for line in lines)
    assert any("is missing: put it back" in line for line in lines)
    assert len(lines) == 4
    assert end.endswith(" 4 findings")
    found = commands.run(monkeypatch, capsys, "verify", folder, "--json")
    assert found.code == RunError.exit_code
    assert '"checksums": true' in found.out
    kernels[0].unlink()
    (folder / "lineage.sqlite").unlink()
    assert commands.run(monkeypatch, capsys, "verify", folder).out.strip().endswith(" 1 finding")


def test_verify_notices_that_run_json_was_changed(folder):
    path = folder / "run.json"
    text = path.read_text()
    path.write_text(json.dumps(json.loads(text) | {"answered_by": "a person"}))
    assert verify(folder).findings == ()
    path.write_text(text.replace('"seed": 0', '"seed": 1'))
    assert verify(folder).findings == (f"{path}: changed after it was stored",)
    path.write_text(path.read_text().replace('"task"', '"tsak"'))
    (finding,) = verify(folder).findings
    assert finding.startswith(f"{path}: ")


@pytest.mark.parametrize("missing", ["lineage.sqlite", "run.json"])
def test_verify_of_a_folder_that_is_no_whole_run(folder, monkeypatch, capsys, missing):
    (folder / missing).unlink()
    said = commands.run(monkeypatch, capsys, "verify", folder)
    assert said.code == RunError.exit_code
    if missing == "lineage.sqlite":
        assert "lineage.sqlite is missing" in said.out
    else:
        assert "no run" in said.err
