"""Ceilings of a GPU: its rates on the plainest work, timed like candidates."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch

from kagent_sandbox.device.cuda.baselines import ready
from kagent_sandbox.device.cuda.timing import Clock

VERSION = 2
"""Version of what is measured: part of the cache's key."""
_BYTES = 1 << 29  # of one tensor; large enough that the start and the end do not count
_PRODUCT = 8192  # rows and columns; 2·8192³ = 1.1 TFLOP
_SAMPLES = 20
_LEAST_FP8, _LEAST_INT8 = (8, 9), (8, 0)  # compute capabilities


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
    rates: dict[str, float] = {}
    for name in ("bfloat16", "float16", "float32", "tfloat32"):
        dtype = torch.float32 if name == "tfloat32" else getattr(torch, name)
        torch.backends.cuda.matmul.allow_tf32 = name == "tfloat32"
        a, b = _operands(clock, lambda t, d=dtype: t.to(d))  # type: ignore[misc]
        out = _result(clock, dtype)
        rates[name] = _rate(clock, lambda a=a, b=b, out=out: torch.mm(a, b, out=out))  # type: ignore[misc]
    torch.backends.cuda.matmul.allow_tf32 = False
    # torch has no public names for products of 8 bits. A library that refuses them has no rate.
    capability = torch.cuda.get_device_capability(clock.device)
    if capability >= _LEAST_FP8:
        with contextlib.suppress(RuntimeError):
            rates["float8_e4m3fn"] = _fp8_rate(clock)
    if capability >= _LEAST_INT8:
        with contextlib.suppress(RuntimeError):
            rates["int8"] = _int8_rate(clock)
    return rates


def _fp8_rate(clock: Clock) -> float:
    a, b = _operands(clock, lambda t: t.to(torch.float8_e4m3fn))
    out, scale = _result(clock, torch.bfloat16), torch.ones((), device=clock.device)

    def product() -> torch.Tensor:
        return torch._scaled_mm(  # noqa: SLF001
            a, b.t(), scale, scale, out_dtype=out.dtype, use_fast_accum=True, out=out
        )

    return _rate(clock, product)


def _int8_rate(clock: Clock) -> float:
    a, b = _operands(clock, lambda t: (t * 30).to(torch.int8))
    out = _result(clock, torch.int32)
    return _rate(clock, lambda: torch._int_mm(a, b.t(), out=out))  # noqa: SLF001


def _operands(
    clock: Clock, convert: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    with torch.cuda.stream(clock.stream):
        a, b = (convert(torch.randn(_PRODUCT, _PRODUCT, device=clock.device)) for _ in range(2))
    return a, b


def _result(clock: Clock, dtype: torch.dtype) -> torch.Tensor:
    with torch.cuda.stream(clock.stream):
        return torch.empty(_PRODUCT, _PRODUCT, dtype=dtype, device=clock.device)


def _rate(clock: Clock, product: Callable[[], object]) -> float:
    """TFLOP/s of one product."""
    us = clock.median_us([ready(product, clock).work], _SAMPLES)
    return 2 * _PRODUCT**3 / us / 1e6
