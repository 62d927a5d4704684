"""Runs a Triton candidate in Triton's interpreter, on CPU tensors: the confined side. Kernels in
Gluon are simulated (`judge.gluon`).

Repairs of the interpreter (Triton 3.6 to 3.9): it computes with the bit patterns of bfloat16, in
`tl.dot`, in arithmetic and in conversions from and to anything but float32; conversion to bfloat16
truncates where hardware rounds; it folds sums, and reductions and scans with a function of the
kernel's own, one element after the other, which errs by the number of elements where hardware's
trees err by its logarithm; atomic operations read memory that is not theirs where one value is
broadcast to many places; run-time loop bounds fail with numpy 2.4 and later; and `gdc_wait` and
`gdc_launch_dependents` fail. Only the first configuration of an autotuned kernel runs.
"""

from __future__ import annotations

import contextlib
import importlib
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

from kagent_sandbox.data.language import GLUON
from kagent_sandbox.data.verdict import Status
from kagent_sandbox.device.plan_ops import dtype_of
from kagent_sandbox.judge.gluon.schedule import NotSimulated
from kagent_sandbox.judge.interpreter_memory import remember
from kagent_sandbox.process.channel import ChannelClosed
from kagent_sandbox.process.context import Context

_FILE = "candidate.py"


def serve(context: Context) -> None:
    """Handler of the fork-server: one candidate, then case after case until the channel closes."""
    repair()
    first = cast("dict[str, Any]", context.channel.recv(60.0).obj)
    pretend_gpu(first["device"])
    path = context.tmp / _FILE
    path.write_text(first["source"])
    if GLUON.is_in(first["source"]):
        from kagent_sandbox.judge.gluon import language

        language.install()
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
                written = [
                    a
                    for a, spec in zip(arguments, request["arguments"], strict=True)
                    if spec.get("writes")
                ]
                answer, blobs = _results(results, written)
            except NotSimulated as e:
                answer, blobs = {"not_simulated": _first_error(e, path)}, []
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


def _results(results: object, written: Sequence[object]) -> tuple[dict[str, object], list[bytes]]:
    """The answer: what the entry returned, then the arguments that it must write."""
    tensors = list(results) if isinstance(results, tuple | list) else [results]
    if written and results is None:
        tensors = []
    tensors += written
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
    remember()
    module: Any = interpreter
    module._convert_float = _converter(module._convert_float)  # noqa: SLF001
    builder = module.InterpreterBuilder
    builder.cast_impl = _cast(builder.cast_impl)
    builder.get_bf16 = _constant
    for name in _ARITHMETIC:
        setattr(builder, name, _in_float32(getattr(builder, name)))
    builder.create_dot = _dot(builder.create_dot)
    for name in ("create_atomic_rmw", "create_atomic_cas"):
        setattr(builder, name, _in_whole(getattr(builder, name)))
    reductions, scans = module.ReduceOps, module.ScanOps
    reductions.generic_reduce = _reduce_in_a_tree
    reductions.apply_impl = _reduce(reductions.apply_impl)
    reductions.sum = _sum_in_a_tree
    scans.generic_scan = _scan_in_a_tree
    scans.cumsum = _scan_with(np.add)
    scans.cumprod = _scan_with(np.multiply)
    patch_tensor = module._patch_lang_tensor  # noqa: SLF001

    def patch(tensor: Any, *scope: Any) -> None:
        patch_tensor(tensor, *scope)
        tensor.__index__ = lambda self: int(self.handle.data.item())
        tensor.__bool__ = _truth(tensor.__bool__)

    module._patch_lang_tensor = patch  # noqa: SLF001
    module._patch_lang = _patch_once(module._patch_lang)  # noqa: SLF001
    named = (importlib.import_module(f"triton.language.extra.cuda{m}") for m in ("", ".gdc"))
    for place in (cast("Any", tl).extra.cuda, *named):  # the first two are modules of one file
        for name in ("gdc_wait", "gdc_launch_dependents"):
            setattr(place, name, _nothing_to_order)
    tuner: Any = Autotuner
    tuner.run = _run_first


def _nothing_to_order(**_: object) -> None:
    """Replace what orders dependent launches: here each begins when the one before has ended."""


