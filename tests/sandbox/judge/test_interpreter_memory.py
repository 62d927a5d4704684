"""What the interpreter remembers is what Triton makes."""

import pytest
import triton.language as tl
from kagent_sandbox.judge import interpreter_memory

SHAPES = ([4], [2, 8], [tl.constexpr(2), 8])
ELEMENTS = (tl.float32, tl.bfloat16, tl.pointer_type(tl.float32), tl.pointer_type(tl.float32, 3))


class Block(tl.core.block_type):
    __init__ = interpreter_memory._block_type(tl.core.block_type.__init__)


class Tensor(tl.core.tensor):
    __init__ = interpreter_memory._tensor(tl.core.tensor.__init__)


def shown(made):
    return {k: str(v) for k, v in vars(made).items()}


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("element", ELEMENTS)
def test_types_and_tensors_are_as_triton_makes_them(element, shape, again):
    for _ in range(1 + again):
        block, expected = Block(element, shape), tl.core.block_type(element, shape)
        assert shown(block) == shown(expected)
        assert block.element_ty is element
        for type_ in (block, element):
            handle = object()
            made = Tensor(handle, type_)
            assert shown(made) == shown(tl.core.tensor(handle, type_))
            assert made.handle is handle
            assert made.type is type_


@pytest.mark.parametrize(
    ("shape", "error"), [([3], ValueError), ([], TypeError), ([2.0], TypeError), ((2,), Exception)]
)
def test_what_triton_refuses_is_refused_each_time(shape, error):
    Block(tl.float32, [2])
    for _ in range(2):
        with pytest.raises(error):
            Block(tl.float32, shape)


def test_numpys_dtypes_are_as_the_interpreter_has_them():
    from triton.runtime.interpreter import _get_np_dtype

    known = interpreter_memory._numpy_dtype(_get_np_dtype)
    for element in (*ELEMENTS, tl.int1, tl.int8, tl.uint64, tl.float8e5, tl.float64):
        for dtype in (element, tl.core.block_type(element, [2])):
            assert known(dtype) == known(dtype) == _get_np_dtype(dtype)


def test_a_tuple_equals_itself_and_others_as_before():
    equal = interpreter_memory._same_or_equal(tl.core.tuple.__eq__, tl.constexpr(True))
    one, same, other = (tl.core.tuple(values) for values in ([1, 2], [1, 2], [1, 3]))
    assert equal(one, one)
    assert equal(one, same)
    assert not equal(one, other)
