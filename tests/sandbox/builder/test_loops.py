"""Loops of recorded machine code, and of what the compilers make today."""

import pytest
from kagent_sandbox.builder.binary.loops import loops
from kagent_sandbox.data.compiled import MOST_LOOPS, loop_text

HEAD = """
//--------------------- .text.{0}          --------------------------
\t.section\t.text.{0},"ax",@progbits
{0}:
.text.{0}:
"""


def sass(*lines, name="k"):
    """A listing as nvdisasm prints it: labels as they are, instructions at offsets."""
    text, at = HEAD.format(name), 0
    for line in lines:
        if line.startswith(".L"):
            text += f"{line}:\n"
        else:
            text += f"        /*{at:04x}*/                   {line} ;\n"
            at += 16
    return text


PAD = (".L_x_9", "BRA `(.L_x_9)", "NOP")

WGMMA = sass(
    "LDC R1, c[0x0][0x28]",
    ".L_x_0",
    "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4+0x8], R2",
    "WARPGROUP.ARRIVE",
    "HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], R24, gsb0",
    "MUFU.EX2 R5, R5",
    "MUFU.EX2 R6, R6",
    "FFMA R7, R5, R6, R7",
    "WARPGROUP.DEPBAR.LE gsb0, 0x0",
    "STS.128 [R9], R4",
    "@P1 BRA `(.L_x_0)",
    "EXIT",
    *PAD,
)


def test_a_loop_is_counted_by_kind_and_by_pipe():
    (loop,) = loops(WGMMA, "k", 90)
    assert (loop.first, loop.depth, loop.innermost, loop.instructions) == (16, 0, True, 9)
    assert loop.counts == {"FFMA": 1, "HGMMA": 1, "MUFU": 2, "STS 16": 1}
    assert loop.between_waits == (5, 2)
    # 64 * 128 * 16 products at 2048 a clock; 8 clocks per MUFU; 16 B of each of 128 lanes at 128 B
    assert loop.clocks == {
        "issue": 9.0,
        "FP32": 1.0,
        "MUFU": 16.0,
        "shared memory": 16.0,
        "tensor cores": 64.0,
    }
    assert loop_text(loop) == (
        "9 instructions; 1 FFMA, 1 HGMMA, 2 MUFU, 1 STS of 16 B; 5, 2 instructions between waits; "
        "at least 64 clocks for a warp on each scheduler: tensor cores 64, MUFU 16, "
        "shared memory 16, issue 9"
    )


def test_an_architecture_without_known_rates_has_issue_alone():
    (loop,) = loops(WGMMA, "k", 100)
    assert loop.clocks == {"issue": 9.0}


def test_each_loop_counts_for_itself_and_code_out_of_line_belongs_to_its_loop():
    text = sass(
        "MOV R1, R2",
        ".L_x_0",
        "LDG.E.128 R4, desc[UR4][R2.64]",
        ".L_x_1",
        "IADD3 R3, R3, 0x1, RZ",
        "@P0 BRA `(.L_x_3)",
        ".L_x_2",
        "@P1 BRA `(.L_x_1)",
        "BAR.SYNC.DEFER_BLOCKING 0x0",
        "@P2 BRA `(.L_x_0)",
        "EXIT",
        ".L_x_3",
        "UTMALDG.2D [UR8], [UR4]",
        "BRA `(.L_x_2)",
        *PAD,
    )
    inner, outer = loops(text, "k", 90)
    assert (inner.instructions, inner.depth, inner.innermost) == (5, 1, True)
    assert inner.counts == {"TMA": 1}
    assert (outer.instructions, outer.depth, outer.innermost) == (3, 0, False)
    assert (outer.counts, outer.barriers) == ({"LDG 16": 1}, 1)


def test_a_loop_that_only_tries_again_is_part_of_the_loop_around_it():
    """Kernels with warps of their own for loads wait so, at several places of the main loop."""
    text = sass(
        ".L_x_0",
        "USETMAXREG.TRY_ALLOC.CTAPOOL UP0, 0x100",
        "@!P0 BRA `(.L_x_0)",
        ".L_x_1",
        "HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], R24, gsb0",
        ".L_x_2",
        "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4+0x8], R2",
        "@!P0 BRA `(.L_x_2)",
        "@P1 BRA `(.L_x_1)",
        "EXIT",
        *PAD,
    )
    (main,) = loops(text, "k", 90)
    assert (main.first, main.depth, main.innermost, main.instructions) == (32, 0, True, 4)
    assert main.clocks["tensor cores"] == 64.0


def test_straight_code_and_an_unknown_kernel_have_none():
    assert loops(sass("MOV R1, R2", "EXIT", *PAD), "k", 90) == ()
    assert loops(WGMMA, "other", 90) == ()
    assert loops("", "k", 90) == ()


def test_another_kernel_of_the_binary_is_left_out():
    two = WGMMA + sass("EXIT", *PAD, name="second")
    assert len(loops(two, "k", 90)) == 1
    assert loops(two, "second", 90) == ()


def test_many_loops_are_cut():
    lines = [x for i in range(40) for x in (f".L_x_{i + 10}", f"@P0 BRA `(.L_x_{i + 10})")]
    assert len(loops(sass(*lines, "EXIT", *PAD), "k", 90)) == MOST_LOOPS


def test_a_loop_with_more_work_comes_before_small_ones_within_it():
    lines = [x for i in range(40) for x in (f".L_x_{i + 10}", f"@P0 BRA `(.L_x_{i + 10})")]
    products = ["HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], R24, gsb0"]
    around = sass(".L_x_0", *products, *lines, "@P1 BRA `(.L_x_0)", "EXIT", *PAD)
    found = loops(around, "k", 90)
    assert [x.innermost for x in found] == [False] + [True] * (MOST_LOOPS - 1)


@pytest.mark.parametrize(
    "line",
    [
        "HGMMA.64x" + "9" * 9000 + "x16 R1",
        "@P1 BRA `(.L_x_" + "9" * 9000 + ")",
        "@P0 X" + "." * 9000,
    ],
)
def test_machine_code_that_no_compiler_wrote_is_read_without_a_fault(line):
    assert loops(sass(".L_x_0", line, "@P0 BRA `(.L_x_0)", "EXIT"), "k", 90)


def test_the_width_of_a_product_decides_its_clocks():
    def clocks(instruction):
        (loop,) = loops(sass(".L_x_0", instruction, "@P0 BRA `(.L_x_0)", "EXIT"), "k", 90)
        return loop.clocks["tensor cores"]

    assert clocks("HMMA.16816.F32.BF16 R4, R8, R12, R4") == 4.0
    assert clocks("HMMA.1688.F32.TF32 R4, R8, R12, R4") == 4.0
    assert clocks("HGMMA.64x128x8.F32.TF32 R4, gdesc[UR4], R4") == 64.0
    assert clocks("QGMMA.64x128x32.F32.E4M3.E4M3 R4, gdesc[UR4], R4") == 64.0