def _patch_once(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Patch Triton's language once per launch for all functions that see it under the same names.

    The interpreter patches all of it again at every call of a device function, `tl.sum` and
    `tl.zeros` among them, which takes longer than most of them compute.
    """
    done: set[frozenset[str]] = set()

    def patch(function: Any) -> Any:
        found = function.__globals__.values()
        seen = frozenset(m.__name__ for m in (tl, tl.core) if any(v is m for v in found))
        if seen in done:
            return SimpleNamespace(restore=lambda: None)
        scope = original(function)
        outermost = not done
        done.add(seen)
        if outermost and scope is not None:  # Triton 3.6 leaves it patched
            restore = scope.restore

            def end() -> None:
                restore()
                done.clear()

            scope.restore = end
        return scope

    return patch


# bfloat16, of which numpy knows nothing: the interpreter keeps its bits in uint16

_BF16 = tl.bfloat16.name
_NUMPYS = (tl.float16, tl.float32, tl.float64)
_ARITHMETIC = ("binary_op", "unary_op", "create_fma", "create_rsqrt", "create_erf", "create_clampf")


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
        if source == tl.bfloat16 != target:
            data, source = widen_bf16(data).reshape(data.shape), tl.float32
        if target == tl.bfloat16 != source:
            wide = data if source in _NUMPYS else original(data, source, tl.float32, rounding)
            return round_to_bf16(wide.view(np.float32) if source not in _NUMPYS else wide)
        return data if source == target else original(data, source, target, rounding)

    return convert


def _cast(original: Callable[..., Any]) -> Callable[..., Any]:
    """Through float32, as Triton compiles it: from and to float64 and integers, too."""

    def cast_impl(self: Any, handle: Any, target: Any) -> Any:
        source, wanted = handle.dtype.scalar, target.scalar
        if (source == tl.bfloat16) == (wanted == tl.bfloat16):
            return original(self, handle, target)
        if source == tl.bfloat16:
            return original(self, _widened(handle), target)
        return _narrowed(original(self, handle, tl.float32))

    return cast_impl


def _constant(_: Any, value: float) -> Any:
    return interpreter.TensorHandle(round_to_bf16(np.array([value], np.float32)), tl.bfloat16)


def _is_bf16(handle: Any) -> bool:
    return type(handle) is interpreter.TensorHandle and handle.dtype.scalar.name == _BF16


def _widened(handle: Any) -> Any:
    if not _is_bf16(handle):
        return handle
    data = widen_bf16(handle.data).reshape(handle.data.shape)
    return interpreter.TensorHandle(data, tl.float32)


def _narrowed(handle: Any) -> Any:
    return interpreter.TensorHandle(round_to_bf16(handle.data), tl.bfloat16)


def _in_float32(original: Callable[..., Any]) -> Callable[..., Any]:
    """Arithmetic of bfloat16 rounds once; so does this, as float32 has more than twice its bits."""

    def operation(self: Any, *operands: Any) -> Any:
        if not any(map(_is_bf16, operands)):
            return original(self, *operands)
        found = original(self, *map(_widened, operands))
        compares = found.data.dtype == bool
        return found if compares else _narrowed(found)

    return operation


def _in_whole(original: Callable[..., Any]) -> Callable[..., Any]:
    """An operation on operands that lie in memory as its C++ takes them: without strides."""

    def operation(self: Any, *operands: Any) -> Any:
        def whole(operand: Any) -> Any:
            if not isinstance(operand, interpreter.TensorHandle):
                return operand
            return interpreter.TensorHandle(np.ascontiguousarray(operand.data), operand.dtype)

        return original(self, *map(whole, operands))

    return operation


def _dot(original: Callable[..., Any]) -> Callable[..., Any]:
    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return original(self, _widened(a), _widened(b), *rest)

    return create_dot


# reductions and scans

Combine = Callable[[list[Any], list[Any]], list[Any]]
"""A kernel's function of two operands, each of one array or several."""


class _Branches(Exception):  # noqa: N818
    """A kernel's function of scalars asks for the truth of one, and was given many at once."""


_pairs_at_once = False


def _truth(original: Callable[[Any], bool]) -> Callable[[Any], bool]:
    def get_bool(tensor: Any) -> bool:
        if _pairs_at_once and tensor.handle.data.size > 1:
            raise _Branches
        return original(tensor)

    return get_bool


def _reduce(original: Callable[..., Any]) -> Callable[..., Any]:
    def apply_impl(self: Any, tensors: Any) -> Any:
        if any(t.dtype.scalar == tl.bfloat16 for t in tensors):  # numpy would compare their bits
            return self.generic_reduce(tensors)
        return original(self, tensors)

    return apply_impl


def _reduce_in_a_tree(self: Any, tensors: Any) -> list[Any]:
    """Replace `ReduceOps.generic_reduce`: neighbours are combined, all pairs at once."""
    combine, types = _combine(self, tensors)
    arrays = [t.handle.data for t in tensors]
    whole, rank = self.axis is None, arrays[0].ndim
    if whole:
        arrays = [a.reshape(-1) for a in arrays]
    axis = 0 if whole else self.axis % rank
    while arrays[0].shape[axis] > 1:  # a power of two
        arrays = combine(*(_along(arrays, axis, slice(start, None, 2)) for start in (0, 1)))
    if not self.keep_dims:
        arrays = [a.squeeze(axis) for a in arrays]
    elif whole:
        arrays = [a.reshape((1,) * rank) for a in arrays]
    return [self.to_tensor(a if a.shape else a[()], t) for a, t in zip(arrays, types, strict=True)]


def _sum_in_a_tree(self: Any, tensor: Any) -> Any:
    """Replace `ReduceOps.sum`: numpy adds in pairs only along contiguous elements."""
    data = tensor.handle.data
    if self.axis is None:
        return self.to_tensor(data.sum(keepdims=self.keep_dims), tensor.dtype)
    total = np.ascontiguousarray(np.moveaxis(data, self.axis, -1)).sum(axis=-1)
    if self.keep_dims:
        total = np.expand_dims(total, self.axis)
    return self.to_tensor(total, tensor.dtype)


def _scan_in_a_tree(self: Any, tensors: Any) -> list[Any]:
    """Replace `ScanOps.generic_scan`."""
    combine, types = _combine(self, tensors)
    arrays = _scan([t.handle.data for t in tensors], self.axis, combine)
    return [self.to_tensor(a, t) for a, t in zip(arrays, types, strict=True)]


def _scan_with(operation: Any) -> Callable[..., list[Any]]:
    """Replace `ScanOps.cumsum` and `cumprod`."""

    def scan(self: Any, tensor: Any) -> list[Any]:
        if tensor.dtype.scalar == tl.bfloat16:
            return _scan_in_a_tree(self, [tensor])
        data = tensor.handle.data
        found = _scan([data], self.axis, lambda a, b: [operation(*a, *b, dtype=data.dtype)])
        return [self.to_tensor(found[0], tensor.dtype)]

    return scan


def _scan(arrays: list[Any], axis: int, combine: Combine) -> list[Any]:
    """Every element with all before it: spans of 1, 2, 4, ... elements are combined.

    Always whole arrays, as Triton's shapes are powers of two; where no span ends before, what comes
    round from the other end is dropped.
    """
    axis, step = axis % arrays[0].ndim, 1
    while step < (count := arrays[0].shape[axis]):
        before = [np.roll(a, step, axis) for a in arrays]
        spans = combine(before, arrays)
        first = np.arange(count).reshape(-1, *(1,) * (arrays[0].ndim - 1 - axis)) < step
        arrays = [np.where(first, a, b) for a, b in zip(arrays, spans, strict=True)]
        step *= 2
    return arrays


def _along(arrays: Sequence[Any], axis: int, part: slice) -> list[Any]:
    return [a[(slice(None),) * axis + (part,)] for a in arrays]


def _combine(self: Any, tensors: Any) -> tuple[Combine, list[Any]]:
    """The function of a reduction or scan, for arrays; and the types of what it takes."""
    types = [t.dtype.scalar for t in tensors]

    def call(left: Sequence[Any], right: Sequence[Any]) -> list[Any]:
        both = zip((*left, *right), (*types, *types), strict=True)
        found = self.combine_fn.fn(*(self.to_tensor(a, t) for a, t in both))
        values = found if isinstance(found, tuple) else (found,)
        arrays = [v.handle.data if isinstance(v, tl.core.tensor) else v for v in values]
        return [
            np.broadcast_to(np.asarray(v, a.dtype), np.shape(a) or (1,))
            for v, a in zip(arrays, left, strict=True)
        ]

    def combine(left: list[Any], right: list[Any]) -> list[Any]:
        global _pairs_at_once  # of one process, which runs one kernel
        try:
            _pairs_at_once = True
            return call(left, right)
        except _Branches:
            _pairs_at_once = False
            results = [np.empty_like(a) for a in left]
            for index in np.ndindex(left[0].shape):
                values = call([a[index] for a in left], [a[index] for a in right])
                for result, value in zip(results, values, strict=True):
                    result[index] = value.item()
            return results
        finally:
            _pairs_at_once = False

    return combine, types


def _run_first(self: Any, *args: object, **kwargs: object) -> object:
    """Replace `Autotuner.run`: run its first configuration."""
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
