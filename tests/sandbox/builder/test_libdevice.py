"""The excerpt of libdevice gives the machine code that the whole gives, and never falls short."""

import importlib.util
import tempfile

import pytest
import triton
from kagent_sandbox.builder.compile import libdevice
from triton._C import libtriton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

KERNELS = """
import triton
import triton.language as tl
from triton.language.extra import libdevice


@triton.jit
def few(x, y, n, B: tl.constexpr):
    c = tl.program_id(0) * B + tl.arange(0, B)
    v = tl.load(x + c, mask=c < n)
    tl.store(y + c, tl.exp2(v) * libdevice.tanh(v) + libdevice.erf(v), mask=c < n)


@triton.jit
def others(x, y, n, B: tl.constexpr):
    c = tl.program_id(0) * B + tl.arange(0, B)
    v = tl.load(x + c, mask=c < n)
    tl.store(y + c, libdevice.sinh(v) + tl.exp2(v), mask=c < n)
"""


@pytest.fixture
def kernels(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("TRITON_ALWAYS_COMPILE", "1")
    monkeypatch.setattr(
        tempfile, "tempdir", str(tmp_path)
    )  # of the excerpt: another LLVM's differs
    path = tmp_path / "kernels.py"
    path.write_text(KERNELS)
    spec = importlib.util.spec_from_file_location("kernels_of_this_test", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def machine_code(kernel):
    signature = {"x": "*fp32", "y": "*fp32", "n": "i32", "B": "constexpr"}
    source = ASTSource(kernel, signature, {(3,): 256})
    return triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["cubin"]


@pytest.mark.parametrize(("name", "short"), [("few", True), ("others", False)])
def test_the_machine_code_is_the_same(kernels, monkeypatch, name, short):
    linked = []
    link = libtriton.llvm.link_extern_libs

    def spy(module, paths):
        linked.append(paths[0])
        link(module, paths)

    monkeypatch.setattr(libtriton.llvm, "link_extern_libs", spy)
    whole = machine_code(getattr(kernels, name))
    libdevice.install()
    linked.clear()
    assert machine_code(getattr(kernels, name)) == whole
    assert [path.endswith("libdevice.ll") for path in linked] == [short]
