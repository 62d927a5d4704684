"""A kernel against itself on a GPU: how far apart two equal plans are measured.

    python benchmarks/gpu_aa.py

Candidate and incumbent each have two placements in one launcher and take turns in ABBA order, eight
pairs of blocks of eight samples, compared as in the judge's own A/A. Ten tries per size; a line has
the time, the bandwidth, the smallest and largest ratio, and by how much pairs of blocks differ.
"""

import hashlib
import importlib
import statistics
import time

from kagent_sandbox.data.plan import (
    Alloc,
    Buffer,
    KernelInfo,
    Launch,
    Plan,
    Pointer,
    Scalar,
    TensorRef,
)
from kagent_sandbox.device.cuda.backend import GpuBackend
from kagent_sandbox.device.cuda.traits import TRAITS
from kagent_sandbox.judge.timing import estimates
from kagent_sandbox.judge.timing.noise import judge_noise

SIZES_MIB = (8, 16, 32, 64, 128, 256, 512)  # of the tensor that is copied
TRIES = 10
PAIRS = 8
SAMPLES = 8  # per block
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
        print(
            "tensor MiB |     µs |  GB/s | wall µs | ratio, ten tries | "
            "standard deviation of a pair, % | s per try"
        )
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
        keys = {"a": [], "b": []}
        for i, side in enumerate("abab"):
            start = i * step
            launcher.prepare(f"{side}{i}", plan, {0: start, 1: start + nbytes + 4096})
            keys[side].append(f"{side}{i}")
        tries = []
        start_s = time.perf_counter()
        for _ in range(TRIES):
            blocks = {"a": [], "b": []}
            for i, side in enumerate(estimates.abba(PAIRS)):
                place = keys[side][i // 2 % len(keys[side])]
                blocks[side].append(launcher.samples([place], SAMPLES, limit_s=60.0))
            tries.append(judge_noise(blocks["a"], blocks["b"], TRAITS.noise))
        took_s = (time.perf_counter() - start_s) / TRIES
        wall_us = launcher.wall_us(keys["a"], 100, limit_s=60.0)
    finally:
        launcher.close()
        arena.close()
    us = statistics.median(t.kernel_us for t in tries)
    ratios, spreads = ([getattr(t, what) for t in tries] for what in ("ratio", "pair_sd"))
    return (
        f"{nbytes >> 20:10} | {us:6.2f} | {2 * nbytes / us / 1e3:5.0f} | {wall_us:7.2f} | "
        f"{min(ratios):.4f} to {max(ratios):.4f} | "
        f"{min(spreads):.2%} to {max(spreads):.2%}, median {statistics.median(spreads):.2%} | "
        f"{took_s:.3f}"
    )


if __name__ == "__main__":
    main()
