"""A region as a Python module of its own: its operations as calls of torch, and its inputs.

    def region(x0, x1): ...       # tensors in, tensors out; it writes to nothing that it is given
    def make_inputs(): ...        # tensors of the shapes, dtypes and values that the step had

The module imports torch and nothing else, so that `kagent new FILE:region --inputs make_inputs`
makes a task of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from kagent.workload.recording import Op, Recording, Value
from kagent.workload.regions import Region, place, title

_DRAW = '''
def _draw(shape, dtype, quantiles, nan=0.0, inf=0.0, minus_inf=0.0):
    """Values with these quantiles, from the least to the largest; shares of what is not finite."""
    knots = torch.tensor(quantiles, dtype=torch.float64)
    at = torch.rand(shape, dtype=torch.float64) * (len(quantiles) - 1)
    left = at.floor().long().clamp(max=max(len(quantiles) - 2, 0))
    right = (left + 1).clamp(max=len(quantiles) - 1)
    values = knots[left] + (knots[right] - knots[left]) * (at - left)
    special = torch.rand(shape)
    for share, value in ((nan, torch.nan), (inf, torch.inf), (minus_inf, -torch.inf)):
        values = values.masked_fill(special < share, value)
        special = special - share + (special < share)
    return (values if dtype.is_floating_point else values.round()).to(dtype)


def _strided(values, stride):
    """The same values with other strides; 0 where all along a dimension are the same."""
    sizes = [(n - 1) * s for n, s in zip(values.shape, stride)]
    flat = torch.zeros(sum(sizes) + 1, dtype=values.dtype)
    view = flat.as_strided(values.shape, stride)
    base = tuple(slice(0, 1) if s == 0 else slice(None) for s in stride)
    view[base] = values[base]
    return view
'''

_NORMALIZATIONS = {
    "native_layer_norm",
    "native_layer_norm_backward",
    "_fused_rms_norm",
    "_fused_rms_norm_backward",
}
"""Operations that are told the last sizes of their tensors."""


class NotWritable(Exception):  # noqa: N818
    """A region cannot be written as a function; the text says why."""


def region_source(region: Region, recording: Recording) -> dict[str, str]:
    """Write a region.

    Args:
        region: The region.
        recording: Of its step, with statistics.

    Returns:
        {"text": the module} or {"refused": why there is none}.
    """
    try:
        return {"text": _text(region, recording)}
    except NotWritable as e:
        return {"refused": str(e)}


def _text(region: Region, recording: Recording) -> str:
    ops = _used([recording.ops[i] for i in region.ops])
    names: dict[Value, str] = {v: f"x{i}" for i, v in enumerate(region.inputs)}
    parameters = ", ".join(names.values())
    written: set[int] = set()
    lines = [_line(op, names, written) for op in ops]
    if not region.inputs or not region.outputs:
        raise NotWritable("it has no tensor as an input, or none as a result")
    results = ", ".join(_named(v, names, written) for v in region.outputs)
    drawn = [
        f"        {_drawn(v, recording.statistics.get(v, {}))},  # {names[v]}"
        for v in region.inputs
    ]
    body = "\n".join(f"    {line}" for line in [*lines, f"return {results}"])
    return (
        f'"""{title(region, recording.ops)}\n\n'
        f"A region of {place(region)}, {region.phase}, as a step of the script ran it. The inputs "
        f'have\nthe shapes, dtypes, strides and quantiles that were seen there.\n"""\n\n'
        f"import torch\n\naten = torch.ops.aten\n\n\n"
        f"def region({parameters}):\n{body}\n\n\n"
        f'def make_inputs():\n    """Arguments of `region`, drawn with torch\'s generator."""\n'
        f"    return (\n" + "\n".join(drawn) + "\n    )\n\n" + _DRAW
    )


def _used(ops: Sequence[Op]) -> list[Op]:
    """Operations without the views that nothing in the region reads, or that change nothing."""
    kept: list[Op] = []
    read: set[Value] = set()
    for op in reversed(ops):
        same = op.result in op.reads  # a detached tensor is the same to a function
        if not same and (not op.is_view or read & set(op.results)):
            kept.append(op)
            read.update(op.reads)
    return kept[::-1]


