"""Checks of what an untrusted builder sent: plans against the request and against the binaries
themselves, configurations and rejections against what a builder that was left alone says.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import cast

from kagent_sandbox.builder import policy
from kagent_sandbox.builder.binary.elf import ElfError
from kagent_sandbox.builder.binary.inspect import InspectError, architecture, kernel_info
from kagent_sandbox.builder.binary.linked_libraries import forbidden_import
from kagent_sandbox.builder.binary.static_memory import excess_static
from kagent_sandbox.builder.declared_results import wrong_results
from kagent_sandbox.data import records
from kagent_sandbox.data.build import BuildCase, BuildRequest, TensorSpec
from kagent_sandbox.data.compiled import (
    MOST_NAME_CHARS,
    MOST_REMARK_CHARS,
    MOST_REMARKS,
    Remark,
)
from kagent_sandbox.data.language import language
from kagent_sandbox.data.plan import ITEMSIZE, KernelInfo, Plan, PlanError, TorchOp
from kagent_sandbox.data.plan_json import parse_plan
from kagent_sandbox.data.verdict import Rejected, Stage, Status
from kagent_sandbox.runtime.text import printable

_MOST_TUNABLES = 64
_MOST_TUNABLE_CHARS = 1000
_BUILD_STATUSES = frozenset(
    {
        Status.COMPILE_ERROR,
        Status.POLICY,
        Status.RESOURCE_LIMIT,
        Status.TIMEOUT,
        Status.RUNTIME_ERROR,
        Status.INCORRECT_SHAPE,
        Status.INCORRECT_DTYPE,
    }
)


class Forged(Exception):  # noqa: N818
    """The builder's answer is not what a builder that was left alone sends."""


def checked_configs(configs: Sequence[object]) -> tuple[Mapping[str, object], ...]:
    """Configurations of tunables: names and plain values, or such tables for autotuned kernels.

    Raises:
        Forged: They hold anything else, or texts that no source file has.
    """
    for config in configs:
        if not isinstance(config, dict) or len(config) > _MOST_TUNABLES:
            raise Forged("a configuration that is no table of tunables")
        for name, value in config.items():
            inside = value.items() if isinstance(value, dict) else [(name, value)]
            if len(inside) > _MOST_TUNABLES or not all(
                _is_short(key) and _is_tunable(v) for key, v in [*inside, (name, 0)]
            ):
                raise Forged("a configuration with values that no tunable has")
    return tuple(cast("Sequence[Mapping[str, object]]", configs))


def _is_tunable(value: object) -> bool:
    if isinstance(value, str):
        return _is_short(value)
    return isinstance(value, float) or (isinstance(value, int) and abs(value) < 2**64)


def _is_short(text: str) -> bool:
    return len(text) <= _MOST_TUNABLE_CHARS and text == printable(text)


def checked_remarks(data: Sequence[object]) -> tuple[Remark, ...]:
    """Check a compiler's remark: visible characters, of limited length.

    Raises:
        Forged: It is no list of pairs of texts, or too long.
    """
    if len(data) > MOST_REMARKS:
        raise Forged(f"{len(data)} remarks at once")
    found = []
    for each in data:
        match each:
            case [str(kernel), str(text)] if len(kernel) <= MOST_NAME_CHARS:
                text = text[:MOST_REMARK_CHARS]
                found.append(Remark(printable(kernel), printable(text)))
            case _:
                raise Forged("a remark that is none")
    return tuple(found)


def checked_rejection(data: object, cases: Collection[str]) -> Rejected:
    """A rejection that the builder's child may give: of building, for a reason that building has.

    Others are the judge's or the run's to find: duplicates, for one, are not charged.

    Raises:
        Forged: It is of another stage, status or case.
        RecordError: It is no rejection.
    """
    found = records.from_json(Rejected, data)
    if found.stage not in (Stage.PARSE, Stage.BUILD) or found.status not in _BUILD_STATUSES:
        raise Forged(f"a rejection as {found.stage} {found.status}")
    if found.case is not None and found.case not in cases:
        raise Forged("a rejection in a case that was not asked for")
    return dataclasses.replace(found, message=printable(found.message))


def checked_plan(
    data: bytes, binaries: Mapping[str, bytes], case: BuildCase, request: BuildRequest
) -> Plan:
    """Parse a plan; its kernels are described anew from the binaries.

    Raises:
        Forged: It is malformed, is for another target, takes other inputs than the case has,
            returns other results, asks torch for what the task does not allow, or its kernels are
            not what it says.
    """
    try:
        plan = parse_plan(data)
    except PlanError as e:
        raise Forged(str(e)) from None
    if plan.target != request.target:
        raise Forged(f"a plan for {plan.target}")
    _check_inputs(plan, case)
    if wrong := wrong_results(plan, case, request.source, request.entry):
        raise Forged(wrong.message)
    _check_operations(plan, request.allow)
    kernels = tuple(_kernel(k, binaries, request.target) for k in plan.kernels)
    return dataclasses.replace(plan, kernels=kernels)


def _check_inputs(plan: Plan, case: BuildCase) -> None:
    expected = {a.name: _nbytes(a) for a in case.arguments if isinstance(a, TensorSpec)}
    found = {b.name: b.nbytes for b in plan.buffers if b.kind == "input"}
    if found != expected:
        raise Forged(f"inputs {found}, the case has {expected}")


def _check_operations(plan: Plan, allow: Sequence[str]) -> None:
    """Host code that is left alone is refused before it records what the task does not allow."""
    for op in plan.ops:
        if isinstance(op, TorchOp) and not policy.allows(allow, op.name):
            raise Forged(f"torch operation {op.name:.80}, which this task does not allow")


def _nbytes(spec: TensorSpec) -> int:
    return spec.extent * ITEMSIZE[spec.dtype]


def _kernel(claimed: KernelInfo, binaries: Mapping[str, bytes], target: str) -> KernelInfo:
    binary = binaries.get(claimed.hash)
    if binary is None:
        raise Forged(f"kernel {claimed.name:.80} has no binary")
    try:
        found = kernel_info(binary, claimed.name, claimed.language)
        if (language(claimed.language).kind == "cpu") != (target == "cpu"):
            raise Forged(f"a {claimed.language} kernel for {target}")
        if target != "cpu" and architecture(binary) != int(target[3:].rstrip("af")):
            raise Forged(f"kernel {claimed.name:.80} is for another architecture than {target}")
        if target == "cpu" and (what := forbidden_import(binary)):
            raise Forged(f"kernel {claimed.name:.80} imports {what}")
        if excess := excess_static(binary, f"{claimed.name:.80}"):
            raise Forged(excess[0])
    except (InspectError, ElfError) as e:
        raise Forged(str(e)) from None
    if found.hash != claimed.hash or found.param_bytes != claimed.param_bytes:
        raise Forged(f"kernel {claimed.name:.80} is not what its binary holds")
    return found
