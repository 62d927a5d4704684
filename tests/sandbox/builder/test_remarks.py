"""Compilers' words on success: read, bounded, and caught from real compilers."""

import os

import pytest
from kagent_sandbox.builder.binary import disassemble
from kagent_sandbox.builder.compile import remarks
from kagent_sandbox.builder.trace import triton as trace_triton
from kagent_sandbox.builder.validate import Forged, checked_remarks
from kagent_sandbox.data.build import Built
from kagent_sandbox.data.compiled import MOST_REMARK_CHARS, MOST_REMARKS, Remark
from kagent_sandbox.errors import ToolchainError
from test_builder import CUDA, TRITON, request
from triton import knobs

PTXAS = """\
ptxas info    : (C7511) Potential Performance Loss: wgmma.mma_async instructions are serialized \
due to insufficient register resources for the wgmma pipeline in the function 'rows'
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'rows' for 'sm_90a'
ptxas info    : Function properties for rows
    824 bytes stack frame, 1072 bytes spill stores, 1076 bytes spill loads
ptxas info    : Used 32 registers, used 0 barriers, 824 bytes cumulative stack size
ptxas info    : Function properties for clean
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas warning : Value of threads per SM for entry rows is out of range
"""


def test_ptxas_is_heard_where_it_says_more_than_figures():
    serialised, spills, warning = remarks.of_ptxas(PTXAS)
    assert serialised.startswith("ptxas: (C7511) Potential Performance Loss: wgmma")
    assert spills == "ptxas: rows spills: 1072 bytes spill stores, 1076 bytes spill loads"
    assert warning == "ptxas: Value of threads per SM for entry rows is out of range"


def test_remarks_of_cuda_and_triton_name_their_lines():
    log = '/kernel.cu(2): warning #177-D: variable "unused" was declared but never referenced\n'
    (text,) = remarks.of_cuda(log, "a\n  int unused;\n")
    assert text.startswith("line 2: warning #177-D: variable")
    assert text.endswith("2 | int unused;")
    (text,) = remarks.of_cuda("/usr/x.h(3): warning: odd\n", "a\n")
    assert text == "in x.h line 3: warning: odd"
    printed = "/tmp/candidate.py:7:12: error: no layout\n<unknown>:0:0: remark: slow\nother\n"
    assert remarks.of_triton(printed) == ["line 7: error: no layout", "remark: slow"]


def test_what_is_said_is_bounded():
    checked = checked_remarks([["rows", "x" * 9999]])
    assert checked == (Remark("rows", "x" * MOST_REMARK_CHARS),)
    assert checked_remarks([["rows", "a\x1b[31mb"]])[0].text.isprintable()
    for forged in (
        [["rows"]],
        [["rows", 3]],
        ["rows"],
        [["x" * 999, "text"]],
        [["rows", "text"]] * (MOST_REMARKS + 1),
    ):
        with pytest.raises(Forged):
            checked_remarks(forged)


def test_what_a_process_and_its_children_print_is_caught_and_reaches_the_log(capfd):
    import subprocess

    with remarks.heard() as said:
        subprocess.run(["sh", "-c", "echo out; echo err >&2; echo 'ptxas info : x'"], check=True)
    assert said == ["out\nerr\nptxas info : x\n"]
    assert capfd.readouterr().err == "out\nerr\n"


def test_a_cuda_build_has_the_compilers_warning_and_its_loops(builder):
    source = with_unused(CUDA)
    built = builder.build(request(source, loops=True))
    assert isinstance(built, Built), built
    assert any("unused_here" in r.text and r.text.startswith("line ") for r in built.remarks)
    assert built.loops
    assert all(x.clocks["issue"] == x.instructions for x in built.loops)
    assert builder.build(request(source)).loops == ()


def with_unused(source):
    """The kernel with a variable that nothing uses."""
    at = source.index("__global__")
    brace = source.index("{", at)
    return source[: brace + 1] + "\n  int unused_here = 3;\n" + source[brace + 1 :]


@pytest.mark.nightly
def test_a_triton_build_has_its_loops_and_the_words_of_ptxas(builder):
    built = builder.build(request(LOOP, loops=True))
    assert isinstance(built, Built), built
    assert any(x.counts.get("MUFU") for x in built.loops)
    assert any("spill stores" in r.text for r in built.remarks)
    assert "ptxas" not in built.log


LOOP = """
import torch, triton
import triton.language as tl


@triton.jit
def _rows(x, y, n, BLOCK: tl.constexpr):
    row = tl.program_id(0) * n
    at = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, n, BLOCK):
        total += tl.exp(tl.load(x + row + start + at, mask=start + at < n).to(tl.float32))
    for start in range(0, n, BLOCK):
        tl.store(y + row + start + at, total, mask=start + at < n)


def softmax(x):
    y = torch.empty_like(x)
    _rows[(x.shape[0],)](x, y, x.shape[1], BLOCK=8192, num_warps=1)
    return y
"""


def test_without_nvdisasm_a_build_says_so_and_has_its_verdict(builder, monkeypatch):
    def none(name):
        raise ToolchainError(f"{name} is not to be found: install a triton wheel")

    monkeypatch.setattr(disassemble, "_tool", none)
    built = builder.build(request(TRITON, loops=True))
    assert isinstance(built, Built), built
    assert built.loops == ()
    (remark,) = [r for r in built.remarks if "loops were not read" in r.text]
    assert "install a triton wheel" in remark.text


def test_a_pass_that_fails_is_run_once_more_for_the_line_of_the_file():
    asked = []

    def fails():
        asked.append(knobs.compilation.disable_line_info)
        place = "<unknown>:0:0" if asked[-1] else "/tmp/candidate.py:7:12"
        os.write(2, f"{place}: error: no wgmma layout for operand B\n".encode())
        raise RuntimeError("PassManager::run failed")

    before = knobs.compilation.disable_line_info
    knobs.compilation.disable_line_info = True
    try:
        with pytest.raises(RuntimeError) as caught:
            trace_triton._compiled(fails)
        assert knobs.compilation.disable_line_info
    finally:
        knobs.compilation.disable_line_info = before
    assert asked == [True, False]
    said = "line 7: error: no wgmma layout for operand B\nPassManager::run failed"
    assert str(caught.value) == said
