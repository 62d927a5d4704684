"""Parameters of CUDA kernels. Their sizes come from the cubin; what they are (a float or an int)
from the source, as far as a glance at the signature tells.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from .arguments import Parameter
from .scalars import SCALAR_BYTES, ScalarType

_CUDA_TYPES: dict[str, ScalarType] = {
    "bool": "i1", "char": "i8", "signed char": "i8", "int8_t": "i8", "unsigned char": "u8",
    "uint8_t": "u8",
    "short": "i16", "int16_t": "i16", "unsigned short": "u16", "uint16_t": "u16", "int": "i32",
    "int32_t": "i32", "unsigned": "u32", "unsigned int": "u32", "uint32_t": "u32", "uint": "u32",
    "long": "i64", "long long": "i64", "int64_t": "i64", "ptrdiff_t": "i64", "unsigned long": "u64",
    "unsigned long long": "u64", "uint64_t": "u64", "size_t": "u64", "float": "f32",
    "double": "f64",
    "half": "f16", "__half": "f16", "__nv_bfloat16": "bf16", "nv_bfloat16": "bf16",
}  # fmt: skip


def cuda_parameters(name: str, source: str, sizes: Sequence[int]) -> tuple[Parameter, ...]:
    """Parameters of a CUDA kernel: sizes of the cubin, types of the source where they are plain."""
    unknown = tuple(Parameter(n) for n in sizes)
    found = declared_types(name, source)
    if found is None or len(found) != len(sizes):
        return unknown
    parameters = []
    for size, text in zip(sizes, found, strict=True):
        type_ = _CUDA_TYPES.get(text)
        if text == "*":
            parameters.append(Parameter(size, None, size == 8 or None))
        elif type_ is not None and SCALAR_BYTES[type_] == size:
            parameters.append(Parameter(size, type_, False))
        else:
            parameters.append(Parameter(size))
    return tuple(parameters)


def declared_types(name: str, source: str) -> tuple[str, ...] | None:
    """Types in the signature of `__global__ ... name(...)`, `*` for pointers; None if it is not
    found.
    """
    plain = re.sub(r"//[^\n]*|/\*.*?\*/", " ", source, flags=re.DOTALL)
    base = re.escape(name.split("<")[0].split("::")[-1].strip())
    match = re.search(rf"__global__\b[^;{{}}]*?\b{base}\s*\(", plain)
    if match is None:
        return None
    parts, depth, part = [], 0, ""
    for c in plain[match.end() :]:
        depth += (c in "(<[{") - (c in ")>]}")
        if depth < 0 or (c == "," and depth == 0):
            parts.append(part)
            part = ""
            if depth < 0:
                break
        else:
            part += c
    types = [_type_name(p) for p in parts]
    return tuple(types) if types != [""] and types != ["void"] else ()


def _type_name(declaration: str) -> str:
    text = re.sub(r"=.*", "", declaration, flags=re.DOTALL)
    if "*" in text or "[" in text:
        return "*"
    words = re.findall(
        r"[\w:]+", re.sub(r"\b(const|volatile|__grid_constant__|std::)\b", " ", text)
    )
    words = [w.removeprefix("std::") for w in words]
    for count in (len(words) - 1, len(words)):  # with and without a name
        if count > 0 and " ".join(words[:count]) in _CUDA_TYPES:
            return " ".join(words[:count])
    return " ".join(words[:-1])
