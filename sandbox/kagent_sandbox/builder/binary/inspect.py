"""Facts about a compiled kernel, read from its binary without a GPU and without another process.

Registers, local memory, parameter sizes and shared memory come from a cubin's `.nv.info` and
section sizes (as `cuobjdump --dump-resource-usage` prints them); widths of global loads from its
machine code (as `nvdisasm` prints it). The agent reads every binary again with the same functions,
because the builder is not trusted.
"""

from __future__ import annotations

import dataclasses
import hashlib
import struct
from collections.abc import Iterator, Sequence

import numpy as np

from kagent_sandbox.builder.binary.elf import (
    EM_CUDA,
    SHF_ALLOC,
    SHF_EXECUTE,
    SHT_DYNSYM,
    SHT_NOBITS,
    Elf,
    ElfError,
    Section,
    read_elf,
)
from kagent_sandbox.data.language import language
from kagent_sandbox.data.plan import SCALAR_BYTES, KernelInfo, ScalarType
from kagent_sandbox.runtime.scalars import cpp_types

_KERNEL_MARK = 0x10  # st_other of a __global__ function
_RESERVED_SHARED_BYTES = 1024  # of each block on sm_90 and later; not part of the 227 KiB limit

# attributes of .nv.info, by the names that cuobjdump gives them
_PARAM_CBANK, _FRAME_SIZE, _KPARAM_INFO, _REGCOUNT, _KPARAM_INFO_V2 = 0x0A, 0x11, 0x17, 0x2F, 0x45
_CALL_GRAPH_ATTRIBUTES = frozenset({_PARAM_CBANK, 0x1C, 0x36, 0x37})  # section indices, workarounds
_SIZED = 4  # format of an attribute with a length; all others hold two bytes

# Sections of a library that change with the names it defines: its symbols, their names, hashes and
# versions, and where the loader finds all that.
_TABLES_OF_NAMES = frozenset({2, 3, 5, 6, SHT_DYNSYM, 0x6FFFFFF6, 0x6FFFFFFE, 0x6FFFFFFF})

# opcodes of SASS since Volta (bits 0 to 11 of the 128) and widths by their size field
_LDG, _LDG_256, _LDGSTS = (0x381, 0x981), 0x97E, 0xFAE
_WIDTHS = (1, 1, 2, 2, 4, 8, 16, 0)


MAX_BINARY_BYTES = 32 << 20  # a cubin full of library templates has 5 MiB
_MAX_ATTRIBUTE_BYTES = 1 << 20  # of .nv.info, which is read byte by byte
_MOST_KNOWN = 512
_known: dict[tuple[str, str], KernelInfo] = {}
"""Known kernels by hash of binary and symbol, and language. Binaries themselves are not kept."""


class InspectError(ValueError):
    """A binary that cannot be read, or lacks the kernel."""


def kernel_info(binary: bytes, symbol: str, written_in: str) -> KernelInfo:
    """Describe the kernel `symbol` of a cubin, or of a shared object that `cpp` built; `written_in`
    is the name of its language.

    `hash` is of every byte of the binary, and the symbol: what is loaded under it can be nothing
    else. `code` leaves names out, so that a kernel under another name is recognised; a binary that
    no compiler wrote can have the code of another, and is then told apart from it no more.

    Raises:
        InspectError: The binary is malformed or has no such kernel.
    """
    if len(binary) > MAX_BINARY_BYTES:
        raise InspectError(f"a binary of {len(binary)} bytes: the limit is {MAX_BINARY_BYTES}")
    whole = hashlib.sha256(binary)
    whole.update(f"\0{symbol}".encode(errors="replace"))
    key = whole.hexdigest(), written_in
    info = _known.get(key)
    if info is None:
        try:
            elf = read_elf(binary)
            read = _shared_object if language(written_in).kind == "cpu" else _cubin
            info = read(elf, symbol, written_in)
        except (ElfError, struct.error, UnicodeError) as e:
            raise InspectError(f"kernel {symbol}: {e}") from None
        info = dataclasses.replace(info, hash=key[0])
        if len(_known) >= _MOST_KNOWN:
            _known.clear()
        _known[key] = info
    return info


