"""The plan: what a candidate's host code did, as data.

A plan is a straight-line program over numbered buffers. The builder emits it, the judge validates
it and lays it out in memory, a launcher executes it. Nothing else of a candidate's host code ever
comes near the clock.

These are the nouns; `plan_json` reads and writes them, and refuses whatever does not add up.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from kagent_sandbox.runtime.scalars import SCALAR_BYTES as SCALAR_BYTES
from kagent_sandbox.runtime.scalars import ScalarType as ScalarType

PLAN_VERSION = 1
MAX_PLAN_BYTES = 8 << 20
MAX_OPS = 20_000
MAX_BUFFERS = 1_000  # each has guard bands: with 3000, measuring takes a minute and not seconds
MAX_CONST_BYTES = 64 << 10
MAX_DIMS = 8
MAX_SIZE = 1 << 48  # bytes or elements; anything larger is a forged plan

ITEMSIZE: Mapping[str, int] = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1,
    "uint16": 2,
    "int16": 2,
    "float16": 2,
    "bfloat16": 2,
    "uint32": 4,
    "int32": 4,
    "float32": 4,
    "uint64": 8,
    "int64": 8,
    "float64": 8,
}
"""Bytes per element, by torch's dtype name."""
COPIED_DTYPES = ("float8_e8m0fnu", "float4_e2m1fn_x2")
"""Dtypes of scales and of pairs of numbers: torch copies them, and computes nothing in them."""


class PlanError(ValueError):
    """A plan that is malformed or asks for something outside of its own buffers."""


@dataclass(frozen=True, slots=True)
class TensorRef:
    """A strided view into a buffer. Offset and strides are in elements of `dtype`."""

    buffer: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def extent_bytes(self) -> tuple[int, int]:
        """First byte and one past the last byte that the view can touch within its buffer."""
        size = ITEMSIZE[self.dtype]
        if self.numel == 0:
            return self.offset * size, self.offset * size
        last = self.offset + sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))
        return self.offset * size, (last + 1) * size


@dataclass(frozen=True, slots=True)
class Buffer:
    """One allocation. `name` is the argument's name for inputs and None for scratch and results."""

    id: int
    kind: Literal["input", "scratch"]
    nbytes: int
    name: str | None = None


@dataclass(frozen=True, slots=True)
class Alloc:
    """`torch.empty` and its kin: the buffer exists from here on, with undefined contents."""

    buffer: int


@dataclass(frozen=True, slots=True)
class Free:
    """The buffer's last Python reference died."""

    buffer: int


@dataclass(frozen=True, slots=True)
class Fill:
    """Set every element of the view to `value` (zeros, full, fill_, zero_)."""

    tensor: TensorRef
    value: float | int | bool


@dataclass(frozen=True, slots=True)
class Copy:
    """`dst.copy_(src)`: converts dtype and broadcasts like torch."""

    src: TensorRef
    dst: TensorRef


@dataclass(frozen=True, slots=True)
class Const:
    """Write literal bytes into a contiguous view: a small tensor that host code made from Python
    values.
    """

    tensor: TensorRef
    data: bytes


@dataclass(frozen=True, slots=True)
class TorchOp:
    """An operation of torch that the task allows, in its out= or in-place form: it writes `writes`.

    `args` and `kwargs` hold JSON scalars, lists, `TensorRef`s, and strings `dtype:NAME`. For an
    out= overload `writes` are passed as out, in order; for an in-place overload (the name ends in
    `_`) `writes` holds the first argument, which is in `args` too.
    """

    name: str  # for example "aten::mm.out", "aten::addmm_"
    args: tuple[object, ...]
    kwargs: Mapping[str, object]
    writes: tuple[TensorRef, ...]


@dataclass(frozen=True, slots=True)
class Pointer:
    """Address of a byte in a buffer."""

    buffer: int
    offset: int  # bytes


@dataclass(frozen=True, slots=True)
class Null:
    """A null pointer."""


@dataclass(frozen=True, slots=True)
class Scalar:
    """A number passed by value."""

    type: ScalarType
    value: float | int | bool


@dataclass(frozen=True, slots=True)
class TensorMap:
    """A TMA descriptor (CUtensorMap, 128 bytes by value), encoded by cuTensorMapEncodeTiled.

    `dims` and `box` are innermost first, as the driver wants them; `strides` are in bytes, one
    fewer than dims.
    """

    buffer: int
    offset: int  # bytes, multiple of 16
    dtype: str
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    element_strides: tuple[int, ...]
    swizzle: Literal[0, 32, 64, 128] = 0
    interleave: Literal[0, 16, 32] = 0
    l2_promotion: Literal[0, 64, 128, 256] = 0
    oob_nan: bool = False


@dataclass(frozen=True, slots=True)
class Struct:
    """A structure passed by value: its bytes, and what is written into them at a launch.

    `placed` has byte offsets that ascend, each with a pointer (8 bytes, at a multiple of 8) or a
    tensor map (128 bytes, at a multiple of 64). Nothing overlaps, and `data` is zero there.
    """

    data: bytes
    placed: tuple[tuple[int, Pointer | TensorMap], ...]


Arg: TypeAlias = Pointer | Null | Scalar | TensorMap | Struct


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel launch. All attributes are part of the plan's identity."""

    kernel: str  # sha256 of the binary's code
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    args: tuple[Arg, ...]
    shared: int = 0  # dynamic shared memory, bytes
    cluster: tuple[int, int, int] | None = None
    cooperative: bool = False
    pdl: bool = False  # programmatic dependent launch


Op: TypeAlias = Alloc | Free | Fill | Copy | Const | TorchOp | Launch


@dataclass(frozen=True, slots=True)
class KernelInfo:
    """A compiled kernel: how to load it, and its resources as the compiler reports them."""

    hash: str  # sha256 of code and symbol: what to load
    language: str  # by its name
    name: str  # symbol in the binary
    param_bytes: tuple[int, ...]  # size of each kernel parameter, in order
    registers: int = 0  # per thread
    spill_bytes: int = (
        0  # spill stores + loads, or local memory per thread where only that is known
    )
    static_shared_bytes: int = 0
    load_bytes: Mapping[int, int] = field(default_factory=dict)  # width of global loads -> count
    code: str = ""  # sha256 without names: equal machine code, whatever its kernel is called


@dataclass(frozen=True, slots=True)
class Plan:
    """The work of one candidate on one case with one configuration of its tunables."""

    target: str  # "cpu", "sm_80", "sm_90a", "sm_100", ...
    buffers: tuple[Buffer, ...]
    ops: tuple[Op, ...]
    outputs: tuple[TensorRef, ...]
    kernels: tuple[KernelInfo, ...]

    @property
    def works_beside_launches(self) -> bool:
        """Whether something else than a kernel writes memory: a copy, a fill, numbers or torch."""
        return any(isinstance(op, Copy | Fill | Const | TorchOp) for op in self.ops)

    @property
    def launches(self) -> tuple[Launch, ...]:
        """The kernel launches, in order."""
        return tuple(op for op in self.ops if isinstance(op, Launch))

    @property
    def peak_bytes(self) -> int:
        """Most bytes that scratch and results occupy at once; inputs are not counted."""
        size = {b.id: b.nbytes for b in self.buffers}
        live = peak = 0
        for op in self.ops:
            if isinstance(op, Alloc):
                live += size[op.buffer]
                peak = max(peak, live)
            elif isinstance(op, Free):
                live -= size[op.buffer]
        return peak
