"""A public class's name means one thing in both packages."""

import ast
import functools
import re
from collections import defaultdict
from pathlib import Path

from kagent_sandbox.data.language import LANGUAGES

ROOT = Path(__file__).parents[1]
PACKAGES = (ROOT / "agent" / "kagent", ROOT / "sandbox" / "kagent_sandbox")
TWICE = {"Task"}
"""`kagent.Task.of` makes, of PyTorch code, a folder of what `data.task.Task` is the record of."""


@functools.cache
def nodes_of(path: Path) -> list[ast.AST]:
    """All nodes of a file, which several tests look at."""
    return list(ast.walk(ast.parse(path.read_text())))


def test_no_public_class_has_the_name_of_another():
    places = defaultdict(list)
    for package in PACKAGES:
        for path in sorted(package.rglob("*.py")):
            for node in nodes_of(path):
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    places[node.name].append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert len(places) > 500
    again = {name: where for name, where in places.items() if len(where) > 1}
    assert again.keys() == TWICE, again


RIDDLE = re.compile(r'"""(What|Which|Who|How|Where|Why|Of|Those)\b')


def test_docstrings_begin_with_a_verb_or_a_noun():
    """No "What a run has used up": "Budget that a run has used"."""
    found = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for package in PACKAGES
        for path in sorted(package.rglob("*.py"))
        for line in path.read_text().splitlines()
        if RIDDLE.match(line.lstrip())
    ]
    assert found == []


def compared(folder: Path) -> list[tuple[str, object]]:
    """Texts that something is compared with, each with its file."""
    return [
        (str(path.relative_to(folder)), part.value)
        for path in sorted(folder.rglob("*.py"))
        for node in nodes_of(path)
        if isinstance(node, ast.Compare)
        for side in (node.left, *node.comparators)
        for part in ast.walk(side)
        if isinstance(part, ast.Constant) and isinstance(part.value, str)
    ]


def test_languages_differ_by_their_records_alone():
    """Nothing asks whether a language is this or that one ("cuda" is a device's name, too)."""
    names = LANGUAGES.keys() - {"cuda"}
    found = {file for package in PACKAGES for file, text in compared(package) if text in names}
    assert found == {
        "fleet/ray_fleet.py",  # versions of the package triton
        "runtime/store.py",  # which exported libraries carry without the records
    }


def test_the_judge_asks_for_no_kind_of_device():
    found = {file for file, text in compared(PACKAGES[1] / "judge") if text in ("cpu", "gpu")}
    # They stand in for a GPU on a CPU, and look at the other kind's cases.
    assert found == {"check/task_checker.py", "check/wrong_results.py", "task_check.py"}
