"""Differences of two plans of one call: the traced one, and the recorded one on real tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from kagent_sandbox.data.plan import (
    Alloc,
    Const,
    Copy,
    Fill,
    Free,
    Launch,
    Op,
    Plan,
    Pointer,
    Scalar,
    Struct,
    TensorMap,
    TensorRef,
    TorchOp,
)
from kagent_sandbox.runtime.text import printable

_MAX_TEXT = 2000


def first_difference(plan: Plan, done: Plan) -> str | None:
    """The first operation or result that differs, in words; None if all are the same."""
    if len(done.launches) != len(plan.launches):
        return f"{len(done.launches)} launches, the plan has {len(plan.launches)}"
    want, got = list(_events(plan)), list(_events(done))
    for i, (w, g) in enumerate(zip(want, got, strict=False), 1):
        if w != g:
            return printable(f"step {i} is {_text(g, w)}, the plan's {_text(w, g)}")[:_MAX_TEXT]
    if len(want) != len(got):
        return f"{len(got)} steps and results, the plan has {len(want)}"
    return None


Event = dict[str, object]


def _text(event: Event, other: Event) -> str:
    """Describe an event, and its difference from another."""
    if event["what"] != other["what"]:
        return str(event["what"])
    shown = {k: v for k, v in event.items() if other.get(k) != v}
    return f"{event['what']} with " + ", ".join(f"{k} {v}" for k, v in shown.items())


def _events(plan: Plan) -> Iterator[Event]:
    """List the steps and results of a plan, in order. Buffers are called by their arguments' names,
    and the rest by the order in which they are first used: when memory is taken and freed does not
    count.
    """
    names = _Names(plan)
    for op in plan.ops:
        if not isinstance(op, Alloc | Free):
            yield _event(op, names)
    for ref in plan.outputs:
        yield {"what": "result", "tensor": names.view(ref)}


def _event(op: Op, names: _Names) -> Event:
    if isinstance(op, Launch):
        return {
            "what": "launch",
            "kernel": op.kernel,
            "arguments": [names.argument(a) for a in op.args],
            **{
                f: getattr(op, f)
                for f in ("grid", "block", "shared", "cluster", "cooperative", "pdl")
            },
        }
    if isinstance(op, Fill):
        return {"what": "fill", "tensor": names.view(op.tensor), "value": _number(op.value)}
    if isinstance(op, Copy):
        source = names.view(_expanded(op.src, op.dst.shape))
        return {"what": "copy", "from": source, "to": names.view(op.dst)}
    if isinstance(op, Const):
        return {"what": "constant", "tensor": names.view(op.tensor), "data": op.data}
    assert isinstance(op, TorchOp)
    return {
        "what": op.name,
        "arguments": [names.operand(a) for a in op.args],
        "options": {k: names.operand(v) for k, v in op.kwargs.items()},
        "writes": [names.view(t) for t in op.writes],
    }


def _expanded(ref: TensorRef, shape: tuple[int, ...]) -> TensorRef:
    """Expand as a copy does: torch may expand before or in the copy."""
    missing = len(shape) - len(ref.shape)
    sizes, strides = (1,) * missing + ref.shape, (0,) * missing + ref.strides
    kept = (s if n != 1 else 0 for n, s in zip(sizes, strides, strict=True))
    return dataclasses.replace(ref, shape=shape, strides=tuple(kept))


class _Names:
    """Buffers of a plan by what they are to it."""

    def __init__(self, plan: Plan) -> None:
        self._names = {b.id: b.name for b in plan.buffers if b.kind == "input"}
        self._nbytes = {b.id: b.nbytes for b in plan.buffers}

    def place(self, buffer: int) -> str:
        """An input's name; else a number, by first use, and its size."""
        name = self._names.get(buffer)
        if name is None:
            made = sum(1 for n in self._names.values() if n is not None and n.startswith("#"))
            name = self._names[buffer] = f"#{made} of {self._nbytes[buffer]} bytes"
        return name

    def view(self, ref: TensorRef) -> tuple[object, ...]:
        """Describe which elements of which buffer a view has."""
        return self.place(ref.buffer), ref.offset, ref.shape, ref.strides, ref.dtype

    def argument(self, arg: object) -> tuple[object, ...]:
        """A kernel's argument."""
        if isinstance(arg, Pointer):
            return "pointer", self.place(arg.buffer), arg.offset
        if isinstance(arg, Scalar):
            return arg.type, _number(arg.value)
        if isinstance(arg, TensorMap):
            fields = dataclasses.asdict(arg)
            return "tensor map", self.place(fields.pop("buffer")), tuple(fields.items())
        if isinstance(arg, Struct):
            inside = tuple((offset, self.argument(value)) for offset, value in arg.placed)
            return "structure", arg.data, inside
        return ("null",)

    def operand(self, value: object) -> object:
        """An argument of a torch operation."""
        if isinstance(value, TensorRef):
            return self.view(value)
        if isinstance(value, list | tuple):
            return [self.operand(v) for v in value]
        return _number(value) if isinstance(value, int | float) else value


def _number(value: float) -> str:
    """Text that tells all numbers apart, and NaN from none."""
    return value.hex() if isinstance(value, float) else str(int(value))
