import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kagent_sandbox.data.device import Ceilings, DeviceFacts
from kagent_sandbox.data.plan import Alloc, Buffer, Launch, Null, Plan, Pointer, Scalar
from kagent_sandbox.data.records import RecordError, from_json, to_json
from kagent_sandbox.data.verdict import (
    CaseTiming,
    Comparison,
    Passed,
    Rejected,
    Stage,
    Status,
    Verdict,
)


@dataclass(frozen=True)
class Holder:
    verdict: Verdict
    where: Path
    by_case: Mapping[tuple[int, str], int] = field(default_factory=dict)
    blob: bytes = b""
    number: int | float | None = None
    stage: Stage | None = None


def through(record):
    return from_json(type(record), json.loads(json.dumps(to_json(record), allow_nan=False)))


TIMING = CaseTiming("a", 1.5, 1.0, math.inf, 30, 0.9, 1000.0, 0.0, baseline_us=None)
PASSED = Passed(
    (TIMING,),
    (),
    1.1,
    0.01,
    configs=({"BLOCK": 4, "on": True},),
    versus=Comparison("3", 1, 1, 1, 1),
)


@pytest.mark.parametrize(
    "record",
    [
        PASSED,
        Rejected(Stage.CHECK, Status.SUSPECT, "too fast", "case"),
        Holder(PASSED, Path("/x"), {(0, "a"): 1}, b"\0\xff", 3),
        Holder(Rejected(Stage.PARSE, Status.POLICY, "no"), Path("y"), number=2.0),
        Holder(PASSED, Path("z"), stage=Stage.BUILD),
        DeviceFacts("cpu", "n", "cpu", "k", 1, 2, 3, 4.0),
        Ceilings(1.0, 2.0, 3.0, {"bfloat16": 4.0}),
        Plan(
            "cpu",
            (Buffer(0, "scratch", 4),),
            (
                Alloc(0),
                Launch("ab", (1, 1, 1), (1, 1, 1), (Pointer(0, 0), Null(), Scalar("f32", 1))),
            ),
            (),
            (),
        ),
    ],
)
def test_a_record_survives(record):
    assert through(record) == record


def test_int_stays_int_beside_float():
    assert type(through(Holder(PASSED, Path(), number=3)).number) is int
    assert type(through(Holder(PASSED, Path(), number=3.0)).number) is float


@given(
    st.floats(), st.text(), st.binary(), st.dictionaries(st.text(), st.integers() | st.booleans())
)
def test_any_value_survives(number, text, blob, config):
    record = Holder(Passed((), (), number, 0.0, configs=(config,)), Path("p"), {(1, text): 2}, blob)
    back = through(record)
    assert repr(back) == repr(record)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"extra": 1}, "unknown keys"),
        ({"where": 3}, "Holder.where: expected str"),
        ({"verdict": {"is": "Other"}}, "none of"),
        ({"number": "x"}, "Holder.number"),
        ({"blob": "?"}, "base64"),
        ({"by_case": 3}, "expected a mapping"),
    ],
)
def test_what_does_not_fit_is_named(change, words):
    data = to_json(Holder(PASSED, Path("x"))) | change
    with pytest.raises(RecordError, match=words):
        from_json(Holder, data)


def test_missing_field_is_named():
    with pytest.raises(RecordError, match="lacks \\['verdict'\\]"):
        from_json(Holder, {"where": "x"})


def test_missing_field_with_default_takes_it():
    data = to_json(Holder(PASSED, Path("x"), blob=b"z"))
    del data["blob"]
    assert from_json(Holder, data).blob == b""


def test_a_non_finite_number_without_a_declared_type_is_refused():
    with pytest.raises(RecordError, match="no JSON form"):
        to_json(Passed((), (), 1.0, 0.0, configs=({"x": math.nan},)))
