"""When are two candidates the same? By text, and by syntax tree; machine code is compared through
plans.

The syntax tree leaves out comments, layout, docstrings and the names of local variables; within
kernel sources in strings, comments and layout. Two candidates with one tree hash do the same; the
reverse does not hold.
"""

from __future__ import annotations

import ast
import hashlib
import re
from collections.abc import Iterator

from kagent_sandbox.syntax import parse

_Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
_READS_NAMES = frozenset({"locals", "globals", "vars", "eval", "exec", "dir"})
_KERNEL_SOURCE = re.compile(r"__global__|extern\s+\"C\"|#include|__device__")
_OPERATORS = frozenset("+-<>=&|!*/%^:.#")
_C_TOKENS = re.compile(
    r"""(?P<comment>//(?:\\\n|[^\n])*|/\*.*?\*/)|(?P<text>R"(\w*)\(.*?\)\3"|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')"""
    r"""|(?P<directive>^[ \t]*\#(?:\\\n|[^\n])*)|(?P<space>\s+)|(?P<word>\w+)|(?P<other>.)""",
    re.DOTALL | re.MULTILINE | re.VERBOSE,
)


def source_hash(source: str) -> str:
    """SHA-256 of the text."""
    return hashlib.sha256(source.encode(errors="surrogatepass")).hexdigest()


def tree_hash(source: str) -> str:
    """SHA-256 of the normalised syntax tree.

    Raises:
        SyntaxError: It is not Python.
    """
    tree = parse(source)
    used = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            node.body = [s for s in node.body if not _is_text(s)]
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            node.value = _kernel_source(node.value)
    if not used & _READS_NAMES:
        for statement in tree.body:
            _rename(statement, {}, 0)
    return hashlib.sha256(ast.dump(tree).encode(errors="surrogatepass")).hexdigest()


def _is_text(statement: ast.stmt) -> bool:
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )


# -- names of local variables --------------------------------------------------------------------


def _rename(node: ast.AST, names: dict[str, str], depth: int) -> None:
    """Number the locals of every function inside `node`; `names` are those of the functions around
    it.
    """
    if isinstance(node, _Function):
        arguments = node.args
        for outside in (*arguments.defaults, *filter(None, arguments.kw_defaults)):
            _rename(outside, names, depth)
        if not isinstance(node, ast.Lambda):
            for outside in (*node.decorator_list, *filter(None, [node.returns])):
                _rename(outside, names, depth)
        parameters = {a.arg for a in _parameters(arguments)}
        kept = parameters | set(_declared_outside(node))
        inner = {k: v for k, v in names.items() if k not in parameters}
        # a character that no identifier has keeps new names apart from all others
        assigned = dict.fromkeys(n for n in _assigned(node) if n not in kept)
        inner |= {name: f"${depth}.{number}" for number, name in enumerate(assigned)}
        body = [node.body] if isinstance(node, ast.Lambda) else node.body
        for child in body:
            _rename(child, inner, depth + 1)
        if not isinstance(node, ast.Lambda) and node.name in names:
            node.name = names[node.name]
        return
    if isinstance(node, ast.ClassDef):
        names = {}  # bodies of classes have rules of their own: left as they are
    if isinstance(node, ast.Name):
        node.id = names.get(node.id, node.id)
    elif isinstance(node, ast.ExceptHandler) and node.name:
        node.name = names.get(node.name, node.name)
    elif isinstance(node, ast.Nonlocal):
        node.names = [names.get(n, n) for n in node.names]
    for inside in ast.iter_child_nodes(node):
        _rename(inside, names, depth)


def _parameters(arguments: ast.arguments) -> Iterator[ast.arg]:
    yield from (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
    yield from filter(None, (arguments.vararg, arguments.kwarg))


def _own_nodes(function: _Function) -> Iterator[ast.AST]:
    """Nodes of a function's body in order, without what nested functions and classes hold."""
    stack: list[ast.AST] = (
        [function.body] if isinstance(function, ast.Lambda) else list(reversed(function.body))
    )
    while stack:
        node = stack.pop()
        yield node
        if not isinstance(node, _Function | ast.ClassDef):
            stack.extend(reversed(list(ast.iter_child_nodes(node))))


def _assigned(function: _Function) -> Iterator[str]:
    """Names that plain assignments, loops and handlers bind, in order of appearance."""
    for node in _own_nodes(function):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.ExceptHandler) and node.name:
            yield node.name


def _declared_outside(function: _Function) -> Iterator[str]:
    """Names that keep their spelling: globals, nonlocals, imports, nested functions and classes."""
    for node in _own_nodes(function):
        if isinstance(node, ast.Global | ast.Nonlocal):
            yield from node.names
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from (a.asname or a.name.split(".")[0] for a in node.names)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
            if isinstance(node, ast.ClassDef):  # its body reads names of the function as they are
                yield from (n.id for n in ast.walk(node) if isinstance(n, ast.Name))
        elif isinstance(node, ast.MatchAs | ast.MatchStar) and node.name:
            yield node.name


# -- kernel sources ------------------------------------------------------------------------------


def _kernel_source(text: str) -> str:
    """A CUDA or C++ source without comments, and with one space where tokens need one; other text
    as is.
    """
    if not _KERNEL_SOURCE.search(text):
        return text
    out: list[str] = []
    last = ""  # last character of the token before, w for a word
    gap = False
    for match in _C_TOKENS.finditer(text):
        kind = match.lastgroup or "other"
        token = match[0]
        if kind in {"space", "comment"}:
            gap = True
            continue
        if kind == "directive":
            out.append("\n" + " ".join(re.sub(r"//[^\n]*|/\*.*?\*/", " ", token).split()) + "\n")
        else:
            # what would read as one token stays apart: `int a`, `b - -c`, `> >`
            merges = (last == "w" and kind == "word") or (
                last in _OPERATORS and token[0] in _OPERATORS
            )
            out.append(" " + token if gap and merges else token)
        last, gap = ("w" if kind == "word" else token[-1:]), False
    return "".join(out)
