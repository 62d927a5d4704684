"""Run folders of somebody else: what no kagent wrote is refused in one line, and never followed."""

import json
import os
import sqlite3
import time

import pytest
from asktell_runs import (
    ask,
    copied,
    judge,
    merge,
    reply,
    start,
    tell,
    toy_machine,  # noqa: F401 - a fixture
)
from kagent.asktell.open_asks import named_by_header
from kagent.runs.manifest import find_run, list_runs, read_manifest
from kagent.runs.store import RunStore
from kagent_sandbox.errors import RunError
from stored_events import add, execute

pytestmark = pytest.mark.usefixtures("toy_machine")


@pytest.fixture
def home(tmp_path):
    run = start(tmp_path)
    ask(run, 2)
    tell(run, (0, reply(16, 3)))
    return run


@pytest.fixture
def copy(home):
    return copied(home)


def rows(folder):
    db = sqlite3.connect(folder / "lineage.sqlite")
    found = db.execute("SELECT * FROM events").fetchall()
    db.close()
    return found


def refused(home, copy):
    """The one line with which a copy is refused; home stays as it was."""
    before = rows(home)
    with pytest.raises(RunError) as caught:
        merge(home, copy)
    assert rows(home) == before
    return str(caught.value)


ENDLESS = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n)"


@pytest.mark.parametrize(
    "statement",
    [
        "CREATE TRIGGER t AFTER INSERT ON events BEGIN DELETE FROM events; END",
        f"CREATE VIEW v AS {ENDLESS} SELECT x FROM n",
        "CREATE TABLE more (x)",
        "CREATE INDEX i ON events (lower(data))",
    ],
)
def test_databases_with_programs_are_not_read(home, copy, statement):
    execute(copy, (statement,))
    assert "no database of a run" in refused(home, copy)
    for write in (True, False):
        with pytest.raises(RunError, match="no database of a run"):
            RunStore.open(copy, write=write)


def test_a_view_in_the_events_place_is_not_read(home, copy):
    columns = "x AS seq, 1.0 AS at, 'a' AS kind, '{}' AS data"
    view = f"CREATE VIEW events AS {ENDLESS} SELECT {columns} FROM n"
    execute(copy, ("DROP TABLE events",), (view,))
    assert "no database of a run" in refused(home, copy)


@pytest.mark.parametrize(
    ("kind", "data"),
    [
        ("session", "[]"),
        ("session", '{"budget": "many"}'),
        ("session", '{"budget": NaN}'),
        ("session", "[" * 100_000),
        ("session", b"\xff\xfe"),
        ("recorded", '{"id": 99}'),
        ("dropped", '{"ask": {"a": 1}}'),
        ("told", "{}"),
        ("machine", '{"environment": 7}'),
        ("race", '{"finalists": "\\ud800"}'),
        ("stopped", '{"stop": "\\ud800"}'),
        ("note", '{"text": "\\ud800"}'),
    ],
)
def test_events_that_no_kagent_wrote_are_damage(home, copy, kind, data):
    add(copy, kind, data)
    assert "damaged" in refused(home, copy)


@pytest.mark.parametrize("at", ["yesterday", float("inf"), b"\0"])
def test_times_that_are_none_are_damage(home, copy, at):
    add(copy, "session", '{"budget": 3}', at)
    assert "damaged" in refused(home, copy)


@pytest.mark.parametrize("kernel", ["../../../../etc/passwd", "/etc/passwd", "a\0b", "x" * 5000])
def test_names_of_kernels_lead_nowhere(home, copy, kernel):
    with RunStore.open(copy, write=False) as store:
        row = next(e for e in store.events() if e.kind == "proposed")
    add(copy, "proposed", json.dumps({**row.data, "id": 50, "kernel": kernel}))
    assert "no kernel's id" in refused(home, copy)


def test_links_are_not_followed(home, copy, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("a key")
    judge(copy)
    (copy / "logs" / "0.txt").unlink(missing_ok=True)
    (copy / "logs" / "0.txt").symlink_to(secret)
    assert "link" in refused(home, copy)
    assert not any("a key" in p.read_text() for p in home.rglob("*.txt"))


def test_a_lock_that_is_a_link_is_not_written_through(copy, tmp_path):
    """Whoever writes into a run writes the number of its process into the lock."""
    mine = tmp_path / "mine"
    mine.write_text("notes")
    (copy / "lock").unlink(missing_ok=True)
    (copy / "lock").symlink_to(mine)
    with pytest.raises(RunError, match="lock: a link, where a file was expected"):
        tell(copy, (1, reply(16, 2)))
    assert mine.read_text() == "notes"
    RunStore.open(copy, write=False).close()
    (copy / "lock").unlink()
    os.mkfifo(copy / "lock")
    with pytest.raises(RunError, match="lock: a pipe, where a file was expected"):
        tell(copy, (1, reply(16, 2)))
    RunStore.open(copy, write=False).close()


@pytest.mark.parametrize("name", ["kernels", "prompts", "replies", "logs"])
def test_a_folder_that_is_a_link_is_not_written_through(copy, name, tmp_path):
    mine, own = tmp_path / "mine", copy / name
    if own.is_dir():
        own.rename(mine)
    mine.mkdir(exist_ok=True)
    own.symlink_to(mine)
    before = sorted(mine.iterdir())
    with pytest.raises(RunError, match=f"{name}: a link, where a folder was expected"):
        tell(copy, (1, reply(16, 2)))
    assert sorted(mine.iterdir()) == before


def test_kernels_and_databases_that_are_no_files(home, copy):
    kernel = next((copy / "kernels").iterdir())
    kernel.unlink()
    os.mkfifo(kernel)
    assert "a pipe, where a file was expected" in refused(home, copy)
    (copy / "lineage.sqlite").unlink()
    (copy / "lineage.sqlite").symlink_to(home / "lineage.sqlite")
    with pytest.raises(RunError, match="a link, where a file was expected"):
        RunStore.open(copy, write=False)


@pytest.mark.parametrize("text", ["[" * 100_000, "\xff", '{"format": 2}', "7", '{"task": NaN}'])
def test_manifests_that_are_none(copy, text):
    (copy / "run.json").write_text(text, encoding="latin-1")
    with pytest.raises(RunError):
        RunStore.open(copy, write=False)


def test_a_neighbour_that_is_no_run_stops_nobody(tmp_path):
    """Every command looks at all folders of runs, for their order."""
    deep, pipe = tmp_path / "deep", tmp_path / "pipe"
    for folder in (deep, pipe):
        folder.mkdir()
    (deep / "run.json").write_text("[" * 100_000)
    os.mkfifo(pipe / "run.json")
    assert {p.name for p in list_runs(tmp_path)} == {"deep", "pipe"}
    with pytest.raises(RunError, match="no run 'mine'"):
        find_run(tmp_path, "mine")
    for folder in (deep, pipe):
        with pytest.raises(RunError, match=r"run\.json(: | is damaged)"):
            read_manifest(folder)


def test_finding_which_ask_an_answer_names_is_quick():
    for text in ("\n" * 400_000, "<" * 400_000, "<!-- kagent ask 0" * 40_000, "\n<!--" * 100_000):
        began = time.process_time()
        assert named_by_header(text) is None
        assert time.process_time() - began < 5, "linear takes a tenth of a second, quadratic hours"
    assert named_by_header(f"<!-- kagent ask {'9' * 5000} of run ab -->") is None
