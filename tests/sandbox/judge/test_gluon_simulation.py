"""Gluon kernels without a GPU: right ones pass, and what Hopper would punish is found and told."""

import re
from pathlib import Path

import pytest
import torch
import triton.language as tl
from hypothesis import given
from hypothesis import strategies as st
from kagent_sandbox.data.case import Case
from kagent_sandbox.data.task import load_task
from kagent_sandbox.data.verdict import Status
from kagent_sandbox.judge.gluon.language import _assembly
from kagent_sandbox.judge.gluon.schedule import NotSimulated, ProgramRun, SimulatedFault
from kagent_sandbox.judge.gluon.values import RegisterValue, torch_type
from kagent_sandbox.judge.interpreter import Interpreted, Interpreter

ROOT = Path(__file__).parents[3]
# On three processors a block has several tiles of queries, of more than one band of heads.
ATTENTION = (
    (ROOT / "seeds" / "attention" / "gluon_hopper.py")
    .read_text()
    .replace("torch.cuda.get_device_properties(q.device).multi_processor_count", "3")
)
ROWS = (ROOT / "corpus" / "honest" / "rows_gluon.py").read_text()
# More tiles of keys than stages, a last tile that is cut off, two heads to a block.
LONG = {"B": 1, "H": 4, "Hkv": 2, "S": 449, "D": 64}


@pytest.fixture(scope="module")
def attention(shared):
    task = load_task(ROOT / "seeds" / "attention")
    cases = tuple(
        Case(name=f"causal_{causal}", dtype="bfloat16", **LONG, causal=causal)
        for causal in (True, False)
    )
    gpu = task.gpu.model_copy(update={"check": cases, "hidden_check": ()})
    few = task.model_copy(update={"gpu": gpu})
    with Interpreter(few, 1) as interpreter:
        yield interpreter


@pytest.fixture(scope="module")
def rows(shared):
    with Interpreter(load_task(ROOT / "corpus" / "tasks" / "rows"), 1) as interpreter:
        yield interpreter


def changed(source, *edits):
    for old, new in edits:
        assert source.count(old) >= 1, old
        source = source.replace(old, new)
    return source


@pytest.mark.parametrize(
    "tunables",
    [
        (),
        (("KEYS = 128", "KEYS = 64"), ("STAGES_64 = 2", "STAGES_64 = 3")),
        (("GROUPS_CAUSAL_64 = 2", "GROUPS_CAUSAL_64 = 3"), ("BAND_MOST = 33", "BAND_MOST = 1")),
        (("CHAINS_64 = 4", "CHAINS_64 = 1"), ("TURNS_64 = True", "TURNS_64 = False")),
    ],
)
def test_a_warp_specialised_kernel_computes_its_task(attention, tunables):
    found = attention.interpret(changed(ATTENTION, *tunables))
    assert isinstance(found, Interpreted), found
    assert {e.case for e in found.errors} == {"causal_True", "causal_False"}
    assert not found.skipped
    assert not found.not_simulated
    assert max(e.share_of_tolerance for e in found.errors) <= 1


KEYS_READ = "        scores = warpgroup_mma_wait(1, deps=[scores])\n"
KEYS_FREE = "        mbarrier.arrive(k_empty.index(ahead), count=1)\n"
VALUES_READ = "        acc, left, part = warpgroup_mma_wait(0, deps=[acc, left, part])\n"
VALUES_FREE = "        mbarrier.arrive(v_empty.index(stage), count=1)\n"
WRONG = {
    "keys are released before the product has read them": (
        KEYS_READ + KEYS_FREE,
        KEYS_FREE + KEYS_READ,
    ),
    "values are released before the product has read them": (
        VALUES_READ + VALUES_FREE,
        VALUES_FREE + VALUES_READ,
    ),
    "the mask is lost": ("keep = col[None, :] < seq\n", "keep = col[None, :] >= 0\n"),
    "a result is overwritten while it leaves": (
        "    tma.store_wait(0)  # the last",
        "    # the last",
    ),
}


