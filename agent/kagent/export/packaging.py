"""Packaging of a library: for pip, and for Hugging Face `kernels`.

Both take the package from build/torch-universal/NAME. pip compiles the C++ kernels when it builds
it (setup.py). `kernels` loads it under a name of its own; it reads metadata.json beside the
package, and finds layers in `layers`.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources

from kagent_sandbox.data.language import CUDA
from kagent_sandbox.errors import UserError
from kagent_sandbox.runtime.errors import TOOLKIT
from kagent_sandbox.syntax import parse

from kagent.export.dispatch_table import repeats
from kagent.export.generic import needs_reference
from kagent.export.reading import PACKAGES
from kagent.export.record import LibraryRecord, OperatorRecord
from kagent.export.runtime_files import needs_runtime
from kagent.export.templating import digest, listed, render

_TORCH = "torch>=2.11"
_BACKENDS = {"cpu": "cpu", "gpu": "cuda"}  # kinds of devices, as Hugging Face calls them
_CUDA = tuple(f"{package}>=13" for package in TOOLKIT)


@dataclass(frozen=True, slots=True)
class Names:
    """Public names of an operator's module: a function, modules, and layers for `kernels`."""

    task: str
    function: str
    signature: str  # of the function: softmax(input, dim=-1)
    public: tuple[str, ...]
    layers: tuple[str, ...]
    gradient: bool  # whether the function has one

    @property
    def modules(self) -> list[str]:
        """Names of `nn.Module` classes."""
        return [n for n in self.public if n[0].isupper()]


def packaging_files(library: LibraryRecord) -> dict[str, str]:
    """All files of this kind, by their paths in the library."""
    package = f"{PACKAGES}/{library.name}"
    offered = [names_of(o) for o in library.operators]
    layers = sorted(layer for n in offered for layer in n.layers)
    exported = sorted([*(name for n in offered for name in n.public), "__version__", "layers"])
    kinds = {each.kind for each in library.languages}
    backends = [name for kind, name in _BACKENDS.items() if kind in kinds]
    needed = dict.fromkeys(p for each in library.languages for p in each.requires)
    return {
        "pyproject.toml": render(
            "pyproject.toml.j2",
            name=library.name,
            version=library.version,
            description=f"Verified kernels: {listed([n.function for n in offered])}",
            dependencies=[_TORCH, *needed],
            cuda=_CUDA if CUDA in library.languages else (),
            packages=PACKAGES,
        ),
        "setup.py": render("setup.py.j2", name=library.name, packages=PACKAGES),
        "MANIFEST.in": render("manifest.in.j2", packages=PACKAGES),
        ".gitignore": f"__pycache__/\n*.egg-info/\ndist/\n/{PACKAGES}/*/binaries/\n",
        "LICENSE": resources.files("kagent.export").joinpath("templates/LICENSE").read_text(),
        "README.md": render(
            "readme.md.j2",
            library=library,
            offered=offered,
            cuda=CUDA in library.languages,
            unordered=[o.task for o in library.operators if not all(map(repeats, o.kernels))],
        ),
        "CHANGELOG.md": render("changelog.md.j2", history=library.history),
        f"{package}/_about.py": render(
            "about.py.j2",
            name=library.name,
            version=library.version,
            namespace=f"{library.name}_{digest(library)}",
        ),
        f"{package}/__init__.py": render(
            "init.py.j2", library=library, offered=offered, exported=exported
        ),
        f"{package}/layers.py": render("layers.py.j2", offered=offered, exported=layers),
        f"{package}/operators/__init__.py": '"""Functions and modules for users."""\n',
        f"{package}/kernels/__init__.py": '"""Kernels, as they were judged."""\n',
        f"{package}/py.typed": "",
        f"{PACKAGES}/metadata.json": _metadata(library, backends),
        **{
            f"{package}/operators/_{o.task}_reference.py": o.reference_py
            for o in library.operators
            if needs_reference(o.operator_py)
        },
    }


def _metadata(library: LibraryRecord, backends: list[str]) -> str:
    # No `archs`: the operators fall back on torch, so that no device is refused.
    backend = "cuda" if "cuda" in backends else "cpu"
    data = {
        "id": f"_{library.name}_{backend}_{digest(library)}",
        "name": _hub_name(library),
        "version": _hub_version(library),
        "license": "apache-2.0",
        "python-depends": [],
        "backend": {"type": backend},
    }
    return json.dumps(data, indent=2) + "\n"


def _hub_name(library: LibraryRecord) -> str:
    """Name of the package as `kernels` wants it: with dashes, where the package has underscores."""
    return library.name.replace("_", "-")


