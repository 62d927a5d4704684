"""The confined side of `replay_real`: runs a candidate on real tensors, and says what it did, as
plans.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import torch

import kagent_sandbox
from kagent_sandbox.builder.configs import pin_config
from kagent_sandbox.builder.trace import dispatch
from kagent_sandbox.builder.trace.symbolic import SymbolicTensor
from kagent_sandbox.builder.trace.torch_stubs import no_garbage_collection
from kagent_sandbox.data import records
from kagent_sandbox.data.build import BuildCase, ScalarSpec, TensorSpec
from kagent_sandbox.data.plan import Plan
from kagent_sandbox.data.plan_json import dump_plan
from kagent_sandbox.device import compiler_cache
from kagent_sandbox.process.channel import ChannelClosed, Message
from kagent_sandbox.process.context import Context
from kagent_sandbox.replay import triton as replay_triton
from kagent_sandbox.replay.recorder import Operations, RealRecorder, Values
from kagent_sandbox.runtime.cuda_kernels import target_of
from kagent_sandbox.runtime.launches import Observed, observing

CALLS = 3
"""Calls of each case: what an exported library repeats is its second one."""
_MAX_TEXT = 2000
_MAX_ASKED_BYTES = 1 << 30
_KEPT_MODULES = ("kagent_sandbox.lang", "kagent_sandbox.runtime")
_hidden: dict[str, ModuleType] = {}


def handle(context: Context) -> None:
    """Handler of the fork-server: one candidate with one configuration, case after case."""
    message = context.channel.recv(None, max_bytes=_MAX_ASKED_BYTES)
    asked = cast("dict[str, Any]", message.obj)
    if asked["target"] != "cpu":
        _prepare_gpu(context, asked, message)
    context.lock()
    _look_like_a_user(context.tmp, keep_folders=asked["target"] != "cpu")
    # host code finds nothing of kagent's among its callers
    with ThreadPoolExecutor(1, thread_name_prefix="Thread") as thread:
        candidate = _Candidate(asked, context.tmp, thread)
        while True:
            try:
                answer, blobs = candidate.replay(message)
            except (Exception, SystemExit) as e:  # noqa: BLE001 - host code may raise anything
                answer, blobs = {"failed": f"{type(e).__name__}: {e}"[:_MAX_TEXT]}, []
            context.channel.send(answer, blobs)
            try:
                message = context.channel.recv(None, max_bytes=_MAX_ASKED_BYTES)
            except ChannelClosed:
                return


def _prepare_gpu(context: Context, asked: Mapping[str, Any], message: Message) -> None:
    """Make the context, and load what host code may need, before files become unreadable; then
    hand out what Triton has built for itself, for the next process to start from.
    """
    index = asked["device"]
    torch.cuda.set_device(index)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        a = torch.ones(64, 64, dtype=dtype, device=torch.device("cuda", index))
        torch.mm(a, a, out=torch.empty_like(a)).addmm_(a, a)
    torch.cuda.synchronize()
    if (here := target_of(index)) != asked["target"]:
        raise RuntimeError(f"the plan is for {asked['target']}, this device is {here}")
    folder = context.tmp / "triton"  # TRITON_CACHE_DIR
    built = message.blobs[0]
    compiler_cache.unpack(built, folder)
    replay_triton.warm_up()
    replay_triton.install()
    context.channel.send({"built": True}, [b"" if built else compiler_cache.pack(folder)])


def _look_like_a_user(folder: Path, *, keep_folders: bool) -> None:
    """Hide what tells this process from a user's, as far as it is easily seen; see `replay_real`.

    `keep_folders`: compilers that Triton starts find the private folder in the environment.
    """
    os.environ.update(USER="user", LOGNAME="user")
    os.chdir("/")
    if not keep_folders:
        tempfile.tempdir = str(folder)
        os.environ["HOME"] = "/home/user"
        for name in ("TMPDIR", "XDG_CACHE_HOME", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):
            os.environ.pop(name, None)
    _hide()


def _hide() -> None:
    """Leave in sys.modules what a library would have."""
    for name in [n for n in sys.modules if n.startswith("kagent_sandbox.")]:
        if not name.startswith(_KEPT_MODULES):
            _hidden[name] = sys.modules.pop(name)
            vars(kagent_sandbox).pop(name.split(".")[1], None)


def _case(record: object) -> BuildCase:
    """A case from its record, which names types by their modules."""
    sys.modules.update(_hidden)
    try:
        return records.from_json(BuildCase, record)
    finally:
        _hide()


class _Candidate:
    """A candidate's file with a configuration, in a thread in which nothing else runs."""

    def __init__(self, asked: Mapping[str, Any], folder: Path, thread: ThreadPoolExecutor) -> None:
        self._asked = asked
        self._folder = folder
        self._thread = thread
        self._function: Callable[..., object] | None = None
        self._device = device = torch.device("cpu")
        if asked["target"] != "cpu":
            self._device = device = torch.device("cuda", asked["device"])
            self._do(torch.cuda.set_device, device)
        SymbolicTensor.on_operation = staticmethod(
            lambda func, args, kwargs: dispatch.handle(func, args, kwargs, device)
        )

    def replay(self, message: Message) -> tuple[dict[str, object], list[bytes]]:
        """Call it, and again, with new tensors: the answer, and its blobs."""
        asked = cast("dict[str, Any]", message.obj)
        case = _case(asked["case"])
        values = dict(zip(asked["inputs"], message.blobs[1:], strict=True))
        plans: dict[bytes, None] = {}
        observed: dict[str, Observed] = {}
        for _ in range(CALLS):
            recorder, plan = self._replayed(asked, case, values)
            if recorder.violation is not None:
                return {"failed": str(recorder.violation)[:_MAX_TEXT]}, []
            plans[dump_plan(plan)] = None
            observed |= {o.source.key(o.target): o for o in recorder.observed}
        return _answer(list(plans), list(observed.values()))

    def _replayed(
        self, asked: Mapping[str, Any], case: BuildCase, values: Mapping[str, bytes]
    ) -> tuple[RealRecorder, Plan]:
        names = [a.name for a in case.arguments]
        recorder: RealRecorder = self._do(
            RealRecorder, self._device, asked["target"], asked["allow"], names
        )
        arguments = [self._do(self._argument, recorder, a, values) for a in case.arguments]
        if self._function is None:
            module = self._do(_load, self._asked["source"], self._folder)
            pin_config(module, self._asked["config"])
            self._function = getattr(module, self._asked["entry"])
        with no_garbage_collection(), recorder, observing(recorder.saw_launch):
            result = self._call(recorder, arguments)
            plan = self._do(_plan, recorder, case, result, arguments)
        if recorder.violation is None and self._device.type == "cuda":
            torch.cuda.synchronize()  # a fault is this candidate's
        return recorder, plan

    def _do(self, function: Callable[..., Any], *args: Any) -> Any:
        return self._thread.submit(function, *args).result()

    def _call(self, recorder: RealRecorder, arguments: Sequence[object]) -> object:
        assert self._function is not None
        modes = Values(recorder), Operations(recorder)
        for mode in modes:
            self._do(mode.__enter__)
        try:
            return self._do(self._function, *arguments)
        finally:
            for mode in reversed(modes):
                self._do(mode.__exit__, None, None, None)

    def _argument(
        self, recorder: RealRecorder, spec: TensorSpec | ScalarSpec, values: Mapping[str, bytes]
    ) -> object:
        if isinstance(spec, ScalarSpec):
            return spec.given
        dtype = getattr(torch, spec.dtype)
        whole = torch.empty(spec.extent, dtype=dtype, device=self._device)
        tensor = whole.as_strided(spec.shape, spec.strides, spec.offset)
        given = values.get(spec.name)
        if given:
            flat = torch.frombuffer(bytearray(given), dtype=torch.uint8).view(dtype)
            tensor.copy_(flat.view(spec.shape))
        elif dtype.is_floating_point:
            tensor.copy_(torch.randn(spec.shape, device=self._device))
        else:
            tensor.zero_()  # as an index, zero is always within
        recorder.argument(spec.name, tensor)
        return tensor