@pytest.mark.parametrize("bug", WRONG)
def test_what_overwrites_too_early_or_reads_too_early_is_wrong(attention, bug):
    found = attention.interpret(changed(ATTENTION, WRONG[bug]))
    assert found.status is Status.INCORRECT_NUMERICAL, found


FAULTS = {
    "values are not waited for": (
        (
            "        mbarrier.wait(v_full.index(stage), (n // STAGES) & 1)\n        values",
            "        values",
        ),
        "issued on shared memory that a TMA copy is still filling",
    ),
    "the producer's parity is off by one": (
        ("((n // STAGES) & 1) ^ 1)", "((n // STAGES) & 1))"),
        r"hangs: nobody can go on; .*_produce \(partition 2\) for parity 0 of barrier 0 of 2",
    ),
    "a consumer does not arrive": (
        (VALUES_FREE, ""),
        r"_produce \(partition \d\) for parity . of barrier . of 2 \(allocated in line \d+\)",
    ),
    "a consumer arrives twice": (
        (KEYS_READ, KEYS_READ + KEYS_FREE),
        r"gets 1 arrivals, and its phase \d+ waits for 0 of \d|hangs",
    ),
    "a barrier is not initialised": (
        ("        mbarrier.init(turn.index(w), count=1)\n", ""),
        "is used and was not initialised",
    ),
    "stores are not waited for at the end": (
        ("    tma.store_wait(0)\n\n\n", "\n\n"),
        r"ends and has not waited for 1 TMA stores",
    ),
    "scores are used before they are there": (
        (KEYS_READ, KEYS_READ.replace("(1, ", "(2, ")),
        "used .* before warpgroup_mma_wait has it",
    ),
}


@pytest.mark.parametrize("bug", FAULTS)
def test_what_hangs_or_is_undefined_is_told(attention, bug):
    edit, said = FAULTS[bug]
    found = attention.interpret(changed(ATTENTION, edit))
    assert found.status is Status.RUNTIME_ERROR, found
    assert re.search(said, found.message), found.message


def test_plain_loads_are_held_against_their_tensors(rows):
    assert isinstance(rows.interpret(ROWS), Interpreted)
    found = rows.interpret(changed(ROWS, ("+ offsets, mask=inside, other", "+ offsets, other")))
    assert found.status in (Status.RUNTIME_ERROR, Status.INCORRECT_NUMERICAL)
    found = rows.interpret(changed(ROWS, ("inside = offsets < columns", "inside = offsets >= 0")))
    assert "of x_ptr is asked for" in found.message or "of y_ptr is asked for" in found.message


@pytest.mark.nightly
def test_sums_by_atomics_are_added_in_any_number(rows):
    """Each element is computed once, or twice with half the value."""
    atomic = changed(
        ROWS, ("gl.store(", "gl.atomic_add("), ("torch.empty_like(x)", "torch.zeros_like(x)")
    )
    assert isinstance(rows.interpret(atomic), Interpreted)
    twice = changed(atomic, ("0, BLOCK, layout=layout)", "0, 2 * BLOCK, layout=layout) // 2"))
    assert isinstance(rows.interpret(twice), Interpreted)
    lost = changed(twice, ("gl.atomic_add(", "gl.store("))
    assert rows.interpret(lost).status is Status.INCORRECT_NUMERICAL


HALVES = """    low, high = gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;", "=h,=h,r", [y.to(gl.int32, bitcast=True)],
        dtype=(gl.int16, gl.int16), is_pure=True, pack=1,
    )
    low, high = gl.split(gl.join(low, high))
    word = (high.to(gl.int32) << 16) | (low.to(gl.int32) & 0xFFFF)
    y = word.to(gl.float32, bitcast=True)
"""


