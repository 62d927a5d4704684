"""Checks of a plan that an untrusted builder sent, against the request and against the binaries
themselves.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from kagent_sandbox.build.inspect import InspectError, architecture, kernel_info
from kagent_sandbox.build.request import BuildCase, BuildRequest, TensorSpec
from kagent_sandbox.build.results import wrong_results
from kagent_sandbox.plan import KernelInfo, Plan, PlanError, TensorRef
from kagent_sandbox.plan_json import parse_plan


class Forged(Exception):  # noqa: N818
    """The builder's answer is not what a builder that was left alone sends."""


def checked_plan(
    data: bytes, binaries: Mapping[str, bytes], case: BuildCase, request: BuildRequest
) -> Plan:
    """Parse a plan; its kernels are described anew from the binaries.

    Raises:
        Forged: It is malformed, is for another target, takes other inputs than the case has,
            returns other
            results, or its kernels are not what it says.
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
    kernels = tuple(_kernel(k, binaries, request.target) for k in plan.kernels)
    return dataclasses.replace(plan, kernels=kernels)


def _check_inputs(plan: Plan, case: BuildCase) -> None:
    expected = {a.name: _nbytes(a) for a in case.arguments if isinstance(a, TensorSpec)}
    found = {b.name: b.nbytes for b in plan.buffers if b.kind == "input"}
    if found != expected:
        raise Forged(f"inputs {found}, the case has {expected}")


def _nbytes(spec: TensorSpec) -> int:
    return TensorRef(0, 0, spec.shape, spec.strides, spec.dtype).extent_bytes[1]


def _kernel(claimed: KernelInfo, binaries: Mapping[str, bytes], target: str) -> KernelInfo:
    binary = binaries.get(claimed.hash)
    if binary is None:
        raise Forged(f"kernel {claimed.name:.80} has no binary")
    try:
        found = kernel_info(binary, claimed.name, claimed.language)
        if (claimed.language == "cpp") != (target == "cpu"):
            raise Forged(f"a {claimed.language} kernel for {target}")
        if target != "cpu" and architecture(binary) != int(target[3:].rstrip("af")):
            raise Forged(f"kernel {claimed.name:.80} is for another architecture than {target}")
    except InspectError as e:
        raise Forged(str(e)) from None
    if found.hash != claimed.hash or found.param_bytes != claimed.param_bytes:
        raise Forged(f"kernel {claimed.name:.80} is not what its binary holds")
    return found
