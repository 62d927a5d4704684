"""A user's Python file: loaded, what it defines, and where in it something went wrong."""

from __future__ import annotations

import importlib.util
import inspect
import operator
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

from kagent_sandbox.errors import UserError

from kagent.authoring.tracing.autocast import autocast_kept
from kagent.authoring.tracing.devices import on_cpu_without_gpu

_MOST_WORDS = 200
"""Characters of what an error says that are told."""


def load_module(path: Path) -> ModuleType:
    """Import a user's Python file.

    Raises:
        UserError: It cannot be imported.
    """
    if path.is_dir():
        raise UserError(f"{path}: a folder, where a Python file was expected")
    if not path.is_file():
        raise UserError(f"{path}: no such file: expected a Python file")
    folder = path.parent.resolve()
    package: list[str] = []  # which its relative imports are of
    root = folder
    while (root / "__init__.py").is_file():
        package.insert(0, root.name)
        root = root.parent
    name = ".".join([*package, f"kagent_source_{path.stem}"])
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UserError(f"{path}: not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    places = list(dict.fromkeys([str(folder), str(root)]))
    sys.path[:0] = places  # as `python FILE` has it
    try:
        with on_cpu_without_gpu(), autocast_kept():
            spec.loader.exec_module(module)
    except ModuleNotFoundError as e:
        text = f"install {e.name} for {sys.executable}, or import it where it is needed alone"
        raise UserError(f"{path}: {type(e).__name__}: {first_line(e)}: {text}") from e
    except SyntaxError as e:
        raise UserError(_syntax_fault(e, path)) from e
    except (Exception, SystemExit) as e:  # whatever a user's file raises becomes one line
        raise UserError(f"{path}: {type(e).__name__}: {first_line(e)}") from e
    finally:
        for place in places:
            sys.path.remove(place)
    return module


def named(module: ModuleType, name: str, path: Path) -> Any:
    """Find the definition of a name in a file, or of one with dots, as `RMSNorm.example`.

    Raises:
        UserError: It defines no such name.
    """
    try:
        return operator.attrgetter(name)(module)
    except AttributeError:
        known = [
            n
            for n, v in vars(module).items()
            if callable(v) and not n.startswith("_") and not _imported(v, module)
        ]
        text = f"{path}: defines no {name!r}; there are {', '.join(known) or 'none'}"
        raise UserError(text) from None


def place_of(error: BaseException) -> str:
    """Place in a user's file where it was raised: ` (norm.py, line 7)`; "" if nowhere there."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if is_users_file(f.filename)]
    return f" ({Path(own[-1].filename).name}, line {own[-1].lineno})" if own else ""


def is_users_file(filename: str) -> bool:
    """Whether it is the file that an operation was read from."""
    return "kagent_source_" in (_module_of(filename) or "")


def first_line(error: BaseException) -> str:
    """Text of an error, shortened."""
    line = (str(error).strip().splitlines() or [""])[0]
    return line if len(line) <= _MOST_WORDS else f"{line[:_MOST_WORDS]} [...]"


def _imported(value: object, module: ModuleType) -> bool:
    """Whether a function or class is another file's."""
    defined = inspect.isclass(value) or inspect.isroutine(value)
    return defined and getattr(value, "__module__", None) != module.__name__


def _syntax_fault(error: SyntaxError, path: Path) -> str:
    """'bad.py, line 21: invalid syntax: def f(x': of the file, or of one that it imports."""
    own = error.filename is None or Path(error.filename).resolve() == path.resolve()
    file = path if own else error.filename
    line = f", line {error.lineno}" if error.lineno else ""
    source = " ".join((error.text or "").split())
    shown = f": {source[:_MOST_WORDS]}" if source else ""
    return f"{file}{line}: {error.msg}{shown}"


def _module_of(filename: str) -> str | None:
    return next(
        (n for n, m in list(sys.modules.items()) if getattr(m, "__file__", None) == filename), None
    )
