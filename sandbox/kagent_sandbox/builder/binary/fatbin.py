"""The cubin in a fat binary that lies in this process's memory."""

from __future__ import annotations

import ctypes
import struct

from kagent_sandbox.builder.binary.inspect import InspectError

_ELF = b"\x7fELF"
_FAT = 0xBA55ED50
_KIND_ELF = 2
_MOST_BYTES = 256 << 20


def cubin_at(address: int) -> bytes:
    """Copy the cubin at an address: an ELF file, or the first one in a fat binary.

    Raises:
        InspectError: It is neither, or the cubin is compressed.
    """
    head = ctypes.string_at(address, 16)
    if head.startswith(_ELF):
        return _elf_at(address)
    magic, _version, header, nbytes = struct.unpack("<IHHQ", head)
    if magic != _FAT or nbytes > _MOST_BYTES:
        raise InspectError(f"neither a cubin nor a fat binary: it begins with {head[:4].hex()}")
    place, end = address + header, address + header + nbytes
    while place < end:
        kind, _version, entry_header, size = struct.unpack("<HHIQ", ctypes.string_at(place, 16))
        if kind == _KIND_ELF:
            if ctypes.string_at(place + entry_header, 4) != _ELF:
                raise InspectError("the cubin in a fat binary is compressed")
            return _elf_at(place + entry_header)
        place += entry_header + size
    raise InspectError("a fat binary without machine code")


def _elf_at(address: int) -> bytes:
    """An ELF file, up to its table of sections or the table of segments behind it."""
    head = ctypes.string_at(address, 64)
    segments, sections = struct.unpack_from("<QQ", head, 32)
    segment_bytes, segment_count, section_bytes, section_count = struct.unpack_from(
        "<HHHH", head, 54
    )
    nbytes = max(sections + section_bytes * section_count, segments + segment_bytes * segment_count)
    if nbytes > _MOST_BYTES:
        raise InspectError(f"a cubin of {nbytes} bytes")
    return ctypes.string_at(address, nbytes)
