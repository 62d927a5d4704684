"""The file that puts a library's kernels into a program: torch and the library, without kagent."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kagent_sandbox.device.table import available
from kagent_sandbox.errors import UserError
from kagent_sandbox.syntax import parse

from kagent.export.generic import needs_reference
from kagent.export.packaging import names_of
from kagent.export.reading import (
    PACKAGES,
    is_library,
    kinds_of,
    no_device_text,
    read_library,
)
from kagent.workload.sites import Rest, Site


@dataclass(frozen=True, slots=True)
class Library:
    """An exported library, as a program imports it."""

    name: str  # of its module
    file: Path  # of its module: with another file of that name installed, this one is taken
    operators: tuple[str, ...]  # its functions
    known: bool  # they have the signatures of the built-in tasks' operators: not in a single file
    regions: Mapping[str, str] = field(default_factory=dict)
    """Tasks of the functions that are regions of a model's graphs: their references are nothing
    but ATen operations."""


def open_library(path: Path) -> Library:
    """Read what a library offers.

    Args:
        path: Folder of a library, or the file of `kagent export --single-file`.

    Raises:
        UserError: It is neither.
    """
    if is_library(path):
        disk = read_library(path)
        names = tuple(names_of(o).function for o in disk.library.operators)
        regions = {
            names_of(o).function: o.task
            for o in disk.library.operators
            if needs_reference(o.operator_py) and is_region(o.reference_py)
        }
        return Library(
            disk.library.name, _init(path, disk.library.name), names, known=True, regions=regions
        )
    if path.suffix == ".py" and path.is_file():
        return Library(path.stem, path.resolve(), _offered(path), known=False)
    raise UserError(
        f"{path}: no exported library: expected a folder of kagent export, or TASK.py of kagent "
        "export --single-file"
    )


def require_device(paths: Sequence[Path]) -> None:
    """Make sure that this machine has a device for a kernel of some library.

    Args:
        paths: As `open_library` takes them. A single file is not looked into.

    Raises:
        UserError: It has none.
    """
    disks = [read_library(path) for path in paths if is_library(path)]
    operators = [o for disk in disks for o in disk.library.operators]
    kinds = {kind for o in operators for kind in kinds_of(o)}
    if len(disks) == len(paths) and not any(available(kind) for kind in kinds):
        raise UserError(no_device_text(disks[0], "this machine"))


def is_region(reference: str) -> bool:
    """Whether a task's `eager` calls ATen operations and no other function of torch.

    Args:
        reference: Text of its reference.py.
    """
    for node in parse(reference).body:
        if isinstance(node, ast.FunctionDef) and node.name == "eager":
            called = [ast.unparse(n.func) for n in ast.walk(node) if isinstance(n, ast.Call)]
            of_aten = [name for name in called if name.startswith("aten.")]
            others = [n for n in called if n.startswith(("torch.", "F.", "nn."))]
            return bool(of_aten) and not others
    return False


def _init(path: Path, name: str) -> Path:
    return (path / PACKAGES / name / "__init__.py").resolve()


def _offered(path: Path) -> tuple[str, ...]:
    try:
        tree = parse(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError) as e:
        raise UserError(f"{path}: cannot be read ({e})") from None
    for node in tree.body:
        match node:
            case ast.Assign([ast.Name("__all__")], ast.List(elements)):
                return tuple(str(e.value) for e in elements if isinstance(e, ast.Constant))
    raise UserError(f"{path}: it has no __all__: expected TASK.py of kagent export --single-file")


def patch_text(
    libraries: Sequence[Library],
    sites: Sequence[Site],
    notes: Sequence[str] = (),
    rest: Rest = "operations",
) -> str:
    """Write the file.

    Args:
        libraries: The libraries of the sites' operators.
        sites: What is replaced.
        notes: Lines for its docstring: what was measured.
        rest: Of graphs in which regions are replaced.
    """
    owners: Mapping[str, Library] = {n: lib for lib in libraries for n in lib.operators}
    used = [lib for lib in libraries if any(owners[s.operator] is lib for s in sites)]
    imports = "\n".join(f"    _library({lib.name!r}, {str(lib.file)!r})," for lib in used)
    operators = dict.fromkeys(s.operator for s in sites)
    taken = "\n".join(
        f"{name} = _LIBRARIES[{used.index(owners[name])}].{name}" for name in operators
    )
    functions = [s for s in sites if not s.task]
    replacements = "\n\n".join(_replacement(i, site) for i, site in enumerate(functions))
    table = "\n".join(
        f"    {s.name!r}: ({s.module!r}, {s.attribute!r}, _site_{i}),"
        for i, s in enumerate(functions)
    )
    regions = "\n".join(
        f"    {s.name!r}: (_eager({used.index(owners[s.operator])}, {s.task!r}), "
        f"lambda _: {s.operator}),"
        for s in sites
        if s.task
    )
    about = "".join(f"- {note}\n" for note in notes)
    return _TEXT.format(
        about=about and f"Measured when it was made:\n\n{about}\n".replace("\\", "/"),
        imports=imports,
        taken=taken,
        replacements=replacements,
        table=table,
        capture=_captured() if regions else "",
        regions=regions and _REGIONS.format(regions=regions, rest=rest),
        parameters="sites=None, rest=REST" if regions else "sites=None",
        about_rest=_ABOUT_REST if regions else "",
        enable=_ENABLE if regions else "",
        disable="    release()\n" if regions else "",
    )


def _captured() -> str:
    """The text of `captured`, without its docstring and first import."""
    lines = Path(__file__).with_name("captured.py").read_text(encoding="utf-8")
    return lines.split("from __future__ import annotations\n", 1)[1]


def _replacement(number: int, site: Site) -> str:
    lines = [f"def _site_{number}(original):", f"    def replacement({site.parameters}):"]
    if site.condition:
        lines += [f"        if {site.condition}:", f"            return {site.call}"]
        lines.append(f"        return original({_passed(site.parameters)})")
    else:
        lines.append(f"        return {site.call}")
    return "\n".join([*lines, "", "    return replacement", ""])


def _passed(parameters: str) -> str:
    """Arguments that pass a function's own parameters on."""
    function = ast.parse(f"def f({parameters}): ...").body[0]
    assert isinstance(function, ast.FunctionDef)
    args = function.args
    found = [a.arg for a in (*args.posonlyargs, *args.args)]
    found += [f"*{args.vararg.arg}"] if args.vararg else []
    found += [f"{a.arg}={a.arg}" for a in args.kwonlyargs]
    found += [f"**{args.kwarg.arg}"] if args.kwarg else []
    return ", ".join(found)


