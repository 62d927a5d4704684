"""The confined side of `replay_real`: runs one case of one candidate on real tensors, and says what
it did, as a plan.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import torch

import kagent_sandbox
from kagent_sandbox import records
from kagent_sandbox.build import dispatch
from kagent_sandbox.build.configs import pin_config
from kagent_sandbox.build.fakes import no_garbage_collection
from kagent_sandbox.build.real_recorder import Operations, RealRecorder, Values
from kagent_sandbox.build.request import BuildCase, ScalarSpec, TensorSpec
from kagent_sandbox.build.symbolic import SymbolicTensor
from kagent_sandbox.channel import Message
from kagent_sandbox.context import Context
from kagent_sandbox.launch import compiler_cache
from kagent_sandbox.plan import Plan
from kagent_sandbox.plan_json import dump_plan
from kagent_sandbox.runtime.cuda_kernels import target_of
from kagent_sandbox.runtime.launches import observing

_MAX_TEXT = 2000
_MAX_ASKED_BYTES = 1 << 30
_KEPT_MODULES = ("kagent_sandbox.lang", "kagent_sandbox.runtime")


def handle(context: Context) -> None:
    """Handler of the fork-server: one request, and the answer."""
    message = context.channel.recv(None, max_bytes=_MAX_ASKED_BYTES)
    asked = cast("dict[str, Any]", message.obj)
    try:
        if asked["target"] != "cpu":
            _prepare_gpu(context, asked, message)
        context.lock()
        replay = _Replay(asked, message, context.tmp)
        _look_like_a_user(context.tmp, keep_folders=asked["target"] != "cpu")
        # host code finds nothing of kagent's among its callers
        with ThreadPoolExecutor(1, thread_name_prefix="Thread") as thread:
            answer, blobs = replay.run(thread)
    except (Exception, SystemExit) as e:  # noqa: BLE001 - host code may raise anything
        answer, blobs = {"failed": f"{type(e).__name__}: {e}"[:_MAX_TEXT]}, []
    context.channel.send(answer, blobs)


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
    with contextlib.suppress(ImportError):  # torch without Triton
        from kagent_sandbox.build import replay_triton

        replay_triton.warm_up()
        replay_triton.install()
    context.channel.send({"built": True}, [b"" if built else compiler_cache.pack(folder)])


def _look_like_a_user(folder: Path, *, keep_folders: bool) -> None:
    """Nothing that is easily looked at tells this process from a user's; see `replay_real`.

    `keep_folders`: compilers that Triton starts find the private folder in the environment.
    """
    os.environ.update(USER="user", LOGNAME="user")
    os.chdir("/")
    if not keep_folders:
        tempfile.tempdir = str(folder)
        os.environ["HOME"] = "/home/user"
        for name in ("TMPDIR", "XDG_CACHE_HOME", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):
            os.environ.pop(name, None)
    for name in [n for n in sys.modules if n.startswith("kagent_sandbox.")]:
        if not name.startswith(_KEPT_MODULES):
            del sys.modules[name]
            vars(kagent_sandbox).pop(name.split(".")[1], None)


class _Replay:
    """One call of the entry."""

    def __init__(self, asked: Mapping[str, Any], message: Message, folder: Path) -> None:
        self._asked = asked
        self._case = records.from_json(BuildCase, asked["case"])
        self._values = dict(zip(asked["inputs"], message.blobs[1:], strict=True))
        self._folder = folder
        self._device = torch.device("cpu")
        if asked["target"] != "cpu":
            self._device = torch.device("cuda", asked["device"])

    def run(self, thread: ThreadPoolExecutor) -> tuple[dict[str, object], list[bytes]]:
        """Do it in `thread`: the answer, and its blobs."""

        def do(function: Callable[..., Any], *args: Any) -> Any:
            return thread.submit(function, *args).result()

        if self._device.type == "cuda":
            do(torch.cuda.set_device, self._device)
        recorder: RealRecorder = do(self._recorder)
        arguments = [do(self._argument, recorder, a) for a in self._case.arguments]
        SymbolicTensor.on_operation = staticmethod(
            lambda func, args, kwargs: dispatch.handle(func, args, kwargs, recorder.device)
        )
        module = do(_load, self._asked["source"], self._folder)
        pin_config(module, self._asked["config"])
        function = getattr(module, self._asked["entry"])
        modes = Values(recorder), Operations(recorder)
        with no_garbage_collection(), recorder, observing(recorder.saw_launch):
            for mode in modes:
                do(mode.__enter__)
            try:
                result = do(function, *arguments)
            finally:
                for mode in reversed(modes):
                    do(mode.__exit__, None, None, None)
            plan = do(self._plan, recorder, result)
        if recorder.violation is not None:
            return {"failed": str(recorder.violation)[:_MAX_TEXT]}, []
        if self._device.type == "cuda":
            torch.cuda.synchronize()  # a fault is this candidate's
        return _answer(recorder, plan)

    def _recorder(self) -> RealRecorder:
        names = [a.name for a in self._case.arguments]
        device = torch.device(self._device.type, self._device.index)
        return RealRecorder(device, self._asked["target"], self._asked["allow"], names)

    def _argument(self, recorder: RealRecorder, spec: TensorSpec | ScalarSpec) -> object:
        if isinstance(spec, ScalarSpec):
            return spec.value
        dtype = getattr(torch, spec.dtype)
        tensor = torch.empty_strided(spec.shape, spec.strides, dtype=dtype, device=self._device)
        given = self._values.get(spec.name)
        if given:
            values = torch.frombuffer(bytearray(given), dtype=torch.uint8).view(dtype)
            tensor.copy_(values.view(spec.shape))
        elif dtype.is_floating_point:
            tensor.copy_(torch.randn(spec.shape, device=self._device))
        else:
            tensor.zero_()  # as an index, zero is always within
        recorder.argument(spec.name, tensor)
        return tensor

    def _plan(self, recorder: RealRecorder, result: object) -> Plan:
        if isinstance(result, Mapping):
            result = tuple(result[r.name] for r in self._case.results)
        values = tuple(result) if isinstance(result, tuple | list) else (result,)
        wrong = [type(v).__name__ for v in values if not recorder.here(v)]
        if wrong:
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


def _answer(recorder: RealRecorder, plan: Plan) -> tuple[dict[str, object], list[bytes]]:
    """The plan, and which source each CUDA or C++ binary was compiled from."""
    seen = {o.source.key(o.target): o for o in recorder.observed}
    sources = [[o.source.record(), o.target, o.symbol] for o in seen.values()]
    blobs = [b"" if o.source.language == "cpp" else o.binary for o in seen.values()]
    return {"sources": sources}, [dump_plan(plan), *blobs]
