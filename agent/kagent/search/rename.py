"""Uses of a module's own names, by Python's scoping rules: the places that a rename must touch."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from typing import TypeAlias

from kagent.search.text_edits import EditableText, TextEdit

_Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
_Comprehension: TypeAlias = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp


class RenameError(ValueError):
    """The file uses a name in a way that cannot be renamed safely."""


def module_names(tree: ast.Module) -> set[str]:
    """Names that the module's top level binds, or that functions declare global."""
    names = set(_bound(tree.body))
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            names.update(node.names)
    return names


def rename(text: EditableText, tree: ast.Module, names: Mapping[str, str]) -> list[TextEdit]:
    """Edits that give module-level names others, wherever they are bound or used.

    Strings are left alone, and so are parameters, attributes, keywords of calls and local variables
    of the same name.

    Raises:
        RenameError: A name cannot be followed (`globals()`, `exec`, star imports, a capture in a
        `match`).
    """
    finder = _Finder(text, names)
    finder.visit(tree)
    return finder.edits


def _bound(body: list[ast.stmt]) -> Iterator[str]:
    """Names bound in a scope with this body, without looking into scopes inside of it."""
    pending: list[ast.AST] = list(body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
            continue
        if isinstance(node, ast.Lambda):
            continue
        if isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
            # Its targets are its own; only `:=` inside of it binds here.
            yield from (n.target.id for n in ast.walk(node) if isinstance(n, ast.NamedExpr))
            continue
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            yield node.id
        elif isinstance(node, ast.alias):
            yield bound_by(node)
        elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name:
            yield node.name
        elif isinstance(node, ast.MatchMapping) and node.rest:
            yield node.rest
        pending.extend(ast.iter_child_nodes(node))


def bound_by(alias: ast.alias) -> str:
    """Name that an import binds."""
    return alias.asname or alias.name.partition(".")[0]


class _Finder(ast.NodeVisitor):
    """Walks a module with a stack of scopes: names bound in each, and whether it is a class."""

    def __init__(self, text: EditableText, names: Mapping[str, str]) -> None:
        self.edits: list[TextEdit] = []
        self._text = text
        self._names = names
        self._scopes: list[tuple[set[str], bool]] = []

    def _wanted(self, name: str) -> bool:
        """Whether the name, here, is a module-level one that is to be renamed."""
        if name not in self._names:
            return False
        for depth, (bound, is_class) in enumerate(reversed(self._scopes)):
            if name in bound and (depth == 0 or not is_class):
                return False
        return True

    def _replace(self, start: int, name: str) -> None:
        stop = start + len(name)
        if self._text.source[start:stop] != name:  # inside of an f-string before Python 3.12
            raise RenameError(f"{name} is used where its position is not known")
        self.edits.append(TextEdit(start, stop, self._names[name]))

    def visit_Name(self, node: ast.Name) -> None:
        """Edit a use."""
        if node.id in ("globals", "locals", "exec", "eval", "vars") and self._names:
            raise RenameError(f"the file uses {node.id}")
        if self._wanted(node.id):
            self._replace(self._text.span(node)[0], node.id)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        """Edit its name; look into it with its own scope."""
        self._function(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        """Like a function."""
        self._function(node)

    def visit_Lambda(self, node: ast.Lambda) -> None:
        """Like a function without a name."""
        self._function(node)

    def _function(self, node: _Function) -> None:
        body = [node.body] if isinstance(node, ast.Lambda) else node.body
        if not isinstance(node, ast.Lambda):
            self._definition(node)
        arguments = node.args
        every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        every += [a for a in (arguments.vararg, arguments.kwarg) if a is not None]
        outside = [*arguments.defaults, *(d for d in arguments.kw_defaults if d is not None)]
        outside += [a.annotation for a in every if a.annotation is not None]
        for part in outside:
            self.visit(part)
        bound = {a.arg for a in every}
        if isinstance(node, ast.Lambda):
            bound.update(n.target.id for n in ast.walk(node.body) if isinstance(n, ast.NamedExpr))
        else:
            if node.returns is not None:
                self.visit(node.returns)
            bound.update(_bound(node.body))
            declared = [n for n in ast.walk(node) if isinstance(n, ast.Global)]
            bound.difference_update(*(g.names for g in declared))
        self._inside(bound, body, is_class=False)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        """Edit its name; its body binds for itself, not for the functions in it."""
        self._definition(node)
        for part in (*node.bases, *(k.value for k in node.keywords)):
            self.visit(part)
        self._inside(set(_bound(node.body)), node.body, is_class=True)

    def _definition(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> None:
        for decorator in node.decorator_list:
            self.visit(decorator)
        if self._wanted(node.name):
            start = self._text.at(node.lineno, node.col_offset)
            keyword = re.compile(r"(async\s+def|def|class)\s+").match(self._text.source, start)
            assert keyword is not None
            self._replace(keyword.end(), node.name)

    def _inside(
        self, bound: set[str], body: list[ast.stmt] | list[ast.expr], *, is_class: bool
    ) -> None:
        self._scopes.append((bound, is_class))
        for part in body:
            self.visit(part)
        self._scopes.pop()

    def visit_ListComp(self, node: ast.ListComp) -> None:
        """A scope of its own, but for where its first loop gets its items."""
        self._comprehension(node, [node.elt])

    def visit_SetComp(self, node: ast.SetComp) -> None:
        """Like a list's."""
        self._comprehension(node, [node.elt])

    def visit_GeneratorExp(self, node: ast.GeneratorExp) -> None:
        """Like a list's."""
        self._comprehension(node, [node.elt])

    def visit_DictComp(self, node: ast.DictComp) -> None:
        """Like a list's."""
        self._comprehension(node, [node.key, node.value])

    def _comprehension(self, node: _Comprehension, results: list[ast.expr]) -> None:
        first, *others = node.generators
        self.visit(first.iter)
        targets = [g.target for g in node.generators]
        bound = {n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name)}
        inner = [*targets, *first.ifs, *(p for g in others for p in (g.iter, *g.ifs)), *results]
        self._inside(bound, inner, is_class=False)

    def visit_Global(self, node: ast.Global) -> None:
        """Edit the names that a function declares global."""
        start, stop = self._text.span(node)
        for word in re.finditer(r"\w+", self._text.source[start:stop]):
            if word.group() in node.names and word.group() in self._names:
                self._replace(start + word.start(), word.group())

    def visit_alias(self, node: ast.alias) -> None:
        """Give an import another name."""
        if node.name == "*":
            raise RenameError("the file has a star import")
        name = bound_by(node)
        if not self._wanted(name):
            return
        if node.asname is None and "." in node.name:
            raise RenameError(f"import {node.name} binds {name}")
        self.edits.append(TextEdit(*self._text.span(node), f"{node.name} as {self._names[name]}"))

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> None:
        """Refuse an exception's name: the tree does not give its position."""
        self._refuse(node.name)
        self.generic_visit(node)

    def visit_MatchAs(self, node: ast.MatchAs) -> None:
        """Refuse a capture's name: the tree does not give its position."""
        self._refuse(node.name)
        self.generic_visit(node)

    def visit_MatchStar(self, node: ast.MatchStar) -> None:
        """Refuse a capture's name, too."""
        self._refuse(node.name)

    def visit_MatchMapping(self, node: ast.MatchMapping) -> None:
        """Nor this one's."""
        self._refuse(node.rest)
        self.generic_visit(node)

    def _refuse(self, name: str | None) -> None:
        if name is not None and self._wanted(name):
            raise RenameError(f"{name} is bound by an except clause or a match")
