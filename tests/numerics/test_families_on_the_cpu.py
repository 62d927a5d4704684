"""Slightly wrong C++ kernels fail and their right twins pass, for every task."""

import pytest
from families import RUN_SEED, Judges, a_judge, built_and_checked, expect_verdict, with_runs
from kagent_sandbox.device.cpu.backend import CpuBackend
from kagent_sandbox.judge.check.cases import check_cases


@pytest.fixture(scope="module")
def cpu_judges(untimed):
    judges = Judges(lambda task, stack: a_judge(task, CpuBackend(), stack))
    with judges.open:
        yield judges


@pytest.mark.sampled(of="member", one_in=20)
@pytest.mark.parametrize("member", with_runs("cpu"))
def test_on_the_cpu(member, builder, cpu_judges):
    judge = cpu_judges.of(member.task)
    cases = check_cases(judge.task, "cpu", RUN_SEED)
    expect_verdict(member, built_and_checked(builder, judge, cases, member.text))
