"""Plans as JSON: written by the builder, read by the judge, which trusts nothing in them.

`parse_plan` accepts only what it has checked: versions, types, sizes, finite numbers, every view
inside of its buffer, every buffer allocated before it is used and not after it is freed, every
launch with a kernel that the plan declares and as many arguments as that kernel has. Unknown keys
are errors.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

from kagent_sandbox.data.language import LANGUAGES
from kagent_sandbox.data.plan import (
    COPIED_DTYPES,
    ITEMSIZE,
    MAX_BUFFERS,
    MAX_CONST_BYTES,
    MAX_DIMS,
    MAX_OPS,
    MAX_PLAN_BYTES,
    MAX_SIZE,
    PLAN_VERSION,
    SCALAR_BYTES,
    Alloc,
    Arg,
    Buffer,
    Const,
    Copy,
    Fill,
    Free,
    KernelInfo,
    Launch,
    Null,
    Op,
    Plan,
    PlanError,
    Pointer,
    Scalar,
    Struct,
    TensorMap,
    TensorRef,
    TorchOp,
)
from kagent_sandbox.runtime.scalars import (
    MAX_STRUCT_BYTES,
    POINTER_BYTES,
    TENSOR_MAP_ALIGN,
    TENSOR_MAP_BYTES,
)

T = TypeVar("T")
_OPS: Mapping[str, type] = {
    c.__name__.lower(): c for c in (Alloc, Free, Fill, Copy, Const, TorchOp, Launch)
}
_ARGS: Mapping[str, type] = {
    c.__name__.lower(): c for c in (Pointer, Null, Scalar, TensorMap, Struct)
}
_TAG: Mapping[type, str] = {c: tag for tag, c in {**_OPS, **_ARGS}.items()}
_HASH = re.compile(r"[0-9a-f]{64}")
_MAX_DEPTH = 16


def dump_plan(plan: Plan) -> bytes:
    """Canonical JSON: equal plans give equal bytes."""
    value = {"version": PLAN_VERSION, **_encode_fields(plan)}
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def plan_identity(plan: Plan) -> str:
    """Hash of all that decides what runs: two plans with one identity are the same work.

    Kernels count by their machine code, so that a kernel under another name is recognised.
    """
    code = {k.hash: k.code or k.hash for k in plan.kernels}
    ops = tuple(
        dataclasses.replace(op, kernel=code[op.kernel]) if isinstance(op, Launch) else op
        for op in plan.ops
    )
    work = dataclasses.replace(plan, ops=ops, kernels=())
    return hashlib.sha256(dump_plan(work)).hexdigest()


def parse_plan(data: bytes) -> Plan:
    """Read a plan that an untrusted process wrote.

    Raises:
        PlanError: Anything that is malformed, oversized or refers outside of its own buffers.
    """
    if len(data) > MAX_PLAN_BYTES:
        raise PlanError(f"plan of {len(data)} bytes: the limit is {MAX_PLAN_BYTES}")
    try:
        value = json.loads(data, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as e:
        raise PlanError(f"plan is not JSON: {e}") from None
    return plan_from_json(value)


def plan_from_json(value: object) -> Plan:
    """Like `parse_plan`, from decoded JSON."""
    top = _object(value, "plan", {"version", *(f.name for f in dataclasses.fields(Plan))})
    if top["version"] != PLAN_VERSION:
        raise PlanError(f"plan has version {top['version']!r}: expected {PLAN_VERSION}")
    plan = Plan(
        target=_string(top["target"], "target"),
        buffers=_list(top["buffers"], "buffers", _buffer, MAX_BUFFERS),
        ops=_list(top["ops"], "ops", _op, MAX_OPS),
        outputs=_list(top["outputs"], "outputs", _tensor, 64),
        kernels=_list(top["kernels"], "kernels", _kernel, 1024),
    )
    _check(plan)
    return plan


def _refuse_constant(name: str) -> NoReturn:
    raise PlanError(f"plan holds {name}: only finite numbers are allowed outside of fills")


# -- encoding ------------------------------------------------------------------------------------


def _encode_fields(value: Any) -> dict[str, object]:
    return {f.name: _encode(getattr(value, f.name)) for f in dataclasses.fields(value)}


def _encode(value: object) -> object:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = _encode_fields(value)
        tag = _TAG.get(type(value))
        if isinstance(value, TensorRef):
            return {"tensor": fields}
        return fields if tag is None else {"is": tag, **fields}
    if isinstance(value, (tuple, list)):
        return [_encode(v) for v in value]
    if isinstance(value, Mapping):
        return {str(k): _encode(v) for k, v in value.items()}
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": repr(value)}  # fills and scalars may well be -inf
    return value


# -- decoding ------------------------------------------------------------------------------------


def _object(value: object, what: str, keys: set[str]) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise PlanError(f"{what}: expected an object, got {type(value).__name__}")
    if value.keys() != keys:
        odd = sorted(value.keys() ^ keys)
        raise PlanError(f"{what}: missing or unknown keys {odd[:5]}")
    return value


def _fields(value: object, cls: type, what: str, *, tag: bool) -> dict[str, Any]:
    keys = {f.name for f in dataclasses.fields(cls)} | ({"is"} if tag else set())
    return _object(value, what, keys)


def _list(value: object, what: str, item: Callable[[object], T], most: int) -> tuple[T, ...]:
    if not isinstance(value, list):
        raise PlanError(f"{what}: expected a list, got {type(value).__name__}")
    if len(value) > most:
        raise PlanError(f"{what}: {len(value)} entries, the limit is {most}")
    return tuple(item(v) for v in value)


def _string(value: object, what: str) -> str:
    # Texts of plans are shown to people and models: no line ends, escapes, half characters.
    if not isinstance(value, str) or not 0 < len(value) <= 4096 or not value.isprintable():
        raise PlanError(f"{what}: expected a string of 1 to 4096 printable characters")
    return value


def _int(value: object, low: int = 0, high: int = MAX_SIZE) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise PlanError(f"expected an integer from {low} to {high}, got {value!r:.40}")
    return value


def _bool(value: object) -> bool:
    if not isinstance(value, bool):
        raise PlanError(f"expected true or false, got {value!r:.40}")
    return value


def _one_of(value: object, allowed: tuple[Any, ...], what: str) -> Any:
    # Membership by type too: JSON true equals 1, and lists are no keys.
    if not any(type(value) is type(a) and value == a for a in allowed):
        raise PlanError(f"unknown {what} {value!r:.40}: expected one of {list(allowed)}")
    return value


def _ints(value: object, most: int = MAX_DIMS) -> tuple[int, ...]:
    return _list(value, "sizes", _int, most)


def _three(value: object) -> tuple[int, int, int]:
    sizes = _list(value, "launch sizes", lambda v: _int(v, 1, 2**31 - 1), 3)
    if len(sizes) != 3:
        raise PlanError(f"expected three sizes, got {len(sizes)}")
    return sizes[0], sizes[1], sizes[2]


def _number(value: object) -> float:
    if isinstance(value, dict):
        text = _object(value, "float", {"float"})["float"]
        return float(_one_of(text, ("inf", "-inf", "nan"), "float"))
    if not isinstance(value, (bool, int, float)):
        raise PlanError(f"expected a number, got {type(value).__name__}")
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        raise PlanError("integer does not fit 64 bits")
    return value


def _dtype(value: object) -> str:
    return str(_one_of(value, tuple(ITEMSIZE), "dtype"))


def _hash(value: object) -> str:
    if not isinstance(value, str) or not _HASH.fullmatch(value):
        raise PlanError(f"not a sha256: {value!r:.40}")
    return value


def _tensor(value: object) -> TensorRef:
    v = _fields(_object(value, "tensor", {"tensor"})["tensor"], TensorRef, "tensor", tag=False)
    shape, strides = _ints(v["shape"]), _ints(v["strides"])
    if len(shape) != len(strides):
        raise PlanError(f"tensor has {len(shape)} sizes and {len(strides)} strides")
    return TensorRef(_int(v["buffer"]), _int(v["offset"]), shape, strides, _dtype(v["dtype"]))


def _buffer(value: object) -> Buffer:
    v = _fields(value, Buffer, "buffer", tag=False)
    kind = _one_of(v["kind"], ("input", "scratch"), "kind of buffer")
    name = None if v["name"] is None else _string(v["name"], "name of a buffer")
    if (kind == "input") != (name is not None):
        raise PlanError("inputs have a name and scratch has none")
    return Buffer(_int(v["id"]), kind, _int(v["nbytes"]), name)


def _kernel(value: object) -> KernelInfo:
    v = _fields(value, KernelInfo, "kernel", tag=False)
    widths = v["load_bytes"]
    if not isinstance(widths, dict) or len(widths) > 16 or not all(k.isdecimal() for k in widths):
        raise PlanError("load_bytes: expected widths and counts")
    return KernelInfo(
        hash=_hash(v["hash"]),
        language=_one_of(v["language"], tuple(LANGUAGES), "language"),
        name=_string(v["name"], "name of a kernel"),
        param_bytes=_ints(v["param_bytes"], 512),
        registers=_int(v["registers"]),
        spill_bytes=_int(v["spill_bytes"]),
        static_shared_bytes=_int(v["static_shared_bytes"]),
        load_bytes={int(k[:4]): _int(n) for k, n in widths.items()},
        code=v["code"] if v["code"] == "" else _hash(v["code"]),
    )


def _tagged(value: object, classes: Mapping[str, type], what: str) -> tuple[type, dict[str, Any]]:
    tag = value.get("is") if isinstance(value, dict) else None
    cls = classes.get(tag) if isinstance(tag, str) else None
    if cls is None:
        raise PlanError(f"unknown {what} {tag!r:.40}")
    return cls, _fields(value, cls, f"{what} {tag}", tag=True)


def _op(value: object) -> Op:
    cls, v = _tagged(value, _OPS, "operation")
    if cls is Alloc:
        return Alloc(_int(v["buffer"]))
    if cls is Free:
        return Free(_int(v["buffer"]))
    if cls is Fill:
        return Fill(_tensor(v["tensor"]), _number(v["value"]))
    if cls is Copy:
        return Copy(_tensor(v["src"]), _tensor(v["dst"]))
    if cls is Const:
        return Const(_tensor(v["tensor"]), _bytes(v["data"]))
    if cls is TorchOp:
        kwargs = v["kwargs"]
        if not isinstance(kwargs, dict) or len(kwargs) > 32:
            raise PlanError("keyword arguments of a torch operation: expected an object")
        return TorchOp(
            _string(v["name"], "name of an operation"),
            _list(v["args"], "arguments", _operand, 32),
            {_string(k, "keyword"): _operand(x) for k, x in kwargs.items()},
            _list(v["writes"], "writes", _tensor, 16),
        )
    return Launch(
        kernel=_hash(v["kernel"]),
        grid=_three(v["grid"]),
        block=_three(v["block"]),
        args=_list(v["args"], "kernel arguments", _arg, 512),
        shared=_int(v["shared"], 0, 1 << 20),
        cluster=None if v["cluster"] is None else _three(v["cluster"]),
        cooperative=_bool(v["cooperative"]),
        pdl=_bool(v["pdl"]),
    )


def _bytes(value: object) -> bytes:
    if not isinstance(value, str) or len(value) > 2 * MAX_CONST_BYTES:
        raise PlanError(f"constant: expected at most {MAX_CONST_BYTES} bytes in base64")
    try:
        return base64.b64decode(value, validate=True)
    except ValueError as e:
        raise PlanError(f"constant is not base64: {e}") from None


def _operand(value: object, depth: int = 0) -> object:
    """An argument of a torch operation: a tensor, a number, a string, None or a list of them."""
    if depth > _MAX_DEPTH:
        raise PlanError("arguments of a torch operation are nested too deep")
    if isinstance(value, dict):
        return _number(value) if "float" in value else _tensor(value)
    if isinstance(value, list):
        return _list(value, "list argument", lambda v: _operand(v, depth + 1), 4096)
    if value is None or isinstance(value, str):
        return value if value is None else _string(value, "text argument")
    return _number(value)


def _arg(value: object) -> Arg:
    cls, v = _tagged(value, _ARGS, "kernel argument")
    if cls is Pointer:
        return Pointer(_int(v["buffer"]), _int(v["offset"]))
    if cls is Null:
        return Null()
    if cls is Scalar:
        type_ = _one_of(v["type"], tuple(SCALAR_BYTES), "scalar type")
        return Scalar(type_, _fits(type_, _number(v["value"])))
    if cls is Struct:
        return _struct(v)
    tensor_map = TensorMap(
        buffer=_int(v["buffer"]),
        offset=_int(v["offset"]),
        dtype=_dtype(v["dtype"]),
        dims=_ints(v["dims"], 5),
        strides=_ints(v["strides"], 4),
        box=_ints(v["box"], 5),
        element_strides=_ints(v["element_strides"], 5),
        swizzle=_one_of(v["swizzle"], (0, 32, 64, 128), "swizzle"),
        interleave=_one_of(v["interleave"], (0, 16, 32), "interleave"),
        l2_promotion=_one_of(v["l2_promotion"], (0, 64, 128, 256), "L2 promotion"),
        oob_nan=_bool(v["oob_nan"]),
    )
    rank = len(tensor_map.dims)
    if (
        not 1 <= rank <= 5
        or len(tensor_map.strides) != rank - 1
        or len(tensor_map.box) != rank
        or len(tensor_map.element_strides) != rank
        or tensor_map.offset % 16
    ):
        raise PlanError("malformed tensor map")
    return tensor_map


def _struct(v: Mapping[str, Any]) -> Struct:
    data = _bytes(v["data"])
    if not 0 < len(data) <= MAX_STRUCT_BYTES:
        raise PlanError(f"a structure of {len(data)} bytes: expected 1 to {MAX_STRUCT_BYTES}")
    found = Struct(data, _list(v["placed"], "contents of a structure", _placed, 1024))
    end = 0
    for offset, value in found.placed:
        align = TENSOR_MAP_ALIGN if isinstance(value, TensorMap) else POINTER_BYTES
        begin, end = end, offset + argument_bytes(value)
        if offset < begin or offset % align or end > len(data) or any(data[offset:end]):
            raise PlanError(
                f"a structure of {len(data)} bytes has a {type(value).__name__} at byte {offset}: "
                f"expected a multiple of {align} inside of it, behind byte {begin}, over zeros"
            )
    return found


def _placed(value: object) -> tuple[int, Pointer | TensorMap]:
    if not isinstance(value, list) or len(value) != 2:
        raise PlanError("contents of a structure: expected an offset and a value")
    offset, inside = _int(value[0]), _arg(value[1])
    if not isinstance(inside, Pointer | TensorMap):
        raise PlanError(f"a structure has a {type(inside).__name__}: expected bytes for it")
    return offset, inside


def _fits(type_: str, value: float) -> float:
    if type_[0] in "iu":
        bits = 8 * SCALAR_BYTES[type_] if type_ != "i1" else 1
        low, high = (0, 1) if bits == 1 else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
        if type_[0] == "u":
            low, high = 0, 2**bits - 1
        if not isinstance(value, int) or not low <= value <= high:
            raise PlanError(f"{value!r} does not fit {type_}")
    return value


# -- consistency ---------------------------------------------------------------------------------


def _check(plan: Plan) -> None:
    buffers = {b.id: b for b in plan.buffers}
    kernels = {k.hash: k for k in plan.kernels}
    if len(buffers) != len(plan.buffers) or len(kernels) != len(plan.kernels):
        raise PlanError("two buffers or two kernels share one identity")
    live = {b.id for b in plan.buffers if b.kind == "input"}
    seen = set(live)

    def inside(buffer: int, low: int, high: int) -> None:
        if buffer not in live:
            raise PlanError(f"buffer {buffer} is used while it is not allocated")
        if not 0 <= low <= high <= buffers[buffer].nbytes:
            raise PlanError(
                f"bytes {low} to {high} of buffer {buffer}, which has {buffers[buffer].nbytes}"
            )

    def view(tensor: TensorRef) -> None:
        inside(tensor.buffer, *tensor.extent_bytes)

    for op in plan.ops:
        if isinstance(op, Alloc):
            if op.buffer in seen or op.buffer not in buffers:
                raise PlanError(f"buffer {op.buffer} is unknown or allocated twice")
            live.add(op.buffer)
            seen.add(op.buffer)
        elif isinstance(op, Free):
            if op.buffer not in live or buffers[op.buffer].kind == "input":
                raise PlanError(f"buffer {op.buffer} cannot be freed here")
            live.remove(op.buffer)
        elif isinstance(op, Fill):
            view(op.tensor)
            zero = op.value == 0 and math.copysign(1.0, op.value) > 0
            if op.tensor.dtype in COPIED_DTYPES and not zero:
                raise PlanError(
                    f"{op.tensor.dtype} is filled with {op.value}: torch fills it with 0 alone"
                )
        elif isinstance(op, Copy):
            view(op.src)
            view(op.dst)
        elif isinstance(op, Const):
            view(op.tensor)
            low, high = op.tensor.extent_bytes
            if (
                len(op.data) != high - low
                or high - low != op.tensor.numel * ITEMSIZE[op.tensor.dtype]
            ):
                raise PlanError("a constant must fill a contiguous view exactly")
        elif isinstance(op, TorchOp):
            for tensor in (*op.writes, *tensors_in(op.args), *tensors_in(list(op.kwargs.values()))):
                view(tensor)
        else:
            _check_launch(op, kernels, inside, buffers)
    for tensor in plan.outputs:
        view(tensor)


def _check_launch(
    op: Launch,
    kernels: Mapping[str, KernelInfo],
    inside: Callable[[int, int, int], None],
    buffers: Mapping[int, Buffer],
) -> None:
    kernel = kernels.get(op.kernel)
    if kernel is None:
        raise PlanError(f"launch of a kernel that the plan does not declare: {op.kernel[:12]}")
    sizes = tuple(argument_bytes(a) for a in op.args)
    if sizes != kernel.param_bytes:
        raise PlanError(
            f"kernel {kernel.name} takes parameters of {list(kernel.param_bytes)} bytes, "
            f"the launch passes {list(sizes)}"
        )
    for arg in placed_arguments(op.args):
        if isinstance(arg, Pointer):
            inside(arg.buffer, arg.offset, arg.offset)
        elif isinstance(arg, TensorMap):
            inside(arg.buffer, arg.offset, arg.offset)
            steps = (ITEMSIZE[arg.dtype], *arg.strides)
            reach = sum((n - 1) * s for n, s in zip(arg.dims, steps, strict=True) if n)
            if (
                min(arg.dims)
                and arg.offset + reach + ITEMSIZE[arg.dtype] > buffers[arg.buffer].nbytes
            ):
                raise PlanError(f"tensor map reaches outside of buffer {arg.buffer}")


def argument_bytes(arg: Arg) -> int:
    """Size of a kernel argument in the parameter area."""
    if isinstance(arg, Scalar):
        return SCALAR_BYTES[arg.type]
    if isinstance(arg, Struct):
        return len(arg.data)
    return TENSOR_MAP_BYTES if isinstance(arg, TensorMap) else POINTER_BYTES


def placed_arguments(args: Sequence[Arg]) -> Iterator[Arg]:
    """Arguments of a launch, and what structures among them hold in their place."""
    for arg in args:
        if isinstance(arg, Struct):
            yield from (value for _, value in arg.placed)
        else:
            yield arg


def tensors_in(value: object) -> list[TensorRef]:
    """All tensors in nested arguments, in order."""
    if isinstance(value, TensorRef):
        return [value]
    if isinstance(value, (list, tuple)):
        return [t for v in value for t in tensors_in(v)]
    return []
