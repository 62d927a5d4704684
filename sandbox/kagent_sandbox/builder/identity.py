"""Identity of candidates: by text, and by syntax tree. Machine code is compared through plans.

The syntax tree leaves out comments, layout, docstrings and the names of local variables; within
kernel sources in strings, comments and layout. Two candidates with one tree hash do the same; the
reverse does not hold. A file that can read any of what is left out (its docstrings, its own text,
the numbers of its lines) is therefore compared by its text, and so is a kernel source that can.

Not covered: files that hide from us that they do, by `getattr` with a name that they put together.
One that does so is told a duplicate of its own kind, and nothing is gained by that.
"""

from __future__ import annotations

import ast
import hashlib
import re
from collections.abc import Iterator

from kagent_sandbox.syntax import parse, without_texts

_Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
_READS_NAMES = frozenset(
    {"locals", "globals", "vars", "eval", "exec", "dir", "f_locals", "co_varnames", "__code__"}
)
_READS_TEXT = frozenset(
    {
        *("__doc__", "getdoc", "__file__", "getsource", "getsourcelines", "getsourcefile"),
        *("findsource", "getcomments", "linecache", "tokenize", "__loader__", "__spec__"),
        *("f_lineno", "tb_lineno", "co_firstlineno", "co_lines", "getframeinfo", "traceback"),
    }
)
"""Names by which a file reads its own docstrings, comments or layout."""
_KNOWS_LINES = re.compile(r"__LINE__|builtin_LINE|source_location")
_KERNEL_SOURCE = re.compile(r"__global__|extern\s+\"C\"|#include|__device__")
_OPERATORS = frozenset("+-<>=&|!*/%^:.#")
_C_TOKENS = re.compile(
    r"""
    (?P<comment>//(?:\\\n|[^\n])*|/\*(?:.*?\*/|.*))
    |(?P<text>(?:u8|[uUL])?R"([^\s()\\]{0,16})\((?:.*?\)\3"|.*)|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')
    |(?P<directive>^[ \t]*\#[ \t]*\w*)|(?P<splice>\\[ \t]*\n)|(?P<space>\s+)
    |(?P<word>\.?\d(?:[eEpP][+-]|'?[\w.])*|\w+)|(?P<other>.)
    """,
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
    used = set(_names(tree))
    if used & _READS_TEXT:
        return source_hash(source)
    pieces = set(_pieces(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            node.body = without_texts(node.body)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in pieces:
            node.value = _kernel_source(node.value)
    if not used & _READS_NAMES:
        for statement in tree.body:
            _rename(statement, {}, 0)
    return hashlib.sha256(ast.dump(tree).encode(errors="surrogatepass")).hexdigest()


def _names(tree: ast.AST) -> Iterator[str]:
    """All names that a file uses, also those of attributes, of modules, and in strings."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.Constant(value=str(name)):
                yield name
            case ast.alias(name=name):
                yield from name.split(".")
            case ast.ImportFrom(module=str(name)):
                yield from name.split(".")


def _pieces(tree: ast.AST) -> Iterator[ast.AST]:
    """Strings that are put together with others: where one begins, another may have left a comment
    or a string open.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr | ast.BinOp | ast.AugAssign):
            yield from (n for n in ast.walk(node) if isinstance(n, ast.Constant))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            inside = (node.func.value, *node.args)  # SOURCE.replace(a, b), "".join(parts)
            yield from (n for part in inside for n in ast.walk(part) if isinstance(n, ast.Constant))


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
    if not _KERNEL_SOURCE.search(text) or _KNOWS_LINES.search(text):
        return text
    out: list[str] = []
    last = ""  # last character of the token before, w for a word or a text; a splice's is \n
    gap = ended = False  # before this token: a space; the end of a directive
    directive = False
    for match in _C_TOKENS.finditer(text):
        kind = match.lastgroup or "other"
        token = match[0]
        if kind in {"space", "comment"}:
            gap = True
            ended = ended or (directive and kind == "space" and "\n" in token)
            continue
        if ended or (kind == "directive" and last != "\n"):
            out.append("\n")
            directive, ended = kind == "directive", False
            token = "".join(token.split()) if directive else token
        operator = directive and token == "#"  # noqa: S105 - of C
        if operator or (kind == "directive" and last == "\n"):
            return text  # a macro that makes strings or names of tokens, and knows their layout
        spelled = kind in {"word", "text", "directive"}
        # Tokens that would read as one stay apart: `int a`, `b - -c`, `> >`, `L "x"`. In a
        # directive a space may also say that a macro takes no parameters: `#define A (x)`.
        merges = (last == "w" and spelled) or (last in _OPERATORS and token[0] in _OPERATORS)
        spliced = kind == "splice" or last == "\n"
        out.append(" " + token if gap and (merges or directive or spliced) else token)
        last, gap = ("w" if spelled else token[-1:]), False
    return "".join(out)
