"""A stand-in for `cuda_kernel` that runs CUDA kernels on CPU tensors; see cuda_on_cpu.h."""

import ctypes
import re
import subprocess
from pathlib import Path

import torch

HEADER = Path(__file__).with_name("cuda_on_cpu.h")
_FUNCTION = re.compile(r"(?:template <[^>]*>\s*)?__device__[^{;]*\{")
_TYPES = {
    "int": ctypes.c_int,
    "unsigned": ctypes.c_uint,
    "long long": ctypes.c_longlong,
    "float": ctypes.c_float,
}


class CudaOnCpu:
    """Makes kernels; compiled once per source and defines, in `folder`.

    `late_copies` and `reversed_threads` may be set between launches.
    """

    def __init__(self, folder):
        self.folder = folder
        self.late_copies = False
        self.reversed_threads = False
        self.libraries = {}

    def cuda_kernel(self, name, source, *, defines=None):
        key = (name, source, tuple((defines or {}).items()))
        if key not in self.libraries:
            self.libraries[key] = self._compile(name, source, defines or {})
        return _Kernel(self, *self.libraries[key])

    def _compile(self, name, source, defines):
        text = _for_the_cpu(source)
        function = name.partition("<")[0]  # of a template's instance, too
        parameters = re.search(rf"\b{function}\(([^)]*)\)\s*\{{", text).group(1).split(",")
        typed = [re.match(r"\s*(.*?)\s*(\w+)\s*$", p, re.DOTALL).groups() for p in parameters]
        types = [ctypes.c_void_p if t.endswith("*") else _TYPES[t] for t, _ in typed]
        given = ", ".join(f"{'Address' if t.endswith('*') else t} {n}" for t, n in typed)
        text += f"""
extern "C" void launch(int x_, int y_, int threads_, int cluster_, int late_, int reversed_,
                       {given}) {{
  emulated::run(x_, y_, threads_, cluster_, late_, reversed_,
                [&] {{ {name}({", ".join(n for _, n in typed)}); }});
}}
"""
        path = self.folder / f"kernel_{len(self.libraries)}.cpp"
        path.write_text(f'#include "{HEADER}"\n{text}')
        library = path.with_suffix(".so")
        macros = [f"-D{k}={v}" for k, v in defines.items()]
        command = ["g++", "-std=c++17", "-O1", "-w", "-shared", "-fPIC", *macros]
        subprocess.run([*command, str(path), "-o", str(library)], check=True)
        return ctypes.CDLL(str(library))["launch"], types


class _Kernel:
    def __init__(self, machine, function, types):
        self.machine = machine
        self.function = function
        self.types = types

    def launch(self, grid, block, *args, shared=0, cluster=None):
        x, y = (*grid, 1)[:2] if isinstance(grid, tuple) else (grid, 1)
        threads = block[0] if isinstance(block, tuple) else block
        assert shared <= 227 << 10
        values = [
            kind(a.data_ptr() if isinstance(a, torch.Tensor) else a)
            for kind, a in zip(self.types, args, strict=True)
        ]
        order = (self.machine.late_copies, self.machine.reversed_threads)
        self.function(x, y, threads, cluster[0] if cluster else 1, *map(int, order), *values)


def _for_the_cpu(source):
    """Without the toolkit's headers and the functions of inline PTX: the header has its own."""
    source = re.sub(r"#include <[^>]*>\n", "", source)
    kept, at = [], 0
    while found := _FUNCTION.search(source, at):
        end, depth = found.end(), 1
        while depth:
            depth += {"{": 1, "}": -1}.get(source[end], 0)
            end += 1
        if "asm" in source[found.start() : end] or "__cvta" in source[found.start() : end]:
            kept.append(source[at : found.start()])
        else:
            kept.append(source[at:end])
        at = end
    text = "".join(kept) + source[at:]
    # A block's static shared memory outlives its threads, and blocks run one after another.
    return text.replace("extern __shared__", "extern").replace("__shared__", "static")
