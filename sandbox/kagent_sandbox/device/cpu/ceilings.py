"""Ceilings of the CPU: the rates of the plainest kernels, timed exactly like candidates."""

from __future__ import annotations

import hashlib
import math
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

from kagent_sandbox import cache
from kagent_sandbox.data.device import Ceilings, DeviceFacts
from kagent_sandbox.data.language import CPP
from kagent_sandbox.data.plan import (
    Alloc,
    Buffer,
    KernelInfo,
    Launch,
    Op,
    Plan,
    Pointer,
    Scalar,
    TensorRef,
    TorchOp,
)
from kagent_sandbox.device.cpu.arena import CpuArena
from kagent_sandbox.device.cpu.launcher import CpuLauncher
from kagent_sandbox.device.cpu.traits import TRAITS
from kagent_sandbox.device.interface import larger
from kagent_sandbox.device.traits import executions_for
from kagent_sandbox.errors import MachineError, ToolchainError

Open: TypeAlias = Callable[[int], tuple[CpuArena, CpuLauncher]]
_VERSION = 5  # of the way of measuring: part of the cache's key
_LEAST_ARRAY_BYTES, _MOST_ARRAY_BYTES = 16 << 20, 256 << 20
_MOST_PLACEMENTS = 6  # of the two arrays, and of a product; one sample runs all of them
_CACHES = 3  # so often arrays of one kind exceed the last-level cache, as far as placements go
_BYTES = 3 << 29  # of all placements, unless caches ask for more
_MOST_TURNS = 8  # of the placements in one sample, until it takes long enough
_SAMPLES = 3
_ROUNDS = 4  # the best counts: a ceiling that was measured on a busy host would be too low
_LONG_US = 1e5
"""A kernel that takes as long is timed in one placement, once a round: what caches keep of its
operands is nothing beside that. torch's product in bfloat16 takes 0.9 s where a processor has none.
"""
_PRODUCT = 768  # rows and columns
_LIMIT_S = 60.0
# Arrays that each kernel moves; bytes of a product's elements.
_STREAMS = {
    "copy_plain": 2,
    "copy_stream": 2,
    "read_plain": 1,
    "write_plain": 1,
    "write_stream": 1,
}
_PRODUCTS = {"float32": 4, "bfloat16": 2}

# Plain stores first read the line that they overwrite, streaming stores do not: the better one
# counts.
_SOURCE = r"""
#include <cstdint>
#if defined(__AVX512F__)
#include <immintrin.h>
#define STREAM(p, v) _mm512_stream_ps(p, v)
#define LOAD(p) _mm512_load_ps(p)
#define ONE _mm512_set1_ps(1.0f)
constexpr int64_t W = 16;
#elif defined(__AVX__)
#include <immintrin.h>
#define STREAM(p, v) _mm256_stream_ps(p, v)
#define LOAD(p) _mm256_load_ps(p)
#define ONE _mm256_set1_ps(1.0f)
constexpr int64_t W = 8;
#else
#define STREAM(p, v) (*(p) = (v))
#define LOAD(p) (*(p))
#define ONE 1.0f
constexpr int64_t W = 1;
#endif
extern "C" void copy_plain(const float* x, float* y, int64_t n) {
#pragma omp parallel for simd schedule(static)
  for (int64_t i = 0; i < n; i++) y[i] = x[i];
}
extern "C" void copy_stream(const float* x, float* y, int64_t n) {
#pragma omp parallel for schedule(static)
  for (int64_t i = 0; i < n; i += W) STREAM(y + i, LOAD(x + i));
}
extern "C" void write_plain(const float*, float* y, int64_t n) {
#pragma omp parallel for simd schedule(static)
  for (int64_t i = 0; i < n; i++) y[i] = 1.0f;
}
extern "C" void write_stream(const float*, float* y, int64_t n) {
#pragma omp parallel for schedule(static)
  for (int64_t i = 0; i < n; i += W) STREAM(y + i, ONE);
}
extern "C" void read_plain(const float* x, float* y, int64_t n) {
  float s = 0;
#pragma omp parallel for simd schedule(static) reduction(+ : s)
  for (int64_t i = 0; i < n; i++) s += x[i];
  y[0] = s;
}
"""


def cached_ceilings(facts: DeviceFacts, open_launcher: Open, *, again: bool = False) -> Ceilings:
    """Ceilings from the cache, else measured (a few seconds) and stored; with `again`, measured
    anyway, and the larger of each figure kept.

    Raises:
        ToolchainError: There is no g++.
        MachineError: Times make no sense: the host is busy.
    """
    name = cache.named("ceilings-cpu", _VERSION, *facts.unique)
    cached = cache.load(name, Ceilings)
    if cached is not None and not again:
        return cached
    measured = measure(facts, open_launcher)
    if cached is not None:
        measured = larger(measured, cached)
    cache.save(name, measured)
    return measured


