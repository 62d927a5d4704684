"""The parts of the runtime that a library's kernels use: CUDA's, C++'s, and none for Triton."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from kagent_sandbox import runtime
from kagent_sandbox.data.language import CPP, CUDA, Language
from kagent_sandbox.runtime.headers import OWN_HEADERS
from kagent_sandbox.syntax import parse

from kagent.export.import_rewrite import as_shipped
from kagent.export.record import LibraryRecord

_ROOT = Path(runtime.__path__[0])
_FIRST = {CPP: ("cpp_kernels", "store"), CUDA: ("cuda_kernels", "structs", "tensor_maps")}
"""Modules that kernels of a language, setup.py and benchmarks ask for; others follow from them."""
_LINE_OF_INIT = re.compile(r"    from \.(\w+) import .*|    \"\w+\": \"(\w+)\",")


def needs_runtime(library: LibraryRecord) -> bool:
    """Whether a kernel of a library is compiled by the runtime, or takes a name from it."""
    sources = [k.source for o in library.operators for k in o.kernels]
    return any(each in _FIRST for each in library.languages) or any(
        as_shipped(s) != s for s in sources
    )


def runtime_files(library: LibraryRecord) -> dict[str, bytes]:
    """Files of a library's _runtime/, by their paths in it.

    Raises:
        UserError: A kernel imports more of kagent than a library has.
    """
    if not needs_runtime(library):
        return {}
    # A Triton kernel that imports the module without using it still finds all of its names.
    modules = sorted(_modules([each for each in library.languages if each in _FIRST] or _FIRST))
    files = {f"{name}.py": (_ROOT / f"{name}.py").read_bytes() for name in modules}
    files["__init__.py"] = "".join(_of_init(modules)).encode()
    if "nvrtc" in modules:
        own = (p for p in sorted(OWN_HEADERS.iterdir()) if p.is_file())
        files |= {f"{OWN_HEADERS.name}/{p.name}": p.read_bytes() for p in own}
    return files


def _modules(languages: Iterable[Language]) -> set[str]:
    """Modules that are imported, by whichever of them, when a language's kernels run."""
    found: set[str] = set()
    waiting = {name for each in languages for name in _FIRST[each]}
    while waiting:
        name = waiting.pop()
        found.add(name)
        waiting |= set(_imports(parse((_ROOT / f"{name}.py").read_text("utf-8")))) - found
    return found


def _imports(tree: ast.Module) -> Iterator[str]:
    """The package's modules that a module imports when it runs: not those for type checkers."""
    checked = [
        n for n in tree.body if isinstance(n, ast.If) and "TYPE_CHECKING" in ast.dump(n.test)
    ]
    left_out = {id(n) for each in checked for n in ast.walk(each)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level == 1 and id(node) not in left_out:
            yield from [node.module] if node.module else [a.name for a in node.names]


def _of_init(modules: list[str]) -> Iterator[str]:
    """Lines of __init__.py without the names of modules that are not there."""
    for line in (_ROOT / "__init__.py").read_text("utf-8").splitlines(keepends=True):
        named = _LINE_OF_INIT.fullmatch(line.rstrip("\n"))
        if named is None or (named[1] or named[2]) in modules:
            yield line
