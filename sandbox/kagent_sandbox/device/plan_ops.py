"""Operations of a plan that torch performs: fills, copies, constants, allowed torch operations.

Both launchers bind them once, to views of the arena, and then only call the bound functions, so
that nothing is looked up, checked or allocated where time is taken.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, cast

import torch
from torch._ops import OpOverload
from torch._prims_common import suggest_memory_format

from kagent_sandbox.data.operation_schema import is_write
from kagent_sandbox.data.plan import ITEMSIZE, Const, Copy, Fill, PlanError, TensorRef, TorchOp

TensorOp: TypeAlias = Fill | Copy | Const | TorchOp
View: TypeAlias = Callable[[TensorRef], torch.Tensor]

# Torch's own fill lacks some of these on some devices: they are filled with their bits.
_FILL_AS_BITS = {torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2}
_INTEGER = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def dtype_of(name: str) -> torch.dtype:
    """Torch's dtype of a plan's dtype name.

    Raises:
        PlanError: Plans have no such dtype.
    """
    if name not in ITEMSIZE:
        raise PlanError(f"unknown dtype {name!r}")
    return cast("torch.dtype", getattr(torch, name))


def strided_view(memory: torch.Tensor, tensor: TensorRef, base: int) -> torch.Tensor:
    """View of a plan's tensor whose buffer starts at byte `base` of `memory` (uint8, 1-D).

    Raises:
        PlanError: The view leaves `memory`, or is not aligned to its dtype there.
    """
    low, high = (base + b for b in tensor.extent_bytes)
    size = ITEMSIZE[tensor.dtype]
    if not 0 <= low <= high <= memory.numel() or (memory.data_ptr() + low) % size:
        raise PlanError(f"bytes {low} to {high} of an arena of {memory.numel()}")
    flat = memory[low:high].view(dtype_of(tensor.dtype))
    return flat.as_strided(tensor.shape, tensor.strides)


_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def as_words(memory: torch.Tensor, nbytes: int) -> torch.Tensor:
    """Memory (uint8, 1-D) as integers of `nbytes` each, without what is left over at its end."""
    return memory[: memory.numel() // nbytes * nbytes].view(_WORDS[nbytes])


def bind_op(op: TensorOp, view: View) -> Callable[[], None]:
    """A function that performs `op` on the memory behind `view`.

    Constants are staged on the device now, so that the function can be captured in a CUDA graph.

    Raises:
        PlanError: The operation does not exist, or does not write what the plan says it writes.
    """
    if isinstance(op, Fill):
        return _bind_fill(view(op.tensor), op.value)
    if isinstance(op, Copy):
        source, target = view(op.src), view(op.dst)
        return lambda: void(target.copy_(source))
    if isinstance(op, Const):
        return _bind_const(op, view)
    return _bind_torch(op, view)


def void(_: object) -> None:
    """Drop a result."""


def _bind_fill(tensor: torch.Tensor, value: float) -> Callable[[], None]:
    if value == 0 and math.copysign(1.0, value) > 0:
        return lambda: void(tensor.zero_())  # a memset, like torch.zeros
    if tensor.dtype not in _FILL_AS_BITS:
        return lambda: void(tensor.fill_(value))
    integer = _INTEGER[tensor.element_size()]
    if value > 2**63 - 1:  # torch.tensor takes no Python number of this size
        value = int(value) - 2**64
    pattern = int(torch.tensor(value).to(tensor.dtype).view(integer).item())
    target = tensor.view(integer)
    return lambda: void(target.fill_(pattern))


def _bind_const(op: Const, view: View) -> Callable[[], None]:
    tensor = view(op.tensor)
    if not op.data:
        return lambda: None
    # dense, but perhaps permuted: the bytes are in the order of memory
    target = tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
    staged = torch.frombuffer(bytearray(op.data), dtype=torch.uint8).to(tensor.device)
    return lambda: void(target.copy_(staged))


def _bind_torch(op: TorchOp, view: View) -> Callable[[], None]:
    overload = _overload(op.name)
    written = [a for a in overload._schema.arguments if is_write(a)]  # noqa: SLF001
    args = [_operand(a, view) for a in op.args]
    kwargs = {k: _operand(v, view) for k, v in op.kwargs.items()}
    writes = [view(t) for t in op.writes]
    if written and all(a.is_out for a in written):
        if len(written) != len(writes) or any(a.name in kwargs for a in written):
            raise PlanError(f"{op.name} writes {len(written)} tensors, the plan says {len(writes)}")
        kwargs |= {a.name: w for a, w in zip(written, writes, strict=True)}
    elif (
        len(written) != 1
        or written[0].name != overload._schema.arguments[0].name  # noqa: SLF001
        or not op.args
        or op.args[0] != (op.writes[0] if len(op.writes) == 1 else None)
    ):
        raise PlanError(f"{op.name}: neither its out= nor its in-place form, or not what it writes")
    if op.name == "aten::convolution.out":
        _check_convolution(args)
        if direct := _bind_convolution(args, writes[0]):
            return direct
    shapes = [w.shape for w in writes]

    def perform() -> None:
        overload(*args, **kwargs)
        # an out= operation re-allocates an out of another shape: it would leave the arena
        if any(w.shape != s for w, s in zip(writes, shapes, strict=True)):
            raise PlanError(f"{op.name} has a result of another shape than the plan says")

    return perform


def _check_convolution(args: Sequence[object]) -> None:
    """Make sure that cuDNN can tell a convolution's numbers: torch keeps its plans by their last 31
    bits, and would take one for a larger result.

    Raises:
        PlanError: A number is below 0, or needs more bits.
    """
    numbers = [n for a in args if isinstance(a, Sequence) for n in a]
    numbers += [n for a in args if isinstance(a, torch.Tensor) for n in a.shape]
    if any(isinstance(n, int) and not 0 <= n < 1 << 31 for n in numbers):
        raise PlanError("aten::convolution with a negative number, or one of more than 31 bits")


def _bind_convolution(args: Sequence[object], out: torch.Tensor) -> Callable[[], None] | None:
    """A convolution by cuDNN that writes `out` itself: torch's out= form copies a result of its own
    there, and a call of `torch.convolution` copies nothing. None where torch takes another way.

    Raises:
        PlanError: `out` has another shape than the result, which cuDNN would not notice.
    """
    if not out.is_cuda or out.dim() < 4 or len(args) != 9:
        return None
    x, weight, bias, *each, _, _, groups = args
    if not (isinstance(x, torch.Tensor) and isinstance(weight, torch.Tensor)):
        return None
    metas = [a.to("meta") if isinstance(a, torch.Tensor) else a for a in args]
    try:
        by_cudnn = torch._C._select_conv_backend(*args) == torch._C._ConvBackend.Cudnn  # type: ignore[attr-defined]  # noqa: SLF001
        shape = torch.ops.aten.convolution(*metas).shape
    except (RuntimeError, TypeError, ValueError):  # the call will say what is wrong
        return None
    layout = torch.contiguous_format if out.dtype == torch.float64 else suggest_memory_format(out)
    dense = out.is_contiguous(memory_format=layout)
    if not by_cudnn or not dense or out.dtype != x.dtype:
        return None
    if shape != out.shape:
        raise PlanError("aten::convolution.out has a result of another shape than the plan says")
    axes = out.dim() - 2
    stride, padding, dilation = [list(n) * (axes if len(n) == 1 else 1) for n in each]  # type: ignore[arg-type,call-overload]
    flags: Any = torch.backends.cudnn  # torch declares no types of these
    deterministic = flags.deterministic or torch.are_deterministic_algorithms_enabled()
    tf32 = flags.conv.fp32_precision == "tf32"
    given = (padding, stride, dilation, groups, flags.benchmark, deterministic, tf32)
    added = bias.view(-1, *[1] * axes) if isinstance(bias, torch.Tensor) else None

    def perform() -> None:
        torch.ops.aten.cudnn_convolution.out(x, weight, *given, out=out)
        if added is not None:
            out.add_(added)

    return perform


def _overload(name: str) -> OpOverload:
    namespace, _, rest = name.partition("::")
    base, _, overload = rest.partition(".")
    packet = getattr(torch.ops.aten, base, None) if namespace == "aten" else None
    found = getattr(packet, overload or "default", None)
    if not isinstance(found, OpOverload):
        raise PlanError(f"no torch operation {name!r}")
    return found


def _operand(value: object, view: View) -> object:
    if isinstance(value, TensorRef):
        return view(value)
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_operand(v, view) for v in value]
    if isinstance(value, str) and value.startswith("dtype:"):
        return dtype_of(value.removeprefix("dtype:"))
    return value
