"""Inductor's `call` as a candidate's host function."""

from __future__ import annotations

import ast
import functools
import keyword
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from kagent_sandbox.builder.policy import allows
from kagent_sandbox.data.case import CASE_DTYPE
from kagent_sandbox.data.plan import MAX_DIMS
from kagent_sandbox.data.task import Task

from kagent.authoring.inductor.library_convolution import FORMATS
from kagent.authoring.inductor.trace import NoSeed, Traced

INDENT = "    "
_WIDTH = 100
_SKIPPED = re.compile(
    r"args\.clear\(|torch\.cuda\.set_device\(|assert_|del |# |with torch\.cuda"
    r"|(?:raw_)?stream\d* = "  # torch 2.13 writes raw_stream0, 2.11 stream0
)
_ALLOCATION = re.compile(r"empty_strided_(cuda|cpu)")
_EXTERN = re.compile(r"(?:extern_kernels|aten|torch\.ops\.aten)\.(\w+)(?:\.\w+)?")


@dataclass
class Host:
    """Lines of a host function, and what they use."""

    lines: list[str] = field(default_factory=list)
    dims: dict[str, str] = field(default_factory=dict)  # dimension -> where it comes from


def kernels_of(module: ast.Module, maker: str) -> Iterator[tuple[str, list[str]]]:
    """Names of a generated module's kernels, and the strings that they are made from."""
    for node in module.body:
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.value, ast.Call)
            and ast.unparse(node.value.func) == f"async_compile.{maker}"
            and isinstance(node.targets[0], ast.Name)
        ):
            texts = [ast.literal_eval(a) for a in node.value.args]
            yield node.targets[0].id, texts


def host_function(
    task: Task,
    traced: Traced,
    module: ast.Module,
    name: str,
    launch: Callable[[str, Sequence[str]], list[str]],
) -> list[str]:
    """A host function's lines, `def` included.

    Args:
        task: The task.
        traced: What Inductor wrote.
        module: Its code, parsed.
        name: Name of the function.
        launch: Lines that call a kernel, by its name in the module and its arguments.

    Raises:
        NoSeed: It calls what a candidate may not.
    """
    body = _call_body(module)
    names = _names(task, traced, module, body)
    returned = next(s for s in body if isinstance(s, ast.Return))
    results = [ast.unparse(names.visit(e)) for e in returned.value.elts]  # type: ignore[union-attr]
    parameters = [a.name for a in task.arguments]
    tensors = [a.name for a in task.arguments if a.shape is not None]
    for result, spec in zip(results, task.results, strict=False):
        if re.fullmatch(r"buf\d+", result) and spec.name not in parameters:
            names.renamed[result] = spec.name
    host: list[str] = []
    for statement in body:
        if isinstance(statement, ast.Return | ast.Delete):
            continue
        text = ast.unparse(names.visit(statement))
        if _SKIPPED.match(text) or text.endswith("= args"):
            continue
        if isinstance(statement, ast.Assign):
            target, value = text.split(" = ", 1)
            if target == value or target in traced.symbols.values():
                continue  # a dimension: see below
            host += _assigned(task, traced, tensors, target, value)
        elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
            host += _called(task, statement.value, names, launch)
        else:
            raise NoSeed(f"Inductor's host code has {text!r}, which nothing here rewrites")
    final = [names.renamed.get(r, r) for r in results]
    final = [re.sub(r"\bbuf\d+\b", lambda m: names.renamed.get(m[0], m[0]), r) for r in final]
    for i, (result, spec) in enumerate(zip(final, task.results, strict=True)):
        if result in tensors:  # the result is an input as it is: a kernel has to write it
            raise NoSeed(f"result {spec.name} is the input {result} itself")
        final[i] = _strided(result)
    dims, used = dims_lines(task, host), [x for x in tensors if _uses(host, x)]
    for x in (x for x in used if x in task.mutates):  # a kernel wrote the copy
        host += [f"if not {x}_given.is_contiguous():", f"{INDENT}{x}_given.copy_({x})"]
    host += [f"return {', '.join(final)}"] if final else []
    begin = [f"{x}_given = {x}" for x in used if x in task.mutates]
    begin += [f"{x} = {x}.contiguous()" for x in used]
    return [f"def {name}({', '.join(parameters)}):", *(INDENT + x for x in (*dims, *begin, *host))]


