"""Link kernels with an excerpt of libdevice: NVIDIA's library of mathematics in LLVM bitcode.

Triton reads all of it (470 KB) for each kernel that calls one function (exp2, log, rsqrt or erf,
but not exp). That is 20 to 27 ms of CPU of a compile of 100 to 150 (Triton 3.7.1, two cores of an
AMD EPYC, 2026-11-24, 20 compiles each). Almost all kernels need only a few functions. These are
taken out once, with all that they call and as they are, so that the machine code stays the same. A
kernel that needs others is linked with the whole library.
"""

from __future__ import annotations

import functools
import os
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from triton._C import libtriton
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend

_UNARY = (
    "exp2f expf fast_expf logf log2f log1pf fast_logf fast_log2f tanhf erff rsqrtf sqrtf fabsf "
    "floorf ceilf rintf truncf fast_sinf fast_cosf"
)
_BINARY = "fmaxf fminf fast_fdividef"
_native: Any = libtriton  # its modules are made at run time: no type checker knows them
_ir, _llvm = _native.ir, _native.llvm
_TARGET = GPUTarget("cuda", 90, 32)  # libdevice is the same for all


def install() -> None:
    """Have Triton link with the excerpt where that is enough. To be called once."""
    link = _llvm.link_extern_libs
    options: Any = make_backend(_TARGET).parse_options({})
    library = dict(options.extern_libs)["libdevice"]
    names, text = _excerpt(library, link)

    @functools.wraps(link)
    def link_least(module: Any, paths: Sequence[str]) -> None:
        needed = {f.name for f in module.get_functions() if f.name.startswith("__nv_")}
        enough = list(paths) == [library] and needed <= names
        link(module, [_written(text)] if enough else paths)

    _llvm.link_extern_libs = link_least


def _excerpt(library: str, link: Any) -> tuple[frozenset[str], str]:
    """Names of the functions that were taken out, and the LLVM module that holds them."""
    arities = dict.fromkeys(_UNARY.split(), 1) | dict.fromkeys(_BINARY.split(), 2)
    declared = "\n".join(
        f"llvm.func @__nv_{name}({', '.join(['f32'] * arity)}) -> f32"
        for name, arity in arities.items()
    )
    context = _ir.context()
    _ir.load_dialects(context)
    backend: Any = make_backend(_TARGET)
    backend.load_dialects(context)
    with tempfile.NamedTemporaryFile("w", suffix=".mlir") as file:
        file.write(f"module {{\n{declared}\n}}\n")
        file.flush()
        declarations = _ir.parse_mlir_module(file.name, context)
    _llvm.init_targets()
    llvm_context = _llvm.context()
    module = _llvm.to_module(declarations, llvm_context)
    _llvm.attach_datalayout(module, "nvptx64-nvidia-cuda", "sm_90a", "")
    link(module, [library])
    # linking makes them internal, where the next linker would not find them
    text = re.sub(r"^define internal (.*@__nv_)", r"define \1", str(module), flags=re.MULTILINE)
    defined = re.findall(r"^define (?!internal).*@(__nv_\w+)\(", text, flags=re.MULTILINE)
    return frozenset(defined), text


def _written(text: str) -> str:
    """The excerpt as a file in the private folder: nobody else may write what is linked."""
    path = Path(tempfile.gettempdir()) / "libdevice.ll"
    if not path.exists():
        partial = path.with_suffix(f".{os.getpid()}")
        partial.write_text(text)
        partial.replace(path)
    return str(path)
