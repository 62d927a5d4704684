"""A convolution that a library computes, in the loops that Inductor writes around it."""

from __future__ import annotations

from typing import Any

import sympy
import torch
from torch._inductor import ir, lowering
from torch._inductor.virtualized import V

from kagent.authoring.inductor.convolution_numbers import ConvolutionNumbers

aten = torch.ops.aten
FORMATS = {4: "channels_last"}
"""Memory formats by the number of dimensions, in which a GPU's convolutions of one group are
computed: cuDNN multiplies with channels last, and else brings its operands and its result there and
back itself. torch.compile does so for four dimensions, too. With three dimensions of places it took
longer so (H100: 1.82 ms for 0.63 and 3.50 for 2.48, with the loops around it).
Inductor's code calls such a convolution by a name that ends in the format's.
"""


def install() -> None:
    """Have Inductor call the library without making constants of the weight's sizes, as its own way
    does. Never taken back.
    """
    lowering.register_lowering(aten.convolution.default, type_promotion_kind=None)(_lower)


def _lower(x: Any, weight: Any, bias: Any, *numbers: Any) -> Any:
    axes = len(weight.get_size())
    given = ConvolutionNumbers.of(axes - 2, *numbers)
    on_gpu = ir.get_device_type(x) == "cuda"
    depthwise = weight.get_size()[1] == 1
    wide = x.get_dtype() == torch.float64  # cuDNN has none for it
    one_group = given.groups == 1 or (depthwise and not given.transposed)
    last = on_gpu and not wide and axes in FORMATS and one_group
    order = [axes - 1, 0, *range(axes - 2, 0, -1)] if last else [*reversed(range(axes))]
    size = [
        s.node.expr if isinstance(s, torch.SymInt) else sympy.Integer(s)
        for s in V.graph.current_node.meta["val"].shape
    ]
    layout = ir.FixedLayout(
        x.get_device(), x.get_dtype(), size, ir.FlexibleLayout.stride_ordered(size, order)
    )
    require: Any = ir.ExternKernel.require_stride_order
    inputs = [require(ir.ExternKernel.realize_input(t), order) for t in (x, weight)]
    # torch adds the bias in a pass of its own on a GPU: there the next kernel does.
    inside = bias is not None and not on_gpu
    inputs += [ir.ExternKernel.realize_input(bias)] if inside else []
    found = ir.TensorBox.create(
        ir.ExternKernelAlloc(
            layout,
            inputs,
            (*(() if inside else (None,)), *given),
            python_kernel_name=f"aten.convolution.{FORMATS[axes] if last else 'default'}",
        )
    )
    if bias is None or inside:
        return found
    each: Any = lowering.view(bias, [bias.get_size()[0], *[1] * (axes - 2)])
    return lowering.add(found, each)