def wrapped(call: str, arguments: Sequence[str]) -> list[str]:
    """A call in one line, or with an argument a line."""
    line = f"{call}({', '.join(arguments)})"
    if len(line) + 2 * len(INDENT) <= _WIDTH:
        return [line]
    return [f"{call}(", *(f"{INDENT}{a}," for a in arguments), ")"]


def _uses(lines: Sequence[str], name: str) -> bool:
    return any(re.search(rf"\b{re.escape(name)}\b", line) for line in lines)


def _call_body(module: ast.Module) -> list[ast.stmt]:
    """Statements of `call`, without the blocks around them."""
    functions = [n for n in ast.walk(module) if isinstance(n, ast.FunctionDef) and n.name == "call"]

    def flat(statements: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
        for s in statements:
            if isinstance(s, ast.With):
                yield from flat(s.body)
            else:
                yield s

    return list(flat(functions[0].body))


class _TaskNames(ast.NodeTransformer):
    """Gives arguments and dimensions the names that the task has for them."""

    def __init__(self, renamed: dict[str, str]) -> None:
        self.renamed = renamed

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.copy_location(ast.Name(self.renamed.get(node.id, node.id), node.ctx), node)


def _names(task: Task, traced: Traced, module: ast.Module, body: Sequence[ast.stmt]) -> _TaskNames:
    renamed = dict(traced.symbols)
    for statement in body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.value) == "args":
            (target,) = statement.targets
            inputs = target.elts if isinstance(target, ast.Tuple) else [target]
            for given, meant in zip(inputs, traced.inputs, strict=True):
                assert isinstance(given, ast.Name)
                renamed[given.id] = meant
            break
    kernels = [target for target, _ in kernels_of(module, "triton")]
    for number, kernel in enumerate(kernels, 1):
        for count in ("xnumel", "ynumel", "znumel", "r0_numel"):
            renamed[f"{kernel}_{count}"] = f"{count}_{number}"
    for name in (*task.dims, *(a.name for a in task.arguments)):
        if keyword.iskeyword(name) or re.fullmatch(r"buf\d+|torch|triton|tl", name):
            raise NoSeed(f"{name} is a name that generated code uses: rename it in the task")
    return _TaskNames(renamed)


def _assigned(
    task: Task, traced: Traced, tensors: Sequence[str], target: str, value: str
) -> list[str]:
    value = _strided(value)
    call = ast.parse(value, mode="eval").body
    if not isinstance(call, ast.Call):
        return [f"{target} = {value}"]  # arithmetic, or a buffer used again
    function = ast.unparse(call.func)
    arguments = [ast.unparse(a) for a in call.args]
    if _ALLOCATION.fullmatch(function):
        size, stride, dtype = arguments
        where = f"dtype={_dtype(task, traced, dtype)}, device={tensors[0]}.device"
        if _row_major(size, stride, traced):
            if _dims_of(call.args[0]) > MAX_DIMS:
                size = _in_one_dim(call.args[0])
            return wrapped(f"{target} = torch.empty", [size, where])
        return wrapped(f"{target} = torch.empty_strided", [size, stride, where])
    if function == "torch.as_strided":
        size, stride = arguments[1:3]
        if _dims_of(call.args[1]) > MAX_DIMS and _row_major(size, stride, traced):
            rest = arguments[3:]
            return wrapped(
                f"{target} = {function}", [arguments[0], _in_one_dim(call.args[1]), "(1,)", *rest]
            )
        return wrapped(f"{target} = {function}", arguments)
    if function.split(".")[0] in ("math", "max", "min", "int", "float"):
        return [f"{target} = {value}"]
    if extern := _EXTERN.fullmatch(function):
        _require(task, extern[1])
        made = f"{target} = torch.{extern[1]}({value[len(function) + 1 :]}"
        memory_format = function.rpartition(".")[2]
        if memory_format in FORMATS.values():  # as it is already, where cuDNN computes it
            made += f".contiguous(memory_format=torch.{memory_format})"
        return [made]
    raise NoSeed(f"Inductor's host code calls {function}, which a candidate may not")