def _plan(
    recorder: RealRecorder, case: BuildCase, result: object, arguments: Sequence[object]
) -> Plan:
    """Return the recorded plan, with the results of the call and the arguments that it writes."""
    given = {a.name: v for a, v in zip(case.arguments, arguments, strict=True)}
    if isinstance(result, Mapping):
        result = tuple(result[r.name] for r in case.results)
    values = tuple(result) if isinstance(result, tuple | list) else (result,)
    if not case.results and result is None:
        values = ()
    values = (*values, *(given[a.name] for a in case.written))
    if wrong := [type(v).__name__ for v in values if not recorder.here(v)]:
        raise TypeError(f"it returns a {wrong[0]}")
    return recorder.plan([recorder.tensor(v) for v in values])


def _load(source: str, folder: Path) -> ModuleType:
    path = folder / "kernel.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location("kernel", path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["kernel"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _answer(
    plans: Sequence[bytes], observed: Sequence[Observed]
) -> tuple[dict[str, object], list[bytes]]:
    """The plans, and which source each binary was compiled from; cubins, too."""
    sources = [[o.source.record(), o.target, o.symbol] for o in observed]
    binaries = [b"" if o.target == "cpu" else o.binary for o in observed]
    return {"sources": sources, "plans": len(plans)}, [*plans, *binaries]