def cpp_parameters(binary: bytes) -> tuple[ScalarType | None, ...]:
    """Types of the parameters of the kernel in a shared object that `cpp` built; None is a pointer.

    Raises:
        InspectError: It does not say, or one is neither a pointer nor a number.
    """
    try:
        return _cpp_parameters(read_elf(binary))
    except ElfError as e:
        raise InspectError(str(e)) from None


def architecture(binary: bytes) -> int:
    """Compute capability that a cubin was compiled for: 80, 90, 100."""
    return _architecture(read_elf(binary))


# -- cubins --------------------------------------------------------------------------------------


def _cubin(elf: Elf, symbol: str, written_in: str) -> KernelInfo:
    names = _kernels(elf)
    text = elf.named(f".text.{symbol}")
    own = elf.named(f".nv.info.{symbol}")
    if elf.machine != EM_CUDA or symbol not in names or text is None or own is None:
        raise InspectError(
            f"no kernel {symbol} in this binary; it has {', '.join(names) or 'none'}"
        )
    common = elf.named(".nv.info")
    counts = _per_function(common.data if common else b"", _index_of(elf, symbol))
    return KernelInfo(
        hash="",
        language=written_in,
        name=symbol,
        param_bytes=_param_bytes(own.data),
        registers=counts.get(_REGCOUNT, 0),
        spill_bytes=counts.get(_FRAME_SIZE, 0),
        static_shared_bytes=_static_shared(elf, symbol),
        load_bytes=_load_widths(text.data, _architecture(elf)),
        code=_code_hash(elf, symbol, names),
    )


def _kernels(elf: Elf) -> tuple[str, ...]:
    return tuple(s.name for s in elf.symbols if s.other & _KERNEL_MARK and s.info & 0xF == 2)


def _index_of(elf: Elf, symbol: str) -> int:
    return next(i for i, s in enumerate(elf.symbols) if s.name == symbol)


