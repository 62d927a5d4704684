"""Requests to a builder and its answers, as plain data."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from kagent_sandbox.data.compiled import Loop, Remark
from kagent_sandbox.data.language import languages_in
from kagent_sandbox.data.plan import Plan, TensorRef
from kagent_sandbox.data.target import Device

if TYPE_CHECKING:
    from kagent_sandbox.data.plan import Plan


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor that host code receives or must return. Strides and offset are in elements."""

    name: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    offset: int = 0  # where it starts in its buffer

    @property
    def extent(self) -> int:
        """Elements of its buffer: up to the last one that it reaches."""
        return TensorRef(0, self.offset, self.shape, self.strides, "uint8").extent_bytes[1]

    def ref(self, buffer: int) -> TensorRef:
        """All of it, where it is the argument in a plan's buffer."""
        return TensorRef(buffer, self.offset, self.shape, self.strides, self.dtype)


Value: TypeAlias = int | float | bool | str | tuple[int, ...]
"""A dimension or flag of a case, or what a call is given for an argument that is no tensor."""


@dataclass(frozen=True, slots=True)
class ScalarSpec:
    """A plain value that host code receives: a number, a flag, a text, whole numbers, or None."""

    name: str
    value: Value | None

    @property
    def given(self) -> object:
        """The value as a call has it: a list of whole numbers is a list."""
        return list(self.value) if isinstance(self.value, tuple) else self.value


@dataclass(frozen=True, slots=True)
class BuildCase:
    """One call to trace: arguments in the order of the entry's parameters, results in order.

    `writes` names the arguments that are compared like results after the call. A plan's outputs are
    the results, then these.
    """

    name: str
    arguments: tuple[TensorSpec | ScalarSpec, ...]
    results: tuple[TensorSpec, ...]
    writes: tuple[str, ...] = ()

    @property
    def tensors(self) -> tuple[TensorSpec, ...]:
        """The arguments that are tensors."""
        return tuple(a for a in self.arguments if isinstance(a, TensorSpec))

    @property
    def written(self) -> tuple[TensorSpec, ...]:
        """The arguments that are compared like results."""
        return tuple(a for a in self.tensors if a.name in self.writes)

    @property
    def compared(self) -> tuple[TensorSpec, ...]:
        """Names of a plan's outputs: the results, then the written arguments."""
        return (*self.results, *self.written)


@dataclass(frozen=True, slots=True)
class BuildRequest:
    """A candidate to build. `target` is "cpu" or a CUDA architecture such as "sm_90a"."""

    source: str
    entry: str
    target: str
    cases: tuple[BuildCase, ...]
    allow: tuple[str, ...] = ()  # torch operations beyond the ones always allowed
    mutates: tuple[str, ...] = ()  # arguments that host code and kernels may write
    max_configs: int = 1  # configurations of the tunables to build, the declared one first
    compile_limit_s: float = 20.0  # of CPU time per kernel
    host_limit_s: float = 10.0
    """Seconds for importing the file, and for host code of one case without its compiles. Either
    takes milliseconds.
    """
    wall_limit_s: float = 180.0
    """Seconds for the whole candidate: far off, so that a busy machine refuses nobody. After a
    third no further configuration is begun.
    """
    device: Device | None = None  # device that host code sees; None: the target's usual one
    ptx: bool = False  # whether somebody wants to read the kernels' PTX
    loops: bool = False  # whether somebody wants to read about the loops of their machine code

    @property
    def import_limit_s(self) -> float:
        """Seconds for importing the file, with the packages of the languages that it shows."""
        packages_s = sum(each.tracer_s for each in languages_in(self.source))
        return min(self.host_limit_s + packages_s, self.wall_limit_s)


@dataclass(frozen=True)
class Built:
    """Plans per (index into configs, case name), and the binaries that they launch, by hash.

    A configuration that could not be built for some case is missing from `plans` there; the
    declared one (index 0) is always complete. `dropped` says why others are missing.
    """

    source_hash: str
    tree_hash: str  # of the normalised syntax tree: comments, layout and local names do not count
    target: str
    configs: tuple[Mapping[str, object], ...]
    plans: Mapping[tuple[int, str], Plan]
    binaries: Mapping[str, bytes]
    build_s: float
    dropped: tuple[str, ...] = ()
    log: str = ""
    ptx: Mapping[str, str] = field(default_factory=dict)
    """PTX by hash of the kernel, where the request asked for it. It is the candidate's process's
    own word.
    """
    remarks: tuple[Remark, ...] = ()
    """Messages of the compilers about their kernels. Also the process's own word."""
    loops: tuple[Loop, ...] = ()
    """Loops of the declared configuration's kernels, where the request asked for them."""

    @property
    def work_hash(self) -> str:
        """Hash of all plans of all configurations: equal work, whatever the text."""
        from kagent_sandbox.data.packed_plans import PackedPlans
        from kagent_sandbox.data.plan_json import plan_identity

        if isinstance(self.plans, PackedPlans) and self.plans.work_hash:
            return self.plans.work_hash
        parts = sorted(f"{i} {case} {plan_identity(p)}" for (i, case), p in self.plans.items())
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()


@dataclass(frozen=True)
class Contender:
    """A candidate that is ready to be timed. `choice` has a configuration per case, 0 where
    missing.
    """

    id: str
    built: Built
    choice: Mapping[str, int]

    def plan(self, case: str) -> Plan:
        """The plan of its configuration for a case.

        Raises:
            KeyError: It was not built for the case.
        """
        config = self.choice.get(case, 0)
        plan = self.built.plans.get((config, case))
        return self.built.plans[0, case] if plan is None else plan


def key_of(built: Built) -> str:
    """Name under which the judge keeps a candidate: its source and what it was built for."""
    parts = [built.source_hash, built.target, *sorted(f"{i} {c}" for i, c in built.plans)]
    return hashlib.sha256("\n".join([*parts, *sorted(built.binaries)]).encode()).hexdigest()
