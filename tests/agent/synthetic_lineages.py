"""Synthetic candidates and lineages: verdicts of given times, nothing was built or measured."""

from dataclasses import replace

from hypothesis import strategies as st
from kagent.runs.lineage import Candidate, Facts, Lineage, Operator, Proposal
from kagent_sandbox.data.compiled import Loop, Remark
from kagent_sandbox.data.verdict import CaseTiming, Comparison, Passed, Rejected, Stage, Status


def passed(times, **more):
    timings = tuple(
        CaseTiming(n, t, t, t, 30, 0.5, 1.0, 0.0, baseline_us=100.0) for n, t in times.items()
    )
    score = 1.0
    for t in times.values():
        score *= (100.0 / t) ** (1 / len(times))
    return Passed(timings, (), score, 0.0, **more)


def candidate(number, source, verdict, name="cpp_plain"):
    return Candidate(Proposal(number, (), Operator.SEED, name, source, ""), verdict)


def child(number, time_us, *, parents=(0,), operator=Operator.TUNE, versus=None, build_s=1.0):
    verdict = passed({"short": time_us}, versus=versus)
    proposal = Proposal(number, parents, operator, "cpp_x", f"x = {number}", "")
    return Candidate(proposal, verdict, Facts("t", f"w{number}", 1, build_s))


def failure(
    number, *, parents=(0,), operator=Operator.TUNE, status=Status.COMPILE_ERROR, origin=None
):
    source = f"y = {number}"
    proposal = Proposal(number, parents, operator, "cpp_x", source, "", origin=origin)
    return Candidate(proposal, Rejected(Stage.BUILD, status, "no"))


LOOP = Loop("rows", 0x40, 0, True, 9, {"HGMMA": 1, "LDG 16": 2}, 1, (5, 2), {"issue": 9.0})
REMARK = Remark("rows", "ptxas: (C7511) wgmma.mma_async instructions are serialized")


def with_compiler_output(candidate):
    """The same as it is after a build in which compilers had something to say."""
    facts = Facts("t", f"w{candidate.id}", 1, 1.0, remarks=(REMARK,), loops=(LOOP,))
    return replace(candidate, facts=facts)


SEED = candidate(0, "x = 0", passed({"short": 100.0}))


OPERATORS = (Operator.TUNE, Operator.CROSSOVER, Operator.STRUCTURE)


@st.composite
def lineages(draw):
    """A seed and up to 14 descendants, some promoted, some rejected."""
    lineage = Lineage([SEED])
    for number in range(1, draw(st.integers(1, 15))):
        parents = (draw(st.integers(0, number - 1)),)
        operator = draw(st.sampled_from((*OPERATORS, Operator.REPAIR)))
        if draw(st.booleans()):
            against = str(lineage.incumbent.id)
            versus = Comparison(against, 1.1, 1.0, 1.2, draw(st.sampled_from([0.5, 0.96])))
            time_us = draw(st.floats(20, 400))
            lineage.record(
                child(number, time_us, parents=parents, operator=operator, versus=versus)
            )
        else:
            status = draw(st.sampled_from([Status.TIMEOUT, Status.DUPLICATE]))
            lineage.record(failure(number, parents=parents, operator=operator, status=status))
    return lineage
