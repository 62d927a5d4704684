"""What a library's users try it with: tests, and a benchmark. Both need torch and numpy only.

The tests are run before a library is written, too.
"""

from __future__ import annotations

from collections.abc import Mapping

from kagent_sandbox.errors import UserError
from kagent_sandbox.launch.cache import cache_folder
from kagent_sandbox.library_tests import run_tests

from kagent.disk import write_file
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


def own_tests(name: str, files: Mapping[str, bytes], *, gpu: bool) -> str:
    """What is wrong with a library by its own tests, with where they say more; "" if nothing is.

    Args:
        name: Of its package.
        files: Of the library, by their paths in it; it need not be on the disk.
        gpu: Whether its tests may use the GPU.

    Raises:
        UserError: What they printed cannot be kept.
        ChildDied, ConfinementError: They cannot be run here.
    """
    tested = run_tests(name, files, gpu=gpu)
    if not tested.why:
        return ""
    log = cache_folder() / "export" / f"{name}-tests.log"
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        write_file(log, tested.log)
    except OSError as e:
        raise UserError(f"{log}: cannot be written ({e.strerror})") from None
    return f"the library's own tests do not pass: {tested.why} (what they printed: {log})"
