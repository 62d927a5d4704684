"""Binaries that no compiler wrote: they must cost little to refuse, and be taken for no other."""

import struct
import tracemalloc

import pytest
from kagent_sandbox.builder.binary.elf import SHT_DYNSYM, ElfError, read_elf
from kagent_sandbox.builder.binary.inspect import InspectError, kernel_info
from kagent_sandbox.builder.compile.cpp import compile_cpp

TWO = """
extern "C" __attribute__((noinline)) void {first}(const float* x, float* y) {{ y[0] = x[0]; }}
extern "C" __attribute__((noinline)) void {second}(const float* x, float* y) {{ y[0] = 7 * x[0]; }}
"""


def elf(sections, body):
    """A file of `body` and section headers (type, offset, size, link, name), names at the body's
    end.
    """
    headers = b"".join(
        struct.pack("<IIQQQQIIQQ", name, kind, 2, 0, 64 + offset, size, link, 0, 1, 0)
        for kind, offset, size, link, name in sections
    )
    head = b"\x7fELF\x02\x01\x01" + bytes(9)
    table = 64 + len(body)
    head += struct.pack("<HHIQQQIHHHHHH", 3, 62, 1, 0, 0, table, 0, 64, 0, 0, 64, len(sections), 0)
    return head + body + headers


def peak_bytes(data):
    tracemalloc.start()
    try:
        with pytest.raises(InspectError):
            kernel_info(data, "k", "cpp")
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_sections_that_overlap_are_refused_before_they_are_copied():
    body = bytes(1 << 20)
    assert peak_bytes(elf([(3, 0, len(body), 0, 0)] * 1000, body)) < 16 << 20


def test_symbols_that_share_one_long_name_are_refused():
    strings = b"a" * 10_000 + b"\0"
    symbols = struct.pack("<IBBHQQ", 0, 0x12, 0, 1, 0, 0) * 20_000
    sections = [
        (3, 0, len(strings), 0, len(strings) - 1),
        (SHT_DYNSYM, len(strings), len(symbols), 0, len(strings) - 1),
    ]
    assert peak_bytes(elf(sections, strings + symbols)) < 16 << 20


def test_endless_names_are_refused():
    body = b"a" * (1 << 20)
    with pytest.raises(ElfError, match="string table"):
        read_elf(elf([(3, 0, len(body), 0, 0)], body))


def test_large_binaries_are_refused():
    with pytest.raises(InspectError, match="limit"):
        kernel_info(bytes(33 << 20), "k", "cpp")


def test_inspecting_does_not_hold_on_to_binaries():
    source = 'extern "C" void k(const float* x, float* y) { y[0] = x[0]; }'
    binary = compile_cpp("k", source) + bytes(8 << 20)
    tracemalloc.start()
    try:
        for i in range(4):
            kernel_info(binary + bytes([i]), "k", "cpp")
        assert tracemalloc.get_traced_memory()[0] < 4 << 20
    finally:
        tracemalloc.stop()


def test_two_functions_that_swap_their_names_are_two_kernels():
    one = kernel_info(compile_cpp("kk", TWO.format(first="kk", second="oo")), "kk", "cpp")
    two = kernel_info(compile_cpp("kk", TWO.format(first="oo", second="kk")), "kk", "cpp")
    assert one.code != two.code
    assert one.hash != two.hash


def test_code_in_a_section_with_a_harmless_name_counts():
    text = """
    __attribute__((section("{section}"), noinline)) static float f(float x) {{ return {n} * x; }}
    extern "C" void k(const float* x, float* y) {{ y[0] = f(x[0]); }}
    """
    for section in (".gnu.text", ".note.text", ".dyntext", ".eh_frame_text"):
        one, two = (
            kernel_info(compile_cpp("k", text.format(section=section, n=n)), "k", "cpp")
            for n in ("3", "5")
        )
        assert one.code != two.code, section


def test_whatever_is_loaded_under_a_hash_has_exactly_these_bytes():
    binary = compile_cpp("k", 'extern "C" void k(const float* x, float* y) { y[0] = x[0]; }')
    base = kernel_info(binary, "k", "cpp")
    for at in range(0x40, len(binary), 41):
        other = binary[:at] + bytes([binary[at] ^ 1]) + binary[at + 1 :]
        try:
            assert kernel_info(other, "k", "cpp").hash != base.hash
        except InspectError:
            continue
