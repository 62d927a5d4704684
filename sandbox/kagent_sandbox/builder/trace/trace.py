"""Run a candidate's host code once on symbolic tensors, and hand out its plan.

`load_candidate` and `trace_case` run in a confined child that holds nothing worth stealing: what
the candidate does to this process it does to its own plan, and the judge validates and measures
that plan like any other.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import linecache
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import torch

from kagent_sandbox.builder.compile.errors import compile_rejection
from kagent_sandbox.builder.policy import CANDIDATE_FILE, BuildRejected, rejected
from kagent_sandbox.builder.trace import dispatch, kernel_launches, outside_world
from kagent_sandbox.builder.trace import torch_stubs as fakes
from kagent_sandbox.builder.trace import triton as triton_backend
from kagent_sandbox.builder.trace.recorder import Recorder
from kagent_sandbox.builder.trace.symbolic import SymbolicTensor
from kagent_sandbox.data.build import BuildCase, ScalarSpec, TensorSpec
from kagent_sandbox.data.language import languages_in
from kagent_sandbox.data.plan import Plan, TensorRef
from kagent_sandbox.data.target import Target
from kagent_sandbox.data.verdict import Stage, Status
from kagent_sandbox.errors import MachineError

_MODULE = "candidate"


def load_candidate(source: str, tmp: Path, target: Target) -> ModuleType:
    """Install the stand-ins for `target` and import the candidate from a file in `tmp`.

    Raises:
        BuildRejected: It does not parse, or fails or does something forbidden while it is imported.
    """
    fakes.install(target)
    outside_world.install()
    kernel_launches.install()
    triton_backend.install(target)
    device = device_of(target)
    SymbolicTensor.on_operation = staticmethod(
        lambda func, args, kwargs: dispatch.handle(func, args, kwargs, device)
    )
    for each in languages_in(source):
        if each.tracer:
            importlib.import_module(each.tracer).install(target, tmp)
    path = tmp / CANDIDATE_FILE
    path.write_text(source)
    linecache.checkcache(str(path))
    spec = importlib.util.spec_from_file_location(_MODULE, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[_MODULE] = module
    try:
        with dispatch.TraceDispatch(device), dispatch.Factories(device):
            spec.loader.exec_module(module)
    except (Exception, SystemExit) as e:  # noqa: BLE001 - whatever host code raises is its verdict
        raise _rejection(outside_world.first_refusal() or e, module) from None
    if (refusal := outside_world.first_refusal()) is not None:
        raise rejected(refusal, Stage.BUILD)
    return module


def device_of(target: Target) -> torch.device:
    """Return the device that symbolic tensors claim to be on."""
    return torch.device("cpu") if target.is_cpu else torch.device("cuda", 0)


def trace_case(
    module: ModuleType,
    entry: str,
    case: BuildCase,
    target: Target,
    allow: Sequence[str] = (),
    mutates: Sequence[str] = (),
    compile_limit_s: float = 20.0,
) -> tuple[Plan, dict[str, bytes]]:
    """Call the entry with symbolic arguments.

    What host code remembers of earlier calls in this process may show: the caller sees to that. The
    process's heap stays frozen.

    Args:
        module: The candidate, imported.
        entry: Name of its function.
        case: The arguments' shapes, strides and dtypes.
        target: "cpu" or an architecture.
        allow: Torch operations beyond the ones always allowed.
        mutates: Arguments that host code and kernels may write.
        compile_limit_s: Seconds per kernel.

    Returns:
        The plan, and its binaries by hash.

    Raises:
        BuildRejected: Host code fails, breaks the policy, or does not compile; with its line.
    """
    function = _entry(module, entry, case)
    device = device_of(target)
    recorder = Recorder(device, target.name, allow, mutates, compile_limit_s)
    try:
        with fakes.no_garbage_collection(thaws=False), recorder:
            arguments = [_argument(recorder, a) for a in case.arguments]
            with dispatch.TraceDispatch(device), dispatch.Factories(device):
                result = function(*arguments)
            gc.collect()  # objects in cycles are dead, too
            outputs = _outputs(recorder, result, case, arguments)
    except (Exception, SystemExit) as e:  # noqa: BLE001 - whatever host code raises is its verdict
        raise _rejection(recorder.violation or e, module) from None
    if recorder.violation is not None:
        raise rejected(recorder.violation, Stage.BUILD)
    return recorder.plan(outputs), recorder.binaries


def _rejection(error: BaseException, module: ModuleType) -> BuildRejected:
    if isinstance(error, MachineError):
        raise error  # never the candidate's fault
    return compile_rejection(error, module) or rejected(error, Stage.BUILD)


def _entry(module: ModuleType, entry: str, case: BuildCase) -> Any:
    function = getattr(module, entry, None)
    if callable(function):
        return function
    names = ", ".join(
        n
        for n, v in vars(module).items()
        if callable(v) and getattr(v, "__module__", "") == _MODULE
    )
    parameters = ", ".join(a.name for a in case.arguments)
    raise BuildRejected(
        Stage.PARSE,
        Status.POLICY,
        f"no function named {entry!r} (the file defines {names or 'none'}): define "
        f"`def {entry}({parameters}):` that allocates the results, launches the kernels and "
        "returns the results",
    )


def _argument(recorder: Recorder, spec: TensorSpec | ScalarSpec) -> object:
    if isinstance(spec, ScalarSpec):
        return spec.given
    dtype = getattr(torch, spec.dtype)
    whole = torch.empty(spec.extent, dtype=dtype, device="meta")
    return recorder.input(spec.name, whole.as_strided(spec.shape, spec.strides, spec.offset))


def _outputs(
    recorder: Recorder, result: object, case: BuildCase, arguments: Sequence[object]
) -> list[TensorRef]:
    """The results, then the arguments that are written, as references; shapes and dtypes are
    compared by the caller.
    """
    given = {a.name: v for a, v in zip(case.arguments, arguments, strict=True)}
    written = [recorder.tensor(cast("torch.Tensor", given[a.name])) for a in case.written]
    names = [r.name for r in case.results]
    if not names:
        if result is not None:
            raise _wrong_results(f"a {type(result).__name__}", names)
        return written
    if isinstance(result, Mapping):
        if set(result) != set(names):
            raise _wrong_results(f"a dictionary of {sorted(map(str, result))}", names)
        result = tuple(result[n] for n in names)
    values = tuple(result) if isinstance(result, list | tuple) else (result,)
    if len(values) != len(names):
        raise _wrong_results(f"{len(values)} results", names)
    for name, value in zip(names, values, strict=True):
        if not isinstance(value, torch.Tensor):
            raise _wrong_results(f"a {type(value).__name__} as {name!r}", names)
    return [*(recorder.tensor(v) for v in values), *written]


def _wrong_results(what: str, names: Sequence[str]) -> BuildRejected:
    expected = f"the tensor {names[0]}" if len(names) == 1 else f"the tensors ({', '.join(names)})"
    if not names:
        expected = "nothing: the results of this task are the arguments that it writes"
    return BuildRejected(
        Stage.BUILD,
        Status.INCORRECT_SHAPE,
        f"the entry function returns {what}: return {expected}",
    )