_TEXT = '''"""Kernels of a library in the places of other functions; written by kagent patch.

    import PATCH        # this file
    PATCH.enable()      # from here on; PATCH.disable() takes it back

{about}A kernel runs where the library's own rules name one for the call. Everything else goes to
the function that was there before.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import types

import torch


def _library(name, file):
    """The library of the file, under its name unless that is another's; installed if it moved."""
    if not os.path.isfile(file):
        return importlib.import_module(name)
    known = importlib.util.find_spec(name)
    if known is not None and known.origin == file:
        return importlib.import_module(name)
    name = name if known is None else f"_patched_{{name}}"
    folder = [os.path.dirname(file)] if file.endswith("__init__.py") else None
    spec = importlib.util.spec_from_file_location(name, file, submodule_search_locations=folder)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_LIBRARIES = (
{imports}
)
{taken}


{replacements}
{capture}

SITES = {{
{table}
}}
"""Replacements: module, name in it, and the function that makes the replacement."""
{regions}
_replaced = []  # (owner, name, what it had itself or None), the last one first


def enable({parameters}):
    """Put the kernels in.

    Args:
        sites: Names of replacements; all of them where it is None.
{about_rest}    """
    disable()
{enable}    for site in SITES if sites is None else sites:
        module, path, make = SITES[site]
        owner = importlib.import_module(module) if module != "__main__" else sys.modules[module]
        *parents, name = path.split(".")
        for parent in parents:
            owner = getattr(owner, parent)
        original = getattr(owner, name)
        replacement = make(original)
        _set(owner, name, replacement)
        for other in list(sys.modules.values()):  # `from torch import softmax`
            if isinstance(other, types.ModuleType) and not _is_torchs(other.__name__):
                for alias, value in list(vars(other).items()):
                    if value is original and not alias.startswith("__"):
                        _set(other, alias, replacement)


def disable():
    """Take them out."""
{disable}    for owner, name, before in reversed(_replaced):
        if before is None:
            delattr(owner, name)
        else:
            setattr(owner, name, before)
    _replaced.clear()


def _set(owner, name, value):
    _replaced.append((owner, name, vars(owner).get(name)))
    setattr(owner, name, value)


def _is_torchs(name):
    own = ("torch", *(library.__name__ for library in _LIBRARIES))
    return name.partition(".")[0] in own


def _keep_originals():
    """Give the libraries a torch of their own: what they call is what was there before."""
    own = {{}}
    for name in ("torch", "torch.nn", "torch.nn.functional"):
        module = importlib.import_module(name)
        own[module] = copy = types.ModuleType(name)
        vars(copy).update(vars(module))
    names = list(own.values())
    names[0].nn, names[1].functional = names[1], names[2]
    for library in _LIBRARIES:
        for name, module in list(sys.modules.items()):
            if name == library.__name__ or name.startswith(library.__name__ + "."):
                for alias, value in list(vars(module).items()):
                    if isinstance(value, types.ModuleType) and value in own:
                        setattr(module, alias, own[value])


_keep_originals()
'''

_REGIONS = '''

def _eager(library, task):
    """Operations of a region: the library's own way where it has no kernel."""
    name = f"{{_LIBRARIES[library].__name__}}.operators._{{task}}_reference"
    return importlib.import_module(name).eager


REGIONS = {{
{regions}
}}
"""Regions of graphs: their operations, and the function that makes the replacement."""
REST = {rest!r}
'''
_ABOUT_REST = """        rest: Of captured graphs: "operations" one by one, or "inductor": compiled.
"""
_ENABLE = """    names = [*REGIONS, *SITES] if sites is None else sites
    found = {}
    for name in [n for n in names if n in REGIONS]:
        function, make = REGIONS[name]
        region = Pattern(name, function)
        replacement = make(region.call(function))
        found[name] = region, replacement
    if found or not names:  # without a name: graphs as they are captured
        capture(found, rest)
    sites = [n for n in names if n not in REGIONS]
"""
