"""Forks that trace several cases each: what one case leaves behind does not reach the next."""

import os
import time

import pytest
from kagent_sandbox.builder.case_forks import CaseForks
from kagent_sandbox.data.build import BuildCase, BuildRequest, Built, TensorSpec
from kagent_sandbox.data.plan_json import dump_plan
from kagent_sandbox.data.verdict import Rejected, Status

CASES = [BuildCase(f"case{i}", (), ()) for i in range(6)]


def results(say, forks=1, cases=CASES):
    """What comes of a trace that says `say(case, nth)` of the nth case of its fork."""

    def trace(traced, channel, _compiler):
        for nth, case in enumerate(traced):
            answer, plan = say(case, nth)
            channel.send({**answer, "pid": os.getpid()}, [plan])
            if "rejected" in answer:
                break
        os._exit(0)

    return list(CaseForks(forks, trace, None, 5.0, 5.0, time.monotonic() + 60).results(cases))


@pytest.mark.parametrize("forks", [1, 2, 9])
def test_a_fork_traces_many_cases_and_their_results_come_in_order(forks):
    found = results(lambda case, _: ({"hashes": []}, case.name.encode()), forks)
    assert [case for case, _ in found] == CASES
    assert [m.blobs[0].decode() for _, m in found] == [c.name for c in CASES]
    assert len({m.obj["pid"] for _, m in found}) == min(forks, len(CASES))


def test_plans_that_depend_on_earlier_cases_are_made_alone_all_of_them():
    found = results(lambda _, nth: ({"hashes": []}, b"%d" % nth))
    assert [m.blobs[0] for _, m in found] == [b"0"] * len(CASES)
    assert len({m.obj["pid"] for _, m in found}) == len(CASES)


def test_a_case_that_fails_after_others_has_another_try_alone():
    def odd_ones_fail_second(case, nth):
        fails = nth > 0 and case.name[-1] in "135"
        return ({"rejected": "no"} if fails else {"hashes": []}), case.name.encode()

    found = results(odd_ones_fail_second)
    assert [m.blobs[0].decode() for _, m in found] == [c.name for c in CASES]
    assert all("hashes" in m.obj for _, m in found)


def test_what_fails_alone_is_told_of_that_case_and_the_others_are_traced():
    def third_fails(case, _):
        return ({"rejected": "no"} if case.name == "case2" else {"hashes": []}), b""

    found = results(third_fails)
    assert ["rejected" in m.obj for _, m in found] == [False, False, True, False, False, False]


def test_a_fork_that_dies_is_the_fault_of_the_case_that_it_was_at():
    def dies(case, _):
        if case.name == "case3":
            os._exit(7)
        return {"hashes": []}, b""

    found = results(dies)
    assert [isinstance(m, Rejected) for _, m in found] == [False] * 3 + [True] + [False] * 2
    assert "that traced case3 ended itself with status 7" in found[3][1].message


def test_the_time_limit_is_that_of_each_case():
    def slow(case, _):
        time.sleep(60 if case.name == "case1" else 0.2)
        return {"hashes": []}, b""

    def trace(traced, channel, _compiler):
        for case in traced:
            answer, plan = slow(case, 0)
            channel.send(answer, [plan])
        os._exit(0)

    forks = CaseForks(1, trace, None, 5.0, 0.6, time.monotonic() + 60)
    found = [m for _, m in forks.results(CASES[:2])]
    assert found[1].status is Status.TIMEOUT
    assert "host code of case1 ran for 0.6 s" in found[1].message


# -- host code with a memory -----------------------------------------------------------------------

KERNEL = """
import torch
from kagent_sandbox.lang import cpp_kernel

twice = cpp_kernel("twice", r\"\"\"
#include <cstdint>
extern "C" void twice(const float* x, float* y, int64_t n) {
  for (int64_t i = 0; i < n; ++i) y[i] = 2 * x[i];
}
\"\"\")
"""
PLAIN = """
def f(x):
    y = torch.empty_like(x)
    twice(x, y, x.numel())
    return y
"""
KEEPS_A_TENSOR = """
kept = {}
def f(x):
    z = kept.setdefault("z", torch.empty(1000))
    y = torch.empty_like(x)
    twice(x, z, x.numel())
    twice(x, y, x.numel())
    return y
"""
COUNTS = """
calls = []
def f(x):
    calls.append(1)
    y = torch.empty_like(x)
    for _ in calls:
        twice(x, y, x.numel())
    return y
"""


def built(builder, body):
    cases = tuple(
        BuildCase(
            f"of{n}",
            (TensorSpec("x", (n,), (1,), "float32"),),
            (TensorSpec("y", (n,), (1,), "float32"),),
        )
        for n in (3, 70, 500)
    )
    found = builder.build(BuildRequest(KERNEL + body, "f", "cpu", cases, ()))
    assert isinstance(found, Built), found
    return [dump_plan(found.plans[0, c.name]) for c in cases], found


def test_host_code_that_counts_its_calls_has_the_plans_of_a_first_call(builder):
    assert built(builder, COUNTS)[0] == built(builder, PLAIN)[0]


def test_a_tensor_that_was_kept_is_made_anew_for_every_case(builder):
    plans = built(builder, KEEPS_A_TENSOR)[1].plans.values()
    assert [len([b for b in plan.buffers if b.kind == "scratch"]) for plan in plans] == [2, 2, 2]
