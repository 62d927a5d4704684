"""Two kernel files in one that chooses between them: text in, text out.

Imports are united, names that both files define get the second file's label appended, each file's
entry function becomes private, and a new entry calls one or the other:

    def softmax(x: torch.Tensor) -> torch.Tensor:
        if x.shape[-1] <= N_SPLIT:
            return _softmax_rows(x)
        return _softmax_online(x)
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kagent_sandbox.syntax import parse

from kagent.search.rename import RenameError, bound_by, module_names, rename
from kagent.search.text_edits import EditableText, TextEdit
from kagent.search.tunables import Value, read_tunables, value_text

MAX_CHARACTERS = 64_000
"""Length of a merged file: two of the longest seeds have 55,000."""


@dataclass(frozen=True, slots=True)
class Part:
    """A file to merge. `label` is a word for it that fits into names, `title` names it in
    comments.
    """

    source: str
    label: str
    title: str


@dataclass(frozen=True, slots=True)
class BranchCondition:
    """The condition for the first part. `{NAME}` in `condition` stands for the argument at that
    position.

    With `constant`, that global is made, with `values` as its tunables and `value` as its default.
    """

    condition: str  # for example "{0}.shape[-1] <= N_SPLIT"
    because: str  # comment that says why
    constant: str | None = None
    value: Value = 0
    values: tuple[Value, ...] = ()


def merge(first: Part, second: Part, entry: str, choice: BranchCondition) -> str | None:
    """One file that does what both do, or None where that cannot be done safely."""
    try:
        a, b = _Module(first, entry), _Module(second, entry)
        taken = _words(first.source) | _words(second.source)
        constant = _unused(choice.constant, taken) if choice.constant else None
        shared = a.import_keys & b.import_keys
        keep = {name for _, name in shared} | {"TUNE", "__all__", entry}
        clashes = sorted((a.names & b.names) - keep)
        names_a = {entry: _unused(f"_{entry}_{first.label}", taken)}
        names_b = {entry: _unused(f"_{entry}_{second.label}", taken)}
        names_b |= {n: _unused(_labelled(n, second.label), taken) for n in clashes}
        text_a, text_b = a.body(names_a), b.body(names_b)
        call = _Call(entry, names_a[entry], names_b[entry], choice, constant)
        dispatcher = _dispatcher(a, b, call)
    except (RenameError, SyntaxError, RecursionError):
        return None
    tune = {**a.tune({}), **b.tune(names_b)}
    parts = [
        f'"""{first.title} where that is faster, {second.title} elsewhere."""',
        _imports(a, b, names_b),
        "",
    ]
    if constant:
        tune = {constant: choice.values, **tune}
        parts[-1] += f"{constant} = {value_text(choice.value)}  # {choice.because}\n"
    if tune:
        rows = [f'    "{n}": [{", ".join(map(value_text, v))}],\n' for n, v in tune.items()]
        parts[-1] += "TUNE = {\n" + "".join(rows) + "}"
    source = "\n\n".join(p for p in parts if p)
    for title, text in ((first.title, text_a), (second.title, text_b)):
        source += f"\n\n\n# -- {title} --\n\n{text}"
    source += f"\n\n\n{dispatcher}\n"
    return source if len(source) <= MAX_CHARACTERS and read_tunables(source) is not None else None


class _Module:
    """A parsed part."""

    def __init__(self, part: Part, entry: str) -> None:
        self.part = part
        self.tree = parse(part.source)
        self.text = EditableText(part.source)
        self.names = module_names(self.tree)
        statements = self.tree.body
        self.imports = [s for s in statements if isinstance(s, ast.Import | ast.ImportFrom)]
        self.import_keys = {
            (_origin(s, alias), bound_by(alias)) for s in self.imports for alias in s.names
        }
        entries = [s for s in statements if isinstance(s, ast.FunctionDef) and s.name == entry]
        if len(entries) != 1 or entries[0].args.vararg or entries[0].args.kwarg:
            raise RenameError(f"{entry} is not one plain function")
        self.entry = entries[0]

    def body(self, names: Mapping[str, str]) -> str:
        """The file without what the merged one has once: docstring, imports, TUNE, main guard."""
        dropped = [s for s in self.tree.body if self._is_dropped(s)]
        spans = [self.text.lines_of(s) for s in dropped]
        for node, span in zip(dropped, spans, strict=True):
            for other in self.tree.body:
                if other is not node and other not in dropped:
                    start = self.text.span(other)[0]
                    if span[0] <= start < span[1]:
                        raise RenameError("two statements on one line")
        edits = rename(self.text, self.tree, names)
        kept = [e for e in edits if not any(a <= e.start < b for a, b in spans)]
        removed = [TextEdit(a, b, "") for a, b in spans]
        text = self.text.apply([*kept, *removed]).strip("\n")
        return re.sub(r"\n{4,}", "\n\n\n", text)

    def _is_dropped(self, statement: ast.stmt) -> bool:
        if statement in self.imports:
            return True
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            return statement is self.tree.body[0]
        if isinstance(statement, ast.If):
            return "__name__" in ast.dump(statement.test)
        if isinstance(statement, ast.Assign):
            targets = [getattr(t, "id", None) for t in statement.targets]
            return targets in (["TUNE"], ["__all__"])
        return (
            isinstance(statement, ast.AnnAssign) and getattr(statement.target, "id", "") == "TUNE"
        )

    def tune(self, names: Mapping[str, str]) -> dict[str, tuple[Value, ...]]:
        """Tunables by their names in the merged file."""
        tunables = read_tunables(self.part.source)
        return {names.get(t.name, t.name): t.values for t in tunables.items} if tunables else {}

    def parameters(self) -> tuple[list[str], list[str]]:
        """Positional parameters of the entry, and those by name only."""
        arguments = self.entry.args
        positional = [a.arg for a in (*arguments.posonlyargs, *arguments.args)]
        return positional, [a.arg for a in arguments.kwonlyargs]


@dataclass(frozen=True, slots=True)
class _Call:
    """The parts of the new entry."""

    entry: str
    first: str
    second: str
    choice: BranchCondition
    constant: str | None


def _dispatcher(a: _Module, b: _Module, call: _Call) -> str:
    positional, by_name = a.parameters()
    other, other_by_name = b.parameters()
    if len(positional) != len(other) or set(by_name) != set(other_by_name):
        raise RenameError("the entries take different parameters")
    condition = call.choice.condition.format(*positional, constant=call.constant)
    if "torch." in condition and ("torch", "torch") not in a.import_keys | b.import_keys:
        raise RenameError("neither file imports torch by that name")
    arguments = ", ".join([*positional, *(f"{n}={n}" for n in by_name)])
    returns = f" -> {ast.unparse(a.entry.returns)}" if a.entry.returns else ""
    comment = "" if call.constant else f"  # {call.choice.because}"
    return (
        f"def {call.entry}({ast.unparse(a.entry.args)}){returns}:\n"
        f"    if {condition}:{comment}\n"
        f"        return {call.first}({arguments})\n"
        f"    return {call.second}({arguments})"
    )


def _origin(statement: ast.Import | ast.ImportFrom, alias: ast.alias) -> str:
    if isinstance(statement, ast.ImportFrom):
        return f"{'.' * statement.level}{statement.module or ''}:{alias.name}"
    return alias.name if alias.asname else alias.name.partition(".")[0]


def _imports(a: _Module, b: _Module, names_b: Mapping[str, str]) -> str:
    """All imports of both, each once, plain ones first."""
    plain: dict[str, None] = {}
    members: dict[str, dict[str, None]] = {}
    for module, names in ((a, {}), (b, names_b)):
        for statement in module.imports:
            for alias in statement.names:
                bound = bound_by(alias)
                new = names.get(bound, bound)
                text = alias.name if new == alias.name else f"{alias.name} as {new}"
                if isinstance(statement, ast.ImportFrom):
                    origin = "." * statement.level + (statement.module or "")
                    members.setdefault(origin, {})[text] = None
                elif alias.asname is None and "." in alias.name and new == bound:
                    plain[f"import {alias.name}"] = None
                else:
                    plain[f"import {text}"] = None
    future = members.pop("__future__", {})
    lines = [f"from __future__ import {', '.join(sorted(future))}", ""] if future else []
    lines += sorted(plain)
    lines += [f"from {m} import {', '.join(sorted(t))}" for m, t in sorted(members.items())]
    return "\n".join(lines)


def _labelled(name: str, label: str) -> str:
    return f"{name}_{label.upper()}" if name.isupper() else f"{name}_{label}"


def _unused(name: str, taken: set[str]) -> str:
    """The name, or the name and a number; it is taken from then on."""
    number, free = 2, name
    while free in taken:
        free, number = f"{name}_{number}", number + 1
    taken.add(free)
    return free


def _words(source: str) -> set[str]:
    return set(re.findall(r"\w+", source))


def labels(names: Sequence[str]) -> list[str]:
    """Short distinct words for structures: "triton_rows" is "rows", unless another one is too."""
    words = [re.sub(r"\W+", "_", re.sub(r"\b(triton|cuda|cpp)_", "", n)) for n in names]
    full = [re.sub(r"\W+", "_", n) for n in names]
    if len(set(words)) == len(words):
        return words
    return full if len(set(full)) == len(full) else [f"{w}_{i}" for i, w in enumerate(full, 1)]
