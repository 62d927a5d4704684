"""A public class's name means one thing in both packages."""

import ast
import re
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = (ROOT / "agent" / "kagent", ROOT / "sandbox" / "kagent_sandbox")
TWICE = {"Task"}
"""`kagent.Task.of` makes, of PyTorch code, a folder of what `data.task.Task` is the record of."""


def test_no_public_class_has_the_name_of_another():
    places = defaultdict(list)
    for package in PACKAGES:
        for path in sorted(package.rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
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
