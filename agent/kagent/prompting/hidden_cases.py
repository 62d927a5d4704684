"""Distributions of hidden cases, as task.toml has them. The draws themselves appear nowhere."""

from __future__ import annotations

import math
from collections.abc import Sequence

from kagent_sandbox.data.generator import Generator
from kagent_sandbox.data.ranges import ListRange, Range
from kagent_sandbox.data.task import Cases

from kagent.prompting.cases import SHORT_DTYPES


def generator_line(generator: Generator) -> str:
    """'2 × bf16 or fp16, M 2 to 300, N a prime from 600 to 1023; inputs normal or ramp'."""
    dtypes = _choice([SHORT_DTYPES.get(d, d) for d in generator.dtype])
    dims = [f"{name} {_size(values)}" for name, values in generator.dims.items()]
    notes = [f"inputs {_choice(generator.inputs)}"] if generator.inputs != ("normal",) else []
    if generator.scale != (1.0,):
        notes.append(f"scale {_choice([f'{s:g}' for s in generator.scale])}")
    if any(generator.noncontiguous):
        notes.append("rows padded" if all(generator.noncontiguous) else "rows padded or not")
    if any(generator.offset):
        notes.append(f"offset {_choice([str(o) for o in generator.offset])}")
    text = f"{generator.count} × {dtypes}, {', '.join(dims)}"
    if generator.cost is not None:
        bounds = [f"at least {generator.least:g}"] if generator.least else []
        bounds += [f"at most {generator.most:g}"] if generator.most < math.inf else []
        text += f", {generator.cost} {' and '.join(bounds)}"
    return f"{text}; {', '.join(notes)}" if notes else text


def _size(values: Sequence[object] | Range | ListRange) -> str:
    if isinstance(values, ListRange):
        total = "" if values.total is None else f", in all {values.total}"
        return f"{values.count} numbers from {values.min} to {values.max}{total}"
    if not isinstance(values, Range):
        return _choice([str(v) for v in values])
    span = f"{values.min} to {values.max}"  # evenly in the logarithm
    if values.prime:
        return f"a prime from {span}"
    return f"{span} in steps of {values.multiple}" if values.multiple > 1 else span


def _choice(values: Sequence[str]) -> str:
    return values[0] if len(values) == 1 else f"{', '.join(values[:-1])} or {values[-1]}"


def strides_text(cases: Cases, contiguous: bool = True) -> str:
    """Describe the strides and offsets that inputs can have, but for those with a layout of their
    own if not all are `contiguous`.
    """
    inputs = "Inputs" if contiguous else "Inputs without strides of their own"
    own = (*cases.check, *cases.bench)
    drawn = (*cases.hidden_check, *cases.hidden_bench)
    padded = [c.name for c in own if c.noncontiguous]
    hidden_padded = any(any(g.noncontiguous) for g in drawn)
    shifted = any(c.offset for c in own) or any(any(g.offset) for g in drawn)
    lines = []
    if padded or hidden_padded:
        where = [*padded, *(["some hidden check cases"] if hidden_padded else [])]
        lines.append(
            f"{inputs} are contiguous but for {_choice(where)}: there each row starts 8 elements "
            "after the end of the one before. The last stride is always 1, no stride is 0. The gap "
            "between two rows may be read (it holds NaN), nothing before the first or after the "
            "last."
        )
    else:
        lines.append(f"{inputs} are contiguous in every case, hidden ones included.")
    if shifted:
        lines.append(
            "In some check cases, hidden ones too, inputs start a few elements after an aligned "
            "address: data_ptr() is a multiple of the element's size and no more there, and "
            "storage_offset() says by how many elements. Vector loads, cp.async and TMA need an "
            "address that is a multiple of their width: take another path there, or .clone() the "
            "input. Elsewhere inputs are aligned to 512 bytes, results always."
        )
    else:
        lines.append("Storage offsets are 0: inputs are aligned to 512 bytes.")
    return " ".join(lines)
