"""The fewest elements of each tensor that an operation must read and write, as formulas.

What is read or written by index alone needs no more than the places that the index has, and those
may be the same ones: half of them count.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from torch.fx import Node

from kagent.authoring.tracing.graph import BY_INDEX, operation_name
from kagent.authoring.tracing.trace import TracedOperation

_WRITES = {"index_copy_": 3, "index_add_": 3, "scatter_": 2, "scatter_add_": 2}
"""Operations that write into their first argument, with the place of the argument that has as many
elements as they write."""
_ADDS = frozenset({"index_add_", "scatter_add_"})  # they read what they write


def reads(trace: TracedOperation) -> list[Sequence[int | str]]:
    """Shapes of what must be read, by tensor: its own, or a formula of its elements alone."""
    found = []
    for i, (node, shape) in enumerate(zip(_inputs(trace), trace.shapes, strict=True)):
        counts = [_read(trace, node, user) for user in node.users]
        if i in trace.written:
            written = [_written(trace, node, user) for user in node.users]
            added = [
                n if operation_name(u) in _ADDS else "0"
                for u, n in zip(node.users, written, strict=True)
            ]
            counts = added if None not in written else [None]
        found.append(_least(shape, counts))
    return found


def writes(trace: TracedOperation) -> list[Sequence[int | str]]:
    """Shapes of what must be written: of the results, then of the tensors that are written."""
    inputs = _inputs(trace)
    found: list[Sequence[int | str]] = [result.shape for result in trace.results]
    for i in trace.written:
        counts = [_written(trace, inputs[i], user) for user in inputs[i].users]
        found.append(_least(trace.shapes[i], counts))
    return found


def _inputs(trace: TracedOperation) -> list[Node]:
    return [n for n in trace.graph.graph.nodes if n.op == "placeholder"]


def _least(shape: Sequence[int | str], counts: Sequence[str | None]) -> Sequence[int | str]:
    """The shape, or a formula of half of the elements that operations count, if that is less."""
    known = [c for c in counts if c is not None]
    if not known or len(known) < len(counts):
        return shape
    some = " + ".join(c for c in known if c != "0")
    return (f"min({_product(shape)}, ({some}) / 2)",) if some else (0,)


def _read(trace: TracedOperation, node: Node, user: Node) -> str | None:
    """Elements that an operation reads of a tensor by index; None if it may read all."""
    if not user.args or user.args[0] is not node:
        return None
    if getattr(user.target, "is_view", False):
        counts = [_read(trace, user, u) for u in user.users]
        known = [c for c in counts if c is not None]
        return " + ".join(known) if known and len(known) == len(counts) else None
    if operation_name(user) in BY_INDEX:
        return _elements(trace, user)
    places = user.args[1] if operation_name(user) == "embedding_bag" else None
    if not isinstance(places, Node):
        return None
    return f"{_elements(trace, places)} * {trace.text(node.meta['val'].shape[1])}"


def _written(trace: TracedOperation, node: Node, user: Node) -> str | None:
    """Elements that an operation writes into a tensor by index; None if it may write all."""
    if not user.args or user.args[0] is not node or user.users:
        return None
    if operation_name(user) in _WRITES:
        source = user.args[_WRITES[operation_name(user)]]
        return _elements(trace, source) if isinstance(source, Node) else None
    places: Any = user.args[1] if operation_name(user) == "index_put_" else ()
    if len(places) != 1 or not isinstance(places[0], Node):
        return None
    rest = [trace.text(n) for n in node.meta["val"].shape[1:]]
    return _product([_elements(trace, places[0]), *rest])


def _elements(trace: TracedOperation, node: Node) -> str:
    return _product([trace.text(n) for n in node.meta["val"].shape])


def _product(sizes: Sequence[int | str]) -> str:
    texts = [str(size) for size in sizes if str(size) != "1"]
    return " * ".join(t if re.fullmatch(r"[\w* ]+", t) else f"({t})" for t in texts) or "1"
