"""Plans survive a round trip, and nothing that does not add up is accepted."""

import dataclasses
import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kagent_sandbox.data import plan as p
from kagent_sandbox.data.plan_json import (
    argument_bytes,
    dump_plan,
    parse_plan,
    placed_arguments,
    plan_identity,
)
from sampling import examples

KERNEL = p.KernelInfo("a" * 64, "cuda", "k", (8, 8, 4, 8), 32, 0, 1024, {16: 4, 4: 1})


def example(**changes):
    x = p.TensorRef(0, 0, (4, 8), (8, 1), "float32")
    y = p.TensorRef(1, 0, (4, 8), (8, 1), "float32")
    ops = (
        p.Alloc(1),
        p.Fill(y, -math.inf),
        p.Copy(x, y),
        p.TorchOp("aten::mm.out", (x, (1, None, 2.5)), {"alpha": 1}, (y,)),
        p.Launch(
            "a" * 64,
            (4, 1, 1),
            (128, 1, 1),
            (p.Pointer(0, 0), p.Pointer(1, 0), p.Scalar("i32", 8), p.Null()),
            shared=100_000,
            cluster=(2, 1, 1),
            cooperative=True,
            pdl=True,
        ),
        p.Alloc(2),
        p.Const(p.TensorRef(2, 0, (4,), (1,), "uint8"), b"\x00\x01\x02\x03"),
        p.Free(2),
    )
    buffers = (
        p.Buffer(0, "input", 128, "x"),
        p.Buffer(1, "scratch", 128),
        p.Buffer(2, "scratch", 4),
    )
    fields = {
        "target": "sm_90a",
        "buffers": buffers,
        "ops": ops,
        "outputs": (y,),
        "kernels": (KERNEL,),
    }
    return p.Plan(**(fields | changes))


def with_op(op, at=-1):
    ops = list(example().ops)
    ops.insert(at if at >= 0 else len(ops), op)
    return example(ops=tuple(ops))


def test_round_trip_keeps_everything():
    plan = example()
    assert parse_plan(dump_plan(plan)) == plan
    assert plan_identity(parse_plan(dump_plan(plan))) == plan_identity(plan)


def test_every_launch_attribute_is_part_of_the_identity():
    plan = example()
    launch = plan.launches[0]
    other = {
        "grid": (5, 1, 1),
        "block": (64, 1, 1),
        "shared": 0,
        "cluster": None,
        "cooperative": False,
        "pdl": False,
        "args": (*launch.args[:2], p.Scalar("i32", 9), p.Null()),
    }
    for name, value in other.items():
        changed = dataclasses.replace(launch, **{name: value})
        ops = tuple(changed if op is launch else op for op in plan.ops)
        assert plan_identity(example(ops=ops)) != plan_identity(plan), name


def test_peak_counts_what_is_live_at_once():
    assert example().peak_bytes == 132


TENSOR = p.TensorRef(1, 0, (4, 8), (8, 1), "float32")


@pytest.mark.parametrize(
    ("plan", "says"),
    [
        (with_op(p.Fill(dataclasses.replace(TENSOR, offset=1), 0.0)), "of buffer 1"),
        (with_op(p.Fill(dataclasses.replace(TENSOR, strides=(9, 1)), 0.0)), "of buffer 1"),
        (with_op(p.Fill(TENSOR, 0.0), at=0), "not allocated"),
        (with_op(p.Fill(p.TensorRef(1, 0, (4,), (1,), "float4_e2m1fn_x2"), -0.0)), "with 0 alone"),
        (with_op(p.Alloc(1)), "allocated twice"),
        (with_op(p.Alloc(9)), "unknown"),
        (with_op(p.Free(0)), "cannot be freed"),
        (with_op(p.Launch("b" * 64, (1, 1, 1), (1, 1, 1), ())), "does not declare"),
        (with_op(p.Launch("a" * 64, (1, 1, 1), (1, 1, 1), (p.Null(),))), "takes parameters"),
        (with_op(p.Launch("a" * 64, (0, 1, 1), (1, 1, 1), ())), "integer from 1"),
        (with_op(p.Const(p.TensorRef(1, 0, (4,), (1,), "uint8"), b"\0")), "exactly"),
        (
            with_op(
                p.Launch(
                    "a" * 64,
                    (1, 1, 1),
                    (1, 1, 1),
                    (p.Pointer(1, 129), p.Null(), p.Scalar("i32", 1), p.Null()),
                )
            ),
            "of buffer 1",
        ),
        (example(outputs=(dataclasses.replace(TENSOR, buffer=7),)), "not allocated"),
        (example(kernels=(KERNEL, KERNEL)), "share one identity"),
    ],
)
def test_plans_that_do_not_add_up_are_refused(plan, says):
    with pytest.raises(p.PlanError, match=says):
        parse_plan(dump_plan(plan))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"null",
        b"{" * 100_000,
        b"[" * 100_000,
        b'{"version": 1}',
        b'{"version": NaN}',
        b"\xff\xfe",
        b" " * (p.MAX_PLAN_BYTES + 1),
    ],
)
def test_bytes_that_are_no_plan_are_refused(data):
    with pytest.raises(p.PlanError):
        parse_plan(data)


