"""Imported by the builder's fork-server: builds a small candidate, so that forks find all of it
warm.

A first Triton compile in a process takes 0.4 s, the next 0.06; NVRTC 0.2 s and 0.02; the first
trace 10 ms, the next 1. No driver is touched, and no thread is left behind.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton

from kagent_sandbox.builder.compile import cuda, libdevice
from kagent_sandbox.builder.configs import apply_config, enumerate_configs
from kagent_sandbox.builder.declared_results import wrong_results
from kagent_sandbox.builder.trace.dynamo import keep_dynamo_out
from kagent_sandbox.builder.trace.trace import load_candidate, trace_case
from kagent_sandbox.data.build import BuildCase, TensorSpec
from kagent_sandbox.data.language import LANGUAGES
from kagent_sandbox.data.plan_json import dump_plan
from kagent_sandbox.data.target import parse_target
from kagent_sandbox.errors import ToolchainError

_SAMPLE = """
import torch
import triton
import triton.language as tl

WARPS = 4
TUNE = {"WARPS": [4, 8]}


@triton.jit
def _rows(x_ptr, y_ptr, s_ptr, stride, n, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * stride + c, mask=c < n, other=-float("inf")).to(tl.float32)
    e = tl.exp2((x - tl.max(x, 0)) * 1.4426950408889634)
    y = e / tl.sum(e, 0)
    tl.store(y_ptr + row * stride + c, y.to(y_ptr.dtype.element_ty), mask=c < n)
    tl.store(s_ptr + row, tl.sum(e, 0))


def sample(x):
    rows, n = x.shape
    x = x.contiguous()
    y = torch.empty_like(x)
    z = torch.empty((rows, n), dtype=x.dtype, device=x.device)
    s = torch.zeros(rows, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(n)
    _rows[(rows,)](x, z, s, x.stride(0), n, BLOCK=block, num_warps=WARPS)
    _rows[lambda meta: (rows,)](z.view(rows, n), y, s, x.stride(0), n, BLOCK=block, num_warps=WARPS)
    return y
"""


def build_once() -> None:
    """Build the samples, into a folder that is removed again."""
    for compiler in {each.compiler for each in LANGUAGES.values()} - {""}:
        importlib.import_module(compiler)
    # Triton would read all of itself, 0.3 s, for the keys of a cache that each build has to itself.
    keys: Any = triton.runtime.cache
    keys.triton_key = lambda: triton.__version__
    before = {name: os.environ.get(name) for name in ("TRITON_CACHE_DIR", "TMPDIR")}
    cuda_version = torch.version.cuda
    with tempfile.TemporaryDirectory(prefix="kagent_warm_") as folder:
        os.environ.update(TRITON_CACHE_DIR=folder, TMPDIR=folder)
        tempfile.tempdir = None
        try:
            libdevice.install()
            _trace(Path(folder))
        finally:
            for name, value in before.items():
                os.environ.pop(name)
                if value is not None:
                    os.environ[name] = value
            tempfile.tempdir = None
            torch.version.cuda = cuda_version
            sys.modules.pop("candidate", None)
    with contextlib.suppress(ToolchainError):  # reported when a CUDA kernel asks for it
        cuda.compile_cuda("k", 'extern "C" __global__ void k(float* x) { x[0] = 1; }', "sm_90a")


def _trace(folder: Path) -> None:
    target = parse_target("sm_90a")
    module = load_candidate(_SAMPLE, folder, target)
    apply_config(module, enumerate_configs(module, 1)[0])
    x, y = (TensorSpec(name, (64, 100), (100, 1), "bfloat16") for name in "xy")
    case = BuildCase("sample", (x,), (y,))
    plan, _ = trace_case(module, "sample", case, target)
    wrong_results(plan, case, _SAMPLE, "sample")
    dump_plan(plan)


keep_dynamo_out()
build_once()
