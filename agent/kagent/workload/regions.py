"""Regions of a step: what one kernel could do.

A region is either one operation that stands for itself (a matrix product, a copy), or several that
a kernel could do at once: pointwise operations, reductions and normalizations between two that
stand for themselves, connected by their data, in one direction of one step. No result of such a
region has to leave the chip on its way to the next operation.

Regions with the same operations and shapes are one entry, wherever they are in the model.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from kagent.workload.recording import OUTSIDE, Op, Phase, Recording, Value, plain_path

Kind: TypeAlias = Literal["fused", "product", "attention", "copy", "communication", "other"]
_REDUCTIONS = {
    "_softmax", "_softmax_backward_data", "_log_softmax", "_log_softmax_backward_data",
    "logsumexp", "native_layer_norm", "native_layer_norm_backward", "native_group_norm",
    "native_group_norm_backward", "_fused_rms_norm", "_fused_rms_norm_backward", "mean",
    "var_mean", "native_batch_norm", "native_batch_norm_backward", "_to_copy", "nll_loss_forward",
    "nll_loss_backward", "log_sigmoid_forward", "mse_loss", "mse_loss_backward", "cumsum",
}  # fmt: skip
"""Operations that fuse although torch tags them neither as pointwise nor as a reduction."""
_CREATIONS = {
    "scalar_tensor",
    "full",
    "zeros",
    "ones",
    "arange",
    "zeros_like",
    "ones_like",
    "full_like",
}
"""Operations whose result a kernel knows without reading it."""
_GATHERS = {"embedding", "index", "index_select", "gather"}
"""Operations that read as much of their first tensor as they write."""
_COPIES = {"copy_", "clone", "_to_copy", "contiguous", "cat", "stack", "_local_scalar_dense"}
_COMMUNICATION = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "symm_mem")


@dataclass
class Region:
    """Operations of one step, in order. Values that come from outside, and that are used there."""

    kind: Kind
    ops: list[int] = field(default_factory=list)  # indices in the recording
    inputs: list[Value] = field(default_factory=list)
    outputs: list[Value] = field(default_factory=list)
    phase: Phase = "forward"
    modules: list[str] = field(default_factory=list)

    @property
    def read_bytes(self) -> int:
        """Bytes that it cannot but read: each storage once."""
        return _bytes(self.inputs)

    @property
    def written_bytes(self) -> int:
        """Bytes that it cannot but write."""
        return _bytes(self.outputs)


def regions_of(recording: Recording) -> list[Region]:
    """Group a step's operations; views of what comes from elsewhere belong to no region.

    Args:
        recording: The step.

    Returns:
        Regions in the order of their first operations.
    """
    ops = recording.ops
    groups = [_region(ops, group) for group in _groups(ops)]
    readers: dict[int, set[int]] = defaultdict(set)  # storage -> operations that read it
    for i, op in enumerate(ops):
        for value in op.reads:
            readers[value.storage].add(i)
    for region in groups:
        _find_ends(region, ops, readers, recording.alive)
    return groups


def fusible(op: Op) -> bool:
    """Whether a kernel can do it together with what comes before and after."""
    if (
        op.opaque
        or "nondeterministic_seeded" in op.tags
        or op.flops
        or not op.name.startswith("aten.")
    ):
        return False
    if op.writes and len(op.writes) != 1:
        return False
    name = _packet(op)
    return (
        bool({"pointwise", "reduction"} & op.tags) or name.rstrip("_") in _REDUCTIONS | _CREATIONS
    )


def _packet(op: Op) -> str:
    return op.name.split(".")[1]


def _groups(ops: Sequence[Op]) -> Iterator[list[int]]:
    """Indices of connected operations between two that cannot be fused."""
    stretch: list[int] = []
    phase: Phase | None = None
    for i, op in enumerate(ops):
        if op.phase != phase:
            yield from _connected(ops, stretch)
            stretch, phase = [], op.phase
        if op.is_view or fusible(op):
            stretch.append(i)
        else:
            yield from _connected(ops, stretch)
            stretch = []
            yield [i]
    yield from _connected(ops, stretch)


def _connected(ops: Sequence[Op], stretch: Sequence[int]) -> Iterator[list[int]]:
    """Split a stretch into parts without data in common; views alone are no part."""
    part_of: dict[int, list[int]] = {}  # storage -> its part
    parts: list[list[int]] = []
    for i in stretch:
        op = ops[i]
        joined = {id(p): p for v in op.reads if (p := part_of.get(v.storage)) is not None}
        if op.is_view and not joined:
            continue
        part = next(iter(joined.values()), [])
        for other in list(joined.values())[1:]:
            part += other
            parts = [p for p in parts if p is not other]
            part_of = {s: part if p is other else p for s, p in part_of.items()}
        if not joined:
            parts.append(part)
        part.append(i)
        for value in (*op.results, *op.writes):
            part_of[value.storage] = part
    yield from (sorted(p) for p in parts)


def _region(ops: Sequence[Op], group: Sequence[int]) -> Region:
    working = [i for i in group if not ops[i].is_view]
    kind = _kind(ops[working[0]]) if len(working) == 1 else "fused"
    modules = list(dict.fromkeys(ops[i].module for i in group))
    return Region(kind, list(group), phase=ops[group[0]].phase, modules=modules)


def _kind(op: Op) -> Kind:
    name = _packet(op)
    if op.name.startswith(_COMMUNICATION):
        return "communication"
    if "attention" in name:
        return "attention"
    if op.flops:
        return "product"
    if name in _COPIES:
        return "copy"
    return "fused" if fusible(op) else "other"


def _find_ends(
    region: Region,
    ops: Sequence[Op],
    readers: Mapping[int, set[int]],
    alive: frozenset[int],
) -> None:
    inside = set(region.ops)
    made: dict[int, Value] = {}  # storage -> the value that it holds at the end
    inputs: dict[Value, None] = {}
    for i in region.ops:
        op = ops[i]
        for value in op.reads:
            if value.storage not in made:
                inputs.setdefault(value)
        for value in op.writes:
            made[value.storage] = value
        for value in () if op.is_view else op.results:
            made.setdefault(value.storage, value)
    outside_of = {v.storage for v in inputs}
    region.inputs = list(inputs)
    last = max(region.ops)
    region.outputs = [
        value
        for storage, value in made.items()
        if storage in alive
        or storage in outside_of
        or any(i > last for i in readers[storage] - inside)
    ]


def _bytes(values: Sequence[Value]) -> int:
    largest: dict[int, int] = {}
    for value in values:
        largest[value.storage] = max(largest.get(value.storage, 0), value.nbytes)
    return sum(largest.values())


def traffic(region: Region, ops: Sequence[Op]) -> tuple[int, int]:
    """Bytes that a region must read and write, at least."""
    read, written = region.read_bytes, region.written_bytes
    if len(region.ops) == 1 and _packet(ops[region.ops[0]]) in _GATHERS and region.inputs:
        table = region.inputs[0].nbytes
        read += min(table, written) - table
    return read, written


def title(region: Region, ops: Sequence[Op]) -> str:
    """Names of the operations, without views: add → native_layer_norm."""
    names = [_packet(ops[i]) for i in region.ops if not ops[i].is_view]
    short: list[str] = []
    for name in names:
        if short and short[-1].split(" ×")[0] == name:
            count = int(short[-1].partition(" ×")[2] or 1) + 1
            short[-1] = f"{name} ×{count}"
        else:
            short.append(name)
    if len(short) > 5:
        short = [*short[:3], f"… {len(short) - 4} more …", short[-1]]
    return " → ".join(short)


def place(region: Region) -> str:
    """The deepest module that all of its operations are in, with `*` for numbers of layers."""
    if region.phase == "optimizer":
        return "(optimizer)"
    paths = [m.split(".") for m in region.modules if m != OUTSIDE]
    if not paths:
        return OUTSIDE
    common: list[str] = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        common.append(parts[0])
    return plain_path(".".join(common)) if common else OUTSIDE


def key_of(region: Region, ops: Sequence[Op]) -> str:
    """Key that is equal for regions that are alike: operations, connections, shapes and dtypes."""
    numbers: dict[tuple[int, int, int, tuple[int, ...]], int] = {}

    def value_text(value: Value) -> str:
        place = (value.storage, value.version, value.offset, value.shape)
        number = numbers.setdefault(place, len(numbers))
        return f"v{number}:{value.dtype}{list(value.shape)}{list(value.stride)}"

    def text(tree: object) -> str:
        match tree:
            case Value():
                return value_text(tree)
            case dict():
                return "{" + ",".join(f"{k}={text(v)}" for k, v in tree.items()) + "}"
            case list():
                return "[" + ",".join(map(text, tree)) + "]"
        # A rate of an optimizer changes from step to step.
        return "float" if rates and isinstance(tree, float) else repr(tree)

    rates = region.phase == "optimizer"
    lines: list[str] = [region.phase]
    for i in region.ops:
        op = ops[i]
        results = ",".join(map(value_text, op.results))
        lines.append(f"{op.name}({text(op.args)},{text(op.kwargs)})->{results}")
    lines.append(",".join(map(value_text, region.outputs)))
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:8]
