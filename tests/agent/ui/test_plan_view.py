import dataclasses
import io
import json

import pytest
from kagent.text import config_text, human_bytes, kernel_label, widths_text
from kagent.ui.plan_view import built_json, built_view, plan_lines
from kagent_sandbox.data.build import Built
from kagent_sandbox.data.plan import (
    Alloc,
    Buffer,
    Const,
    Copy,
    Fill,
    Free,
    KernelInfo,
    Launch,
    Plan,
    Pointer,
    Scalar,
    TensorRef,
)
from rich.console import Console
from synthetic_lineages import LOOP, REMARK

X = TensorRef(0, 0, (4, 8), (8, 1), "float32")
Y = TensorRef(1, 0, (4, 8), (8, 1), "float32")
PART = TensorRef(2, 16, (3,), (1,), "int32")
KERNEL = KernelInfo("ab" * 32, "cuda", "_Z4rowsI6__halfLi8EEvPKT_", (8, 8, 4), 40, 0, 1024, {16: 4})
PLAN = Plan(
    "sm_90a",
    (Buffer(0, "input", 128, "x"), Buffer(1, "output", 128, "y"), Buffer(2, "scratch", 2048)),
    (
        Alloc(1),
        Alloc(2),
        Fill(PART, 0.0),
        Copy(X, Y),
        Const(PART, b"\0" * 12),
        Launch(
            KERNEL.hash,
            (4, 1, 1),
            (128, 1, 1),
            (Pointer(0, 0), Pointer(2, 16), Scalar("i32", 5)),
            shared=512,
            cluster=(2, 1, 1),
            cooperative=True,
        ),
        Free(2),
    ),
    (Y,),
    (KERNEL,),
)


def built(*configs, dropped=()):
    plans = {(i, "case"): PLAN for i, _ in enumerate(configs)}
    return Built("s", "t", "sm_90a", configs, plans, {KERNEL.hash: b"x" * 3000}, 0.5, dropped)


def shown(view, width=80):
    console = Console(file=io.StringIO(), width=width, markup=False, highlight=False)
    console.print(view)
    return console.file.getvalue()


def test_a_plan_is_a_line_per_step():
    assert list(plan_lines(PLAN)) == [
        "alloc  y  128 B",
        "alloc  b2  2 KiB",
        "fill   b2+16:i32[3] = 0.0",
        "copy   y:f32[4x8] <- x:f32[4x8]",
        "const  b2+16:i32[3] (12 bytes)",
        "launch rows<__half, 8> grid=(4, 1, 1) block=(128, 1, 1) shared=512 cluster=(2, 1, 1) "
        "cooperative (x, b2+16, i32 5)",
        "free   b2",
        "return y:f32[4x8]",
    ]


def test_kernels_and_plans_at_80_columns():
    text = shown(built_view(built({"BLOCK": 8}), full=False))
    assert "kernels for sm_90a" in text
    assert "rows<__half, 8>" in text
    assert "1.5 KiB (1 KiB static)" in text
    assert "16 B ×4" in text
    assert "plans, BLOCK=8" in text
    assert "alloc" not in text


def test_kernels_of_one_name_are_told_apart_by_their_cases_and_their_code():
    other = dataclasses.replace(KERNEL, hash="cd" * 32, spill_bytes=7270)
    launch = next(op for op in PLAN.ops if isinstance(op, Launch))
    plan = dataclasses.replace(
        PLAN, ops=(dataclasses.replace(launch, kernel=other.hash),), kernels=(other,)
    )
    binaries = {KERNEL.hash: b"x", other.hash: b"y"}
    plans = {(0, "small"): PLAN, (0, "medium"): PLAN, (0, "large"): plan}
    found = dataclasses.replace(built({}), plans=plans, binaries=binaries)
    text = shown(built_view(found, full=True), 150)
    rows = [line for line in text.splitlines() if line.startswith("rows<__half, 8> ")]
    assert [("small + 1" in r, "large" in r, "7.1 KiB" in r) for r in rows] == [
        (True, False, False),
        (False, True, True),
    ]
    assert "launch rows<__half, 8> abababab grid" in text
    assert "launch rows<__half, 8> cdcdcdcd grid" in text


def test_several_configurations_have_a_row_each_and_reasons_for_the_dropped():
    view = built_view(
        built({"BLOCK": 8}, {"BLOCK": 16}, dropped=("BLOCK=32: too large",)), full=True
    )
    text = shown(view, 150)
    assert text.count("BLOCK=8") == 2  # its row and its listing
    assert "BLOCK=16" in text
    assert "dropped: BLOCK=32: too large" in text
    assert text.count("launch rows") == 2


def test_compilers_words_and_loops_stand_below_the_kernels():
    said = dataclasses.replace(built({"BLOCK": 8}), remarks=(REMARK,), loops=(LOOP,))
    text = shown(built_view(said, full=False), 150)
    assert "rows: ptxas: (C7511) wgmma.mma_async instructions are serialized" in text
    assert "rows at 0x40: 9 instructions" in text
    data = json.loads(json.dumps(built_json(said), allow_nan=False))
    assert data["remarks"] == [{"kernel": "rows", "text": REMARK.text}]
    assert data["loops"][0]["counts"] == {"HGMMA": 1, "LDG 16": 2}


def test_json_of_a_build_is_json():
    data = json.loads(json.dumps(built_json(built({"BLOCK": 8})), allow_nan=False))
    assert data["plans"][0]["launches"] == 1
    assert data["kernels"][0]["load_bytes"] == {"16": 4}
    assert data["plans"][0]["plan"]["ops"]


@pytest.mark.parametrize(
    ("symbol", "label"),
    [
        ("softmax_rows", "softmax_rows"),
        ("_Z4rowsPKfPf", "rows"),
        ("_Z4rowsI13__nv_bfloat16Li8ELin1EEvPKT_", "rows<__nv_bfloat16, 8, -1>"),
        ("_Z4rowsIfLb1EEvPf", "rows<float, 1>"),
        ("_Z4rowsIN2ns1AEEvPf", "_Z4rowsIN2ns1AEEvPf"),
        ("_ZN2ns4rowsEv", "_ZN2ns4rowsEv"),
    ],
)
def test_mangled_names_are_read_where_they_are_simple(symbol, label):
    assert kernel_label(symbol) == label


def test_sizes_widths_and_configurations_in_words():
    assert [human_bytes(n) for n in (0, 1536, 128 * 1024, 3 << 30)] == [
        "0 B",
        "1.5 KiB",
        "128 KiB",
        "3 GiB",
    ]
    assert widths_text({4: 1, 16: 2}) == "16 B ×2, 4 B ×1"
    assert widths_text({}) == "–"
    assert config_text({"A": 1, "B": "x"}) == "A=1 B=x"
    assert config_text({}) == "as written"
