"""Convolutions of a plan on a GPU: cuDNN writes the result where the plan has it."""

import pytest
import torch
from kagent_sandbox.data.plan import PlanError, TensorRef, TorchOp
from kagent_sandbox.device.plan_ops import _bind_convolution, bind_op, strided_view

pytestmark = pytest.mark.gpu
BUFFER = 1 << 20  # bytes of each of four


def strides(shape, *, last):
    """Of a dense tensor, with channels last or first."""
    order = [1, *range(len(shape) - 1, 1, -1), 0] if last else range(len(shape) - 1, -1, -1)
    found, size = [0] * len(shape), 1
    for d in order:
        found[d], size = size, size * shape[d]
    return tuple(found)


def ref(buffer, shape, *, last):
    return TensorRef(buffer, 0, shape, strides(shape, last=last), "float32")


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("axes", [2, 3])
@pytest.mark.parametrize("biased", [False, True])
def test_it_is_torchs_own(axes, last, biased):
    memory = torch.zeros(4 * BUFFER, dtype=torch.uint8, device="cuda")

    def view(tensor):
        return strided_view(memory, tensor, tensor.buffer * BUFFER)

    x, weight = ref(0, (2, 16, *[9] * axes), last=last), ref(1, (32, 16, *[3] * axes), last=last)
    bias, out = ref(2, (32,), last=False), ref(3, (2, 32, *[5] * axes), last=last)
    for tensor in (x, weight, bias):
        view(tensor).normal_()
    rest = ([2] * axes, [1] * axes, [1] * axes, False, [0] * axes, 1)
    given = [view(x), view(weight), view(bias) if biased else None]
    assert _bind_convolution([*given, *rest], view(out)) is not None
    op = TorchOp("aten::convolution.out", (x, weight, bias if biased else None, *rest), {}, (out,))
    bind_op(op, view)()
    expected = torch.convolution(*given, *rest)
    assert view(out).equal(expected)
    assert expected.stride() == out.strides


@pytest.mark.parametrize("dtype", ["float64", "float16", "bfloat16"])
@pytest.mark.parametrize("groups", [1, 16])
def test_other_dtypes_and_groups_are_torchs_too(dtype, groups):
    kind = getattr(torch, dtype)
    x = torch.randn(2, 16, 9, 9, device="cuda", dtype=kind).to(memory_format=torch.channels_last)
    weight = torch.randn(32, 16 // groups, 3, 3, device="cuda", dtype=kind)
    rest = ([2], [1], [1], False, [0], groups)
    expected = torch.convolution(x, weight, None, *rest)
    out = torch.empty_like(expected)
    direct = _bind_convolution([x, weight, None, *rest], out)
    if direct is not None:
        direct()
        torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("size", [4, 6])
def test_a_result_of_another_shape_is_an_error(size):
    x, weight = torch.randn(1, 16, 9, 9, device="cuda"), torch.randn(16, 16, 3, 3, device="cuda")
    rest = ([2, 2], [1, 1], [1, 1], False, [0, 0], 1)
    with pytest.raises(PlanError, match="shape"):
        _bind_convolution([x, weight, None, *rest], torch.empty(1, 16, size, size, device="cuda"))


def test_others_are_left_to_torch():
    x, weight = torch.randn(1, 16, 9, 9, device="cuda"), torch.randn(16, 16, 3, 3, device="cuda")
    out = torch.empty(1, 16, 9, 9, device="cuda")
    same = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    assert _bind_convolution([x, weight, None, *same], out) is not None
    assert _bind_convolution([x, weight, None, *same], out.half()) is None
    assert _bind_convolution([x, weight, None, *same], out.mT) is None
    assert _bind_convolution([x, weight, None, [1, 1]], out) is None
    transposed = ([1, 1], [1, 1], [1, 1], True, [0, 0], 1)
    assert _bind_convolution([x, weight, None, *transposed], out) is None
