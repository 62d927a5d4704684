"""Layout of types in MLIR's LLVM dialect: their sizes, and which bytes are padding.

!llvm.struct<(ptr<1>, struct<(i32, i64)>)>     24 bytes, 12 to 15 are padding
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_TOKEN = re.compile(r"\s*(?:!llvm\.)?([A-Za-z]\w*|\d+|[<>(),])")
_NUMBER = re.compile(r"(?:i|f|bf)(\d+)")
_ARGUMENTS = re.compile(
    r"llvm\.alloca %\S+ x (?P<type>.+?) (?:\{[^}]*\} )?: \(i\d+\) -> !llvm\.ptr"
)
_LAUNCH = "@_cudaLaunchKernelEx("


@dataclass(frozen=True, slots=True)
class TypeLayout:
    """Size and alignment of a type in bytes, and the offsets of its padding."""

    nbytes: int
    align: int
    padding: frozenset[int]


def layout_of(text: str) -> TypeLayout:
    """Layout of a type, as a 64-bit host has it.

    Raises:
        ValueError: It is not one of numbers, pointers, arrays and structures.
    """
    tokens = _TOKEN.findall(text)
    if "".join(tokens) != re.sub(r"!llvm\.|\s", "", text):
        raise ValueError(f"no type of LLVM: {text:.80}")
    found, rest = _type(tokens)
    if rest:
        raise ValueError(f"no type of LLVM: {text:.80}")
    return found


def launched_layouts(module: str) -> list[tuple[TypeLayout, ...]]:
    """Layouts of the parameters of each kernel that a compiled host module launches.

    Args:
        module: Its text: before each launch an array of pointers is allocated, then the parameters.
    """
    found: list[tuple[TypeLayout, ...]] = []
    types: list[str] = []
    for line in module.splitlines():
        if (m := _ARGUMENTS.search(line)) is not None:
            types = [] if m["type"] == "!llvm.ptr" else [*types, m["type"]]
        elif _LAUNCH in line and "llvm.call" in line:
            try:
                found.append(tuple(map(layout_of, types)))
            except ValueError:
                continue  # then what its padding holds is kept
    return found


def _type(tokens: list[str]) -> tuple[TypeLayout, list[str]]:
    name, rest = (tokens[0], tokens[1:]) if tokens else ("", [])
    if name == "ptr":
        if rest[:1] == ["<"]:
            rest = rest[3:]
        return TypeLayout(8, 8, frozenset()), rest
    if name == "array" and len(rest) > 3:
        return _array(rest)
    if name == "struct" and rest[:1] == ["<"]:
        return _struct(rest[1:])
    if (number := _NUMBER.fullmatch(name)) is not None:
        nbytes = max(1, int(number[1]) // 8)
        return TypeLayout(nbytes, min(nbytes, 16), frozenset()), rest
    raise ValueError(f"no type of LLVM at {name or 'its end'}")


def _array(rest: list[str]) -> tuple[TypeLayout, list[str]]:
    count = int(rest[1]) if rest[1].isdecimal() else -1
    if rest[0] != "<" or count < 0 or rest[2] != "x":
        raise ValueError("no array of LLVM")
    item, rest = _type(rest[3:])
    padding = {n * item.nbytes + p for n in range(count) for p in item.padding}
    return TypeLayout(count * item.nbytes, item.align, frozenset(padding)), _after(rest, ">")


def _struct(rest: list[str]) -> tuple[TypeLayout, list[str]]:
    packed = rest[:1] == ["packed"]
    rest = _after(rest[packed:], "(")
    end, align, padding = 0, 1, set[int]()
    while rest[:1] != [")"]:
        field, rest = _type(rest)
        start = end if packed else -(-end // field.align) * field.align
        padding |= {*range(end, start), *(start + p for p in field.padding)}
        end, align = start + field.nbytes, align if packed else max(align, field.align)
        if rest[:1] == [","]:
            rest = rest[1:]
    whole = -(-end // align) * align
    padding |= {*range(end, whole)}
    return TypeLayout(whole, align, frozenset(padding)), _after(rest[1:], ">")


def _after(tokens: list[str], expected: str) -> list[str]:
    if tokens[:1] != [expected]:
        raise ValueError(f"no type of LLVM: expected {expected} at {' '.join(tokens[:3])}")
    return tokens[1:]
