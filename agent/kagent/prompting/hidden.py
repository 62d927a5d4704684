"""What hidden cases are drawn from, as task.toml has it. The draws themselves appear nowhere."""

from __future__ import annotations

from collections.abc import Sequence

from kagent_sandbox.task import Cases, Generator, Range

from kagent.prompting.cases import SHORT_DTYPES


def generator_line(generator: Generator) -> str:
    """'2 × bf16 or fp16, M 2 to 300, N a prime from 600 to 1023; inputs normal or ramp'."""
    dtypes = _choice([SHORT_DTYPES.get(d, d) for d in generator.dtype])
    dims = [f"{name} {_size(values)}" for name, values in generator.dims.items()]
    notes = [f"inputs {_choice(generator.inputs)}"] if generator.inputs != ("normal",) else []
    if generator.scale != (1.0,):
        notes.append(f"scale {_choice([f'{s:g}' for s in generator.scale])}")
    text = f"{generator.count} × {dtypes}, {', '.join(dims)}"
    return f"{text}; {', '.join(notes)}" if notes else text


def _size(values: Sequence[int | bool] | Range) -> str:
    if not isinstance(values, Range):
        return _choice([str(v) for v in values])
    span = f"{values.min} to {values.max}"
    if values.prime:
        return f"a prime from {span}"
    return f"{span} in steps of {values.multiple}" if values.multiple > 1 else span


def _choice(values: Sequence[str]) -> str:
    return values[0] if len(values) == 1 else f"{', '.join(values[:-1])} or {values[-1]}"


def strides_text(cases: Cases) -> str:
    """Which strides inputs can have. Generators of hidden cases know contiguous ones only."""
    padded = [c.name for c in (*cases.check, *cases.bench) if c.noncontiguous]
    if not padded:
        return "Inputs are contiguous in every case, hidden ones included."
    return (
        f"Inputs are contiguous in every case, hidden ones included, but for {_choice(padded)}: "
        "there each row starts 8 elements after the end of the one before. The last stride is "
        "always 1, no stride is 0, storage offsets are 0. The gap between two rows may be read "
        "(it holds NaN), nothing before the first or after the last."
    )
