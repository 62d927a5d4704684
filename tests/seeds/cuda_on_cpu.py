"""A stand-in for `cuda_kernel` that runs CUDA kernels on CPU tensors; see cuda_on_cpu.h."""

import ctypes
import re
import subprocess
from pathlib import Path

import torch

HEADER = Path(__file__).with_name("cuda_on_cpu.h")
_FUNCTION = re.compile(r"(?:template <[^>]*>\s*)?__device__[^{;]*\{")
_SHARED = re.compile(r"(extern )?__shared__ (?:__align__\(\d+\) )?((?:\w+ )*\w+) ([^;]*);")
_NOT_EMULATED = re.compile(r'asm volatile\("(?:fence|griddepcontrol|prefetch)\.[^"]*"[^;]*')
_TYPES = {
    "int": ctypes.c_int,
    "unsigned": ctypes.c_uint,
    "long long": ctypes.c_longlong,
    "float": ctypes.c_float,
}


class LaunchFailed(Exception):
    """Threads are stuck, or use what is not there: see cuda_on_cpu.h."""


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
extern "C" void given_tensors(int count_, const uintptr_t* ends_) {{
  emulated::tensors.clear();
  for (int i = 0; i < count_; ++i) emulated::tensors.push_back({{ends_[2 * i], ends_[2 * i + 1]}});
}}
extern "C" const char* launch(int x_, int y_, int threads_, int cluster_, int shared_, int late_,
                              int reversed_, {given}) {{
  return emulated::run(x_, y_, threads_, cluster_, shared_, late_, reversed_,
                       [&] {{ {name}({", ".join(n for _, n in typed)}); }});
}}
"""
        path = self.folder / f"kernel_{len(self.libraries)}.cpp"
        path.write_text(f'#include "{HEADER}"\n{text}')
        library = path.with_suffix(".so")
        macros = [f"-D{k}={v}" for k, v in defines.items()]
        # Else a template's static variables are those of all libraries in the process.
        options = ["-std=c++17", "-O1", "-w", "-shared", "-fPIC", "-fno-gnu-unique", *macros]
        subprocess.run(["g++", *options, str(path), "-o", str(library)], check=True)
        loaded = ctypes.CDLL(str(library))
        loaded.launch.restype = ctypes.c_char_p
        return loaded, types


class _Kernel:
    def __init__(self, machine, library, types):
        self.machine = machine
        self.library = library
        self.types = types

    def launch(self, grid, block, *args, shared=0, cluster=None, pdl=False):
        """Run to its end, whether or not the next launch may overlap it."""
        x, y = (*grid, 1)[:2] if isinstance(grid, tuple) else (grid, 1)
        threads = block[0] if isinstance(block, tuple) else block
        assert shared <= 227 << 10
        values = [
            kind(a.data_ptr() if isinstance(a, torch.Tensor) else a)
            for kind, a in zip(self.types, args, strict=True)
        ]
        late, reverse = self.machine.late_copies, self.machine.reversed_threads
        blocks = cluster[0] if cluster else 1
        ends = [end for a in args if isinstance(a, torch.Tensor) for end in _ends(a)]
        self.library.given_tensors(len(ends) // 2, (ctypes.c_size_t * len(ends))(*ends))
        failure = self.library.launch(x, y, threads, blocks, shared, late, reverse, *values)
        if failure:
            raise LaunchFailed(failure.decode())


def _ends(tensor):
    """Addresses of its first byte, and behind its last one."""
    last = sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    begin = tensor.data_ptr()
    return begin, begin + (last + 1) * tensor.element_size() if tensor.numel() else begin


def _for_the_cpu(source):
    """Without the toolkit's headers and the functions of inline PTX: the header has its own."""
    source = re.sub(r"#include <[^>]*>\n", "", source)
    source = _NOT_EMULATED.sub("", source)
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
    return _SHARED.sub(_in_own_block, text)


def _in_own_block(declaration):
    """Shared memory of which every block of a cluster has its own."""
    dynamic, kind, names = declaration.groups()
    if dynamic:
        name = names.removesuffix("[]")
        return f"{kind}* {name} = emulated::dynamic<{kind}>();"
    names_alone = re.findall(r"(\w+)[^,]*", names)
    record = f"shared_{names_alone[0]}"
    fields = "".join(f" auto& {n} = {record}_.{n};" for n in names_alone)
    return (
        f"struct {record} {{ {kind} {names}; }};"
        f" auto& {record}_ = emulated::variable<{record}>();{fields}"
    )
