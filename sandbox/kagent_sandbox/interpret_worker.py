"""Runs a Triton candidate in Triton's interpreter, on CPU tensors: the confined side.

Repairs of the interpreter (Triton 3.6 to 3.9): `tl.dot` multiplies the bit patterns of bfloat16
(errors of 1e11), conversion to bfloat16 truncates where hardware rounds, and run-time loop bounds
fail with numpy 2.4 and later. Only the first configuration of an autotuned kernel runs.
"""

from __future__ import annotations

import contextlib
import importlib.util
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
import triton
import triton.language as tl
import triton.runtime.interpreter as interpreter
from torch.overrides import TorchFunctionMode
from triton.runtime.autotuner import Autotuner

from kagent_sandbox.channel import ChannelClosed
from kagent_sandbox.context import Context
from kagent_sandbox.launch.plan_ops import dtype_of
from kagent_sandbox.verdict import Status

_FILE = "candidate.py"


def serve(context: Context) -> None:
    """Handler of the fork-server: one candidate, then case after case until the channel closes."""
    repair()
    first = cast("dict[str, Any]", context.channel.recv(60.0).obj)
    pretend_gpu(first["device"])
    path = context.tmp / _FILE
    path.write_text(first["source"])
    try:
        entry = getattr(_load(path), first["entry"])
        context.channel.send({"ok": []})
    except BaseException as e:  # noqa: BLE001 - the process boundary: it becomes a verdict
        context.channel.send({"failed": [str(_status(e)), _first_error(e, path)]})
        return
    with contextlib.suppress(ChannelClosed):
        while True:
            message = context.channel.recv(None)
            request = cast("dict[str, Any]", message.obj)
            arguments = _arguments(request["arguments"], message.blobs)
            try:
                with OnCpu(), torch.no_grad():
                    results = entry(*arguments)
                answer, blobs = _results(results)
            except BaseException as e:  # noqa: BLE001 - see above
                answer, blobs = {"failed": [str(_status(e)), _first_error(e, path)]}, []
            context.channel.send(answer, blobs)


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("candidate", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with OnCpu():
        spec.loader.exec_module(module)
    return module


def _arguments(specs: Sequence[Mapping[str, Any]], blobs: Sequence[bytes]) -> list[object]:
    """Tensors from their bytes, and plain numbers, in order."""
    left = iter(blobs)
    values: list[object] = []
    for spec in specs:
        if "value" in spec:
            values.append(spec["value"])
            continue
        dtype = dtype_of(spec["dtype"])
        data = bytearray(next(left))
        flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
        dense = flat.reshape(spec["shape"])
        whole = torch.empty(spec["extent"], dtype=dtype)
        tensor = whole.as_strided(spec["shape"], spec["strides"], spec["offset"])
        values.append(tensor.copy_(dense))
    return values


def _results(results: object) -> tuple[dict[str, object], list[bytes]]:
    tensors = list(results) if isinstance(results, tuple | list) else [results]
    records: list[dict[str, object]] = []
    blobs = []
    for i, t in enumerate(tensors):
        if not isinstance(t, torch.Tensor):
            raise TypeError(f"result {i} is a {type(t).__name__}, not a tensor")
        flat = t.detach().contiguous().reshape(-1)
        blobs.append(bytes(flat.view(torch.uint8).numpy()) if flat.numel() else b"")
        records.append({"shape": list(t.shape), "dtype": str(t.dtype).removeprefix("torch.")})
    return {"ok": records}, blobs


def _status(error: BaseException) -> Status:
    compile_errors = (SyntaxError, triton.CompilationError)
    return Status.COMPILE_ERROR if isinstance(error, compile_errors) else Status.RUNTIME_ERROR


def _first_error(error: BaseException, path: Path) -> str:
    """The error with the last line of the candidate that led to it."""
    seen: BaseException | None = error
    lines = []
    while seen is not None:
        lines += [f for f in traceback.extract_tb(seen.__traceback__) if f.filename == str(path)]
        if lines:
            break
        seen = seen.__cause__ or seen.__context__
    text = f"{type(error).__name__}: {error}"[:2000]
    return f"line {lines[-1].lineno}: {lines[-1].line}\n{text}" if lines else text


# -- the interpreter's repairs ---------------------------------------------------------------------


def repair() -> None:
    """Repair this process's interpreter; see the module's docstring."""
    module: Any = interpreter
    module._convert_float = _converter(module._convert_float)  # noqa: SLF001
    module.InterpreterBuilder.create_dot = _dot(module.InterpreterBuilder.create_dot)
    patch_tensor = module._patch_lang_tensor  # noqa: SLF001

    def patch(tensor: Any, *scope: Any) -> None:
        patch_tensor(tensor, *scope)
        tensor.__index__ = lambda self: int(self.handle.data.item())

    module._patch_lang_tensor = patch  # noqa: SLF001
    tuner: Any = Autotuner
    tuner.run = _run_first


def widen_bf16(bits: Any) -> Any:
    """bfloat16 as uint16 bit patterns to float32; exact."""
    return (np.ascontiguousarray(bits).view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def round_to_bf16(values: Any) -> Any:
    """float32 to bfloat16 bit patterns, to nearest, ties to even, as hardware does."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16)


def _converter(original: Callable[..., Any]) -> Callable[..., Any]:
    def convert(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        if source == tl.bfloat16 and target == tl.float32:
            return widen_bf16(data)
        if source == tl.float32 and target == tl.bfloat16:
            return round_to_bf16(data)
        return original(data, source, target, rounding)

    return convert


def _dot(original: Callable[..., Any]) -> Callable[..., Any]:
    def up_cast(handle: Any) -> Any:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        return interpreter.TensorHandle(widen_bf16(handle.data), tl.float32)

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return original(self, up_cast(a), up_cast(b), *rest)

    return create_dot


def _run_first(self: Any, *args: object, **kwargs: object) -> object:
    """In place of `Autotuner.run`: its first configuration."""
    config = self.configs[0]
    named = dict(zip(self.arg_names, args, strict=False))
    if config.pre_hook is not None:
        config.pre_hook({**named, **kwargs, **config.all_kwargs()})
    return self.fn.run(*args, **kwargs, **config.all_kwargs())


# -- pretending that there is a GPU ----------------------------------------------------------------


class OnCpu(TorchFunctionMode):
    """Host code says "cuda" and gets the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Replace devices among the arguments."""
        kwargs = {k: _cpu(v) for k, v in (kwargs or {}).items()}
        return func(*(_cpu(a) for a in args), **kwargs)


def _cpu(value: object) -> object:
    named = isinstance(value, str) and value.split(":")[0] == "cuda"
    if named or (isinstance(value, torch.device) and value.type == "cuda"):
        return torch.device("cpu")
    return value


def pretend_gpu(device: Mapping[str, Any]) -> None:
    """Answer questions about the device for `device`: name, units, capability."""
    properties = SimpleNamespace(
        name=device["name"],
        multi_processor_count=device["units"],
        major=device["capability"][0],
        minor=device["capability"][1],
        warp_size=32,
    )

    @contextlib.contextmanager
    def on(_: object = None) -> Iterator[None]:
        yield

    cuda: Any = torch.cuda
    cuda.is_available = lambda: True
    cuda.current_device = lambda: 0
    cuda.device_count = lambda: 1
    cuda.device = on
    cuda.device_of = on
    cuda.synchronize = lambda _=None: None
    cuda.get_device_properties = lambda _=None: properties
    cuda.get_device_name = lambda _=None: properties.name
    cuda.get_device_capability = lambda _=None: tuple(device["capability"])
    cuda.current_stream = lambda _=None: SimpleNamespace(cuda_stream=0)
    utils = SimpleNamespace(
        get_device_properties=lambda _=0: {
            "multiprocessor_count": device["units"],
            "max_shared_mem": device["shared_bytes"],
            "max_num_regs": 65536,
            "warpSize": 32,
        }
    )
    target = SimpleNamespace(
        backend="cuda", arch=10 * properties.major + properties.minor, warp_size=32
    )
    driver: Any = triton.runtime.driver
    driver.set_active(
        SimpleNamespace(
            utils=utils,
            get_current_target=lambda: target,
            get_current_device=lambda: 0,
            get_current_stream=lambda _=0: 0,
            get_active_torch_device=lambda: torch.device("cpu"),
        )
    )
    tensor: Any = torch.Tensor
    tensor.is_cuda = property(lambda _: True)
