"""Solutions of FlashInfer-Bench's format as candidates of a task."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePosixPath

from kagent_sandbox.data.task import Task
from kagent_sandbox.errors import UserError
from kagent_sandbox.runtime.text import printable

from kagent.authoring.importers.flashinfer.exchange import Solution
from kagent.search.text_edits import EditableText, TextEdit
from kagent.search.tunables import read_tunables

_PYTHON = ("triton", "python")


def candidate_of(solution: Solution, task: Task) -> str:
    """A solution as one Python file that defines the task's entry.

    A solution of kagent's own export is its kernel with the configuration that was measured. Of
    others, modules that the entry's file imports names from go in front of it; a function of
    another name, or one that writes into results that it is given, is called by an entry that
    allocates them.

    Args:
        solution: The solution.
        task: What it solves; its arguments and results are the definition's, in order.

    Raises:
        UserError: It cannot be one; one line that says why and what to do.
    """
    name, spec = printable(solution.name), solution.spec
    if spec.language.lower() not in _PYTHON:
        raise UserError(
            f"solution {name}: its language is {printable(spec.language)}: a candidate is one "
            "Python file: keep the kernel and write its host code with cuda_kernel or cpp_kernel "
            "(docs/candidates.md)"
        )
    path, function = spec.entry_point.split("::")
    files = {s.path: s.content for s in solution.sources}
    own = _exported(files, path)
    if own is not None:  # its entry has the exported task's name
        source, called = own
        if called == task.entry:
            return source
        return source + _exported_entry(name, task, called, files[path])
    source = _in_one_file(name, files, path)
    names = {n.name for n in ast.parse(source).body if isinstance(n, ast.FunctionDef)}
    if function not in names:
        raise UserError(f"solution {name}: {path} defines no function {function!r}")
    if function == task.entry and not spec.destination_passing_style:
        return source
    return source + _entry(name, task, function, writes=spec.destination_passing_style)


def _exported(files: Mapping[str, str], path: str) -> tuple[str, str] | None:
    """The kernel of a solution that kagent exported, with its configuration, and the function that
    is called; None for any other.
    """
    if set(files) != {path, "kernel.py"} or path == "kernel.py":
        return None
    try:
        body = ast.parse(files[path]).body
    except SyntaxError:
        return None
    called = re.findall(r"\bkernel\.(\w+)\(", files[path])
    for node in body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "CONFIG":
            config = ast.literal_eval(node.value)
            tunables = read_tunables(files["kernel.py"])
            known = set() if tunables is None else {t.name for t in tunables.items}
            if tunables is not None and known >= set(config) and called:
                return tunables.rewrite(config), called[-1]
    return None


def _exported_entry(name: str, task: Task, called: str, main: str) -> str:
    """The entry of an exported solution under the task's name.

    Arguments that it writes and returns are copied first: they are results of a definition, and
    inputs of its task stay as they are.
    """
    (run,) = (n for n in ast.parse(main).body if isinstance(n, ast.FunctionDef))
    (back,) = (n.value for n in ast.walk(run) if isinstance(n, ast.Return))
    parts = back.elts if isinstance(back, ast.Tuple) else [back]
    written = {n.id for n in parts if isinstance(n, ast.Name)}
    if not written:
        return _entry(name, task, called, writes=False)
    run.name = "_as_exported"
    given = [a.name for a in task.arguments]
    own = [a.arg for a in run.args.args]
    values = [f"{g}.clone()" if o in written else g for g, o in zip(given, own, strict=True)]
    text = ast.unparse(run).replace("kernel.", "")
    return (
        f"\n\n{text}\n\n\n"
        f"def {task.entry}({', '.join(given)}):\n    return {run.name}({', '.join(values)})\n"
    )


def _in_one_file(name: str, files: Mapping[str, str], path: str) -> str:
    """A file with those of the solution's own modules that it imports names from.

    Raises:
        UserError: A file is no Python, or is imported as a module.
    """
    parts: list[str] = []
    done: set[str] = set()

    def add(file: str) -> None:
        if file in done:
            return
        done.add(file)
        source = files[file]
        try:
            tree = ast.parse(source)
        except SyntaxError as e:
            where = f"{printable(file)}:{e.lineno}"
            raise UserError(f"solution {name}: {where}: SyntaxError: {e.msg}") from None
        text = EditableText(source)
        edits = []
        for node in ast.walk(tree):
            if not isinstance(node, ast.Import | ast.ImportFrom):
                continue
            if isinstance(node, ast.ImportFrom) and node.module == "__future__":
                edits.append(TextEdit(*text.span(node), "pass"))
            for module, whole in _own_modules(node, file, files):
                if whole:
                    raise UserError(
                        f"solution {name}: {printable(file)}:{node.lineno}: imports its own "
                        f"{printable(module)} as a module: a candidate is one file: import the "
                        "names that it uses (from module import name), or put all into one file"
                    )
                add(module)
                edits.append(TextEdit(*text.span(node), "pass"))
        parts.append(text.apply(edits).strip())

    add(path)
    return (
        "from __future__ import annotations\n\n" * _has_future(files, done)
        + "\n\n\n".join(parts)
        + "\n"
    )


def _has_future(files: Mapping[str, str], done: set[str]) -> bool:
    return any("from __future__ import annotations" in files[f] for f in done)


def _own_modules(
    node: ast.Import | ast.ImportFrom, file: str, files: Mapping[str, str]
) -> Iterator[tuple[str, bool]]:
    """Files of the solution that a statement imports, and whether as modules."""
    folder = PurePosixPath(file).parent

    def known(dotted: str, level: int) -> str | None:
        base = folder
        for _ in range(level - 1):
            base = base.parent
        path = str(base.joinpath(*dotted.split("."))) + ".py"
        return path if path in files else None

    if isinstance(node, ast.Import):
        for alias in node.names:
            if (found := known(alias.name, 0)) is not None:
                yield found, True
    elif node.module is None:
        for alias in node.names:
            if (found := known(alias.name, node.level)) is not None:
                yield found, True
    elif (found := known(node.module, node.level)) is not None:
        yield found, any(a.asname not in (None, a.name) for a in node.names)


def _entry(name: str, task: Task, function: str, *, writes: bool) -> str:
    """An entry that calls a solution's function.

    Raises:
        UserError: The sizes of its results do not follow from its arguments.
    """
    arguments = [a.name for a in task.arguments]
    called = function
    lines = ["", ""]
    if function == task.entry:
        called = f"_{function}_of_solution"
        lines += [f"{called} = {function}", "", ""]
    lines += ["import torch as _torch", "", "", f"def {task.entry}({', '.join(arguments)}):"]
    if not writes:
        lines.append(f"    return {called}({', '.join(arguments)})")
        return "\n".join(lines) + "\n"
    results = [f"_result_{i}" for i in range(len(task.results))]
    tensors = [a.name for a in task.arguments if a.shape is not None]
    if not tensors:
        raise UserError(f"solution {name}: no tensor among its inputs says where results lie")
    for variable, result in zip(results, task.results, strict=True):
        shape = "".join(f"{_size(name, task, s)}, " for s in result.shape)
        dtype = f"{tensors[0]}.dtype" if result.dtype == "$dtype" else f"_torch.{result.dtype}"
        made = f"_torch.empty(({shape}), dtype={dtype}, device={tensors[0]}.device)"
        lines.append(f"    {variable} = {made}")
    lines.append(f"    {called}({', '.join([*arguments, *results])})")
    lines.append(f"    return {', '.join(results)}")
    return "\n".join(lines) + "\n"


def _size(name: str, task: Task, size: int | str) -> str:
    """A size of a result as host code has it: from the shapes of arguments."""
    if isinstance(size, int):
        return str(size)
    tree = ast.parse(size, mode="eval")
    text = EditableText(size)
    edits = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            raise UserError(
                f"solution {name}: result size {size!r}: no host code for {ast.unparse(node)}"
            )
        if isinstance(node, ast.Name):
            edits.append(TextEdit(*text.span(node), _dimension(name, task, node.id)))
    return text.apply(edits)


def _dimension(name: str, task: Task, dim: str) -> str:
    for argument in task.arguments:
        if argument.value == dim:
            return argument.name
        for i, size in enumerate(_shape(argument.shape)):
            if size == dim:
                return f"{argument.name}.shape[{i}]"
    raise UserError(
        f"solution {name}: it writes into results, and no argument has the dimension {dim}: let it "
        "return them (destination_passing_style: false)"
    )


def _shape(shape: Sequence[int | str] | None) -> Sequence[int | str]:
    return shape or ()
