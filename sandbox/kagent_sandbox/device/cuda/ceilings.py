"""Ceilings of a GPU: its rates on the plainest work, timed like candidates."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kagent_sandbox.device.cuda.baselines import ready
from kagent_sandbox.device.cuda.timing import Clock
from kagent_sandbox.device.plan_ops import void

_BYTES = 1 << 29  # of one tensor; large enough that the start and the end do not count
_PRODUCT = 8192  # rows and columns; 2·8192³ = 1.1 TFLOP
_SAMPLES = 20


def measure(clock: Clock) -> dict[str, object]:
    """Fields of `Ceilings`: bandwidths in GB/s (10⁹ bytes), matrix products in TFLOP/s per dtype.

    Raises:
        GpuError, RuntimeError: The device fails.
    """
    device = clock.device
    with torch.cuda.stream(clock.stream):
        count = _BYTES // 8
        source = torch.randint(-(2**62), 2**62, (count,), dtype=torch.int64, device=device)
        target = torch.empty_like(source)
        sink = torch.empty((), dtype=torch.int64, device=device)
    clock.sync("making tensors")

    def best_us(*functions: Callable[[], object]) -> float:
        return min(clock.median_us([ready(f, clock).work], _SAMPLES) for f in functions)

    copy_us = best_us(lambda: target.copy_(source), lambda: torch.bitwise_not(source, out=target))
    read_us = best_us(
        lambda: torch.sum(source, dim=0, out=sink), lambda: source.view(torch.int32).amax()
    )
    write_us = best_us(lambda: target.fill_(7), lambda: target.zero_())
    return {
        "copy_gb_per_s": 2 * _BYTES / copy_us / 1e3,
        "read_gb_per_s": _BYTES / read_us / 1e3,
        "write_gb_per_s": _BYTES / write_us / 1e3,
        "tflop_per_s": _products(clock),
    }


def _products(clock: Clock) -> dict[str, float]:
    """Matrix products of random data, which draws more power than zeros; fp32 without TF32."""
    attained: dict[str, float] = {}
    for name in ("bfloat16", "float16", "float32", "tfloat32"):
        dtype = torch.float32 if name == "tfloat32" else getattr(torch, name)
        torch.backends.cuda.matmul.allow_tf32 = name == "tfloat32"
        with torch.cuda.stream(clock.stream):
            a, b = (
                torch.randn(_PRODUCT, _PRODUCT, device=clock.device, dtype=dtype) for _ in range(2)
            )
            c = torch.empty_like(a)
            void(torch.mm(a, b, out=c))
        clock.sync(f"multiplying {name}")
        work = ready(lambda a=a, b=b, c=c: torch.mm(a, b, out=c), clock).work  # type: ignore[misc]
        attained[name] = 2 * _PRODUCT**3 / clock.median_us([work], _SAMPLES) / 1e6
    torch.backends.cuda.matmul.allow_tf32 = False
    return attained
