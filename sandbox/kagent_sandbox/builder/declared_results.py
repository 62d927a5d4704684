"""Whether a plan returns what the task declares. Asked by the builder, and again by whoever
receives the plan.
"""

from __future__ import annotations

import ast

from kagent_sandbox.data.build import BuildCase
from kagent_sandbox.data.plan import Plan
from kagent_sandbox.data.verdict import Rejected, Stage, Status
from kagent_sandbox.syntax import parse


def wrong_results(plan: Plan, case: BuildCase, source: str, entry: str) -> Rejected | None:
    """The rejection of a plan whose results have another number, shape or dtype; None if all is
    well.

    The message names the line of the entry's last `return`.
    """
    where = _return_line(source, entry)
    if len(plan.outputs) != len(case.compared):
        found = len(plan.outputs) - len(case.written)
        message = f"{where}{entry} returns {found} tensors, the task declares {len(case.results)}"
        return Rejected(Stage.BUILD, Status.INCORRECT_SHAPE, message, case.name)
    returned = plan.outputs[: len(case.results)]
    places = {b.id: b.name for b in plan.buffers if b.kind == "input"}
    for got, written in zip(plan.outputs[len(returned) :], case.written, strict=True):
        if got != written.ref(got.buffer) or places.get(got.buffer) != written.name:
            message = f"the plan's outputs are not the argument {written.name} that it must write"
            return Rejected(Stage.BUILD, Status.INCORRECT_SHAPE, message, case.name)
    for got, expected in zip(returned, case.results, strict=True):
        if got.buffer in places:
            return Rejected(
                Stage.BUILD,
                Status.INCORRECT_SHAPE,
                f"{where}result {expected.name} lies in the memory of the argument "
                f"{places[got.buffer]}, which is the caller's: allocate the result "
                "(torch.empty_like)",
                case.name,
            )
        if any(n > 1 and not stride for n, stride in zip(got.shape, got.strides, strict=True)):
            return Rejected(
                Stage.BUILD,
                Status.INCORRECT_SHAPE,
                f"{where}several elements of result {expected.name} are the same memory (strides "
                f"{_shape(got.strides)}), which nobody could write: allocate all of it",
                case.name,
            )
        if got.shape != expected.shape:
            return Rejected(
                Stage.BUILD,
                Status.INCORRECT_SHAPE,
                f"{where}result {expected.name} has shape {_shape(got.shape)}, the task declares "
                f"{_shape(expected.shape)}: allocate it with that shape",
                case.name,
            )
        if got.dtype != expected.dtype:
            return Rejected(
                Stage.BUILD,
                Status.INCORRECT_DTYPE,
                f"{where}result {expected.name} has dtype {got.dtype}, the task declares "
                f"{expected.dtype}: allocate it with dtype=torch.{expected.dtype} and convert in "
                "the kernel's store",
                case.name,
            )
    return None


def _shape(shape: tuple[int, ...]) -> str:
    return f"({', '.join(map(str, shape))}{',' if len(shape) == 1 else ''})"


def _return_line(source: str, entry: str) -> str:
    """Line number and text of the entry's last return, to begin a message with; or nothing."""
    try:
        tree = parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ""
    lines = source.splitlines()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == entry:
            returns = [n.lineno for n in ast.walk(node) if isinstance(n, ast.Return)]
            line = max(returns, default=node.lineno)
            return f"line {line}: `{lines[line - 1].strip()[:200]}`: "
    return ""
