"""A user's own templates and cards, and the mistakes in them."""

import h100_run
import pytest
from kagent.prompting import Prompter
from kagent.prompting.cards import read_card
from kagent.tasks import find_task
from kagent_sandbox.errors import UserError

CARD = """+++
title = "Mine"
bound = ["memory"]
languages = ["triton"]
+++
## When it pays

Always.

## Triton

Like this.

## What goes wrong

Nothing.
"""


def prompter(folder):
    return Prompter(find_task("softmax"), "gpu", "sm_90a", h100_run.RUN_FACTS, folder)


def test_single_files_are_replaced_and_the_rest_is_kagents_own(tmp_path):
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "ledger.md.j2").write_text("# Mine: {{ ledger | length }} tries\n")
    (tmp_path / "cards").mkdir()
    (tmp_path / "cards" / "mine.md").write_text(CARD)
    (tmp_path / "cards" / "waves.md").write_text(CARD)
    mine = prompter(tmp_path)
    prompt = mine.write(h100_run.ask(), "mine")
    assert "# Mine: 4 tries" in prompt.user
    assert "# The technique to try: Mine" in prompt.user
    assert "# The parent: #3" in prompt.user
    assert "Always." in mine.write(h100_run.ask(), "waves").user
    assert "mine" in mine.cards


def test_a_template_that_was_changed_is_read_anew(tmp_path):
    for text in ("before", "after"):
        (tmp_path / "structure.md.j2").write_text(text)
        assert prompter(tmp_path).write(h100_run.ask()).user == f"{text}\n"


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("structure.md.j2", "a\nb {% if %}\n", "structure.md.j2:2: Expected an expression"),
        (
            "structure.md.j2",
            "a\n\n{{ parrent.id }}",
            "structure.md.j2:3: UndefinedError: 'parrent'",
        ),
        ("structure.md.j2", "{{ parent.nothing }}", "structure.md.j2:1: UndefinedError"),
        ("structure.md.j2", "x\n{{ 1 / 0 }}", "structure.md.j2:2: ZeroDivisionError"),
        ("structure.md.j2", '{% include "parts/none.md.j2" %}', "no template parts/none.md.j2"),
        ("parts/task.md.j2", "{{ about.arguments + 1 }}", "parts/task.md.j2:1: TypeError"),
    ],
)
def test_a_mistake_in_a_template_is_reported_with_file_and_line(tmp_path, name, text, said):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    with pytest.raises(UserError) as e:
        prompter(tmp_path).write(h100_run.ask())
    assert said in str(e.value)
    assert str(tmp_path) in str(e.value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("+++\ntitle", "title"), "begins with its front matter"),
        (('title = "Mine"', "title = Mine"), "front matter: Invalid value"),
        (('title = "Mine"\n', ""), "front matter: title: Field required"),
        (('"memory"', '"bandwidth"'), "front matter: bound: Input should be 'memory'"),
        (('bound = ["memory"]', "bound = []"), "front matter: bound:"),
        (("+++\n## When", "hue = 1\n+++\n## When"), "front matter: hue: Extra inputs"),
        (("## Triton", "## CUDA"), "lacks a section ## Triton"),
        (("## What goes wrong", "## Pitfalls"), "lacks a section ## What goes wrong"),
        (("Like this.", "Like this.\n\n## C++\n\nOr so."), "section ## C++ is none of"),
        (("Nothing.", ""), "lacks a section ## What goes wrong"),
    ],
)
def test_a_mistake_in_a_card_is_reported(tmp_path, change, said):
    (tmp_path / "cards").mkdir()
    path = tmp_path / "cards" / "mine.md"
    assert change[0] in CARD
    path.write_text(CARD.replace(*change))
    with pytest.raises(UserError) as e:
        prompter(tmp_path)
    assert said in str(e.value)
    assert str(path) in str(e.value)


def test_a_card_that_is_no_text_is_reported(tmp_path):
    path = tmp_path / "mine.md"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match=r"mine\.md: "):
        read_card(path)


def test_a_folder_that_is_not_there_is_reported(tmp_path):
    with pytest.raises(UserError, match=r"none: no such folder: --prompts names"):
        prompter(tmp_path / "none")


def test_nothing_is_escaped(tmp_path):
    (tmp_path / "structure.md.j2").write_text("{{ '<T> & \"x\"' }}\n")
    assert prompter(tmp_path).write(h100_run.ask()).user == '<T> & "x"\n'


@pytest.mark.parametrize(
    "expression",
    [
        "cycler.__init__.__globals__.os.mkdir(made)",
        "''.__class__.__mro__[1].__subclasses__()",
        "('{0.__class__.__init__.__globals__}').format(task)",
        "task.folder.joinpath(made).mkdir()",
        "(task.folder / made).write_text('')",
        "ledger.append(1)",
    ],
)
def test_a_template_runs_nothing(expression, tmp_path):
    """Its folder may be somebody else's: a kagent.toml of a cloned repository names it."""
    made = tmp_path / "made"
    (tmp_path / "structure.md.j2").write_text(f"{{% set made = '{made}' %}}{{{{ {expression} }}}}")
    with pytest.raises(UserError, match=r"structure.md.j2:1: SecurityError: "):
        prompter(tmp_path).write(h100_run.ask())
    assert not made.exists()