def measure(facts: DeviceFacts, open_launcher: Open) -> Ceilings:
    """Measure now. Arrays together exceed the last-level cache several times."""
    array = min(max(_LEAST_ARRAY_BYTES, facts.l2_bytes), _MOST_ARRAY_BYTES)
    placements = max(math.ceil(_CACHES * facts.l2_bytes / array), _BYTES // (2 * array))
    placements = min(_MOST_PLACEMENTS, placements)
    binary = _compile()
    arena, launcher = open_launcher(placements * 2 * array)
    try:
        launcher.load({_HASH: binary})

        for name in _STREAMS:
            plan = _stream_plan(name, array)
            for i in range(placements):
                first = 2 * i * array
                launcher.prepare(f"{name}{i}", plan, {0: first, 1: first + array})
        for dtype, itemsize in _PRODUCTS.items():
            step = _PRODUCT * _PRODUCT * itemsize
            for i in range(placements):
                at = {b: (3 * i + b) * step for b in range(3)}
                launcher.prepare(f"{dtype}{i}", _product_plan(dtype, step), at)
        launcher.stop()
        arena.bytes(0, arena.nbytes).zero_()
        us = _best_us(launcher, [*_STREAMS, *_PRODUCTS], placements)
        rates = {name: moved * array / us[name] / 1e3 for name, moved in _STREAMS.items()}
        return Ceilings(
            copy_gb_per_s=max(rates["copy_plain"], rates["copy_stream"]),
            read_gb_per_s=rates["read_plain"],
            write_gb_per_s=max(rates["write_plain"], rates["write_stream"]),
            tflop_per_s={d: 2 * _PRODUCT**3 / us[d] / 1e6 for d in _PRODUCTS},
        )
    finally:
        launcher.close()
        arena.close()


_HASH = hashlib.sha256(_SOURCE.encode()).hexdigest()


def _best_us(launcher: CpuLauncher, names: Sequence[str], placements: int) -> dict[str, float]:
    """The best of a few medians of each kernel, which lie far apart in time.

    Raises:
        MachineError: None of them makes sense.
    """
    best = dict.fromkeys(names, math.inf)
    for _ in range(_ROUNDS):
        for name in names:
            keys = [f"{name}{i}" for i in range(placements)]
            once_us = launcher.sample(keys[:1], limit_s=_LIMIT_S)
            if once_us >= _LONG_US:
                best[name] = min(best[name], once_us)
                continue
            first_us = launcher.sample(keys, limit_s=_LIMIT_S)  # warm up
            span_us = TRAITS.placements.span_us
            keys *= executions_for(span_us, first_us * placements, 1, _MOST_TURNS)
            us = statistics.median(launcher.sample(keys, limit_s=_LIMIT_S) for _ in range(_SAMPLES))
            if us > 0:
                best[name] = min(best[name], us)
    if math.inf in best.values():
        raise MachineError("the host is too busy to measure: repeat when it is idle")
    return best


def _stream_plan(name: str, nbytes: int) -> Plan:
    kernel = KernelInfo(_HASH, CPP.name, name, (8, 8, 8))
    args = (Pointer(0, 0), Pointer(1, 0), Scalar("i64", nbytes // 4))
    launch = Launch(_HASH, (1, 1, 1), (1, 1, 1), args)
    buffers = (Buffer(0, "scratch", nbytes), Buffer(1, "scratch", nbytes))
    return Plan("cpu", buffers, (Alloc(0), Alloc(1), launch), (), (kernel,))


def _product_plan(dtype: str, nbytes: int) -> Plan:
    a, b, c = (TensorRef(i, 0, (_PRODUCT, _PRODUCT), (_PRODUCT, 1), dtype) for i in range(3))
    buffers = tuple(Buffer(i, "scratch", nbytes) for i in range(3))
    ops: tuple[Op, ...] = (
        *(Alloc(i) for i in range(3)),
        TorchOp("aten::mm.out", (a, b), {}, (c,)),
    )
    return Plan("cpu", buffers, ops, (c,), ())


def _compile() -> bytes:
    with tempfile.TemporaryDirectory(prefix="kagent-") as folder:
        source, output = Path(folder, "ceilings.cpp"), Path(folder, "ceilings.so")
        source.write_text(_SOURCE)
        options = ["-O3", "-march=native", "-ffast-math", "-fopenmp", "-shared", "-fPIC"]
        try:
            run = subprocess.run(
                ["g++", *options, str(source), "-o", str(output)],
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as e:
            raise ToolchainError(f"g++ is needed for CPU kernels: {e}") from None
        if run.returncode:
            raise ToolchainError(f"g++ cannot compile a plain OpenMP kernel:\n{run.stderr[:2000]}")
        return output.read_bytes()
