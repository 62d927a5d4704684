"""Fills, copies, constants and torch operations on views of an arena."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kagent_sandbox.data.plan import (
    COPIED_DTYPES,
    ITEMSIZE,
    Const,
    Copy,
    Fill,
    PlanError,
    TensorRef,
    TorchOp,
)
from kagent_sandbox.device.plan_ops import bind_op, dtype_of, strided_view


def contiguous(buffer, shape, dtype, offset=0):
    strides, step = [], 1
    for n in reversed(shape):
        strides.insert(0, step)
        step *= n
    return TensorRef(buffer, offset, tuple(shape), tuple(strides), dtype)


class Memory:
    def __init__(self, nbytes=4096):
        self.bytes = torch.full((nbytes,), 0xAB, dtype=torch.uint8)

    def __call__(self, tensor):
        return strided_view(self.bytes, tensor, 1024 * tensor.buffer)


@pytest.mark.parametrize("dtype", sorted(set(ITEMSIZE) - set(COPIED_DTYPES)))
@pytest.mark.parametrize("value", [0, 1, 3.0, -0.0])
def test_fill_sets_every_element_and_nothing_else(dtype, value):
    memory = Memory()
    tensor = contiguous(1, (2, 3), dtype, offset=1)
    bind_op(Fill(tensor, value), memory)()
    expected = torch.tensor(float(value)).to(dtype_of(dtype))
    got = memory(tensor).contiguous().flatten().view(torch.uint8)
    assert got.equal(expected.view(1).repeat(6).view(torch.uint8))
    low, high = (1024 + b for b in tensor.extent_bytes)
    assert (memory.bytes[:low] == 0xAB).all()
    assert (memory.bytes[high:] == 0xAB).all()


@pytest.mark.parametrize("dtype", COPIED_DTYPES)
def test_dtypes_that_are_only_copied_are_filled_with_zero(dtype):
    memory = Memory()
    tensor = contiguous(1, (2, 3), dtype)
    bind_op(Fill(tensor, 0), memory)()
    assert not memory(tensor).view(torch.uint8).any()


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_fill_takes_infinities_and_nan(value):
    memory = Memory()
    tensor = contiguous(0, (5,), "bfloat16")
    bind_op(Fill(tensor, value), memory)()
    assert memory(tensor).float().equal(torch.full((5,), value)) or math.isnan(value)
    assert memory(tensor).isnan().all() == math.isnan(value)


def test_fill_of_the_largest_unsigned_number():
    memory = Memory()
    tensor = contiguous(0, (2,), "uint64")
    bind_op(Fill(tensor, 2**64 - 1), memory)()
    assert memory.bytes[:16].eq(255).all()


def test_fill_of_a_strided_view_leaves_gaps():
    memory = Memory()
    bind_op(Fill(TensorRef(0, 1, (3,), (2,), "uint8"), 7), memory)()
    assert memory.bytes[:7].tolist() == [0xAB, 7, 0xAB, 7, 0xAB, 7, 0xAB]


def test_copy_converts_and_broadcasts():
    memory = Memory()
    source, target = contiguous(0, (3,), "float32"), contiguous(1, (2, 3), "float16")
    memory(source).copy_(torch.tensor([1.0, 2.0, 3.0]))
    bind_op(Copy(source, target), memory)()
    assert memory(target).tolist() == [[1, 2, 3], [1, 2, 3]]


@given(st.lists(st.integers(-(2**31), 2**31 - 1), max_size=8))
def test_const_writes_its_bytes(values):
    memory = Memory()
    tensor = contiguous(0, (len(values),), "int32")
    data = torch.tensor(values, dtype=torch.int32).view(torch.uint8).numpy().tobytes()
    bind_op(Const(tensor, data), memory)()
    assert memory(tensor).tolist() == values


def test_const_of_a_permuted_view_is_in_memory_order():
    memory = Memory()
    bind_op(Const(TensorRef(0, 0, (2, 2), (1, 2), "uint8"), b"\1\2\3\4"), memory)()
    assert memory.bytes[:4].tolist() == [1, 2, 3, 4]


def test_torch_operation_with_out():
    memory = Memory()
    a, b, c = (contiguous(i, (4, 4), "float32") for i in range(3))
    memory(a).copy_(torch.eye(4))
    memory(b).copy_(torch.arange(16.0).view(4, 4))
    bind_op(TorchOp("aten::mm.out", (a, b), {}, (c,)), memory)()
    assert memory(c).equal(memory(b))


def test_torch_operation_in_place():
    memory = Memory()
    a, b, c = (contiguous(i, (4, 4), "float32") for i in range(3))
    for t in (a, b, c):
        memory(t).copy_(torch.eye(4))
    op = TorchOp("aten::addmm_", (c, a, b), {"beta": 2.0, "alpha": 1.0}, (c,))
    bind_op(op, memory)()
    assert memory(c).equal(3 * torch.eye(4))


def test_torch_operation_with_dtype_and_two_results():
    memory = Memory()
    x, values, indices = (
        contiguous(0, (2, 3), "float32"),
        contiguous(1, (2,), "float32"),
        contiguous(2, (2,), "int64"),
    )
    memory(x).copy_(torch.tensor([[1.0, 5, 2], [9, 0, 3]]))
    bind_op(TorchOp("aten::max.dim_max", (x, 1, False), {}, (values, indices)), memory)()
    assert memory(values).tolist() == [5, 9]
    assert memory(indices).tolist() == [1, 0]
    op = TorchOp("aten::sum.IntList_out", (x, [1]), {"dtype": "dtype:float32"}, (values,))
    bind_op(op, memory)()
    assert memory(values).tolist() == [8, 12]


@pytest.mark.parametrize(
    ("name", "writes"),
    [
        ("aten::mm", 1),  # allocates its result
        ("aten::mm.out", 2),
        ("aten::mm.out", 0),
        ("aten::no_such_thing", 1),
        ("prims::add", 1),
        ("aten::mm.__class__", 1),
        ("os::system", 0),
    ],
)
def test_operation_that_does_not_write_what_the_plan_says(name, writes):
    memory = Memory()
    a = contiguous(0, (4, 4), "float32")
    with pytest.raises(PlanError):
        bind_op(TorchOp(name, (a, a), {}, (contiguous(1, (4, 4), "float32"),) * writes), memory)


def test_result_of_another_shape_is_an_error():
    memory = Memory()
    a = contiguous(0, (4, 4), "float32")
    op = bind_op(TorchOp("aten::mm.out", (a, a), {}, (contiguous(1, (0,), "float32"),)), memory)
    with pytest.raises(PlanError, match="shape"):
        op()


def test_view_outside_of_the_arena():
    with pytest.raises(PlanError):
        Memory(1024)(contiguous(1, (1,), "uint8"))


@pytest.mark.parametrize("stride", [[-1, 1], [(1 << 32) + 1, 1]])
def test_a_convolution_of_numbers_that_cudnn_cannot_tell(stride):
    """torch finds its plans by 32 bits of each: another one's would write more than there is."""
    x, weight = contiguous(0, (1, 3, 5, 4), "float32"), contiguous(1, (4, 3, 1, 1), "float32")
    rest = (stride, [0, 0], [1, 1], False, [0, 0], 1)
    out = contiguous(2, (1, 4, 1, 4), "float32")
    op = TorchOp("aten::convolution.out", (x, weight, None, *rest), {}, (out,))
    with pytest.raises(PlanError, match="31 bits"):
        bind_op(op, Memory())


@pytest.mark.parametrize("last", [False, True])
def test_a_convolution_with_out(last):
    memory = Memory()
    shape = (2, 3, 5, 4)
    strides = (60, 1, 12, 3) if last else (60, 20, 4, 1)
    x = TensorRef(0, 0, shape, strides, "float32")
    weight, out = (
        contiguous(1, (4, 3, 1, 1), "float32"),
        TensorRef(2, 0, (2, 4, 5, 4), (80, 1, 16, 4), "float32"),
    )
    memory(x).normal_()
    memory(weight).normal_()
    rest = ([1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    bind_op(TorchOp("aten::convolution.out", (x, weight, None, *rest), {}, (out,)), memory)()
    expected = torch.convolution(memory(x), memory(weight), None, *rest)
    torch.testing.assert_close(memory(out), expected)
