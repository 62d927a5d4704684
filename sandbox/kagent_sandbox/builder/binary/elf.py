"""Sections and symbols of a 64-bit little-endian ELF file: cubins and shared objects.

The file comes from an untrusted process: every offset is checked, every count is capped, and what
is read of a file in all is no more than a small multiple of it: a thousand sections that overlap,
or symbols that share one long name, would else cost gigabytes.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cached_property

MAX_SECTIONS = 4096
MAX_SYMBOLS = 1 << 16
MAX_NAME_BYTES = 16 << 10  # mangled templates reach a few KiB
_SECTIONS_SHARE = 4  # sizes of sections in all, over the file
_TEXT_SHARE = 8  # names of symbols in all, over their table: tails are shared, whole names are not

SHT_SYMTAB, SHT_NOBITS, SHT_DYNSYM = 2, 8, 11
SHF_WRITE, SHF_ALLOC, SHF_EXECUTE, SHF_TLS = 1, 2, 4, 0x400
EM_CUDA = 190


class ElfError(ValueError):
    """Not an ELF file that this module can read."""


@dataclass(frozen=True)
class Section:
    """A section. `data` is empty for those that occupy no bytes of the file; `size` counts there
    too.
    """

    name: str
    type: int
    flags: int
    link: int
    size: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Symbol:
    """An entry of a symbol table. `other` holds CUDA's mark of kernels (0x10)."""

    name: str
    info: int
    other: int
    section: int
    value: int


@dataclass(frozen=True)
class Elf:
    """An ELF file, read."""

    machine: int
    abi: int
    flags: int
    sections: tuple[Section, ...]

    def named(self, name: str) -> Section | None:
        """The first section of that name."""
        return next((s for s in self.sections if s.name == name), None)

    @cached_property
    def symbols(self) -> tuple[Symbol, ...]:
        """Static symbols, or the dynamic ones of a file that has been stripped."""
        for kind in (SHT_SYMTAB, SHT_DYNSYM):
            for section in self.sections:
                if section.type == kind:
                    return self._symbols(section)
        return ()

    @cached_property
    def undefined(self) -> tuple[str, ...]:
        """Names that any of its symbol tables leaves to other files."""
        tables = [s for s in self.sections if s.type in (SHT_SYMTAB, SHT_DYNSYM)]
        return tuple(s.name for t in tables for s in self._symbols(t) if not s.section)

    def _symbols(self, section: Section) -> tuple[Symbol, ...]:
        if section.link >= len(self.sections) or section.size > 24 * MAX_SYMBOLS:
            raise ElfError("malformed symbol table")
        strings = self.sections[section.link].data
        whole = section.data[: len(section.data) // 24 * 24]
        left = _TEXT_SHARE * len(strings)
        found = []
        for at, info, other, index, value, _ in struct.iter_unpack("<IBBHQQ", whole):
            name = _text(strings, at)
            left -= len(name)
            if left < 0:
                raise ElfError("malformed symbol table: names share their text")
            found.append(Symbol(name, info, other, index, value))
        return tuple(found)


def read_elf(data: bytes) -> Elf:
    """Read section headers and names.

    Raises:
        ElfError: It is not a 64-bit little-endian ELF file, or it is malformed.
    """
    if len(data) < 64 or data[:6] != b"\x7fELF\x02\x01":
        raise ElfError("not a 64-bit ELF file")
    machine = int.from_bytes(data[18:20], "little")
    table = int.from_bytes(data[40:48], "little")
    flags = int.from_bytes(data[48:52], "little")
    entry_bytes, count, names = struct.unpack_from("<HHH", data, 58)
    if entry_bytes != 64 or not 0 < count <= MAX_SECTIONS or table + 64 * count > len(data):
        raise ElfError("malformed section table")
    headers = [struct.unpack_from("<IIQQQQIIQQ", data, table + 64 * i) for i in range(count)]
    # a few small ones may overlap: ptxas lets debug sections share bytes
    if sum(h[5] for h in headers if h[1] != SHT_NOBITS) > _SECTIONS_SHARE * len(data):
        raise ElfError("sections overlap or lie outside of the file")
    bodies: list[bytes] = []
    for header in headers:
        kind, offset, size = header[1], header[4], header[5]
        if kind == SHT_NOBITS or not size:
            bodies.append(b"")
        elif offset + size > len(data):
            raise ElfError("a section lies outside of the file")
        else:
            bodies.append(data[offset : offset + size])
    if names >= count:
        raise ElfError("malformed section table")
    sections = tuple(
        Section(_text(bodies[names], h[0]), h[1], h[2], h[6], h[5], body)
        for h, body in zip(headers, bodies, strict=True)
    )
    return Elf(machine, data[8], flags, sections)


def _text(strings: bytes, start: int) -> str:
    end = strings.find(b"\0", start, start + MAX_NAME_BYTES)
    if end < 0:
        raise ElfError("malformed string table")
    return strings[start:end].decode("utf-8", "replace")
