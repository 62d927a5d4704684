"""What models, files and other people's runs say is shown as text: it steers no terminal."""

import io
import json
import unicodedata

import commands
import pytest
from asktell_runs import (
    ask,
    copied,
    judge,
    reply,
    start,
    tell,
    toy_machine,  # noqa: F401 - a fixture
)
from kagent.llm.claims import hypothesis
from kagent.runs.store import read_history
from kagent.ui.terminal import Terminal
from rich.text import Text
from stored_events import execute

pytestmark = pytest.mark.usefixtures("toy_machine")

EVIL = "wide \x1b]8;;http://x\x1b\\\\loads\x1b[2J\x9b31m \u202egnp.exe\u200b [link=http://x][red]a[/red]"


def is_text(shown):
    return all(c == "\n" or not unicodedata.category(c).startswith("C") for c in shown)


@pytest.fixture
def run(tmp_path):
    """A run in which a model and a file's name say what they should not."""
    folder = start(tmp_path)
    ask(folder, 2)
    tell(folder, (0, reply(16, 3, hypothesis=EVIL)))
    return folder


def shown(monkeypatch, capsys, *words):
    ended = commands.run(monkeypatch, capsys, *words)
    return ended.out + ended.err


def test_what_models_say_is_text(run, monkeypatch, capsys):
    judge(run)
    for words in (
        ("show", run),
        ("show", run, 2),
        ("ask", run, "--list"),
        ("top", "--runs", run.parent),
    ):
        text = shown(monkeypatch, capsys, *words)
        assert is_text(text), words
    assert "loads" in shown(monkeypatch, capsys, "show", run, 2)


def test_runs_of_others_are_text(run, monkeypatch, capsys):
    """Their events can hold what no reply can."""
    copy = copied(run, "copy \x1b[2J")
    judge(copy)
    changes = []
    for event in read_history(copy)[1].events:
        value = dict(event.data)
        if "hypothesis" in value:
            value |= {"hypothesis": EVIL, "name": f"a{EVIL}"}
        sql = "UPDATE events SET data = ? WHERE seq = ?"
        changes.append((sql, json.dumps(value), event.seq))
    execute(copy, *changes)
    manifest = json.loads((copy / "run.json").read_text())
    manifest |= {"started": EVIL, "version": EVIL, "target": EVIL}
    (copy / "run.json").write_text(json.dumps(manifest))
    for words in (("show", copy), ("show", copy, 2), ("runs", "--runs", copy.parent)):
        assert is_text(shown(monkeypatch, capsys, *words)), words


def test_hypotheses_in_prompts_are_text():
    assert is_text(hypothesis([f"Hypothesis: {EVIL}"]))


def test_a_terminal_keeps_its_own_styles():
    out = io.StringIO()
    console = Terminal(file=out, force_terminal=True, color_system="standard", width=60)
    console.print(Text("bad \x1b[2J\x07\u202e\ud800 a\u00a0b", style="red"), Text("é ✓ 数"))
    shown = r"bad \x1b[2J\u202e\ud800 a\xa0b"
    assert out.getvalue() == f"\x1b[31m{shown}\x1b[0m é ✓ 数\n"