def _dims_of(size: ast.expr) -> int:
    return len(size.elts) if isinstance(size, ast.Tuple) else 0


def _in_one_dim(size: ast.expr) -> str:
    """A size in text with one dimension: kernels know a buffer by its address, and a plan's tensors
    have few.
    """
    assert isinstance(size, ast.Tuple)
    product = functools.reduce(lambda a, b: ast.BinOp(a, ast.Mult(), b), size.elts)
    return ast.unparse(ast.Tuple([product]))


def _called(
    task: Task,
    call: ast.Call,
    names: _TaskNames,
    launch: Callable[[str, Sequence[str]], list[str]],
) -> list[str]:
    call = names.visit(call)
    function = ast.unparse(call.func)
    arguments = [_strided(ast.unparse(a)) for a in call.args]
    if extern := _EXTERN.fullmatch(function):
        _require(task, extern[1])
        arguments += [_strided(ast.unparse(k)) for k in call.keywords]
        return wrapped(f"torch.{extern[1]}", arguments)
    return launch(function.removesuffix(".run"), arguments)


def _strided(text: str) -> str:
    """Code with the function that candidates have for Inductor's view of a buffer.

    Inductor counts an offset from the buffer's beginning, `as_strided` from the storage's: without
    an offset it keeps the buffer's own.
    """
    if "reinterpret_tensor(" not in text:
        return text
    tree = ast.parse(text, mode="eval")
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "reinterpret_tensor":
            node.func = ast.parse("torch.as_strided", mode="eval").body
            if len(node.args) > 3 and ast.unparse(node.args[3]) == "0":
                del node.args[3]
    return ast.unparse(tree)


def _require(task: Task, operation: str) -> None:
    if not allows(task.allow, f"aten::{operation}"):
        raise NoSeed(
            f"Inductor leaves aten::{operation} to a library, and the task has no allow for it"
        )


def _dtype(task: Task, traced: Traced, dtype: str) -> str:
    """A dtype as host code writes it: that of an argument, where cases differ."""
    if dtype == f"torch.{traced.dtype}" and len(case_dtypes(task)) > 1:
        for a in task.arguments:
            if a.shape is not None and a.dtype == CASE_DTYPE:
                return f"{a.name}.dtype"
    return dtype


def case_dtypes(task: Task) -> set[str]:
    """Dtypes of all visible cases."""
    return {c.dtype for k in (task.gpu, task.cpu) for c in (*k.check, *k.bench)}


def _row_major(size: str, stride: str, traced: Traced) -> bool:
    """Whether strides are those of a contiguous tensor, by trial."""
    rng = random.Random(0)  # noqa: S311 - any sizes will do
    for _ in range(3):
        dims: Mapping[str, int] = {n: rng.randrange(2, 1000) for n in traced.symbols.values()}
        try:
            sizes, strides = (eval(t, {"__builtins__": {"max": max}}, dims) for t in (size, stride))  # noqa: S307
        except NameError:
            return False
        expected = 1
        for n, s in zip(reversed(sizes), reversed(strides), strict=True):
            if s != expected:
                return False
            expected *= n
    return True


def dims_lines(task: Task, host: Sequence[str]) -> list[str]:
    """Lines that give the dimensions that host code names."""
    parameters = {a.name for a in task.arguments}
    needed = [d for d in task.dims if d not in parameters and _uses(host, d)]
    lines: list[str] = []
    for a in task.arguments:
        if a.shape is None:
            if a.value in needed:
                lines.append(f"{a.value} = {a.name}")
                needed.remove(str(a.value))
            continue
        found = {s: i for i, s in enumerate(a.shape) if s in needed}
        if len(found) == len(a.shape) > 1:
            lines.append(f"{', '.join(map(str, found))} = {a.name}.shape")
        else:
            lines += [f"{s} = {a.name}.shape[{i}]" for s, i in found.items()]
        needed = [d for d in needed if d not in found]
    if needed:
        raise NoSeed(f"no argument's shape is the dimension {needed[0]} itself")
    return lines