def test_words_are_taken_apart_and_put_together(rows):
    store = "    gl.store(y_ptr"
    found = rows.interpret(changed(ROWS, (store, HALVES + store)))
    assert isinstance(found, Interpreted), found
    assert not found.not_simulated
    assert max(e.share_of_tolerance for e in found.errors) <= 1
    swapped = HALVES.replace("low, high = gl.split", "high, low = gl.split")
    assert (
        rows.interpret(changed(ROWS, (store, swapped + store))).status is Status.INCORRECT_NUMERICAL
    )
    unknown = HALVES.replace("mov.b32 {$0, $1}", "mov.b32 {$1, $0}")
    found = rows.interpret(changed(ROWS, (store, unknown + store)))
    assert "inline assembly 'mov.b32 {$1, $0}, $2;'" in found.not_simulated


@given(
    pairs=st.lists(st.tuples(*[st.floats(width=32)] * 2), min_size=1, max_size=9),
    halves=st.sampled_from([("bf16x2", tl.bfloat16), ("f16x2", tl.float16)]),
)
def test_pairs_in_a_word_are_rounded_to_the_nearest(pairs, halves):
    name, kind = halves
    low, high = (RegisterValue(torch.tensor(v)) for v in zip(*pairs, strict=True))
    words = _assembly(
        f"cvt.rn.{name}.f32 $0, $2, $1;", "=r,r,r", [low, high], tl.int32, is_pure=True, pack=1
    )
    assert words.dtype == tl.int32
    found = _assembly(
        "mov.b32 {$0, $1}, $2;", "=h,=h,r", [words], (tl.int16, tl.int16), is_pure=True, pack=1
    )
    for value, half in zip((low, high), found, strict=True):
        expected = value.data.to(torch_type(kind))
        torch.testing.assert_close(
            half.to(kind, bitcast=True).data, expected, rtol=0, atol=0, equal_nan=True
        )


def test_other_roundings_are_not_simulated():
    value = RegisterValue(torch.ones(2))
    with pytest.raises(NotSimulated, match="rtz"):
        value.to(tl.bfloat16, fp_downcast_rounding="rtz")


def test_what_is_not_simulated_is_neither_right_nor_wrong(rows):
    found = rows.interpret(changed(ROWS, ("gl.exp(x - ", "gl.umulhi(x, x) + gl.exp(x - ")))
    assert isinstance(found, Interpreted), found
    assert "language.umulhi is not simulated" in found.not_simulated
    assert found.not_simulated.startswith("line 16: ")
    assert not found.errors
    assert len(found.skipped) >= 4


# -- the schedule ----------------------------------------------------------------------------------


def test_partitions_take_turns_and_a_fault_ends_all():
    schedule, seen = ProgramRun(0), []

    def good():
        for i in range(3):
            seen.append(i)
            schedule.pause()

    schedule.run([("a", good), ("b", good)])
    assert sorted(seen) == [0, 0, 1, 1, 2, 2]

    def bad():
        schedule.pause()
        raise NotSimulated("this")

    with pytest.raises(NotSimulated, match="this"):
        schedule.run([("waits", lambda: waits_for_ever(schedule)), ("bad", bad)])


def waits_for_ever(schedule):
    schedule.wait(lambda: False, lambda: "nothing")


def test_partitions_that_all_wait_hang_at_once():
    schedule = ProgramRun(1)
    work = [(name, lambda: waits_for_ever(schedule)) for name in "ab"]
    with pytest.raises(SimulatedFault, match="hangs: nobody can go on; a for nothing; b for"):
        schedule.run(work)


@pytest.mark.parametrize("seed", [0, 1])
def test_copies_land_and_a_program_goes_on(seed):
    schedule, landed = ProgramRun(seed), []
    schedule.later(lambda: landed.append(1))
    schedule.wait(lambda: bool(landed), lambda: "a copy")
    schedule.finish()
    assert landed == [1]