def _hub_version(library: LibraryRecord) -> int:
    """The number of an interface: what comes before the first dot, but never 0."""
    return max(1, int(library.version.partition(".")[0]))


# -- what the modules of operators offer ----------------------------------------------------------


def names_of(operator: OperatorRecord) -> Names:
    """Read a module's public names from its text: `__all__`, and the keys of `LAYERS`.

    Raises:
        UserError: One of them is missing, or no plain list.
    """
    assigned = dict(_assignments(operator.operator_py))
    public = _strings(assigned.get("__all__"))
    layers = assigned.get("LAYERS")
    keys = layers.keys if isinstance(layers, ast.Dict) else None
    named = [k.value for k in keys or () if isinstance(k, ast.Constant)]
    functions = [n for n in sorted(public) if n[0].islower()]
    if not functions or keys is None or len(named) != len(keys):
        raise UserError(
            f"operator.py of {operator.task} must have __all__ = [...] with the name of a "
            'function, and LAYERS = {"Name": Name}, both written out'
        )
    return Names(
        operator.task,
        functions[0],
        _signature(operator.operator_py, functions[0]),
        tuple(sorted(public)),
        tuple(str(n) for n in named),
        _has_gradient(operator.operator_py),
    )


def _has_gradient(text: str) -> bool:
    """Whether a module gives an operator its backward pass."""
    calls = (n for n in ast.walk(parse(text)) if isinstance(n, ast.Call))
    return any(k.arg == "backward" for call in calls for k in call.keywords)


def _signature(text: str, function: str) -> str:
    """A function's parameters as a person would write them, without types."""
    for node in parse(text).body:
        if isinstance(node, ast.FunctionDef) and node.name == function:
            args = node.args
            for arg in (*args.posonlyargs, *args.args, *args.kwonlyargs):
                arg.annotation = None
            return f"{function}({ast.unparse(args)})"
    return f"{function}(...)"


def _assignments(text: str) -> Mapping[str, ast.expr]:
    found: dict[str, ast.expr] = {}
    for node in parse(text).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            found[node.targets[0].id] = node.value
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value:
            found[node.target.id] = node.value
    return found


def _strings(node: ast.expr | None) -> list[str]:
    elements = node.elts if isinstance(node, ast.List | ast.Tuple) else []
    return [e.value for e in elements if isinstance(e, ast.Constant) and isinstance(e.value, str)]


def refuse_collisions(operators: Iterable[OperatorRecord]) -> None:
    """Refuse operators that offer something by one name.

    Raises:
        UserError: Two do, one offers what every library has, or does not say what it offers.
    """
    offered = [names_of(o) for o in operators]
    for kind in ("public", "layers"):
        owners = {"layers": "every library", "__version__": "every library"}
        for names in offered:
            for name in getattr(names, kind):
                other = owners.setdefault(name, names.task)
                if other != names.task:
                    raise UserError(
                        f"both {other} and {names.task} have a {name}: export them into two "
                        "libraries"
                    )


def trying_files(library: LibraryRecord) -> dict[str, str]:
    """tests/ and benchmarks/, by their paths in the library."""
    files = {
        "tests/conftest.py": render("test_conftest.py.j2", name=library.name, packages=PACKAGES),
        "tests/tolerance.py": render("test_tolerance.py.j2"),
        "tests/harness.py": render("test_harness.py.j2", name=library.name),
        "tests/test_guest.py": render("test_guest.py.j2"),
        "tests/visit.py": render("test_visit.py.j2", name=library.name),
        "benchmarks/bench.py": render(
            "bench.py.j2", name=library.name, packages=PACKAGES, runtime=needs_runtime(library)
        ),
    }
    for operator in library.operators:
        folder = f"tests/tasks/{operator.task}"
        files[f"{folder}/task.toml"] = operator.task_toml
        if not needs_reference(operator.operator_py):  # else it is in the package
            files[f"{folder}/reference.py"] = operator.reference_py
        files[f"tests/test_{operator.task}.py"] = render(
            "test_operator.py.j2",
            name=library.name,
            task=operator.task,
            function=names_of(operator).function,
        )
    return files


def without_tests_of(tasks: Sequence[str], files: Mapping[str, bytes]) -> Mapping[str, bytes]:
    """A library's files but for some operators' tests, as `trying_files` names them."""
    own = tuple(s for t in tasks for s in (f"tests/test_{t}.py", f"tests/tasks/{t}/"))
    return {path: text for path, text in files.items() if not path.startswith(own)}
