"""A kernel against itself on a GPU: how far apart two equal plans are measured.

    python benchmarks/gpu_aa.py

Candidate and incumbent each rotate over two placements in one launcher, blocks of four samples in
ABBA order, as the judge does. Ten tries per size; a line gives the time, the bandwidth and the
smallest and largest ratio of medians.
"""

import hashlib
import importlib
import statistics
import time

from kagent_sandbox.launch.gpu_backend import GpuBackend
from kagent_sandbox.plan import (
    Alloc,
    Buffer,
    KernelInfo,
    Launch,
    Plan,
    Pointer,
    Scalar,
    TensorRef,
)

SIZES_MIB = (8, 16, 32, 64, 128, 256, 512)  # of the tensor that is copied
TRIES = 10
BLOCKS = 8  # ABBA: 8 blocks of 4 samples are 16 pairs
SOURCE = """
extern "C" __global__ void copy(const int4* x, int4* y, long long n) {
  long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = x[i];
}
"""


def copy_plan(code: bytes, target: str, nbytes: int) -> Plan:
    """One kernel that copies a tensor of `nbytes`."""
    key = hashlib.sha256(code).hexdigest()
    kernel = KernelInfo(key, "cuda", "copy", (8, 8, 8))
    args = (Pointer(0, 0), Pointer(1, 0), Scalar("i64", nbytes // 16))
    launch = Launch(key, (nbytes // 16 // 512, 1, 1), (512, 1, 1), args)
    buffers = (Buffer(0, "input", nbytes, "x"), Buffer(1, "scratch", nbytes))
    output = TensorRef(1, 0, (nbytes,), (1,), "uint8")
    return Plan(target, buffers, (Alloc(1), launch), (output,), (kernel,))


def main() -> None:
    with GpuBackend() as backend:
        core = importlib.import_module("cuda.core")
        options = core.ProgramOptions(std="c++17", arch=backend.facts.target)
        code = bytes(core.Program(SOURCE, "c++", options=options).compile("cubin").code)
        print(backend.facts.key)
        print("tensor MiB |     µs |  GB/s | wall µs | ratio of medians, ten tries | s per try")
        for size in SIZES_MIB:
            print(measure(backend, code, size << 20), flush=True)


def measure(backend: GpuBackend, code: bytes, nbytes: int) -> str:
    """One line of the table."""
    plan = copy_plan(code, backend.facts.target, nbytes)
    step = 2 * nbytes + 8192
    arena = backend.arena(4 * step)
    arena.bytes(0, arena.nbytes).zero_()
    launcher = backend.launcher(arena)
    try:
        launcher.load({plan.kernels[0].hash: code})
        sides = {"A": [], "B": []}
        for i, side in enumerate("ABAB"):
            start = i * step
            launcher.prepare(f"{side}{i}", plan, {0: start, 1: start + nbytes + 4096})
            sides[side].append(f"{side}{i}")
        ratios, medians = [], []
        start_s = time.perf_counter()
        for _ in range(TRIES):
            times = {"A": [], "B": []}
            for block in range(BLOCKS):
                for side in "ABBA" if block % 2 else "BAAB":
                    times[side] += launcher.samples(sides[side], 4, limit_s=60.0)
            a, b = (statistics.median(times[s]) for s in "AB")
            ratios.append(a / b)
            medians.append(a)
        took_s = (time.perf_counter() - start_s) / TRIES
        wall_us = launcher.wall_us(sides["A"], 100, limit_s=60.0)
    finally:
        launcher.close()
        arena.close()
    us = statistics.median(medians)
    return (
        f"{nbytes >> 20:10} | {us:6.2f} | {2 * nbytes / us / 1e3:5.0f} | {wall_us:7.2f} | "
        f"{min(ratios):.4f} to {max(ratios):.4f}            | {took_s:.3f}"
    )


if __name__ == "__main__":
    main()
