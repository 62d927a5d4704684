import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kagent_sandbox.data.plan import Alloc, Buffer, Free, Plan, TensorRef
from kagent_sandbox.judge.arena.layout import ALIGN, GUARD, lay_out, lay_out_many


@st.composite
def plans(input_set):
    """Plans of inputs, allocations and frees in some order."""
    buffers = [
        Buffer(i, "input", input_set(st.integers(0, 5000)), f"x{i}")
        for i in range(input_set(st.integers(0, 3)))
    ]
    ops, live = [], []
    for _ in range(input_set(st.integers(0, 30))):
        if live and input_set(st.booleans()):
            ops.append(Free(live.pop(input_set(st.integers(0, len(live) - 1)))))
        else:
            size = input_set(st.sampled_from([0, 1, 255, 4096, 10_000]))
            buffers.append(Buffer(len(buffers), "scratch", size))
            ops.append(Alloc(buffers[-1].id))
            live.append(buffers[-1].id)
    return Plan("cpu", tuple(buffers), tuple(ops), (), ())


@given(plans(), st.integers(0, 10_000), st.sampled_from([0, 64]))
@settings(deadline=None)
def test_live_buffers_and_guards_never_overlap(plan, start, beyond):
    layout = lay_out(plan, start, beyond=beyond)
    size = {b.id: b.nbytes for b in plan.buffers}
    live = {b.id for b in plan.buffers if b.kind == "input"}
    steps = [set(live)]
    for op in plan.ops:
        live = live | {op.buffer} if isinstance(op, Alloc) else live - {op.buffer}
        steps.append(set(live))
    guards = list(layout.guards)
    for alive in steps:
        ranges = guards + [
            (layout.offsets[b], layout.offsets[b] + size[b]) for b in alive if size[b]
        ]
        ranges.sort()
        for (_, stop), (begin, _) in itertools.pairwise(ranges):
            assert stop <= begin
    for buffer, at in layout.offsets.items():
        assert at % ALIGN == beyond
        ends = at + size[buffer]
        # Directly before and directly after every buffer there is a guard band.
        assert any(g0 <= at - 1 < g1 and g1 - g0 >= GUARD for g0, g1 in guards)
        assert any(g0 == ends and g1 - g0 >= GUARD for g0, g1 in guards)
    assert layout.start == start
    assert all(start <= a <= b <= layout.stop for a, b in guards)


def test_results_lie_in_the_same_places_whatever_a_plan_allocates_before():
    """Or a plan's scratch memory could lie where another's result does, if it chooses so."""
    x, y, z = Buffer(0, "input", 5000, "x"), Buffer(1, "scratch", 5000), Buffer(2, "scratch", 100)
    more = Buffer(3, "scratch", 5000)
    results = tuple(TensorRef(b, 0, (25,), (1,), "float32") for b in (1, 2, 1))
    plain = Plan("cpu", (x, y, z), (Alloc(1), Alloc(2)), results, ())
    other = Plan("cpu", (x, more, z, y), (Alloc(3), Alloc(2), Free(3), Alloc(1)), results, ())
    one, two = lay_out(plain), lay_out(other)
    assert {b: two.offsets[b] for b in one.offsets} == one.offsets
    assert two.offsets[3] > max(one.offsets.values())
    assert one.scratch == two.scratch[:2]


def test_a_freed_slot_is_reused_by_a_buffer_of_its_size():
    buffers = tuple(Buffer(i, "scratch", n) for i, n in enumerate([1000, 1000, 2000]))
    ops = (Alloc(0), Free(0), Alloc(1), Alloc(2))
    layout = lay_out(Plan("cpu", buffers, ops, (), ()))
    assert layout.offsets[0] == layout.offsets[1] != layout.offsets[2]
    assert len(layout.scratch) == 2


@given(plans(), st.integers(1, 4), st.integers(0, 3))
@settings(deadline=None)
def test_placements_are_disjoint_and_equally_far_apart(plan, count, spare):
    pitch = lay_out(plan).stop + spare * ALIGN
    layouts = lay_out_many(plan, count, pitch)
    assert [x.start for x in layouts] == [i * pitch for i in range(count)]
    for one, other in itertools.pairwise(layouts):
        assert one.stop <= other.start
        moved = {b: at + pitch for b, at in one.offsets.items()}
        assert moved == other.offsets


def test_a_pitch_that_is_too_small_is_refused():
    plan = Plan("cpu", (Buffer(0, "input", 10_000, "x"),), (), (), ())
    with pytest.raises(ValueError, match="pitch"):
        lay_out_many(plan, 2, ALIGN)
