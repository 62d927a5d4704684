"""Notes on sizes that do not vary because a function takes them for numbers, with the line."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from pathlib import Path

import sympy
import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from kagent.authoring.tracing.operation import Operation
from kagent.authoring.tracing.source_file import is_users_file


def fixed_sizes(operation: Operation, env: ShapeEnv, fakes: Sequence[torch.Tensor]) -> list[str]:
    """Notes on sizes that might have varied, and were found to be as in the example, a line for
    each place of the user's file that needs them.

    Args:
        operation: The operation.
        env: Of its run on symbolic tensors, with what was demanded of sizes.
        fakes: The tensors of that run.
    """
    found: dict[str, dict[str, int]] = {}
    for example, fake in zip(operation.examples, fakes, strict=True):
        for d, size in enumerate(fake.shape):
            node = getattr(size, "node", None)
            if node is None or not env.simplify(node._expr).is_number:  # noqa: SLF001 - the symbol
                continue
            if place := _place(env, node._expr):  # noqa: SLF001
                found.setdefault(place, {})[f"{example.name}.shape[{d}]"] = example.shape[d]
    return [
        f"{', '.join(f'{name} stays {size}' for name, size in sizes.items())}: {place} takes it "
        "for a number"
        for place, sizes in found.items()
    ]


def _place(env: ShapeEnv, size: sympy.Expr) -> str:
    """Place where a size, or one that equals it, was compared with a number; "" if it is not the
    user's.
    """
    equal, left = {size}, True
    while left:
        pairs = (g.expr.args for g in env.guards if isinstance(g.expr, sympy.Eq))
        more = {e for pair in pairs if equal & set(pair) for e in pair if e.is_Symbol}
        left = bool(more - equal)
        equal |= more
    fixing = (
        g.sloc.framework_loc
        for g in env.guards
        if isinstance(g.expr, sympy.Eq)
        and equal & set(g.expr.args)
        and any(a.is_number for a in g.expr.args)
    )
    for frame in fixing:
        if isinstance(frame, traceback.FrameSummary) and is_users_file(frame.filename):
            return f"line {frame.lineno} of {Path(frame.filename).name} (`{frame.line}`)"
    return ""
