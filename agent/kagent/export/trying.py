"""What a library's users try it with: tests, and a benchmark. Both need torch and numpy only."""

from __future__ import annotations

from kagent.export.contents import Library
from kagent.export.packaging import names_of
from kagent.export.rendering import render


def trying_files(library: Library) -> dict[str, str]:
    """tests/ and benchmarks/, by their paths in the library."""
    files = {
        "tests/conftest.py": render("test_conftest.py.j2", name=library.name),
        "tests/tolerance.py": render("test_tolerance.py.j2"),
        "tests/harness.py": render("test_harness.py.j2", name=library.name),
        "tests/test_guest.py": render("test_guest.py.j2"),
        "tests/visit.py": render("test_visit.py.j2", name=library.name),
        "benchmarks/bench.py": render("bench.py.j2", name=library.name),
    }
    for operator in library.operators:
        folder = f"tests/tasks/{operator.task}"
        files[f"{folder}/task.toml"] = operator.task_toml
        files[f"{folder}/reference.py"] = operator.reference_py
        files[f"tests/test_{operator.task}.py"] = render(
            "test_operator.py.j2",
            name=library.name,
            task=operator.task,
            function=names_of(operator).function,
        )
    return files
