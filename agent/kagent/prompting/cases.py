"""The benchmark cases of a task as a prompt shows them: bytes, operations, floors, baselines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kagent_sandbox.data.build import Value
from kagent_sandbox.data.build_case import build_case
from kagent_sandbox.data.case import Case
from kagent_sandbox.data.device import Ceilings
from kagent_sandbox.data.kind import Kind
from kagent_sandbox.data.race import TORCH
from kagent_sandbox.data.task import Task
from kagent_sandbox.judge.timing import metrics

from kagent.prompting.hardware import Hardware
from kagent.prompting.run_facts import RunFacts
from kagent.prompting.text import amount, microseconds, table

MOST_SHOWN = 16  # numbers of a list
LATENCY_US = 20.0  # floors below this are as much about launching and filling the device as bytes
SHORT_DTYPES = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "float32": "fp32",
    "float64": "fp64",
    "float8_e4m3fn": "e4m3",
    "float8_e5m2": "e5m2",
}


@dataclass(frozen=True, slots=True)
class BenchCase:
    """One visible benchmark case."""

    name: str
    shape: str  # "bf16 M=16384 N=1024"
    nbytes: float
    flops: float
    floor_us: float | None  # at the ceilings; None where no rate is known
    bound: str  # "memory", "compute"; what the floor is made of
    baselines: Mapping[str, float]  # µs
    row: int | None = None  # elements of a row of the first argument; None where it says little

    @property
    def best_of_torch(self) -> tuple[str, float] | None:
        """Name and µs of the fastest of eager and the torch.compile modes."""
        known = {n: us for n, us in self.baselines.items() if n in TORCH}
        if not known:
            return None
        name = min(known, key=lambda n: known[n])
        return name, known[name]


def bench_cases(task: Task, kind: Kind, device: Hardware, run_facts: RunFacts) -> list[BenchCase]:
    """The visible benchmark cases, in the task's order."""
    ceilings = device.ceilings or data_sheet(device)
    return [
        BenchCase(
            name=case.name,
            shape=shape_text(case),
            nbytes=task.min_bytes(case),
            flops=task.flop_count(case),
            floor_us=metrics.attainable_us(task, case, ceilings) if ceilings else None,
            bound=_bound(task, case, ceilings),
            baselines=run_facts.baselines.get(case.name, {}),
            row=_row(task, case),
        )
        for case in task.cases(kind).bench
    ]


def _row(task: Task, case: Case) -> int | None:
    """The last size of the first tensor; a matrix task's rows lie in its products."""
    shapes = [a.shape for a in task.arguments if a.shape]
    return None if task.matrix or not shapes else task.shape(shapes[0], case)[-1]


def data_sheet(device: Hardware) -> Ceilings | None:
    """Rates that nobody attains, for want of measured ones; None for a CPU."""
    if device.is_cpu or device.theoretical_gb_per_s <= 0:
        return None
    rate, peak = device.theoretical_gb_per_s, device.peak_tflop_per_s
    wide = {"bfloat16": peak, "float16": peak}
    fp8 = 2 * peak if device.target.capability >= 89 else peak  # before, they are converted
    narrow = {"int8": 2 * peak, "float8_e4m3fn": fp8}
    return Ceilings(rate, rate, rate, {**wide, **narrow} if peak else {})


def _bound(task: Task, case: Case, ceilings: Ceilings | None) -> str:
    if not task.matrix:
        return "memory"
    peak = None if ceilings is None else ceilings.tflop_per_s.get(task.product_dtype(case))
    if ceilings is None or not peak:
        return "compute"
    products_us = task.flop_count(case) / peak / 1e6
    return "compute" if products_us >= metrics.attainable_us(task, case, ceilings) else "memory"


def bounds_of(task: Task, cases: list[BenchCase], launches: int | None) -> frozenset[str]:
    """Name the limits of the task: "latency" where floors are short or a call has several launches.

    Where torch may do the products, kernels do the rest, and that is bound by memory.
    """
    found = {c.bound for c in cases} | ({"memory"} if task.allow else set())
    if any(c.floor_us is not None and c.floor_us < LATENCY_US for c in cases):
        found.add("latency")
    if launches is None or launches > 1:
        found.add("latency")
    return frozenset(found)


def shape_text(case: Case) -> str:
    """'bf16 M=16384 N=1024'."""
    dims = " ".join(f"{k}={_value(v)}" for k, v in case.dims.items())
    return f"{SHORT_DTYPES.get(case.dtype, case.dtype)} {dims}"


def _value(value: Value) -> str:
    """A number; of a long list the first ones and the sum."""
    if not isinstance(value, tuple):
        return str(value)
    shown = ",".join(map(str, value[:MOST_SHOWN]))
    more = f",... of {len(value)}, sum {sum(value)}" if len(value) > MOST_SHOWN else ""
    return f"[{shown}{more}]"


def case_line(task: Task, case: Case) -> str:
    """A check case: shape, and what is special about its inputs and strides."""
    notes = [f"inputs {case.inputs}"] if case.inputs != "normal" else []
    notes += [f"scale {case.scale:g}"] if case.scale != 1.0 else []
    if case.noncontiguous:
        tensors = build_case(task, case).tensors
        strides = ", ".join(
            f"{t.name} has strides {tuple(t.strides)}" for t in tensors if len(t.shape) > 1
        )
        notes.append(strides or "not contiguous")
    if case.offset:
        notes.append(f"inputs start {case.offset} elements after an aligned address")
    return f"{case.name}: {shape_text(case)}" + (f" ({'; '.join(notes)})" if notes else "")


def cases_table(cases: list[BenchCase], *, matrix: bool) -> str:
    """All cases: what must move or be computed, the floor, what torch and libraries take."""
    rows = []
    for c in cases:
        best = c.best_of_torch
        others = sorted((us, n) for n, us in c.baselines.items() if n not in TORCH)
        rows.append(
            [
                c.name,
                c.shape,
                amount(c.nbytes, "B"),
                amount(c.flops, "FLOP") if matrix else "",
                microseconds(c.floor_us) if c.floor_us is not None else "",
                f"{microseconds(best[1])} ({best[0]})" if best else "",
                ", ".join(f"{n} {microseconds(us)}" for us, n in others),
            ]
        )
    head = (
        *("case", "shape", "must move", "work", "floor, µs"),
        *("best of torch, µs", "libraries, µs"),
    )
    return table(head, rows)
