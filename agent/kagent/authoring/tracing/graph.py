"""Nodes of a recorded graph: what one needs, and what writes into one."""

from __future__ import annotations

import contextlib
import logging
import operator
from collections.abc import Iterator
from typing import Any

import torch
from kagent_sandbox.data.operation_schema import is_write
from torch.fx import GraphModule, Node

BY_INDEX = frozenset({"index", "embedding", "gather", "index_select", "take_along_dim"})
"""Operations that give an element for each that they read of their first argument, by an index."""

MOST_CONSTANT = 64
"""Elements of a constant tensor that are written down."""


def results_of(graph: GraphModule) -> Any:
    """Results of a graph: nodes, and values, in the form in which it returns them."""
    (output,) = (n for n in graph.graph.nodes if n.op == "output")
    return output.args[0]


def operation_name(node: Node) -> str:
    """Name of a node's operation of torch, without its overload's; "" if it is none."""
    packet = getattr(node.target, "overloadpacket", None)
    return getattr(packet, "__name__", "")


def ancestors(node: Node) -> set[Node]:
    """A node, what it needs, and what writes into that before it."""
    found: set[Node] = set()
    waiting = [node]
    while waiting:
        each = waiting.pop()
        if each in found:
            continue
        found.add(each)
        waiting += each.all_input_nodes
        waiting += [w for w in writers(each) if w < node]
    return found


def is_written(node: Node) -> bool:
    """Whether an operation writes a node's result, or a view of it, in place."""
    return any(True for _ in writers(node))


def writers(node: Node) -> Iterator[Node]:
    """Operations that write a node's result, or a view of it, in place."""
    for user in node.users:
        target: Any = user.target
        if _writes(user):
            given = {p.name: a for p, a in zip(target._schema.arguments, user.args, strict=False)}  # noqa: SLF001 - as below
            given |= user.kwargs
            into = [given.get(p.name) for p in target._schema.arguments if is_write(p)]  # noqa: SLF001 - as below
            if any(node in (a if isinstance(a, list | tuple) else [a]) for a in into):
                yield user
        elif target is operator.getitem or getattr(target, "is_view", False):
            yield from writers(user)


def _writes(node: Node) -> bool:
    target: Any = node.target
    return isinstance(target, torch._ops.OpOverload) and bool(  # noqa: SLF001 - torch's own name
        target._schema.is_mutable  # noqa: SLF001 - torch's own name
    )


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep torch from logging what cannot be run: it is tried on purpose, or told in words."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(level)