def _line(op: Op, names: dict[Value, str], written: set[int]) -> str:
    """An operation as an assignment; one that writes in place as one that does not."""
    if not op.name.startswith("aten."):
        raise NotWritable(f"{op.name} is no operation of torch's own")
    if op.opaque:
        raise NotWritable(f"{op.name} has tensors that are no plain ones (sparse, or a subclass)")
    if "nondeterministic_seeded" in op.tags:
        raise NotWritable(f"{op.name} draws random numbers")
    arguments = [_argument(i, op, names, written) for i in range(len(op.args))]
    arguments += [f"{k}={_code(v, names, written)}" for k, v in op.kwargs.items()]
    call = f"{_functional(op) if op.writes else op.name}({', '.join(arguments)})"
    if op.writes:
        written.add(op.writes[0].storage)
        return f"{_target(op.writes[0], names)} = {call}"
    if isinstance(op.result, Value):
        return f"{_target(op.result, names)} = {call}"
    if not op.results or not isinstance(op.result, list):
        raise NotWritable(f"{op.name} has no tensor as its result")
    targets = [_target(v, names) if isinstance(v, Value) else "_" for v in op.result]
    return f"{', '.join(targets)}{',' if len(targets) == 1 else ''} = {call}"


def _argument(position: int, op: Op, names: Mapping[Value, str], written: set[int]) -> str:
    """An argument; sizes that are bound to be a tensor's as those, so that they can vary."""
    given = op.args[position]
    if op.name.split(".")[1] in _NORMALIZATIONS and isinstance(given, list):
        tensor = next(a for a in op.args if isinstance(a, Value))
        if given == list(tensor.shape[-len(given) :]):
            return f"{_named(tensor, names, written)}.shape[-{len(given)}:]"
    return _code(given, names, written)


def _target(value: Value, names: dict[Value, str]) -> str:
    return names.setdefault(value, f"v{len(names)}")


def _functional(op: Op) -> str:
    """The operation that returns what this one writes: aten.add.Tensor of aten.add_.Tensor."""
    _, packet, overload = op.name.split(".")
    other = getattr(torch.ops.aten, packet.rstrip("_"), None)
    if not packet.endswith("_") or len(op.writes) != 1 or not hasattr(other, overload):
        raise NotWritable(f"{op.name} writes to its arguments")
    return f"aten.{packet.rstrip('_')}.{overload}"


def _named(value: Value, names: Mapping[Value, str], written: set[int]) -> str:
    if value in names:
        return names[value]
    if value.storage in written:
        raise NotWritable("it writes to a tensor and reads that through another view")
    raise NotWritable("a tensor in it comes from nowhere")


def _code(given: Any, names: Mapping[Value, str], written: set[int]) -> str:
    match given:
        case Value():
            return _named(given, names, written)
        case list() | tuple():
            return "[" + ", ".join(_code(v, names, written) for v in given) + "]"
        case torch.device():
            first = next(iter(names.values()), None)
            return f"{first}.device" if first else repr(str(given))
        case torch.dtype() | torch.layout() | torch.memory_format():
            return str(given)
        case float():
            return repr(given) if abs(given) < float("inf") else f'float("{given}")'
        case None | bool() | int() | str():
            return repr(given)
    raise NotWritable(f"an argument is a {type(given).__name__}, which no text stands for")


def _drawn(value: Value, statistics: Mapping[str, Any]) -> str:
    quantiles = [_short(q) for q in statistics.get("quantiles", ())] or ["0.0", "1.0"]
    if len(set(quantiles)) == 1:
        quantiles = quantiles[:1]
    special = "".join(
        f", {name.replace('-', 'minus_')}={statistics[name]:.3g}"
        for name in ("nan", "inf", "-inf")
        if name in statistics
    )
    whole = f"_draw({list(value.shape)}, torch.{value.dtype}, [{', '.join(quantiles)}]{special})"
    if value.stride == _contiguous(value.shape):
        return whole
    return f"_strided({whole}, {list(value.stride)})"


def _short(number: float) -> str:
    return repr(int(number)) if number == int(number) else f"{number:.4g}"


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))