def _architecture(elf: Elf) -> int:
    # CUDA 13 moved the architecture up a byte, and raised the ABI version to say so
    return elf.flags >> 8 & 0xFF if elf.abi >= 8 else elf.flags & 0xFF


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Attributes of a .nv.info section: (number, value)."""
    if len(data) > _MAX_ATTRIBUTE_BYTES:
        raise InspectError(f"{len(data)} bytes of attributes")
    at = 0
    while at + 4 <= len(data):
        kind, attribute = data[at], data[at + 1]
        size = int.from_bytes(data[at + 2 : at + 4], "little") if kind == _SIZED else 0
        value = data[at + 4 : at + 4 + size] if size else data[at + 2 : at + 4]
        yield attribute, value
        at += 4 + size


def _per_function(data: bytes, index: int) -> dict[int, int]:
    """Attributes of .nv.info that give one number per function, for the function of that symbol
    index.
    """
    found = {}
    for attribute, value in _attributes(data):
        if len(value) == 8:
            function, number = struct.unpack("<II", value)
            if function == index:
                found[attribute] = number
    return found


def _param_bytes(data: bytes) -> tuple[int, ...]:
    sizes: dict[int, int] = {}
    for attribute, value in _attributes(data):
        if attribute in {_KPARAM_INFO, _KPARAM_INFO_V2} and len(value) == 12:
            _, ordinal, _, packed = struct.unpack("<IHHI", value)
            # the second form keeps the alignment in the upper half
            sizes[ordinal] = packed >> 18 if attribute == _KPARAM_INFO else packed & 0xFFFF
    if sorted(sizes) != list(range(len(sizes))):
        raise InspectError("the binary does not describe its kernel's parameters")
    return tuple(sizes[i] for i in range(len(sizes)))


def _static_shared(elf: Elf, symbol: str) -> int:
    section = elf.named(f".nv.shared.{symbol}")
    size = section.size if section else 0
    if size and elf.named(".nv.shared.reserved.0") is not None and _architecture(elf) >= 90:
        return max(0, size - _RESERVED_SHARED_BYTES)
    return size


def _load_widths(text: bytes, architecture: int) -> dict[int, int]:
    """Bytes per thread of a global load -> number of such instructions."""
    words = np.frombuffer(text[: len(text) // 16 * 16], dtype="<u8").reshape(-1, 2)
    opcode = words[:, 0] & np.uint64(0xFFF)
    counts: dict[int, int] = {}

    def add(which: np.ndarray[tuple[int, ...], np.dtype[np.bool_]], shift: int) -> None:
        fields = (words[which, 1] >> np.uint64(shift)) & np.uint64(7)
        for field, n in zip(*np.unique(fields, return_counts=True), strict=True):
            if width := _WIDTHS[int(field)]:
                counts[width] = counts.get(width, 0) + int(n)

    add(np.isin(opcode, np.array(_LDG, dtype=np.uint64)), 9)
    add(opcode == _LDGSTS, 10 if architecture >= 100 else 9)
    if architecture >= 100 and (wide := int(np.count_nonzero(opcode == _LDG_256))):
        counts[32] = wide
    return dict(sorted(counts.items()))


def _code_hash(elf: Elf, symbol: str, kernels: Sequence[str]) -> str:
    """Hash of what the kernel executes and reads: its own sections and those that no other kernel
    owns.
    """
    others = [k for k in kernels if k != symbol]
    digest = hashlib.sha256(f"cubin {_architecture(elf)}".encode())
    parts: list[tuple[str, bytes]] = []
    for section in elf.sections:
        name = section.name
        if not _counts(section) or any(name.endswith(f".{k}") for k in others):
            continue
        if name == f".nv.info.{symbol}":
            kept = (a for a in _attributes(section.data) if a[0] not in _CALL_GRAPH_ATTRIBUTES)
            body = b"".join(struct.pack("<BH", a, len(v)) + v for a, v in kept)
        else:
            body = section.data
        parts.append((name.removesuffix(f".{symbol}"), struct.pack("<Q", section.size) + body))
    for name, body in sorted(parts):
        digest.update(f"\0{name}\0{len(body)}\0".encode() + body)
    return digest.hexdigest()


def _counts(section: Section) -> bool:
    """Whether a section of a cubin decides what runs."""
    keep = (".text.", ".nv.constant", ".nv.global", ".nv.shared.", ".nv.info.", ".nv.local.")
    return section.name.startswith(keep)


# -- shared objects ------------------------------------------------------------------------------


def _shared_object(elf: Elf, symbol: str, written_in: str) -> KernelInfo:
    defined = {s.name for s in elf.symbols if s.section and s.info & 0xF == 2}
    if symbol not in defined:
        raise InspectError(f'{symbol} must be declared extern "C"')
    return KernelInfo(
        hash="",
        language=written_in,
        name=symbol,
        param_bytes=tuple(8 if t is None else SCALAR_BYTES[t] for t in _cpp_parameters(elf)),
        code=_library_hash(elf, symbol),
    )


def _cpp_parameters(elf: Elf) -> tuple[ScalarType | None, ...]:
    section = elf.named(".kagent_signature")
    text = section.data.split(b"\0", 1)[0].decode("ascii", "replace") if section else ""
    try:
        return cpp_types(text)
    except ValueError as e:
        raise InspectError(str(e)) from None


def _library_hash(elf: Elf, symbol: str) -> str:
    """Hash of a library's loaded contents, of what it imports, and of where the kernel begins; not
    of the names that it defines.
    """
    entry = next(s.value for s in elf.symbols if s.name == symbol and s.section)
    digest = hashlib.sha256(f"elf {elf.machine} {entry}".encode())
    for section in elf.sections:
        named = section.type in _TABLES_OF_NAMES and not section.flags & SHF_EXECUTE
        if section.flags & SHF_ALLOC and not named:
            head = f"\0{section.name}\0{section.size}\0".encode()
            digest.update(head + (b"" if section.type == SHT_NOBITS else section.data))
        if section.type == SHT_DYNSYM:
            imports = [s.name for s in elf.symbols if not s.section]
            digest.update("\0".join(imports).encode())
    return digest.hexdigest()
