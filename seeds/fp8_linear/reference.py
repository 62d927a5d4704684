"""Linear layer of 8-bit floating-point numbers: inputs, float64 reference, torch's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
from kagent_sandbox.draws import break_rows, draw_kinds
from torch.nn import functional as F

if TYPE_CHECKING:
    from kagent_sandbox.data.case import Case

CHUNK_ELEMENTS = 1 << 26  # float64 copies of the weight stay near 512 MiB


def inputs(case: Case, generator: torch.Generator, device: torch.device) -> dict[str, torch.Tensor]:
    """Draw x: [M, K] and weight: [N, K] in float8_e4m3fn, and their scales, about 1/50.

    The scale of x is times the case's scale. Distributions: `normal` (of deviation 30, from -448 to
    448); `ranged` (`normal`, each row of x and all of the weight times a power of two from 2^-13 to
    1: where these are least, some multiples of 2^-9, the least subnormal number); `extreme` (also
    448, -448, 0 and the least subnormal number, often; some rows of both are 0; one of the scales
    is negative); `nonfinite` (`normal`, with NaN of either sign once in every eighth row of x and
    of the weight, at least in one: all of such a row and column of y is NaN).
    """
    m, n, k = (int(case.dims[d]) for d in "MNK")

    def drawn(*size: int) -> torch.Tensor:
        wide = torch.empty(size, dtype=torch.float32, device=device)
        wide.normal_(0.0, 30.0, generator=generator).clamp_(-448.0, 448.0)
        if case.inputs == "extreme":
            kind = torch.randint(12, size, generator=generator, device=device, dtype=torch.int8)
            for i, value in enumerate((448.0, -448.0, 0.0, 2.0**-9)):
                wide.masked_fill_(kind == i, value)
        return wide

    if case.inputs not in ("normal", "ranged", "extreme", "nonfinite"):
        raise ValueError(f"fp8_linear knows no distribution {case.inputs!r}")
    x, weight = drawn(m, k), drawn(n, k)
    if case.inputs == "ranged":
        x.mul_(torch.exp2(-draw_kinds(m, 14, generator, device).float()))
        weight.mul_(torch.exp2(-draw_kinds(1, 14, generator, device).float()))
    elif case.inputs == "extreme":
        for tensor in (x, weight):
            tensor.masked_fill_(draw_kinds(len(tensor), 8, generator, device) == 0, 0.0)
    elif case.inputs == "nonfinite":
        for tensor in (x, weight):
            break_rows(tensor, 8, generator)
    scales = torch.rand(2, generator=generator, device=device).add_(0.5).div_(50.0)
    if case.inputs == "extreme":
        scales[torch.randint(2, (1,), generator=generator, device=device)] *= -1
    narrow = [tensor.to(torch.float8_e4m3fn) for tensor in (x, weight)]
    if case.inputs == "nonfinite":
        for tensor in narrow:  # either sign: both are NaN
            bits = tensor.view(torch.uint8)
            coin = torch.randint(2, bits.shape, generator=generator, device=device)
            bits.bitwise_xor_(((bits & 127) == 127) * (coin << 7).to(torch.uint8))
    return {
        "x": narrow[0],
        "weight": narrow[1],
        "scale_x": scales[0] * case.scale,
        "scale_weight": scales[1].clone(),
    }


def reference(
    *, x: torch.Tensor, weight: torch.Tensor, scale_x: torch.Tensor, scale_weight: torch.Tensor
) -> torch.Tensor:
    """The product of x and the transposed weight, times both scales, in float64, [M, N]."""
    y = torch.empty((x.shape[0], weight.shape[0]), dtype=torch.float64, device=x.device)
    wide = x.double()
    rows = max(1, CHUNK_ELEMENTS // weight.shape[1])
    for start in range(0, weight.shape[0], rows):
        y[:, start : start + rows] = wide @ weight[start : start + rows].double().T
    return y * (scale_x.double() * scale_weight.double())


def eager(
    *, x: torch.Tensor, weight: torch.Tensor, scale_x: torch.Tensor, scale_weight: torch.Tensor
) -> torch.Tensor:
    """A product in bfloat16, which has 8-bit numbers exactly, times the scales: [M, N]."""
    y = F.linear(x.to(torch.bfloat16), weight.to(torch.bfloat16))
    return (y.float() * (scale_x * scale_weight)).to(torch.bfloat16)


def experts() -> Mapping[str, Callable[..., torch.Tensor]]:
    """Torch's own scaled product, by cuBLAS; it wants sizes that are multiples of 16."""

    def scaled_mm(
        *, x: torch.Tensor, weight: torch.Tensor, scale_x: torch.Tensor, scale_weight: torch.Tensor
    ) -> torch.Tensor:
        return torch._scaled_mm(  # noqa: SLF001
            x, weight.T, scale_a=scale_x, scale_b=scale_weight, out_dtype=torch.bfloat16
        )

    return {"scaled_mm": scaled_mm} if torch.cuda.is_available() else {}
