"""Hand-made plans for the GPU launcher: kernels compiled by NVRTC, buffers laid out in order."""

import hashlib
from dataclasses import dataclass, field

import torch
from kagent_sandbox.data.plan import Alloc, Buffer, KernelInfo, Launch, Plan, TensorRef
from kagent_sandbox.data.plan_json import argument_bytes

ALIGN = 512


def arch():
    major, minor = torch.cuda.get_device_capability() if torch.cuda.is_available() else (9, 0)
    return f"sm_{major}{minor}{'a' if major >= 9 else ''}"


def cubin(source):
    """Machine code of CUDA C++ source, for the device that is here."""
    import importlib

    core = importlib.import_module("cuda.core")
    options = core.ProgramOptions(std="c++17", arch=arch())
    return bytes(core.Program(source, "c++", options=options).compile("cubin").code)


def flat(buffer, count, dtype="float32", offset=0):
    return TensorRef(buffer, offset, (count,), (1,), dtype)


def matrix(buffer, rows, columns, dtype):
    return TensorRef(buffer, 0, (rows, columns), (columns, 1), dtype)


@dataclass
class Sketch:
    """A plan in the making: inputs x0, x1, ...; scratch; launches with their binaries."""

    inputs: list = field(default_factory=list)
    scratch: list = field(default_factory=list)
    ops: list = field(default_factory=list)
    kernels: dict = field(default_factory=dict)
    binaries: dict = field(default_factory=dict)

    def input(self, nbytes):
        self.inputs.append(nbytes)
        return len(self.inputs) - 1

    def alloc(self, nbytes):
        """Scratch; call after all inputs."""
        self.scratch.append(nbytes)
        buffer = len(self.inputs) + len(self.scratch) - 1
        self.ops.append(Alloc(buffer))
        return buffer

    def launch(self, code, name, grid, block, *args, language="cuda", **attributes):
        key = hashlib.sha256(code + name.encode()).hexdigest()
        sizes = tuple(argument_bytes(a) for a in args)
        self.kernels[key] = KernelInfo(key, language, name, sizes)
        self.binaries[key] = code
        three = (*grid, 1, 1)[:3], (*block, 1, 1)[:3]
        self.ops.append(Launch(key, *three, tuple(args), **attributes))

    def plan(self, *outputs):
        buffers = [Buffer(i, "input", n, f"x{i}") for i, n in enumerate(self.inputs)]
        first = len(buffers)
        buffers += [Buffer(first + i, "scratch", n) for i, n in enumerate(self.scratch)]
        return Plan(arch(), tuple(buffers), tuple(self.ops), outputs, tuple(self.kernels.values()))

    def offsets(self, start=0):
        places = {}
        for i, nbytes in enumerate([*self.inputs, *self.scratch]):
            places[i] = start
            start += -(-nbytes // ALIGN) * ALIGN + ALIGN
        return places
