"""The call that host code sees in a case of a task: sizes, strides and scalars, as numbers."""

from __future__ import annotations

from collections.abc import Sequence

from kagent_sandbox.data.arguments import Layout
from kagent_sandbox.data.build import BuildCase, ScalarSpec, TensorSpec
from kagent_sandbox.data.case import Case, Size
from kagent_sandbox.data.task import Task, unfit


def build_case(task: Task, case: Case) -> BuildCase:
    """The call that host code sees in a case; worked out once per case.

    Non-contiguous cases pad the last dimension: each row of an input starts 8 elements after the
    end of the one before. With an offset, inputs start as many elements behind an aligned address.

    Raises:
        TaskError: A formula has no value in this case, or a size is no whole number.
    """
    dims = sorted(case.dims.items(), key=lambda item: item[0])
    key = (case.name, case.dtype, case.noncontiguous, case.offset, *dims)
    if key not in task.known_build_cases:
        try:
            task.known_build_cases[key] = _build_case(task, case)
        except ValueError as e:
            raise unfit(task, f"case {case.name}", e) from None
    return task.known_build_cases[key]


def _build_case(task: Task, case: Case) -> BuildCase:
    def spec(
        name: str,
        shape: Sequence[Size],
        dtype: str,
        *,
        layout: Layout = "contiguous",
        pad: bool = False,
        offset: int = 0,
    ) -> TensorSpec:
        sizes = task.shape(shape, case)
        strides = strides_of(sizes, layout, pad=pad)
        return TensorSpec(name, sizes, strides, task.dtype(dtype, case), offset)

    arguments: list[TensorSpec | ScalarSpec] = []
    for a in task.arguments:
        if a.optional is not None and not task.formula(a.optional, case):
            arguments.append(ScalarSpec(a.name, None))
        elif a.shape is not None:
            pad, offset = case.noncontiguous, case.offset
            arguments.append(
                spec(a.name, a.shape, a.dtype, layout=a.layout, pad=pad, offset=offset)
            )
        elif a.value is not None:
            arguments.append(ScalarSpec(a.name, task.scalar(a, case)))
    results = tuple(spec(r.name, r.shape, r.dtype) for r in task.results)
    writes = tuple(a.name for a in task.arguments if a.writes is not None)
    return BuildCase(case.name, tuple(arguments), results, writes)


def strides_of(
    sizes: Sequence[int], layout: Layout = "contiguous", *, pad: bool = False
) -> tuple[int, ...]:
    """Strides in elements of a tensor in a layout.

    Args:
        sizes: Its shape.
        layout: "transposed": the last two dimensions are swapped in memory; "channels_last": the
            second dimension is the innermost; "strided": every other element of its memory.
        pad: Whether the rows of a contiguous one lie 8 elements further apart.
    """
    order = list(range(len(sizes)))  # outermost first
    if layout == "transposed":
        order[-2:] = order[-1], order[-2]
    elif layout == "channels_last":
        order.append(order.pop(1))
    strides, step = [1] * len(sizes), 2 if layout == "strided" else 1
    for place, i in enumerate(reversed(order)):
        strides[i] = step
        gap = 8 if pad and layout == "contiguous" and place == 0 and len(sizes) > 1 else 0
        step *= sizes[i] + gap
    return tuple(strides)