def paths(value, path=()):
    yield path
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, inner in items:
        yield from paths(inner, (*path, key))


JSON = json.loads(dump_plan(example()))
JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=8),
    st.lists(st.integers(-1, 3), max_size=4),
    st.dictionaries(st.text(max_size=4), st.integers(0, 2), max_size=2),
)


@settings(max_examples=examples(1000), deadline=None)
@given(path=st.sampled_from(sorted(set(paths(JSON)) - {()}, key=str)), junk=JUNK)
def test_any_field_replaced_by_junk_is_refused_or_still_a_sound_plan(path, junk):
    value = json.loads(json.dumps(JSON))
    at = value
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = junk
    try:
        plan = parse_plan(json.dumps(value).encode())
    except p.PlanError:
        return
    assert parse_plan(dump_plan(plan)) == plan


@given(st.binary(max_size=200))
def test_random_bytes_never_do_more_than_be_refused(data):
    with pytest.raises(p.PlanError):
        parse_plan(data)


# -- structures ----------------------------------------------------------------------------------

MAP = p.TensorMap(0, 0, "float32", (8, 4), (32,), (8, 4), (1, 1))


def with_struct(data, placed, size=None):
    """A plan that launches a kernel with one structure."""
    kernel = dataclasses.replace(KERNEL, param_bytes=(len(data) if size is None else size,))
    launch = p.Launch(KERNEL.hash, (1, 1, 1), (1, 1, 1), (p.Struct(data, placed),))
    y = p.TensorRef(1, 0, (4, 8), (8, 1), "float32")
    return example(ops=(p.Alloc(1), launch), outputs=(y,), kernels=(kernel,))


@st.composite
def structures(draw):
    """Bytes, with pointers and tensor maps in them."""
    data, placed = bytearray(), []
    for kind in draw(st.lists(st.sampled_from(["bytes", "pointer", "map"]), min_size=1)):
        if kind == "bytes":
            data += draw(st.binary(min_size=1, max_size=9))
            continue
        size, align = (8, 8) if kind == "pointer" else (128, 64)
        data += bytes(-len(data) % align)
        placed.append((len(data), p.Pointer(0, draw(st.integers(0, 128))) if size == 8 else MAP))
        data += bytes(size)
    return bytes(data), tuple(placed)


@given(structures())
def test_structures_survive_a_round_trip(structure):
    plan = with_struct(*structure)
    assert parse_plan(dump_plan(plan)) == plan
    (arg,) = plan.launches[0].args
    assert argument_bytes(arg) == len(arg.data)
    assert [*placed_arguments([arg])] == [value for _, value in arg.placed]


@given(structures(), st.integers(-9, 9), st.integers(1, 255))
def test_structures_that_do_not_add_up_are_refused(structure, shift, written):
    data, placed = structure
    size = {p.Pointer: (8, 8), p.TensorMap: (128, 64)}
    for i, (offset, value) in enumerate(placed):
        nbytes, align = size[type(value)]
        moved = (*placed[:i], (offset + shift, value), *placed[i + 1 :])
        if (offset + shift) % align or not 0 <= offset + shift <= len(data) - nbytes:
            with pytest.raises(p.PlanError):
                parse_plan(dump_plan(with_struct(data, moved)))
        with pytest.raises(p.PlanError, match="behind byte"):
            parse_plan(dump_plan(with_struct(data, (*placed[: i + 1], *placed[i:]))))
        over = data[:offset] + bytes([written]) + data[offset + 1 :]
        with pytest.raises(p.PlanError, match="over zeros"):
            parse_plan(dump_plan(with_struct(over, placed)))


@pytest.mark.parametrize(
    ("data", "placed", "size", "says"),
    [
        (b"", (), None, "structure of 0 bytes"),
        (bytes(32_768), (), None, "structure of 32768 bytes"),
        (bytes(16), ((0, p.Pointer(0, 0)),), 24, "parameters of"),
        (bytes(8), ((0, p.Null()),), None, "has a Null: expected bytes"),
        (bytes(8), ((0, p.Pointer(0, 129)),), None, "bytes 129 to 129 of buffer 0"),
        (bytes(8), ((0, p.Pointer(2, 0)),), None, "not allocated"),
        (bytes(128), ((0, dataclasses.replace(MAP, offset=64)),), None, "outside of buffer 0"),
        (bytes(8), ((0, p.Struct(bytes(8), ())),), None, "has a Struct: expected bytes"),
    ],
)
def test_what_is_wrong_with_a_structure_is_said(data, placed, size, says):
    with pytest.raises(p.PlanError, match=says):
        parse_plan(dump_plan(with_struct(data, placed, size)))
